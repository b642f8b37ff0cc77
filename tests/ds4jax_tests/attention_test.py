"""Attention part by part, against loops in numpy and against itself in other chunks."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ds4jax import attention, cache, layers
from ds4jax.config import PRESETS, LayerKind, ModelConfig, Numerics, RopeScaling
from pallas_kernels import codecs, rotary, window_attention

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "models"
FLASH = ModelConfig.from_json(CONFIGS / "flash.json")
SMALL = dataclasses.replace(
    FLASH,
    hidden_size=48,
    num_hidden_layers=3,
    compress_ratios=(0, 4, 8, 0),
    num_attention_heads=6,
    o_groups=3,
    o_lora_rank=8,
    head_dim=24,
    qk_rope_head_dim=8,
    q_lora_rank=32,
    sliding_window=5,
    index_n_heads=16,
    index_head_dim=16,
    index_topk=3,
    rope_theta=300.0,
    compress_rope_theta=7000.0,
    rope_scaling=RopeScaling("yarn", 4.0, 32, 8, 1),
    rms_norm_eps=1e-3,
)
ORACLE = PRESETS["oracle"]
ROWS = 32


def filled(tree, seed, dtype=None):
    """Random values in place of shapes; float8 weights become plain ones of `dtype`."""
    random = np.random.default_rng(seed)

    def fill(leaf):
        if leaf.dtype == jnp.uint8:
            return None
        kept = leaf.dtype if leaf.dtype.itemsize > 1 else jnp.dtype(dtype or jnp.float32)
        values = random.standard_normal(leaf.shape) * (0.3 if len(leaf.shape) == 2 else 1)
        return jnp.asarray(values, kept)

    return jax.tree.map(fill, tree)


def small_attention(layer, seed=0):
    return filled(attention.abstract_attention(SMALL, SMALL.layer_ratios[layer]), seed)


@functools.partial(jax.jit, static_argnames="numerics")
def step(attend, x, state, chunk, numerics):
    return attend(x, state, chunk, numerics)


def run(attend, inputs, chunks, numerics=ORACLE):
    """Outputs and final state of an attention over `inputs` [T, D], padded with garbage."""
    config = attend.config
    state = cache.empty_layer_state(config, attend.ratio, numerics, 128)
    outputs, position = [], 0
    for length in chunks:
        x = np.full((ROWS, inputs.shape[1]), 3.0, inputs.dtype)
        x[:length] = inputs[position : position + length]
        chunk = cache.make_chunk(np.zeros(length, np.int32), position, ROWS)
        out, state, _ = step(attend, jnp.asarray(x), state, chunk, numerics)
        outputs.append(np.asarray(out)[:length])
        position += length
    return np.concatenate(outputs), state


@pytest.mark.parametrize("layer", range(3), ids=["swa", "csa", "hca"])
def test_chunks_agree_with_the_whole_for_small_windows_and_ratios(layer):
    """A window of 5, HCA ratio 8 with many entries, other bases and eps than the released ones."""
    attend = small_attention(layer)
    inputs = np.random.default_rng([5, layer]).standard_normal((96, 48)).astype(np.float32)
    wanted, state = run(attend, inputs, [32, 32, 32])
    for chunks in ([1] * 10 + [32, 32, 22], [3, 1, 5, 2, 31, 32, 22]):
        got, after = run(attend, inputs, chunks)
        np.testing.assert_allclose(got, wanted, atol=2e-5, err_msg=str(chunks))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), after, state)


@pytest.mark.parametrize("window", [1, 2])
def test_smallest_windows(window):
    """Window 1 is the token itself: the output depends on nothing before it in an SWA layer."""
    config = dataclasses.replace(SMALL, sliding_window=window)
    attend = filled(attention.abstract_attention(config, 0), 1)
    inputs = np.random.default_rng(window).standard_normal((4, 48)).astype(np.float32)
    outputs = []
    for change in (0.0, 1.0):
        inputs[1] += change
        outputs.append(run(attend, inputs, [4])[0])
    changed = np.any(outputs[0] != outputs[1], axis=1)
    np.testing.assert_array_equal(changed, [False, True, window == 2, False])


def test_hca_entries_follow_the_formula():
    """Per channel, a softmax of the gates over the block; the norm; the rotation at r * i."""
    attend = small_attention(2)
    inputs = np.random.default_rng(9).standard_normal((27, 48)).astype(np.float32)
    _, state = run(attend, inputs, [13, 14])
    part = attend.compressor
    values = inputs @ np.asarray(part.wkv.weight.codes, np.float32).T
    gates = inputs @ np.asarray(part.wgate.weight.codes, np.float32).T
    gates = gates + np.asarray(part.ape)[np.arange(27) % 8]
    for entry in range(3):
        block = slice(8 * entry, 8 * entry + 8)
        weights = np.exp(gates[block] - gates[block].max(axis=0))
        pooled = jnp.asarray((weights * values[block]).sum(axis=0) / weights.sum(axis=0))
        normed = layers.rms_norm(pooled[None], part.norm.weight, SMALL.rms_norm_eps)
        wanted = rotary.apply_rope(normed, attend.rope(jnp.asarray([8 * entry], jnp.int32)))
        np.testing.assert_allclose(state.compressed[entry], wanted[0], atol=2e-5)
    assert not np.any(state.compressed[3:])


def test_csa_entries_overlap_the_previous_block():
    """First half of the channels for the next block, second half for the own one."""
    attend = small_attention(1)
    inputs = np.random.default_rng(10).standard_normal((14, 48)).astype(np.float32)
    _, state = run(attend, inputs, [5, 9])
    part, width = attend.compressor, SMALL.head_dim
    values = inputs @ np.asarray(part.wkv.weight.codes, np.float32).T
    gates = inputs @ np.asarray(part.wgate.weight.codes, np.float32).T
    gates = gates + np.asarray(part.ape)[np.arange(14) % 4]
    for entry in range(3):
        own = slice(4 * entry, 4 * entry + 4)
        before = slice(max(4 * entry - 4, 0), 4 * entry)
        c = np.concatenate([values[before, :width], values[own, width:]])
        z = np.concatenate([gates[before, :width], gates[own, width:]])
        weights = np.exp(z - z.max(axis=0))
        pooled = jnp.asarray((weights * c).sum(axis=0) / weights.sum(axis=0))
        normed = layers.rms_norm(pooled[None], part.norm.weight, SMALL.rms_norm_eps)
        wanted = rotary.apply_rope(normed, attend.rope(jnp.asarray([4 * entry], jnp.int32)))
        np.testing.assert_allclose(state.compressed[entry], wanted[0], atol=2e-5)


def test_selection_is_all_visible_entries_until_there_are_more_than_k():
    attend = small_attention(1)
    inputs = jnp.asarray(np.random.default_rng(11).standard_normal((32, 48)), jnp.float32)
    state = cache.empty_layer_state(SMALL, 4, ORACLE, 128)
    chunk = cache.make_chunk(np.zeros(32, np.int32), 0, ROWS)
    _, _, selected = step(attend, inputs, state, chunk, ORACLE)
    assert selected.shape == (32, SMALL.index_topk)
    for token, row in enumerate(np.asarray(selected)):
        visible = (token + 1) // 4
        chosen = row[row >= 0]
        assert len(chosen) == min(visible, SMALL.index_topk)
        assert np.all(np.diff(chosen) > 0)
        assert np.all(chosen < visible)
        if visible <= SMALL.index_topk:
            np.testing.assert_array_equal(chosen, range(visible))


def test_other_kinds_select_nothing():
    for layer in (0, 2):
        attend = small_attention(layer)
        state = cache.empty_layer_state(SMALL, attend.ratio, ORACLE, 128)
        chunk = cache.make_chunk(np.zeros(4, np.int32), 0, ROWS)
        assert step(attend, jnp.ones((ROWS, 48), jnp.float32), state, chunk, ORACLE)[2] is None


def test_groups_of_heads_have_their_own_rows():
    attend = small_attention(0)
    heads = np.random.default_rng(12).standard_normal((3, 6, 24)).astype(np.float32)
    wo_a = np.asarray(attend.wo_a.weight.codes).reshape(3, 8, 48)
    latent = [heads[:, 2 * g : 2 * g + 2].reshape(3, 48) @ wo_a[g].T for g in range(3)]
    wanted = np.concatenate(latent, axis=1) @ np.asarray(attend.wo_b.weight.codes).T
    np.testing.assert_allclose(attend.output(jnp.asarray(heads), ORACLE), wanted, atol=2e-4)


def test_wo_a_takes_unquantised_heads_and_wo_b_quantised_ones():
    attend = small_attention(0)
    heads = jnp.asarray(np.random.default_rng(13).standard_normal((3, 6, 24)), jnp.float32)
    simulated = Numerics("float32", ("q1",))
    identity = dataclasses.replace(
        attend, wo_b=layers.Linear(attend.wo_b.weight, quantized_input=False)
    )
    np.testing.assert_array_equal(identity.output(heads, simulated), attend.output(heads, ORACLE))
    assert np.any(np.asarray(attend.output(heads, simulated) != attend.output(heads, ORACLE)))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_kv_quantisation_covers_the_channels_without_rotation(compute):
    kv = jnp.asarray(np.random.default_rng(14).standard_normal((5, 512)), jnp.dtype(compute))
    attend = attention.abstract_attention(FLASH, 0)
    assert attend.quantise_kv(kv, Numerics(compute)) is kv
    out = attend.quantise_kv(kv, Numerics(compute, ("q2",)))
    assert out.dtype == kv.dtype
    np.testing.assert_array_equal(out[:, 448:], kv[:, 448:])
    np.testing.assert_array_equal(out[:, :448], codecs.fake_quant_fp8(kv[:, :448], 64))
    assert np.mean(np.asarray(out[:, :448] != kv[:, :448])) > 0.5


def test_window_state_holds_what_queries_saw():
    """The quantised, rotated keys of the last W - 1 positions, oldest first."""
    attend = small_attention(0)
    numerics = Numerics("float32", ("q1", "q2"))
    inputs = np.random.default_rng(15).standard_normal((9, 48)).astype(np.float32)
    _, state = run(attend, inputs, [2, 7], numerics)
    kv = attend.kv_norm(attend.wkv(jnp.asarray(inputs), numerics))
    kv = rotary.apply_rope(kv, attend.rope(jnp.arange(9, dtype=jnp.int32)))
    np.testing.assert_allclose(state.window, attend.quantise_kv(kv, numerics)[5:], atol=1e-6)
    _, early = run(attend, inputs[:2], [2], numerics)
    assert not np.any(early.window[:2])


def test_indexer_weights_are_scaled_and_rounded_in_the_compute_dtype():
    part = small_attention(1).indexer
    inputs = jnp.asarray(np.random.default_rng(16).standard_normal((4, 48)), jnp.bfloat16)
    exact = np.asarray(inputs, np.float64) @ np.asarray(part.weights_proj.weight.codes, float).T
    scale = 16**-0.5 * 16**-0.5
    wide = part.head_weights(inputs.astype(jnp.float32), ORACLE)
    np.testing.assert_allclose(wide, exact * scale, atol=1e-6)
    low = part.head_weights(inputs, Numerics("bfloat16"))
    assert low.dtype == jnp.float32
    rounded = exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32) * scale
    np.testing.assert_array_equal(low, rounded.astype(np.float32).astype(ml_dtypes.bfloat16))


def test_query_norm_uses_the_configured_eps():
    inputs = jnp.asarray(np.random.default_rng(17).standard_normal((4, 48)), jnp.float32) * 0.1
    outs = []
    for eps in (1e-6, 0.5):
        config = dataclasses.replace(SMALL, rms_norm_eps=eps)
        attend = filled(attention.abstract_attention(config, 0), 3)
        # The latent norm is undone, so that only the per-head norm is left to differ.
        attend = dataclasses.replace(attend, q_norm=layers.RMSNorm(attend.q_norm.weight, 1e-6))
        chunk = cache.make_chunk(np.zeros(4, np.int32), 0, 4)
        state = cache.empty_layer_state(config, 0, ORACLE, 128)
        queries = attend.queries(inputs, ORACLE)[1]
        table = attend.rope(chunk.positions)
        window_kv, state = attend.update(inputs, table, state, chunk, ORACLE)
        got = attend.attend(queries, table, window_kv, None, state.compressed, chunk)
        queries = rotary.head_norm(queries, eps)
        assert np.all(np.mean(np.square(queries), axis=-1) < (1.001 if eps < 0.1 else 0.97))
        wanted = window_attention.window_attention(
            rotary.apply_rope(queries, table),
            window_kv,
            None,
            attend.attn_sink,
            0,
            ratio=1,
            window=config.sliding_window,
            scale=config.head_dim**-0.5,
        )
        np.testing.assert_array_equal(got, rotary.apply_rope(wanted, table, inverse=True))
        outs.append(got)
    assert not np.allclose(outs[0], outs[1], rtol=1e-2)


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_every_norm_of_a_model_has_the_configured_eps(name):
    config = ModelConfig.from_json(CONFIGS / f"{name}.json")
    config = dataclasses.replace(config, rms_norm_eps=1e-20)
    for layer in (0, 2, 3):
        attend = attention.abstract_attention(config, config.layer_ratios[layer])
        norms = [attend.q_norm, attend.kv_norm]
        if config.kind(layer) != LayerKind.SWA:
            norms.append(attend.compressor.norm)
        if attend.indexer is not None:
            norms.append(attend.indexer.compressor.norm)
        assert {norm.eps for norm in norms} == {1e-20}
