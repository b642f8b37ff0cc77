"""Router and shared expert."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ds4jax import moe
from ds4jax.config import ModelConfig, Numerics
from ds4jax.layers import Linear
from ds4jax.quant import QTensor
from pallas_kernels import codecs

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "models"
CONFIG = dataclasses.replace(
    ModelConfig.from_json(CONFIGS / "flash.json"),
    hidden_size=16,
    n_routed_experts=10,
    num_experts_per_tok=3,
    vocab_size=20,
    routed_scaling_factor=2.5,
)


def router(bias=None, table=None, dtype=np.float32):
    weight = np.random.default_rng(1).standard_normal((10, 16)).astype(dtype)
    return moe.Router(QTensor(jnp.asarray(weight)), bias, table, CONFIG)


def inputs_and_scores(part, dtype=np.float32):
    inputs = np.random.default_rng(2).standard_normal((7, 16)).astype(dtype)
    logits = inputs.astype(np.float64) @ np.asarray(part.weight.codes, np.float64).T
    return jnp.asarray(inputs), np.sqrt(np.log1p(np.exp(logits)))


def test_score_routing_takes_the_best_and_weighs_without_bias():
    bias = jnp.asarray(np.random.default_rng(3).standard_normal(10), jnp.float32)
    part = router(bias)
    inputs, scores = inputs_and_scores(part)
    ids, weights = part(inputs, jnp.zeros(7, jnp.int32))
    biased = scores + np.asarray(bias)
    wanted = np.sort(np.argsort(-biased, axis=1)[:, :3], axis=1)
    np.testing.assert_array_equal(np.sort(ids, axis=1), wanted)
    unbiased = np.sort(np.argsort(-scores, axis=1)[:, :3], axis=1)
    assert np.any(wanted != unbiased)
    chosen = np.take_along_axis(scores, np.asarray(ids), axis=1)
    np.testing.assert_allclose(weights, chosen / chosen.sum(1, keepdims=True) * 2.5, rtol=1e-5)
    assert weights.dtype == jnp.float32


def test_hash_routing_looks_tokens_up_and_still_weighs_by_score():
    random = np.random.default_rng(4)
    table = np.stack([random.permutation(10)[:3] for _ in range(20)]).astype(np.int32)
    part = router(table=jnp.asarray(table))
    inputs, scores = inputs_and_scores(part)
    tokens = np.int32([0, 19, 3, 3, 7, 1, 2])
    ids, weights = part(inputs, jnp.asarray(tokens))
    np.testing.assert_array_equal(ids, table[tokens])
    chosen = np.take_along_axis(scores, table[tokens], axis=1)
    np.testing.assert_allclose(weights, chosen / chosen.sum(1, keepdims=True) * 2.5, rtol=1e-5)


def test_scores_are_float32_products_of_bfloat16_operands():
    part = router(jnp.zeros(10, jnp.float32), dtype=ml_dtypes.bfloat16)
    inputs, scores = inputs_and_scores(part, ml_dtypes.bfloat16)
    ids, weights = part(inputs, jnp.zeros(7, jnp.int32))
    chosen = np.take_along_axis(scores, np.asarray(ids), axis=1)
    np.testing.assert_allclose(weights, chosen / chosen.sum(1, keepdims=True) * 2.5, rtol=1e-5)


def test_far_negative_and_positive_logits_stay_finite():
    part = router(jnp.zeros(10, jnp.float32))
    for size in (1e3, -1e3):
        ids, weights = part(jnp.full((1, 16), size, jnp.float32), jnp.zeros(1, jnp.int32))
        assert np.all(np.isfinite(weights))
        assert len(set(np.asarray(ids)[0])) == 3


def shared_expert(limit, dtype=np.float32):
    random = np.random.default_rng(5)
    w1, w3 = (random.standard_normal((128, 16)).astype(dtype) for _ in range(2))
    w2 = random.standard_normal((16, 128)).astype(dtype)
    linears = [Linear(QTensor(jnp.asarray(w)), True) for w in (w1, w2, w3)]
    return moe.SharedExpert(*linears, limit), (w1, w2, w3)


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_shared_expert_clamps_gate_above_and_up_on_both_sides(limit):
    part, (w1, w2, w3) = shared_expert(limit)
    x = np.random.default_rng(6).standard_normal((5, 16)).astype(np.float32)
    gate, up = x @ w1.T, x @ w3.T
    assert (np.abs(up).max() > limit) == (limit < 1)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    wanted = (gate / (1 + np.exp(-gate)) * up) @ w2.T
    got = part(jnp.asarray(x), Numerics("float32"))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-3)


def test_shared_expert_quantises_its_input_and_its_hidden_values():
    part, _ = shared_expert(1.0)
    x = jnp.asarray(np.random.default_rng(7).standard_normal((5, 16)), jnp.float32)
    simulated, plain = Numerics("float32", ("q1",)), Numerics("float32")
    rounded = codecs.fake_quant_fp8(x, 128)
    gate = jnp.minimum(part.w1(rounded, plain), 1.0)
    hidden = jax.nn.silu(gate) * jnp.clip(part.w3(rounded, plain), -1.0, 1.0)
    wanted = part.w2(codecs.fake_quant_fp8(hidden, 128), plain)
    np.testing.assert_allclose(part(x, simulated), wanted, atol=1e-5)
    assert np.abs(np.asarray(part(x, simulated) - part(x, plain))).max() > 1e-3


def test_bfloat16_rounds_products_and_hidden_values():
    part, (w1, w2, w3) = shared_expert(1.0, ml_dtypes.bfloat16)
    x = np.random.default_rng(8).standard_normal((5, 16)).astype(ml_dtypes.bfloat16)

    def product(left, weight):
        exact = left.astype(np.float64) @ weight.astype(np.float64).T
        return exact.astype(np.float32).astype(ml_dtypes.bfloat16)

    gate = np.minimum(product(x, w1).astype(np.float32), 1)
    up = np.clip(product(x, w3).astype(np.float32), -1, 1)
    hidden = (gate / (1 + np.exp(-gate)) * up).astype(ml_dtypes.bfloat16)
    got = np.asarray(part(jnp.asarray(x), Numerics("bfloat16")))
    assert got.dtype == ml_dtypes.bfloat16
    same = got == product(hidden, w2)
    assert np.mean(same) > 0.95
