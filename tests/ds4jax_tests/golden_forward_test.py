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


@pytest.mark.parametrize("name", CASES)
def test_prompt_in_chunks_of_the_row_shape(name, golden, run):
    case = golden(name)
    length = len(case.tokens)
    chunks = [128] * (length // 128) + [length % 128]
    case.assert_matches(run(case.loaded, case.tokens, chunks, ORACLE))


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
    case.assert_matches(run(case.loaded, case.tokens, [length], ORACLE, rows=length))


def test_long_prompt_on_the_float32_checkpoint(golden, run):
    case = golden("decode")
    case.assert_matches(run(case.loaded, case.tokens, [128] * 5 + [60], ORACLE))


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [[3, 1, 5, 2, *[128] * 5, 49], [7] * 100], ids=["3,1,5,2", "7"])
def test_long_prompt_in_other_chunks(chunks, golden, run):
    case = golden("decode")
    case.assert_matches(run(case.loaded, case.tokens, chunks, ORACLE))


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
