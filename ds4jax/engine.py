"""The engine: loads a checkpoint and reads prompts chunk by chunk into logits and state."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax import admission, events
from ds4jax.cache import (
    SequenceState,
    abstract_state,
    empty_state,
    grow_state,
    make_chunk,
)
from ds4jax.checkpoint import keys
from ds4jax.checkpoint import load as loading
from ds4jax.checkpoint.converted import ConvertedSource, is_converted
from ds4jax.checkpoint.safetensors import open_checkpoint
from ds4jax.checkpoint.source import TensorSource
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import ConfigError, ModelConfig
from ds4jax.run_config import RunConfig
from ds4jax.runner import COMPILED, LayerSlabs, LogProbs, Runner, tiles
from ds4jax.text import PromptError

SYNTHETIC = "synthetic:"
SMALL_ROW_SHAPES = (128, 1024)  # what short chunks are padded to instead of chunk_tokens
FIRST_CAPACITY = 8192  # tokens; state buffers grow from here by factors of 4

# Takes named rows as they are made: "logits", or "logprobs", "top_logprobs" and "top_tokens".
Sink = Callable[[str, np.ndarray], None]


@dataclasses.dataclass(frozen=True)
class PrefillReport:
    """How one sequence was read.

    numerics       the numerics setting, for example "bfloat16+q1+q2+q3"
    tokens_read    tokens that went through the model; tokens_reused came with the state
    seconds        wall time of all chunks, compilation and output included
    chunks         one event per chunk
    state_bytes    size of the state afterwards
    interrupted    whether reading was stopped before the last token
    """

    name: str
    numerics: str
    tokens_read: int
    tokens_reused: int
    seconds: float
    chunks: tuple[events.ChunkDone, ...]
    state_bytes: int
    interrupted: bool

    @property
    def tokens_per_s(self) -> float:
        """Tokens read per second of wall time."""
        return self.tokens_read / self.seconds

    @property
    def compiled(self) -> tuple[int, float]:
        """Programs compiled while reading, and the seconds that took."""
        chunks = self.chunks
        return sum(c.compiled for c in chunks), sum(c.compile_seconds for c in chunks)


@dataclasses.dataclass(frozen=True)
class PrefillResult:
    """What reading a sequence gives.

    logits    float32 [rows, V]: one row in mode "last", one per token read in mode "all"; None in
              other modes and when a sink took the rows
    logprobs  in mode "logprobs" without a sink
    state     continues the sequence, see `Engine.prefill`
    """

    logits: np.ndarray | None
    logprobs: LogProbs | None
    state: SequenceState
    report: PrefillReport


@dataclasses.dataclass(frozen=True)
class Generation:
    """Greedy continuation: tokens [n] i32, the logits [n, V] that chose them, and the state.

    The state has read everything but the last of `tokens`.
    """

    tokens: np.ndarray
    logits: np.ndarray
    state: SequenceState


@dataclasses.dataclass(frozen=True)
class _Job:
    """One sequence to read, and its place in the run."""

    ids: np.ndarray
    name: str
    index: int = 0
    prompts: int = 1
    done_before: int = 0
    total: int = 0


class Engine:
    """A loaded model; made by `load`, closed by leaving the `with` block or by `close`."""

    def __init__(
        self,
        runner: Runner,
        slabs: Sequence[LayerSlabs],
        config: RunConfig,
        device: jax.Device,
        needed: admission.Price,
        available_bytes: int,
        load_seconds: float,
        fingerprint: str,
    ):
        self.model_config: ModelConfig = runner.config
        self.numerics = runner.numerics
        self.config = config
        self.device = device
        self.needed = needed
        self.available_bytes = available_bytes
        self.load_seconds = load_seconds
        self.fingerprint = fingerprint
        self.row_shapes = row_shapes(config.prefill.chunk_tokens)
        self._shapes_seen: set[int] = set()
        self._runner: Runner | None = runner
        self._slabs: Sequence[LayerSlabs] = slabs

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the weights; using the engine afterwards raises RuntimeError."""
        self._runner, self._slabs = None, ()

    def prefill(
        self,
        ids: Sequence[int] | np.ndarray,
        state: SequenceState | None = None,
        *,
        on_event: events.Observer = events.ignore,
        sink: Sink | None = None,
        stop: threading.Event | None = None,
        donate_state: bool = False,
        name: str = "prompt",
    ) -> PrefillResult:
        """Reads `ids` [tokens] after what `state` has seen (nothing when None).

        Any split of a sequence over calls gives the same result within the float limits of the
        numerics setting. `state` stays usable unless donate_state lets the engine work in it.

        on_event  is called for every event, see `events`
        sink      takes the output rows chunk by chunk instead of the result; it sees each name of
                  the logits mode with arrays [n, ...], in order
        stop      when set, reading ends after the current chunk; the report says so

        Raises PromptError for an empty prompt, ids outside the vocabulary and prompts that are
        too long, ConfigError for a state of another model, PlanError when the state does not fit.
        """
        tokens = self._check_prompt(ids, name, state)
        job = _Job(tokens, name, total=len(tokens))
        if state is not None:
            self._check_state(state)
            state = jax.device_put(state, self.device)
            if not donate_state:
                state = jax.tree.map(jnp.copy, state)
        return self._read(job, state, self.config.prefill.logits, on_event, sink, stop)

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

        All prompts are checked before the first is read. Results come in order; a caller that
        drops each state before asking for the next result holds one state at a time. Arguments
        are as in `prefill`; a stop ends the iteration after the sequence that it cut short.
        """
        names = names or [f"prompt{i}" for i in range(len(prompts))]
        checked = [
            self._check_prompt(ids, name, None) for ids, name in zip(prompts, names, strict=True)
        ]
        if not checked:
            raise PromptError("there are no prompts: expected at least one")
        total = sum(len(tokens) for tokens in checked)

        def read_all() -> Iterator[PrefillResult]:
            done = 0
            for i, (tokens, name) in enumerate(zip(checked, names, strict=True)):
                job = _Job(tokens, name, i, len(checked), done, total)
                result = self._read(job, None, self.config.prefill.logits, on_event, sink, stop)
                yield result
                done += len(tokens)
                if result.report.interrupted:
                    return

        return read_all()

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
        name = "generate"
        tokens = self._check_prompt(ids, name, state, more=count - 1)
        if state is not None:
            self._check_state(state)
            state = jax.tree.map(jnp.copy, jax.device_put(state, self.device))
        chosen: list[int] = []
        logits: list[np.ndarray] = []
        for _ in range(count):
            job = _Job(tokens, name, total=len(tokens))
            result = self._read(job, state, "last", events.ignore, None, None)
            assert result.logits is not None
            logits.append(result.logits[0])
            chosen.append(int(np.argmax(result.logits[0])))
            state, tokens = result.state, np.asarray(chosen[-1:], np.int32)
        assert state is not None
        return Generation(np.asarray(chosen, np.int32), np.stack(logits), state)

    def _read(
        self,
        job: _Job,
        state: SequenceState | None,
        mode: str,
        on_event: events.Observer,
        sink: Sink | None,
        stop: threading.Event | None,
    ) -> PrefillResult:
        """Reads a checked sequence chunk by chunk; consumes `state`."""
        runner, ids = self._require_open(), job.ids
        reused = state.position if state is not None else 0
        state = self._with_room(state, reused + len(ids))
        on_event(events.PromptStarted(job.index, job.prompts, job.name, len(ids), reused))
        rows = _Rows()
        chunks: list[events.ChunkDone] = []
        for first in range(0, len(ids), self.config.prefill.chunk_tokens):
            state, chunk = self._read_chunk(runner, job, first, state, mode, sink or rows.append)
            chunks.append(chunk)
            on_event(chunk)
            if stop is not None and stop.is_set():
                break
        read = state.position - reused
        report = PrefillReport(
            name=job.name,
            numerics=str(self.numerics),
            tokens_read=read,
            tokens_reused=reused,
            seconds=sum(chunk.seconds for chunk in chunks),
            chunks=tuple(chunks),
            state_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
            interrupted=read < len(ids),
        )
        return PrefillResult(rows.logits(), rows.logprobs(), state, report)

    def _read_chunk(
        self, runner: Runner, job: _Job, first: int, state: SequenceState, mode: str, put: Sink
    ) -> tuple[SequenceState, events.ChunkDone]:
        """Reads the chunk that begins with token `first` of the job; consumes `state`."""
        began, compiled, position = time.perf_counter(), COMPILED.measure(), state.position
        size = self.config.prefill.chunk_tokens
        tokens = job.ids[first : first + size]
        shape = next(rows for rows in self.row_shapes if rows >= len(tokens))
        streams, state = self._advance(runner, tokens, shape, state)
        following = np.full(shape, -1, np.int32)
        after = job.ids[first + 1 : first + len(tokens) + 1]
        following[: len(after)] = after
        ends = first + len(tokens) == len(job.ids)
        self._deliver(runner, mode, streams, len(tokens), following, ends, put)
        self._shapes_seen.add(shape)
        jax.block_until_ready((streams, state.layers))
        programs, compile_seconds = compiled()
        return state, events.ChunkDone(
            prompt=job.index,
            chunk=first // size,
            position=position,
            tokens=len(tokens),
            rows=shape,
            seconds=time.perf_counter() - began,
            compiled=programs,
            compile_seconds=compile_seconds,
            done=job.done_before + first + len(tokens),
            total=job.total,
        )

    def _advance(
        self, runner: Runner, tokens: np.ndarray, rows: int, state: SequenceState
    ) -> tuple[jax.Array, SequenceState]:
        """All layers on one chunk: the last layer's streams [rows, S, D] and the new state."""
        with jax.default_device(self.device):
            chunk = make_chunk(tokens, state.position, rows)
            streams = runner.embed(chunk)
            layers = list(state.layers)
            for layer, slabs in enumerate(self._slabs):
                streams, layers[layer] = runner.layer(layer, streams, layers[layer], chunk, slabs)
        return streams, SequenceState(state.position + len(tokens), tuple(layers))

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
        if mode == "last":
            if ends:
                put("logits", runner.logits(streams, rows - 1, rows))
            elif streams.shape[0] not in self._shapes_seen:
                # Compiles the head for this row shape, so that the next prompt compiles nothing.
                runner.logits(streams, rows - 1, rows)
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

    def _with_room(self, state: SequenceState | None, tokens: int) -> SequenceState:
        """`state`, or an empty one, with the buffers that a sequence of `tokens` tokens gets."""
        capacity = capacity_tokens(self.config, self.model_config, tokens)
        if state is not None and _capacity(state, self.model_config) >= capacity:
            return state
        wanted = admission.price(
            self.model_config,
            self.numerics,
            weights_bytes=0,
            rows=self.config.prefill.chunk_tokens,
            capacity_tokens=capacity,
        )
        admission.admit(wanted, self.device, f"the state of {capacity} tokens")
        with jax.default_device(self.device):
            if state is not None:
                return grow_state(state, self.model_config, capacity)
            state = empty_state(self.model_config, self.numerics, capacity)
        # Committed like the states that programs return: jit tells the two apart.
        return jax.device_put(state, self.device)

    def _check_prompt(
        self, ids: Sequence[int] | np.ndarray, name: str, state: SequenceState | None, more: int = 0
    ) -> np.ndarray:
        before = state.position if state is not None else 0
        return check_prompt(ids, name, before, self.model_config, self.config, more)

    def _check_state(self, state: SequenceState) -> None:
        """Raises ConfigError unless the arrays of `state` are those of this model and numerics."""
        capacity = _capacity(state, self.model_config)
        wanted = abstract_state(self.model_config, self.numerics, capacity)
        found = jax.tree_util.tree_leaves_with_path(state.layers)
        expected = jax.tree_util.tree_leaves_with_path(wanted.layers)
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
                f"{len(expected)} in {len(wanted.layers)}: it belongs to another model"
            )

    def _require_open(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("the engine is closed: load the checkpoint again")
        return self._runner


class _Rows:
    """Collects output rows in host memory when no sink takes them."""

    def __init__(self) -> None:
        self._parts: dict[str, list[np.ndarray]] = {}

    def append(self, name: str, rows: np.ndarray) -> None:
        self._parts.setdefault(name, []).append(rows)

    def _joined(self, name: str) -> np.ndarray:
        return np.concatenate(self._parts[name])

    def logits(self) -> np.ndarray | None:
        return self._joined("logits") if "logits" in self._parts else None

    def logprobs(self) -> LogProbs | None:
        if "logprobs" not in self._parts:
            return None
        names = ("logprobs", "top_logprobs", "top_tokens")
        return LogProbs(*(self._joined(name) for name in names))


def load(
    checkpoint: str | PathLike[str] | TensorSource,
    config: RunConfig | Mapping[str, Any] | str | PathLike[str] | None = None,
    *,
    prompt_tokens: int | None = None,
    device: jax.Device | None = None,
    on_event: events.Observer = events.ignore,
) -> Engine:
    """Loads a checkpoint onto `device` (default: the first one JAX has).

    checkpoint     a folder, "synthetic:NAME" (see `open_source`), or an open source
    config         a RunConfig, a TOML file, dotted overrides such as
                   {"prefill.chunk_tokens": 1024}, or None for the defaults
    prompt_tokens  the longest sequence that is going to be read, when known; with it a state that
                   does not fit is refused now instead of at the prompt

    Nothing large is read or allocated before the checkpoint is known to be complete and the run
    to fit. Raises CheckpointError, ConfigError or PlanError.
    """
    run_config = as_run_config(config)
    device = device or jax.local_devices()[0]
    if isinstance(checkpoint, TensorSource):
        return _load(checkpoint, run_config, prompt_tokens, device, on_event)
    with open_source(checkpoint) as source:
        return _load(source, run_config, prompt_tokens, device, on_event)


def _load(
    source: TensorSource,
    run_config: RunConfig,
    prompt_tokens: int | None,
    device: jax.Device,
    on_event: events.Observer,
) -> Engine:
    began = time.perf_counter()
    model_config, numerics = source.config, run_config.numerics.resolve()
    if run_config.prefill.top_logprobs > model_config.vocab_size:
        raise ConfigError(
            f"config.prefill.top_logprobs is {run_config.prefill.top_logprobs}, expected at most "
            f"the vocabulary size {model_config.vocab_size}"
        )
    keys.check_complete(source)
    infos = {name: info for name, info in source.infos().items() if not name.startswith("mtp.")}
    weights_bytes = sum(info.nbytes for info in infos.values())
    needed = admission.price(
        model_config,
        numerics,
        weights_bytes=weights_bytes,
        rows=run_config.prefill.chunk_tokens,
        capacity_tokens=capacity_tokens(run_config, model_config, prompt_tokens or 1),
    )
    available = admission.admit(needed, device, "this run")
    transformer = loading.load_resident(source, device=device)
    done = sum(leaf.nbytes for leaf in jax.tree.leaves(transformer))
    experts = range(model_config.n_routed_experts)
    with jax.default_device(device):
        where = jnp.arange(model_config.n_routed_experts, dtype=jnp.int32)
    slabs: list[LayerSlabs] = []
    for layer in range(model_config.num_hidden_layers):
        slab = jax.device_put(loading.load_expert_slab(source, layer, experts), device)
        done += sum(leaf.nbytes for leaf in jax.tree.leaves(slab))
        slabs.append(((slab,), where))
        # Token tables shrink when they are loaded, so the bytes at hand end below those stored.
        ends = layer + 1 == model_config.num_hidden_layers
        progress = weights_bytes if ends else done
        on_event(events.WeightsLoaded(progress, weights_bytes, time.perf_counter() - began))
    return Engine(
        Runner(transformer, numerics),
        slabs,
        run_config,
        device,
        needed,
        available,
        time.perf_counter() - began,
        loading.fingerprint(source),
    )


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


def open_source(checkpoint: str | PathLike[str]) -> TensorSource:
    """The tensors of a checkpoint, by what `--checkpoint` says.

    A folder in the published format or one that `convert` wrote; or "synthetic:NAME" for random
    weights of configs/models/NAME.json, or "synthetic:FILE.json" for those of any model config.
    """
    spec = str(checkpoint)
    if not spec.startswith(SYNTHETIC):
        return ConvertedSource(spec) if is_converted(spec) else open_checkpoint(spec)
    name = spec.removeprefix(SYNTHETIC)
    if name.endswith(".json"):
        return SyntheticSource(ModelConfig.from_json(name), seed=0)
    folder = Path(__file__).parents[1] / "configs" / "models"
    known = sorted(path.stem for path in folder.glob("*.json"))
    if name not in known:
        raise ConfigError(
            f"--checkpoint: {spec} names no model config, expected synthetic:FILE.json or one of "
            f"{', '.join(SYNTHETIC + name for name in known)}"
        )
    return SyntheticSource(ModelConfig.from_json(folder / f"{name}.json"), seed=0)


def row_shapes(chunk_tokens: int) -> tuple[int, ...]:
    """The numbers of rows that chunks are padded to, ascending."""
    return (*(rows for rows in SMALL_ROW_SHAPES if rows < chunk_tokens), chunk_tokens)


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
            if layer.compressed is not None
        ),
        default=config.max_position_embeddings,
    )
