"""A prompt gives the same logits, selections and state however it is cut into chunks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax import cache
from ds4jax.config import PRESETS, SIMULATIONS, Numerics

ORACLE = PRESETS["oracle"]
FAST_SPLITS = {
    "3,1,5,2,rest": [3, 1, 5, 2, 128, 128, 33],
    "101": [101, 101, 98],
    "ends of blocks": [127, 1, 4, 124, 44],
    "starts with single tokens": [1] * 12 + [110, 5, 1, 1, 1, 128, 42],
}
SLOW_SPLITS = {
    "sevens": 7,
    "64": 64,
    "33": 33,
    "single tokens": 1,
}


def only(module, *names):
    """The same module with every other field None."""
    fields = {field.name for field in dataclasses.fields(module)}
    return dataclasses.replace(module, **dict.fromkeys(fields - set(names)))


def split(length: int, size: int) -> list[int]:
    return [min(size, length - begin) for begin in range(0, length, size)]


@pytest.fixture(scope="module")
def whole(golden, run):
    """The run of a case that splits are compared with, and its case."""
    runs = {}

    def once(name):
        if name not in runs:
            case = golden(name)
            runs[name] = run(case.loaded, case.tokens, split(len(case.tokens), 128), ORACLE)
        return golden(name), runs[name]

    return once


def assert_same_state(config, got, wanted):
    """Arrays within the limit of the streams; entry counts and everything unset exactly."""
    assert got.position == wanted.position
    for index, ratio in enumerate(config.layer_ratios):
        one, other = got.layers[index], wanted.layers[index]
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for path, leaf in jax.tree_util.tree_leaves_with_path(one):
            where = f"layer {index} {jax.tree_util.keystr(path)}"
            value = np.asarray(leaf)
            reference = np.asarray(dict(jax.tree_util.tree_leaves_with_path(other))[path])
            np.testing.assert_array_equal(value == 0, reference == 0, err_msg=where)
            np.testing.assert_allclose(value, reference, rtol=0, atol=1e-4, err_msg=where)
        if ratio:
            filled = np.any(np.asarray(one.compressed) != 0, axis=1)
            np.testing.assert_array_equal(
                filled, np.arange(len(filled)) < got.position // ratio, err_msg=f"layer {index}"
            )


def assert_same(case, trace, wanted):
    case.assert_matches(trace)
    assert_same_state(case.config, trace.state, wanted.state)


@pytest.mark.parametrize("chunks", FAST_SPLITS.values(), ids=FAST_SPLITS)
def test_flash_schedule(chunks, whole, run):
    case, wanted = whole("f32")
    assert_same(case, run(case.loaded, case.tokens, chunks, ORACLE), wanted)


@pytest.mark.parametrize("name", ["f32-pro", "quant"])
def test_other_schedules(name, whole, run):
    case, wanted = whole(name)
    chunks = [3, 1, 5, 2, 118, 1, 60, len(case.tokens) - 190]
    assert_same(case, run(case.loaded, case.tokens, chunks, ORACLE), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["f32", "f32-pro", "quant"])
@pytest.mark.parametrize("size", SLOW_SPLITS.values(), ids=SLOW_SPLITS)
def test_grid_of_chunk_sizes(name, size, whole, run):
    case, wanted = whole(name)
    trace = run(case.loaded, case.tokens, split(len(case.tokens), size), ORACLE)
    assert_same(case, trace, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_row_shapes(rows, whole, run):
    case, wanted = whole("f32")
    trace = run(case.loaded, case.tokens, split(300, rows), ORACLE, rows=rows)
    assert_same(case, trace, wanted)


@pytest.mark.slow
def test_short_chunks_and_then_the_rest_at_once(whole, run):
    case, wanted = whole("f32")
    trace = run(case.loaded, case.tokens, [3, 1, 5, 2, 289], ORACLE, rows=300)
    assert_same(case, trace, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_splits(seed, whole, run):
    case, wanted = whole("f32")
    random = np.random.default_rng([17, seed])
    chunks: list[int] = []
    while sum(chunks) < 300:
        chunks.append(min(int(random.integers(1, 129)), 300 - sum(chunks)))
    assert_same(case, run(case.loaded, case.tokens, chunks, ORACLE), wanted)


def test_all_simulations_are_independent_of_the_split(golden, run):
    """Quantised state is what later chunks read, so a split flips no rounding."""
    case = golden("official-select")
    numerics = Numerics("bfloat16", SIMULATIONS)
    wanted = run(case.loaded, case.tokens, [128, 128, 14], numerics)
    trace = run(case.loaded, case.tokens, [101, 1, 100, 3, 65], numerics)
    # On one device kind and row shape every row is computed by the same arithmetic.
    np.testing.assert_array_equal(trace.chosen, wanted.chosen)
    np.testing.assert_allclose(trace.logits, wanted.logits, atol=1e-4)


def test_padding_rows_leave_no_trace(golden, parts):
    """Other ids in the padding change neither a bit of the real rows nor of the state."""
    case = golden("f32")
    block, slab = case.loaded.transformer.blocks[2], case.loaded.slabs[2]
    random = np.random.default_rng(3)
    streams = random.standard_normal((128, 4, case.config.hidden_size)).astype(np.float32)
    ids = np.resize(case.tokens, 128)
    results = []
    for filling in (0.0, 7.5):
        streams[13:] = filling
        ids[13:] = int(filling)
        state = cache.empty_layer_state(case.config, block.ratio, ORACLE, 1024)
        chunk = cache.Chunk(jnp.asarray(ids), jnp.int32(0), jnp.int32(13))
        attended, after, _ = parts.attend(
            only(block, "hc_attn", "attn_norm", "attn"), jnp.asarray(streams), state, chunk, ORACLE
        )
        routing = parts.route(only(block, "hc_ffn", "ffn_norm", "ffn"), attended, chunk, ORACLE)
        assert np.all(np.asarray(routing.ids)[13:] == -1)
        shared = only(block.ffn, "shared_experts")
        last = dataclasses.replace(only(block, "hc_ffn"), ffn=shared)
        out = parts.finish(last, attended, routing, slab, ORACLE)
        assert np.all(np.isfinite(np.asarray(out)))
        results.append((np.asarray(out)[:13], jax.tree.map(np.asarray, after)))
    jax.tree.map(np.testing.assert_array_equal, results[0], results[1])


def test_empty_chunk_changes_nothing(golden, run):
    case = golden("f32")
    state = run(case.loaded, case.tokens[:30], [30], ORACLE).state
    trace = run(case.loaded, case.tokens[:0], [0], ORACLE, state=state)
    jax.tree.map(np.testing.assert_array_equal, trace.state, state)


def test_state_of_one_prompt_is_not_seen_by_another(golden, run):
    case = golden("f32")
    first = run(case.loaded, case.tokens[:40], [40], ORACLE)
    run(case.loaded, case.tokens[50:90], [40], ORACLE)
    again = run(case.loaded, case.tokens[:40], [40], ORACLE)
    np.testing.assert_array_equal(first.logits, again.logits)


def test_grown_state_continues_the_same(golden, run):
    case = golden("f32")
    small = run(case.loaded, case.tokens[:200], [128, 72], ORACLE, capacity=256).state
    large = cache.grow_state(small, case.config, 1024)
    assert large.layers[2].compressed.shape[0] > small.layers[2].compressed.shape[0]
    trace = run(case.loaded, case.tokens[200:], [100], ORACLE, state=large)
    difference = np.abs(trace.logits - case.expected["logits"][200:])
    assert difference.max() <= case.meta["tolerance"]["float32_compute"]["max_abs"]


def test_last_padded_chunk_fits_a_full_state(golden, run):
    """A state that holds exactly the prompt: rows past its end are dropped, none is clamped."""
    case = golden("f32")
    tokens = np.resize(case.tokens, 512)
    exact = run(case.loaded, tokens, [128, 128, 128, 64, 64], ORACLE, capacity=512)
    roomy = run(case.loaded, tokens, [128, 128, 128, 64, 64], ORACLE, capacity=1024)
    assert exact.state.layers[2].compressed.shape[0] == 128
    np.testing.assert_allclose(exact.logits, roomy.logits, atol=1e-4)
    for one, other in zip(exact.state.layers, roomy.state.layers, strict=True):
        if one.compressed is not None:
            rows = one.compressed.shape[0]
            np.testing.assert_allclose(one.compressed, other.compressed[:rows], atol=1e-4)
