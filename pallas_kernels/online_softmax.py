"""Attention over blocks of keys with a running maximum, shared by the tiled attention forms.

One tile of tokens meets its keys block by block. A block in which a token sees nothing leaves that
token's running values as they are, bit for bit: the number of blocks a tile visits may therefore
depend on its last token without touching the others.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.codecs import round_to


class Running(NamedTuple):
    """Maximum and sum of weights [t, h] and weighted values [t, h, K] of t tokens and h heads."""

    highest: jax.Array
    total: jax.Array
    values: jax.Array


def precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """float32 operands make true float32 products."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def empty(shape: tuple[int, int, int]) -> Running:
    """Nothing seen yet, for q of `shape` [t, h, K]."""
    return Running(
        jnp.full(shape[:2], -jnp.inf, jnp.float32),
        jnp.zeros(shape[:2], jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def add_block(
    running: Running, q: jax.Array, keys: jax.Array, visible: jax.Array, scale: float
) -> Running:
    """One more block of keys.

    q [t, h, K]; keys [t, n, K] for keys of each token's own or [n, K] for keys that all share;
    visible [t, n]. At least one key of the first block has to be visible. A key that a token cannot
    see may hold NaN; in one that it does see a NaN reaches the output through the score.
    """
    dims = ((2,), (keys.ndim - 1,)), ((0,), (0,)) if keys.ndim == 3 else ((), ())
    scores = jax.lax.dot_general(
        q,
        keys,
        dims,
        precision=precision(q.dtype),
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(visible[:, None, :], scores * jnp.float32(scale), -jnp.inf)
    highest = jnp.maximum(running.highest, jnp.max(scores, axis=2))
    weights = jnp.exp(scores - highest[:, :, None])
    shrink = jnp.exp(running.highest - highest)
    dims = ((2,), (keys.ndim - 2,)), ((0,), (0,)) if keys.ndim == 3 else ((), ())
    product = jax.lax.dot_general(
        round_to(weights, q.dtype),
        jnp.where(jnp.isnan(keys), jnp.zeros((), keys.dtype), keys),
        dims,
        precision=precision(q.dtype),
        preferred_element_type=jnp.float32,
    )
    return Running(
        highest,
        running.total * shrink + jnp.sum(weights, axis=2),
        running.values * shrink[:, :, None] + product,
    )


def finish(running: Running, sink: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Adds the sink [h] to the denominator and rounds once: [t, h, K]."""
    total = running.total + jnp.exp(sink[None, :] - running.highest)
    return round_to(running.values / total[:, :, None], dtype)


def window_blocks(
    q: jax.Array, band: jax.Array, first: jax.Array, *, window: int, scale: float
) -> Running:
    """The sliding windows of a tile of tokens.

    band [window - 1 + t, K]: the rows from window - 1 before the first token to the last token;
    first: absolute position of the first token. Every token gets a window of its own, so that the
    order of its sum does not depend on its place in the tile.
    """
    count = q.shape[0]
    rows = (
        jnp.arange(count, dtype=jnp.int32)[:, None] + jnp.arange(window, dtype=jnp.int32)[None, :]
    )
    visible = first - (window - 1) + rows >= 0
    return add_block(empty(q.shape), q, band[rows], visible, scale)
