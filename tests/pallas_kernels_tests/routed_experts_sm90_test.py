"""The Hopper kernels of the routed experts: interpreted, lowered for CUDA, and on a GPU."""

import dataclasses
import functools
import itertools
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import codecs, specs, support
from pallas_kernels.codecs import host
from pallas_kernels.routed_experts import (
    ExpertSlab,
    arrange,
    expert_slots,
    ordering,
    sm90,
    sm90_fragments,
    sm90_kernel,
    tiling,
    wide_experts,
    with_scale_range,
)

LIMIT = 1.5
SMALL = tiling.Schedule(sizes=(24, 32, 64), chunk=32, under_way=1, stages=2)
# Errors against float32 arithmetic on the same codes; results are rounded to bfloat16.
ERROR_LIMIT = 2e-3


def make_slab(rng, experts, width, hidden):
    shapes = ((2 * width, hidden), (hidden, width))
    arrays = []
    for rows, channels in shapes:
        arrays.append(rng.integers(0, 256, (experts, rows, channels // 2), np.uint8))
        arrays.append(rng.integers(118, 122, (experts, rows, channels // 32), np.uint8))
    return ExpertSlab(*arrays, "fp4")


@dataclasses.dataclass(frozen=True)
class Case:
    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    slab: ExpertSlab


def make_case(name, tokens, experts=2, k=2, width=512, hidden=512):
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    x = rng.standard_normal((tokens, hidden)).astype(jnp.bfloat16)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype("i4")
    weights = rng.random(ids.shape).astype("f4") + 0.1
    return Case(x, ids, weights, make_slab(rng, experts, width, hidden))


def run(case, implementation, *, slabs=None, where=None, slots=None, **options):
    """Not jitted around the interpreter: its callbacks need the threads of the computation."""
    call = functools.partial(
        expert_slots, limit=LIMIT, implementation=implementation, slots=slots, **options
    )
    call = call if options.get("interpret") else jax.jit(call)
    experts = case.slab.experts
    where = np.arange(experts, dtype="i4") if where is None else where
    slabs = (case.slab,) if slabs is None else slabs
    arrays = (case.x, case.ids, case.weights, slabs, where)
    return np.asarray(call(*jax.tree.map(jnp.asarray, arrays)))


def relative(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


def product_inputs(rng, rows, channels, outputs):
    """One tile of one expert for the down kernel: x, FP8 operands, codes and scales of weights."""
    x = (rng.standard_normal((rows, channels)) * 2.0 ** rng.integers(-3, 4, (rows, 1))).astype("f4")
    codes, scales = codecs.quantize_fp8(jnp.asarray(x), 128)
    weight = rng.integers(0, 256, (1, outputs, channels // 2), np.uint8)
    weight_scale = rng.integers(110, 124, (1, outputs, channels // 32), np.uint8)
    return x, codes, codecs.decode_e8m0(scales), weight, weight_scale


def multiply(codes, scales, weight, weight_scale, schedule, *, interpret):
    """Rows of codes times the expert's weights, by the kernel: bf16 [rows, outputs]."""
    rows = codes.shape[0]
    places = -(-rows // 8) * 8 + schedule.rows
    x = jnp.zeros((places, codes.shape[1]), jnp.float8_e4m3fn)
    x = x.at[:rows].set(sm90_fragments.reorder(codes, "fp8"))
    x_scale = jnp.zeros((scales.shape[1], places), jnp.float32).at[:, :rows].set(scales.T)
    tiles = [jnp.asarray([value], jnp.int32) for value in (0, 0, rows, 1)]
    product = sm90_kernel.Product("fp8", None, schedule, 2 if interpret else 132, interpret)
    bands = sm90.bands(jnp.asarray([[weight_scale.min(), weight_scale.max()]]))
    weight, weight_scale = jnp.asarray(weight), jnp.asarray(weight_scale)
    out = sm90_kernel.grouped_product(
        product, x, x_scale, weight, weight_scale, *bands, tuple(tiles), None
    )
    return np.asarray(out[:rows])


class FormatTest(parameterized.TestCase):
    def test_table_bytes_are_e5m2(self):
        """Magnitudes of every code at every step of a band."""
        for step in range(1, sm90_fragments.BAND + 1):
            words = [slope * step + base for slope, base in sm90_fragments.FP8_TABLE]
            table = np.array(words, np.uint32).view(np.uint8).view(ml_dtypes.float8_e5m2)
            wanted = host.E2M1_VALUES[:8] * 2.0 ** (step - 14)
            np.testing.assert_array_equal(table.astype("f8"), wanted)

    @parameterized.parameters("fp8", "bf16")
    def test_channel_order_is_that_of_the_operands(self, kind):
        """Thread quad q holds the channels of its 16 bytes of a row, in wgmma's places of it."""
        order = sm90_fragments.channel_order(kind)
        size = sm90_fragments.BLOCKS[kind]
        self.assertEqual(sorted(order), list(range(size)))
        group = 4 if kind == "fp8" else 2  # neighbours along the contraction that a quad holds
        quads = np.arange(size) // group % 4
        np.testing.assert_array_equal(order // (size // 4), quads)
        x = np.arange(3 * size, dtype="f4").reshape(1, -1)
        got = np.asarray(sm90_fragments.reorder(jnp.asarray(x), kind)).reshape(3, size)
        np.testing.assert_array_equal(got[1], size + order)

    @parameterized.product(order=("fp8", "bf16", None), quantize=(False, True))
    def test_arrange_gathers_rounds_and_reorders(self, order, quantize):
        rng = np.random.default_rng(1)
        x = rng.standard_normal((9, 512)) * 2.0 ** rng.integers(-20, 20, (9, 4)).repeat(128, 1)
        x[3, :128] = 0
        x = jnp.asarray(x, jnp.bfloat16)
        source = jnp.asarray(rng.integers(0, 9, 40), jnp.int32)
        used = jnp.asarray([37], jnp.int32)
        rows, scales = arrange.arrange(
            x, source, used, order=order, quantize=quantize, interpret=True
        )
        wanted, wanted_scales = codecs.quantize_fp8(x, 128) if quantize else (x, None)
        wanted = wanted if order is None else sm90_fragments.reorder(wanted, order)
        picked = np.asarray(source)[:37]
        np.testing.assert_array_equal(
            np.asarray(rows[:37], np.float32), np.asarray(wanted, np.float32)[picked]
        )
        if quantize:
            wanted_scales = np.asarray(codecs.decode_e8m0(wanted_scales))[picked].T
            np.testing.assert_array_equal(np.asarray(scales)[:, :37], wanted_scales)

    def test_put_back_writes_the_rows_of_its_places_only(self):
        rng = np.random.default_rng(2)
        y, slots = (rng.standard_normal((rows, 1024)).astype(jnp.bfloat16) for rows in (88, 50))
        source = np.full(88, 50, "i4")
        filled = rng.permutation(70)[:30]
        source[filled] = rng.permutation(50)[:30]
        y[source == 50] = np.nan
        wanted = slots.copy()
        wanted[source[filled]] = y[filled]
        used = jnp.asarray([70], jnp.int32)
        operands = map(jnp.asarray, (y, source, used, slots))
        got = arrange.put_back(*operands, interpret=True)
        np.testing.assert_array_equal(np.asarray(got).view("u2"), wanted.view("u2"))

    def test_wide_experts_span_more_than_a_band(self):
        slab = make_slab(np.random.default_rng(0), 4, 512, 512)
        slab.gate_up_scale[1, 5, 3] = 121 - 26
        slab.down_scale[2, 7, 1] = 121 - 26
        slab.down_scale[3, 7, 1] = 121 - 27
        self.assertEqual(wide_experts(slab).tolist(), [False, False, False, True])
        for other in (jax.tree.map(jnp.asarray, slab), with_scale_range(slab)):
            self.assertEqual(wide_experts(other).tolist(), [False, False, False, True])
        wanted = [[[118, 121], [118, 121]], [[95, 121], [118, 121]]]
        self.assertEqual(with_scale_range(slab).scale_range[:2].tolist(), wanted)


class PlacesTest(parameterized.TestCase):
    @parameterized.product(tokens=(1, 40, 300), tile=(32, 64))
    def test_every_row_has_a_place_in_one_tile(self, tokens, tile):
        rng = np.random.default_rng(tokens + tile)
        ids = rng.integers(-1, 7, (tokens, 3)).astype("i4")
        where = np.array([4, -1, 0, 1, 5, 2, 3], "i4")
        for first, experts in ((0, 6), (2, 3)):
            self.check(ids, where, first, experts, tile)

    def test_all_patterns_of_empty_experts(self):
        for pattern in itertools.product((0, 7, 40), repeat=3):
            ids = np.full((40, 3), -1, "i4")
            for expert, rows in enumerate(pattern):
                ids[40 - rows :, expert] = expert
            self.check(ids, np.arange(3, dtype="i4"), 0, 3, 32)

    def check(self, ids, where, first, experts, tile):
        total = int(np.sum(where >= 0))
        order = ordering.order_rows(jnp.asarray(ids), jnp.asarray(where), total)
        places = jax.jit(sm90.place_rows, static_argnums=(1, 2, 3))(order, first, experts, tile)
        flat = ids.reshape(-1)
        owner = np.where(flat >= 0, where[np.maximum(flat, 0)], -1)
        served = (owner >= first) & (owner < first + experts)
        position, source = np.asarray(places.position), np.asarray(places.source)
        np.testing.assert_array_equal(position >= 0, served)
        wanted_source = np.full(source.size, flat.size)
        wanted_source[position[served]] = np.flatnonzero(served)
        np.testing.assert_array_equal(source, wanted_source)
        expert, start, count, used = (np.asarray(part) for part in places.tiles)
        found = {}
        for index in range(int(used[0])):
            self.assertBetween(count[index], 1, tile)
            self.assertEqual(start[index] % sm90_kernel.ROW_GRAIN, 0)
            self.assertLessEqual(start[index] + tile, source.size)
            for place in range(start[index], start[index] + count[index]):
                self.assertNotIn(place, found)
                found[place] = expert[index] + first
        wanted = {int(position[row]): int(owner[row]) for row in np.flatnonzero(served)}
        self.assertEqual(found, wanted)
        self.assertBetween(int(places.used[0]), max(found, default=-1) + 1, source.size - tile)


class InterpretedTest(parameterized.TestCase):
    """The kernels under Pallas' GPU interpreter, memory filled with NaN.

    Copies, barriers, tiles, bands and stores are the real ones; what is below Pallas (decoding in
    registers, wgmma, stmatrix) has plain twins there and is tested on a GPU.
    """

    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(tiling, "schedule", return_value=SMALL))

    def check(self, case, quantize_input, **options):
        got = run(case, "sm90", quantize_input=quantize_input, interpret=True, **options)
        wanted = run(case, "reference", quantize_input=quantize_input, **options)
        finite = np.isfinite(wanted.astype("f4"))
        np.testing.assert_array_equal(np.isfinite(got.astype("f4")), finite)
        self.assertLess(relative(got[finite], wanted[finite]), ERROR_LIMIT)
        return got

    def test_fp8_agrees_with_the_reference(self):
        case = make_case(self.id(), tokens=4, experts=1, k=1)
        case.ids[2] = -1
        case.x[2] = np.nan
        got = self.check(case, True)
        self.assertFalse(got[2].any())

    @pytest.mark.slow
    def test_bf16_agrees_with_the_reference(self):
        self.check(make_case(self.id(), tokens=3), False)

    @pytest.mark.slow
    def test_scales_of_several_bands(self):
        case = make_case(self.id(), tokens=3)
        case.slab.gate_up_scale[0, ::3] -= 40
        case.slab.down_scale[1, :, ::2] -= 60
        got = self.check(case, True)
        known = run(
            case, "sm90", slabs=(with_scale_range(case.slab),), quantize_input=True, interpret=True
        )
        np.testing.assert_array_equal(known.view("u2"), got.view("u2"))

    @pytest.mark.slow
    def test_tiles_of_both_sizes_and_an_expert_without_rows(self):
        case = make_case(self.id(), tokens=70, experts=3, k=1)
        case.ids[:] = 2
        case.ids[5] = 0
        self.check(case, True)

    @pytest.mark.slow
    def test_bits_do_not_depend_on_slabs_calls_or_rows(self):
        case = make_case(self.id(), tokens=5, experts=3)
        options = {"quantize_input": True, "interpret": True}
        whole = run(case, "sm90", **options)
        slots = None
        for experts in ([2, 0], [1]):
            where = np.full(3, -1, "i4")
            where[experts] = np.arange(len(experts))
            piece = jax.tree.map(lambda array, rows=experts: array[rows], case.slab)
            slots = run(case, "sm90", slabs=(piece,), where=where, slots=slots, **options)
        np.testing.assert_array_equal(slots.view("u2"), whole.view("u2"))
        rows = [4, 0, 3]
        some = {name: getattr(case, name)[rows] for name in ("x", "ids", "weights")}
        got = run(dataclasses.replace(case, **some), "sm90", **options)
        np.testing.assert_array_equal(got.view("u2"), whole[rows].view("u2"))

    @pytest.mark.slow
    def test_no_races(self):
        params = plgpu.InterpretGPUParams(detect_races=True)
        with mock.patch.object(sm90_kernel.plgpu, "InterpretGPUParams", return_value=params):
            self.check(make_case(self.id(), tokens=2), True)
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

        self.assertFalse(gpu_callbacks.get_races().races_found)

    @parameterized.parameters(140, 254)
    def test_fp8_weights_are_exact_under_every_scale(self, top):
        check_weights(top, np.arange(5, 512, 32), 128, SMALL, interpret=True)

    def test_leaving_out_a_rounding_or_a_scale_shows(self):
        self.check_emulations(SMALL, rows=5, channels=512, outputs=128, interpret=True)

    def check_emulations(self, schedule, rows, channels, outputs, interpret):
        rng = np.random.default_rng(5)
        x, codes, scales, weight, weight_scale = product_inputs(rng, rows, channels, outputs)
        got = multiply(codes, scales, weight, weight_scale, schedule, interpret=interpret)
        check_emulations(self, got, x, codes, scales, weight, weight_scale)


def check_weights(top, channels, outputs, schedule, interpret):
    """One-hot rows read FP4 weights under all scale bytes up to `top`: 140 is six bands, 254 ten.

    Weights of at least 2^(top - 266) are exact, if they are normal float32 numbers; others are
    multiples of 2^(top - 289) on a GPU, 0 on a CPU. With 512 channels and 256 outputs every byte of
    codes meets every scale.
    """
    weight = np.tile(np.arange(256, dtype=np.uint8), (1, outputs, 1))
    group, row = np.arange(16), np.arange(outputs)[:, None]
    scale = ((row + 53 * group) % (top + 1)).astype(np.uint8)[None]
    scale[0, 0, :2] = 0, top
    parts = []
    for some in np.array_split(channels, -(-len(channels) // schedule.rows)):
        codes = jnp.asarray(np.arange(512) == some[:, None], jnp.float8_e4m3fn)
        ones = jnp.ones((len(some), 4), jnp.float32)
        parts.append(multiply(codes, ones, weight, scale, schedule, interpret=interpret))
    got = np.concatenate(parts).T.astype("f8")
    with np.errstate(over="ignore"):
        exact = host.decode_fp4(weight, scale)[0][:, channels]
    wanted = exact.astype(jnp.bfloat16).astype("f8")
    limit, step = 2.0 ** (top - 266), 2.0 ** (top - 289)
    kept = np.abs(wanted) >= limit
    assert set(kept.ravel()) == {True, False}
    np.testing.assert_array_equal(got[kept], wanted[kept])
    rounded = 0 if interpret else np.round(wanted / step) * step
    np.testing.assert_array_equal(got[~kept], np.where(kept, 0, rounded)[~kept])


def check_emulations(test, got, x, codes, scales, weight, weight_scale):
    """The product is that of its codes and scales, and of nothing that leaves one out."""
    codes = np.asarray(codes, np.float32)
    scales = np.array(scales)

    def emulate(scales, weight_scale, x=None):
        x = codes * np.repeat(scales, 128, axis=1) if x is None else x
        return x.astype("f8") @ host.decode_fp4(weight, weight_scale)[0].astype("f8").T

    test.assertLess(relative(got, emulate(scales, weight_scale)), ERROR_LIMIT)
    test.assertGreater(relative(got, emulate(scales, weight_scale, x)), ERROR_LIMIT)
    one_less = scales.copy()
    one_less[1, 2] = 1
    test.assertGreater(relative(got, emulate(one_less, weight_scale)), ERROR_LIMIT)
    one_less = weight_scale.copy()
    one_less[0, 3, 1] = 127
    test.assertGreater(relative(got, emulate(scales, one_less)), ERROR_LIMIT)


class LoweringTest(parameterized.TestCase):
    """Everything but the GPU's own compiler, at the released shapes."""

    @pytest.fixture(autouse=True)
    def _fixtures(self, lower_for_gpu):
        self.lower = lower_for_gpu

    @parameterized.product(quantize_input=(False, True))
    def test_flash(self, quantize_input):
        self.check("flash", 8192, quantize_input)

    def check(self, name, tokens, quantize_input):
        spec, k = specs.SPECS[name], specs.SPECS[name].experts_per_token

        def array(dtype, *shape):
            return jax.ShapeDtypeStruct(shape, dtype)

        n, d, f = spec.experts, spec.hidden, spec.expert_width
        u8 = functools.partial(array, jnp.uint8)
        slab = ExpertSlab(
            u8(n, 2 * f, d // 2), u8(n, 2 * f, d // 32), u8(n, d, f // 2), u8(n, d, f // 32), "fp4"
        )
        call = functools.partial(
            expert_slots, limit=10.0, quantize_input=quantize_input, implementation="sm90"
        )
        with mock.patch.object(support, "unsupported", return_value=None):
            text = self.lower(
                call,
                array(jnp.bfloat16, tokens, d),
                array(jnp.int32, tokens, k),
                array(jnp.float32, tokens, k),
                (slab,),
                array(jnp.int32, n),
            )
        self.assertEqual(text.count("mosaic_gpu_v2"), 2)


@pytest.mark.slow
class ProLoweringTest(LoweringTest):
    @parameterized.product(quantize_input=(False, True), tokens=(1, 32768))
    def test_pro(self, quantize_input, tokens):
        self.check("pro", tokens, quantize_input)


class ChoiceTest(parameterized.TestCase):
    @parameterized.parameters(
        (8192, True, "sm90"), (8192, False, "sm90"), (1024, True, "sm90"),
        (2048, False, "portable"), (128, True, "portable"),
    )  # fmt: skip
    def test_rows_and_precision_decide(self, tokens, quantize_input, wanted):
        """Of the shapes of the call, never of the routing."""
        chosen = []

        def record(name):
            return lambda *args, **kwargs: chosen.append(name)

        slab = jax.eval_shape(lambda: make_abstract_slab(specs.FLASH))
        with (
            mock.patch.object(support, "unsupported", return_value=None),
            mock.patch.object(sm90, "expert_slots", record("sm90")),
            mock.patch("pallas_kernels.routed_experts.portable.expert_slots", record("portable")),
        ):
            expert_slots(
                jax.ShapeDtypeStruct((tokens, 4096), jnp.bfloat16),
                jax.ShapeDtypeStruct((tokens, 6), jnp.int32),
                jax.ShapeDtypeStruct((tokens, 6), jnp.float32),
                (slab,),
                jax.ShapeDtypeStruct((256,), jnp.int32),
                limit=10.0,
                quantize_input=quantize_input,
            )
        self.assertEqual(chosen, [wanted])

    def test_schedules_are_checked(self):
        good = {"sizes": (96, 192), "chunk": 96, "under_way": 1, "stages": 4}
        for change, text in (
            ({"sizes": (96, 320)}, "multiple of 32 up to 256"),
            ({"sizes": (96, 208)}, "multiple of 32 up to 256"),
            ({"sizes": (192, 96)}, "ascending"),
            ({"sizes": ()}, "ascending"),
            ({"chunk": 20}, "chunk=20: 96 rows"),
            ({"under_way": 3}, "under_way=3"),
            ({"stages": 1}, "stages=1"),
        ):
            with pytest.raises(ValueError, match=text):
                tiling.Schedule(**(good | change))

    def test_table_of_the_device_is_used(self):
        tuned = tiling.schedule("NVIDIA H200", 4096, 2048, "fp8")
        self.assertNotEqual(tuned, tiling.schedule("another device", 4096, 2048, "fp8"))


def make_abstract_slab(spec):
    n, d, f = spec.experts, spec.hidden, spec.expert_width
    shapes = ((n, 2 * f, d // 2), (n, 2 * f, d // 32), (n, d, f // 2), (n, d, f // 32))
    return ExpertSlab(*(jnp.zeros(shape, jnp.uint8) for shape in shapes), "fp4")


@pytest.mark.gpu1
class CompiledTest(parameterized.TestCase):
    """The compiled kernels on this machine's GPU."""

    def setUp(self):
        super().setUp()
        device = support.default_device()
        if reason := support.unsupported("sm90", device):
            self.skipTest(reason)

    @parameterized.parameters(140, 254)
    def test_fp8_weights_are_exact_under_every_scale(self, top):
        schedule = tiling.schedule("NVIDIA H200", 4096, 2048, "fp8")
        check_weights(top, np.arange(512), 256, schedule, interpret=False)

    def test_leaving_out_a_rounding_or_a_scale_shows(self):
        rng = np.random.default_rng(6)
        inputs = product_inputs(rng, 100, 2048, 256)
        schedule = tiling.schedule("NVIDIA H200", 4096, 2048, "fp8")
        got = multiply(*inputs[1:], schedule, interpret=False)
        check_emulations(self, got, *inputs)

    @parameterized.product(tokens=(1, 300, 2000), quantize_input=(False, True))
    def test_agrees_with_portable_and_keeps_its_bits(self, tokens, quantize_input):
        case = make_case(self.id(), tokens, experts=8, k=6, width=2048, hidden=4096)
        got = run(case, "sm90", quantize_input=quantize_input)
        wanted = run(case, "portable", quantize_input=quantize_input)
        # h on the other side of a step of E4M3 is another number.
        self.assertLess(relative(got, wanted), 6e-3 if quantize_input else ERROR_LIMIT)
        order, slots = np.random.default_rng(3).permutation(8), None
        for experts in (order[:3], order[3:]):
            where = np.full(8, -1, "i4")
            where[experts] = np.arange(len(experts))
            piece = jax.tree.map(lambda array, rows=experts: array[rows], case.slab)
            slots = run(
                case, "sm90", slabs=(piece,), where=where, slots=slots,
                quantize_input=quantize_input,
            )  # fmt: skip
        np.testing.assert_array_equal(slots.view("u2"), got.view("u2"))
        half = dataclasses.replace(case, ids=np.where(case.ids % 2 == 0, case.ids, -1))
        fewer = run(half, "sm90", quantize_input=quantize_input)
        kept = half.ids >= 0
        np.testing.assert_array_equal(fewer.view("u2")[kept], got.view("u2")[kept])


if __name__ == "__main__":
    absltest.main()
