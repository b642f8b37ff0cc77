"""Mistakes that public implementations of this model made: each one has to break a golden limit.

A row names the trap, the layer that shows it (0 window-only, 1 CSA, 2 HCA, all hash-routed, 3 CSA
score-routed) and a function that puts the mistake in place. `SOUND` holds rewrites that change
nothing, which shows that it is the mistake that is caught and not the patch. Traps that no
comparison of values can show are asserted directly below the table.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from ds4jax import attention, cache, layers, model, moe, quant
from ds4jax.config import SIMULATIONS, ConfigError, LayerKind, ModelConfig, Numerics
from ds4jax.hyper import abstract_connection, abstract_head
from pallas_kernels import (
    codecs,
    compressor,
    hyper_connections,
    indexer,
    rotary,
    routed_experts,
    sparse_attention,
    top_k,
    window_attention,
)

SWA, CSA, HCA, SCORED = range(4)
ROPE = rotary.apply_rope  # as it is before a trap replaces it
PLAIN = Numerics("float32")
QUANTISED = Numerics("float32", SIMULATIONS)
CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "models"


@dataclasses.dataclass(frozen=True)
class Row:
    """One mistake: `make(patch)` installs it, `config` changes configuration values instead."""

    trap: str
    what: str
    layer: int
    make: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    config: dict = dataclasses.field(default_factory=dict)
    in_parts: tuple[str, ...] = ("attn",)  # the parts of a block that see `config`
    numerics: Numerics = PLAIN
    chunks: tuple[int, ...] = (128, 6)
    fresh: tuple[str, ...] = ("attention",)  # the programs that the mistake is in

    @property
    def id(self) -> str:
        return f"{self.trap}-{self.what.replace(' ', '_')}"


def site(block, streams):
    inputs, write, mix = block.hc_attn.pre(streams)
    return block.attn_norm(inputs), write, mix


def attend(attention, inputs, state, chunk, numerics):
    return attention(inputs, state, chunk, numerics)


def join(block, outputs, streams, write, mix):
    return block.hc_attn.post(outputs, streams, write, mix)


SMALL_JITS = {
    "site": jax.jit(site),
    "attention": jax.jit(attend, static_argnames="numerics"),
    "join": jax.jit(join),
}


def with_mistake(parts, fresh):
    """The programs of a layer, those in `fresh` compiled anew: they see what a test patched."""
    # No optimisation: each runs once or twice, compiling is what takes the time.
    options = {"compiler_options": {"xla_backend_optimization_level": 0}}
    jits = SMALL_JITS | {"route": parts.route, "finish": parts.finish}
    for name in fresh:
        plain = jits[name].__wrapped__
        static = {} if name in ("site", "join") else {"static_argnames": "numerics"}
        # A new function: jits of one function share what they compiled.
        again = functools.wraps(plain)(lambda *args, plain=plain: plain(*args))
        jits[name] = jax.jit(again, **static, **options)

    def attend_and_select(block, streams, state, chunk, numerics):
        inputs, write, mix = jits["site"](block, streams)
        outputs, state, chosen = jits["attention"](block.attn, inputs, state, chunk, numerics)
        return jits["join"](block, outputs, streams, write, mix), state, chosen

    return dataclasses.replace(
        parts, attend=attend_and_select, route=jits["route"], finish=jits["finish"]
    )


def wrap(module, name, change):
    """A `make` that replaces module.name by change(original)."""
    return lambda patch: patch.setattr(module, name, change(getattr(module, name)))


def ratio_of_frequencies(ratio):
    return wrap(
        attention, "rope_frequencies", lambda original: lambda config, _: original(config, ratio)
    )


def frequencies(change):
    return wrap(
        attention,
        "rope_frequencies",
        lambda original: lambda config, ratio: original(change(config), ratio),
    )


def without_yarn(config):
    scaling = dataclasses.replace(config.rope_scaling, factor=1.0)
    return dataclasses.replace(config, rope_scaling=scaling)


def entries_with_other_base(patch):
    """Queries and window with the right table, compressed entries with the window layers'."""
    original = attention.Attention.rope

    def rope(self, positions):
        if positions.shape[0] >= 128:
            return original(self, positions)
        return layers.rope_table(positions, layers.rope_frequencies(self.config, 0))

    patch.setattr(attention.Attention, "rope", rope)


