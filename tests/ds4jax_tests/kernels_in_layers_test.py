"""Whole layers with the attention-side kernels in them, run by the interpreter of Pallas.

Every kernel has tests of its own; here they meet each other, the state and the chunks. Routed
experts stay with their reference.
"""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ds4jax import testing
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import SIMULATIONS, Numerics
from pallas_kernels import attention_kernel, attention_sm90, checks, rotary

pytestmark = pytest.mark.slow

OFFICIAL = Numerics("bfloat16", SIMULATIONS)
# Real tiles: 64 heads of 512 channels, window 128, index heads of 128, streams of 1024.
WIDE = dataclasses.replace(
    testing.tiny_config(),
    hidden_size=1024,
    num_hidden_layers=3,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=128,
    o_groups=8,
    o_lora_rank=128,
    compress_ratios=(0, 4, 128, 0),
    num_hash_layers=0,
    index_head_dim=128,
    index_topk=16,
)


@pytest.fixture
def kernels(monkeypatch):
    """Lets every operation take its kernel where that can serve the call; counts them by name."""
    pick, call = checks.pick, pl.pallas_call
    called = collections.Counter()

    def with_kernels(operation, implementation, refusal, *, interpret=False):
        if operation.endswith("attention"):
            refusal = refusal["portable"]
        if implementation in (None, "portable", "sm90") and refusal is None:
            # What Hopper has in Pallas-Mosaic is no call that the interpreter below takes.
            mosaic = operation == "block_linear" or operation.endswith("attention")
            return "portable" if mosaic else "sm90"
        return pick(operation, implementation, refusal, interpret=interpret)

    def interpreted(*args, name, **options):
        called[name] += 1
        return call(*args, name=name, **options | {"interpret": True})

    monkeypatch.setattr(checks, "pick", with_kernels)
    monkeypatch.setattr(pl, "pallas_call", interpreted)
    monkeypatch.setattr(plt, "debug_barrier", lambda: None)
    # XLA takes back the casts by which the kernel rounds, which the kernels' compiler does not.
    monkeypatch.setattr(attention_kernel, "_head_norm", rotary.head_norm)
    return called


@pytest.fixture
def hopper_attention(kernels, monkeypatch):
    """As `kernels`, with the attention of Hopper, counted by its kind."""
    pick, attend = checks.pick, attention_sm90.attend

    def with_hopper(operation, implementation, refusal, *, interpret=False):
        if operation.endswith("attention") and refusal["sm90"] is None:
            return "sm90"
        return pick(operation, implementation, refusal, interpret=interpret)

    def interpreted(q, window_kv, entries, indices, *args, **options):
        kernels["swa" if entries is None else "hca" if indices is None else "csa"] += 1
        return attend(q, window_kv, entries, indices, *args, **options | {"interpret": True})

    monkeypatch.setattr(checks, "pick", with_hopper)
    monkeypatch.setattr(attention_sm90, "attend", interpreted)
    return kernels


@pytest.fixture
def fresh_parts(parts):
    """fresh_parts(): programs of a layer; those that tests share were traced without kernels."""

    def fresh(program):
        part = program.__wrapped__

        def call(*operands):
            return part(*operands)

        return jax.jit(call, static_argnums=part.__code__.co_argcount - 1)

    return lambda: dataclasses.replace(
        parts, **{name: fresh(getattr(parts, name)) for name in ("attend", "route", "finish")}
    )


PLAIN_KERNELS = {
    "quantise_input",
    "decode_weight",
    "index_queries",
    "indexer_scores",
    "top_k",
    "compress",
}


def test_single_layers_keep_the_limits_of_the_published_code(kernels, fresh_parts, single_layers):
    """Four heads and streams of 256 are too few for two of the kernels; the others all run."""
    parts = fresh_parts()
    trace = single_layers.run(OFFICIAL, parts=parts)
    assert set(kernels) == PLAIN_KERNELS
    limits = single_layers.limits["out_quant_bf16_bits"]
    distance = single_layers.distances(trace, "out_quant_bf16_bits")
    assert np.median(distance, axis=1).max() <= 0.015
    assert np.quantile(distance, 0.95, axis=1).max() <= limits["rel_l2_p95_per_layer"]


def test_wide_layers_agree_with_the_plain_forms_in_any_chunks(
    kernels, fresh_parts, run, load_source, monkeypatch
):
    loaded = load_source(SyntheticSource(WIDE, 0, mtp=False))
    random = np.random.default_rng(21)
    tokens = random.integers(0, WIDE.vocab_size, 140)
    inputs = random.standard_normal((3, 140, WIDE.hc_mult, WIDE.hidden_size)).astype("f4")
    options = {"inputs": inputs, "rows": 128}
    parts = fresh_parts()
    trace = run(loaded, tokens, (128, 12), OFFICIAL, parts=parts, **options)
    sites = {"hyper_project", "hyper_pre", "hyper_post"}
    assert set(kernels) == PLAIN_KERNELS | sites | {"window_attention", "sparse_attention"}
    assert np.isfinite(trace.streams.astype("f4")).all()
    other = run(loaded, tokens, (61, 79), OFFICIAL, parts=parts, **options)
    np.testing.assert_array_equal(trace.streams, other.streams)
    np.testing.assert_array_equal(trace.chosen, other.chosen)
    # Without q1: its coarse steps turn differences of a last bit into 3 % of a layer's output.
    numerics = Numerics("bfloat16", ("q2", "q3"))
    trace = run(loaded, tokens, (128, 12), numerics, parts=parts, **options)
    monkeypatch.undo()
    plain = run(loaded, tokens, (128, 12), numerics, parts=fresh_parts(), **options)
    got, wanted = (x.streams.astype("f4").reshape(3, 140, -1) for x in (trace, plain))
    distance = np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert np.median(distance, axis=1).max() < 0.01
    assert (trace.chosen == plain.chosen).mean() > 0.95


def test_wide_layers_agree_with_the_plain_forms_through_the_attention_of_hopper(
    hopper_attention, fresh_parts, run, load_source, monkeypatch
):
    loaded = load_source(SyntheticSource(WIDE, 0, mtp=False))
    random = np.random.default_rng(22)
    tokens = random.integers(0, WIDE.vocab_size, 140)
    inputs = random.standard_normal((3, 140, WIDE.hc_mult, WIDE.hidden_size)).astype("f4")
    numerics = Numerics("bfloat16", ("q2", "q3"))
    options = {"inputs": inputs, "rows": 128}
    trace = run(loaded, tokens, (128, 12), numerics, parts=fresh_parts(), **options)
    assert {"swa", "hca", "csa"} <= set(hopper_attention)
    monkeypatch.undo()
    plain = run(loaded, tokens, (128, 12), numerics, parts=fresh_parts(), **options)
    got, wanted = (x.streams.astype("f4").reshape(3, 140, -1) for x in (trace, plain))
    distance = np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert np.median(distance, axis=1).max() < 0.01
