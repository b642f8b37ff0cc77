"""Runs stages on their devices at the same time, one Python thread per stage.

A stage is a callable. Its thread takes the inputs of a unit of work (a chunk, or a whole
micro-batch), calls it, and copies what comes back to the next device. Calls only dispatch: the
copies and the computations run when their inputs are ready, so a stage is usually called before
the one in front of it has finished. Two bounds keep that in check: `run_ahead`, units that a stage
has dispatched and not finished, and `handoff_depth`, units that wait in front of a stage. With them
the stages move along anti-diagonals: a stage issues unit u only after the next one has taken unit
u - handoff_depth - 1.

A thread per stage is needed because a stage may block (on an upload, on a callback, on the ids of
routed experts); while it does, the other devices go on. There are no collectives in a stage, so the
order of launches on different devices cannot deadlock.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from sharding.handoff import copy_tree


class Unit(NamedTuple):
    """One call of every stage."""

    microbatch: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage.

    run(microbatch, chunk, inputs) -> outputs   pytrees of arrays on `device`; called once per unit,
                in order, from one thread. With a device the inputs belong to it and may be donated;
                outputs must not be donated or changed afterwards.
    device      where inputs are copied to; also if they are there already, so that stages on one
                device never share a buffer. None: inputs are passed on as they come.
    prefetch(microbatch, chunk)   called from the stage's thread when it has nothing to do, with the
                unit it waits for; it should start uploads and return.
    abort()     called once when a run fails or is cancelled, from any thread: unblocks `run`.
    """

    name: str
    run: Callable[[int, int, Any], Any]
    device: jax.Device | None = None
    prefetch: Callable[[int, int], None] | None = None
    abort: Callable[[], None] | None = None


class PipelineError(RuntimeError):
    """A stage, the source or the sink failed; the first error is the cause.

    stage    name of the stage, "source" or "sink"
    unit     what it worked on, None outside of a unit
    """

    def __init__(self, stage: str, unit: Unit | None, cause: BaseException) -> None:
        at = f" at micro-batch {unit.microbatch}, chunk {unit.chunk}" if unit else ""
        super().__init__(f"{stage} failed{at}: {type(cause).__name__}: {cause}")
        self.stage, self.unit = stage, unit


class PipelineCancelled(RuntimeError):
    """`Pipeline.cancel` was called; `completed` units had reached the sink."""

    def __init__(self, completed: int, units: int) -> None:
        super().__init__(f"cancelled after {completed} of {units} units")
        self.completed = completed


