"""Stored weights and their values."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ds4jax import quant
from pallas_kernels.codecs import host


def random_fp8(rows, columns):
    random = np.random.default_rng([rows, columns])
    codes = random.integers(0, 256, (rows, columns), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x3C  # the NaN codes
    grid = (-(-rows // 128), -(-columns // 128))
    scales = random.integers(110, 140, grid, np.uint8)
    return codes.view(ml_dtypes.float8_e4m3fn), scales


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(128, 256), (200, 300), (1, 5)])
def test_fp8_values_are_exact_inside_jit(shape, dtype):
    codes, scales = random_fp8(*shape)
    weight = quant.QTensor(jnp.asarray(codes), jnp.asarray(scales))
    values = jax.jit(quant.dequantize, static_argnums=1)(weight, dtype)
    assert values.dtype == dtype
    wanted = host.decode_fp8(codes, scales)
    np.testing.assert_array_equal(np.asarray(values, np.float32), wanted)
    for row, column in ((0, 0), (shape[0] - 1, shape[1] - 1)):
        scale = 2.0 ** (int(scales[row // 128, column // 128]) - 127)
        assert float(values[row, column]) == float(codes[row, column]) * scale


def test_values_without_scales_pass_through():
    codes = jnp.asarray([[1.0, 2.0 + 2.0**-7]], jnp.bfloat16)
    weight = quant.QTensor(codes)
    assert weight.shape == (1, 2)
    np.testing.assert_array_equal(quant.dequantize(weight, jnp.float32), codes.astype(jnp.float32))
    assert quant.dequantize(weight, jnp.bfloat16).dtype == jnp.bfloat16


def test_abstract_weights_describe_the_published_grids():
    weight = quant.abstract_fp8(200, 300)
    assert (weight.codes.shape, weight.codes.dtype) == ((200, 300), jnp.float8_e4m3fn)
    assert (weight.scales.shape, weight.scales.dtype) == ((2, 3), jnp.uint8)
    plain = quant.abstract_plain(3, 4)
    assert (plain.codes.shape, plain.codes.dtype, plain.scales) == ((3, 4), jnp.bfloat16, None)
