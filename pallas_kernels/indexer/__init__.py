"""Lightning indexer: scores of compressed entries and the choice of the best k per token."""

from typing import Any

import jax

from pallas_kernels import checks, rotary
from pallas_kernels.indexer import kernel, prepare, reference, tiled

__all__ = ["NAN_SCORE", "indexer_scores", "mix_channels", "prepare_queries", "select_entries"]

NAN_SCORE = reference.NAN_SCORE


def mix_channels(x: jax.Array, *, quantise: bool) -> jax.Array:
    """The Hadamard transform that index queries and keys share, after their rotation.

    x [..., Di] float32 or bfloat16 -> the same shape and dtype, rounded once; `quantise` rounds to
    FP4 in blocks of 32 channels as well (q3).
    """
    return prepare.mix_channels(x, quantise=quantise)


def prepare_queries(
    queries: jax.Array,
    rope: rotary.Table,
    *,
    quantise: bool,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Rotation, then `mix_channels`, of index queries as projected.

    Args:
      queries: [T, Hi, Di] float32 or bfloat16.
      rope: cos and sin [T, R / 2] float32, see `rotary.apply_rope`.
      quantise: rounds the result to FP4 in blocks of 32 channels (q3).
      implementation: None (automatic), "reference" or "tiled" (plain JAX), "portable" or "sm90"
        (one Pallas-Triton kernel for all NVIDIA GPUs). Sums may differ in the last bit before they
        are rounded.
      interpret: run the kernel in the interpreter, on any backend.

    Returns:
      [T, Hi, Di] in the dtype of the queries.

    Raises:
      ValueError: shapes or dtypes that contradict each other.
      NotImplementedError: the implementation asked for cannot run this call.
    """
    shapes = checks.Shapes("prepare_queries")
    shapes.bind("queries", queries, "THK", checks.FLOATS)
    rotary.check(shapes, rope, queries)
    chosen = checks.pick(
        "prepare_queries", implementation, prepare.refusal(queries), interpret=interpret
    )
    if chosen in kernel.CONFIGS:
        return prepare.prepare_queries(queries, rope, quantise=quantise, interpret=interpret)
    return mix_channels(rotary.apply_rope(queries, rope), quantise=quantise)


def indexer_scores(
    queries: jax.Array,
    keys: jax.Array,
    weights: jax.Array,
    position: Any,
    *,
    ratio: int = 4,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """score(t, i) = sum over heads of weights[t, h] * relu(queries[t, h] . keys[i]), in float32.

    Args:
      queries: [T, Hi, Di] float32 or bfloat16, rotated, transformed and (if simulated) quantised.
      keys: [N, Di] of the same dtype; rows that no token sees may hold anything.
      weights: [T, Hi] float32, signed.
      position: absolute position of the first token, int32 scalar (may be traced).
      ratio: tokens per entry; token t sees entries i < (position + t + 1) // ratio.
      implementation: None (automatic), "reference", "tiled" (plain JAX, bounded workspace, any
        backend), "portable" (Pallas-Triton, any recent NVIDIA GPU) or "sm90" (tiles for Hopper).
        They differ in the last bits.
      interpret: run the kernels in the interpreter, on any backend.

    Returns:
      [T, N] float32, -inf where the entry is not visible.

    Raises:
      ValueError: shapes or dtypes that contradict each other.
      NotImplementedError: the implementation asked for cannot run this call.
    """
    _check("indexer_scores", queries, keys, weights, ratio)
    chosen = checks.pick(
        "indexer_scores", implementation, kernel.refusal(queries), interpret=interpret
    )
    position = checks.scalar("indexer_scores", "position", position)
    keys = checks.on_device(keys)
    if chosen in kernel.CONFIGS:
        scores = kernel.indexer_scores(
            queries,
            keys,
            weights,
            position,
            ratio=ratio,
            config=kernel.CONFIGS[chosen],
            interpret=interpret,
        )
        return scores[:, : keys.shape[0]]
    form = reference if chosen == "reference" else tiled
    return form.indexer_scores(queries, keys, weights, position, ratio=ratio)


def select_entries(
    queries: jax.Array,
    keys: jax.Array,
    weights: jax.Array,
    position: Any,
    *,
    k: int,
    ratio: int = 4,
    query_tile: int | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The k best-scored visible entries of every token; all visible ones where at most k are.

    Arguments as in `indexer_scores`; ties go to the lower entry. NaN is never selected but
    reported: a token that had to choose and has a NaN score selects nothing, its whole row is
    NAN_SCORE (-2).
    query_tile is the number of tokens whose scores the kernels keep at one time (None = what fits
    in 512 MiB); it bounds the workspace and does not change the result.

    Returns:
      [T, k] int32, ascending, padded with -1; or all NAN_SCORE.

    Raises:
      ValueError: shapes or dtypes that contradict each other.
      NotImplementedError: the implementation asked for cannot run this call.
    """
    _check("select_entries", queries, keys, weights, ratio)
    checks.positive("select_entries", k=k, query_tile=1 if query_tile is None else query_tile)
    chosen = checks.pick(
        "select_entries", implementation, kernel.refusal(queries), interpret=interpret
    )
    position = checks.scalar("select_entries", "position", position)
    keys = checks.on_device(keys)
    if chosen in kernel.CONFIGS:
        return kernel.select_entries(
            queries,
            keys,
            weights,
            position,
            k=k,
            ratio=ratio,
            tile=query_tile,
            config=kernel.CONFIGS[chosen],
            interpret=interpret,
        )
    form = reference if chosen == "reference" else tiled
    return form.select_entries(queries, keys, weights, position, k=k, ratio=ratio)


def _check(
    operation: str, queries: jax.Array, keys: jax.Array, weights: jax.Array, ratio: int
) -> None:
    shapes = checks.Shapes(operation)
    shapes.bind("queries", queries, ("T", "Hi", "Di"), checks.FLOATS)
    shapes.bind("keys", keys, ("N", "Di"), (queries.dtype,))
    shapes.bind("weights", weights, ("T", "Hi"), checks.FLOAT32)
    checks.positive(operation, ratio=ratio)
