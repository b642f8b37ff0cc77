"""Window plus selected-entry attention in plain JAX: gathers [T, window + k, K]."""

import jax
import jax.numpy as jnp

from pallas_kernels.codecs import round_to


def sparse_attention(
    q: jax.Array,
    window_kv: jax.Array,
    compressed: jax.Array,
    indices: jax.Array,
    sink: jax.Array,
    position: jax.Array,
    *,
    window: int,
    scale: float,
) -> jax.Array:
    """See `pallas_kernels.sparse_attention.sparse_attention`."""
    steps = jnp.arange(q.shape[0], dtype=jnp.int32)[:, None]
    rows = steps + jnp.arange(window, dtype=jnp.int32)[None, :]
    in_window = position - (window - 1) + rows >= 0
    chosen = indices >= 0
    visible = jnp.concatenate([in_window, chosen], axis=1)
    keys = jnp.concatenate([window_kv[rows], compressed[jnp.where(chosen, indices, 0)]], axis=1)
    keys = jnp.where(visible[:, :, None], keys, jnp.zeros((), keys.dtype))
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.einsum(
        "thk,tnk->thn", q, keys, precision=precision, preferred_element_type=jnp.float32
    )
    scores = jnp.where(visible[:, None], scores * jnp.float32(scale), -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink[None, :, None] - highest)
    out = jnp.einsum(
        "thn,tnk->thk",
        round_to(weights, q.dtype),
        keys,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return round_to(out / total, q.dtype)
