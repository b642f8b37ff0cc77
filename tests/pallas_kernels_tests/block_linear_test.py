"""FP8 linears against exact arithmetic on the host decoder's weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from pallas_kernels import codecs
from pallas_kernels.block_linear import block_linear
from pallas_kernels.codecs import host


def make(seed, tokens=9, inputs=300, outputs=200):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, inputs)).astype("f4")
    codes, scales = host.encode_fp8(rng.standard_normal((outputs, inputs)).astype("f4"))
    return x, codes, scales, host.decode_fp8(codes, scales).astype("f8")


def relative(got, wanted):
    return np.linalg.norm(np.asarray(got, "f8") - wanted) / np.linalg.norm(wanted)


class BlockLinearTest(parameterized.TestCase):
    @parameterized.product(quantize_input=(False, True), as_bytes=(False, True))
    def test_float32(self, quantize_input, as_bytes):
        x, codes, scales, weight = make(1)
        run = jax.jit(block_linear, static_argnames=("quantize_input", "dtype"))
        stored = codes.view(np.uint8) if as_bytes else codes
        got = run(x, stored, scales, quantize_input=quantize_input, dtype=jnp.float32)
        inputs = codecs.fake_quant_fp8(jnp.asarray(x), 128) if quantize_input else x
        wanted = np.asarray(inputs, "f8") @ weight.T
        self.assertLess(relative(got, wanted), 1e-6)
        if quantize_input:
            self.assertGreater(relative(got, x.astype("f8") @ weight.T), 1e-2)

    def test_bfloat16_rounds_once(self):
        x, codes, scales, weight = make(2)
        narrow = x.astype(jnp.bfloat16)
        got = block_linear(narrow, codes, scales, quantize_input=False, dtype=jnp.bfloat16)
        self.assertEqual(got.dtype, jnp.bfloat16)
        wanted = narrow.astype("f8") @ weight.T
        np.testing.assert_allclose(got.astype("f4"), wanted, rtol=2**-8, atol=1e-3)

    @parameterized.parameters(jnp.float32, jnp.bfloat16)
    def test_unquantised_weights(self, dtype):
        x, _, _, weight = make(3)
        stored = weight.astype(dtype)
        got = block_linear(x, stored, None, quantize_input=True, dtype=jnp.float32)
        inputs = np.asarray(codecs.fake_quant_fp8(jnp.asarray(x), 128), "f8")
        self.assertLess(relative(got, inputs @ stored.astype("f8").T), 1e-6)

    def test_refusals(self):
        x, codes, scales, weight = make(4)
        for args, dtype, text in (
            ((x, codes, scales), jnp.float16, "float16"),
            ((x[:, :10], codes, scales), jnp.float32, r"\[9, 10\]"),
            ((x, codes, None), jnp.float32, "float8_e4m3fn without scales"),
            ((x, weight.astype("f4"), scales), jnp.float32, "float32 with scales"),
            ((x, codes, scales[:1]), jnp.float32, r"\(2, 3\)"),
        ):
            with pytest.raises(ValueError, match=text):
                block_linear(*args, quantize_input=False, dtype=dtype)


if __name__ == "__main__":
    absltest.main()
