"""Dense linear layers with FP8 weights in 128x128 blocks.

Weights stay in their storage format on the device. Each call decodes its weight into a temporary
of the compute dtype (N * K * itemsize bytes, released after the call) and lets XLA's own matrix
product run: one byte read, two written and two read again per bfloat16 weight. Keeping decoded
copies instead would cost 2 bytes per weight for all layers.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.block_linear import reference

__all__ = ["block_linear"]


def block_linear(
    x: jax.Array,
    weight: jax.Array,
    scales: jax.Array | None,
    *,
    quantize_input: bool,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """x @ weight^T, accumulated in float32 and rounded once to `dtype`.

    x        bf16 or f32 [T, K].
    weight   float8_e4m3fn (or its bytes, u8) [N, K] with scales, or bf16 / f32 [N, K] without.
    scales   u8 E8M0 [ceil(N/128), ceil(K/128)], or None.
    quantize_input  rounds x to E4M3 with one power-of-two scale per row and 128 channels first.
    dtype    bf16 or f32: the dtype of both operands of the product and of the result [T, N].

    Raises ValueError for shapes or dtypes that do not fit.
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"dtype is {jnp.dtype(dtype)}, expected bfloat16 or float32")
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x {list(x.shape)} and weight {list(weight.shape)}: expected [T, K] and [N, K]"
        )
    plain = weight.dtype in (jnp.bfloat16, jnp.float32)
    if plain != (scales is None):
        raise ValueError(
            f"weight is {weight.dtype} {'with' if plain else 'without'} scales: expected FP8 with "
            "scales, or bfloat16 or float32 without"
        )
    return reference.block_linear(x, weight, scales, quantize_input=quantize_input, dtype=dtype)
