"""Every layer alone against the published inference code, with and without q1, q2 and q3.

The sharpest test of the activation quantisations: inputs are exact, so flipped roundings do not
pile up over layers. Each simulation left out has to break the limits.
"""

from unittest import mock

import jax
import ml_dtypes
import numpy as np
import pytest

from ds4jax.config import SIMULATIONS, Numerics
from pallas_kernels.block_linear import sm90

ALL = Numerics("float32", SIMULATIONS)


def test_float32_without_quantisation(single_layers):
    trace = single_layers.run(Numerics("float32"))
    limit = single_layers.limits["out_noquant_f32"]["rel_l2_per_position_max"]
    assert single_layers.distances(trace, "out_noquant_f32").max() <= limit
    np.testing.assert_array_equal(
        trace.experts, single_layers.case.expected["router_experts_noquant"]
    )
    np.testing.assert_array_equal(trace.chosen, single_layers.case.expected["csa_topk_noquant"])


def test_float32_with_all_quantisations(single_layers):
    trace = single_layers.run(ALL)
    limits = single_layers.limits["out_quant_f32"]
    distance = single_layers.distances(trace, "out_quant_f32")
    assert np.median(distance, axis=1).max() <= limits["rel_l2_median_over_positions_per_layer"]
    assert (distance > 2e-3).sum(axis=1).max() <= limits["positions_per_layer_allowed_above_2e_3"]
    same = np.all(trace.experts == single_layers.case.expected["router_experts"], axis=-1)
    assert same.mean(axis=1).min() >= limits["router_same_min"]
    assert single_layers.overlap(trace) >= limits["csa_topk_member_overlap_min"]


@pytest.mark.parametrize(("missing", "layer"), [("q1", 0), ("q2", 0), ("q3", 1)])
def test_a_missing_quantisation_breaks_the_limits(missing, layer, single_layers):
    numerics = Numerics("float32", tuple(name for name in SIMULATIONS if name != missing))
    trace = single_layers.run(numerics, [layer])
    limits = single_layers.limits["out_quant_f32"]
    distance = single_layers.distances(trace, "out_quant_f32", [layer])
    if missing == "q3":
        # It changes nothing but the selection, hence few positions but those by a lot.
        assert (distance > 2e-3).sum() > limits["positions_per_layer_allowed_above_2e_3"]
        share = single_layers.overlap(trace, [layer])
        assert share < limits["csa_topk_member_overlap_min"]
    else:
        assert np.median(distance) > 100 * limits["rel_l2_median_over_positions_per_layer"]


def test_bfloat16_with_all_quantisations(single_layers):
    trace = single_layers.run(Numerics("bfloat16", SIMULATIONS))
    assert trace.streams.dtype == ml_dtypes.bfloat16
    distance = check_stored_limits(single_layers, trace)
    # A rounding left out shows (0.025 for the norm of query heads), which the stored limit hides.
    # What remains, 0.006 at the most, is the order in which attention adds its blocks of keys.
    assert np.median(distance, axis=1).max() <= 0.015


def check_stored_limits(single_layers, trace):
    limits = single_layers.limits["out_quant_bf16_bits"]
    distance = single_layers.distances(trace, "out_quant_bf16_bits")
    assert np.median(distance, axis=1).max() <= limits["rel_l2_median_per_layer"]
    assert np.quantile(distance, 0.95, axis=1).max() <= limits["rel_l2_p95_per_layer"]
    return distance


def test_bfloat16_gives_the_bits_of_the_published_code(single_layers):
    """On most positions of the layers without selection: a rounding left out would spoil them all.

    Others have more than the 64 keys after which the published attention rescales its sums.
    """
    layers = [0, 2]
    trace = single_layers.run(Numerics("bfloat16", SIMULATIONS), layers)
    distance = single_layers.distances(trace, "out_quant_bf16_bits", layers)
    assert (distance == 0).mean(axis=1).min() >= 0.7


@pytest.mark.gpu1
@pytest.mark.parametrize(
    "check",
    [
        test_float32_without_quantisation,
        test_float32_with_all_quantisations,
        test_bfloat16_with_all_quantisations,
    ],
    ids=lambda check: check.__name__,
)
def test_limits_hold_on_a_gpu(check, single_layers):
    """Roundings that are part of the model survive a compiler that keeps excess precision.

    With sums in float32: those of the FP8 units are checked by the test below.
    """
    assert jax.default_backend() == "gpu"
    jax.clear_caches()  # of programs with the other products
    with mock.patch.object(sm90, "refusal", return_value="sums are float32 here"):
        check(single_layers)


@pytest.mark.gpu1
def test_sums_of_the_fp8_units_are_within_the_stored_limits(single_layers):
    """They keep fewer bits, which flips roundings to E4M3 and E2M1 that follow."""
    assert jax.default_backend() == "gpu"
    jax.clear_caches()
    check_stored_limits(single_layers, single_layers.run(Numerics("bfloat16", SIMULATIONS)))