def half_split_rope(x, table, *, inverse=False):
    rotated = 2 * table[0].shape[-1]
    plain = x.shape[-1] - rotated
    order = np.arange(rotated).reshape(2, -1).T.reshape(-1)
    tail = x[..., plain:][..., order]
    turned = ROPE(tail, table, inverse=inverse)[..., np.argsort(order)]
    return jnp.concatenate([x[..., :plain], turned], axis=-1)


def first_channels_rope(x, table, *, inverse=False):
    rotated = 2 * table[0].shape[-1]
    turned = ROPE(x[..., :rotated], table, inverse=inverse)
    return jnp.concatenate([turned, x[..., rotated:]], axis=-1)


def no_inverse_rope(x, table, *, inverse=False):
    return x if inverse else ROPE(x, table)


def table_times(factor):
    return wrap(
        attention,
        "rope_table",
        lambda original: lambda *args: tuple(part * factor for part in original(*args)),
    )


def bf16_table(original):
    return lambda *args: tuple(
        codecs.round_to(part, jnp.bfloat16).astype(jnp.float32) for part in original(*args)
    )


def entry_positions(change):
    return wrap(
        attention.Attention,
        "entry_positions",
        lambda original: lambda self, *args: change(original(self, *args), self.ratio),
    )


def keyword(name, value):
    """A change of one keyword argument."""
    return lambda original: lambda *args, **given: original(*args, **{**given, name: value})


def transposed_comb(original):
    return lambda y, streams, weights, comb: original(y, streams, weights, jnp.swapaxes(comb, 1, 2))


def bf16_maps(original):
    def post(y, streams, weights, comb):
        low = [codecs.round_to(map_, jnp.bfloat16).astype(jnp.float32) for map_ in (weights, comb)]
        return original(y, streams, *low)

    return post


def changed_maps(change):
    def outer(original):
        def pre(*args, **options):
            u, weights, comb = original(*args, **options)
            return change(u, weights, comb)

        return pre

    return wrap(hyper_connections, "pre", outer)


def row_step_at_the_end(u, weights, comb):
    return u, weights, comb / jnp.sum(comb, axis=2, keepdims=True)


def late(original):
    """Blocks become visible one token after they close."""

    def select(queries, keys, weights, position, **options):
        position = position - 1
        return original(queries, keys, weights, position, **options)

    return select


