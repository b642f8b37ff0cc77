"""Exact top-k sets: ties, zeros of both signs, NaN, short rows, rows longer than a segment."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.specs import FLASH, PRO
from pallas_kernels.top_k import kernel, top_k


def by_definition(scores, k):
    """Sorts every row by (-score, index) in Python."""
    rows = np.full((scores.shape[0], k), -1, np.int32)
    for row, values in enumerate(np.asarray(scores, np.float64)):
        usable = [i for i, value in enumerate(values) if value > -np.inf]
        chosen = sorted(sorted(usable, key=lambda i: (-values[i], i))[:k])
        rows[row, : len(chosen)] = chosen
    return rows


def hard_scores(seed, entries):
    """Rows that stress the definition."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(10, entries)).astype(np.float32)
    scores[1] = np.round(scores[1])  # many ties
    scores[2] = 0.5  # one value
    scores[3] = np.where(rng.random(entries) < 0.5, 0.0, -0.0)
    scores[4, ::3] = np.nan
    scores[4, -1] = -np.nan
    scores[5] = -np.inf
    scores[6, 3:] = -np.inf
    scores[7, ::2] = np.inf
    scores[8] *= np.float32(1e-40)  # subnormal
    scores[9] = np.where(rng.random(entries) < 0.3, np.finfo(np.float32).min, -np.inf)
    return scores


@functools.partial(jax.jit, static_argnames=("k", "options"))
def by_kernel(scores, k, limit=None, options=()):
    return kernel.top_k(scores, k, limit, interpret=jax.default_backend() == "cpu", **dict(options))


@pytest.mark.parametrize("entries", [1, 200, 300])
@pytest.mark.parametrize("k", [1, 6, 64, 301])
def test_set_is_exact(entries, k):
    scores = hard_scores(entries + k, entries)
    scores[8] *= 0 if jax.default_backend() == "cpu" else 1  # XLA flushes subnormals there
    wanted = by_definition(scores, k)
    np.testing.assert_array_equal(jax.jit(top_k, static_argnums=1)(scores, k), wanted)
    np.testing.assert_array_equal(by_kernel(scores, k), wanted)


@pytest.mark.parametrize(("entries", "segment"), [(200, 8192), (700, 128)])
def test_rows_with_nan_are_told_apart(entries, segment):
    """Only among the scores that count: those below the limit."""
    scores = hard_scores(entries, entries)
    scores[5, entries - 10 :] = np.nan
    limit = np.full(10, entries, np.int32)
    run = functools.partial(
        kernel.top_k_and_nan, segment=segment, interpret=jax.default_backend() == "cpu"
    )
    for limit_5, rows in ((entries, [4, 5]), (entries - 10, [4]), (0, [4])):
        limit[5] = limit_5
        best, nan = jax.jit(run, static_argnums=1)(scores, 6, limit)
        assert np.flatnonzero(nan).tolist() == rows
        np.testing.assert_array_equal(best, by_kernel(scores, 6, limit))


@pytest.mark.parametrize(
    ("entries", "segment", "k"), [(700, 128, 5), (900, 128, 70), (513, 256, 1)]
)
def test_rows_longer_than_a_segment(entries, segment, k):
    scores = hard_scores(entries, entries)
    scores[8] = 1
    wanted = by_definition(scores, k)
    np.testing.assert_array_equal(by_kernel(scores, k, options=(("segment", segment),)), wanted)


@pytest.mark.parametrize("segment", [128, 512])
def test_columns_from_the_limit_on_are_not_read(segment):
    scores = hard_scores(3, 400)
    scores[8] = 1
    limit = np.asarray([0, 1, 5, 127, 128, 129, 255, 300, 399, 400], np.int32)
    hidden = np.arange(400)[None, :] >= limit[:, None]
    wanted = by_definition(np.where(hidden, -np.inf, scores), 20)
    poisoned = np.where(hidden, np.inf, scores)
    got = by_kernel(poisoned, 20, limit, options=(("segment", segment),))
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("entries", "k"),
    [
        (FLASH.experts, FLASH.experts_per_token),
        (2048, FLASH.index_topk),
        (262272, FLASH.index_topk),
        (262272, PRO.index_topk),
    ],
)
def test_lowers_at_the_shapes_of_the_models(entries, k, lower_for_gpu):
    scores = jax.ShapeDtypeStruct((1024, entries), jnp.float32)
    limit = jax.ShapeDtypeStruct((1024,), jnp.int32)
    text = lower_for_gpu(lambda s, n: kernel.top_k(s, k, n), scores, limit)
    assert "__gpu$xla.gpu.triton" in text


def test_errors_name_the_argument():
    scores = jnp.zeros((2, 5), jnp.float32)
    with pytest.raises(ValueError, match="k is 0, expected an integer >= 1"):
        top_k(scores, 0)
    with pytest.raises(ValueError, match="scores is bfloat16, expected float32"):
        top_k(scores.astype(jnp.bfloat16), 2)
    with pytest.raises(ValueError, match=r"scores has shape \(5,\), expected 2 axes"):
        top_k(scores[0], 2)
    with pytest.raises(NotImplementedError, match="portable kernels need an NVIDIA GPU"):
        top_k(scores, 2, implementation="portable")
    with pytest.raises(NotImplementedError, match="k is 9000, the kernel selects at most 8192"):
        top_k(scores, 9000, implementation="sm90", interpret=True)


@pytest.mark.gpu1
@pytest.mark.parametrize(("entries", "k"), [(256, 6), (2048, 512), (20000, 512), (40000, 1024)])
def test_on_the_gpu(entries, k):
    scores = hard_scores(entries, entries)
    np.testing.assert_array_equal(top_k(scores, k), by_definition(scores, k))
