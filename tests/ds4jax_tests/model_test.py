"""Blocks and the stack: sizes, sharing of programs, parts against the whole."""

import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ds4jax import cache, model
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import PRESETS, SIMULATIONS, ModelConfig, Numerics, RopeScaling
from ds4jax.testing import tiny_config
from pallas_kernels.indexer import NAN_SCORE
from pallas_kernels.routed_experts import ExpertSlab

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "models"
ORACLE = PRESETS["oracle"]


def released(name):
    return ModelConfig.from_json(CONFIGS / f"{name}.json")


def size(tree):
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("name", "published"), [("flash", 8_845_959_388), ("pro", 28_693_981_132)])
def test_resident_bytes_are_those_of_the_published_files(name, published):
    config = released(name)
    # Token tables of the hash layers are I64 in the files and i32 here.
    narrowed = config.num_hash_layers * config.vocab_size * config.num_experts_per_tok * 4
    assert size(model.abstract(config)) == published - narrowed


@pytest.mark.parametrize(
    ("name", "layer", "published"),
    [
        ("flash", 0, 143_596_888),
        ("flash", 3, 146_044_248),
        ("flash", 42, 167_299_160),
        ("pro", 4, 427_243_544),
        ("pro", 3, 391_963_672),
    ],
)
def test_bytes_of_single_blocks(name, layer, published):
    config = released(name)
    block = model.abstract(config).blocks[layer]
    narrowed = config.is_hash(layer) * config.vocab_size * config.num_experts_per_tok * 4
    assert size(block) == published - narrowed


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_routing_kind_goes_by_layer_index(name):
    config = released(name)
    for count in (3, 1, 0):
        config = dataclasses.replace(config, num_hash_layers=count)
        gates = [block.ffn.gate for block in model.abstract(config).blocks]
        assert [gate.tid2eid is not None for gate in gates] == [
            i < count for i in range(len(gates))
        ]
        assert [gate.bias is None for gate in gates] == [i < count for i in range(len(gates))]


