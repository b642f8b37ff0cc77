"""Storage formats and activation roundings against vectors made from the format definitions."""

import functools
import json
import pathlib
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels import codecs
from pallas_kernels.codecs import host

EDGE = pathlib.Path(__file__).parents[1] / "golden" / "edge"


@functools.cache
def stored():
    """Raw bytes of the tensors of model.safetensors, by name, as uint8 arrays."""
    data = (EDGE / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(data[begin:end], np.uint8).reshape(entry["shape"])
    return tensors


@functools.cache
def expected():
    with np.load(EDGE / "expected.npz") as file:
        return dict(file)


def assert_same_bits(got, wanted, subnormals_may_flush=False):
    """Equal float32 values including NaN positions and signs of zeros."""
    got, wanted = np.asarray(got, np.float32), np.asarray(wanted, np.float32)
    if subnormals_may_flush:
        tiny = np.abs(wanted) < np.finfo(np.float32).tiny
        wanted = np.where(tiny & (got == 0), np.copysign(np.float32(0), wanted), wanted)
    np.testing.assert_array_equal(got, wanted)
    finite = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(wanted[finite]))


class DecodeTest(parameterized.TestCase):
    def test_e8m0_table(self):
        table = expected()["table_e8m0"]
        codes = np.arange(256, dtype=np.uint8)
        assert_same_bits(host.decode_e8m0(codes), table)
        assert_same_bits(jax.jit(codecs.decode_e8m0)(codes), table, subnormals_may_flush=True)
        self.assertEqual(
            int(jax.lax.bitcast_convert_type(codecs.decode_e8m0(codes[:1]), jnp.int32)[0]),
            0x00400000,
        )

    def test_e4m3_table_is_the_dtype(self):
        codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
        one = np.full((1, 2), 127, np.uint8)
        table = expected()["table_e4m3"][None]
        assert_same_bits(codecs.decode_fp8(codes, one, jnp.float32), table)
        assert_same_bits(host.decode_fp8(codes, one), table)

    def test_e2m1_table(self):
        codes = np.arange(16, dtype=np.uint8)
        packed = (codes[0::2] | (codes[1::2] << 4)).repeat(2).reshape(1, 16)
        table = expected()["table_e2m1"].reshape(-1, 2).repeat(2, axis=0).reshape(1, 32)
        one = np.full((1, 1), 127, np.uint8)
        assert_same_bits(codecs.decode_fp4(packed, one, jnp.float32), table)
        assert_same_bits(host.decode_fp4(packed, one), table)

    @parameterized.product(name=("fp8", "fp8_ragged"), as_bytes=(False, True))
    def test_fp8(self, name, as_bytes):
        codes, scales = stored()[f"{name}.weight"], stored()[f"{name}.scale"]
        if not as_bytes:
            codes = codes.view(ml_dtypes.float8_e4m3fn)
        decode = jax.jit(codecs.decode_fp8, static_argnums=2)
        assert_same_bits(decode(codes, scales, jnp.float32), expected()[name], True)
        assert_same_bits(host.decode_fp8(codes, scales), expected()[name])
        stacked = codecs.decode_fp8(codes[None], scales[None], jnp.float32)[0]
        assert_same_bits(stacked, expected()[name], True)

    def test_fp4(self):
        codes, scales = stored()["fp4.weight"], stored()["fp4.scale"]
        decode = jax.jit(codecs.decode_fp4, static_argnums=2)
        assert_same_bits(decode(codes, scales, jnp.float32), expected()["fp4"], True)
        assert_same_bits(host.decode_fp4(codes, scales), expected()["fp4"])

    @parameterized.product(scale=(1, 64, 127, 128, 240))
    def test_bfloat16_holds_every_value(self, scale):
        codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
        fp4_scales, fp8_scales = np.full((1, 16), scale, np.uint8), np.full((1, 2), scale, np.uint8)
        for decode, scales in ((codecs.decode_fp4, fp4_scales), (codecs.decode_fp8, fp8_scales)):
            narrow, wide = decode(codes, scales, jnp.bfloat16), decode(codes, scales, jnp.float32)
            self.assertEqual(narrow.dtype, jnp.bfloat16)
            assert_same_bits(narrow.astype(jnp.float32), wide)

    def test_refusals_name_the_shapes(self):
        u8 = functools.partial(jnp.zeros, dtype=jnp.uint8)
        for call, text in (
            (lambda: codecs.decode_fp4(u8((2, 16)), u8((2, 2)), jnp.float32), r"\(2, 2\)"),
            (lambda: codecs.decode_fp4(u8((2, 8)), u8((2, 0)), jnp.float32), "multiple of 32"),
            (lambda: codecs.decode_fp8(u8((200, 300)), u8((2, 2)), jnp.float32), r"\(2, 3\)"),
            (lambda: codecs.decode_fp8(jnp.zeros((2, 2)), u8((1, 1)), jnp.float32), "float32"),
            (lambda: codecs.decode_e8m0(jnp.zeros((2,))), "uint8"),
            (lambda: codecs.round_to(jnp.zeros((2,)), jnp.float16), "float16"),
            (lambda: codecs.hadamard(jnp.zeros((2, 24))), "power of two"),
        ):
            with pytest.raises(ValueError, match=text):
                call()


