"""Compressed entries in rows of bytes: exact, smaller, and no part of the result."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax import cache, config, kv, testing
from ds4jax.config import PRESETS, SIMULATIONS, Numerics
from pallas_kernels import codecs

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "models"
PACKED = Numerics("bfloat16", SIMULATIONS, "fp8")


def test_rows_hold_what_q2_leaves_exactly():
    """Zeros, the smallest scales, NaN; every bit of the rotated channels."""
    random = np.random.default_rng(0)
    x = random.normal(size=(50, 512)) * np.exp(4 * random.normal(size=(50, 512)))
    x[3, :64], x[4, 5], x[6] = 0, np.nan, 1e-30
    x = jnp.asarray(x, jnp.bfloat16)
    entries = jnp.concatenate([codecs.fake_quant_fp8(x[:, :448], 64), x[:, 448:]], axis=1)
    rows = jax.jit(kv.pack, static_argnums=1)(entries, 64)
    assert (rows.shape, rows.dtype) == ((50, 584), jnp.uint8)
    got = np.asarray(jax.jit(kv.unpack, static_argnums=(1, 2))(rows, 448, 64))
    wanted = np.asarray(entries)
    nan = np.isnan(wanted.astype("f4"))
    assert nan.sum() == 64
    assert np.isnan(got.astype("f4"))[nan].all()
    np.testing.assert_array_equal(got.view("u2")[~nan], wanted.view("u2")[~nan])


def test_layers_give_the_same_bits(golden, run):
    case = golden("quant")
    tokens = case.tokens[:140]
    plain = run(case.loaded, tokens, (128, 12), PRESETS["official"])
    packed = run(case.loaded, tokens, (128, 12), PACKED)
    np.testing.assert_array_equal(packed.logits, plain.logits)
    np.testing.assert_array_equal(packed.streams, plain.streams)
    np.testing.assert_array_equal(packed.chosen, plain.chosen)
    widths = set()
    for one, other in zip(packed.state.layers, plain.state.layers, strict=True):
        if other.compressed is not None:
            widths.add(one.compressed.shape[1])
            rotated = case.config.rope_channels
            entries = kv.unpack(one.compressed, case.config.plain_channels, rotated)
            np.testing.assert_array_equal(entries, other.compressed)
    assert widths == {kv.row_bytes(case.config)}


def test_state_of_flash_takes_two_thirds():
    """4,501.25 instead of 6,880 bytes a token."""
    flash = config.ModelConfig.from_json(CONFIGS / "flash.json")
    small, large = (cache.state_bytes(flash, PACKED, 1 << n) for n in (17, 20))
    assert (large - small) / ((1 << 20) - (1 << 17)) == 4501.25


def test_refusals():
    for numerics in (("float32", ("q2",)), ("bfloat16", ("q1", "q3"))):
        with pytest.raises(config.ConfigError, match="expected bfloat16 with q2"):
            Numerics(*numerics, "fp8")
    with pytest.raises(config.ConfigError, match="kv is 'fp4', expected 'plain' or 'fp8'"):
        Numerics(kv="fp4")
    odd = dataclasses.replace(testing.tiny_config(), head_dim=48, qk_rope_head_dim=16)
    with pytest.raises(config.ConfigError, match="32 channels without rotation"):
        cache.empty_state(odd, PACKED, 128)