@pytest.mark.parametrize("name", ["flash", "pro"])
@pytest.mark.parametrize("preset", ["oracle", "official"])
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_full_size_blocks_keep_shapes_and_dtypes(name, preset, layer):
    config, numerics = released(name), PRESETS[preset]
    experts, hidden, width = 8, config.hidden_size, config.moe_intermediate_size

    def shape(*dims, dtype=jnp.uint8):
        return jax.ShapeDtypeStruct(dims, dtype)

    slab = ExpertSlab(
        shape(experts, 2 * width, hidden // 2),
        shape(experts, 2 * width, hidden // 32),
        shape(experts, hidden, width // 2),
        shape(experts, hidden, width // 32),
        "fp4",
    )
    block = model.abstract(config).blocks[layer]
    state = cache.abstract_state(config, numerics, 8192).layers[layer]
    streams = shape(256, 4, hidden, dtype=numerics.dtype)
    scalar = shape(dtype=jnp.int32)
    chunk = cache.Chunk(shape(256, dtype=jnp.int32), scalar, scalar)
    where = shape(config.n_routed_experts, dtype=jnp.int32)
    out, after = jax.eval_shape(
        lambda *args: args[0](*args[1:4], (args[4],), args[5], numerics),
        *(block, streams, state, chunk, slab, where),
    )
    assert (out.shape, out.dtype) == (streams.shape, numerics.dtype)
    describe = functools.partial(jax.tree.map, lambda leaf: (leaf.shape, leaf.dtype))
    assert describe(after) == describe(state)


def test_blocks_of_a_kind_share_one_trace(golden):
    case = golden("f32")
    traces = []

    @functools.partial(jax.jit, static_argnums=3)
    def attend(block, streams, state, numerics):
        traces.append(block.ratio)
        chunk = cache.Chunk(jnp.zeros(4, jnp.int32), jnp.int32(0), jnp.int32(4))
        return block.attend(streams, state, chunk, numerics)

    state = cache.empty_state(case.config, ORACLE, 64)
    streams = jnp.ones((4, 4, case.config.hidden_size), jnp.float32)
    for index in (0, 1):
        block = case.loaded.transformer.blocks[index]
        attend.lower(block, streams, state.layers[index], ORACLE)
    assert traces == [0]


@pytest.mark.parametrize(
    "numerics", [ORACLE, pytest.param(PRESETS["official"], marks=pytest.mark.slow)], ids=str
)
def test_a_block_in_one_call_equals_its_parts(numerics, golden, run):
    """Also with the experts spread over two slabs in another order."""
    case = golden("quant")
    index, loaded = 0, case.loaded
    random = np.random.default_rng(3)
    streams = random.standard_normal((1, 50, 4, case.config.hidden_size)).astype(numerics.dtype)
    trace = run(loaded, case.tokens[:50], [50], numerics, inputs=streams, layers=[index])
    whole = jax.jit(
        lambda block, streams, state, chunk, slabs, where: block(
            streams, state, chunk, slabs, where, numerics
        )
    )
    padded = jnp.zeros((128, 4, case.config.hidden_size), numerics.dtype)
    padded = padded.at[:50].set(streams[0])
    chunk = cache.make_chunk(case.tokens[:50], 0, 128)
    state = cache.empty_layer_state(case.config, 0, numerics, 1024)
    slab = loaded.slabs[index]
    first, second = (
        jax.tree.map(lambda leaf, rows=rows: leaf[np.array(rows)], slab)
        for rows in ([4, 1], [0, 5, 3, 2])
    )
    where = jnp.asarray([2, 1, 5, 4, 0, 3], jnp.int32)
    out, after = whole(
        loaded.transformer.blocks[index], padded, state, chunk, (first, second), where
    )
    atol = 1e-5 if numerics.compute == "float32" else 0.1
    np.testing.assert_allclose(
        np.asarray(out, np.float32)[:50], trace.streams[0].astype(np.float32), atol=atol
    )
    assert jax.tree.structure(after) == jax.tree.structure(trace.state.layers[0])


def test_nan_among_the_scores_of_entries_takes_the_token_its_experts(golden):
    """An index weight is NaN: tokens that have to choose entries become NaN, the others do not."""
    case = golden("quant")
    index = next(i for i, ratio in enumerate(case.config.layer_ratios) if ratio == 4)
    block = case.loaded.transformer.blocks[index]
    indexer = block.attn.indexer
    weights = indexer.weights_proj.weight.codes
    broken = dataclasses.replace(
        indexer,
        weights_proj=dataclasses.replace(
            indexer.weights_proj,
            weight=dataclasses.replace(
                indexer.weights_proj.weight, codes=weights.at[0, 0].set(jnp.nan)
            ),
        ),
    )
    block = dataclasses.replace(block, attn=dataclasses.replace(block.attn, indexer=broken))
    rows = 128
    random = np.random.default_rng(4)
    streams = jnp.asarray(random.standard_normal((rows, 4, case.config.hidden_size)), jnp.float32)
    state = cache.empty_layer_state(case.config, 4, ORACLE, 1024)
    chunk = cache.make_chunk(case.tokens[:100], 0, rows)

    @jax.jit
    def run(block, streams, state, chunk):
        streams, _, selected = block.attend_and_select(streams, state, chunk, ORACLE)
        return streams, selected, block.route(streams, chunk, ORACLE).ids

    streams, selected, ids = (np.asarray(x)[:100] for x in run(block, streams, state, chunk))
    chooses = (np.arange(100) + 1) // 4 > case.config.index_topk
    assert 0 < chooses.sum() < 100
    np.testing.assert_array_equal((selected == NAN_SCORE).all(axis=1), chooses)
    np.testing.assert_array_equal(np.isnan(streams).all(axis=(1, 2)), chooses)
    np.testing.assert_array_equal(np.isfinite(streams).all(axis=(1, 2)), ~chooses)
    np.testing.assert_array_equal((ids == -1).all(axis=1), chooses)
    assert (ids[~chooses] >= 0).all()


def test_embedding_is_copied_to_equal_streams_without_a_factor(golden):
    transformer = golden("quant").loaded.transformer
    tokens = np.int32([3, 0, 255, 3])
    for numerics in (ORACLE, PRESETS["bfloat16"]):
        streams = transformer.embed_tokens(jnp.asarray(tokens), numerics)
        assert streams.dtype == numerics.dtype
        rows = np.asarray(transformer.embed, np.float32)[tokens]
        for stream in range(4):
            np.testing.assert_array_equal(np.asarray(streams[:, stream], np.float32), rows)


def test_logits_are_float32_products_in_every_setting(golden):
    transformer = golden("quant").loaded.transformer
    streams = np.random.default_rng(5).standard_normal((3, 4, 256)).astype(ml_dtypes.bfloat16)
    hidden = transformer.norm(transformer.hc_head(jnp.asarray(streams)))
    assert hidden.dtype == jnp.bfloat16
    logits = transformer.logits(jnp.asarray(streams))
    assert logits.dtype == jnp.float32
    exact = np.asarray(hidden, np.float64) @ np.asarray(transformer.head, np.float64).T
    np.testing.assert_allclose(logits, exact, atol=1e-5)


def other_values():
    """Every value that the golden checkpoints share, changed: see their README."""
    return dataclasses.replace(
        tiny_config(),
        hc_mult=3,
        hc_eps=1e-3,
        rms_norm_eps=1e-2,
        num_hidden_layers=3,
        compress_ratios=(8, 4, 0, 0),
        num_hash_layers=1,
        rope_theta=300.0,
        compress_rope_theta=9000.0,
        rope_scaling=RopeScaling("yarn", 4.0, 128, 16, 2),
        sliding_window=7,
        index_topk=5,
    )


@pytest.mark.parametrize(
    "numerics", [ORACLE, pytest.param(PRESETS["official"], marks=pytest.mark.slow)], ids=str
)
def test_other_values_chunked_and_whole(numerics, load_source, run):
    """Three streams, HCA of ratio 8 with many entries, other bases and eps."""
    loaded = load_source(SyntheticSource(other_values(), 11))
    tokens = np.random.default_rng(12).integers(8, 264, 150).astype(np.int32)
    whole = run(loaded, tokens, [128, 22], numerics)
    for chunks in ([3, 1, 5, 2, 101, 38], [1] * 9 + [64, 64, 13]):
        trace = run(loaded, tokens, chunks, numerics)
        np.testing.assert_array_equal(trace.experts, whole.experts)
        np.testing.assert_array_equal(trace.chosen, whole.chosen)
        np.testing.assert_allclose(trace.logits, whole.logits, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"hc_eps": 1e-6},
        {"rms_norm_eps": 1e-6},
        {"rope_theta": 10000.0},
        {"compress_rope_theta": 160000.0},
        {"rope_scaling": RopeScaling("yarn", 16.0, 128, 16, 2)},
        {"rope_scaling": RopeScaling("yarn", 4.0, 64, 16, 2)},
        {"rope_scaling": RopeScaling("yarn", 4.0, 128, 8, 2)},
        {"rope_scaling": RopeScaling("yarn", 4.0, 128, 16, 1)},
        {"sliding_window": 8},
        {"index_topk": 6},
        {"routed_scaling_factor": 1.0},
        {"swiglu_limit": 10.0},
        {"hc_sinkhorn_iters": 2},
    ],
    ids=str,
)
def test_every_value_changes_the_logits(change, load_source, run):
    """The same weights under one other value: a hard-coded value would not notice."""
    config = other_values()
    base, changed = (
        load_source(SyntheticSource(values, 11))
        for values in (config, dataclasses.replace(config, **change))
    )
    tokens = np.random.default_rng(13).integers(8, 264, 100).astype(np.int32)
    numerics = Numerics("float32", SIMULATIONS[1:])
    first, second = (run(one, tokens, [100], numerics).logits for one in (base, changed))
    distance = np.linalg.norm(first - second) / np.linalg.norm(first)
    assert distance > 1e-5
