"""Norms, rotary tables and products against float64 numpy."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ds4jax import layers
from ds4jax.config import ModelConfig, Numerics
from ds4jax.quant import QTensor
from pallas_kernels import codecs, rotary

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "models"
FLASH = ModelConfig.from_json(CONFIGS / "flash.json")


def random(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_norms_of_float32(eps):
    x, weight = random(1, 5, 3, 48), random(2, 48)
    wanted = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + eps)
    got = rotary.head_norm(jnp.asarray(x), eps)
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-7)
    got = layers.rms_norm(jnp.asarray(x), jnp.asarray(weight), eps)
    np.testing.assert_allclose(got, wanted * weight, rtol=2e-6, atol=1e-7)


def test_rms_norm_of_bfloat16_rounds_once():
    x = random(3, 64, 128, dtype=ml_dtypes.bfloat16)
    weight = random(4, 128, dtype=ml_dtypes.bfloat16)
    norm = layers.RMSNorm(jnp.asarray(weight), 1e-6)
    got = jax.jit(lambda module, x: module(x))(norm, jnp.asarray(x))
    assert got.dtype == jnp.bfloat16
    wide = x.astype(np.float64)
    wide = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6) * weight.astype(float)
    wanted = wide.astype(np.float32).astype(ml_dtypes.bfloat16)
    # One rounding: nearly all values are the nearest bfloat16, the rest were ties in float32.
    assert np.mean(np.asarray(got) == wanted) > 0.999
    np.testing.assert_allclose(np.asarray(got, float), wide, rtol=2.0**-8)


def test_head_norm_of_bfloat16_rounds_every_step():
    x = random(5, 64, 4, 128, dtype=ml_dtypes.bfloat16)
    got = np.asarray(jax.jit(lambda x: rotary.head_norm(x, 1e-6))(jnp.asarray(x)))
    assert got.dtype == x.dtype
    square = np.square(x)  # numpy rounds each result to the dtype of its operands
    mean = np.mean(square.astype(np.float64), axis=-1, keepdims=True).astype(x.dtype)
    root = np.sqrt((mean + x.dtype.type(1e-6)).astype(np.float64))
    wanted = x * (1 / root).astype(x.dtype)
    assert np.mean(got == wanted) > 0.99


def test_tables_of_the_released_models():
    """Pairs up to 15 keep their frequency, from 25 on they are divided by 16."""
    for name in ("flash", "pro"):
        config = ModelConfig.from_json(CONFIGS / f"{name}.json")
        pairs = np.arange(32)
        plain = layers.rope_frequencies(config, 0)
        np.testing.assert_array_equal(plain, (10000.0 ** (-pairs / 32)).astype(np.float32))
        base = 160000.0 ** (-pairs / 32)
        for ratio in (4, 128):
            yarn = layers.rope_frequencies(config, ratio)
            assert yarn.dtype == np.float32
            np.testing.assert_array_equal(yarn[:16], base[:16].astype(np.float32))
            np.testing.assert_array_equal(yarn[25:], (base[25:] / 16).astype(np.float32))
            share = (pairs[16:25] - 15) / 10
            blend = base[16:25] * (1 - share) + base[16:25] / 16 * share
            np.testing.assert_allclose(yarn[16:25], blend, rtol=1e-7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("factor", 4.0),
        ("beta_fast", 8),
        ("beta_slow", 2),
        ("original_max_position_embeddings", 512),
    ],
)
def test_yarn_fields_are_used(field, value):
    scaling = dataclasses.replace(FLASH.rope_scaling, **{field: value})
    config = dataclasses.replace(FLASH, rope_scaling=scaling)
    assert np.any(layers.rope_frequencies(config, 4) != layers.rope_frequencies(FLASH, 4))
    np.testing.assert_array_equal(
        layers.rope_frequencies(config, 0), layers.rope_frequencies(FLASH, 0)
    )


@pytest.mark.parametrize(("field", "ratio"), [("rope_theta", 0), ("compress_rope_theta", 128)])
def test_each_base_belongs_to_its_layers(field, ratio):
    config = dataclasses.replace(FLASH, **{field: 500.0})
    for other in (0, 4, 128):
        changed = np.any(
            layers.rope_frequencies(config, other) != layers.rope_frequencies(FLASH, other)
        )
        assert changed == ((other == 0) == (ratio == 0))


def test_the_ramp_is_clamped_for_short_original_lengths():
    """R 16 and original length 64: the ramp would begin at -1, where pair 0 must stay unscaled."""
    scaling = dataclasses.replace(FLASH.rope_scaling, original_max_position_embeddings=64)
    config = dataclasses.replace(FLASH, qk_rope_head_dim=16, rope_scaling=scaling)
    frequencies = layers.rope_frequencies(config, 4)
    assert frequencies[0] == 1.0
    high = np.ceil(16 * np.log(64 / (2 * np.pi)) / (2 * np.log(160000)))
    assert high == 2
    base = 160000.0 ** (-np.arange(8) / 8)
    np.testing.assert_allclose(frequencies[1], base[1] * (1 + 1 / 16) / 2, rtol=1e-6)
    np.testing.assert_allclose(frequencies[2:], base[2:] / 16, rtol=1e-6)


def test_an_empty_ramp_divides_nothing_by_zero():
    scaling = dataclasses.replace(
        FLASH.rope_scaling, original_max_position_embeddings=1, beta_fast=32, beta_slow=32
    )
    config = dataclasses.replace(FLASH, rope_scaling=scaling)
    assert np.all(np.isfinite(layers.rope_frequencies(config, 4)))


@pytest.mark.parametrize("start", [0, 65_000, 1_048_576 - 4096])
def test_cos_and_sin_are_those_of_the_float32_angle(start):
    """Near position 2**20 too, where angles reach a million radians; under jit as in a layer."""
    positions = np.arange(start, start + 4096, dtype=np.int32)
    table = jax.jit(lambda at: layers.rope_table(at, layers.rope_frequencies(FLASH, 0)))
    cos, sin = table(jnp.asarray(positions))
    angle = positions.astype(np.float32)[:, None] * layers.rope_frequencies(FLASH, 0)[None, :]
    np.testing.assert_allclose(cos, np.cos(angle.astype(np.float64)), atol=1e-7)
    np.testing.assert_allclose(sin, np.sin(angle.astype(np.float64)), atol=1e-7)


@pytest.mark.gpu1
def test_cos_and_sin_are_exact_on_a_gpu():
    assert jax.default_backend() == "gpu"
    for start in (0, 65_000, 1_048_576 - 4096):
        test_cos_and_sin_are_those_of_the_float32_angle(start)


@pytest.mark.parametrize("heads", [(), (3,)])
def test_adjacent_channels_turn_as_complex_numbers(heads):
    x = random(5, 7, *heads, 20)
    positions = np.arange(100, 107, dtype=np.int32)
    frequencies = (0.3 ** np.arange(4)).astype(np.float32)
    table = layers.rope_table(jnp.asarray(positions), frequencies)
    got = np.asarray(rotary.apply_rope(jnp.asarray(x), table))
    np.testing.assert_array_equal(got[..., :12], x[..., :12])
    pairs = x[..., 12:].reshape(7, *heads, 4, 2)
    turn = np.exp(1j * positions[:, None] * frequencies[None, :])
    turn = turn.reshape(7, *(1,) * len(heads), 4)
    wanted = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
    got_pairs = got[..., 12:].reshape(7, *heads, 4, 2)
    np.testing.assert_allclose(got_pairs[..., 0] + 1j * got_pairs[..., 1], wanted, atol=1e-4)
    back = rotary.apply_rope(jnp.asarray(got), table, inverse=True)
    np.testing.assert_allclose(back, x, atol=1e-6)


def test_rope_of_bfloat16_rounds_the_turned_channels_only():
    x = random(6, 9, 24, dtype=ml_dtypes.bfloat16)
    table = layers.rope_table(jnp.arange(9, dtype=jnp.int32), np.float32([1.0, 0.1]))
    got = rotary.apply_rope(jnp.asarray(x), table)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got)[:, :20], x[:, :20])
    wide = rotary.apply_rope(jnp.asarray(x.astype(np.float32)), table)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wide).astype(ml_dtypes.bfloat16))


def test_wide_product_keeps_float32():
    """Of bfloat16 operands and of float32 ones; a product in bfloat16 passes would be 1e-3 off."""
    x, weight = random(7, 33, 512), random(8, 21, 512)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    got = layers.wide_product(jnp.asarray(x), jnp.asarray(weight))
    np.testing.assert_allclose(got, exact, atol=5e-5)
    low = [part.astype(ml_dtypes.bfloat16) for part in (x, weight)]
    exact = low[0].astype(np.float64) @ low[1].astype(np.float64).T
    for kept in (jnp.asarray(low[0]), jnp.asarray(low[0]).astype(jnp.float32)):
        got = layers.wide_product(kept, jnp.asarray(low[1]))
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, exact, atol=5e-5)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_linear_quantises_its_input_only_where_the_model_does(compute):
    dtype = jnp.dtype(compute)
    x = jnp.asarray(random(9, 16, 256)).astype(dtype)
    weight = QTensor(jnp.asarray(random(10, 8, 256, dtype=ml_dtypes.bfloat16)))
    plain, simulated = Numerics(compute), Numerics(compute, ("q1",))
    exact = layers.Linear(weight, False)
    quantised = layers.Linear(weight, True)
    np.testing.assert_array_equal(exact(x, simulated), exact(x, plain))
    np.testing.assert_array_equal(quantised(x, plain), exact(x, plain))
    np.testing.assert_array_equal(
        quantised(x, simulated), exact(codecs.fake_quant_fp8(x, 128), plain)
    )
    assert np.any(np.asarray(quantised(x, simulated)) != np.asarray(quantised(x, plain)))
    assert exact(x, plain).dtype == dtype
