"""Weights in the form they are stored in, and their exact value in a compute dtype."""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from pallas_kernels import codecs

FP8_BLOCK = 128  # one E8M0 scale byte covers a 128 x 128 block of an FP8 weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A matrix as stored: value[n, k] = codes[n, k] * 2 ** (scales[n // 128, k // 128] - 127).

    codes   [N, K] float8_e4m3fn with scales, or bfloat16 / float32 without.
    scales  [ceil(N / 128), ceil(K / 128)] uint8, the E8M0 bytes; None means value = codes.

    Rows are outputs, columns inputs, as in the published files.
    """

    codes: jax.Array
    scales: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K] of the values."""
        return self.codes.shape


def dequantize(weight: QTensor, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Values of `weight` in `dtype`, [N, K].

    Exact for FP8 weights in bfloat16 and float32: an e4m3 value has 4 significant bits and the
    scale is a power of two. A float32 weight is rounded once when `dtype` is bfloat16.
    """
    if weight.scales is None:
        return weight.codes.astype(dtype)
    return codecs.decode_fp8(weight.codes, weight.scales, dtype)


def abstract_array(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """A ShapeDtypeStruct, typed as the array that it stands for in an abstract module tree."""
    return typing.cast(jax.Array, jax.ShapeDtypeStruct(shape, dtype))


def abstract_fp8(rows: int, columns: int) -> QTensor:
    """The shapes and dtypes of an FP8 weight [rows, columns] with its 128 x 128 scales."""
    grid = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    return QTensor(
        abstract_array((rows, columns), jnp.float8_e4m3fn), abstract_array(grid, jnp.uint8)
    )


def abstract_plain(rows: int, columns: int) -> QTensor:
    """The shape and dtype of a bfloat16 weight [rows, columns] without scales."""
    return QTensor(abstract_array((rows, columns), jnp.bfloat16))
