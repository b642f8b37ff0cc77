"""The decoders of this package, and encoders, for numpy arrays on the host."""

import ml_dtypes
import numpy as np

from pallas_kernels.codecs.decode import FP4_BLOCK, FP8_BLOCK

E2M1_VALUES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    """E8M0 bytes to float32, any shape; 255 is NaN."""
    values = np.ldexp(np.float32(1), np.where(codes == 255, 0, codes.astype(np.int32) - 127))
    return np.where(codes == 255, np.float32(np.nan), values).astype(np.float32)


def decode_fp4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """u8 codes [..., K/2] (low nibble first) and u8 scales [..., K/32] to float32 [..., K]."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return _scaled(E2M1_VALUES[nibbles], np.repeat(scales, FP4_BLOCK, axis=-1))


def decode_fp8(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """E4M3 codes [..., N, K] (or their bytes) and u8 scales per 128x128 block to float32."""
    n, k = codes.shape[-2:]
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    grid = np.repeat(np.repeat(scales, FP8_BLOCK, axis=-2), FP8_BLOCK, axis=-1)
    return _scaled(values, grid[..., :n, :k])


def encode_fp4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nearest FP4 of x [..., K], K a multiple of 32: (u8 codes [..., K/2], u8 scales [..., K/32]).

    The scale of a block is 2^ceil(log2(amax / 6)), ties round to the even code.
    """
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, FP4_BLOCK)
    exponent = _ceil_log2(np.abs(blocks).max(-1, keepdims=True) / np.float32(6))
    scaled = np.ldexp(blocks, -exponent)
    magnitude = np.abs(scaled)
    # Rounded in units of half, one or two, the spacing of E2M1 at this magnitude.
    step = np.where(magnitude < 2, 0.5, np.where(magnitude < 4, 1.0, 2.0)).astype(np.float32)
    index = np.searchsorted(E2M1_VALUES[:8], np.rint(magnitude / step) * step).astype(np.uint8)
    codes = (index | (np.signbit(scaled).astype(np.uint8) << 3)).reshape(x.shape)
    scales = (exponent[..., 0] + 127).astype(np.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def encode_fp8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nearest E4M3 of x [..., N, K] with one scale per 128x128 block (partial at the edges).

    Returns float8_e4m3fn codes [..., N, K] and u8 scales [..., ceil(N/128), ceil(K/128)]; the scale
    of a block is 2^ceil(log2(amax / 448)).
    """
    *lead, n, k = x.shape
    rows, columns = -(-n // FP8_BLOCK), -(-k // FP8_BLOCK)
    padded = np.zeros((*lead, rows * FP8_BLOCK, columns * FP8_BLOCK), np.float32)
    padded[..., :n, :k] = x
    amax = np.abs(padded.reshape(*lead, rows, FP8_BLOCK, columns, FP8_BLOCK)).max((-3, -1))
    exponent = _ceil_log2(amax / np.float32(448))
    grid = np.repeat(np.repeat(exponent, FP8_BLOCK, axis=-2), FP8_BLOCK, axis=-1)
    codes = np.ldexp(padded, -grid)[..., :n, :k].astype(ml_dtypes.float8_e4m3fn)
    return codes, (exponent + 127).astype(np.uint8)


def _ceil_log2(x: np.ndarray) -> np.ndarray:
    # Block maxima below 2^-126 get the smallest normal scale.
    mantissa, exponent = np.frexp(np.maximum(x, np.float32(2.0**-126)))
    return exponent - (mantissa == 0.5)


def _scaled(values: np.ndarray, scale_bytes: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = np.ldexp(values, scale_bytes.astype(np.int32) - 127)
    return np.where(scale_bytes == 255, np.float32(np.nan), scaled).astype(np.float32)
