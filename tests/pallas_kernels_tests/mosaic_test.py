"""What the Pallas-Mosaic kernels share."""

import functools
import re

import jax
import jax.numpy as jnp

from pallas_kernels.block_linear import sm90


def operands(outputs):
    return (
        jax.ShapeDtypeStruct((192, 256), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((2, 192), jnp.float32),
        jax.ShapeDtypeStruct((outputs, 256), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((outputs // 128, 2), jnp.uint8),
    )


def test_equal_kernels_are_equal_modules_in_any_program_and_order(lower_for_gpu):
    """Equal modules have equal hashes, by which the runtime knows kernels that it has compiled."""
    product = functools.partial(sm90.product, blocks=132)

    def hashes(function, *arguments):
        return re.findall(r'kernel_hash = "(.*?)", module', lower_for_gpu(function, *arguments))

    (alone,) = hashes(product, *operands(128))
    (other,) = hashes(product, *operands(256))
    both = hashes(lambda *x: (product(*x[:4]), -product(*x[4:])), *operands(256), *operands(128))
    assert alone != other
    assert both == [other, alone]
