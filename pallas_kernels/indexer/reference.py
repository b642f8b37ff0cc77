"""Indexer scores and the selection of entries in plain JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels.top_k import reference as top_k_reference

NAN_SCORE = -2  # instead of entries, for a token with a score that is NaN


def indexer_scores(
    queries: jax.Array, keys: jax.Array, weights: jax.Array, position: jax.Array, *, ratio: int
) -> jax.Array:
    """See `pallas_kernels.indexer.indexer_scores`."""
    precision = jax.lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    products = jnp.einsum(
        "thd,nd->thn", queries, keys, precision=precision, preferred_element_type=jnp.float32
    )
    scores = jnp.sum(0.5 * weights[:, :, None] * twice_relu(products), axis=1)
    tokens = position + jnp.arange(queries.shape[0], dtype=jnp.int32)
    entries = jnp.arange(keys.shape[0], dtype=jnp.int32)
    visible = entries[None, :] < ((tokens + 1) // ratio)[:, None]
    return jnp.where(visible, scores, -jnp.inf)


def twice_relu(x: jax.Array) -> jax.Array:
    """2 max(x, 0), exactly; NaN stays NaN, which the maximum of some backends drops."""
    return x + jnp.abs(x)


def select_entries(
    queries: jax.Array,
    keys: jax.Array,
    weights: jax.Array,
    position: jax.Array,
    *,
    k: int,
    ratio: int,
) -> jax.Array:
    """See `pallas_kernels.indexer.select_entries`; scores of the whole call at once."""
    scores = indexer_scores(queries, keys, weights, position, ratio=ratio)
    tokens = position + jnp.arange(queries.shape[0], dtype=jnp.int32)
    seen = jnp.minimum((tokens + 1) // ratio, keys.shape[0])
    return select(scores, k, seen)


def select(scores: jax.Array, k: int, seen: jax.Array) -> jax.Array:
    """What tokens select that see the first seen [T] of the entries that scores [T, N] are of."""
    nan = jnp.any(jnp.isnan(scores), axis=1)
    return selection(top_k_reference.top_k(scores, k), nan, seen)


def selection(best: jax.Array, nan: jax.Array, seen: jax.Array) -> jax.Array:
    """What a token selects, by itself alone.

    best [T, k] the entries of its best scores, nan [T] whether a score is NaN, seen [T] how many
    entries it sees. Where these are at most k it takes them all, whatever their scores.
    """
    chosen = jnp.where(nan[:, None], NAN_SCORE, best)
    k = best.shape[1]
    return jnp.where((seen <= k)[:, None], all_visible(seen, k), chosen)


def all_visible(seen: jax.Array, k: int) -> jax.Array:
    """Lists [T, k] of all entries below seen [T], for tokens that see at most k of them."""
    entries = jnp.arange(k, dtype=jnp.int32)[None, :]
    return jnp.where(entries < seen[:, None], entries, -1)
