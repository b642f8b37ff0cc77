"""The float32 golden cases: logits, streams, routing, selection and greedy tokens.

Limits come from each case's meta.json; selections are compared as exact sets.
"""

import numpy as np
import pytest

from ds4jax.config import PRESETS

ORACLE = PRESETS["oracle"]
CASES = ("f32", "f32-pro", "quant")


def relative(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Relative L2 distance over the last axis."""
    return np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


def assert_matches(case, trace):
    """Everything a case stores, within its limits."""
    limits = case.meta["tolerance"]["float32_compute"]
    expected = case.expected
    logits = trace.logits[expected["logit_positions"]]
    distance = relative(logits, expected["logits"])
    assert np.abs(logits - expected["logits"]).max() <= limits["max_abs"]
    assert distance.max() <= limits["rel_l2_per_position_max"]
    if "streams" not in expected:
        return
    assert np.median(distance) <= limits["rel_l2_per_position_median"]
    shape = (*expected["streams"].shape[:2], -1)
    streams = trace.streams[:, expected["stream_positions"]].reshape(shape)
    distance = relative(streams, expected["streams"].reshape(shape))
    assert distance.max() <= limits["streams_rel_l2_per_position_max"]
    np.testing.assert_array_equal(trace.experts, expected["router_experts"])
    np.testing.assert_allclose(trace.weights, expected["router_weights"], atol=1e-5)
    np.testing.assert_array_equal(trace.chosen, expected["csa_topk"])


@pytest.mark.parametrize("name", CASES)
def test_prompt_in_chunks_of_the_row_shape(name, golden, run):
    case = golden(name)
    length = len(case.tokens)
    chunks = [128] * (length // 128) + [length % 128]
    assert_matches(case, run(case.loaded, case.tokens, chunks, ORACLE))


@pytest.mark.parametrize("name", CASES)
def test_csa_layers_are_the_ones_that_select(name, golden):
    case = golden(name)
    ratios = case.config.layer_ratios
    assert [i for i, ratio in enumerate(ratios) if ratio == 4] == list(case.expected["csa_layers"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_whole_prompt_in_one_chunk(name, golden, run):
    case = golden(name)
    length = len(case.tokens)
    assert_matches(case, run(case.loaded, case.tokens, [length], ORACLE, rows=length))


def test_long_prompt_on_the_float32_checkpoint(golden, run):
    case = golden("decode")
    trace = run(case.loaded, case.tokens, [128] * 5 + [60], ORACLE)
    assert_matches(case, trace)


def greedy(case, run, index):
    """Continues a stored prefix one token at a time; returns tokens and logits."""
    prefix = case.expected["prompt_lengths"][index]
    chunks = [min(128, prefix - begin) for begin in range(0, prefix, 128)]
    trace = run(case.loaded, case.tokens[:prefix], chunks, ORACLE)
    tokens, logits = [], []
    for _ in range(case.expected["greedy_tokens"].shape[1]):
        logits.append(trace.logits[-1])
        tokens.append(int(np.argmax(logits[-1])))
        trace = run(case.loaded, np.int32(tokens[-1:]), [1], ORACLE, state=trace.state)
    return tokens, np.stack(logits)


@pytest.mark.parametrize("index", range(9))
def test_greedy_tokens_are_exact(index, golden, run):
    case = golden("decode")
    tokens, logits = greedy(case, run, index)
    np.testing.assert_array_equal(tokens, case.expected["greedy_tokens"][index])
    wanted = case.expected["greedy_logits"][index]
    limits = case.meta["tolerance"]["float32_compute"]
    assert np.abs(logits - wanted).max() <= limits["max_abs"]
    assert relative(logits, wanted).max() <= limits["rel_l2_per_position_max"]
