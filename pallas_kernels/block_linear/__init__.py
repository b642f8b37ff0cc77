"""Dense linear layers with FP8 weights in 128x128 blocks.

Weights stay in their storage format on the device. On Hopper GPUs a product whose inputs are
rounded to E4M3 runs on the FP8 units, codes with codes (`sm90`). Any other call decodes its weight
into a temporary of the compute dtype (N * K * itemsize bytes, released after the call) and lets
XLA's own matrix product run: one byte read, two written and two read again per bfloat16 weight.
Keeping decoded copies instead would cost 2 bytes per weight for all layers.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import checks, codecs, mosaic, support
from pallas_kernels.block_linear import kernel, reference, sm90

__all__ = ["block_linear", "decoded"]

_CODES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.uint8))


def block_linear(
    x: jax.Array,
    weight: jax.Array,
    scales: jax.Array | None,
    *,
    quantize_input: bool,
    dtype: jax.typing.DTypeLike,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x @ weight^T, accumulated in float32 and rounded once to `dtype`.

    x        bf16 or f32 [T, K].
    weight   float8_e4m3fn (or its bytes, u8) [N, K] with scales, or bf16 / f32 [N, K] without.
    scales   u8 E8M0 [ceil(N/128), ceil(K/128)], or None.
    quantize_input  rounds x to E4M3 with one power-of-two scale per row and 128 channels first.
    dtype    bf16 or f32: the dtype of both operands of the product and of the result [T, N].
    implementation  None (automatic), "reference" (plain JAX, also what automatic means without a
             GPU), "portable" (the steps around the product in Pallas-Triton, for all NVIDIA GPUs,
             with the same results) or "sm90": with quantize_input and whole blocks a product in
             Pallas-Mosaic on the FP8 units of Hopper, anything else as "portable". The FP8 units
             keep fewer bits of the sum over 128 channels: 7e-4 (relative Frobenius) from float32
             before the result is rounded.
    interpret  runs the kernels in the interpreter, on any backend.

    Raises ValueError for shapes or dtypes that do not fit, NotImplementedError when the
    implementation asked for cannot run this call.
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"dtype is {jnp.dtype(dtype)}, expected bfloat16 or float32")
    shapes = checks.Shapes("block_linear")
    shapes.bind("x", x, "TK", checks.FLOATS)
    shapes.bind("weight", weight, "NK", (*checks.FLOATS, *_CODES))
    plain = weight.dtype in checks.FLOATS
    if plain != (scales is None):
        raise ValueError(
            f"weight is {weight.dtype} {'with' if plain else 'without'} scales: expected FP8 with "
            "scales, or bfloat16 or float32 without"
        )
    if scales is not None:
        grid = tuple(-(-size // codecs.FP8_BLOCK) for size in weight.shape)
        shapes.bind("scales", scales, grid, (jnp.dtype(jnp.uint8),))
    chosen = checks.pick(
        "block_linear", implementation, kernel.refusal(x, dtype), interpret=interpret
    )
    if chosen == "sm90" and quantize_input and not plain and sm90.refusal(weight) is None:
        blocks = mosaic.blocks_at_a_time(support.default_device())
        codes, x_scale = kernel.quantize_fp8(x, interpret=interpret)
        if weight.dtype == jnp.uint8:
            weight = jax.lax.bitcast_convert_type(weight, jnp.float8_e4m3fn)
        return sm90.product(codes, x_scale, weight, scales, blocks=blocks, interpret=interpret)
    if chosen in ("portable", "sm90"):
        if quantize_input and x.shape[1] % kernel.BLOCK == 0:
            x, quantize_input = kernel.fake_quant_fp8(x, interpret=interpret), False
        weight, scales = decoded(weight, scales, dtype, chosen, interpret=interpret), None
    return reference.block_linear(x, weight, scales, quantize_input=quantize_input, dtype=dtype)


def decoded(
    weight: jax.Array,
    scales: jax.Array | None,
    dtype: jax.typing.DTypeLike,
    implementation: str | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Values of a weight in `dtype`, [N, K]; arguments as in `block_linear`."""
    if scales is None:
        return weight.astype(dtype)
    whole = not any(size % kernel.BLOCK for size in weight.shape)
    bfloat16 = jnp.dtype(dtype) == jnp.bfloat16
    refusal = None if whole and bfloat16 else "the kernel decodes whole blocks to bfloat16"
    if implementation in ("portable", "sm90") and refusal is not None:
        implementation = "reference"
    chosen = checks.pick("decoded", implementation, refusal, interpret=interpret)
    if chosen in ("portable", "sm90"):
        return kernel.decode_fp8(weight, scales, interpret=interpret)
    return codecs.decode_fp8(weight, scales, dtype)
