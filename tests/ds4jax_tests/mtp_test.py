"""The multi-token-prediction block: its weights, entry, layer and head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax import cache, layers, model
from ds4jax.checkpoint.load import load_expert_slab, load_mtp, load_resident
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import PRESETS, Numerics
from ds4jax.mtp import abstract_mtp
from ds4jax.quant import dequantize
from ds4jax.testing import tiny_config

CONFIG = tiny_config()
ORACLE = PRESETS["oracle"]


@pytest.fixture(scope="module")
def source():
    return SyntheticSource(CONFIG, 4)


@pytest.fixture(scope="module")
def block(source):
    return load_mtp(source)


def random_streams(rows, seed=1):
    values = np.random.default_rng(seed).standard_normal((rows, 4, CONFIG.hidden_size))
    return jnp.asarray(values, jnp.float32)


def test_it_is_a_window_layer_routed_by_score():
    tree = abstract_mtp(CONFIG)
    assert tree.block.ratio == 0
    assert tree.block.attn.compressor is None
    assert tree.block.ffn.gate.tid2eid is None
    assert tree.block.ffn.gate.bias.shape == (CONFIG.n_routed_experts,)
    assert tree.e_proj.quantized_input
    assert tree.h_proj.quantized_input


def test_join_normalises_each_stream_and_adds_the_projected_token(block):
    streams = random_streams(5)
    embedded = jnp.asarray(np.random.default_rng(2).standard_normal((5, CONFIG.hidden_size)))
    embedded = embedded.astype(jnp.float32)
    e_proj, h_proj = (
        np.asarray(dequantize(part.weight, jnp.float32), np.float64)
        for part in (block.e_proj, block.h_proj)
    )
    eps = CONFIG.rms_norm_eps
    token = np.asarray(layers.rms_norm(embedded, block.enorm.weight, eps)) @ e_proj.T
    past = np.asarray(layers.rms_norm(streams, block.hnorm.weight, eps)) @ h_proj.T
    got = block.join(embedded, streams, ORACLE)
    np.testing.assert_allclose(got, token[:, None] + past, atol=1e-4)
    low = block.join(
        embedded.astype(jnp.bfloat16), streams.astype(jnp.bfloat16), PRESETS["official"]
    )
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(low, np.float32), got, rtol=0.2, atol=0.5)
    simulated = block.join(embedded, streams, Numerics("float32", ("q1",)))
    assert np.any(np.asarray(simulated != got))


def test_it_runs_in_chunks_and_gives_logits_by_the_main_head(source, block):
    main = load_resident(source)
    slab = load_expert_slab(source, "mtp.0", range(CONFIG.n_routed_experts))
    slab = jax.tree.map(jnp.asarray, slab)
    where = jnp.arange(CONFIG.n_routed_experts, dtype=jnp.int32)
    tokens = np.random.default_rng(3).integers(8, 264, 12).astype(np.int32)
    last = random_streams(12)

    @jax.jit
    def step(streams, state, chunk):
        embedded = model.embed_tokens(main.embed, chunk.tokens, 1, ORACLE)[:, 0]
        joined = block.join(embedded, streams, ORACLE)
        streams, state = block.block(joined, state, chunk, (slab,), where, ORACLE)
        return block.logits(streams, main.head), state

    def run(chunks):
        state = cache.empty_layer_state(CONFIG, 0, ORACLE, 64)
        position, logits = 0, []
        for length in chunks:
            chunk = cache.make_chunk(tokens[position : position + length], position, 12)
            streams = jnp.pad(
                last[position : position + length], ((0, 12 - length), (0, 0), (0, 0))
            )
            out, state = step(streams, state, chunk)
            logits.append(np.asarray(out)[:length])
            position += length
        return np.concatenate(logits)

    whole = run([12])
    assert whole.shape == (12, CONFIG.vocab_size)
    assert whole.dtype == np.float32
    np.testing.assert_allclose(run([1, 1, 3, 7]), whole, atol=1e-4)
    # The same streams through the main model's head maps give other logits.
    assert (
        np.abs(np.asarray(main.logits(last)) - np.asarray(block.logits(last, main.head))).max()
        > 0.1
    )
