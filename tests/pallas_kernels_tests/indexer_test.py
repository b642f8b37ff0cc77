"""Indexer scores and selection: definition, forms, poison, equal bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import codecs, rotary
from pallas_kernels.indexer import (
    NAN_SCORE,
    indexer_scores,
    kernel,
    mix_channels,
    prepare,
    prepare_queries,
    select_entries,
)
from pallas_kernels.specs import FLASH, PRO

FORMS = ["reference", "tiled", "portable"]
SMALL = kernel.Config(tokens=16, entries=32, warps=4, stages=2)


def make(seed, tokens, capacity, *, heads=16, width=32, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.normal(size=(tokens, heads, width)), dtype),
        jnp.asarray(rng.normal(size=(capacity, width)), dtype),
        jnp.asarray(rng.normal(size=(tokens, heads)), jnp.float32),
    )


@functools.partial(jax.jit, static_argnames=("implementation", "ratio"))
def scores_of(queries, keys, weights, position, implementation, ratio=4):
    return indexer_scores(
        queries,
        keys,
        weights,
        position,
        ratio=ratio,
        implementation=implementation,
        interpret=jax.default_backend() == "cpu",
    )


@functools.partial(jax.jit, static_argnames=("implementation", "k", "query_tile"))
def selected(queries, keys, weights, position, implementation, k, query_tile=None):
    return select_entries(
        queries,
        keys,
        weights,
        position,
        k=k,
        query_tile=query_tile,
        implementation=implementation,
        interpret=jax.default_backend() == "cpu",
    )


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize(("position", "ratio"), [(0, 4), (70, 4), (9, 1)])
def test_scores_follow_the_definition(implementation, position, ratio, distance):
    operands = make(position, 21, 40)
    got = scores_of(*operands, position, implementation, ratio)
    queries, keys, weights = (np.asarray(x, np.float64) for x in operands)
    products = np.maximum(np.einsum("thd,nd->thn", queries, keys), 0)
    wanted = np.einsum("th,thn->tn", weights, products)
    seen = (position + np.arange(21) + 1) // ratio
    wanted = np.where(np.arange(40)[None, :] < seen[:, None], wanted, -np.inf)
    assert distance(got, wanted) < 1e-6
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(wanted))


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_float32_inputs(implementation, distance):
    operands = make(1, 5, 30, dtype=jnp.float32)
    got = scores_of(*operands, 200, implementation)
    queries, keys, weights = (np.asarray(x, np.float64) for x in operands)
    products = np.maximum(np.einsum("thd,nd->thn", queries, keys), 0)
    assert distance(got, np.einsum("th,thn->tn", weights, products)) < 1e-6


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize(("position", "k"), [(0, 4), (30, 8), (30, 40), (300, 8), (4096, 50)])
def test_selection_is_the_top_of_the_scores(implementation, position, k):
    tokens, capacity = 37, 90
    queries, keys, weights = make(position + k, tokens, capacity)
    seen = np.minimum((position + np.arange(tokens) + 1) // 4, capacity)
    keys = keys.at[seen[-1] :].set(jnp.nan)
    got = np.asarray(selected(queries, keys, weights, position, implementation, k))
    scores = np.asarray(scores_of(queries, keys, weights, position, implementation))
    for t in range(tokens):
        best = sorted(range(seen[t]), key=lambda i: (-scores[t, i], i))[:k]
        wanted = np.full(k, -1)
        wanted[: len(best)] = sorted(best)
        np.testing.assert_array_equal(got[t], wanted)


@pytest.mark.parametrize("implementation", FORMS)
def test_nan_scores_are_reported_instead_of_a_selection(implementation):
    """By tokens that have to choose and see one, in any tile; others select as ever."""
    tokens, position, k = 37, 30, 9
    queries, keys, weights = make(4, tokens, 90)
    wanted = np.array(selected(queries, keys, weights, position, implementation, k))
    seen = (position + np.arange(tokens) + 1) // 4
    queries = queries.at[30].set(jnp.nan)
    got = np.array(selected(queries, keys, weights, position, implementation, k))
    assert (got[30] == NAN_SCORE).all()
    got[30] = wanted[30]
    np.testing.assert_array_equal(got, wanted)
    # Entry 12 is there for the last tokens only; whoever sees at most k selects all of them.
    queries, keys, weights = make(4, tokens, 90)
    for entry in (12, 3):
        got = selected(queries, keys.at[entry].set(jnp.nan), weights, position, implementation, k)
        bad = (seen > entry) & (seen > k)
        assert 0 < bad.sum() < tokens
        np.testing.assert_array_equal((np.asarray(got) == NAN_SCORE).all(axis=1), bad)
        np.testing.assert_array_equal(np.asarray(got)[~bad], wanted[~bad])


@pytest.mark.parametrize("implementation", ["tiled", "portable"])
def test_bits_do_not_depend_on_chunks_capacity_or_neighbours(implementation):
    total, position, k = 70, 203, 20
    queries, keys, weights = make(3, total, 80)
    whole = np.asarray(scores_of(queries, keys, weights, position, implementation))
    lists = np.asarray(selected(queries, keys, weights, position, implementation, k))
    more = jnp.pad(keys, ((0, 100), (0, 0)), constant_values=jnp.nan)
    for size in (1, 9, 33):
        for start in range(0, total - size + 1, size):
            part = (queries[start : start + size], more, weights[start : start + size])
            got = scores_of(*part, position + start, implementation)
            np.testing.assert_array_equal(got[:, :80], whole[start : start + size])
            got = selected(*part, position + start, implementation, k)
            np.testing.assert_array_equal(got, lists[start : start + size])
    others = queries.at[::2].multiply(-1)
    got = np.asarray(scores_of(others, keys, weights, position, implementation))
    np.testing.assert_array_equal(got[1::2], whole[1::2])


@pytest.mark.parametrize("query_tile", [16, 48, 128])
def test_the_query_tile_changes_nothing(query_tile):
    operands = make(8, 61, 80)
    wanted = selected(*operands, 200, "reference", 20)
    got = selected(*operands, 200, "portable", 20, query_tile)
    np.testing.assert_array_equal(got, wanted)


def test_small_tiles_skip_what_nobody_sees():
    """Tiles beyond the last visible entry keep what was in memory; the top-k does not read them."""
    operands = make(5, 20, 100)
    run = functools.partial(
        kernel.indexer_scores, ratio=4, config=SMALL, fill=False, interpret=True
    )
    scores = np.asarray(jax.jit(run)(*operands, jnp.int32(60)))
    wanted = np.asarray(scores_of(*operands, 60, "reference"))
    np.testing.assert_allclose(scores[:, :20], wanted[:, :20], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "entries", "tile"), [(8192, 2048, 8192), (8192, 262272, 256), (100, 100, 112)]
)
def test_query_tile_bounds_the_scores(tokens, entries, tile):
    assert kernel.query_tile(tokens, entries) == tile
    assert 4 * entries * tile <= kernel.SCORE_BYTES


@pytest.mark.parametrize("implementation", ["portable", "sm90"])
@pytest.mark.parametrize("spec", [FLASH, PRO], ids=lambda spec: spec.name)
@pytest.mark.parametrize("capacity", [2176, 262272])
def test_lowers_at_the_shapes_of_the_models(implementation, spec, capacity, lower_for_gpu):
    tokens = 8192
    text = lower_for_gpu(
        functools.partial(
            kernel.select_entries,
            k=spec.index_topk,
            ratio=4,
            tile=None,
            config=kernel.CONFIGS[implementation],
        ),
        jax.ShapeDtypeStruct((tokens, spec.index_heads, spec.index_head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((capacity, spec.index_head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, spec.index_heads), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    assert text.count("__gpu$xla.gpu.triton") >= 2


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("implementation", ["reference", "portable"])
def test_queries_are_rotated_transformed_and_rounded(implementation, quantise, distance):
    rng = np.random.default_rng(3)
    queries = jnp.asarray(rng.normal(size=(5, 64, 128)), jnp.bfloat16)
    angle = rng.normal(size=(5, 32)) * 9
    rope = tuple(jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    call = functools.partial(
        prepare_queries, quantise=quantise, implementation=implementation, interpret=True
    )
    got = jax.jit(call)(queries, rope)
    turned = rotary.apply_rope(queries, rope)
    wanted = codecs.hadamard(turned)
    wanted = codecs.fake_quant_fp4(wanted) if quantise else wanted
    # The rotation may contract a product and a sum: some last bits, some steps of FP4 differ.
    assert np.mean(got != wanted) < 0.02
    got32, wanted32 = got.astype(jnp.float32), wanted.astype(jnp.float32)
    assert distance(got32, wanted32) < (0.05 if quantise else 5e-3)
    np.testing.assert_array_equal(mix_channels(turned, quantise=quantise), wanted)
    part = jax.jit(call)(queries[3:], tuple(x[3:] for x in rope))
    np.testing.assert_array_equal(part, got[3:])


def test_preparation_names_what_it_refuses(lower_for_gpu):
    queries = jnp.zeros((2, 64, 128), jnp.bfloat16)
    rope = (jnp.zeros((2, 32), jnp.float32),) * 2
    with pytest.raises(ValueError, match=r"cos has shape \(1, 32\).*expected 2 on axis 0"):
        prepare_queries(queries, (rope[0][1:], rope[1]), quantise=True)
    for wrong, text in (
        (queries[:, :40], "40 index heads"),
        (queries[..., :96], "96 channels"),
        (queries.astype(jnp.float32), "float32"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            prepare_queries(wrong, rope, quantise=True, implementation="portable", interpret=True)
    text = lower_for_gpu(functools.partial(prepare.prepare_queries, quantise=True), queries, rope)
    assert "__gpu$xla.gpu.triton" in text


def test_errors_name_the_argument():
    queries, keys, weights = make(1, 4, 6)
    with pytest.raises(ValueError, match=r"keys has shape \(6, 16\).*expected 32 on axis 1"):
        indexer_scores(queries, keys[:, :16], weights, 0)
    with pytest.raises(ValueError, match="weights is bfloat16, expected float32"):
        indexer_scores(queries, keys, weights.astype(jnp.bfloat16), 0)
    with pytest.raises(ValueError, match="query_tile is 0, expected an integer >= 1"):
        select_entries(queries, keys, weights, 0, k=3, query_tile=0)
    with pytest.raises(ValueError, match="ratio is 0"):
        select_entries(queries, keys, weights, 0, k=3, ratio=0)
    exact = make(1, 4, 6, dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="queries are float32"):
        indexer_scores(*exact, 0, implementation="portable", interpret=True)
    odd = make(1, 4, 6, width=24)
    with pytest.raises(NotImplementedError, match="24 channels"):
        indexer_scores(*odd, 0, implementation="portable", interpret=True)


@pytest.mark.gpu1
def test_on_the_gpu(distance):
    operands = make(1, 300, 2500, heads=64, width=128)
    got = scores_of(*operands, 9000, "sm90")
    assert distance(got, scores_of(*operands, 9000, "reference")) < 1e-5
    lists = np.asarray(selected(*operands, 9000, "sm90", 512))
    wanted = jax.lax.top_k(got, 512)[1]
    np.testing.assert_array_equal(lists, np.sort(wanted, axis=1))
