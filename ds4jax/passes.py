"""One pass of a micro-batch through the layers of a device: which programs, in which order.

A micro-batch is one or more chunks, of one or several sequences. The pass visits the layers in
order and takes every chunk through a layer before the next one (layer-major), so that each streamed
expert crosses the link once per pass. A micro-batch of one chunk is the chunk-major order. Programs
and their arguments are the same either way, and so are the bits.
"""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

import streaming
from ds4jax.activations import Moved, Shelf
from ds4jax.cache import Chunk, LayerState
from ds4jax.experts import ExpertPool, absent_experts
from ds4jax.moe import LayerSlabs, Routing
from ds4jax.runner import Runner

NOTE_TIMEOUT_S = 60.0  # for a router's note, beyond which a device is taken to hang


class MissingExpertError(RuntimeError):
    """A routed expert was not among those of its step: the output would hold NaN."""


class NotANumberError(RuntimeError):
    """Tokens chose no experts because scores of theirs, of experts or of entries, were NaN."""


@dataclasses.dataclass
class Work:
    """A chunk on its way through the layers.

    sequence  index of its sequence in the states of the pass
    chunk     on the device of the pass
    tokens    how many of its rows are real
    """

    sequence: int
    chunk: Chunk
    tokens: int


@dataclasses.dataclass
class Pass:
    """A micro-batch between two layers; `run` takes it further.

    works   its chunks; those of one sequence in the order of their positions
    shelf   the streams [T, S, D] of each, which enter the next layer
    states  one list of layer states per sequence; consumed and replaced
    layer   the next layer to visit; layers count from the first one of the runner
    """

    works: Sequence[Work]
    shelf: Shelf[jax.Array]
    states: list[list[LayerState]]
    layer: int = 0

    @property
    def streams(self) -> tuple[jax.Array, ...]:
        """The streams of every chunk, on the device or in host memory."""
        return self.shelf.trees


@dataclasses.dataclass(frozen=True)
class PassReport:
    """How a pass went.

    work_seconds  device time of each chunk, summed over the layers that were visited; a chunk
                  counts its own attention and, but for the first, the experts of the one before
    layer_seconds the same by layer, exactly
    counts        i64 [layers, E], how many rows chose each expert
    distinct      distinct experts of each layer visited
    ledgers       what was streamed, by stage; empty when nothing is
    activations   bytes of activations that went to host memory and came back; they are no part of
                  the ledgers
    """

    work_seconds: tuple[float, ...]
    layer_seconds: tuple[float, ...]
    counts: np.ndarray
    distinct: tuple[int, ...]
    ledgers: tuple[streaming.Ledger, ...]
    activations: Moved = dataclasses.field(default_factory=Moved)


def run(
    batch: Pass,
    runner: Runner,
    pool: ExpertPool,
    steps: Sequence[streaming.Step],
    notes: streaming.Notes,
    *,
    started: bool = False,
    on_layer: Callable[[int], None] = lambda layer: None,
    paused: Callable[[], bool] = lambda: False,
) -> PassReport:
    """Takes `batch` through the layers of `steps`, one step per layer from batch.layer on.

    runner, pool  of the same layers; layers of steps and of the report count from their first one
    notes     of the device; brings the counts of experts to the host, and the ids where a step
              moves only those that its router asks for
    started   whether the pool has been started with these steps
    on_layer  called after a layer has been dispatched
    paused    asked after every layer; when true the pass ends early and `batch` can be run on
    Raises MissingExpertError when a routed expert was in no slab of its step, NotANumberError when
    tokens chose no experts.
    """
    usage = streaming.Usage(len(runner.layers), runner.config.n_routed_experts)
    with _StepClock() as clock:
        try:
            notes.begin(pool.device)
            if not started:
                pool.start(steps)
            visited = 0
            for number, step in enumerate(steps):
                last = number + 1 == len(steps)
                _Visit(batch, runner, pool, number, step, notes, clock, last).run()
                visited += 1
                batch.layer = step.layer + 1
                on_layer(step.layer)
                if visited < len(steps) and paused():
                    break
            # The clock has seen every router; what follows the last one is still running.
            jax.block_until_ready(batch.streams)
            tokens = [work.tokens for work in batch.works]
            choices = runner.config.num_experts_per_tok
            distinct = _settle(pool, steps[:visited], notes, usage, tokens, choices)
            ledger = pool.finish(distinct) if visited == len(steps) else pool.abort()
        except BaseException:
            pool.abort()
            raise
        seconds = clock.seconds()
    return PassReport(
        tuple(seconds.sum(axis=0).tolist()),
        tuple(seconds.sum(axis=1).tolist()),
        usage.counts,
        tuple(distinct),
        () if ledger is None else (ledger,),
        batch.shelf.moved,
    )


