"""Golden cases, loaded once, and one way to run them that the tests of the model share."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ds4jax import cache, model, moe
from ds4jax.checkpoint import load, safetensors
from ds4jax.checkpoint.source import TensorSource
from ds4jax.config import ModelConfig, Numerics
from pallas_kernels import routed_experts

ROWS = 128  # one row shape for most runs: fewer programs to compile
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model with all its experts: what a forward pass takes."""

    transformer: model.Transformer
    slabs: tuple[routed_experts.ExpertSlab, ...]

    @property
    def config(self) -> ModelConfig:
        return self.transformer.config


@dataclasses.dataclass
class Trace:
    """What a forward pass shows, rows of all chunks joined.

    logits [T, V], None where layers ran alone; streams [L, T, S, D] after each layer; experts,
    weights [L, T, k] sorted by expert; chosen [CSA layers, T, index_topk]; state after the last
    token.
    """

    logits: np.ndarray | None
    streams: np.ndarray
    experts: np.ndarray
    weights: np.ndarray
    chosen: np.ndarray
    state: cache.SequenceState


def only(module: Any, *names: str) -> Any:
    """The same module with every other field None: layers that share the rest share programs."""
    return dataclasses.replace(
        module,
        **{field.name: None for field in dataclasses.fields(module) if field.name not in names},
    )


def attend(
    half: model.Block,
    streams: jax.Array,
    state: cache.LayerState,
    chunk: cache.Chunk,
    numerics: Numerics,
) -> tuple[jax.Array, cache.LayerState, jax.Array | None]:
    return half.attend_and_select(streams, state, chunk, numerics)


def route(
    half: model.Block, streams: jax.Array, chunk: cache.Chunk, numerics: Numerics
) -> moe.Routing:
    return half.route(streams, chunk, numerics)


def finish(
    half: model.Block,
    streams: jax.Array,
    routing: moe.Routing,
    slab: routed_experts.ExpertSlab,
    numerics: Numerics,
) -> jax.Array:
    slots = routed_experts.expert_slots(
        routing.inputs,
        routing.ids,
        routing.weights,
        (slab,),
        jnp.arange(slab.experts, dtype=jnp.int32),
        limit=half.ffn.shared_experts.limit,
        quantize_input=numerics.q1,
    )
    return half.finish(streams, routing, slots, numerics)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The programs of a layer; tests of mistakes put their own in place."""

    attend: Callable[..., Any]
    route: Callable[..., Any]
    finish: Callable[..., Any]


PARTS = Parts(*(jax.jit(part, static_argnames="numerics") for part in (attend, route, finish)))
jit_embed = jax.jit(model.embed_tokens, static_argnames=("streams", "numerics"))
jit_logits = jax.jit(lambda head, streams: head.logits(streams))


def forward(
    loaded: Loaded,
    tokens: np.ndarray,
    chunks: Sequence[int],
    numerics: Numerics,
    *,
    rows: int = ROWS,
    state: cache.SequenceState | None = None,
    inputs: np.ndarray | None = None,
    layers: Sequence[int] | None = None,
    capacity: int = 1024,
    parts: Parts = PARTS,
) -> Trace:
    """Runs `tokens` in chunks of the given lengths, each padded to `rows` rows.

    With inputs [L, T, S, D] every layer of `layers` runs alone, from its own input streams.
    """
    assert sum(chunks) == len(tokens)
    transformer, config = loaded.transformer, loaded.config
    blocks = [transformer.blocks[i] for i in layers or range(config.num_hidden_layers)]
    slabs = [loaded.slabs[i] for i in layers or range(config.num_hidden_layers)]
    state = state or cache.empty_state(config, numerics, capacity)
    states = [state.layers[i] for i in layers or range(config.num_hidden_layers)]
    head = only(transformer, "hc_head", "norm", "head", "config")
    position = state.position
    logits: list[Any] = []
    observed: list[list[Any]] = [[] for _ in range(4)]
    for length in chunks:
        begin = position - state.position
        chunk = cache.make_chunk(tokens[begin : begin + length], position, rows)
        if inputs is None:
            streams = jit_embed(transformer.embed, chunk.tokens, config.hc_mult, numerics)
        seen: list[list[Any]] = [[] for _ in range(4)]
        for index, (block, slab) in enumerate(zip(blocks, slabs, strict=True)):
            if inputs is not None:
                streams = np.zeros_like(inputs, numerics.dtype, shape=(rows, *inputs.shape[2:]))
                streams[:length] = inputs[index, begin : begin + length]
                streams = jnp.asarray(streams)
            streams, states[index], chosen = parts.attend(
                only(block, "hc_attn", "attn_norm", "attn"), streams, states[index], chunk, numerics
            )
            routing = parts.route(
                only(block, "hc_ffn", "ffn_norm", "ffn"), streams, chunk, numerics
            )
            last = dataclasses.replace(only(block, "hc_ffn"), ffn=only(block.ffn, "shared_experts"))
            streams = parts.finish(last, streams, routing, slab, numerics)
            order = np.argsort(routing.ids, axis=-1)
            seen[0].append(streams)
            seen[1].append(np.take_along_axis(np.asarray(routing.ids), order, -1))
            seen[2].append(np.take_along_axis(np.asarray(routing.weights), order, -1))
            if chosen is not None:
                # Ascending with -1 at the end, as the golden files have it.
                none_last = np.where(np.asarray(chosen) < 0, np.iinfo(np.int32).max, chosen)
                none_last = np.sort(none_last, axis=-1)
                seen[3].append(np.where(none_last == np.iinfo(np.int32).max, -1, none_last))
        if inputs is None:
            logits.append(np.asarray(jit_logits(head, streams))[:length])
        for column, values in zip(observed, seen, strict=True):
            column.append([np.asarray(value)[:length] for value in values])
        position += length
    joined = [
        np.stack([np.concatenate(layer) for layer in zip(*column, strict=True)])
        if column[0]
        else None
        for column in observed
    ]
    return Trace(
        np.concatenate(logits) if logits else None,
        *joined,
        cache.SequenceState(position, tuple(states)),
    )


def load_everything(source: TensorSource) -> Loaded:
    experts = range(source.config.n_routed_experts)
    slabs = [
        jax.tree.map(jnp.asarray, load.load_expert_slab(source, layer, experts))
        for layer in range(source.config.num_hidden_layers)
    ]
    return Loaded(load.load_resident(source), tuple(slabs))


class Case:
    """A golden folder; files are read when they are first needed."""

    def __init__(self, name: str):
        self.folder = GOLDEN / name
        self.config = ModelConfig.from_json(self.folder / "config.json")
        self.meta = json.loads((self.folder / "meta.json").read_text())
        self.tokens = np.load(self.folder / "tokens.npy")

    @functools.cached_property
    def expected(self) -> dict[str, np.ndarray]:
        with np.load(self.folder / "expected.npz") as file:
            return dict(file)

    @functools.cached_property
    def loaded(self) -> Loaded:
        return self.load(self.config)

    def load(self, config: ModelConfig) -> Loaded:
        """The weights of this case under `config`."""
        source = safetensors.open_checkpoint(self.folder / self.meta.get("checkpoint", "."))
        source.config = config
        loaded = load_everything(source)
        source.close()
        return loaded

    def assert_matches(self, trace: Trace) -> None:
        """Everything that a float32 case stores, within the limits of its meta.json."""
        limits, expected = self.meta["tolerance"]["float32_compute"], self.expected
        logits = trace.logits[expected["logit_positions"]]
        distance = relative(logits, expected["logits"])
        assert np.abs(logits - expected["logits"]).max() <= limits["max_abs"]
        assert distance.max() <= limits["rel_l2_per_position_max"]
        if "streams" not in expected:
            return
        assert np.median(distance) <= limits["rel_l2_per_position_median"]
        shape = (*expected["streams"].shape[:2], -1)
        streams = trace.streams[:, expected["stream_positions"]].reshape(shape)
        distance = relative(streams, expected["streams"].reshape(shape))
        assert distance.max() <= limits["streams_rel_l2_per_position_max"]
        np.testing.assert_array_equal(trace.experts, expected["router_experts"])
        np.testing.assert_allclose(trace.weights, expected["router_weights"], atol=1e-5)
        np.testing.assert_array_equal(trace.chosen, expected["csa_topk"])


def relative(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Relative L2 distance over the last axis."""
    return np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


