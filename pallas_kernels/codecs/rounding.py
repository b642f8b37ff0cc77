"""Roundings that belong to the model, written so that compilers cannot drop them.

XLA may remove a cast to a narrower float and back inside jit (measured on GPUs: x - f32(bf16(x))
is exactly zero there). Nothing here depends on such a pair: bfloat16 goes through
`lax.reduce_precision`, E4M3 and E2M1 through integer rounding of a scaled value.

The block rules are those of the published inference code: the scale of a block is the power of two
2^ceil(log2(amax / largest code value)), found on the bits of the float32 quotient, and values round
to nearest with ties to the even code. A block that holds NaN or infinity comes out as NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.codecs.decode import power_of_two

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_E4M3_FLOOR = 1e-4  # smallest amax of an FP8 block
_E2M1_FLOOR = 6.0 * 2.0**-126  # smallest amax of an FP4 block: its scale is still a normal number


def round_to(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """x cast to float32 or bfloat16; the rounding survives jit.

    Raises ValueError for other dtypes: their exponent range differs from float32's, so
    `lax.reduce_precision` would not be the cast.
    """
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(dtype)
    if dtype != jnp.float32:
        raise ValueError(f"round_to got dtype {dtype}, expected float32 or bfloat16")
    return x.astype(dtype)


def round_e4m3(x: jax.Array) -> jax.Array:
    """Nearest float8_e4m3fn value, ties to even; x f32 with |x| <= 448, result f32."""
    return _round_mantissa(x, mantissa_bits=3, smallest_exponent=-6)


def round_e2m1(x: jax.Array) -> jax.Array:
    """Nearest E2M1 value, ties to the even code; x f32 with |x| <= 6, result f32."""
    return _round_mantissa(x, mantissa_bits=1, smallest_exponent=0)


def fake_quant_fp8(x: jax.Array, block: int) -> jax.Array:
    """Rounds x to E4M3 codes with one power-of-two scale per block, and back.

    x       [..., K] f32 or bf16; blocks of `block` elements along the last axis, the last one may
            be shorter. The model uses 128 for inputs of quantised linears, 64 for cached keys.
    return  like x. In bfloat16 no further rounding takes place: four bits hold every result.
    """
    codes, exponent = _block_codes_fp8(_blocks(x, block))
    return _unblock(codes * _finite_scale(exponent), x).astype(x.dtype)


def fake_quant_fp4(x: jax.Array, block: int = 32) -> jax.Array:
    """Rounds x to E2M1 codes with one power-of-two scale per block of the last axis, and back.

    x [..., K] f32 or bf16; the result has its shape and dtype (exact in bfloat16).
    """
    blocks = _blocks(x, block)
    amax = jnp.maximum(_amax(blocks), jnp.float32(_E2M1_FLOOR))
    exponent = _ceil_log2(amax / jnp.float32(_E2M1_MAX))
    codes = round_e2m1(_clip(_descale(blocks, _bounded(exponent)), _E2M1_MAX))
    return _unblock(codes * _finite_scale(exponent), x).astype(x.dtype)


def quantize_fp8(
    x: jax.Array, block: int = 128, *, cast: bool = False
) -> tuple[jax.Array, jax.Array]:
    """E4M3 codes of x [..., K] and the E8M0 byte of each block of the last axis.

    Returns (float8_e4m3fn [..., K], u8 [..., ceil(K/block)]); their product is `fake_quant_fp8(x)`.
    cast leaves the rounding to the cast, an instruction of GPUs that have E4M3: the same codes.
    """
    codes, exponent = _block_codes_fp8(_blocks(x, block), cast=cast)
    scales = jnp.where(exponent > 127, 255, exponent + 127).astype(jnp.uint8)
    return _unblock(codes, x).astype(jnp.float8_e4m3fn), scales[..., 0]


def hadamard(x: jax.Array) -> jax.Array:
    """x [..., n] times the Sylvester-ordered Hadamard matrix times n^-0.5, rounded once to x.dtype.

    n is a power of two (ValueError otherwise). Sums are float32.
    """
    n = x.shape[-1]
    if n < 1 or n & (n - 1):
        raise ValueError(f"hadamard got a last axis of {n}, expected a power of two")
    # Entries are +-1, so products of bfloat16 inputs are exact on matrix units.
    y = jnp.matmul(
        x,
        jnp.asarray(hadamard_matrix(n), x.dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return round_to(y * jnp.float32(n**-0.5), x.dtype)


def hadamard_matrix(n: int) -> np.ndarray:
    """The Sylvester-ordered Hadamard matrix [n, n] float32 of entries +-1, n a power of two."""
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _round_mantissa(x: jax.Array, mantissa_bits: int, smallest_exponent: int) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = jnp.maximum(((bits >> 23) & 255) - 127, smallest_exponent)
    # NaN and infinity have exponent 128: keep both powers normal, they stay what they are.
    shift = mantissa_bits - jnp.minimum(exponent, 100)
    return _nearest_even(x * power_of_two(shift)) * power_of_two(-shift)


def _nearest_even(x: jax.Array) -> jax.Array:
    """x (f32, below 2**22 in magnitude) to the nearest integer, ties to even; -0.2 gives -0.0.

    `lax.round` by operations that kernels have too. Adding and subtracting 1.5 * 2**23 would do,
    if XLA did not add up the two constants.
    """
    low = lax.floor(x)
    above = x - low
    odd = low - 2.0 * lax.floor(low * 0.5) == 1.0
    nearest = jnp.abs(jnp.where((above > 0.5) | ((above == 0.5) & odd), low + 1.0, low))
    # A product: kernels negate by subtracting from zero, which makes 0.0 of 0.0.
    return nearest * jnp.where(lax.bitcast_convert_type(x, jnp.int32) < 0, -1.0, 1.0)


def _block_codes_fp8(blocks: jax.Array, *, cast: bool = False) -> tuple[jax.Array, jax.Array]:
    amax = jnp.maximum(_amax(blocks), jnp.float32(_E4M3_FLOOR))
    exponent = _ceil_log2(amax / jnp.float32(_E4M3_MAX))
    scaled = _clip(blocks * power_of_two(-_bounded(exponent)), _E4M3_MAX)
    return scaled if cast else round_e4m3(scaled), exponent


def _descale(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """x * 2^-exponent, also for subnormal x, which a float product would take for zero."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    mantissa = (bits & 0x7FFFFF).astype(jnp.float32)  # in units of 2^-149
    tiny = mantissa * power_of_two(jnp.maximum(-149 - exponent, -126))
    tiny = jnp.where(bits < 0, -tiny, tiny)
    return jnp.where((bits >> 23) & 255 == 0, tiny, x * power_of_two(-exponent))