@dataclasses.dataclass(frozen=True)
class _Visit:
    """One layer on all chunks of a micro-batch.

    number, step  of the layer in the pass
    last          whether no other layer follows
    """

    batch: Pass
    runner: Runner
    pool: ExpertPool
    number: int
    step: streaming.Step
    notes: streaming.Notes
    clock: "_StepClock"
    last: bool

    def run(self) -> None:
        """Dispatches all programs of the layer, and the copies that run beside them."""
        # Before the slabs: a copy of activations behind theirs would come late.
        self.batch.shelf.fetch_ahead(0)
        self.pool.issue_ahead(self.number)
        if self.step.mode != "routed" and self.pool.waves(self.number) <= 1:
            done, ready = self._at_once()
            if self.pool.waves(self.number):
                self.pool.computed(self.number, 0, done, ready)
        else:
            self._in_waves()

    @property
    def _layer(self) -> int:
        """Counts from the first one of the runner."""
        return self.step.layer

    @property
    def _place(self) -> int:
        """The layer's number in the model."""
        return self.runner.layers[self.step.layer]

    def _begin(self, index: int) -> tuple[jax.Array, Routing]:
        """A chunk up to its experts."""
        work, streams = self.batch.works[index], self.batch.shelf.take(index)
        states = self.batch.states[work.sequence]
        streams, states[self._layer] = self.runner.attend(
            self._place, streams, states[self._layer], work.chunk
        )
        routing = self.runner.route(self._place, streams, work.chunk)
        note = self.number * len(self.batch.works) + index
        self.notes.send(note, self._layer, routing.ids, as_ids=self.step.mode == "routed")
        self.clock.reached(routing.ids)
        return streams, routing

    def _at_once(self) -> tuple[jax.Array, jax.Array]:
        """One slab serves all chunks: each is finished before the next begins.

        Returns what is ready when the layer is over, and when it came to need its slab, if it has
        one.
        """
        runner, pool, shelf = self.runner, self.pool, self.batch.shelf
        resident, cold = pool.resident[self._layer], pool.cold
        slab = pool.take(self.number, 0) if pool.waves(self.number) else None
        parts = [part for part in (resident, slab) if part]
        ready: list[jax.Array] = []
        done: list[jax.Array] = []
        for index in shelf.sweep(again=not self.last):
            streams, routing = self._begin(index)

            def through_parts(routing: Routing = routing) -> list[jax.Array | None]:
                slots: jax.Array | None = None
                for part in parts:
                    if not ready and part is parts[-1]:
                        ready.append(routing.ids if slots is None else runner.tick(slots))
                    slots = runner.experts(routing, part, slots)
                return [slots]

            (slots,) = (
                through_parts()
                if cold is None
                else cold.complete(runner, self._layer, [routing], through_parts)
            )
            assert slots is not None  # every expert has an owner
            streams = runner.finish(self._place, streams, routing, slots)
            if index + 1 == len(self.batch.works):
                done.append(runner.tick(streams))
            shelf.put(index, streams)
            del streams, routing, slots, through_parts
        self.clock.ended(done[-1], together=False)
        return done[-1], (ready or done)[0]

    def _in_waves(self) -> None:
        """Slab by slab: all chunks pass their routers, then meet one slab after the other."""
        runner, pool, shelf, number = self.runner, self.pool, self.batch.shelf, self.number
        resident, cold, count = pool.resident[self._layer], pool.cold, len(self.batch.works)
        routings: Shelf[Routing] = shelf.beside()
        held: Shelf[jax.Array] = shelf.beside()
        ids: list[jax.Array] = []
        for index in shelf.sweep():
            streams, routing = self._begin(index)
            shelf.put(index, streams)
            routings.put(index, routing)
            ids.append(routing.ids)
            del streams, routing

        def through(part: LayerSlabs) -> jax.Array:
            """Experts of one slab on all chunks; returns what is ready when they have run."""
            ends: list[jax.Array] = []
            for index, _ in zip(routings.sweep(), held.sweep(), strict=True):
                slots = held.take(index) if held.holds(index) else None
                slots = runner.experts(routings.take(index, keep=True), part, slots)
                if index + 1 == count:
                    ends.append(runner.tick(slots))
                held.put(index, slots)
                del slots
            return ends[-1]

        def through_waves() -> list[jax.Array | None]:
            if self.step.mode == "routed":
                numbers = range(number * count, (number + 1) * count)
                asked = [self.notes.wait(one, NOTE_TIMEOUT_S).values for one in numbers]
                pool.routed(number, np.concatenate(asked))
            # The residents' share is dispatched before the slabs are: it hides what is still on
            # its way.
            ready = through(resident) if resident else ids[-1]
            for wave in range(pool.waves(number)):
                if wave:
                    pool.issue_ahead(number, wave)
                pool.computed(number, wave, through(pool.take(number, wave)), ready)
            if cold is None:
                return []
            return [held.take(index) if held.holds(index) else None for index in range(count)]

        if cold is None:
            through_waves()
        else:  # activations are on the device, see `plan.make_plan`
            completed = cold.complete(runner, self._layer, routings.trees, through_waves)
            for index, slots in enumerate(completed):
                assert slots is not None  # every expert has an owner
                held.put(index, slots)
                del slots
        self._finish(routings, held)

    def _finish(self, routings: Shelf[Routing], held: Shelf[jax.Array]) -> None:
        """What comes after the experts, on all chunks."""
        shelf = self.batch.shelf
        sweeps = (routings.sweep(again=False), held.sweep(again=False))
        for index, *_ in zip(shelf.sweep(again=not self.last), *sweeps, strict=True):
            streams = self.runner.finish(
                self._place, shelf.take(index), routings.take(index), held.take(index)
            )
            if index + 1 == len(self.batch.works):
                self.clock.ended(self.runner.tick(streams), together=True)
            shelf.put(index, streams)
            del streams


