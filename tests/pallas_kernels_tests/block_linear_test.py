"""FP8 linears against exact arithmetic on the host decoder's weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from pallas_kernels import codecs
from pallas_kernels.block_linear import block_linear, decoded, kernel, sm90
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
            ((x[:, :10], codes, scales), jnp.float32, "weight has shape .* expected 10 on axis 1"),
            ((x, codes, None), jnp.float32, "float8_e4m3fn without scales"),
            ((x, weight.astype("f4"), scales), jnp.float32, "float32 with scales"),
            ((x, codes, scales[:1]), jnp.float32, "scales has shape .* expected 2 on axis 0"),
        ):
            with pytest.raises(ValueError, match=text):
                block_linear(*args, quantize_input=False, dtype=dtype)


def bits(x):
    """The bits of a bfloat16 array; every NaN is the same."""
    x = np.asarray(x)
    return np.where(np.isnan(x.astype("f4")), 0x7FFF, x.view(np.uint16))


def test_the_kernels_have_the_bits_of_the_codecs():
    """Blocks of zeros, of tiny values, with NaN and infinity; all bytes, scales 0 and 255."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(24, 640)) * np.exp(3 * rng.normal(size=(24, 640)))
    x[0, :128], x[1, 3], x[2, 5] = 0, np.nan, np.inf
    x[3, :128] *= 1e-6
    x = jnp.asarray(x, jnp.bfloat16)
    np.testing.assert_array_equal(
        bits(kernel.fake_quant_fp8(x, interpret=True)), bits(codecs.fake_quant_fp8(x, 128))
    )
    codes = jnp.asarray(rng.permutation(256 * 384) % 256, jnp.uint8).reshape(256, 384)
    scales = jnp.asarray([[0, 255, 120], [127, 200, 1]], jnp.uint8)
    wanted = bits(codecs.decode_fp8(codes, scales, jnp.bfloat16))
    for stored in (codes, jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)):
        got = decoded(stored, scales, jnp.bfloat16, "portable", interpret=True)
        np.testing.assert_array_equal(bits(got), wanted)


@pytest.mark.parametrize("quantize_input", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 128), (300, 200), (256, 200)])
def test_implementations_agree(quantize_input, inputs, outputs):
    """Shapes without whole blocks take the plain steps."""
    x, codes, scales, _ = make(6, inputs=inputs, outputs=outputs)
    x = x.astype(jnp.bfloat16)
    options = {"quantize_input": quantize_input, "dtype": jnp.bfloat16}
    wanted = block_linear(x, codes, scales, **options)
    got = block_linear(x, codes, scales, **options, implementation="portable", interpret=True)
    np.testing.assert_array_equal(bits(got), bits(wanted))


def fp8_operands(seed, tokens, outputs, inputs):
    """Codes and scales of inputs and of a weight, and the exact product."""
    x, codes, scales, weight = make(seed, tokens, inputs, outputs)
    x = jnp.asarray(x, jnp.bfloat16)
    x_codes, exponents = codecs.quantize_fp8(x)
    exact = np.asarray(codecs.fake_quant_fp8(x, 128), "f8") @ weight.T
    operands = (x_codes, codecs.decode_e8m0(exponents).T, jnp.asarray(codes), jnp.asarray(scales))
    return jax.block_until_ready(operands), exact


@pytest.mark.parametrize("tokens", [1, 200, 400])
def test_fp8_product_is_float32_arithmetic_rounded_once(tokens):
    """Fewer rows than a tile, and a last tile that goes back over rows of the one before."""
    operands, exact = fp8_operands(tokens, tokens, 256, 384)
    got = sm90.product(*operands, blocks=2, interpret=True)
    assert got.dtype == jnp.bfloat16
    assert got.shape == (tokens, 256)
    np.testing.assert_allclose(np.asarray(got, "f8"), exact, rtol=2**-8, atol=1e-3)


def test_fp8_product_of_a_row_does_not_see_other_rows():
    (x, x_scale, weight, scales), _ = fp8_operands(9, 208, 128, 256)
    whole = sm90.product(x, x_scale, weight, scales, blocks=1, interpret=True)
    for rows in (slice(16, 208), slice(100, 101)):
        part = jax.block_until_ready((x[rows], x_scale[:, rows]))
        got = sm90.product(*part, weight, scales, blocks=3, interpret=True)
        np.testing.assert_array_equal(bits(got), bits(whole[rows]))


def test_codes_have_the_bits_of_the_codecs():
    rng = np.random.default_rng(10)
    x = rng.normal(size=(24, 640)) * np.exp(3 * rng.normal(size=(24, 640)))
    x[0, :128], x[1, 3], x[3, :128] = 0, np.nan, 1e-6
    x = jnp.asarray(x, jnp.bfloat16)
    codes, scales = jax.block_until_ready(kernel.quantize_fp8(x, interpret=True))
    wanted, exponents = codecs.quantize_fp8(x)
    np.testing.assert_array_equal(bits_of_bytes(codes), bits_of_bytes(wanted))
    np.testing.assert_array_equal(scales, codecs.decode_e8m0(exponents).T)