class RoundingTest(parameterized.TestCase):
    @parameterized.product(name=("act128", "kv64"), dtype=(jnp.float32, jnp.bfloat16))
    def test_fp8_blocks(self, name, dtype):
        x, y = expected()[f"{name}_x"], expected()[f"{name}_y"]
        block = x.shape[-1]
        got = jax.jit(codecs.fake_quant_fp8, static_argnums=1)(jnp.asarray(x, dtype), block)
        self.assertEqual(got.dtype, dtype)
        assert_same_bits(got, y)
        codes, scales = jax.jit(codecs.quantize_fp8, static_argnums=1)(jnp.asarray(x, dtype), block)
        np.testing.assert_array_equal(scales[:, 0], expected()[f"{name}_scale_byte"])
        np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), expected()[f"{name}_codes"])

    @parameterized.parameters(jnp.float32, jnp.bfloat16)
    def test_fp4_blocks(self, dtype):
        x, y = expected()["idx32_x"], expected()["idx32_y"]
        got = jax.jit(codecs.fake_quant_fp4)(jnp.asarray(x, dtype))
        self.assertEqual(got.dtype, dtype)
        assert_same_bits(got, y, subnormals_may_flush=True)

    @parameterized.parameters(32, 128)
    def test_hadamard(self, n):
        x, y = expected()[f"hadamard{n}_x"], expected()[f"hadamard{n}_y"]
        np.testing.assert_allclose(jax.jit(codecs.hadamard)(x), y, rtol=0, atol=2e-6)
        narrow = codecs.hadamard(jnp.asarray(x, jnp.bfloat16))
        self.assertEqual(narrow.dtype, jnp.bfloat16)
        exact = codecs.hadamard(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))
        np.testing.assert_allclose(narrow.astype(jnp.float32), exact, rtol=2**-8, atol=1e-6)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        hnp.arrays(np.float32, 64, elements=st.floats(-448, 448, width=32, allow_subnormal=False))
    )
    def test_round_e4m3_is_the_cast(self, x):
        assert_same_bits(codecs.round_e4m3(jnp.asarray(x)), x.astype(ml_dtypes.float8_e4m3fn))

    def test_every_e2m1_tie_goes_to_the_even_code(self):
        x = np.linspace(-6, 6, 12 * 64 + 1, dtype=np.float32)
        assert_same_bits(codecs.round_e2m1(jnp.asarray(x)), x.astype(ml_dtypes.float4_e2m1fn))
        assert_same_bits(codecs.round_e2m1(jnp.float32(-0.1)), -0.0)

    def test_last_block_may_be_short(self):
        x = jax.random.normal(jax.random.key(11), (3, 300))
        got = codecs.fake_quant_fp8(x, 128)
        padded = codecs.fake_quant_fp8(jnp.pad(x, ((0, 0), (0, 84))), 128)
        assert_same_bits(got, padded[:, :300])
        codes, scales = codecs.quantize_fp8(x)
        self.assertEqual((codes.shape, scales.shape), ((3, 300), (3, 3)))
        grid = jnp.repeat(codecs.decode_e8m0(scales), 128, axis=1)[:, :300]
        assert_same_bits(codes.astype(jnp.float32) * grid, got)

    def test_non_finite_blocks_are_nan_and_stay_in_their_block(self):
        x = jnp.ones((2, 256)).at[0, 3].set(jnp.nan).at[1, 200].set(jnp.inf)
        for y in (codecs.fake_quant_fp8(x, 128), codecs.fake_quant_fp4(x, 128)):
            bad = np.zeros((2, 256), bool)
            bad[0, :128] = bad[1, 128:] = True
            np.testing.assert_array_equal(np.isnan(y), bad)
        self.assertEqual(codecs.quantize_fp8(x)[1].tolist(), [[255, 119], [119, 255]])

    def test_round_to_survives_jit_as_a_residual(self):
        x = jax.random.normal(jax.random.key(5), (4096,))
        residual = jax.jit(lambda x: x - codecs.round_to(x, jnp.bfloat16).astype(jnp.float32))(x)
        wanted = np.asarray(x) - np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(residual, wanted)
        self.assertIs(codecs.round_to(x, jnp.float32), x)


