"""Every layer alone against the published inference code, with and without q1, q2 and q3.

The sharpest test of the activation quantisations: inputs are exact, so flipped roundings do not
pile up over layers. Each simulation left out has to break the limits.
"""

import ml_dtypes
import numpy as np
import pytest

from ds4jax.config import SIMULATIONS, Numerics

CHUNKS = [128, 6]
ALL = Numerics("float32", SIMULATIONS)


def as_float(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 bit patterns; float32 arrays pass."""
    return bits.view(ml_dtypes.bfloat16).astype(np.float32) if bits.dtype == np.uint16 else bits


@pytest.fixture(scope="module")
def alone(golden, run):
    """alone(numerics, layers) -> trace of these layers from their stored input streams."""
    case = golden("layers")
    inputs = as_float(case.expected["streams_in_bf16_bits"])

    def run_alone(numerics, layers=range(4)):
        layers = list(layers)
        return run(case.loaded, case.tokens, CHUNKS, numerics, inputs=inputs[layers], layers=layers)

    return run_alone


def distances(case, trace, name, layers=range(4)):
    """Relative L2 over the streams of a position: [layer, stored position]."""
    wanted = as_float(case.expected[name])[list(layers)]
    got = trace.streams[:, case.expected["positions"]].astype(np.float32)
    shape = (*wanted.shape[:2], -1)
    wanted, got = wanted.reshape(shape), got.reshape(shape)
    return np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


def overlap(case, chosen, layers=range(4), suffix=""):
    """Mean share of equal entries over the positions where the indexer rejects any."""
    rows = [list(case.expected["csa_layers"]).index(layer) for layer in layers if layer in (1, 3)]
    wanted = case.expected["csa_topk" + suffix][rows]
    shares = [
        len(set(got) & set(want)) / len(want)
        for layer in zip(chosen, wanted, strict=True)
        for position, (got, want) in enumerate(zip(*layer, strict=True))
        if (position + 1) // 4 > len(want)
    ]
    return np.mean(shares)


def test_float32_without_quantisation(golden, alone):
    case = golden("layers")
    trace = alone(Numerics("float32"))
    limit = case.meta["tolerance"]["out_noquant_f32"]["rel_l2_per_position_max"]
    assert distances(case, trace, "out_noquant_f32").max() <= limit
    np.testing.assert_array_equal(trace.experts, case.expected["router_experts_noquant"])
    np.testing.assert_array_equal(trace.chosen, case.expected["csa_topk_noquant"])


def test_float32_with_all_quantisations(golden, alone):
    case = golden("layers")
    trace = alone(ALL)
    limits = case.meta["tolerance"]["out_quant_f32"]
    distance = distances(case, trace, "out_quant_f32")
    assert np.median(distance, axis=1).max() <= limits["rel_l2_median_over_positions_per_layer"]
    assert (distance > 2e-3).sum(axis=1).max() <= limits["positions_per_layer_allowed_above_2e_3"]
    same = np.all(trace.experts == case.expected["router_experts"], axis=-1)
    assert same.mean(axis=1).min() >= limits["router_same_min"]
    assert overlap(case, trace.chosen) >= limits["csa_topk_member_overlap_min"]


@pytest.mark.parametrize(("missing", "layer"), [("q1", 0), ("q2", 0), ("q3", 1)])
def test_a_missing_quantisation_breaks_the_limits(missing, layer, golden, alone):
    case = golden("layers")
    numerics = Numerics("float32", tuple(name for name in SIMULATIONS if name != missing))
    trace = alone(numerics, [layer])
    limits = case.meta["tolerance"]["out_quant_f32"]
    distance = distances(case, trace, "out_quant_f32", [layer])
    if missing == "q3":
        # It changes nothing but the selection, hence few positions but those by a lot.
        assert (distance > 2e-3).sum() > limits["positions_per_layer_allowed_above_2e_3"]
        share = overlap(case, trace.chosen, [layer])
        assert share < limits["csa_topk_member_overlap_min"]
    else:
        assert np.median(distance) > 100 * limits["rel_l2_median_over_positions_per_layer"]


def test_bfloat16_with_all_quantisations(golden, alone):
    case = golden("layers")
    trace = alone(Numerics("bfloat16", SIMULATIONS))
    assert trace.streams.dtype == ml_dtypes.bfloat16
    limits = case.meta["tolerance"]["out_quant_bf16_bits"]
    distance = distances(case, trace, "out_quant_bf16_bits")
    # Other legal orders of rounding differ by 0.010 to 0.025 in the median, a layer computed in
    # float32 by 0.023 to 0.060: this bound tells them apart, the stored limit would not.
    assert np.median(distance, axis=1).max() <= 0.03
    assert np.median(distance, axis=1).max() <= limits["rel_l2_median_per_layer"]
    assert np.quantile(distance, 0.95, axis=1).max() <= limits["rel_l2_p95_per_layer"]
