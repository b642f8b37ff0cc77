"""The engine: loads a checkpoint and reads prompts chunk by chunk into logits and state."""

import copy
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import streaming
from ds4jax import accounts, admission, events, passes, peers
from ds4jax.activations import on_device
from ds4jax.cache import (
    PausedPass,
    SequenceState,
    abstract_state,
    grow_state,
    new_layer_state,
    state_bytes,
)
from ds4jax.checkpoint import keys
from ds4jax.checkpoint import load as loading
from ds4jax.checkpoint.open import open_source
from ds4jax.checkpoint.source import TensorSource
from ds4jax.config import ConfigError, ModelConfig
from ds4jax.costs import row_shapes
from ds4jax.hosts import Handed, Hosts, Part
from ds4jax.plan import Plan, RunPlan, plan_local
from ds4jax.readings import Job, PrefillResult, Reading, Sink, Slice
from ds4jax.report import versions
from ds4jax.run_config import RunConfig, leaves
from ds4jax.runner import COMPILED, Runner, tiles
from ds4jax.stages import Piece, Stage, load_stages, merge_reports
from ds4jax.text import PromptError
from sharding import pipeline

FIRST_CAPACITY = 8192  # tokens; state buffers grow from here by factors of 4

# What another engine on the same weights may change, see `Engine.reconfigured`.
_OF_A_RUN = frozenset(
    (
        "config.numerics.preset",
        "config.numerics.compute",
        "config.numerics.simulate",
        "config.streaming.mode",
    )
)


@dataclasses.dataclass(frozen=True)
class Generation:
    """Greedy continuation: tokens [n] i32, the logits [n, V] that chose them, and the state.

    The state has read everything but the last of `tokens`.
    """

    tokens: np.ndarray
    logits: np.ndarray
    state: SequenceState