class HostEncodeTest(parameterized.TestCase):
    def test_fp4_is_the_device_rounding(self):
        x = np.asarray(jax.random.normal(jax.random.key(2), (5, 96))) * 10
        x[0, :32] = 0
        x[1, :32] = np.resize(np.linspace(-6, 6, 25), 32)  # every tie of E2M1
        codes, scales = host.encode_fp4(x)
        self.assertEqual((codes.shape, scales.shape), ((5, 48), (5, 3)))
        assert_same_bits(host.decode_fp4(codes, scales), codecs.fake_quant_fp4(jnp.asarray(x)))

    def test_fp8_round_trip(self):
        x = np.asarray(jax.random.normal(jax.random.key(3), (2, 200, 300))) * 3
        codes, scales = host.encode_fp8(x)
        self.assertEqual((codes.shape, scales.shape), ((2, 200, 300), (2, 2, 3)))
        decoded = host.decode_fp8(codes, scales)
        # Half a unit in the fourth bit, or half of the smallest step below the normal codes.
        step = np.repeat(np.repeat(host.decode_e8m0(scales), 128, -2), 128, -1)[:, :200, :300]
        self.assertLessEqual(
            np.max(np.abs(decoded - x) - np.maximum(np.abs(x) / 16, step * 2.0**-10)), 0
        )
        again, same = host.encode_fp8(decoded)
        np.testing.assert_array_equal(again.view(np.uint8), codes.view(np.uint8))
        np.testing.assert_array_equal(same, scales)


@pytest.mark.gpu1
class CompiledRoundingTest(parameterized.TestCase):
    def test_same_bits_on_both_backends(self):
        rng = np.random.default_rng(17)
        x = (rng.standard_normal((64, 512)) * 2.0 ** rng.integers(-20, 20, (64, 1))).astype("f4")
        cpu = jax.devices("cpu")[0]

        def roundings(x):
            narrow = codecs.round_to(x, jnp.bfloat16)
            return (
                x - narrow.astype(jnp.float32),
                codecs.fake_quant_fp8(x, 128),
                codecs.fake_quant_fp8(narrow, 64),
                codecs.fake_quant_fp4(x),
                codecs.quantize_fp8(x),
            )

        on_gpu = jax.tree.leaves(jax.jit(roundings)(jax.device_put(x, jax.devices()[0])))
        on_cpu = jax.tree.leaves(jax.jit(roundings)(jax.device_put(x, cpu)))
        for a, b in zip(on_gpu, on_cpu, strict=True):
            assert_same_bits(np.asarray(a, np.float32), np.asarray(b, np.float32))


if __name__ == "__main__":
    absltest.main()
