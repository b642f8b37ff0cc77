"""Starts the processes of a run, watches them, and outlives them.

    python -m sharding.launcher --processes=2 -- python worker.py ...

On several hosts the same command runs once per host, with --hosts, --host_index and the address of
the first host as --coordinator=HOST:PORT (docs/cluster.md has examples for Slurm and ssh).

JAX by itself aborts the survivors of a dead peer without a Python exception, or leaves them
waiting. So each worker calls `join()`, which sends a sign of life over a socket, and the launchers
watch both these and the exit of their processes. A failure stops everything: it is reported with
the process it started from, every process is stopped together with its children, and all launchers
return the same exit code:

    0        all processes ended with 0
    1..15    the code that a process ended with (2: a mistake of the user)
    16       a process was killed by a signal, or ended with a code above 15
    17       a process gave no sign of life for --timeout_s, or did not join in time
    18       a host was lost: its launcher is gone or silent
    130, 143 the launcher was interrupted or terminated

A worker whose launcher is gone kills itself and its children.

This module does not import JAX, so that a launcher starts at once and holds no device.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

EXIT_KILLED, EXIT_SILENT, EXIT_LOST = 16, 17, 18

_RANK, _WORLD, _LOCAL_RANK = "SHARDING_RANK", "SHARDING_WORLD", "SHARDING_LOCAL_RANK"
_LOCAL_WORLD = "SHARDING_LOCAL_WORLD"
_COORDINATOR, _HOST = "SHARDING_COORDINATOR", "SHARDING_HOST"
_HEARTBEAT, _TIMEOUT = "SHARDING_HEARTBEAT_S", "SHARDING_TIMEOUT_S"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_POLL_S = 0.1
# A process that loses its peer fails a moment later, often with an error of its own. Failures of
# this span are collected, and the one that explains the others is reported.
_SETTLE_S = 0.5


class LaunchError(RuntimeError):
    """The processes could not be brought together."""


class AddressError(LaunchError):
    """The coordinator cannot be where it was asked for."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a run should end, and the exit code for it.

    Of several the lowest order is the cause, and of these the one that came first.
    """

    code: int
    reason: str
    order: int


# Interrupted, lost, killed or silent: from outside. Ended with a code, or aborted, which JAX does
# when a peer is lost: may have followed from another failure, so the first of them counts.
_OUTSIDE, _ENDED = range(2)


class _Lines:
    """JSON messages, one a line, over a non-blocking or blocking socket."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self._buffer = link, b""

    def send(self, message: Mapping[str, Any]) -> None:
        self.link.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """Messages that have arrived, after waiting for some bytes; None at the end.

        Something else than messages is an end, too: whoever looks for open ports may connect.
        """
        try:
            data = self.link.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            return None


# Worker


class Worker:
    """This process as one of a run; made by `join`.

    rank, world               position among all processes, and their number
    local_rank, local_world   the same on this host
    host                      address under which the other processes reach this host
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.rank, self.world = int(environ[_RANK]), int(environ[_WORLD])
        self.local_rank, self.local_world = int(environ[_LOCAL_RANK]), int(environ[_LOCAL_WORLD])
        self.host = environ[_HOST]
        self._heartbeat_s = float(environ[_HEARTBEAT])
        self._lines = _Lines(_dial(environ[_COORDINATOR], float(environ[_TIMEOUT])))
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()
        self._values: dict[str, str] = {}
        self._closed = threading.Event()
        self._send({"join": self.rank})
        for job in (self._beat, self._listen):
            threading.Thread(target=job, name="sharding worker", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Publishes a value to all processes; a key is set once."""
        self._send({"set": key, "value": value})

    def get(self, key: str, timeout_s: float | None = None) -> str:
        """The value of a key, as soon as somebody sets it; raises LaunchError after the timeout."""
        self._send({"get": key})
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise LaunchError(f"nobody has set {key!r} within {timeout_s} s")
            return self._values[key]

    def barrier(self, name: str, timeout_s: float | None = None) -> None:
        """Waits until every process has called it with this name."""
        self.set(f"barrier {name} {self.rank}", "")
        for rank in range(self.world):
            self.get(f"barrier {name} {rank}", timeout_s)

    def close(self) -> None:
        """Says that this process is done: a lost launcher no longer ends it."""
        if not self._closed.is_set():
            self._closed.set()
            self._send({"bye": self.rank})
            self._lines.link.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._send_lock:
            self._lines.send(message)

    def _beat(self) -> None:
        while not self._closed.wait(self._heartbeat_s):
            try:
                self._send({"beat": self.rank})
            except OSError:
                self._lost()

    def _listen(self) -> None:
        while (messages := self._lines.read()) is not None:
            with self._changed:
                for message in messages:
                    self._values[message["key"]] = message["value"]
                self._changed.notify_all()
        self._lost()
        self._lines.link.close()

    def _lost(self) -> None:
        if self._closed.is_set():
            return
        print(f"worker {self.rank}: the launcher is gone, stopping", file=sys.stderr, flush=True)
        # A launched process leads a group of its own; its children end with it.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(EXIT_LOST)