class Event(NamedTuple):
    """One unit on one stage, in nanoseconds of the clock: called, returned, outputs ready."""

    stage: int
    step: int
    issued_ns: int
    dispatched_ns: int
    ready_ns: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When each stage was busy. Events are sorted by stage, then by step."""

    stages: tuple[str, ...]
    units: tuple[Unit, ...]
    started_ns: int
    ended_ns: int
    events: tuple[Event, ...]

    def busy(self, stage: int) -> list[tuple[int, int]]:
        """Intervals (begin, end) in which the stage worked on a unit.

        Work begins when the unit is issued, the one before it on this stage is ready and its inputs
        are ready where they were made: the copy from there counts for the stage that receives.
        """
        ready = {(event.stage, event.step): event.ready_ns for event in self.events}
        intervals, before = [], self.started_ns
        for event in self.events:
            if event.stage == stage:
                begin = max(event.issued_ns, before, ready.get((stage - 1, event.step), before))
                intervals.append((min(begin, event.ready_ns), event.ready_ns))
                before = event.ready_ns
        return intervals

    def busy_ns(self, stage: int) -> int:
        """Nanoseconds the stage worked."""
        return sum(end - begin for begin, end in self.busy(stage))

    def idle_ns(self, stage: int) -> int:
        """Nanoseconds of the run in which the stage did not work."""
        return self.ended_ns - self.started_ns - self.busy_ns(stage)

    def chrome_events(self) -> list[dict[str, Any]]:
        """Busy intervals as complete events of a Chrome trace, one row per stage."""
        return [
            {
                "name": f"micro-batch {unit.microbatch} chunk {unit.chunk}",
                "ph": "X",
                "pid": "pipeline",
                "tid": name,
                "ts": begin / 1000,
                "dur": (end - begin) / 1000,
            }
            for stage, name in enumerate(self.stages)
            for unit, (begin, end) in zip(self.units, self.busy(stage), strict=True)
        ]


class Pipeline:
    """Stages in their order. `run` may be called again, also after an error or a cancellation."""

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        run_ahead: int = 2,
        handoff_depth: int = 1,
        stop_timeout_s: float = 30.0,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Raises ValueError for no stages, a name that is used twice, or a bound below 1."""
        names = [stage.name for stage in stages]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"stages are named {names}, expected at least one, all different")
        if run_ahead < 1 or handoff_depth < 1:
            raise ValueError(f"{run_ahead=} and {handoff_depth=}, expected at least 1")
        self.stages = tuple(stages)
        self.run_ahead, self.handoff_depth = run_ahead, handoff_depth
        self.stop_timeout_s, self.clock = stop_timeout_s, clock
        self._current: _Run | None = None

    def run(
        self,
        units: Sequence[Unit],
        source: Callable[[int, int], Any],
        sink: Callable[[int, int, Any], None],
        *,
        abort: Callable[[], None] | None = None,
    ) -> Timeline:
        """Passes every unit through all stages, in order.

        source(microbatch, chunk) -> inputs of the first stage; called from a thread of its own.
        sink(microbatch, chunk, outputs)   called from this thread; must not donate the outputs.
        abort()   like `Stage.abort`, to unblock source and sink.

        Raises PipelineError from the first error, PipelineCancelled, or what interrupted this
        thread; all threads have ended by then, or the error names those that did not stop.
        """
        run = _Run(self, tuple(units), source, abort)
        self._current = run
        try:
            return run.drive(sink)
        finally:
            self._current = None

    def cancel(self) -> None:
        """Stops the run that is in progress, from any thread; does nothing without one."""
        if (run := self._current) is not None:
            run.stop(None, None, PipelineCancelled(run.completed, len(run.units)))


