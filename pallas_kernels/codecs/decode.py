"""Exact decoders: value = table[code] * 2^(scale byte - 127).

The scale is applied as two products with normal powers of two. One product would need 2^-127 for
byte 0, a float32 subnormal that XLA flushes: 448 * 2^-127 is a normal number and has to survive.
Results that are themselves subnormal may flush to zero; nothing else is lost.
"""

import jax
import jax.numpy as jnp
from jax import lax

FP4_BLOCK = 32  # elements along the contraction that share one E8M0 byte
FP8_BLOCK = 128  # side of the square of weights that shares one E8M0 byte

# Twice the magnitude of code c, as nibble c: 0, 1, 2, 3, 4, 6, 8, 12.
_TWICE_E2M1 = 0xC8643210


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent as float32 for i32 exponents in [-126, 127] (normal numbers only)."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def scale_by(x: jax.Array, scale_bytes: jax.Array) -> jax.Array:
    """x (f32) * 2^(scale_bytes - 127), NaN where the byte is 255; shapes are equal."""
    exponent = scale_bytes.astype(jnp.int32) - 127
    half = exponent >> 1
    y = (x * power_of_two(half)) * power_of_two(exponent - half)
    return jnp.where(scale_bytes == 255, jnp.float32(jnp.nan), y)


def decode_e8m0(codes: jax.Array) -> jax.Array:
    """E8M0 bytes (u8, any shape) to float32: 0 gives the subnormal 2^-127, 255 gives NaN."""
    _require_u8("scale codes", codes)
    bits = codes.astype(jnp.int32) << 23
    bits = jnp.where(codes == 0, jnp.int32(0x00400000), bits)
    bits = jnp.where(codes == 255, jnp.int32(0x7FC00000), bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def e2m1_values(codes: jax.Array) -> jax.Array:
    """E2M1 codes (integers 0..15, any shape) to float32; code 8 is -0."""
    codes = codes.astype(jnp.uint32)
    twice = (jnp.uint32(_TWICE_E2M1) >> ((codes & 7) << 2)) & 15
    magnitude = twice.astype(jnp.int32).astype(jnp.float32) * jnp.float32(0.5)
    return jnp.where(codes >= 8, -magnitude, magnitude)


def decode_fp4(codes: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Packed E2M1 weights with one E8M0 byte per 32 elements of the last axis.

    codes   u8 [..., K/2], the low nibble holds the even element.
    scales  u8 [..., K/32].
    return  dtype [..., K]; exact in float32 and bfloat16 (subnormal results may flush).
    Raises ValueError when shapes or dtypes do not fit each other.
    """
    _require_u8("codes", codes)
    _require_u8("scales", scales)
    *lead, packed = codes.shape
    if (*lead, packed * 2 / FP4_BLOCK) != scales.shape:
        raise ValueError(
            f"scales have shape {scales.shape} for FP4 codes {codes.shape}: expected "
            f"[..., K/{FP4_BLOCK}] for codes [..., K/2], K a multiple of {FP4_BLOCK}"
        )
    nibbles = jnp.stack([codes & 15, codes >> 4], axis=-1)
    values = e2m1_values(nibbles).reshape(*lead, packed * 2 // FP4_BLOCK, FP4_BLOCK)
    values = scale_by(values, jnp.broadcast_to(scales[..., None], values.shape))
    return values.reshape(*lead, packed * 2).astype(dtype)


def decode_fp8(codes: jax.Array, scales: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """E4M3 weights with one E8M0 byte per 128x128 block; the last block of an axis may be partial.

    codes   float8_e4m3fn, or the same bytes as u8, [..., N, K].
    scales  u8 [..., ceil(N/128), ceil(K/128)].
    return  dtype [..., N, K]; exact in float32 and bfloat16 (subnormal results may flush).
    Raises ValueError when shapes or dtypes do not fit each other.
    """
    if codes.dtype == jnp.uint8:
        codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    elif codes.dtype != jnp.float8_e4m3fn:
        raise ValueError(f"codes have dtype {codes.dtype}, expected float8_e4m3fn or uint8")
    _require_u8("scales", scales)
    *lead, n, k = codes.shape
    if scales.shape != (*lead, -(-n // FP8_BLOCK), -(-k // FP8_BLOCK)):
        raise ValueError(
            f"scales have shape {scales.shape} for FP8 codes {codes.shape}: expected one byte per "
            f"{FP8_BLOCK}x{FP8_BLOCK} block, {(*lead, -(-n // FP8_BLOCK), -(-k // FP8_BLOCK))}"
        )
    grid = jnp.repeat(scales, FP8_BLOCK, axis=-2, total_repeat_length=scales.shape[-2] * FP8_BLOCK)
    grid = jnp.repeat(grid, FP8_BLOCK, axis=-1, total_repeat_length=scales.shape[-1] * FP8_BLOCK)
    return scale_by(codes.astype(jnp.float32), grid[..., :n, :k]).astype(dtype)


def _require_u8(name: str, array: jax.Array) -> None:
    if array.dtype != jnp.uint8:
        raise ValueError(f"{name} have dtype {array.dtype}, expected uint8")
