"""Exact top-k set with `jax.lax.top_k`, whose sort is stable: ties go to the lower index."""

import jax
import jax.numpy as jnp


def top_k(scores: jax.Array, k: int) -> jax.Array:
    """See `pallas_kernels.top_k.top_k`."""
    rows, entries = scores.shape
    lowest = jnp.float32(-jnp.inf)
    usable = jnp.where(jnp.isnan(scores), lowest, scores)
    # lax.top_k orders -0.0 below 0.0; here they are one value and the lower index wins.
    usable = jnp.where(usable == 0, jnp.float32(0), usable)
    values, indices = jax.lax.top_k(usable, min(k, entries))
    indices = jnp.where(values == lowest, entries, indices.astype(jnp.int32))
    indices = jnp.sort(indices, axis=1)
    indices = jnp.where(indices == entries, -1, indices)
    missing = jnp.full((rows, max(k - entries, 0)), -1, jnp.int32)
    return jnp.concatenate([indices, missing], axis=1)
