"""Routed experts against exact arithmetic; the bits of a slot under every regrouping of work."""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import specs, support
from pallas_kernels.codecs import host
from pallas_kernels.routed_experts import (
    ExpertSlab,
    combine_slots,
    expert_slots,
    ordering,
    portable,
    tiling,
)

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


def as_bfloat16(x):
    return x.astype("f4").astype(jnp.bfloat16).astype("f8")


def exact(case, quantize_input=False, rounded=lambda x: x):
    """Slots in float64; NaN where an expert is absent, 0 where the id is -1.

    `rounded` is what happens to the outputs of the first two products and to h.
    """
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
        gate, up = np.split(rounded(gate_up[row] @ x[t]), 2)
        gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
        h = rounded(gate / (1 + np.exp(-gate)) * up * case.weights[t, j])
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
    def test_bfloat16_rounds_every_product_and_h(self, weights_format):
        """The bits of all but a few values, which a sum in another order put beside a tie."""
        case = make_case(self.id(), weights_format=weights_format)
        got = run(case)
        self.assertEqual(got.dtype, jnp.bfloat16)
        wanted = exact(case, rounded=as_bfloat16)
        self.assertLess(relative(got, wanted), 3e-3)
        differ = np.mean(got.astype("f8") != as_bfloat16(wanted), where=~np.isnan(wanted))
        self.assertLess(differ, 0.02)

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


