"""Routed experts against exact arithmetic; the bits of a slot under every regrouping of work."""

import dataclasses
import functools
import itertools
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from pallas_kernels import specs
from pallas_kernels.codecs import host
from pallas_kernels.routed_experts import ExpertSlab, combine_slots, expert_slots, ordering

LIMIT = 1.5  # low enough that both clamps act on these inputs
FORMATS = ("fp4", "fp8", "bf16", "f32")


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of inputs, numpy arrays; `slab` holds all experts in order."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    slab: ExpertSlab
    where: np.ndarray


def make_slab(rng, experts, width, hidden, weights_format):
    gate_up = rng.standard_normal((experts, 2 * width, hidden)).astype("f4") * 2 * hidden**-0.5
    down = rng.standard_normal((experts, hidden, width)).astype("f4") * width**-0.5
    if weights_format == "fp4":
        return ExpertSlab(*host.encode_fp4(gate_up), *host.encode_fp4(down), format="fp4")
    if weights_format == "fp8":
        halves = gate_up.reshape(experts, 2, width, hidden)
        codes, scales = host.encode_fp8(halves)
        codes, scales = codes.reshape(gate_up.shape), scales.reshape(experts, -1, scales.shape[-1])
        return ExpertSlab(codes, scales, *host.encode_fp8(down), format="fp8")
    dtype = ml_dtypes.bfloat16 if weights_format == "bf16" else np.float32
    return ExpertSlab(gate_up.astype(dtype), None, down.astype(dtype), None, format=weights_format)


def make_case(name, *, tokens=21, weights_format="fp4", dtype="bfloat16", **shape):
    spec = dataclasses.replace(specs.TINY, **shape)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    x = rng.standard_normal((tokens, spec.hidden)).astype(jnp.dtype(dtype))
    ids = np.argsort(rng.random((tokens, spec.experts)), axis=1)[:, : spec.experts_per_token]
    weights = rng.random(ids.shape).astype("f4") + 0.1
    slab = make_slab(rng, spec.experts, spec.expert_width, spec.hidden, weights_format)
    return Case(x, ids.astype("i4"), weights, slab, np.arange(spec.experts, dtype="i4"))


def decoded(slab):
    """float64 gate_up and down."""
    if slab.format == "fp4":
        pair = (
            host.decode_fp4(slab.gate_up, slab.gate_up_scale),
            host.decode_fp4(slab.down, slab.down_scale),
        )
    elif slab.format == "fp8":
        halves = slab.gate_up.reshape(slab.experts, 2, slab.width, slab.hidden)
        scales = slab.gate_up_scale.reshape(slab.experts, 2, -1, slab.gate_up_scale.shape[-1])
        gate_up = host.decode_fp8(halves, scales).reshape(slab.gate_up.shape)
        pair = gate_up, host.decode_fp8(slab.down, slab.down_scale)
    else:
        pair = slab.gate_up, slab.down
    return tuple(np.asarray(array, np.float64) for array in pair)


