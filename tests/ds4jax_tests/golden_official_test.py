"""Whole-model logits with q1, q2 and q3 on, within the statistical limits of the golden cases.

One flipped rounding is as large as a quantisation step, so these are limits over positions; the
single layers of golden_layers_test.py are the sharp comparison.
"""

import numpy as np
import pytest

from ds4jax.config import PRESETS, SIMULATIONS, Numerics


def statistics(got: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
    """The names of meta.json: distances over positions, mean KL and agreement of the top token."""
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    distance = np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    log_p = wanted - np.logaddexp.reduce(wanted, axis=-1, keepdims=True)
    log_q = got - np.logaddexp.reduce(got, axis=-1, keepdims=True)
    return {
        "rel_l2_median": float(np.median(distance)),
        "rel_l2_p95": float(np.quantile(distance, 0.95)),
        "kl_mean": float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1))),
        "argmax_agree_min": float(np.mean(got.argmax(-1) == wanted.argmax(-1))),
    }


# The slow one differs from the other by a config value and would compile everything again.
@pytest.mark.parametrize(
    "name", [pytest.param("official", marks=pytest.mark.slow), "official-select"]
)
@pytest.mark.parametrize(
    ("numerics", "limits", "wanted"),
    [
        (PRESETS["official"], "bf16_compute_against_logits", "logits"),
        (
            Numerics("float32", SIMULATIONS),
            "f32_compute_against_logits_quant_f32",
            "logits_quant_f32",
        ),
    ],
    ids=["bfloat16", "float32"],
)
def test_logits(name, numerics, limits, wanted, golden, run):
    case = golden(name)
    trace = run(case.loaded, case.tokens, [128, 128, 14], numerics)
    assert trace.logits.dtype == np.float32
    found = statistics(trace.logits[case.expected["logit_positions"]], case.expected[wanted])
    for key, limit in case.meta["tolerance"][limits].items():
        if key.endswith("_min"):
            assert found[key] >= limit, (key, found)
        else:
            assert found[key] <= limit, (key, found)