def join(environ: Mapping[str, str] | None = None) -> Worker:
    """Joins the run that this process was launched for, and starts to send signs of life.

    Raises LaunchError if the process was not started by the launcher.
    """
    environ = os.environ if environ is None else environ
    if _COORDINATOR not in environ:
        raise LaunchError(
            f"{_COORDINATOR} is not set: start this process with "
            "python -m sharding.launcher --processes=N -- COMMAND"
        )
    return Worker(environ)


def initialize_jax(worker: Worker) -> None:
    """`jax.distributed.initialize` for the processes of a run, before JAX is used.

    Also lets the CPU backend copy arrays to devices of other processes.
    """
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    if jax.config.jax_platforms != "cpu" and "xla_gpu_shard_autotuning" not in flags:
        # Processes compile programs of their own: tuning them together would wait for the others.
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false".strip()
    # Its handler would swallow SIGTERM, with which the launcher stops processes.
    jax.config.update("jax_enable_preemption_service", False)
    if jax.config.jax_platforms == "cpu":
        # Other backends copy to other processes without it.
        address = f"{worker.host}:{_free_port()}"
        jax.config.update("jax_cross_host_transfer_socket_address", address)
        jax.config.update("jax_cross_host_transport_addresses", f"{worker.host}:0")
    if worker.rank == 0:
        worker.set("jax coordinator", f"{worker.host}:{_free_port()}")
    jax.distributed.initialize(
        worker.get("jax coordinator"),
        worker.world,
        worker.rank,
        # Under Slurm or MPI it would take one GPU per task, and a launcher is one task.
        cluster_detection_method="deactivate",
    )


