"""A process of a run, started by the launcher tests: python launched.py JOB [ARGUMENT]."""

import hashlib
import os
import signal
import subprocess
import sys
import threading

from sharding.launcher import Worker, initialize_jax, join

LAYERS, WIDTH, CHUNK, UNITS = 6, 32, 8, 7


def wait_forever() -> None:
    threading.Event().wait()


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one write: lines of several processes do not mix


def plain(job: str, argument: str) -> None:
    """Jobs without JAX."""
    if job == "alone":  # never joins
        say("alone")
        return
    with join() as worker:
        if job == "gpus":
            say(os.environ["CUDA_VISIBLE_DEVICES"])
            return
        if job == "values":
            worker.set(f"from {worker.rank}", str(worker.rank * 10))
            values = [worker.get(f"from {rank}", 20.0) for rank in range(worker.world)]
            worker.barrier("end", 20.0)
            say(f"{worker.rank}/{worker.world} {worker.local_rank} {' '.join(values)}")
            return
        # The others wait, with a child each, until the first one ends in the way of the job.
        child = subprocess.Popen([sys.executable, "-c", "import threading as t; t.Event().wait()"])
        say(f"started {worker.rank} {child.pid}")
        worker.barrier("ready", 20.0)
        if worker.rank != int(argument):
            wait_forever()
        if job == "code":
            os._exit(7)
        if job == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if job == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if job == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if job == "twice":  # ends when it is interrupted a second time
            signal.signal(signal.SIGINT, interrupted_once)
        if job == "leave":  # ends well, but leaves its child
            os._exit(0)
        say("waiting")
        wait_forever()


def interrupted_once(number: int, frame: object) -> None:
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    say("interrupted")


def pipeline(worker: Worker, kinds: list[str], die_at: int) -> None:
    """The toy model with one stage per process; the last one prints a sha per kind of hand-off."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sharding import handoff
    from sharding.pipeline import Pipeline, Stage, Unit

    @jax.jit
    def layer(weight, state, x):
        y = jnp.tanh(jnp.dot(x, weight, precision=jax.lax.Precision.HIGHEST) + state)
        return x + y, state + y.mean(axis=0, keepdims=True)

    rank, last = worker.rank, worker.world - 1
    bounds = [LAYERS * i // worker.world for i in range(worker.world + 1)]
    device = jax.local_devices()[0]
    rng = np.random.default_rng(6)
    weights = rng.standard_normal((LAYERS, WIDTH, WIDTH), np.float32) / 4
    chunks = rng.standard_normal((UNITS, CHUNK, WIDTH), np.float32)
    devices = [next(d for d in jax.devices() if d.process_index == r) for r in range(worker.world)]

    def payload(kind: str, source: int) -> handoff.Payload:
        if kind == "socket":
            return handoff.SocketPayload()
        if kind == "transfer":
            return transfers
        if kind == "permute":
            return handoff.PermutePayload(devices[source], devices[source + 1])
        return handoff.DevicePutPayload(devices[source], devices[source + 1])

    transfers = handoff.TransferPayload(device, worker.host)
    for request, kind in enumerate(kinds):
        states = [jnp.zeros((1, WIDTH)) for _ in range(bounds[rank], bounds[rank + 1])]

        def run(microbatch, chunk, x, states=states):
            if rank == last and microbatch == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            for i, weight in enumerate(weights[bounds[rank] : bounds[rank + 1]]):
                x, states[i] = layer(weight, states[i], x)
            return x

        receiver = sender = None
        if rank:
            listener = handoff.Listener(worker.host)
            worker.set(f"{kind} {rank}", listener.address)
        if rank < last:
            address = worker.get(f"{kind} {rank + 1}", 60.0)
            sender = handoff.connect(address, payload(kind, rank), stage=rank + 1, request=request)
        if rank:
            receiver = listener.accept(payload(kind, rank - 1), device, stage=rank, request=request)
        outputs = []

        def source(microbatch, chunk, receiver=receiver):
            return jnp.asarray(chunks[microbatch]) if not receiver else receiver.receive(microbatch)

        def sink(microbatch, chunk, x, sender=sender, outputs=outputs):
            if sender:
                sender.send(microbatch, x)
            else:
                outputs.append(np.asarray(x))

        Pipeline([Stage(f"stage {rank}", run, device)]).run(
            [Unit(i, 0) for i in range(UNITS)], source, sink
        )
        if sender:
            sender.flush()
        else:
            sha = hashlib.sha256(np.concatenate(outputs).tobytes()).hexdigest()
            say(f"{kind} {sha} over {worker.world}")
        worker.barrier(f"done {kind}", 60.0)
        for end in (receiver, sender):
            if end:
                end.close()


def main(job: str, argument: str = "") -> None:
    if not job.startswith("pipeline"):
        plain(job, argument)
        return
    os.environ.pop("XLA_FLAGS", None)
    with join() as worker:
        initialize_jax(worker)
        die_at = int(argument) if job == "pipeline_dies" else -1
        kinds = ["socket"] if job == "pipeline_dies" else argument.split(",")
        pipeline(worker, kinds, die_at)


if __name__ == "__main__":
    main(*sys.argv[1:])
