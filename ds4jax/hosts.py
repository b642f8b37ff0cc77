"""A run in several processes: what they agree on at the start, and what passes between them.

The same command runs in every process, started by `sharding.launcher`. Each process reads the
prompts and cuts them into micro-batches like the others, loads the layers of its own stages, takes
a micro-batch from the process before, and hands it to the one after. What is handed over are the
streams and the accounts of the stages so far; nothing else leaves a process. The last process has
the head: it alone makes outputs, and its accounts are those of all. The first one decides when to
stop.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import types
import typing
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from ds4jax import admission
from ds4jax import plan as planning
from ds4jax.checkpoint import keys, state
from ds4jax.checkpoint.source import TensorSource
from ds4jax.config import ConfigError
from ds4jax.machine import Table, joined_machine, local_machine
from ds4jax.passes import PassReport
from ds4jax.report import token_hash
from ds4jax.run_config import PipelineConfig, RunConfig
from sharding import handoff, launcher
from streaming.pinned import PinReport

_YIELD_S = 5.0  # a process that lost its peer waits for the launcher to end it
_LEADER_S = 1.0  # a first process that fails lets others end: JAX aborts those that it leaves


@dataclasses.dataclass(frozen=True)
class Part:
    """What the others know of a process: its stages, their devices by global id, and its memory."""

    plans: tuple[planning.Plan, ...]
    device_ids: tuple[int, ...]
    available_bytes: int


@dataclasses.dataclass(frozen=True)
class Ending:
    """What a process has to tell at the end of a run.

    state_bytes   of its layers, for each prompt that was read
    peak_bytes    most bytes that were in use on its devices; None if one does not tell
    page_locking  of its stages that stream
    """

    state_bytes: tuple[int, ...]
    peak_bytes: int | None
    page_locking: tuple[PinReport, ...]


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a process has saved of the states of a run: its layers and the position, by prompt."""

    parts: tuple[state.Part, ...]
    positions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Handed:
    """A micro-batch between two processes.

    streams  [T, S, D] of each chunk, on the device that goes on with them
    reports  of the stages that it has passed, in their order
    """

    streams: tuple[jax.Array, ...]
    reports: tuple[PassReport, ...]