def launched(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process was started by a launcher."""
    return _COORDINATOR in (os.environ if environ is None else environ)


def leads() -> bool:
    """Whether this process is the first one of those that launchers have started."""
    return os.environ.get(_RANK) == "0"


def visible_gpus(environ: Mapping[str, str], local_rank: int, count: int) -> str:
    """CUDA_VISIBLE_DEVICES of a process that has `count` GPUs of its host for itself.

    They are taken in order from those that the launcher may see; raises LaunchError when these are
    too few.
    """
    first, stop = local_rank * count, (local_rank + 1) * count
    given = environ.get(_VISIBLE)
    ids = [str(i) for i in range(stop)] if given is None else given.split(",")
    if len(ids) < stop:
        raise LaunchError(
            f"{_VISIBLE} is {given!r}, expected at least {stop} GPUs for {local_rank + 1} "
            f"processes with {count} each"
        )
    return ",".join(ids[first:stop])


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


def _dial(address: str, timeout_s: float) -> socket.socket:
    """Connects to HOST:PORT, trying again until the timeout."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            link = socket.create_connection((host, int(port)), timeout_s)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(f"no launcher answers at {address}: {error}") from error
            time.sleep(_POLL_S)
        else:
            link.settimeout(None)
            return link


# Launcher


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of a launcher; `host_index` 0 is the coordinator.

    gpus_per_process  CUDA devices that each process sees, all different; 0 leaves them alone
    """

    command: tuple[str, ...]
    processes: int
    hosts: int = 1
    host_index: int = 0
    coordinator: str = ""
    heartbeat_s: float = 2.0
    timeout_s: float = 20.0
    join_timeout_s: float = 300.0
    grace_s: float = 5.0
    gpus_per_process: int = 0


class _Child:
    """A local process, in a session and a process group of its own."""

    def __init__(self, rank: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.rank = rank
        self.code: int | None = None
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, env=dict(environ), start_new_session=True)

    def poll(self) -> int | None:
        """Exit code (negative: a signal), None while it runs. Ends what is left of its group."""
        if self.code is None:
            # Look without reaping: until then nobody else can get the number of the group.
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                self.kill(signal.SIGKILL)
                self.code = self.process.wait()
        return self.code

    def kill(self, number: int) -> None:
        """Sends a signal to the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def describe(self) -> str:
        """How it ended."""
        code, seconds = self.code or 0, time.monotonic() - self.started
        how = f"ended with code {code}"
        if code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"process {self.rank} (pid {self.process.pid}) {how} after {seconds:.1f} s"


class Launcher:
    """One launcher; `run` returns the exit code."""

    def __init__(self, options: Options, *, report: Callable[[str], None] | None = None) -> None:
        self.options = options
        self.report = report or (lambda text: print(text, file=sys.stderr, flush=True))
        self.selector = selectors.DefaultSelector()
        self.failure: Failure | None = None  # the one that ends the run
        self.failures: list[Failure] = []
        self.first_failure = 0.0
        self.children: list[_Child] = []
        self.values: dict[str, str] = {}
        self.waiting: dict[str, list[_Lines]] = {}
        # Last sign of life: by rank of a worker, by index of another host's launcher.
        self.workers: dict[int, float] = {}
        self.agents: dict[int, float] = {}
        self.agent_links: dict[int, _Lines] = {}
        self.finished_ranks: set[int] = set()
        self.finished_hosts: set[int] = set()
        self.started = self.last_beat = self.last_upstream = time.monotonic()
        self.stopped_by: int | None = None
        # Only of launchers that are not the coordinator.
        self.upstream: _Lines | None = None
        self.sent_finished = self.released = False

    # Life of a run

    def run(self) -> int:
        """Starts the processes and returns when none is left."""
        options = self.options
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            address, host = self._connect()
            self._start(address, host)
            while not self._done():
                self._step()
            if self.failure is not None:
                self._announce(self.failure)
        finally:
            self._stop_children()
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._close()
        if self.failure is None:
            return 0
        self.report(
            f"launcher {options.host_index}: all processes of this host have ended, "
            f"exit code {self.failure.code}"
        )
        return self.failure.code

    def _connect(self) -> tuple[str, str]:
        """(address of the coordinator for the workers, address of this host for its peers)."""
        options = self.options
        if options.host_index:
            self.upstream = _Lines(_dial(options.coordinator, options.join_timeout_s))
            self.upstream.send({"agent": options.host_index})
            self.selector.register(self.upstream.link, selectors.EVENT_READ, self._on_upstream)
            return options.coordinator, self.upstream.link.getsockname()[0]
        host, port = "127.0.0.1", 0
        if options.coordinator:
            host, _, text = options.coordinator.rpartition(":")
            port = int(text)
        try:
            server = socket.create_server(("" if options.hosts > 1 else host, port), backlog=512)
        except OSError as error:
            raise AddressError(
                f"--coordinator is {options.coordinator!r}, where this host cannot listen "
                f"({error.strerror}): expected a free port of its own"
            ) from error
        self.selector.register(server, selectors.EVENT_READ, self._on_connection)
        return f"{host}:{server.getsockname()[1]}", host

    def _start(self, address: str, host: str) -> None:
        options = self.options
        self.started = time.monotonic()
        for local in range(options.processes):
            rank = options.host_index * options.processes + local
            environ = os.environ | {
                _RANK: str(rank),
                _WORLD: str(options.hosts * options.processes),
                _LOCAL_RANK: str(local),
                _LOCAL_WORLD: str(options.processes),
                _COORDINATOR: address,
                _HOST: host,
                _HEARTBEAT: str(options.heartbeat_s),
                _TIMEOUT: str(options.timeout_s),
            }
            if options.gpus_per_process:
                environ[_VISIBLE] = visible_gpus(os.environ, local, options.gpus_per_process)
            self.children.append(_Child(rank, options.command, environ))

    def _done(self) -> bool:
        if self.failure is not None:
            return True
        if self.upstream is not None:
            return self.released
        others = set(range(1, self.options.hosts))
        return all(child.code == 0 for child in self.children) and others <= self.finished_hosts

    def _step(self) -> None:
        """Handles what has arrived and looks at processes and clocks once."""
        for key, _ in self.selector.select(_POLL_S):
            key.data(key.fileobj)
        if self.stopped_by is not None:
            name = signal.Signals(self.stopped_by).name
            reason = f"the launcher of host {self.options.host_index} got {name}"
            self._fail(128 + self.stopped_by, reason, _OUTSIDE)
            self.stopped_by = None
        for child in self.children:
            if child.code is not None or (code := child.poll()) is None:
                continue
            self._exited(child.rank)
            if code:
                own = 0 < code < EXIT_KILLED
                order = _ENDED if own or code == -signal.SIGABRT else _OUTSIDE
                self._fail(code if own else EXIT_KILLED, child.describe(), order)
        self._beat()
        if self.upstream is None:
            self._look_for_silence()
        self._decide()
        if self.upstream is None:
            return
        if time.monotonic() - self.last_upstream > self.options.timeout_s:
            self.failure = Failure(EXIT_LOST, "the launcher of host 0 is silent", _OUTSIDE)
        if not self.sent_finished and all(child.code == 0 for child in self.children):
            self._tell_upstream({"finished": self.options.host_index})
            self.sent_finished = True

    def _fail(self, code: int, reason: str, order: int = _OUTSIDE) -> None:
        failure = Failure(code, reason, order)
        if not self.failures:
            self.first_failure = time.monotonic()
        self.failures.append(failure)
        self._tell_upstream({"failed": dataclasses.asdict(failure)})

    def _decide(self) -> None:
        """Ends the run for the cause among the failures; the coordinator does so for all hosts."""
        if not self.failures:
            return
        cause = min(self.failures, key=lambda failure: failure.order)
        waited = time.monotonic() - self.first_failure
        enough = _SETTLE_S if self.upstream is None else self.options.timeout_s
        if waited > enough or (self.upstream is None and cause.order == _OUTSIDE):
            self.failure = cause

    def _announce(self, failure: Failure) -> None:
        """Reports the failure and tells the other launchers."""
        options = self.options
        others = sum(child.code is None for child in self.children)
        self.report(
            f"launcher {options.host_index}: {failure.reason}; stopping the {others} processes "
            "that still run on this host"
        )
        for other in self.failures:
            if other.reason != failure.reason:
                self.report(f"launcher {options.host_index}: also, {other.reason}")
        for link in self.agent_links.values():
            _try_send(link, {"stop": dataclasses.asdict(failure)})

    def _stop_children(self) -> None:
        options = self.options
        interrupted = self.failure is not None and self.failure.code == 128 + signal.SIGINT
        polite = signal.SIGINT if interrupted else signal.SIGTERM
        for child in self.children:
            if child.poll() is None:
                child.kill(polite)
        deadline, failure = time.monotonic() + options.grace_s, self.failure
        while any(child.poll() is None for child in self.children):
            if time.monotonic() > deadline:
                for child in self.children:
                    if child.code is None:
                        child.kill(signal.SIGKILL)
            elif self.stopped_by is not None:  # asked again: they are, too, and may hurry
                self.stopped_by = None
                for child in self.children:
                    if child.code is None:
                        child.kill(polite)
            # What they have to tell each other in order to end well still arrives.
            for key, _ in self.selector.select(_POLL_S / 10):
                key.data(key.fileobj)
            self._beat()
        self.failure = failure

    def _close(self) -> None:
        if self.failure is None:
            for link in self.agent_links.values():
                _try_send(link, {"stop": None})
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                self.selector.unregister(key.fileobj)
                key.fileobj.close()
        self.selector.close()

    def _on_signal(self, number: int, frame: object) -> None:
        self.stopped_by = number

    def _exited(self, rank: int) -> None:
        self.finished_ranks.add(rank)
        self._tell_upstream({"exited": rank})

    # Messages

    def _tell_upstream(self, message: Mapping[str, Any]) -> None:
        if self.upstream is not None:
            _try_send(self.upstream, message)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self.last_beat >= self.options.heartbeat_s:
            self.last_beat = now
            self._tell_upstream({"alive": self.options.host_index})
            for link in self.agent_links.values():
                _try_send(link, {"alive": 0})

    def _on_upstream(self, link: socket.socket) -> None:
        messages = self.upstream.read() if self.upstream is not None else None
        if messages is None:
            self.selector.unregister(link)
            link.close()
            self.failure = Failure(EXIT_LOST, "the launcher of host 0 is gone", _OUTSIDE)
            return
        self.last_upstream = time.monotonic()
        for message in messages:
            if "stop" in message:
                self.released = True
                self.failure = Failure(**message["stop"]) if message["stop"] else None

    def _on_connection(self, server: socket.socket) -> None:
        link, _ = server.accept()
        lines = _Lines(link)
        self.selector.register(
            link, selectors.EVENT_READ, lambda link, lines=lines: self._on_message(lines)
        )

    def _on_message(self, lines: _Lines) -> None:
        messages = lines.read()
        if messages is None:
            self.selector.unregister(lines.link)
            lines.link.close()
            for host, link in self.agent_links.items():
                if link is lines and host not in self.finished_hosts:
                    self._fail(EXIT_LOST, f"the launcher of host {host} is gone")
            return
        now = time.monotonic()
        for message in messages:
            match message:
                case {"join": rank} | {"beat": rank}:
                    self.workers[rank] = now
                case {"bye": rank} | {"exited": rank}:
                    self.finished_ranks.add(rank)
                case {"agent": host}:
                    self.agents[host], self.agent_links[host] = now, lines
                case {"alive": host}:
                    self.agents[host] = now
                case {"finished": host}:
                    self.finished_hosts.add(host)
                case {"failed": {"code": code, "reason": reason, "order": order}}:
                    self._fail(code, reason, order)
                case {"set": key, "value": value}:
                    self.values[key] = value
                    for link in self.waiting.pop(key, []):
                        _try_send(link, {"key": key, "value": value})
                case {"get": key} if key in self.values:
                    _try_send(lines, {"key": key, "value": self.values[key]})
                case {"get": key}:
                    self.waiting.setdefault(key, []).append(lines)

    def _look_for_silence(self) -> None:
        options, now = self.options, time.monotonic()
        for rank, seen in self.workers.items():
            if rank not in self.finished_ranks and now - seen > options.timeout_s:
                self._fail(
                    EXIT_SILENT,
                    f"process {rank} (host {rank // options.processes}) gave no sign of life for "
                    f"{now - seen:.1f} s",
                )
        for host, seen in self.agents.items():
            if host not in self.finished_hosts and now - seen > options.timeout_s:
                self._fail(EXIT_LOST, f"the launcher of host {host} is silent")
        if now - self.started > options.join_timeout_s:
            expected = set(range(options.hosts * options.processes))
            missing = expected - set(self.workers) - self.finished_ranks
            # Processes that never join are only watched for their exit.
            if self.workers and missing:
                self._fail(
                    EXIT_SILENT,
                    f"process {min(missing)} did not join within {options.join_timeout_s} s",
                )
            absent = set(range(1, options.hosts)) - set(self.agents)
            if absent:
                self._fail(
                    EXIT_LOST,
                    f"host {min(absent)} did not connect within {options.join_timeout_s} s",
                )


def _try_send(lines: _Lines, message: Mapping[str, Any]) -> None:
    """A peer that is gone is noticed when its connection is read."""
    with contextlib.suppress(OSError):
        lines.send(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher's command line; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--" not in argv:
        argv.append("--")
    cut = argv.index("--")
    parser = argparse.ArgumentParser(
        prog="python -m sharding.launcher",
        usage="%(prog)s --processes=N [--hosts=H --host_index=I --coordinator=HOST:PORT] "
        "[options] -- COMMAND ...",
        description="Starts N processes of a run on this host and watches them.",
    )
    parser.add_argument("--processes", type=int, required=True, help="processes on this host")
    parser.add_argument("--hosts", type=int, default=1, help="hosts of the run")
    parser.add_argument("--host_index", type=int, default=0, help="0 is the coordinator")
    parser.add_argument("--coordinator", default="", help="HOST:PORT of the first host")
    parser.add_argument("--heartbeat_s", type=float, default=2.0, help="between signs of life")
    parser.add_argument("--timeout_s", type=float, default=20.0, help="silence that is a failure")
    parser.add_argument("--join_timeout_s", type=float, default=300.0, help="time to start")
    parser.add_argument("--grace_s", type=float, default=5.0, help="between SIGTERM and SIGKILL")
    parser.add_argument(
        "--gpus_per_process", type=int, default=0, help="CUDA devices of its own for each process"
    )
    values = parser.parse_args(argv[:cut])
    options = Options(command=tuple(argv[cut + 1 :]), **vars(values))
    if not options.command:
        parser.error("no command: give it after --")
    if options.processes < 1 or options.hosts < 1:
        parser.error("--processes and --hosts have to be at least 1")
    if not 0 <= options.host_index < options.hosts:
        parser.error(f"--host_index is {options.host_index}, expected 0..{options.hosts - 1}")
    if options.gpus_per_process:
        try:
            visible_gpus(os.environ, options.processes - 1, options.gpus_per_process)
        except LaunchError as error:
            parser.error(str(error))
    if options.hosts > 1 and not options.coordinator:
        parser.error("--hosts needs --coordinator=HOST:PORT, the same for all hosts")
    host, _, port = options.coordinator.rpartition(":")
    if options.coordinator and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        parser.error(f"--coordinator is {options.coordinator!r}, expected HOST:PORT")
    if not 0 < options.heartbeat_s < options.timeout_s:
        parser.error(
            f"--heartbeat_s is {options.heartbeat_s:g} and --timeout_s {options.timeout_s:g}, "
            "expected signs of life more often than their absence counts"
        )
    try:
        return Launcher(options).run()
    except (AddressError, FileNotFoundError, PermissionError) as error:
        print(f"launcher {options.host_index}: {error}", file=sys.stderr)
        return 2
    except LaunchError as error:
        print(f"launcher {options.host_index}: {error}", file=sys.stderr)
        return EXIT_LOST


if __name__ == "__main__":
    sys.exit(main())