def own_chunk_only(original):
    """The indexer forgets the entries of earlier chunks."""

    def select(queries, keys, weights, position, *, k, ratio):
        chosen = original(queries, keys, weights, position, k=k, ratio=ratio)
        return jnp.where(chosen < position // ratio, -1, chosen)

    return select


def padding_enters_the_block(original):
    """The true length is not passed on."""

    def compress(values, gates, carry, position, length, **options):
        return original(values, gates, carry, position, jnp.int32(values.shape[0]), **options)

    return compress


def one_sided_transform(patch):
    """Hadamard on queries only: keys come as rows [N, Di], queries as [T, Hi, Di]."""
    original = indexer.mix_channels
    patch.setattr(
        indexer,
        "mix_channels",
        lambda x, *, quantise: original(x, quantise=quantise) if x.ndim == 3 else x,
    )


def no_transform(patch):
    patch.setattr(indexer, "mix_channels", lambda x, *, quantise: x)


def no_relu(original):
    """sum_h w_h (q_h . k): relu(x) - relu(-x) = x."""

    def select(queries, keys, weights, position, *, k, ratio):
        both = [
            indexer.indexer_scores(sign * queries, keys, weights, position, ratio=ratio)
            for sign in (jnp.float32(1), jnp.float32(-1))
        ]
        return top_k.top_k(both[0] - both[1], k)

    return select


def relu_after_weighting(original):
    def select(queries, keys, weights, position, *, k, ratio):
        both = [
            indexer.indexer_scores(sign * queries, keys, weights, position, ratio=ratio)
            for sign in (jnp.float32(1), jnp.float32(-1))
        ]
        invisible = jnp.isneginf(both[0])
        scores = jnp.where(invisible, -jnp.inf, jnp.maximum(both[0] - both[1], 0))
        return top_k.top_k(scores, k)

    return select


def no_selection(original):
    def select(queries, keys, weights, position, *, k, ratio):
        return original(queries, keys, weights, position, k=keys.shape[0], ratio=ratio)

    return select


def experts_by_formula(clamp):
    """Routed experts as one dense formula with its own clamp."""

    def slots(x, ids, weights, slabs, where, *, limit, quantize_input):
        del quantize_input
        (slab,) = slabs
        gate_up = codecs.decode_fp4(slab.gate_up, slab.gate_up_scale, jnp.float32)
        down = codecs.decode_fp4(slab.down, slab.down_scale, jnp.float32)
        exact = {"precision": jax.lax.Precision.HIGHEST}
        gate, up = jnp.split(jnp.einsum("td,efd->tef", x, gate_up, **exact), 2, axis=2)
        each = jnp.einsum("tef,edf->ted", clamp(gate, up, limit), down, **exact)
        rows = jnp.maximum(where[ids], 0)
        return jnp.take_along_axis(each, rows[:, :, None], axis=1) * weights[:, :, None]

    return lambda patch: patch.setattr(routed_experts, "expert_slots", slots)


def right_clamp(gate, up, limit):
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def bf16_router(original):
    def product(x, weight):
        return original(
            *(codecs.round_to(part.astype(jnp.float32), jnp.bfloat16) for part in (x, weight))
        )

    return product


def biased_weights(patch):
    def call(self, inputs, tokens):
        del tokens
        scores = jnp.sqrt(jax.nn.softplus(layers.wide_product(inputs, self.weight.codes)))
        scores = scores + self.bias[None, :]
        ids = top_k.top_k(scores, self.config.num_experts_per_tok)
        chosen = jnp.take_along_axis(scores, ids, axis=-1)
        weights = chosen / jnp.sum(chosen, axis=-1, keepdims=True)
        return ids, weights * self.config.routed_scaling_factor

    patch.setattr(moe.Router, "__call__", call)


def scored_hash_layer(patch):
    call = moe.Router.__call__

    def scored(self, inputs, tokens):
        bias = jnp.zeros(self.config.n_routed_experts, jnp.float32)
        return call(dataclasses.replace(self, bias=bias, tid2eid=None), inputs, tokens)

    patch.setattr(moe.Router, "__call__", scored)


def replaced(owner, name, value):
    return lambda patch: patch.setattr(owner, name, value)


def quantised_wo_a(original):
    return lambda self, heads, numerics: original(self, codecs.fake_quant_fp8(heads, 128), numerics)


def scales_as_numbers(original):
    """The E8M0 byte taken for its integer value."""

    def decode(codes, scales, dtype):
        ones = jnp.full(scales.shape, 127, jnp.uint8)
        grid = scales.astype(jnp.float32) / 127
        grid = jnp.repeat(jnp.repeat(grid, 128, axis=0), 128, axis=1)
        return (
            original(codes, ones, jnp.float32) * grid[: codes.shape[0], : codes.shape[1]]
        ).astype(dtype)

    return decode


def fnuz(original):
    """The other 8-bit dialect: the same codes mean half the value."""
    return lambda codes, scales, dtype: original(codes, scales, dtype) * jnp.asarray(0.5, dtype)


def fp8_rounding(block, change):
    """Replaces the FP8 rounding of one block size: 128 is q1, 64 is q2."""

    def outer(original):
        return lambda x, size: change(original, x) if size == block else original(x, size)

    return wrap(codecs, "fake_quant_fp8", outer)


def bf16_rounding(original, x):
    return codecs.round_to(codecs.round_to(x, jnp.bfloat16), x.dtype)


def fp8_instead(original):
    return lambda x: codecs.fake_quant_fp8(x, 128)


def unclamped_shared_expert(patch):
    call = moe.SharedExpert.__call__

    def unclamped(self, inputs, numerics):
        return call(dataclasses.replace(self, limit=float("inf")), inputs, numerics)

    patch.setattr(moe.SharedExpert, "__call__", unclamped)


def clamp_gate_below(gate, up, limit):
    return jax.nn.silu(jnp.clip(gate, -limit, limit)) * jnp.clip(up, -limit, limit)


def clamp_product(gate, up, limit):
    return jnp.clip(jax.nn.silu(gate) * up, -limit, limit)


def same_output(patch):
    original = attention.Attention.output
    patch.setattr(attention.Attention, "output", lambda *args: original(*args))


def expert_row(trap, what, layer, make):
    """A mistake in the second half of a layer; the first half is taken as compiled."""
    return Row(trap, what, layer, make, fresh=("route", "finish"))


TRAPS = [
    Row("R1", "window layer with the compressed base", SWA, ratio_of_frequencies(4)),
    Row("R1", "entries with another base than queries", CSA, entries_with_other_base),
    Row("R8", "yarn lost in hca", HCA, frequencies(without_yarn)),
    Row("R3", "half-split pairs", SWA, replaced(rotary, "apply_rope", half_split_rope)),
    Row("R4", "first channels", SWA, replaced(rotary, "apply_rope", first_channels_rope)),
    Row("R5", "no inverse rotation", SWA, replaced(rotary, "apply_rope", no_inverse_rope)),
    Row("R6", "mscale in the tables", SWA, table_times(0.1 * np.log(16) + 1)),
    Row("R7", "entries at their last token", HCA, entry_positions(lambda at, r: at + r - 1)),
    Row("R9", "tables in bfloat16", SWA, wrap(attention, "rope_table", bf16_table)),
    Row(
        "M1",
        "comb transposed",
        SWA,
        wrap(hyper_connections, "post", transposed_comb),
        fresh=("join",),
    ),
    Row(
        "M2", "19 iterations", SWA, config={"hc_sinkhorn_iters": 19}, in_parts=("hc_attn", "hc_ffn")
    ),
    Row(
        "M3",
        "post without factor 2",
        SWA,
        changed_maps(lambda u, w, comb: (u, w / 2, comb)),
        fresh=("site",),
    ),
    Row("M4", "maps in bfloat16", SWA, wrap(hyper_connections, "post", bf16_maps), fresh=("join",)),
    Row("C1", "csa blocks seen late", CSA, wrap(indexer, "select_entries", late)),
    Row("C2", "window too long", SWA, config={"sliding_window": 33}),
    Row(
        "C3",
        "only entries of the own chunk",
        CSA,
        wrap(indexer, "select_entries", own_chunk_only),
        chunks=(100, 34),
    ),
    Row(
        "C4",
        "padding enters the block",
        CSA,
        wrap(compressor, "compress", padding_enters_the_block),
        chunks=(99, 35),
    ),
    Row("I1", "hadamard on queries only", CSA, one_sided_transform),
    Row("I2", "no relu", CSA, wrap(indexer, "select_entries", no_relu)),
    Row("I3", "fp8", CSA, wrap(codecs, "fake_quant_fp4", fp8_instead), numerics=QUANTISED),
    expert_row("E1", "no clamp on the shared expert", SWA, unclamped_shared_expert),
    expert_row(
        "E2",
        "no clamp on routed experts",
        SWA,
        wrap(routed_experts, "expert_slots", keyword("limit", float("inf"))),
    ),
    expert_row("E2", "gate clamped below", SWA, experts_by_formula(clamp_gate_below)),
    expert_row("E3", "router in bfloat16", SCORED, wrap(moe, "wide_product", bf16_router)),
    expert_row("E4", "bias in the weights", SCORED, biased_weights),
    expert_row("E4", "hash layer routed by score", SWA, scored_hash_layer),
    Row("Q-a", "kv only in bfloat16", SWA, fp8_rounding(64, bf16_rounding), numerics=QUANTISED),
    Row("Q-b", "scale bytes as numbers", SWA, wrap(codecs, "decode_fp8", scales_as_numbers)),
    Row(
        "Q-d",
        "wo_a quantised",
        SWA,
        wrap(attention.Attention, "output", quantised_wo_a),
        numerics=QUANTISED,
    ),
]
SECOND_VIEWS = [
    Row("R1", "csa with the plain base", CSA, ratio_of_frequencies(0)),
    Row("R1", "hca with the plain base", HCA, ratio_of_frequencies(0)),
    Row("R1", "no yarn in csa", CSA, frequencies(without_yarn)),
    Row("R6", "mscale in csa", CSA, table_times(0.1 * np.log(16) + 1)),
    Row("R7", "csa entries at their index", CSA, entry_positions(lambda at, ratio: at // ratio)),
    Row("M2", "ends on a row step", SWA, changed_maps(row_step_at_the_end), fresh=("site",)),
    Row("M2", "eps of 1e-5", SWA, config={"hc_eps": 1e-5}, in_parts=("hc_attn", "hc_ffn")),
    Row(
        "M3",
        "post with eps",
        SWA,
        changed_maps(lambda u, w, comb: (u, w + 1e-3, comb)),
        fresh=("site",),
    ),
    Row("C1", "csa without a mask", CSA, wrap(indexer, "select_entries", keyword("ratio", 1))),
    Row(
        "C1",
        "hca blocks seen before they close",
        HCA,
        wrap(window_attention, "window_attention", keyword("ratio", 64)),
    ),
    Row("C2", "window too short in csa", CSA, config={"sliding_window": 31}),
    Row("C2", "no window but the token itself in hca", HCA, config={"sliding_window": 1}),
    Row("I2", "relu after the weights", CSA, wrap(indexer, "select_entries", relu_after_weighting)),
    Row("I2", "no selection", CSA, wrap(indexer, "select_entries", no_selection)),
    Row("I4", "fnuz values", SWA, wrap(codecs, "decode_fp8", fnuz)),
    expert_row("E2", "clamp after the product", SWA, experts_by_formula(clamp_product)),
]
SOUND = [
    Row("R7", "same positions", CSA, entry_positions(lambda at, ratio: at // ratio * ratio)),
    Row("I1", "no hadamard on either side", CSA, no_transform),
    Row("C3", "entries of all chunks", CSA, chunks=(100, 34)),
    Row("Q-d", "same output", SWA, same_output, numerics=QUANTISED),
    expert_row("E2", "experts by formula", SWA, experts_by_formula(right_clamp)),
]


def with_values(loaded, names, values):
    """The same weights, with configuration values changed in these parts of every block."""
    config = dataclasses.replace(loaded.config, **values)
    blocks = tuple(
        dataclasses.replace(
            block,
            **{name: dataclasses.replace(getattr(block, name), config=config) for name in names},
        )
        for block in loaded.transformer.blocks
    )
    transformer = dataclasses.replace(loaded.transformer, blocks=blocks, config=config)
    return dataclasses.replace(loaded, transformer=transformer)


@functools.cache
def compile_sound(single_layers, parts, numerics, layer):
    """Compiles what rows share before anything is patched: jits keep what they saw first."""
    single_layers.run(numerics, [layer], parts=with_mistake(parts, ()))


def keeps_limits(single_layers, parts, row, patch) -> bool:
    compile_sound(single_layers, parts, row.numerics, row.layer)
    loaded = single_layers.case.loaded
    if row.config:
        loaded = with_values(loaded, row.in_parts, row.config)
    row.make(patch)
    trace = single_layers.run(
        row.numerics,
        [row.layer],
        loaded=loaded,
        chunks=row.chunks,
        parts=with_mistake(parts, row.fresh),
    )
    if row.numerics == PLAIN:
        distance = single_layers.distances(trace, "out_noquant_f32", [row.layer])
        return distance.max() <= single_layers.limits["out_noquant_f32"]["rel_l2_per_position_max"]
    limits = single_layers.limits["out_quant_f32"]
    distance = single_layers.distances(trace, "out_quant_f32", [row.layer])
    median = limits["rel_l2_median_over_positions_per_layer"]
    above = limits["positions_per_layer_allowed_above_2e_3"]
    return np.median(distance) <= median and (distance > 2e-3).sum() <= above


@pytest.mark.parametrize("row", TRAPS, ids=lambda row: row.id)
def test_mistake_breaks_the_limits(row, single_layers, parts, monkeypatch):
    assert not keeps_limits(single_layers, parts, row, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("row", SECOND_VIEWS, ids=lambda row: row.id)
def test_second_view_of_a_mistake_breaks_the_limits(row, single_layers, parts, monkeypatch):
    assert not keeps_limits(single_layers, parts, row, monkeypatch)


@pytest.mark.parametrize("row", SOUND, ids=lambda row: row.id)
def test_patch_that_changes_nothing_keeps_the_limits(row, single_layers, parts, monkeypatch):
    assert keeps_limits(single_layers, parts, row, monkeypatch)


@pytest.mark.parametrize(
    ("layer", "field"),
    [
        (SWA, "window"),
        (CSA, "window"),
        (CSA, "compressed"),
        (CSA, "carry.partial_values"),
        (CSA, "carry.previous_values"),
        (CSA, "index_keys"),
        (CSA, "index_carry.partial_gates"),
        (CSA, "index_carry.previous_gates"),
        (HCA, "carry.partial_values"),
        (HCA, "carry.partial_gates"),
    ],
)
def test_c4_c5_every_part_of_the_state_is_needed(layer, field, golden, single_layers, run):
    """A prefix that is resumed without one part of its state continues wrong."""
    case = single_layers.case
    position = 98  # two tokens into a CSA block
    inputs = single_layers.inputs([layer])

    def advance(begin, end, state):
        return run(
            case.loaded,
            case.tokens[begin:end],
            [end - begin],
            PLAIN,
            inputs=inputs[:, begin:end],
            layers=[layer],
            state=state,
        )

    first = advance(0, position, None).state
    assert first.position == position
    full = dataclasses.replace(first, layers=first.layers * 4)
    name, _, inner = field.partition(".")
    value = getattr(first.layers[0], name)
    lost = (
        jnp.zeros_like(value)
        if not inner
        else value._replace(**{inner: jnp.zeros_like(getattr(value, inner))})
    )
    broken = dataclasses.replace(first.layers[0], **{name: lost})
    broken = dataclasses.replace(first, layers=(broken,) * 4)
    wanted = single_layers.case.expected["out_noquant_f32"][layer]
    later = single_layers.case.expected["positions"] >= position
    rows = single_layers.case.expected["positions"][later] - position

    def distance(streams):
        got, want = streams[0, rows].reshape(len(rows), -1), wanted[later].reshape(len(rows), -1)
        return (np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max()

    limit = single_layers.limits["out_noquant_f32"]["rel_l2_per_position_max"]
    right, wrong = advance(position, 134, full), advance(position, 134, broken)
    assert distance(right.streams) <= limit
    if name == "index_carry":
        # One wrong key need not change a choice at the stored positions.
        right, wrong = (run.state.layers[0].index_keys for run in (right, wrong))
        assert np.abs(right - wrong).max() > 0.01
    else:
        assert distance(wrong.streams) > limit


@pytest.mark.parametrize("layer", [SWA, CSA, HCA])
def test_c6_a_pad_in_front_or_positions_that_start_elsewhere_break_the_limits(
    layer, golden, single_layers, run
):
    """Blocks are anchored at position 0, so neither is a way to line prompts up."""
    case, inputs = single_layers.case, single_layers.inputs([layer])
    positions = case.expected["positions"]
    wanted = case.expected["out_noquant_f32"][layer].reshape(len(positions), -1)
    limit = single_layers.limits["out_noquant_f32"]["rel_l2_per_position_max"]

    def distance(tokens, streams, chunks, first=0, pads=0):
        state = cache.empty_state(case.config, PLAIN, 1024)
        state = dataclasses.replace(state, position=first)
        options = {"inputs": streams, "layers": [layer], "state": state}
        trace = run(case.loaded, tokens, chunks, PLAIN, **options)
        got = trace.streams[0, positions + pads].reshape(wanted.shape)
        return (np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).max()

    padded = np.concatenate([inputs[:, :1], inputs], axis=1)
    assert distance(case.tokens, inputs, [128, 6]) <= limit
    assert distance(np.append(case.tokens[:1], case.tokens), padded, [128, 7], pads=1) > limit
    if layer != SWA:  # a window alone sees differences of positions only
        assert distance(case.tokens, inputs, [128, 6], first=100) > limit


@pytest.mark.parametrize("block", [128, 64, 32])
def test_q_c_values_share_a_scale_over_the_block_of_their_kind(block):
    """A huge value flushes the small ones of its block to zero, and none of the next block."""
    x = np.full((1, 2 * block), 1e-3, np.float32)
    x[0, 0] = 1e5
    if block == 128:
        weight = quant.QTensor(jnp.eye(2 * block, dtype=jnp.float32))
        out = layers.Linear(weight, True)(jnp.asarray(x), QUANTISED)
    elif block == 64:
        config = ModelConfig.from_json(CONFIGS / "flash.json")
        attend = attention.abstract_attention(config, 0)
        kv = np.zeros((1, config.head_dim), np.float32)
        kv[:, : 2 * block] = x
        out = attend.quantise_kv(jnp.asarray(kv), QUANTISED)[:, : 2 * block]
    else:
        out = codecs.fake_quant_fp4(jnp.asarray(x))
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(out) == 0), np.arange(1, block))


def test_r2_the_trailing_zero_belongs_to_the_draft_block():
    """Flash has 44 ratios for 43 layers: its last layer is CSA."""
    flash = ModelConfig.from_json(CONFIGS / "flash.json")
    kinds = [flash.kind(layer) for layer in range(flash.num_hidden_layers)]
    assert kinds[:2] == [LayerKind.SWA] * 2
    assert kinds[42] == LayerKind.CSA
    assert (kinds.count(LayerKind.CSA), kinds.count(LayerKind.HCA)) == (21, 20)
    pro = ModelConfig.from_json(CONFIGS / "pro.json")
    kinds = [pro.kind(layer) for layer in range(pro.num_hidden_layers)]
    assert (kinds.count(LayerKind.CSA), kinds.count(LayerKind.HCA)) == (30, 31)
    blocks = model.abstract(flash).blocks
    assert len(blocks) == 43
    assert blocks[42].attn.indexer is not None
    # A longer tail, as in checkpoints with three draft blocks, changes nothing.
    longer = dataclasses.replace(flash, compress_ratios=(*flash.compress_ratios, 0, 0))
    assert len(model.abstract(longer).blocks) == 43


@pytest.mark.parametrize("key", ["compress_ratios", "rope_scaling", "compress_rope_theta"])
def test_l1_r8_schedule_and_yarn_have_no_default(key):
    raw = json.loads((CONFIGS / "flash.json").read_text())
    del raw[key]
    with pytest.raises(ConfigError, match=key):
        ModelConfig.from_json(raw)


def filled_with_zeros(tree):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def test_m3_read_weights_have_eps_and_write_weights_do_not():
    """With maps of zero: sigmoid(0) + eps, and 2 * sigmoid(0)."""
    config = ModelConfig.from_json(CONFIGS / "flash.json")
    for eps in (1e-6, 0.25):
        small = dataclasses.replace(config, hidden_size=8, hc_eps=eps)
        zeros = filled_with_zeros(abstract_connection(small))
        streams = jnp.ones((1, 4, 8), jnp.float32)
        u, write, _ = zeros.pre(streams)
        np.testing.assert_allclose(u, np.full((1, 8), 4 * (0.5 + eps)), rtol=1e-7)
        np.testing.assert_array_equal(write, np.ones((1, 4)))
        head = filled_with_zeros(abstract_head(small))
        np.testing.assert_allclose(head(streams), np.full((1, 8), 4 * (0.5 + eps)), rtol=1e-7)


def test_c7_the_first_token_sees_itself():
    """No row is ever fully masked: with a sink of no weight token 0 returns its own value."""
    kv = jnp.arange(8, dtype=jnp.float32).reshape(1, 8)
    window = jnp.concatenate([jnp.full((3, 8), jnp.nan), kv])
    sink = jnp.full((2,), -jnp.inf)
    common = {"window": 4, "scale": 0.1}
    queries = jnp.ones((1, 2, 8), jnp.float32)
    empty = jnp.full((4, 8), jnp.nan)
    nothing = jnp.full((1, 3), -1, jnp.int32)
    for heads in (
        window_attention.window_attention(queries, window, None, sink, 0, ratio=1, **common),
        window_attention.window_attention(queries, window, empty, sink, 0, ratio=8, **common),
        sparse_attention.sparse_attention(queries, window, empty, nothing, sink, 0, **common),
    ):
        np.testing.assert_allclose(heads, np.broadcast_to(kv, (1, 2, 8)), rtol=1e-6)


def test_c8_capacity_is_given_in_tokens_and_held_in_entries():
    assert cache.entry_rows(4, 1 << 20) == 1 << 18
    assert cache.entry_rows(128, 1 << 20) == 1 << 13
    assert cache.entry_rows(4, 4 * 128 + 4) == 256


def test_i5_the_workspace_of_the_selection_does_not_grow_with_the_chunk():
    """Scores of all rows and entries at once would be 8 GiB at 8192 rows and 2**18 entries."""
    rows, entries, heads, channels = 8192, 1 << 18, 64, 128
    select = jax.make_jaxpr(
        lambda q, k, w: indexer.select_entries(q, k, w, jnp.int32(0), k=512, ratio=4)
    )(
        jax.ShapeDtypeStruct((rows, heads, channels), jnp.bfloat16),
        jax.ShapeDtypeStruct((entries, channels), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, heads), jnp.float32),
    )
    assert largest(select.jaxpr) < 1 << 30


def largest(jaxpr) -> int:
    """Bytes of the largest array that any equation makes, loops included."""
    sizes = [0]
    for equation in jaxpr.eqns:
        for value in equation.outvars:
            sizes.append(int(np.prod(value.aval.shape)) * value.aval.dtype.itemsize)
        for inner in jaxprs_in_params(equation.params):
            sizes.append(largest(inner))
    return max(sizes)