class Hosts:
    """The processes of a run, seen from one of them; made by `joined`.

    queued  whether micro-batches leave this process by programs in the queue of its device
    """

    def __init__(self, worker: launcher.Worker):
        self._worker = worker
        self.rank, self.world = worker.rank, worker.world
        self.queued = False
        self._told: set[str] = set()
        self._stages = range(0)  # of this process
        self._dealt: tuple[int, ...] | None = None  # stages of every process, where a plan says so
        self._requests = self._received = self._sent = self._chosen = 0
        self._receiver: handoff.Receiver | None = None
        self._sender: handoff.Sender | None = None

    @property
    def first(self) -> bool:
        """Whether this process has the embedding."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether this process has the head, and with it the outputs."""
        return self.rank == self.world - 1

    def own_stages(self, options: PipelineConfig, layers: int) -> dict[int, range]:
        """The stages of this process and their layers: as many stages as every other one has.

        A split by hand; the stages of an automatic one are those of `settle`. Raises ConfigError
        unless they can be dealt out evenly.
        """
        split = options.stages(layers)
        stages, dealt = len(split), self._dealt
        if dealt is None:
            each, rest = divmod(stages, self.world)
            if rest or not each:
                raise ConfigError(
                    f"config.pipeline.split has {stages} stages and the run has {self.world} "
                    f"processes: expected as many stages as processes, or a multiple of that"
                )
            dealt = (each,) * self.world
        first = sum(dealt[: self.rank])
        self._stages = range(first, first + dealt[self.rank])
        return {stage: split[stage] for stage in self._stages}

    def settle(
        self,
        source: TensorSource,
        config: RunConfig,
        devices: Sequence[jax.Device],
        prompts: Sequence[int],
        capacity: int,
    ) -> RunConfig:
        """The configuration with a split by hand: an automatic one becomes what is planned.

        Every process plans for the devices of all, each of which gets a stage. The arguments are
        those of `plan.plan_local`. Raises PlanError when nothing fits, ConfigError when processes
        come to different plans.
        """
        if not config.pipeline.automatic:
            return config
        indices = config.pipeline.candidates(len(devices))
        places = [devices[index] for index in indices]
        budget = config.memory.device_bytes
        shares = [self.memory(place, budget) for place in places]
        item = keys.expert_bytes(source.config, source.infos())
        own = local_machine(config, places, item, shares[0].host_bytes)
        rows = tuple(
            dataclasses.replace(row, memory_bytes=min(row.memory_bytes, share.device_bytes))
            for row, share in zip(own.devices, shares, strict=True)
        )
        tables = self.share(Table.of(dataclasses.replace(own, devices=rows), self._worker.host))
        machine = joined_machine(tables, own.table)
        found = planning.plan_in_order(source, config, machine, prompts, capacity)
        self._dealt = tuple(len(table.devices) for table in tables)
        sizes = [len(stage.layers) for stage in found.stages]
        schedule = found.choice.schedule
        self.agree("the plan", {"the plan of the run": [sizes, self._dealt, str(schedule)]})
        before = sum(self._dealt[: self.rank])
        # Indices on other processes are theirs to know.
        everywhere = [0] * before + indices + [0] * (len(sizes) - before - len(indices))
        settings: dict[str, Any] = {
            "pipeline.split": ",".join(map(str, sizes)),
            "pipeline.devices": ",".join(map(str, everywhere)),
            "streaming.order": schedule.order,
        }
        if schedule.order == "layer_major":
            settings["streaming.micro_batch_tokens"] = schedule.micro_batch_tokens
        return config.replace(settings)

    def plan(
        self,
        source: TensorSource,
        config: RunConfig,
        devices: Sequence[jax.Device],
        prompt_tokens: int | None,
        capacity: int,
    ) -> Part:
        """Plans the stages of this process; the memory of a host is shared by its processes.

        devices  of this process; the other arguments and errors are those of `plan.make_plan`
        """
        layers = source.config.num_hidden_layers
        own = self.own_stages(config.pipeline, layers)
        everything = len(config.pipeline.stages(layers))
        indices = config.pipeline.device_indices(everything, len(devices), list(own))
        places = [devices[index] for index in indices]
        plans = [
            planning.make_plan(
                source,
                config,
                place,
                prompt_tokens,
                capacity,
                layers,
                places.count(place),
                self.memory(place, config.memory.device_bytes),
            )
            for layers, place in zip(own.values(), places, strict=True)
        ]
        available = sum(admission.device_bytes(place) for place in set(places))
        return Part(tuple(plans), tuple(place.id for place in places), available)

    def memory(self, device: jax.Device, budget: int | None) -> planning.Memory:
        """What plans on `device` may use."""
        sharing = self._worker.local_world
        free = admission.device_bytes(device)
        if device.platform == "cpu":
            free //= sharing
        if budget is not None:
            free = min(free, budget)
        return planning.Memory(free, admission.host_bytes() // sharing)

    def share[Told: (Part, Ending, Saved, Table)](self, value: Told) -> list[Told]:
        """What all processes share, by rank; waits for them. Once in a run for each type."""
        kind = type(value)
        self._only_once(kind.__name__)
        self._worker.set(f"{kind.__name__} {self.rank}", json.dumps(to_plain(value)))
        told = (self._worker.get(f"{kind.__name__} {rank}") for rank in range(self.world))
        return [from_plain(kind, json.loads(text)) for text in told]

    def from_last(self, name: str, value: str) -> str:
        """The value that the last process has for this name, which is used once; waits for it."""
        if self.last:
            self._worker.set(f"last {name}", value)
        return self._worker.get(f"last {name}")

    def choose(self, token: int) -> int:
        """The token with which all processes go on: the one of the last process."""
        self._chosen += 1
        return int(self.from_last(f"token {self._chosen}", str(token)))

    def agree(self, name: str, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError unless this process has the same facts as the first one.

        facts  by the words that name them in the message
        """
        self._only_once(f"agree {name}")
        mine = json.loads(json.dumps(facts))
        if self.first:
            self._worker.set(f"agree {name}", json.dumps(mine))
        theirs = json.loads(self._worker.get(f"agree {name}"))
        differing = sorted(key for key in mine if mine[key] != theirs.get(key))
        if differing:
            raise ConfigError(
                f"process {self.rank} differs from process 0 in {', '.join(differing)}: start all "
                "processes with the same command, on the same files and versions"
            )

    def _only_once(self, key: str) -> None:
        """Raises RuntimeError for what was told before: the others would take that for this."""
        if key in self._told:
            raise RuntimeError(
                "the processes of a run load one engine, and this is another one: change the first "
                "one by Engine.reconfigured, or start the processes again"
            )
        self._told.add(key)

    def agree_on_prompts(self, ids: Sequence[np.ndarray]) -> None:
        """Raises ConfigError unless all processes are about to read the same tokens."""
        self._requests += 1
        hashes = [token_hash(part) for part in ids]
        self.agree(f"prompts {self._requests}", {"the tokens of the prompts": hashes})

    def connect(self, devices: Sequence[jax.Device], options: PipelineConfig) -> None:
        """Opens the links to the processes beside this one and tries them.

        devices  of all stages
        Raises HandoffError when a process cannot be reached.
        """
        own = self._stages
        kind, shared = options.handoff, None
        if kind == "auto":  # Gloo writes to stdout, which is for results
            kind = "transfer" if devices[own.start].platform == "cpu" else "permute"
        self.queued = kind in ("permute", "device_put") and not self.last
        if kind == "transfer":
            shared = handoff.TransferPayload(devices[own.start], self._worker.host)

        def payload(stage: int) -> handoff.Payload:
            """For the link into `stage`."""
            ends = devices[stage - 1], devices[stage]
            match kind:
                case "permute":
                    return handoff.PermutePayload(*ends)
                case "device_put":
                    return handoff.DevicePutPayload(*ends)
            return handoff.SocketPayload() if shared is None else shared

        listener = None if self.first else handoff.Listener(self._worker.host)
        if listener is not None:
            self._worker.set(f"link into {self.rank}", listener.address)
        waiting: Any = {"unit_timeout_s": float(options.handoff_timeout_s)}
        if not self.last:
            address = self._worker.get(f"link into {self.rank + 1}")
            self._sender = handoff.connect(address, payload(own.stop), stage=own.stop, **waiting)
        if listener is not None:
            self._receiver = listener.accept(
                payload(own.start), devices[own.start], stage=own.start, **waiting
            )
        # One after the other: what a link sets up at its first use is done before any prompt.
        probe = jax.device_put(np.arange(2, dtype=np.int32), devices[own.stop - 1])
        if self._receiver is not None:
            self._receive()
        if self._sender is not None:
            self._send([probe])
            self._sender.flush()

    def receive(self) -> Handed | None:
        """The next micro-batch of the process before; None when that one was told to stop."""
        tree = self._receive()
        if tree is None:
            return None
        reports = from_plain(tuple[PassReport, ...], json.loads(tree["reports"]))
        return Handed(tuple(tree["streams"]), reports)

    def send(self, handed: Handed | None) -> None:
        """Hands a micro-batch to the process after; None stands for one that is not read."""
        if handed is None:
            self._send(None)
            return
        reports = json.dumps(to_plain(handed.reports))
        self._send({"streams": list(handed.streams), "reports": reports})

    def flush(self) -> None:
        """Waits until the process after has everything."""
        if self._sender is not None:
            self._sender.flush()

    def let_next_end(self, timeout_s: float | None = None) -> None:
        """Waits until the process after has ended: JAX may abort it when this one ends first."""
        if self._sender is not None:
            self._sender.wait_closed(timeout_s)

    def close(self) -> None:
        """Closes the links; whoever waits for one gets HandoffError."""
        for end in (self._receiver, self._sender):
            if end is not None:
                end.close()

    def _receive(self) -> Any:
        assert self._receiver is not None
        self._received += 1
        return self._receiver.receive(self._received - 1)

    def _send(self, tree: Any) -> None:
        assert self._sender is not None
        self._sent += 1
        self._sender.send(self._sent - 1, tree)


@contextlib.contextmanager
def joined() -> Generator[Hosts | None]:
    """The processes of this run if a launcher started this one, else None; before JAX is used.

    All processes wait for each other at the end of the block. When it is left by an error the
    process has to end by `leave`; until then the launcher watches it.
    """
    if not launcher.launched():
        yield None
        return
    worker = launcher.join()
    signal.signal(signal.SIGTERM, _terminated)
    launcher.initialize_jax(worker)
    hosts = Hosts(worker)
    try:
        yield hosts
    except handoff.HandoffError:
        # Another process failed, and may still be about to say why: it should be the first to end.
        hosts.close()
        time.sleep(_YIELD_S)
        raise
    except KeyboardInterrupt:
        # All processes are: the last one still deletes what it has begun to write.
        hosts.let_next_end(_YIELD_S)
        raise
    hosts.close()
    worker.barrier("all have ended")
    worker.close()


def leave(code: int) -> NoReturn:
    """Ends this process with an exit code.

    A launched process that failed does not leave JAX in order, which would wait for the others.
    """
    if code and launcher.launched():
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(_LEADER_S if launcher.leads() else 0.0)
        finally:  # also when the launcher ends the run meanwhile
            os._exit(code)
    sys.exit(code)


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt("the launcher has ended the run")


# Plans and reports as JSON. The reader goes by the types that it expects, so that what arrives can
# only become one of them.


def to_plain(value: Any) -> Any:
    """A value of dataclasses, tuples, mappings, ranges, arrays and numbers as JSON holds it."""
    if dataclasses.is_dataclass(value):
        return [to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), value.reshape(-1).tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


def from_plain(hint: Any, plain: Any) -> Any:
    """The value of type `hint` that `to_plain` made `plain` of."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        (kind,) = (kind for kind in arguments if kind is not types.NoneType)
        return None if plain is None else from_plain(kind, plain)
    if origin is tuple:
        kinds = [arguments[0]] * len(plain) if arguments[1:] == (...,) else arguments
        return tuple(from_plain(*pair) for pair in zip(kinds, plain, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: from_plain(arguments[1], item) for key, item in plain.items()}
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        hints = typing.get_type_hints(hint)
        names = (
            [field.name for field in dataclasses.fields(hint)]
            if dataclasses.is_dataclass(hint)
            else hint._fields
        )
        values = {
            name: from_plain(hints[name], item) for name, item in zip(names, plain, strict=True)
        }
        return hint(**values)
    if hint is range:
        return range(*plain)
    if hint is np.ndarray:
        kind, shape, values = plain
        return np.asarray(values, np.dtype(kind)).reshape(shape)
    return plain