class Engine:
    """A loaded model; made by `load`, closed by leaving the `with` block or by `close`."""

    def __init__(
        self,
        stages: Sequence[Stage],
        config: RunConfig,
        available_bytes: int,
        load_seconds: float,
        fingerprint: str,
        run_plan: RunPlan | None = None,
        hosts: Hosts | None = None,
        parts: Sequence[Part] | None = None,
    ):
        """See `load`; in a run of several processes `stages` are those of this one.

        parts  of all processes
        """
        self.run_plan = run_plan
        self.model_config: ModelConfig = stages[0].runner.config
        self.numerics = stages[0].runner.numerics
        self.config = config
        self.device = stages[0].device
        self.available_bytes = available_bytes
        self.load_seconds = load_seconds
        self.fingerprint = fingerprint
        self.row_shapes = row_shapes(config.prefill.chunk_tokens)
        # Of all stages of the run, wherever they are.
        self.plans = tuple(stage.plan for stage in stages)
        self.devices = tuple(stage.device for stage in stages)
        if parts is not None:
            by_id = {each.id: each for each in jax.devices()}
            self.plans = tuple(plan for part in parts for plan in part.plans)
            self.devices = tuple(by_id[id] for part in parts for id in part.device_ids)
        self._hosts = hosts
        self._stages: Sequence[Stage] = stages
        # Row shapes whose head is compiled.
        self._shapes_seen: set[int] = set()

    @property
    def page_locking(self) -> tuple[streaming.pinned.PinReport, ...]:
        """What page-locking host memory took, for every stage of this process that streams."""
        pinners = (stage.pool.pinner for stage in self._stages)
        return tuple(pinner.report() for pinner in pinners if pinner is not None)

    def wide_experts(self) -> int:
        """Experts of this process whose FP8 products take several passes."""
        return sum(stage.pool.wide_experts() for stage in self._stages)

    @property
    def plan(self) -> Plan:
        """The plan of the first stage, which is the only one unless layers were split."""
        return self.plans[0]

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def can_run(self, config: RunConfig) -> bool:
        """Whether `reconfigured` takes `config`."""
        changed = {
            leaf.key for leaf in leaves() if _leaf(config, leaf.key) != _leaf(self.config, leaf.key)
        }
        return changed <= _OF_A_RUN and config.numerics.resolve().dtype == self.numerics.dtype

    def reconfigured(self, config: RunConfig) -> "Engine":
        """Another engine on the same weights, to be used in turns with this one.

        Raises ConfigError when more than roundings and how experts are asked for would change.
        Closing one of them closes both.
        """
        if not self.can_run(config):
            raise ConfigError(
                "the engine cannot run this configuration on its weights: expected one that "
                f"differs in {', '.join(sorted(_OF_A_RUN))} only, with the same compute dtype"
            )
        other = copy.copy(self)
        other.config, other.numerics = config, config.numerics.resolve()
        other._stages = [stage.reconfigured(other.numerics, config) for stage in self._stages]
        other._shapes_seen = set()
        return other

    def close(self) -> None:
        """Lets go of the weights; using the engine afterwards raises RuntimeError."""
        for stage in self._stages:
            stage.pool.close()
        self._stages = ()

    def prefill(
        self,
        ids: Sequence[int] | np.ndarray,
        state: SequenceState | None = None,
        *,
        on_event: events.Observer = events.ignore,
        sink: Sink | None = None,
        stop: threading.Event | None = None,
        donate_state: bool = False,
        paused: PausedPass | None = None,
        name: str = "prompt",
    ) -> PrefillResult:
        """Reads `ids` [tokens] after what `state` has seen (nothing when None).

        Any split of a sequence over calls gives the same result within the float limits of the
        numerics setting. `state` stays usable unless donate_state lets the engine work in it.

        on_event  is called for every event, see `events`
        sink      takes the output rows chunk by chunk instead of the result; it sees each name of
                  the logits mode with arrays [n, ...], in order
        stop      when set, reading ends: after the current chunk, or between two layers where
                  several chunks pass through the layers together; the report says so
        paused    instead of `state`: goes on with what an earlier call was stopped at; `ids` are
                  the tokens from the position of its state on. Consumed

        Raises PromptError for an empty prompt, ids outside the vocabulary and prompts that are
        too long, ConfigError for a state of another model, PlanError when the state does not fit.
        """
        if paused is not None:
            state, donate_state = paused.state, True
        tokens = self._check_prompt(ids, name, state)
        job = Job(tokens, name, run_tokens=len(tokens))
        if state is not None:
            self._check_state(state)
            if not donate_state:
                state = jax.tree.map(jnp.copy, state)
        if paused is not None:
            self._check_paused(paused, len(tokens))
        mode = self.config.prefill.logits
        (result,) = self._read([job], state, mode, on_event, sink, stop, paused)
        return result

    def prefill_many(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        *,
        names: Sequence[str] | None = None,
        on_event: events.Observer = events.ignore,
        sink: Sink | None = None,
        stop: threading.Event | None = None,
    ) -> Iterator[PrefillResult]:
        """Reads several sequences of any lengths, each from position 0 and alone.

        All prompts are checked before the first is read. Results come in order; with chunk-major
        order a caller that drops each state before asking for the next result holds one state at a
        time, with layer-major order the sequences of a micro-batch hold theirs together. Arguments
        are as in `prefill`; a stop ends the iteration after the sequences that it cut short.
        """
        names = names or [f"prompt{i}" for i in range(len(prompts))]
        checked = [
            self._check_prompt(ids, name, None) for ids, name in zip(prompts, names, strict=True)
        ]
        if not checked:
            raise PromptError("there are no prompts: expected at least one")
        total = sum(len(tokens) for tokens in checked)

        befores = np.cumsum([0, *(len(tokens) for tokens in checked)]).tolist()
        jobs = [
            Job(tokens, name, index, len(checked), before, total)
            for index, (tokens, name, before) in enumerate(
                zip(checked, names, befores, strict=False)
            )
        ]
        return self._read(jobs, None, self.config.prefill.logits, on_event, sink, stop, None)

    def generate(
        self,
        ids: Sequence[int] | np.ndarray,
        count: int,
        state: SequenceState | None = None,
    ) -> Generation:
        """Reads `ids` and continues them with the `count` most likely tokens, one at a time.

        Every token goes through the same programs as a prompt chunk of one token; ties take the
        lower id, and an end-of-sentence token does not end the generation.
        """
        if count < 1:
            raise PromptError(f"the number of tokens to generate is {count}, expected at least 1")
        if self._hosts is not None:
            raise ConfigError(
                f"a run of {self._hosts.world} processes cannot generate: the first one would need "
                "the tokens that the last one chooses; load the model in one process"
            )
        name = "generate"
        tokens = self._check_prompt(ids, name, state, more=count - 1)
        if state is not None:
            self._check_state(state)
            state = jax.tree.map(jnp.copy, state)
        chosen: list[int] = []
        logits: list[np.ndarray] = []
        for _ in range(count):
            job = Job(tokens, name, run_tokens=len(tokens))
            (result,) = self._read([job], state, "last", events.ignore, None, None, None)
            assert result.logits is not None
            logits.append(result.logits[0])
            chosen.append(int(np.argmax(result.logits[0])))
            state, tokens = result.state, np.asarray(chosen[-1:], np.int32)
        assert state is not None
        return Generation(np.asarray(chosen, np.int32), np.stack(logits), state)

    def _read(
        self,
        jobs: Sequence[Job],
        state: SequenceState | None,
        mode: str,
        on_event: events.Observer,
        sink: Sink | None,
        stop: threading.Event | None,
        paused: PausedPass | None,
    ) -> Iterator[PrefillResult]:
        """Reads checked sequences in micro-batches; consumes `state`, which is of the first one."""
        self._require_open()
        stopped = (lambda: False) if stop is None else stop.is_set
        readings: dict[int, Reading] = {}
        starts = {jobs[0].index: state}

        def begin(slices: Sequence[Slice]) -> None:
            """Makes room for the sequences that these chunks are the first of."""
            for job in {piece.job.index: piece.job for piece in slices}.values():
                if job.index not in readings:
                    before = starts.pop(job.index, None)
                    reused = before.position if before is not None else 0
                    self._make_room(job.index, before, reused + len(job.ids))
                    readings[job.index] = Reading(job, reused, sink)
                    on_event(
                        events.PromptStarted(job.index, job.prompts, job.name, len(job.ids), reused)
                    )

        batches = self._micro_batches(jobs, paused)
        if self._hosts is not None:
            self._hosts.agree_on_prompts([job.ids for job in jobs])
        try:
            if len(self.plans) > 1:
                run = _Pipelined(self, list(batches), readings, mode, on_event, stopped)
                run.drive(begin)
                yield from self._finished(readings, everything=True)
                return
            following = next(batches, None)
            while (slices := following) is not None:
                following = next(batches, None)
                begin(slices)
                stop_state = self._read_batch(
                    slices, following, readings, mode, on_event, stopped, paused
                )
                paused = None
                yield from self._finished(readings, everything=stopped(), paused=stop_state)
                if stopped():
                    return
        finally:
            for stage in self._stages:
                stage.states.clear()
                stage.abandon()

    def _finished(
        self,
        readings: dict[int, Reading],
        *,
        everything: bool,
        paused: Mapping[int, PausedPass] | None = None,
    ) -> Iterator[PrefillResult]:
        """Results of the sequences that have been read to their end, or of all."""
        for index in sorted(readings):
            reading = readings[index]
            if everything or reading.read == len(reading.job.ids):
                held = (paused or {}).get(index)
                state = held.state if held is not None else self._state_of(reading)
                yield readings.pop(index).result(str(self.numerics), state, held)

    def _state_of(self, reading: Reading) -> SequenceState:
        """Takes the state of a sequence out of the stages."""
        layers: list[Any] = [None] * self.model_config.num_hidden_layers
        for stage in self._stages:
            layers[stage.layers.start : stage.layers.stop] = stage.take_state(reading.job.index)
        return SequenceState(reading.reused + reading.read, tuple(layers))

    def _micro_batches(
        self, jobs: Sequence[Job], paused: PausedPass | None
    ) -> Iterator[list[Slice]]:
        """The chunks of all jobs in order, as many at a time as pass through a layer together."""
        batch: list[Slice] = []
        for length in paused.tokens if paused is not None else ():
            begun = sum(piece.length for piece in batch)
            batch.append(self._slice(jobs[0], begun, length))
        begun = sum(piece.length for piece in batch)
        if batch:
            yield batch
            batch = []
        chunk = self.config.prefill.chunk_tokens
        most = min(plan.micro_batch_tokens for plan in self.plans)
        for job in jobs:
            for first in range(begun, len(job.ids), chunk):
                if batch and (len(batch) + 1) * chunk > most:
                    yield batch
                    batch = []
                batch.append(self._slice(job, first, min(chunk, len(job.ids) - first)))
            begun = 0
        if batch:
            yield batch

    def _slice(self, job: Job, first: int, length: int) -> Slice:
        return Slice(job, first, length, next(n for n in self.row_shapes if n >= length))

    def _read_batch(
        self,
        slices: Sequence[Slice],
        following: Sequence[Slice] | None,
        readings: Mapping[int, Reading],
        mode: str,
        on_event: events.Observer,
        stopped: Callable[[], bool],
        paused: PausedPass | None,
    ) -> dict[int, PausedPass]:
        """Takes a micro-batch through the only stage and delivers its outputs.

        following  the micro-batch after it, whose first slabs come while outputs are made
        Returns what is needed to go on with each sequence when it was stopped between layers.
        """
        (stage,) = self._stages
        began, compiled = time.perf_counter(), COMPILED.measure()
        pieces = [piece.piece(readings[piece.job.index].reused) for piece in slices]
        batch = (
            stage.prepare(pieces, None)
            if paused is None
            else stage.prepare(pieces, paused.streams, paused.layer)
        )
        layers, tokens = len(stage.layers), sum(piece.length for piece in slices)
        before = layers * (slices[0].job.done_before + slices[0].first)

        def on_layer(layer: int) -> None:
            done, total = before + (layer + 1) * tokens, layers * slices[0].job.run_tokens
            on_event(events.LayerDone(layer, layers, len(slices), done, total))

        report = stage.run(
            batch,
            pieces,
            on_layer=on_layer,
            # A single chunk is read to its end: there is nothing to gain from a pause.
            paused=stopped if len(slices) > 1 else lambda: False,
        )
        if batch.layer == layers:
            if following is not None and not stopped():
                stage.prefetch([piece.ids for piece in following])
            streams = batch.streams
            wall = time.perf_counter() - began
            self._deliver_batch(slices, streams, readings, mode, on_event, report, wall, compiled)
            return {}
        self._tell_pass(slices, report, batch.layer, on_event)
        held = {}
        for index in {piece.job.index for piece in slices}:
            reading = readings[index]
            reading.passes.append(report)
            own = [number for number, piece in enumerate(slices) if piece.job.index == index]
            held[index] = PausedPass(
                batch.layer,
                self._state_of(reading),
                tuple(batch.streams[number] for number in own),
                tuple(slices[number].length for number in own),
            )
        return held

    def _tell_pass(
        self,
        slices: Sequence[Slice],
        report: passes.PassReport,
        end_layer: int,
        on_event: events.Observer,
    ) -> None:
        tokens = sum(piece.length for piece in slices)
        on_event(accounts.pass_done(report, self.plans, end_layer, tokens, len(slices)))

    def _deliver_batch(
        self,
        slices: Sequence[Slice],
        streams: Sequence[jax.Array],
        readings: Mapping[int, Reading],
        mode: str,
        on_event: events.Observer,
        report: passes.PassReport,
        wall_seconds: float,
        compiled: Callable[[], tuple[int, float]],
    ) -> None:
        """Makes the outputs of a micro-batch that has left the last layer."""
        for index in {piece.job.index for piece in slices}:
            readings[index].passes.append(report)
        self._tell_pass(slices, report, self.model_config.num_hidden_layers, on_event)
        runner, device_seconds = self._stages[-1].runner, sum(report.work_seconds)
        for piece, leaving, seconds in zip(slices, streams, report.work_seconds, strict=True):
            reading, began = readings[piece.job.index], time.perf_counter()
            self._deliver(
                runner, mode, leaving, piece.length, piece.following, piece.ends, reading.put
            )
            self._shapes_seen.add(piece.rows)
            programs, compile_seconds = compiled()
            compiled = COMPILED.measure()
            reading.read += piece.length
            event = events.ChunkDone(
                prompt=piece.job.index,
                chunk=piece.first // self.config.prefill.chunk_tokens,
                position=reading.reused + piece.first,
                tokens=piece.length,
                rows=piece.rows,
                # Chunks of a micro-batch share its wall time by the device time each one took.
                seconds=wall_seconds * seconds / device_seconds + time.perf_counter() - began,
                compiled=programs,
                compile_seconds=compile_seconds,
                done=piece.job.done_before + piece.first + piece.length,
                total=piece.job.run_tokens,
            )
            reading.chunks.append(event)
            on_event(event)

    def _deliver(
        self,
        runner: Runner,
        mode: str,
        streams: jax.Array,
        rows: int,
        following: np.ndarray,
        ends: bool,
        put: Sink,
    ) -> None:
        """Makes the output rows of a chunk, at most 128 at a time."""
        # The head is compiled for every row shape, so that the next prompt compiles nothing.
        if mode == "none" or (mode == "last" and not ends and len(streams) in self._shapes_seen):
            return
        streams = on_device(streams, self._stages[-1].device)
        if mode == "last":
            row = runner.logits(streams, rows - 1, rows)
            if ends:
                put("logits", row)
        elif mode == "all":
            for first, stop in tiles(rows):
                put("logits", runner.logits(streams, first, stop))
        elif mode == "logprobs":
            top = self.config.prefill.top_logprobs
            for first, stop in tiles(rows):
                part = runner.logprobs(streams, first, stop, following, top)
                put("logprobs", part.next_token)
                put("top_logprobs", part.top)
                put("top_tokens", part.tokens)

    def _make_room(self, sequence: int, state: SequenceState | None, tokens: int) -> None:
        """Gives the stages `state`, or an empty one, with buffers for `tokens` tokens."""
        config, capacity = (
            self.model_config,
            capacity_tokens(self.config, self.model_config, tokens),
        )
        if state is not None and _capacity(state, config) < capacity:
            state = grow_state(state, config, capacity)
        for stage in self._stages:
            if state is not None:
                own = state.layers[stage.layers.start : stage.layers.stop]
                layers = list(jax.device_put(own, stage.device))
            else:
                wanted = admission.Price(
                    weights_bytes=0,
                    state_bytes=state_bytes(config, self.numerics, capacity, stage.layers),
                    workspace_bytes=0,
                )
                admission.admit(wanted, stage.device, f"the state of {capacity} tokens")
                layers = [
                    new_layer_state(
                        config, config.layer_ratios[layer], self.numerics, capacity, stage.device
                    )
                    for layer in stage.layers
                ]
            stage.states[sequence] = layers

    def _check_prompt(
        self, ids: Sequence[int] | np.ndarray, name: str, state: SequenceState | None, more: int = 0
    ) -> np.ndarray:
        before = state.position if state is not None else 0
        return check_prompt(ids, name, before, self.model_config, self.config, more)

    def _check_state(self, state: SequenceState) -> None:
        """Raises ConfigError unless the arrays of `state` are those of this model and numerics."""
        capacity = _capacity(state, self.model_config)
        wanted = abstract_state(self.model_config, self.numerics, capacity)
        here = {layer for stage in self._stages for layer in stage.layers}
        layers = tuple(each if n in here else None for n, each in enumerate(wanted.layers))
        found = jax.tree_util.tree_leaves_with_path(state.layers)
        expected = jax.tree_util.tree_leaves_with_path(layers)
        for (path, leaf), (wanted_path, shape) in zip(found, expected, strict=False):
            if path != wanted_path or leaf.shape != shape.shape or leaf.dtype != shape.dtype:
                raise ConfigError(
                    f"state: layers{jax.tree_util.keystr(path)} is "
                    f"{leaf.dtype}{list(leaf.shape)}, expected layers"
                    f"{jax.tree_util.keystr(wanted_path)} {shape.dtype}{list(shape.shape)}: it "
                    "belongs to another model or numerics setting"
                )
        if len(found) != len(expected):
            raise ConfigError(
                f"state: has {len(found)} arrays in {len(state.layers)} layers, expected "
                f"{len(expected)} in {len(here)}: it belongs to another model or process"
            )

    def _check_paused(self, paused: PausedPass, tokens: int) -> None:
        """Raises ConfigError unless `paused` is a pass of this engine over the next tokens."""
        layers, chunk = self.model_config.num_hidden_layers, self.config.prefill.chunk_tokens
        if len(self.plans) > 1:
            raise ConfigError(
                f"paused: the engine has {len(self.plans)} stages, a paused pass goes on with "
                "one: resume without config.pipeline.split"
            )
        if not 0 < paused.layer < layers:
            raise ConfigError(
                f"paused: its next layer is {paused.layer}, expected 1..{layers - 1}: it belongs "
                "to another model"
            )
        if max(paused.tokens) > chunk or sum(paused.tokens) > tokens:
            raise ConfigError(
                f"paused: its chunks have {list(paused.tokens)} tokens, expected at most "
                f"config.prefill.chunk_tokens {chunk} each and {tokens} together: resume with the "
                "chunk size and the tokens of the run that was stopped"
            )

    def _require_open(self) -> None:
        if not self._stages:
            raise RuntimeError("the engine is closed: load the checkpoint again")


