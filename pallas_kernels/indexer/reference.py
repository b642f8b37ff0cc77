"""Indexer scores and the selection of entries in plain JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels.top_k import reference as top_k_reference


def indexer_scores(
    queries: jax.Array, keys: jax.Array, weights: jax.Array, position: jax.Array, *, ratio: int
) -> jax.Array:
    """See `pallas_kernels.indexer.indexer_scores`."""
    precision = jax.lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    products = jnp.einsum(
        "thd,nd->thn", queries, keys, precision=precision, preferred_element_type=jnp.float32
    )
    scores = jnp.sum(weights[:, :, None] * jnp.maximum(products, 0), axis=1)
    tokens = position + jnp.arange(queries.shape[0], dtype=jnp.int32)
    entries = jnp.arange(keys.shape[0], dtype=jnp.int32)
    visible = entries[None, :] < ((tokens + 1) // ratio)[:, None]
    return jnp.where(visible, scores, -jnp.inf)


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
    return top_k_reference.top_k(scores, k)