def bits_of_bytes(x):
    """The bytes of an E4M3 array; every NaN is the same."""
    x = np.asarray(x)
    return np.where(np.isnan(x.astype("f4")), 0x7F, x.view(np.uint8))


@pytest.mark.parametrize("as_bytes", [False, True])
def test_hopper_takes_the_fp8_product_for_rounded_inputs_only(as_bytes):
    x, codes, scales, _ = make(11, inputs=256, outputs=128)
    x = jnp.asarray(x, jnp.bfloat16)
    stored = codes.view(np.uint8) if as_bytes else codes
    for quantize_input in (True, False):
        options = {"quantize_input": quantize_input, "dtype": jnp.bfloat16}
        wanted = block_linear(x, codes, scales, **options)
        got = block_linear(x, stored, scales, **options, implementation="sm90", interpret=True)
        np.testing.assert_allclose(got.astype("f4"), wanted.astype("f4"), rtol=2**-7, atol=1e-3)
    assert "200, 256" in sm90.refusal(jnp.zeros((200, 256)))


def test_kernels_refuse_float32():
    x, codes, scales, _ = make(7)
    with pytest.raises(NotImplementedError, match="x is float32"):
        block_linear(
            x,
            codes,
            scales,
            quantize_input=True,
            dtype=jnp.float32,
            implementation="portable",
            interpret=True,
        )


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(4096, 1536), (1024, 32768), (8192, 4096), (2048, 4096), (7168, 2048)]
)
def test_lowers_at_the_shapes_of_the_models(inputs, outputs, lower_for_gpu):
    text = lower_for_gpu(
        lambda x, codes, scales: (kernel.fake_quant_fp8(x), kernel.decode_fp8(codes, scales)),
        jax.ShapeDtypeStruct((8192, inputs), jnp.bfloat16),
        jax.ShapeDtypeStruct((outputs, inputs), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((outputs // 128, inputs // 128), jnp.uint8),
    )
    assert text.count("__gpu$xla.gpu.triton") == 2


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(4096, 1024), (1024, 32768), (8192, 4096), (2048, 4096), (7168, 512)]
)
@pytest.mark.parametrize("tokens", [128, 8192])
def test_fp8_product_lowers_at_the_shapes_of_the_models(tokens, inputs, outputs, lower_for_gpu):
    text = lower_for_gpu(
        functools.partial(sm90.product, blocks=132),
        jax.ShapeDtypeStruct((tokens, inputs), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((inputs // 128, tokens), jnp.float32),
        jax.ShapeDtypeStruct((outputs, inputs), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((outputs // 128, inputs // 128), jnp.uint8),
    )
    assert "mosaic_gpu" in text


@pytest.mark.gpu1
def test_fp8_product_on_the_gpu():
    """The last row tile of 8,192 tokens overlaps the one before; cuts have tiles of their own."""
    (x, x_scale, weight, scales), exact = fp8_operands(12, 8192, 512, 2048)
    run = jax.jit(functools.partial(sm90.product, blocks=132))
    got = run(x, x_scale, weight, scales)
    assert relative(got, exact) < 2e-3
    for _ in range(20):
        np.testing.assert_array_equal(bits(run(x, x_scale, weight, scales)), bits(got))
    for rows in (slice(0, 128), slice(1000, 1001), slice(4096, 8192)):
        part = run(x[rows], x_scale[:, rows], weight, scales)
        np.testing.assert_array_equal(bits(part), bits(got[rows]))


@pytest.mark.gpu1
def test_on_the_gpu():
    rng = np.random.default_rng(8)
    x = jnp.asarray(rng.normal(size=(300, 4096)), jnp.bfloat16)
    np.testing.assert_array_equal(
        bits(jax.jit(kernel.fake_quant_fp8)(x)), bits(codecs.fake_quant_fp8(x, 128))
    )
    x = x * jnp.exp2(jnp.asarray(rng.integers(-30, 30, x.shape), x.dtype))
    codes, scales = jax.jit(kernel.quantize_fp8)(x)
    wanted, exponents = jax.jit(codecs.quantize_fp8)(x)
    np.testing.assert_array_equal(bits_of_bytes(codes), bits_of_bytes(wanted))
    np.testing.assert_array_equal(scales, codecs.decode_e8m0(exponents).T)
    codes, scales = host.encode_fp8(rng.standard_normal((512, 4096)).astype("f4"))
    got = jax.jit(kernel.decode_fp8)(codes, scales)
    np.testing.assert_array_equal(bits(got), bits(codecs.decode_fp8(codes, scales, jnp.bfloat16)))


if __name__ == "__main__":
    absltest.main()