def q1(x):
    """E4M3 rounding with power-of-two scales of 128 channels, float64 in and out."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 128))).reshape(len(x), -1, 128)
    amax = np.maximum(np.abs(padded).max(-1, keepdims=True), 1e-4)
    scale = 2.0 ** np.ceil(np.log2(amax / 448))
    codes = (padded / scale).astype("f4").astype(ml_dtypes.float8_e4m3fn).astype("f8")
    return (codes * scale).reshape(len(x), -1)[:, : x.shape[1]]


def exact(case, quantize_input=False, round_h=lambda h: h):
    """Slots in float64; NaN where an expert is absent, 0 where the id is -1."""
    gate_up, down = decoded(case.slab)
    tokens, k = case.ids.shape
    slots = np.zeros((tokens, k, case.x.shape[1]))
    x = case.x.astype("f8")
    if quantize_input:
        x = q1(x)
    for t, j in itertools.product(range(tokens), range(k)):
        expert = case.ids[t, j]
        if expert < 0:
            continue
        row = case.where[expert]
        if row < 0:
            slots[t, j] = np.nan
            continue
        gate, up = np.split(gate_up[row] @ x[t], 2)
        gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
        h = round_h(gate / (1 + np.exp(-gate)) * up * case.weights[t, j])
        if quantize_input:
            h = q1(h[None])[0]
        slots[t, j] = down[row] @ h
    return slots


@functools.partial(jax.jit, static_argnames=("quantize_input", "implementation", "interpret"))
def run_jitted(x, ids, weights, slabs, where, slots, **options):
    return expert_slots(x, ids, weights, slabs, where, limit=LIMIT, slots=slots, **options)


def run(case, *, slabs=None, where=None, slots=None, quantize_input=False, **options):
    out = run_jitted(
        case.x,
        case.ids,
        case.weights,
        (case.slab,) if slabs is None else slabs,
        case.where if where is None else where,
        slots,
        quantize_input=quantize_input,
        **options,
    )
    return np.asarray(out)


def part(slab, experts):
    """The slab of some experts, in the order given."""
    return jax.tree.map(lambda array: array[np.asarray(experts, np.int32)], slab)


def relative(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


def assert_same_bits(got, wanted, message=""):
    view = np.uint16 if got.dtype.itemsize == 2 else np.uint32
    np.testing.assert_array_equal(got.view(view), wanted.view(view), err_msg=message)


class ReferenceTest(parameterized.TestCase):
    @parameterized.product(weights_format=FORMATS, quantize_input=(False, True))
    def test_float32_is_exact_arithmetic(self, weights_format, quantize_input):
        case = make_case(self.id(), weights_format=weights_format, dtype="float32")
        got = run(case, quantize_input=quantize_input)
        # A last-bit difference of h may cross an E4M3 step: those rows are few.
        limit = 2e-3 if quantize_input else 1e-6
        self.assertLess(relative(got, exact(case, quantize_input)), limit)

    @parameterized.product(weights_format=FORMATS)
    def test_bfloat16_rounds_h_and_the_result_once(self, weights_format):
        case = make_case(self.id(), weights_format=weights_format)
        got = run(case)
        self.assertEqual(got.dtype, jnp.bfloat16)
        wanted = exact(case, round_h=lambda h: h.astype("f4").astype(jnp.bfloat16).astype("f8"))
        self.assertLess(relative(got, wanted), 3e-3)

    def test_widths_that_fill_no_block(self):
        case = make_case(
            self.id(), weights_format="fp8", dtype="float32", hidden=160, expert_width=96, tokens=5
        )
        for quantize_input in (False, True):
            got = run(case, quantize_input=quantize_input)
            self.assertLess(relative(got, exact(case, quantize_input)), 2e-3)

    def test_leaving_out_the_input_rounding_shows(self):
        case = make_case(self.id(), dtype="float32")
        self.assertGreater(relative(run(case), exact(case, quantize_input=True)), 1e-2)


class RegroupingTest(parameterized.TestCase):
    """The bits of a slot do not depend on where its expert is or which rows are beside it."""

    def setUp(self):
        super().setUp()
        self.case = make_case(self.id(), tokens=40)
        self.whole = run(self.case)
        self.assertTrue(np.isfinite(self.whole.astype("f4")).all())

    def test_slab_order(self):
        experts = self.case.slab.experts
        order = np.random.default_rng(1).permutation(experts)
        where = np.argsort(order).astype("i4")
        assert_same_bits(
            run(self.case, slabs=(part(self.case.slab, order),), where=where), self.whole
        )

    @parameterized.parameters([[1, 7]], [[3, 3, 2]], [[0, 8]], [[1] * 8])
    def test_several_slabs(self, sizes):
        bounds = np.cumsum([0, *sizes])
        slabs = tuple(
            part(self.case.slab, range(a, b)) for a, b in itertools.pairwise(bounds.tolist())
        )
        assert_same_bits(run(self.case, slabs=slabs), self.whole)

    def test_several_calls_complete_the_slots(self):
        slots = None
        for experts in ([6, 1], [0], [], [2, 3, 4, 5, 7]):
            where = np.full(8, -1, "i4")
            where[experts] = np.arange(len(experts))
            slots = run(self.case, slabs=(part(self.case.slab, experts),), where=where, slots=slots)
        assert_same_bits(slots, self.whole)

    def test_row_order_and_number(self):
        order = np.random.default_rng(2).permutation(len(self.case.x))
        for rows in (order, order[:1], order[:17]):
            some = dataclasses.replace(
                self.case,
                x=self.case.x[rows],
                ids=self.case.ids[rows],
                weights=self.case.weights[rows],
            )
            assert_same_bits(run(some), self.whole[rows], f"{len(rows)} rows")

    def test_poisoned_rows_stay_alone(self):
        poisoned = dataclasses.replace(self.case, x=self.case.x.copy(), ids=self.case.ids.copy())
        poisoned.x[5:9] = np.nan
        poisoned.ids[9:12] = -1
        got = run(poisoned)
        self.assertTrue(np.isnan(got[5:9].astype("f4")).all())
        self.assertFalse(got[9:12].astype("f4").any())
        keep = np.r_[0:5, 12:40]
        assert_same_bits(got[keep], self.whole[keep])


class RoutingTest(parameterized.TestCase):
    def test_all_patterns_of_empty_experts(self):
        case = make_case(self.id(), experts=4, experts_per_token=2, dtype="float32", tokens=9)
        for pattern in itertools.product((False, True), repeat=4):
            allowed = np.flatnonzero(pattern)
            ids = np.full_like(case.ids, -1)
            for slot in range(min(2, len(allowed))):
                ids[:, slot] = allowed[(np.arange(9) + slot) % len(allowed)]
            some = dataclasses.replace(case, ids=ids)
            np.testing.assert_allclose(
                run(some), exact(some), rtol=0, atol=2e-6, err_msg=str(pattern)
            )

    def test_one_expert_has_all_rows(self):
        case = make_case(self.id(), experts_per_token=1, tokens=50, dtype="float32")
        case.ids[:] = 3
        np.testing.assert_allclose(run(case), exact(case), rtol=0, atol=2e-6)

    def test_absent_experts_are_nan_and_missing_ids_zero(self):
        case = make_case(self.id(), dtype="float32")
        case.ids[2, 1] = -1
        case.where[:] = [0, -1, 1, 2, -1, 3, 4, 5]
        case = dataclasses.replace(case, slab=part(case.slab, [0, 2, 3, 5, 6, 7]))
        wanted = exact(case)
        self.assertTrue(np.isnan(wanted).any())
        got = run(case)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)
        self.assertFalse(got[2, 1].any())

    def test_no_slab_gives_the_fresh_buffer(self):
        case = make_case(self.id(), dtype="float32")
        case.ids[0, 0] = -1
        got = run(case, slabs=(), where=np.full(8, -1, "i4"))
        np.testing.assert_array_equal(np.isnan(got).all(-1), case.ids >= 0)
        self.assertFalse(got[0, 0].any())

    def test_row_order_groups_rows_stably(self):
        ids = np.array([[3, 0], [-1, 3], [1, 2], [0, 3]], "i4")
        where = np.array([1, -1, 0, 2], "i4")
        order = ordering.order_rows(ids, where, 3)
        self.assertEqual(order.rows.tolist(), [5, 1, 6, 0, 3, 7, 2, 4])
        self.assertEqual(order.starts.tolist(), [0, 1, 3, 6])


class CombineTest(parameterized.TestCase):
    def test_sums_in_slot_order_with_one_rounding(self):
        rng = np.random.default_rng(4)
        slots = (rng.standard_normal((33, 6, 64)) * 100).astype(jnp.bfloat16)
        shared = rng.standard_normal((33, 64)).astype(jnp.bfloat16)
        total = slots[:, 0].astype("f4")
        for slot in range(1, 6):
            total = total + slots[:, slot].astype("f4")
        wanted = (total + shared.astype("f4")).astype(jnp.bfloat16)
        assert_same_bits(np.asarray(jax.jit(combine_slots)(slots, shared)), wanted)

    def test_an_absent_expert_reaches_the_sum(self):
        slots = jnp.zeros((2, 3, 4)).at[1, 2].set(jnp.nan)
        self.assertEqual(jnp.isnan(combine_slots(slots, jnp.ones((2, 4)))).sum(), 4)


class RefusalTest(absltest.TestCase):
    def test_errors_name_what_is_wrong(self):
        case = make_case(self.id(), dtype="float32")
        wrong = functools.partial(dataclasses.replace, case)
        slab = functools.partial(dataclasses.replace, case.slab)
        other = make_case(self.id(), expert_width=64).slab
        for change, text in (
            (wrong(x=case.x.astype("f2")), "x is float16"),
            (wrong(ids=case.ids[:3]), r"ids is int32\[3, 3\], expected int32 \[21, k\]"),
            (wrong(weights=case.weights[:, :1]), r"weights is float32\[21, 1\]"),
            (wrong(where=case.where[None]), r"where is int32\[1, 8\]"),
            (wrong(slab=slab(format="int4")), "'int4'"),
            (
                wrong(slab=slab(gate_up=case.slab.gate_up[:, :, :64])),
                r"gate_up is uint8\[8, 256, 64\]",
            ),
            (wrong(slab=slab(down_scale=None)), "down_scale is None"),
            (wrong(slab=slab(format="fp8")), "float8_e4m3fn"),
        ):
            with pytest.raises(ValueError, match=text):
                run(change)
        with pytest.raises(ValueError, match="slab 1 has D=256, F=64"):
            run(case, slabs=(case.slab, other))
        with pytest.raises(ValueError, match="slots is float32"):
            run(case, slots=np.zeros((21, 3, 4), "f4"))
        with pytest.raises(ValueError, match="multiples of 32"):
            make_slab_of_odd_width().check()
        with pytest.raises(ValueError, match="shared is"):
            combine_slots(jnp.zeros((2, 3, 4)), jnp.zeros((2, 3)))


def make_slab_of_odd_width():
    u8 = functools.partial(np.zeros, dtype=np.uint8)
    return ExpertSlab(u8((1, 96, 16)), u8((1, 96, 1)), u8((1, 32, 24)), u8((1, 32, 1)), "fp4")


if __name__ == "__main__":
    absltest.main()
