"""What happens to query heads between their projection and the scores, and to outputs behind them.

The attention operations take these steps in, so that kernels can do them on data that they hold
anyway: over all heads of a chunk each step would read and write as much as the attention itself.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import checks, codecs

Table = tuple[jax.Array, jax.Array]  # cos and sin [T, R / 2] float32 of every token


def check(shapes: checks.Shapes, table: Table | None, q: jax.Array) -> None:
    """Raises ValueError unless `table` can rotate q [T, H, K]; None can."""
    if table is None:
        return
    shapes.bind("cos", table[0], "TR", checks.FLOAT32)
    shapes.bind("sin", table[1], "TR", checks.FLOAT32)
    if 2 * table[0].shape[1] > q.shape[2]:
        raise ValueError(
            f"{shapes.operation}: cos has {table[0].shape[1]} channel pairs, expected at most "
            f"{q.shape[2] // 2} (q has {q.shape[2]} channels)"
        )


def head_norm(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, in the arithmetic of x.dtype.

    The published code normalises query heads without leaving the dtype of the activations: square,
    mean, sum with eps, inverse root and product are rounded one by one. In bfloat16 that moves the
    output of a layer by 1 to 3 % against one rounding at the end.

    x  [..., C] bfloat16 or float32; the result has its dtype.
    """

    def rounded(value: jax.Array) -> jax.Array:
        return codecs.round_to(value, x.dtype).astype(jnp.float32)

    wide = x.astype(jnp.float32)
    mean = rounded(jnp.mean(rounded(wide * wide), axis=-1, keepdims=True))
    return codecs.round_to(wide * rounded(jax.lax.rsqrt(rounded(mean + eps))), x.dtype)


def apply_rope(x: jax.Array, table: Table, *, inverse: bool = False) -> jax.Array:
    """Rotates the last R channels of x: adjacent channels (2i, 2i + 1) form pair i.

    x      [T, C] or [T, H, C] bfloat16 or float32; rotated in float32 and rounded once.
    table  cos and sin [T, R / 2] of the angles.
    inverse turns by the negative angle.
    """
    cos, sin = table
    if x.ndim == 3:
        cos, sin = cos[:, None, :], sin[:, None, :]
    if inverse:
        sin = -sin
    plain = x.shape[-1] - 2 * cos.shape[-1]
    pairs = x[..., plain:].astype(jnp.float32).reshape(*x.shape[:-1], cos.shape[-1], 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    turned = codecs.round_to(turned.reshape(*x.shape[:-1], 2 * cos.shape[-1]), x.dtype)
    return jnp.concatenate([x[..., :plain], turned], axis=-1)