class _Pipelined:
    """Micro-batches on several stages at once; what `Engine._read_batch` does on one.

    In a run of several processes it drives the stages of this one, between the links to the others.
    """

    def __init__(
        self,
        engine: Engine,
        batches: Sequence[list[Slice]],
        readings: Mapping[int, Reading],
        mode: str,
        on_event: events.Observer,
        stopped: Callable[[], bool],
    ):
        self.engine, self.batches, self.readings = engine, batches, readings
        self.mode, self.on_event, self.stopped = mode, on_event, stopped
        self._reports: list[list[passes.PassReport]] = [[] for _ in batches]
        self._pieces: list[list[Piece]] = [[] for _ in batches]
        self._last_s = 0.0
        self._cut = len(batches)  # the first micro-batch that a stop keeps from being read

    def drive(self, begin: Callable[[Sequence[Slice]], None]) -> None:
        """Reads all micro-batches, up to a stop; errors of a stage are raised as they are."""
        hosts = self.engine._hosts

        def source(number: int, chunk: int) -> tuple[jax.Array, ...]:
            handed = self._enter(number)
            if handed is None:
                self._cut = min(self._cut, number)
                return ()
            begin(self.batches[number])
            self._pieces[number] = [
                piece.piece(self.readings[piece.job.index].reused) for piece in self.batches[number]
            ]
            self._reports[number] = list(handed.reports)
            return handed.streams

        run = pipeline.Pipeline(
            [
                pipeline.Stage(
                    f"layers {stage.layers.start} to {stage.layers.stop - 1}",
                    functools.partial(self._run, stage),
                    # What another process has sent is on this device already, and nobody else's.
                    stage.device if index else None,
                    prefetch=functools.partial(self._prefetch, stage),
                )
                for index, stage in enumerate(self.engine._stages)
            ]
        )
        units = [pipeline.Unit(n, 0) for n in range(len(self.batches))]
        self._last_s = time.perf_counter()
        try:
            run.run(units, source, self._sink, abort=hosts.close if hosts is not None else None)
            if hosts is not None:
                hosts.flush()
            return
        except pipeline.PipelineError as error:
            failed = error.__cause__ or error
        finally:
            for stage in self.engine._stages:
                stage.abandon()
        raise failed  # out here: with its own cause, which tells whether a user can mend it

    def _enter(self, number: int) -> Handed | None:
        """A micro-batch as it comes to the first stage of this process; None for a stop."""
        hosts = self.engine._hosts
        if hosts is not None and not hosts.first:
            return hosts.receive()
        # The first one is always read: a result is what a stopped run can go on from.
        return None if number >= self._cut or (number and self.stopped()) else Handed((), ())

    def _prefetch(self, stage: Stage, number: int, chunk: int) -> None:
        if number < self._cut:
            stage.prefetch([piece.ids for piece in self.batches[number]])

    def _run(
        self, stage: Stage, number: int, chunk: int, streams: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        hosts = self.engine._hosts
        if number < self._cut:
            pieces = self._pieces[number]
            batch = stage.prepare(pieces, streams or None)
            self._reports[number].append(stage.run(batch, pieces))
            streams = batch.streams
        if hosts is not None and hosts.queued and stage is self.engine._stages[-1]:
            # Here, so that programs of the next micro-batch queue up behind the hand-off.
            self._leave(hosts, number, streams)
        return streams

    def _leave(self, hosts: Hosts, number: int, streams: tuple[jax.Array, ...]) -> None:
        """Hands a micro-batch, or word of a stop, to the next process."""
        stopped = number >= self._cut
        hosts.send(None if stopped else Handed(streams, tuple(self._reports[number])))

    def _sink(self, number: int, chunk: int, streams: tuple[jax.Array, ...]) -> None:
        hosts, stopped = self.engine._hosts, number >= self._cut
        if hosts is not None and not hosts.last:
            if not hosts.queued:
                self._leave(hosts, number, streams)
            for piece in () if stopped else self.batches[number]:
                self.readings[piece.job.index].read += piece.length
            return
        if stopped:
            return
        report, now = merge_reports(self._reports[number]), time.perf_counter()
        wall, self._last_s = now - self._last_s, now
        self.engine._deliver_batch(
            self.batches[number],
            streams,
            self.readings,
            self.mode,
            self.on_event,
            report,
            wall,
            COMPILED.measure(),
        )


def load(
    checkpoint: str | PathLike[str] | TensorSource,
    config: RunConfig | Mapping[str, Any] | str | PathLike[str] | None = None,
    *,
    prompt_tokens: int | Sequence[int] | None = None,
    device: jax.Device | None = None,
    on_event: events.Observer = events.ignore,
    hosts: Hosts | None = None,
) -> Engine:
    """Loads a checkpoint onto `device` (default: the first one JAX has).

    checkpoint     a folder, "synthetic:NAME" (see `open_source`), or an open source
    config         a RunConfig, a TOML file, dotted overrides such as
                   {"prefill.chunk_tokens": 1024}, or None for the defaults
    prompt_tokens  of the longest sequence that is going to be read, or of all of them, when known:
                   the plan is made for these, and a state that does not fit is refused now
                   instead of at the prompt
    hosts          the processes of the run, see `hosts.joined`: this one loads the layers of its
                   own stages, and all of them have to make the same calls

    Nothing large is read or allocated before the checkpoint is known to be complete and the run
    to fit. Raises CheckpointError, ConfigError or PlanError.
    """
    run_config = as_run_config(config)
    if isinstance(checkpoint, TensorSource):
        return _load(checkpoint, run_config, prompt_tokens, device, on_event, hosts)
    with open_source(checkpoint, run_config.synthetic) as source:
        return _load(source, run_config, prompt_tokens, device, on_event, hosts)


def _load(
    source: TensorSource,
    run_config: RunConfig,
    prompt_tokens: int | Sequence[int] | None,
    device: jax.Device | None,
    on_event: events.Observer,
    hosts: Hosts | None,
) -> Engine:
    began = time.perf_counter()
    model_config, numerics = source.config, run_config.numerics.resolve()
    if run_config.prefill.top_logprobs > model_config.vocab_size:
        raise ConfigError(
            f"config.prefill.top_logprobs is {run_config.prefill.top_logprobs}, expected at most "
            f"the vocabulary size {model_config.vocab_size}"
        )
    local = jax.local_devices() if device is None else [device]
    keys.check_complete(source)
    fingerprint = loading.fingerprint(source)
    prompts = [prompt_tokens] if isinstance(prompt_tokens, int) else list(prompt_tokens or ())
    capacity = capacity_tokens(run_config, model_config, max(prompts, default=1))
    run_plan, parts = None, None
    if hosts is None:
        run_plan = plan_local(source, run_config, local, prompts, capacity)
        plans, devices = list(run_plan.stages), [local[place] for place in run_plan.places]
        available = sum(admission.device_bytes(each) for each in set(devices))
    else:
        hosts.agree("the run", _facts(run_config, fingerprint))
        part = hosts.plan(source, run_config, local, max(prompts, default=None), capacity)
        parts = hosts.share(part)
        plans = list(part.plans)
        devices = [next(each for each in local if each.id == id) for id in part.device_ids]
        available = sum(part.available_bytes for part in parts)
    _require_peers(source, run_config, plans, devices)
    total = sum(plan.price.weights_bytes for plan in plans) + keys.expert_bytes(
        model_config, source.infos()
    ) * (model_config.n_routed_experts * sum(len(plan.layers) for plan in plans))

    def on_bytes(done: int) -> None:
        on_event(events.WeightsLoaded(done, total, time.perf_counter() - began))

    loaded = load_stages(source, plans, devices, numerics, run_config.streaming, on_bytes)
    engine = Engine(
        loaded,
        run_config,
        available,
        time.perf_counter() - began,
        fingerprint,
        run_plan,
        hosts,
        parts,
    )
    if hosts is not None:
        hosts.connect(engine.devices, run_config.pipeline)
    return engine


def _facts(config: RunConfig, fingerprint: str) -> dict[str, Any]:
    """What all processes of a run have to have in common, but for their prompts."""
    settings = {
        f"config.{name}": values for name, values in config.to_dict().items() if name != "prompt"
    }
    return {**settings, "the checkpoint": fingerprint, **versions()}


def _require_peers(
    source: TensorSource,
    config: RunConfig,
    plans: Sequence[Plan],
    devices: Sequence[jax.Device],
) -> None:
    """Raises ConfigError or PlanError when the neighbours of `config.peer` cannot serve."""
    for plan in plans:
        peers.require_halves(plan.experts.peer, plan.experts.residency, config.prefill.chunk_tokens)
    prices = [
        (
            peers.price(
                source.config,
                config.numerics.resolve(),
                config.prefill.chunk_tokens,
                plan.experts.residency,
                plan.experts.peer,
                keys.expert_bytes(source.config, source.infos()),
                plan.experts.resolved_window,
            ),
            peers.find(plan.experts.peer.device, device),
        )
        for plan, device in zip(plans, devices, strict=True)
        if plan.experts.peer is not None
    ]
    taken: dict[jax.Device, int] = {}
    for plan, device in zip(plans, devices, strict=True):
        taken[device] = taken.get(device, 0) + plan.price.total_bytes
    peers.require_room(prices, taken)


def as_run_config(
    config: RunConfig | Mapping[str, Any] | str | PathLike[str] | None,
) -> RunConfig:
    """The configuration that `load` was given, in any of its forms."""
    if config is None:
        return RunConfig()
    if isinstance(config, RunConfig):
        return config
    if isinstance(config, Mapping):
        return RunConfig().replace(config)
    return RunConfig.from_toml(config)


def _leaf(config: RunConfig, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, key.split(".")[1:], config)


def capacity_tokens(config: RunConfig, model_config: ModelConfig, tokens: int) -> int:
    """Tokens that state buffers for `tokens` tokens have room for.

    A few fixed sizes, so that prompts of different lengths share programs.
    """
    if config.prefill.max_tokens is not None:
        return config.prefill.max_tokens
    capacity = FIRST_CAPACITY
    while capacity < tokens:
        capacity *= 4
    return min(capacity, model_config.max_position_embeddings)


def check_prompt(
    ids: Sequence[int] | np.ndarray,
    name: str,
    before: int,
    model_config: ModelConfig,
    config: RunConfig,
    more: int = 0,
) -> np.ndarray:
    """The token ids as i32, if they can be read.

    before  tokens that the state has read; more  tokens that come after these
    Raises PromptError for ids that are none, outside the vocabulary, or too many.
    """
    tokens = np.asarray(ids)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise PromptError(
            f"{name}: the token ids are {tokens.dtype} of shape {list(tokens.shape)}, expected "
            "whole numbers in one dimension"
        )
    if not tokens.size:
        raise PromptError(f"{name} has no tokens: expected at least one to read")
    vocabulary = model_config.vocab_size
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocabulary))
    if outside.size:
        raise PromptError(
            f"{name}: token {outside[0]} has the id {tokens[outside[0]]}, expected 0 to "
            f"{vocabulary - 1}: was the prompt encoded with the tokenizer of another model?"
        )
    end = before + len(tokens) + more
    for limit, key in (
        (model_config.max_position_embeddings, "max_position_embeddings of the model"),
        (config.prefill.max_tokens, "config.prefill.max_tokens"),
    ):
        if limit is not None and end > limit:
            raise PromptError(
                f"{name} ends at position {end}, expected at most {limit} ({key}): shorten it"
            )
    return tokens.astype(np.int32)


def _capacity(state: SequenceState, config: ModelConfig) -> int:
    """Tokens that the buffers of `state` have room for."""
    return min(
        (
            # Token (n + 1) * ratio - 1 is the first to close an entry that needs another row.
            ratio * (layer.compressed.shape[0] + 1) - 1
            for ratio, layer in zip(config.layer_ratios, state.layers, strict=False)
            if layer is not None and layer.compressed is not None
        ),
        default=config.max_position_embeddings,
    )
