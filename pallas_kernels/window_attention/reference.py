"""Window plus contiguous compressed attention in plain JAX: materialises [H, T, keys]."""

import jax
import jax.numpy as jnp

from pallas_kernels.codecs import round_to


def window_attention(
    q: jax.Array,
    window_kv: jax.Array,
    compressed: jax.Array | None,
    sink: jax.Array,
    position: jax.Array,
    *,
    ratio: int,
    window: int,
    scale: float,
) -> jax.Array:
    """See `pallas_kernels.window_attention.window_attention`."""
    tokens = position + jnp.arange(q.shape[0], dtype=jnp.int32)
    at = position - (window - 1) + jnp.arange(window_kv.shape[0], dtype=jnp.int32)
    visible = (
        (at >= 0)[None, :]
        & (at[None, :] <= tokens[:, None])
        & (at[None, :] > tokens[:, None] - window)
    )
    keys = window_kv
    if compressed is not None:
        entries = jnp.arange(compressed.shape[0], dtype=jnp.int32)
        seen = entries[None, :] < ((tokens + 1) // ratio)[:, None]
        visible = jnp.concatenate([visible, seen], axis=1)
        keys = jnp.concatenate([window_kv, compressed], axis=0)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.einsum(
        "thk,nk->htn", q, keys, precision=precision, preferred_element_type=jnp.float32
    )
    scores = jnp.where(visible[None], scores * jnp.float32(scale), -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink[:, None, None] - highest)
    # Rows that this token cannot see have weight exactly 0 and may hold anything, NaN included. A
    # NaN in a row that it does see still reaches the output, through its score.
    values = jnp.where(jnp.isnan(keys), jnp.zeros((), keys.dtype), keys)
    out = jnp.einsum(
        "htn,nk->htk",
        round_to(weights, q.dtype),
        values,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return round_to(out / total, q.dtype).transpose(1, 0, 2)
