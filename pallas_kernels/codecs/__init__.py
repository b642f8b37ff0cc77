"""Storage formats of DeepSeek-V4 and the roundings that imitate them, bit exact, inside jit.

Formats (OCP microscaling and 8-bit float definitions):
  E8M0   one byte b, value 2^(b - 127); 255 is NaN.
  E4M3   float8_e4m3fn: bias 7, largest value 448, NaN only at 0x7f and 0xff.
  E2M1   four bits, sign then code 0..7 for 0, 0.5, 1, 1.5, 2, 3, 4, 6; two codes a byte, the low
         nibble is the even element.

`host` holds the same decoders, and the encoders, for numpy arrays.
"""

from pallas_kernels.codecs.decode import (
    FP4_BLOCK,
    FP8_BLOCK,
    decode_e8m0,
    decode_fp4,
    decode_fp8,
    e2m1_values,
    scale_by,
)
from pallas_kernels.codecs.rounding import (
    fake_quant_fp4,
    fake_quant_fp8,
    hadamard,
    hadamard_matrix,
    quantize_fp8,
    round_e2m1,
    round_e4m3,
    round_to,
)

__all__ = [
    "FP4_BLOCK",
    "FP8_BLOCK",
    "decode_e8m0",
    "decode_fp4",
    "decode_fp8",
    "e2m1_values",
    "fake_quant_fp4",
    "fake_quant_fp8",
    "hadamard",
    "hadamard_matrix",
    "quantize_fp8",
    "round_e2m1",
    "round_e4m3",
    "round_to",
    "scale_by",
]
