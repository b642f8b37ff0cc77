"""Golden cases, loaded once, and one way to run them that the tests of the model share."""

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ds4jax import cache, model, moe
from ds4jax.config import ModelConfig, Numerics
from pallas_kernels import routed_experts

ROWS = 128  # one row shape for most runs: fewer programs to compile
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "I64": np.dtype(np.int64),
}


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

    logits [T, V]; streams [L, T, S, D] after each layer; experts, weights [L, T, k] sorted by
    expert; chosen [CSA layers, T, index_topk]; state after the last token.
    """

    logits: np.ndarray
    streams: np.ndarray
    experts: np.ndarray
    weights: np.ndarray
    chosen: np.ndarray
    state: cache.SequenceState


def halves(block: model.Block) -> tuple[model.Block, model.Block]:
    """The attention and the expert half of a block: each compiles once for all that share it."""
    attention = model.Block(block.hc_attn, block.attn_norm, block.attn, None, None, None)
    experts = model.Block(None, None, None, block.hc_ffn, block.ffn_norm, block.ffn)
    return attention, experts


def without_router(half: model.Block) -> model.Block:
    """The half without its router, which `finish` does not read."""
    shared = moe.MoE(None, half.ffn.shared_experts)
    return model.Block(None, None, None, half.hc_ffn, half.ffn_norm, shared)


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


jit_attend = jax.jit(attend, static_argnames="numerics")
jit_route = jax.jit(route, static_argnames="numerics")
jit_finish = jax.jit(finish, static_argnames="numerics")


def fresh_jits() -> tuple[Callable[..., Any], ...]:
    """The three jits above with nothing compiled: a jit remembers by function."""
    # Little optimisation: these run once, compiling is what takes the time.
    quick = {"xla_backend_optimization_level": 1}
    return (
        jax.jit(lambda *args: attend(*args), static_argnums=4, compiler_options=quick),
        jax.jit(lambda *args: route(*args), static_argnums=3, compiler_options=quick),
        jax.jit(lambda *args: finish(*args), static_argnums=4, compiler_options=quick),
    )


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
    fresh: bool = False,
) -> Trace:
    """Runs `tokens` in chunks of the given lengths, each padded to `rows` rows.

    With inputs [L, T, S, D] every layer of `layers` runs alone, from its own input streams.
    `fresh` traces the layers again, so that functions patched by a test take effect.
    """
    run_attend, run_route, run_finish = (
        fresh_jits() if fresh else (jit_attend, jit_route, jit_finish)
    )
    assert sum(chunks) == len(tokens)
    transformer, config = loaded.transformer, loaded.config
    blocks = [transformer.blocks[i] for i in layers or range(config.num_hidden_layers)]
    slabs = [loaded.slabs[i] for i in layers or range(config.num_hidden_layers)]
    state = state or cache.empty_state(config, numerics, capacity)
    states = [state.layers[i] for i in layers or range(config.num_hidden_layers)]
    head = model.Transformer(
        None, (), transformer.hc_head, transformer.norm, transformer.head, config
    )
    position = state.position
    logits: list[Any] = []
    parts: list[list[Any]] = [[] for _ in range(4)]
    for length in chunks:
        begin = position - state.position
        chunk = cache.make_chunk(tokens[begin : begin + length], position, rows)
        streams = jit_embed(transformer.embed, chunk.tokens, config.hc_mult, numerics)
        seen: list[list[Any]] = [[] for _ in range(4)]
        for index, (block, slab) in enumerate(zip(blocks, slabs, strict=True)):
            if inputs is not None:
                streams = np.zeros_like(inputs, numerics.dtype, shape=(rows, *inputs.shape[2:]))
                streams[:length] = inputs[index, begin : begin + length]
                streams = jnp.asarray(streams)
            attention, experts = halves(block)
            streams, states[index], chosen = run_attend(
                attention, streams, states[index], chunk, numerics
            )
            routing = run_route(experts, streams, chunk, numerics)
            streams = run_finish(without_router(experts), streams, routing, slab, numerics)
            order = np.argsort(routing.ids, axis=-1)
            seen[0].append(streams)
            seen[1].append(np.take_along_axis(np.asarray(routing.ids), order, -1))
            seen[2].append(np.take_along_axis(np.asarray(routing.weights), order, -1))
            if chosen is not None:
                # Ascending with -1 at the end, as the golden files have it.
                none_last = np.where(np.asarray(chosen) < 0, np.iinfo(np.int32).max, chosen)
                none_last = np.sort(none_last, axis=-1)
                seen[3].append(np.where(none_last == np.iinfo(np.int32).max, -1, none_last))
        logits.append(np.asarray(jit_logits(head, streams))[:length])
        for part, values in zip(parts, seen, strict=True):
            part.append([np.asarray(value)[:length] for value in values])
        position += length
    joined = [
        np.stack([np.concatenate(layer) for layer in zip(*part, strict=True)]) if part[0] else None
        for part in parts
    ]
    return Trace(np.concatenate(logits), *joined, cache.SequenceState(position, tuple(states)))


class Case:
    """A golden folder; files are read when they are first needed."""

    def __init__(self, name: str):
        self.folder = GOLDEN / name
        self.config = ModelConfig.from_json(self.folder / "config.json")
        self.meta = json.loads((self.folder / "meta.json").read_text())
        self.tokens = np.load(self.folder / "tokens.npy")
        self._loaded: Loaded | None = None

    @functools.cached_property
    def expected(self) -> dict[str, np.ndarray]:
        with np.load(self.folder / "expected.npz") as file:
            return dict(file)

    @functools.cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        return read_tensors(self.folder / self.meta.get("checkpoint", "."))

    @functools.cached_property
    def loaded(self) -> Loaded:
        return self.load(self.config)

    def load(self, config: ModelConfig) -> Loaded:
        """The weights of this case under `config`."""
        return build(self.tensors, config)


def read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                flat = np.frombuffer(data[start + begin : start + end], DTYPES[entry["dtype"]])
                tensors[name] = flat.reshape(entry["shape"])
    return tensors


def build(tensors: dict[str, np.ndarray], config: ModelConfig) -> Loaded:
    def leaf(path: Any, shape: jax.ShapeDtypeStruct) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        name = re.sub(r"^blocks\.", "layers.", name)
        name = re.sub(r"\.weight\.codes$", ".weight", name)
        name = re.sub(r"\.weight\.scales$", ".scale", name)
        name = re.sub(r"(hc_\w+)\.(\w+)$", r"\1_\2", name)
        name = {"embed": "embed.weight", "head": "head.weight"}.get(name, name)
        if name not in tensors:
            assert name.endswith(".scale"), name
            return None
        assert tensors[name].shape == shape.shape, (name, tensors[name].shape, shape)
        value = tensors[name]
        return jnp.asarray(value.astype(np.int32) if value.dtype == np.int64 else value)

    transformer = jax.tree_util.tree_map_with_path(leaf, model.abstract(config))
    slabs = []
    for index in range(config.num_hidden_layers):

        def stack(name: str, end: str, index: int = index) -> np.ndarray:
            return np.stack(
                [
                    tensors[f"layers.{index}.ffn.experts.{expert}.{name}.{end}"]
                    for expert in range(config.n_routed_experts)
                ]
            )

        down = stack("w2", "weight")
        packed = down.dtype == np.uint8
        scales: Callable[[str], Any] = (
            (lambda name, stack=stack: stack(name, "scale")) if packed else lambda name: None
        )
        up_scales = (
            np.concatenate([stack("w1", "scale"), stack("w3", "scale")], axis=1) if packed else None
        )
        slab = routed_experts.ExpertSlab(
            gate_up=np.concatenate([stack("w1", "weight"), stack("w3", "weight")], axis=1),
            gate_up_scale=up_scales,
            down=down,
            down_scale=scales("w2"),
            format="fp4" if packed else "bf16" if down.dtype != np.float32 else "f32",
        )
        slabs.append(jax.tree.map(jnp.asarray, slab))
    return Loaded(transformer, tuple(slabs))


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
