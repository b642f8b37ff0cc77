"""Manifold-constrained hyper-connections in plain JAX, in float32 with one rounding per result."""

import jax
import jax.numpy as jnp

from pallas_kernels.codecs import round_to


def mixes(streams: jax.Array, fn: jax.Array, *, norm_eps: float) -> jax.Array:
    """The mixing logits m = (x @ fn^T) * rsqrt(mean(x^2) + norm_eps), [T, rows of fn] float32.

    x is the [S * D] concatenation of a token's streams, stream 0 first.
    """
    x = streams.reshape(streams.shape[0], -1).astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + jnp.float32(norm_eps))
    product = jnp.einsum("tx,mx->tm", x, fn, precision=jax.lax.Precision.HIGHEST)
    return product * factor


def split_mixes(
    m: jax.Array, base: jax.Array, scale: jax.Array, *, count: int, iterations: int, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits [T, count * (2 + count)] to pre [T, count], post [T, count], comb [T, count, count].

    pre = sigmoid + eps, post = 2 * sigmoid (no eps). comb starts as a softmax over its last index
    plus eps, then is divided by its column sums, then `iterations - 1` times by its row sums and
    by its column sums: it ends on a column step. Every sum of a division has eps added.
    """
    eps = jnp.float32(eps)
    base = base[None, :]
    pre = jax.nn.sigmoid(m[:, :count] * scale[0] + base[:, :count]) + eps
    post = 2 * jax.nn.sigmoid(m[:, count : 2 * count] * scale[1] + base[:, count : 2 * count])
    comb = m[:, 2 * count :] * scale[2] + base[:, 2 * count :]
    comb = jax.nn.softmax(comb.reshape(-1, count, count), axis=2) + eps
    comb = comb / (jnp.sum(comb, axis=1, keepdims=True) + eps)

    def one_round(_: jax.Array, comb: jax.Array) -> jax.Array:
        comb = comb / (jnp.sum(comb, axis=2, keepdims=True) + eps)
        return comb / (jnp.sum(comb, axis=1, keepdims=True) + eps)

    return pre, post, jax.lax.fori_loop(0, iterations - 1, one_round, comb)


def pre(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.hyper_connections.pre`."""
    weights, post_weights, comb = split_mixes(
        mixes(streams, fn, norm_eps=norm_eps),
        base,
        scale,
        count=streams.shape[1],
        iterations=iterations,
        eps=eps,
    )
    return _weighted(streams, weights), post_weights, comb


def post(y: jax.Array, streams: jax.Array, weights: jax.Array, comb: jax.Array) -> jax.Array:
    """See `pallas_kernels.hyper_connections.post`."""
    x = streams.astype(jnp.float32)
    # comb is summed over its FIRST index: stream j feeds stream k with comb[j, k].
    mixed = jnp.einsum("tjk,tjd->tkd", comb, x, precision=jax.lax.Precision.HIGHEST)
    return round_to(weights[:, :, None] * y.astype(jnp.float32)[:, None, :] + mixed, streams.dtype)


def collapse(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    norm_eps: float,
) -> jax.Array:
    """See `pallas_kernels.hyper_connections.collapse`."""
    m = mixes(streams, fn, norm_eps=norm_eps)
    return _weighted(streams, jax.nn.sigmoid(m * scale[0] + base[None, :]) + jnp.float32(eps))


def _weighted(streams: jax.Array, weights: jax.Array) -> jax.Array:
    x = streams.astype(jnp.float32)
    return round_to(jnp.sum(weights[:, :, None] * x, axis=1), streams.dtype)
