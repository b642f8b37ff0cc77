"""The engine: reads prompts chunk by chunk into logits and state."""

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
from ds4jax import admission, events
from ds4jax.cache import (
    PausedPass,
    SequenceState,
    capacity_for,
    grow_state,
    new_layer_state,
    state_bytes,
    state_capacity,
)
from ds4jax.checkpoint.open import open_source
from ds4jax.checkpoint.source import TensorSource
from ds4jax.checks import check_paused, check_prompt, check_state
from ds4jax.config import ConfigError, ModelConfig
from ds4jax.costs import row_shapes
from ds4jax.hosts import Hosts
from ds4jax.loading import Loaded, load_model
from ds4jax.outputs import Outputs
from ds4jax.pipelined import Pipelined
from ds4jax.plan import Plan
from ds4jax.readings import Job, PrefillResult, Reading, Sink, Slice, micro_batches
from ds4jax.run_config import RunConfig, leaves
from ds4jax.runner import COMPILED
from ds4jax.stages import Stage
from ds4jax.text import PromptError

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
    """Greedy continuation: tokens [n] i32, the logits f32 [n, V] that chose them, and the state.

    The state has read everything but the last of `tokens`.
    """

    tokens: np.ndarray
    logits: np.ndarray
    state: SequenceState


class Engine:
    """A loaded model; made by `load`, closed by leaving the `with` block or by `close`."""

    def __init__(self, loaded: Loaded, config: RunConfig, hosts: Hosts | None = None):
        """See `load`; in a run of several processes `loaded` has the stages of this one."""
        stages = loaded.stages
        self.run_plan = loaded.run_plan
        self.model_config: ModelConfig = stages[0].runner.config
        self.numerics = stages[0].runner.numerics
        self.config = config
        self.device = stages[0].device
        self.available_bytes = loaded.available_bytes
        self.load_seconds, self.load_compiled = loaded.seconds, loaded.compiled
        self.fingerprint = loaded.fingerprint
        self.row_shapes = row_shapes(config.prefill.chunk_tokens)
        # Of all stages of the run, wherever they are.
        self.plans, self.devices = loaded.plans, loaded.devices
        self._hosts = hosts
        self._stages: Sequence[Stage] = stages
        self._closed = threading.Event()  # shared by engines on the same weights
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
    def layers(self) -> range:
        """The layers of this process."""
        self._require_open()
        return range(self._stages[0].layers.start, self._stages[-1].layers.stop)

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
        self._closed.set()
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
                  several chunks pass through the layers together, or on several stages after the
                  micro-batches that are on their way; the report says so
        paused    instead of `state`: goes on with what an earlier call was stopped at; `ids` are
                  the tokens from the position of its state on. Consumed

        Raises PromptError for an empty prompt, ids outside the vocabulary and prompts that are
        too long, ConfigError for a state of another model, PlanError when the state does not fit.
        """
        self._require_open()
        if paused is not None:
            state, donate_state = paused.state, True
        tokens = self._check_prompt(ids, name, state)
        job = Job(tokens, name, run_tokens=len(tokens))
        if state is not None:
            check_state(state, self.model_config, self.numerics, self.layers)
            if not donate_state:
                state = jax.tree.map(jnp.copy, state)
        if paused is not None:
            check_paused(paused, len(tokens), self.model_config, self.config, len(self.plans))
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
        time, with layer-major order the sequences of a micro-batch hold theirs together, and on
        several stages all do. Between two results the engine can be used for other calls. Arguments
        are as in `prefill`; a stop ends the iteration after the sequences that it cut short.
        """
        self._require_open()
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
        lower id, and an end-of-sentence token does not end the generation. In a run of several
        processes the last one chooses, and alone has the logits.
        """
        self._require_open()
        if count < 1:
            raise PromptError(f"the number of tokens to generate is {count}, expected at least 1")
        hosts, last = self._hosts, self._hosts is None or self._hosts.last
        name = "generate"
        tokens = self._check_prompt(ids, name, state, more=count - 1)
        if state is not None:
            check_state(state, self.model_config, self.numerics, self.layers)
            state = jax.tree.map(jnp.copy, state)
        chosen: list[int] = []
        logits: list[np.ndarray] = []
        for _ in range(count):
            job = Job(tokens, name, run_tokens=len(tokens))
            (result,) = self._read([job], state, "last", events.ignore, None, None, None)
            token = 0
            if last:
                assert result.logits is not None
                logits.append(result.logits[0])
                token = int(np.argmax(result.logits[0]))
            chosen.append(token if hosts is None else hosts.choose(token))
            state, tokens = result.state, np.asarray(chosen[-1:], np.int32)
        assert state is not None
        rows = np.array(logits, np.float32).reshape(-1, self.model_config.vocab_size)
        return Generation(np.asarray(chosen, np.int32), rows, state)

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
            self._require_open()
            for job in {piece.job.index: piece.job for piece in slices}.values():
                if job.index not in readings:
                    before = starts.pop(job.index, None)
                    reused = before.position if before is not None else 0
                    self._make_room(job, before, reused + len(job.ids))
                    readings[job.index] = Reading(job, reused, sink)

        batches = micro_batches(
            jobs,
            paused.tokens if paused is not None else (),
            self.config.prefill.chunk_tokens,
            min(plan.micro_batch_tokens for plan in self.plans),
            self.row_shapes,
        )
        outputs = Outputs(
            self._stages[-1],
            self.plans,
            self.config.prefill,
            mode,
            readings,
            self._shapes_seen,
            on_event,
        )
        if self._hosts is not None:
            self._hosts.agree_on_prompts([job.ids for job in jobs])
        try:
            if len(self.plans) > 1:
                units = list(batches)
                # Events belong to this thread, and what comes later begins on another one.
                begin(units[0])
                outputs.announce(units[0])
                Pipelined(
                    self._stages,
                    self._hosts,
                    units,
                    readings,
                    begin=begin,
                    deliver=outputs.deliver,
                    stopped=stopped,
                ).drive()
                yield from self._finished(readings, everything=True)
                return
            following = next(batches, None)
            while (slices := following) is not None:
                following = next(batches, None)
                begin(slices)
                outputs.announce(slices)
                stop_state = self._read_batch(
                    slices, following, readings, outputs, on_event, stopped, paused
                )
                paused = None
                yield from self._finished(readings, everything=stopped(), paused=stop_state)
                if stopped():
                    return
        except Exception:
            self._require_open()  # if it was closed meanwhile, that is the reason
            raise
        finally:
            for stage in self._stages:
                for job in jobs:
                    stage.states.pop(job, None)
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
                self._require_open()
                held = (paused or {}).get(index)
                state = held.state if held is not None else self._state_of(reading)
                yield readings.pop(index).result(str(self.numerics), state, held)

    def _state_of(self, reading: Reading) -> SequenceState:
        """Takes the state of a sequence out of the stages."""
        layers: list[Any] = [None] * self.model_config.num_hidden_layers
        for stage in self._stages:
            layers[stage.layers.start : stage.layers.stop] = stage.take_state(reading.job)
        return SequenceState(reading.reused + reading.read, tuple(layers))

    def _read_batch(
        self,
        slices: Sequence[Slice],
        following: Sequence[Slice] | None,
        readings: Mapping[int, Reading],
        outputs: Outputs,
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
            outputs.deliver(slices, streams, report, wall, compiled)
            return {}
        outputs.tell_pass(slices, report, batch.layer)
        held = {}
        for index in {piece.job.index for piece in slices}:
            own = [number for number, piece in enumerate(slices) if piece.job.index == index]
            held[index] = PausedPass(
                batch.layer,
                self._state_of(readings[index]),
                tuple(batch.streams[number] for number in own),
                tuple(slices[number].length for number in own),
            )
        return held

    def _make_room(self, job: Job, state: SequenceState | None, tokens: int) -> None:
        """Gives the stages `state`, or an empty one, with buffers for `tokens` tokens."""
        config = self.model_config
        capacity = capacity_for(self.config, config, tokens)
        if state is not None and state_capacity(state, config) < capacity:
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
            stage.states[job] = layers

    def _check_prompt(
        self, ids: Sequence[int] | np.ndarray, name: str, state: SequenceState | None, more: int = 0
    ) -> np.ndarray:
        before = state.position if state is not None else 0
        return check_prompt(ids, name, before, self.model_config, self.config, more)

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the engine is closed: load the checkpoint again")


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
                   the plan is made for these, their programs are compiled while the weights are
                   loaded, and a state that does not fit is refused now instead of at the prompt
    hosts          the processes of the run, see `hosts.joined`: this one loads the layers of its
                   own stages, and all of them have to make the same calls, this one once

    Nothing large is read or allocated before the checkpoint is known to be complete and the run
    to fit. Raises CheckpointError, ConfigError or PlanError.
    """
    run_config = as_run_config(config)
    if isinstance(checkpoint, TensorSource):
        loaded = load_model(checkpoint, run_config, prompt_tokens, device, on_event, hosts)
    else:
        with open_source(checkpoint, run_config.synthetic) as source:
            loaded = load_model(source, run_config, prompt_tokens, device, on_event, hosts)
    return Engine(loaded, run_config, hosts)


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