class _Run:
    """State of one run. `changed` guards everything that threads share."""

    def __init__(
        self,
        pipeline: Pipeline,
        units: tuple[Unit, ...],
        source: Callable[[int, int], Any],
        abort: Callable[[], None] | None,
    ) -> None:
        self.pipeline, self.units, self.source = pipeline, units, source
        stages = pipeline.stages
        self.aborts = [stage.abort for stage in stages if stage.abort]
        self.aborts += [abort] if abort else []
        self.changed = threading.Condition()
        # In front of every stage, and of the sink.
        self.waiting: list[collections.deque[Any]] = [
            collections.deque() for _ in range(len(stages) + 1)
        ]
        self.dispatched: list[collections.deque[Any]] = [collections.deque() for _ in stages]
        self.ready = [0] * len(stages)
        self.calls: dict[tuple[int, int], tuple[int, int]] = {}
        self.events: list[Event] = []
        self.completed = 0
        self.error: BaseException | None = None
        self.where: tuple[str | None, Unit | None] = (None, None)

    def drive(self, sink: Callable[[int, int, Any], None]) -> Timeline:
        pipeline, clock = self.pipeline, self.pipeline.clock
        threads = [threading.Thread(target=self._feed, name="source", daemon=True)]
        for i, stage in enumerate(pipeline.stages):
            for name, job in ((stage.name, self._work), (f"{stage.name} (ready)", self._watch)):
                threads.append(threading.Thread(target=job, args=(i,), name=name, daemon=True))
        started = clock()
        unit = None
        try:
            for thread in threads:
                thread.start()
            for unit in self.units:
                outputs = self._take(len(pipeline.stages), None)
                sink(unit.microbatch, unit.chunk, outputs)
                self.completed += 1
            with self.changed:
                self._wait(lambda: all(count == len(self.units) for count in self.ready))
        except _Stopped:
            pass
        except BaseException as error:
            self.stop("sink", unit, error)
        deadline = time.monotonic() + pipeline.stop_timeout_s
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0) if self.error else None)
        self._raise([thread.name for thread in threads if thread.is_alive()])
        return Timeline(
            tuple(stage.name for stage in pipeline.stages),
            self.units,
            started,
            clock(),
            tuple(sorted(self.events)),
        )

    def _raise(self, running: list[str]) -> None:
        if self.error is None:
            return
        stage, unit = self.where
        error = self.error
        if stage is not None and isinstance(error, Exception):
            error = PipelineError(stage, unit, error)
        if running:
            error.add_note(
                f"still running after {self.pipeline.stop_timeout_s} s: {', '.join(running)}"
            )
        raise error from (self.error if error is not self.error else None)

    def stop(self, stage: str | None, unit: Unit | None, error: BaseException) -> None:
        """Keeps the first error and wakes everybody."""
        with self.changed:
            if self.error is not None:
                return
            self.error, self.where = error, (stage, unit)
            self.changed.notify_all()
        for abort in self.aborts:
            try:
                abort()
            except Exception as broken:
                error.add_note(f"and abort failed: {type(broken).__name__}: {broken}")

    # The threads

    def _feed(self) -> None:
        unit = None
        try:
            for unit in self.units:
                self._await_room(0)
                inputs = self.source(unit.microbatch, unit.chunk)
                self._put(0, inputs)
        except _Stopped:
            pass
        except BaseException as error:
            self.stop("source", unit, error)

    def _work(self, i: int) -> None:
        stage, clock = self.pipeline.stages[i], self.pipeline.clock
        unit = None
        try:
            for step, unit in enumerate(self.units):
                inputs = self._take(i, unit)
                with self.changed:
                    self._wait(lambda step=step: step - self.ready[i] < self.pipeline.run_ahead)
                issued = clock()
                outputs = stage.run(unit.microbatch, unit.chunk, inputs)
                del inputs  # the stage may have donated them; keep no buffer alive
                with self.changed:
                    self.calls[i, step] = (issued, clock())
                    self.dispatched[i].append(outputs)
                    self.changed.notify_all()
                self._await_room(i + 1)
                self._put(i + 1, outputs)
                del outputs
        except _Stopped:
            pass
        except BaseException as error:
            self.stop(stage.name, unit, error)

    def _watch(self, i: int) -> None:
        """Waits for the outputs of a stage in order: only this says when a unit is finished."""
        step = 0
        try:
            for step in range(len(self.units)):
                with self.changed:
                    self._wait(lambda: self.dispatched[i])
                    outputs = self.dispatched[i].popleft()
                jax.block_until_ready(outputs)
                del outputs
                with self.changed:
                    self.events.append(Event(i, step, *self.calls[i, step], self.pipeline.clock()))
                    self.ready[i] += 1
                    self.changed.notify_all()
        except _Stopped:
            pass
        except BaseException as error:
            self.stop(self.pipeline.stages[i].name, self.units[step], error)

    # Queues between them

    def _wait(self, condition: Callable[[], Any]) -> None:
        """Waits, with `changed` held; raises _Stopped when the run ends early."""
        self.changed.wait_for(lambda: self.error is not None or condition())
        if self.error is not None:
            raise _Stopped

    def _await_room(self, i: int) -> None:
        with self.changed:
            self._wait(lambda: len(self.waiting[i]) < self.pipeline.handoff_depth)

    def _put(self, i: int, tree: Any) -> None:
        """Hands a unit to stage i; the copy starts here, into a buffer that has room by now."""
        stages = self.pipeline.stages
        if i < len(stages) and (device := stages[i].device) is not None:
            tree = copy_tree(tree, device)
        with self.changed:
            self.waiting[i].append(tree)
            self.changed.notify_all()

    def _take(self, i: int, unit: Unit | None) -> Any:
        """The next unit in front of stage i; while there is none, the stage may prefetch."""
        prefetch = self.pipeline.stages[i].prefetch if unit is not None else None
        with self.changed:
            idle = not self.waiting[i] and self.error is None
        if idle and prefetch is not None and unit is not None:
            prefetch(unit.microbatch, unit.chunk)
        with self.changed:
            self._wait(lambda: self.waiting[i])
            tree = self.waiting[i].popleft()
            self.changed.notify_all()
        return tree


class _Stopped(Exception):
    """Ends a thread of a run that another one has stopped."""
