"""Pallas-Triton kernel of the exact top-k set: threshold by bisection, then compaction.

Floats are mapped to int32 keys of the same order. One program holds a segment of a row in
registers, narrows the interval around the k-th key by counting until exactly k keys lie above it
or one key is left, and stores the positions that a prefix sum gives. Rows longer than a segment
take a second pass over the winners of their segments, which are in ascending order again. Counting
and prefix sums are integer work: the set is exact and the same on every run.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

SEGMENT = 8192  # scores that one program holds; below 32768, so that two counts fit in an int32
LANES = 2048  # scores per warp
_NOTHING = np.int32(np.iinfo(np.int32).min)  # key of -inf, NaN and absent scores


def top_k(
    scores: jax.Array,
    k: int,
    limit: jax.Array | None = None,
    *,
    segment: int = SEGMENT,
    lanes: int = LANES,
    interpret: bool = False,
) -> jax.Array:
    """Indices [T, k]; see `pallas_kernels.top_k.top_k`.

    limit [T] int32: row t has scores in its first limit[t] columns only and the others may hold
    anything; None = all columns.
    """
    return top_k_and_nan(scores, k, limit, segment=segment, lanes=lanes, interpret=interpret)[0]


def top_k_and_nan(
    scores: jax.Array,
    k: int,
    limit: jax.Array | None = None,
    *,
    segment: int = SEGMENT,
    lanes: int = LANES,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`top_k`, and whether a row has a score that is NaN: bool [T]."""
    rows, entries = scores.shape
    if limit is None:
        limit = jnp.full((rows,), entries, jnp.int32)
    segment = max(segment, _power_of_two(2 * k))
    candidates, width, nan = None, entries, None
    while True:
        size = min(segment, max(128, _power_of_two(width)))
        segments = -(-width // size)
        winners = _call(scores, limit, candidates, k, size, segments, lanes, interpret)
        if nan is None:  # later passes see no NaN any more
            nan = jnp.any(winners[:, :, k] > 0, axis=1)
        if segments == 1:
            return winners[:, 0, :k], nan
        width = segments * k
        candidates = winners[:, :, :k].reshape(rows, width)


def refusal(k: int) -> str | None:
    """Why the kernel cannot select k entries; None when it can."""
    return f"k is {k}, the kernel selects at most 8192" if k > 8192 else None


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _call(
    scores: jax.Array,
    limit: jax.Array,
    candidates: jax.Array | None,
    k: int,
    size: int,
    segments: int,
    lanes: int,
    interpret: bool,
) -> jax.Array:
    """[T, segments, k + 1] indices; in the last column how many of the scores are NaN.

    That column also takes what masked stores must not write; it is written last.
    """
    rows, entries = scores.shape
    arrays = [limit, scores]
    if candidates is not None:
        arrays.append(candidates)
    kernel = functools.partial(
        _kernel, has_candidates=candidates is not None, k=k, size=size, entries=entries
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, segments, k + 1), jnp.int32),
        grid=(segments, rows),
        in_specs=[pl.no_block_spec] * len(arrays),
        out_specs=pl.no_block_spec,
        compiler_params=plt.CompilerParams(num_warps=max(1, min(16, size // lanes)), num_stages=1),
        interpret=interpret,
        name="top_k",
    )(*arrays)


def _kernel(limit_ref, scores_ref, *refs, has_candidates: bool, k: int, size: int, entries: int):
    out_ref = refs[-1]
    segment, row = pl.program_id(0), pl.program_id(1)
    lanes = segment * size + jnp.arange(size, dtype=jnp.int32)
    limit = jnp.minimum(limit_ref[row], entries)
    slots = jnp.arange(_power_of_two(k), dtype=jnp.int32)

    def store_nothing(first):
        empty = (slots >= first) & (slots < k)
        plt.store(
            out_ref.at[row, segment, jnp.where(empty, slots, k)],
            jnp.full(slots.shape, -1, jnp.int32),
            mask=empty,
        )

    def store_nan(count):
        if not has_candidates:
            out_ref[row, segment, k] = count

    def select():
        if has_candidates:
            count = refs[0].shape[1]
            there = lanes < count
            ids = plt.load(refs[0].at[row, jnp.minimum(lanes, count - 1)], mask=there, other=-1)
            there = there & (ids >= 0)
            ids = jnp.maximum(ids, 0)
        else:
            there = lanes < limit
            ids = jnp.minimum(lanes, entries - 1)
        values = plt.load(scores_ref.at[row, ids], mask=there, other=-jnp.inf)
        keys = _order(values)
        present = keys != _NOTHING
        total = jnp.sum(present.astype(jnp.int32))
        wanted = jnp.minimum(k, total)
        low = _threshold(keys, present, total, k)
        above = (keys > low) & present
        level = (keys == low) & present
        # Both prefix sums in one: the counts of a segment fit in 16 bits each.
        ranks = jnp.cumsum(above.astype(jnp.int32) + (level.astype(jnp.int32) << 16))
        spare = wanted - jnp.sum(above.astype(jnp.int32))
        rank = (ranks & 0xFFFF) + jnp.minimum(ranks >> 16, spare)
        chosen = above | (level & ((ranks >> 16) <= spare))
        plt.store(out_ref.at[row, segment, jnp.where(chosen, rank - 1, k)], ids, mask=chosen)
        store_nothing(wanted)
        store_nan(jnp.sum((values != values).astype(jnp.int32)))

    def nothing():
        store_nothing(0)
        store_nan(0)

    if has_candidates:
        select()
    else:
        pl.when(segment * size < limit)(select)
        pl.when(segment * size >= limit)(nothing)


def _threshold(keys, present, total, k):
    """The largest key with at least k keys from it up; the smallest key when there are fewer."""
    low = jnp.min(jnp.where(present, keys, np.int32(np.iinfo(np.int32).max)))
    high = jnp.where(total > k, jnp.max(keys) + 1, low)

    # At least k keys are >= low and fewer than k are >= high.
    def halve(bounds):
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        count = jnp.sum((keys >= middle).astype(jnp.int32))
        # With exactly k keys from the middle up it will do: the interval closes.
        high = jnp.where(count > k, high, jnp.where(count == k, middle + 1, middle))
        return jnp.where(count >= k, middle, low), high

    return jax.lax.while_loop(lambda bounds: bounds[0] < bounds[1] - 1, halve, (low, high))[0]


def _order(scores):
    """int32 keys in the order of the scores; both zeros are one value."""
    scores = jnp.where(scores == 0.0, 0.0, scores)
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    usable = (scores == scores) & (scores != -jnp.inf)
    return jnp.where(usable, keys, _NOTHING)