def _blocks(x: jax.Array, block: int) -> jax.Array:
    """[..., ceil(K/block), block] in float32, a short last block filled with zeros."""
    *lead, k = x.shape
    count = -(-k // block)
    if count * block != k:
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, count * block - k)])
    return x.reshape(*lead, count, block).astype(jnp.float32)


def _unblock(blocks: jax.Array, like: jax.Array) -> jax.Array:
    *lead, count, block = blocks.shape
    return blocks.reshape(*lead, count * block)[..., : like.shape[-1]]


def _amax(blocks: jax.Array) -> jax.Array:
    # NaN counts as infinity: a maximum over several values need not be NaN when one of them is.
    magnitude = jnp.where(blocks == blocks, jnp.abs(blocks), jnp.float32(jnp.inf))
    return jnp.max(magnitude, axis=-1, keepdims=True)


def _clip(x: jax.Array, limit: float) -> jax.Array:
    return jnp.clip(x, jnp.float32(-limit), jnp.float32(limit))


def _ceil_log2(x: jax.Array) -> jax.Array:
    """ceil(log2(x)) as i32 for normal x > 0; 128 or more for NaN and infinity."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    mantissa = (bits & 0x7FFFFF) != 0
    return ((bits >> 23) & 255) - 127 + mantissa.astype(jnp.int32)


def _bounded(exponent: jax.Array) -> jax.Array:
    return jnp.minimum(exponent, 126)


def _finite_scale(exponent: jax.Array) -> jax.Array:
    # Finite float32 blocks have exponents of at most 126; NaN and infinity have at least 128.
    return jnp.where(exponent > 127, jnp.float32(jnp.nan), power_of_two(_bounded(exponent)))