class RegroupingMixin:
    """The bits of a slot do not depend on where its expert is or which rows are beside it."""

    options: Mapping[str, Any]
    shape: Mapping[str, int]

    def setUp(self):
        super().setUp()
        self.case = make_case("regrouping", **self.shape)
        self.whole = self.run_case(self.case)
        self.assertTrue(np.isfinite(self.whole.astype("f4")).all())

    def run_case(self, case, **options):
        return run(case, **self.options, **options)

    def test_slab_order(self):
        experts = self.case.slab.experts
        order = np.random.default_rng(1).permutation(experts)
        where = np.argsort(order).astype("i4")
        slabs = (part(self.case.slab, order),)
        assert_same_bits(self.run_case(self.case, slabs=slabs, where=where), self.whole)

    def test_several_slabs(self):
        slabs = tuple(
            part(self.case.slab, range(a, b)) for a, b in itertools.pairwise((0, 2, 2, 8))
        )
        assert_same_bits(self.run_case(self.case, slabs=slabs), self.whole)

    def test_several_calls_complete_the_slots(self):
        slots = None
        for experts in ([6, 1], [], [0, 2, 3, 4, 5, 7]):
            where = np.full(8, -1, "i4")
            where[experts] = np.arange(len(experts))
            slabs = (part(self.case.slab, experts),)
            slots = self.run_case(self.case, slabs=slabs, where=where, slots=slots)
        assert_same_bits(slots, self.whole)

    def test_row_order_and_number(self):
        tokens = len(self.case.x)
        order = np.random.default_rng(2).permutation(tokens)
        for rows in (order, order[: tokens // 2 + 1]):
            some = dataclasses.replace(
                self.case,
                x=self.case.x[rows],
                ids=self.case.ids[rows],
                weights=self.case.weights[rows],
            )
            assert_same_bits(self.run_case(some), self.whole[rows], f"{len(rows)} rows")

    def test_poison_stays_in_its_rows(self):
        case = self.case
        poisoned = dataclasses.replace(
            case, x=case.x.copy(), ids=case.ids.copy(), slab=jax.tree.map(np.copy, case.slab)
        )
        poisoned.x[5:9] = np.nan
        poisoned.ids[9:12] = -1
        # An expert that nobody is routed to, made of NaN.
        poisoned.ids[poisoned.ids == 7] = -1
        poisoned.slab.gate_up_scale[7] = poisoned.slab.down_scale[7] = 255
        got = self.run_case(poisoned)
        served = poisoned.ids >= 0
        expected = np.where(served[..., None], self.whole, np.zeros((), self.whole.dtype))
        rows = np.arange(len(case.x))
        self.assertTrue(np.isnan(got[5:9].astype("f4"))[served[5:9]].all())
        keep = (rows < 5) | (rows >= 9)
        assert_same_bits(got[keep], expected[keep])


class ReferenceRegroupingTest(RegroupingMixin, parameterized.TestCase):
    options = MappingProxyType({})
    shape = MappingProxyType({"tokens": 40})


class PortableRegroupingTest(RegroupingMixin, parameterized.TestCase):
    options = MappingProxyType({"implementation": "portable", "interpret": True})
    shape = MappingProxyType({"tokens": 40, "hidden": 128, "expert_width": 64})

    def setUp(self):
        # Two sizes of row tiles, so that rows change between them when the token order changes.
        blocks = tiling.Tiling(out=64, rows=32, step=64, warps=4, stages=2)
        both = (blocks, dataclasses.replace(blocks, rows=16))
        patch = mock.patch.object(tiling, "choose", return_value=tiling.LayerTiling(both, both))
        self.enter_context(patch)
        super().setUp()


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


class PortableTest(parameterized.TestCase):
    """The Pallas-Triton kernels, interpreted; only their PTX decoder has a plain twin there."""

    @parameterized.product(weights_format=("fp4", "bf16"), quantize_input=(False, True))
    def test_agrees_with_the_reference(self, weights_format, quantize_input):
        case = make_case(self.id(), weights_format=weights_format)
        got = run(case, quantize_input=quantize_input, implementation="portable", interpret=True)
        wanted = run(case, quantize_input=quantize_input)
        # Another order of float32 sums: now and then a last bit of h or of the result.
        self.assertLess(relative(got, wanted), 2e-3)
        self.assertGreater((got == wanted).mean(), 0.99)

    def test_every_code_and_scale_is_exact(self):
        check_down_weight(interpret=True)

    def test_extreme_scales(self):
        case = make_case(self.id(), tokens=4, hidden=128, expert_width=64)
        case.slab.gate_up_scale[:, ::3] = 0
        case.slab.gate_up_scale[:, 1::7] = 200
        case.slab.down_scale[:, 5, :] = 255
        got = run(case, implementation="portable", interpret=True)
        assert_same_bits(np.isnan(got).astype("f4"), np.isnan(run(case)).astype("f4"))
        finite = ~np.isnan(got)
        self.assertLess(relative(got[finite], run(case)[finite]), 2e-3)

    def test_all_patterns_of_empty_experts(self):
        case = make_case(
            self.id(), experts=4, experts_per_token=2, tokens=9, hidden=64, expert_width=64
        )
        for pattern in itertools.product((False, True), repeat=4):
            allowed = np.flatnonzero(pattern)
            ids = np.full_like(case.ids, -1)
            for slot in range(min(2, len(allowed))):
                ids[:, slot] = allowed[(np.arange(9) + slot) % len(allowed)]
            some = dataclasses.replace(case, ids=ids)
            got = run(some, implementation="portable", interpret=True)
            np.testing.assert_allclose(
                got.astype("f4"), run(some).astype("f4"), rtol=0, atol=1e-2, err_msg=str(pattern)
            )

    def test_one_expert_has_all_rows_and_others_are_absent(self):
        case = make_case(self.id(), experts_per_token=2, tokens=37, hidden=64, expert_width=64)
        case.ids[:] = [3, 5]
        case.where[5] = -1
        got = run(case, implementation="portable", interpret=True)
        self.assertTrue(np.isnan(got[:, 1]).all())
        np.testing.assert_allclose(
            got[:, 0].astype("f4"), run(case)[:, 0].astype("f4"), rtol=0, atol=1e-2
        )

    def test_arrays_that_32_bit_offsets_cannot_reach_are_halved(self):
        for experts, pieces in ((97, 1), (98, 2), (195, 2), (256, 2), (384, 2), (391, 1)):
            d, f = specs.PRO.hidden, specs.PRO.expert_width
            shapes = ((2 * f, d // 2), (2 * f, d // 32), (d, f // 2), (d, f // 32))
            arrays = [jax.ShapeDtypeStruct((experts, *shape), jnp.uint8) for shape in shapes]
            found = jax.eval_shape(portable.addressable, ExpertSlab(*arrays, "fp4"))
            self.assertLen(found, pieces, experts)
            self.assertEqual(sum(piece.experts for piece in found), experts)

    @parameterized.product(spec=("flash", "pro"), tokens=(1, 2048, 32768))
    def test_lowers_for_cuda_at_released_shapes(self, spec, tokens):
        text = lower_for_cuda(specs.SPECS[spec], tokens, "fp4", split=True)
        self.assertIn("routed_experts_gate_up", text)
        self.assertIn("routed_experts_down", text)

    def test_lowers_for_cuda_with_bfloat16_weights(self):
        self.assertIn("routed_experts_down", lower_for_cuda(specs.FLASH, 512, "bf16", split=False))


def read_out_down_weight(interpret):
    """All FP4 bytes under all scale bytes, as the down kernel decodes them: [512, 256]."""
    codes = np.broadcast_to(np.arange(256, dtype=np.uint8), (1, 256, 256))
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (1, 256, 16))
    slab = ExpertSlab(
        np.zeros((1, 1024, 128), np.uint8), np.zeros((1, 1024, 8), np.uint8), codes, scales, "fp4"
    )
    order = ordering.order_rows(jnp.zeros((512, 1), jnp.int32), jnp.zeros(1, jnp.int32), 1)
    (tiles,) = ordering.row_tiles(order, 0, 1, (64,))
    blocks = tiling.Tiling(out=64, rows=64, step=64, warps=4, stages=2)
    h = portable.split_pairs(jnp.eye(512, dtype=jnp.bfloat16))
    run = functools.partial(portable.down, tiling=blocks, interpret=interpret)
    return np.asarray(jax.jit(run)(h, order, tiles, slab, None)), slab


def check_down_weight(interpret):
    got, slab = read_out_down_weight(interpret)
    with np.errstate(all="ignore"):
        weight = host.decode_fp4(slab.down, slab.down_scale)[0].astype(jnp.bfloat16).astype("f4")
    # A row that holds infinity or NaN meets the zeros of the one-hot inputs.
    weight[~np.isfinite(weight).all(axis=1)] = np.nan
    got = got.T.astype("f4")
    tiny = (np.abs(weight) < np.finfo(np.float32).tiny) & (got == 0)
    np.testing.assert_array_equal(got, np.where(tiny, 0, weight))


@pytest.mark.gpu1
class CompiledTest(parameterized.TestCase):
    """The compiled kernels on this machine's GPU."""

    def test_every_code_and_scale_is_exact(self):
        check_down_weight(interpret=False)

    @parameterized.product(tokens=(1, 300), quantize_input=(False, True))
    def test_agrees_with_the_reference_at_flash_width(self, tokens, quantize_input):
        rng = np.random.default_rng(tokens)
        d, f, n = specs.FLASH.hidden, specs.FLASH.expert_width, 8
        codes = [
            rng.integers(0, 256, shape, np.uint8) for shape in ((n, 2 * f, d // 2), (n, d, f // 2))
        ]
        scales = [
            rng.integers(117, 122, shape, np.uint8)
            for shape in ((n, 2 * f, d // 32), (n, d, f // 32))
        ]
        slab = ExpertSlab(codes[0], scales[0], codes[1], scales[1], "fp4")
        case = dataclasses.replace(
            make_case(self.id(), tokens=tokens, experts_per_token=6),
            x=rng.standard_normal((tokens, d)).astype(jnp.bfloat16),
            slab=slab,
        )
        options = {"quantize_input": quantize_input, "implementation": "portable"}
        got = run(case, **options)
        wanted = run(case, **(options | {"implementation": "reference"}))
        self.assertLess(relative(got, wanted), 2e-3)
        order = np.random.default_rng(3).permutation(8)
        slots = None
        for experts in (order[:3], order[3:]):
            where = np.full(8, -1, "i4")
            where[experts] = np.arange(len(experts))
            slabs = (part(case.slab, experts),)
            slots = run(case, slabs=slabs, where=where, slots=slots, **options)
        assert_same_bits(slots, got)


def lower_for_cuda(spec, tokens, weights_format, split):
    """StableHLO of the portable kernels for a CUDA device, with the experts in one or two slabs."""

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    def abstract_slab(n):
        d, f = spec.hidden, spec.expert_width
        if weights_format == "bf16":
            half = jnp.bfloat16
            return ExpertSlab(array(half, n, 2 * f, d), None, array(half, n, d, f), None, "bf16")
        u8 = functools.partial(array, jnp.uint8)
        return ExpertSlab(
            u8(n, 2 * f, d // 2), u8(n, 2 * f, d // 32), u8(n, d, f // 2), u8(n, d, f // 32), "fp4"
        )

    sizes = (spec.experts - 64, 64) if split else (spec.experts,)
    k = spec.experts_per_token
    call = functools.partial(
        expert_slots, limit=10.0, quantize_input=True, implementation="portable"
    )
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with (
        use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)),
        mock.patch.object(support, "unsupported", return_value=None),
    ):
        lowered = (
            jax.jit(call)
            .trace(
                array(jnp.bfloat16, tokens, spec.hidden),
                array(jnp.int32, tokens, k),
                array(jnp.float32, tokens, k),
                tuple(abstract_slab(n) for n in sizes),
                array(jnp.int32, spec.experts),
            )
            .lower(lowering_platforms=("cuda",))
        )
    return lowered.as_text()


class RowTilesTest(parameterized.TestCase):
    @parameterized.product(sizes=((1,), (16,), (4, 2), (16, 8, 1)), tokens=(1, 40))
    def test_tiles_cover_every_row_of_the_slab_once(self, sizes, tokens):
        rng = np.random.default_rng(len(sizes) * 100 + tokens)
        ids = rng.integers(-1, 7, (tokens, 3)).astype("i4")
        where = np.array([4, -1, 0, 1, 5, 2, 3], "i4")
        order = ordering.order_rows(ids, where, 6)
        rows = np.asarray(order.rows)
        for first, experts in ((0, 6), (2, 3)):
            tables = jax.jit(ordering.row_tiles, static_argnums=(1, 2, 3))(
                order, first, experts, sizes
            )
            found = {}
            for tiles, size in zip(tables, sizes, strict=True):
                fields = (tiles.expert, tiles.start, tiles.count)
                for expert, start, count in zip(*map(np.asarray, fields), strict=True):
                    self.assertLessEqual(count, size)
                    for row in rows[start : start + count].tolist():
                        self.assertNotIn(row, found)
                        found[row] = expert + first
            wanted = {
                row: where[id]
                for row, id in enumerate(ids.reshape(-1).tolist())
                if id >= 0 and first <= where[id] < first + experts
            }
            self.assertEqual(found, wanted)

    def test_leftovers_take_the_smallest_tile_that_holds_them(self):
        counts = [0, 64, 65, 128, 130, 200, 256]
        starts = np.cumsum([0, *counts]).astype("i4")
        order = ordering.RowOrder(jnp.arange(starts[-1], dtype=jnp.int32), jnp.asarray(starts))
        large, small = ordering.row_tiles(order, 0, len(counts), (128, 64))
        used = [np.asarray(table.expert)[np.asarray(table.count) > 0] for table in (large, small)]
        self.assertEqual(used[0].tolist(), [2, 3, 4, 5, 5, 6, 6])
        self.assertEqual(used[1].tolist(), [1, 4])


class TilingTest(parameterized.TestCase):
    def test_depends_on_the_average_number_of_rows_only(self):
        choose = functools.partial(tiling.choose, "another device", 4096, 2048)
        self.assertEqual(choose(1, 6, 256).sizes, (16,))
        self.assertEqual(choose(2048, 6, 256).sizes, (64,))
        self.assertEqual(choose(32768, 6, 256).sizes, (128,))

    def test_table_of_the_device_is_used(self):
        tuned = tiling.choose("NVIDIA H200", 4096, 2048, 8192, 6, 256)
        ruled = tiling.choose("another device", 4096, 2048, 8192, 6, 256)
        self.assertNotEqual(tuned, ruled)

    def test_errors_name_the_field(self):
        good = {"out": 64, "rows": 16, "step": 64, "warps": 4, "stages": 3}
        for change in ({"out": 96}, {"rows": 8}, {"step": 32}, {"warps": 3}, {"stages": 0}):
            with pytest.raises(ValueError, match=next(iter(change))):
                tiling.Tiling(**(good | change))
        one, two, stepped = (
            tiling.Tiling(**(good | change))
            for change in ({}, {"rows": 32}, {"rows": 32, "step": 128})
        )
        for gate_up, down, text in (
            ((one,), (two,), "same rows"),
            ((one, two), (one, two), "decreasing"),
            ((stepped, one), (two, one), "one step"),
        ):
            with pytest.raises(ValueError, match=text):
                tiling.LayerTiling(gate_up, down)


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
    def test_implementations_say_why_they_are_refused(self):
        case = make_case(self.id())
        for change, options, text in (
            ({}, {"interpret": False}, "need an NVIDIA GPU"),
            ({}, {"implementation": "sm90"}, "D=256, expected a multiple of 512"),
            ({}, {"implementation": "sm90", "interpret": False}, "need an NVIDIA GPU"),
            ({"x": case.x.astype("f4")}, {}, "x is float32"),
            ({"slab": make_case(self.id(), weights_format="fp8").slab}, {}, "slab 0 is fp8"),
            ({"slab": make_case(self.id(), expert_width=96).slab}, {}, "F=96"),
        ):
            options = {"implementation": "portable", "interpret": True} | options
            with pytest.raises(NotImplementedError, match=text):
                run(dataclasses.replace(case, **change), **options)
        with pytest.raises(ValueError, match="'fast'"):
            run(case, implementation="fast")

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
            (wrong(where=case.where[:0]), r"where is int32\[0\], expected int32 \[E\] with E >= 1"),
            (wrong(slab=slab(format="int4")), "'int4'"),
            (
                wrong(slab=slab(gate_up=case.slab.gate_up[:, :, :64])),
                r"gate_up is uint8\[8, 256, 64\]",
            ),
            (wrong(slab=slab(down_scale=None)), "down_scale is None"),
            (wrong(slab=slab(format="fp8")), "float8_e4m3fn"),
            (
                wrong(slab=slab(scale_range=np.zeros((8, 2), np.uint8))),
                r"expected uint8\[8, 2, 2\]",
            ),
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
        for shape in ((2, 4), (2, 0, 4)):
            with pytest.raises(
                ValueError, match=r"slots has shape .*, expected \[T, k, D\] with k"
            ):
                combine_slots(jnp.zeros(shape), jnp.zeros((2, 4)))


def make_slab_of_odd_width():
    u8 = functools.partial(np.zeros, dtype=np.uint8)
    return ExpertSlab(u8((1, 96, 16)), u8((1, 96, 1)), u8((1, 32, 24)), u8((1, 32, 1)), "fp4")


if __name__ == "__main__":
    absltest.main()
