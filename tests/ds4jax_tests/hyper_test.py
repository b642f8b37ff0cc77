"""Hyper-connections as modules: which configuration value reaches which step."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ds4jax import hyper
from ds4jax.config import ModelConfig

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "models"
BASE = dataclasses.replace(ModelConfig.from_json(CONFIGS / "flash.json"), hidden_size=12)


def module(config, abstract, seed=0):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(random.standard_normal(leaf.shape), leaf.dtype), abstract(config)
    )


def sinkhorn(logits, iterations, eps):
    comb = np.exp(logits - logits.max(axis=-1, keepdims=True))
    comb = comb / comb.sum(axis=-1, keepdims=True) + eps
    comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(axis=-1, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=-2, keepdims=True) + eps)
    return comb


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def maps(config, part, streams):
    x = np.asarray(streams, np.float64).reshape(len(streams), -1)
    m = x @ np.asarray(part.fn, np.float64).T
    return m / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + config.rms_norm_eps)


@pytest.mark.parametrize("count", [2, 4, 5])
@pytest.mark.parametrize("values", [(20, 1e-6, 1e-6), (3, 0.01, 1e-6), (20, 1e-6, 0.5)])
def test_site_follows_the_formula(count, values):
    iterations, hc_eps, norm_eps = values
    config = dataclasses.replace(
        BASE, hc_mult=count, hc_sinkhorn_iters=iterations, hc_eps=hc_eps, rms_norm_eps=norm_eps
    )
    part = module(config, hyper.abstract_connection, count)
    streams = np.random.default_rng(7).standard_normal((6, count, 12)).astype(np.float32)
    base, scale = (np.asarray(leaf, np.float64) for leaf in (part.base, part.scale))
    m = maps(config, part, streams)
    split = [m[:, :count], m[:, count : 2 * count], m[:, 2 * count :]]
    bases = [base[:count], base[count : 2 * count], base[2 * count :]]
    read, write, mix = (s * f + b for s, f, b in zip(split, scale, bases, strict=True))
    read, write = sigmoid(read) + hc_eps, 2 * sigmoid(write)
    mix = sinkhorn(mix.reshape(-1, count, count), iterations, hc_eps)
    u, got_write, got_mix = part.pre(jnp.asarray(streams))
    np.testing.assert_allclose(u, np.einsum("tj,tjd->td", read, streams), atol=2e-5)
    np.testing.assert_allclose(got_write, write, atol=2e-6)
    np.testing.assert_allclose(got_mix, mix, atol=5e-6)
    y = np.random.default_rng(8).standard_normal((6, 12)).astype(np.float32)
    out = part.post(jnp.asarray(y), jnp.asarray(streams), got_write, got_mix)
    wanted = write[:, :, None] * y[:, None] + np.einsum("tjk,tjd->tkd", mix, streams)
    np.testing.assert_allclose(out, wanted, atol=2e-5)


@pytest.mark.parametrize(("hc_eps", "norm_eps"), [(1e-6, 1e-6), (0.3, 1e-6), (1e-6, 0.5)])
def test_head_follows_the_formula(hc_eps, norm_eps):
    config = dataclasses.replace(BASE, hc_mult=3, hc_eps=hc_eps, rms_norm_eps=norm_eps)
    part = module(config, hyper.abstract_head)
    streams = np.random.default_rng(9).standard_normal((6, 3, 12)).astype(np.float32)
    logits = maps(config, part, streams) * float(part.scale[0]) + np.asarray(part.base)
    weights = sigmoid(logits) + hc_eps
    wanted = np.einsum("tj,tjd->td", weights, streams)
    np.testing.assert_allclose(part(jnp.asarray(streams)), wanted, atol=1e-5)


def test_bfloat16_streams_are_mixed_in_float32():
    part = module(BASE, hyper.abstract_connection)
    streams = np.random.default_rng(10).standard_normal((6, 4, 12)).astype(ml_dtypes.bfloat16)
    low, wide = (part.pre(jnp.asarray(streams.astype(d))) for d in (streams.dtype, np.float32))
    assert low[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(low[1], wide[1])
    np.testing.assert_array_equal(low[2], wide[2])
    np.testing.assert_array_equal(low[0], np.asarray(wide[0]).astype(ml_dtypes.bfloat16))