def as_float(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 bit patterns; float32 arrays pass."""
    return bits.view(ml_dtypes.bfloat16).astype(np.float32) if bits.dtype == np.uint16 else bits


class SingleLayers:
    """The case `layers`: every layer of `quant` run alone from stored input streams."""

    def __init__(self) -> None:
        self.case = case("layers")
        self.limits = self.case.meta["tolerance"]

    def run(
        self,
        numerics: Numerics,
        layers: Sequence[int] = range(4),
        *,
        loaded: Loaded | None = None,
        chunks: Sequence[int] = (128, 6),
        **options: Any,
    ) -> Trace:
        return forward(
            loaded or self.case.loaded,
            self.case.tokens,
            chunks,
            numerics,
            inputs=self.inputs(layers),
            layers=list(layers),
            **options,
        )

    def inputs(self, layers: Sequence[int]) -> np.ndarray:
        """Input streams of the layers, float32 [layer, T, S, D]."""
        return as_float(self.case.expected["streams_in_bf16_bits"])[list(layers)]

    def distances(self, trace: Trace, name: str, layers: Sequence[int] = range(4)) -> np.ndarray:
        """Relative L2 to the array `name` over the streams of a position: [layer, position]."""
        wanted = as_float(self.case.expected[name])[list(layers)]
        got = trace.streams[:, self.case.expected["positions"]].astype(np.float32)
        shape = (*wanted.shape[:2], -1)
        wanted, got = wanted.reshape(shape), got.reshape(shape)
        return np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)

    def overlap(self, trace: Trace, layers: Sequence[int] = range(4)) -> float:
        """Mean share of equal entries over the positions where the indexer rejects any."""
        csa = [i for i, layer in enumerate(self.case.expected["csa_layers"]) if layer in layers]
        shares = [
            len(set(got) & set(want)) / len(want)
            for layer in zip(trace.chosen, self.case.expected["csa_topk"][csa], strict=True)
            for position, (got, want) in enumerate(zip(*layer, strict=True))
            if (position + 1) // 4 > len(want)
        ]
        return float(np.mean(shares))


@functools.cache
def case(name: str) -> Case:
    return Case(name)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Case]:
    """golden(name) -> Case, shared by all tests of a process."""
    return case


@pytest.fixture(scope="session")
def run() -> Callable[..., Trace]:
    """`forward`: compiled layers are shared by all tests of a process."""
    return forward


@pytest.fixture(scope="session")
def parts() -> Parts:
    """The programs that `run` uses when it gets no others."""
    return PARTS


@pytest.fixture(scope="session")
def load_source() -> Callable[[TensorSource], Loaded]:
    """A source with all its experts in memory."""
    return load_everything


@pytest.fixture(scope="session")
def single_layers() -> SingleLayers:
    return SingleLayers()