def _settle(
    pool: ExpertPool,
    steps: Sequence[streaming.Step],
    notes: streaming.Notes,
    usage: streaming.Usage,
    tokens: Sequence[int],
    choices: int,
) -> list[int]:
    """Adds the notes up; returns the distinct experts of each step.

    tokens   of each chunk, every one of which chose `choices` experts
    """
    counts = np.zeros((len(steps), usage.counts.shape[1]), np.int64)
    for note in notes.drain(NOTE_TIMEOUT_S):
        usage.add(note)
        chosen = note.counts(counts.shape[1])
        step, chunk = divmod(note.step, len(tokens))
        silent = tokens[chunk] - int(chosen.sum()) // choices
        if silent:
            raise NotANumberError(
                f"step {step}, layer {pool.layers[note.layer]}: scores of {silent} of "
                f"{tokens[chunk]} tokens are NaN: expected numbers; a weight of this layer, or an "
                "activation that reaches it, is not finite (check the checkpoint's files)"
            )
        counts[step] += chosen
    for number, step in enumerate(steps):
        missing = absent_experts(counts[number], pool.available(step))
        if missing:
            raise MissingExpertError(
                f"step {number}, layer {step.layer}: experts {missing} were routed to but are "
                f"neither resident nor moved in mode {step.mode!r}: this is a defect of the "
                "streaming plan, its output holds NaN"
            )
    return np.count_nonzero(counts, axis=1).tolist()


def plan_steps(
    pool: ExpertPool,
    mode: str,
    first_layer: int,
    tokens: Sequence[np.ndarray],
    tables: Mapping[int, np.ndarray],
) -> list[streaming.Step]:
    """The steps of a pass over `tokens` (real ids of each chunk).

    mode    "whole" or "routed"; hash layers of a routed pass are known exactly from the ids
    tables  tid2eid of the layers that hash ids, by their number in the model
    """
    steps = []
    for layer in range(first_layer, len(pool.layers)):
        table = tables.get(pool.layers[layer])
        if mode == "whole" or not pool.plan.streams:
            steps.append(streaming.Step(layer))
        elif table is not None:
            used = np.unique(np.concatenate([table[ids].reshape(-1) for ids in tokens]))
            steps.append(streaming.Step(layer, "exact", tuple(used.tolist())))
        else:
            steps.append(streaming.Step(layer, "routed"))
    return steps


class _StepClock:
    """Notes when the router of every (layer, chunk) has run, and when a layer is over.

    On a thread that only waits.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._times: list[float] = []
        self._together: list[bool] = []
        self._arrays: queue.SimpleQueue[jax.Array | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="step-clock", daemon=True)

    def __enter__(self) -> "_StepClock":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._arrays.put(None)
        self._thread.join()

    def reached(self, array: jax.Array) -> None:
        """A (layer, chunk) is over its router when `array` is ready."""
        self._arrays.put(array)

    def ended(self, array: jax.Array, *, together: bool) -> None:
        """A layer is over when `array` is ready.

        together  whether the chunks met its experts after the last router, slab by slab
        """
        self._together.append(together)
        self._arrays.put(array)

    def seconds(self) -> np.ndarray:
        """Seconds [layers, works], each from one router to the next.

        What follows a layer's last router, experts and the end, counts for the first chunk, which
        has waited for no other's; where the chunks went together it is divided among them.
        """
        self.__exit__()
        together = np.asarray(self._together)
        times = np.asarray(self._times).reshape(len(together), -1)
        begins = np.concatenate([[self._began_s], times[:-1, -1]])
        spans = np.diff(times, axis=1, prepend=begins[:, None])
        seconds, rest = spans[:, :-1], spans[:, -1]
        seconds[:, 0] += np.where(together, 0.0, rest)
        return seconds + np.where(together, rest / seconds.shape[1], 0.0)[:, None]

    def _watch(self) -> None:
        while (array := self._arrays.get()) is not None:
            # Whoever waits for the outputs of the pass gets the error.
            with contextlib.suppress(Exception):
                jax.block_until_ready(array)
            self._times.append(time.perf_counter())
