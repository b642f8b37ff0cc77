"""Pallas-Triton kernels around the product: inputs rounded to FP8, weights decoded, one pass each.

XLA takes two passes for the rounding (the largest value of a block, then the block) and reaches
half of the memory's speed in the decoding.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import codecs
from pallas_kernels.codecs.decode import scale_by
from pallas_kernels.tracing import traced_once

BLOCK = 128  # channels of an input and side of a weight square that share a scale
ROWS = 16  # rows of an input tile, at most
COLUMNS = 4 * BLOCK  # columns of an input tile, at most


def refusal(x: jax.Array, dtype: jax.typing.DTypeLike) -> str | None:
    """Why the kernels cannot serve x [T, K]; None when they can."""
    if x.dtype != jnp.bfloat16 or jnp.dtype(dtype) != jnp.bfloat16:
        return f"x is {x.dtype} and the product {jnp.dtype(dtype)}, the kernels take bfloat16"
    return None


@traced_once("interpret")
def fake_quant_fp8(x: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`codecs.fake_quant_fp8(x, 128)` of x [T, K] bfloat16, K a multiple of 128."""
    rows, width = x.shape
    tile = (math.gcd(rows, ROWS), math.gcd(width, COLUMNS))
    return pl.pallas_call(
        _quantise,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows // tile[0], width // tile[1]),
        in_specs=[pl.BlockSpec(tile, lambda t, k: (t, k))],
        out_specs=pl.BlockSpec(tile, lambda t, k: (t, k)),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="quantise_input",
    )(x)


def _quantise(x_ref, out_ref):
    out_ref[...] = codecs.fake_quant_fp8(x_ref[...], BLOCK)


@traced_once("interpret")
def quantize_fp8(x: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """`codecs.quantize_fp8(x, 128)` of x [T, K] bfloat16, K a multiple of 128.

    Codes e4m3 [T, K], scales as float32 [K / 128, T].
    """
    rows, width = x.shape
    tile = (math.gcd(rows, ROWS), math.gcd(width, COLUMNS))
    return pl.pallas_call(
        functools.partial(_codes, tile=tile),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((width // BLOCK, rows), jnp.float32),
        ),
        grid=(rows // tile[0], width // tile[1]),
        in_specs=[pl.BlockSpec(tile, lambda t, k: (t, k))],
        out_specs=(pl.BlockSpec(tile, lambda t, k: (t, k)), pl.no_block_spec),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="quantise_codes",
    )(x)


def _codes(x_ref, codes_ref, scale_ref, *, tile: tuple[int, int]):
    codes, scales = codecs.quantize_fp8(x_ref[...], BLOCK, cast=True)
    codes_ref[...] = codes
    row = pl.program_id(0) * tile[0] + jnp.arange(tile[0], dtype=jnp.int32)
    blocks = tile[1] // BLOCK
    block = pl.program_id(1) * blocks + jnp.arange(blocks, dtype=jnp.int32)
    plt.store(scale_ref.at[block[None, :], row[:, None]], codecs.decode_e8m0(scales))


@traced_once("interpret")
def decode_fp8(codes: jax.Array, scales: jax.Array, *, interpret: bool = False) -> jax.Array:
    """`codecs.decode_fp8` to bfloat16, of codes [N, K] with N and K multiples of 128."""
    if codes.dtype != jnp.uint8:
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
    rows, width = codes.shape
    tile = (BLOCK // 2, BLOCK)
    return pl.pallas_call(
        functools.partial(_decode, halves=2),
        out_shape=jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16),
        grid=(rows // tile[0], width // tile[1]),
        in_specs=[pl.BlockSpec(tile, lambda n, k: (n, k)), pl.no_block_spec],
        out_specs=pl.BlockSpec(tile, lambda n, k: (n, k)),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="decode_weight",
    )(codes, scales)


def _decode(codes_ref, scales_ref, out_ref, *, halves: int):
    scale = scales_ref[pl.program_id(0) // halves, pl.program_id(1)]
    out_ref[...] = scale_by(e4m3_values(codes_ref[...]), scale).astype(out_ref.dtype)


def e4m3_values(codes: jax.Array) -> jax.Array:
    """E4M3 bytes (u8, any shape) to float32, without casts that only new GPUs have."""
    codes = codes.astype(jnp.int32)
    magnitude = codes & 127
    # Exponent and mantissa in place of a float32's; exponent 0 counts in steps of 2**-9.
    normal = lax.bitcast_convert_type((magnitude + (120 << 3)) << 20, jnp.float32)
    values = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * 2.0**-9, normal)
    values = jnp.where(magnitude == 127, jnp.float32(jnp.nan), values)
    return values * jnp.where(codes > 127, -1.0, 1.0)  # -values would lose the sign of a zero
