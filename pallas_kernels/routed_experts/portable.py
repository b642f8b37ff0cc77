"""Grouped products on NVIDIA GPUs of compute capability 8.0 and above, in Pallas-Triton.

Two kernels a slab: gate, up, clamp, SiLU and routing weight in one, down in the other. Weights lie
on the long side of a block and routed rows on the short side, so few rows waste little. FP4 codes
are decoded in registers, between the copy to shared memory and the matrix unit; rows of x are
fetched by token and results are stored by slot, so no array is ever sorted, joined or decoded in
memory. Every output column of a block sums over the contraction in one fixed order and sees no
other column: the bits of a row do not depend on the rows beside it.

A byte of FP4 codes holds two neighbours along the contraction. Splitting bytes into a tile of low
and a tile of high nibbles keeps everything elementwise, if the other operand has its channels in
the order [even channels, odd channels] within each 64: `split_pairs`. Gate and up write h in that
order by walking the rows of w1 and w3 accordingly.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import codecs
from pallas_kernels.routed_experts.ordering import RowOrder, RowTiles, order_rows, row_tiles
from pallas_kernels.routed_experts.slab import ExpertSlab, unreadable
from pallas_kernels.routed_experts.tiling import MINIMUM_BLOCK, LayerTiling, Tiling

_PAIRS = 32  # pairs of neighbours in a block of 64 channels


def unsupported(x: jax.Array, slabs: tuple[ExpertSlab, ...]) -> str | None:
    """Why these operands cannot be served here; None when they can."""
    return unreadable(x, slabs, ("fp4", "bf16"), MINIMUM_BLOCK)


def expert_slots(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    slabs: tuple[ExpertSlab, ...],
    where: jax.Array,
    slots: jax.Array | None,
    *,
    limit: float,
    quantize_input: bool,
    tiling: LayerTiling,
    interpret: bool,
) -> jax.Array:
    """See the door; `x` is bfloat16.

    Memory beside the result: x once more, and h, bf16 [T * k, F], per slab.
    """
    (tokens, hidden), k = x.shape, ids.shape[1]
    order = order_rows(ids, where, sum(slab.experts for slab in slabs))
    if quantize_input:
        x = codecs.fake_quant_fp8(x, 128)
    paired = split_pairs(x)
    out = None if slots is None else slots.reshape(tokens * k, hidden)
    flat_weights = weights.reshape(-1)
    first = 0
    for slab in (piece for whole in slabs for piece in addressable(whole)):
        tables = row_tiles(order, first, slab.experts, tiling.sizes)
        first += slab.experts
        inputs, h = x if slab.format == "bf16" else paired, None
        for tiles, blocks in zip(tables, tiling.gate_up, strict=True):
            h = gate_up(
                inputs,
                flat_weights,
                order,
                tiles,
                slab,
                h,
                k=k,
                limit=limit,
                tiling=_fit(blocks, slab.width, hidden),
                interpret=interpret,
            )
        if quantize_input:
            # Blocks of 128 channels hold the same channels in either order.
            h = codecs.fake_quant_fp8(h, 128)
        for tiles, blocks in zip(tables, tiling.down, strict=True):
            out = down(
                h,
                order,
                tiles,
                slab,
                out,
                tiling=_fit(blocks, hidden, slab.width),
                interpret=interpret,
            )
    if slots is None:
        out = fill_unserved(out, ids.reshape(-1), order, interpret=interpret)
    return out.reshape(tokens, k, hidden)


def addressable(slab: ExpertSlab) -> tuple[ExpertSlab, ...]:
    """The slab, or its halves when an array of bytes has more than 2 and at most 4 GiB.

    Pallas-Triton computes offsets of such arrays in signed 32-bit numbers (64-bit ones above 4
    GiB). XLA may copy the halves: make no slabs of this size where memory is short.
    """
    sizes = (slab.gate_up.size, slab.down.size)
    if slab.format != "fp4" or not any(2**31 < size <= 2**32 for size in sizes):
        return (slab,)
    half = slab.experts // 2
    return tuple(
        jax.tree.map(lambda array, piece=piece: array[piece], slab)
        for piece in (slice(None, half), slice(half, None))
    )


def split_pairs(x: jax.Array) -> jax.Array:
    """Channels of x [rows, K] reordered to [32 even, 32 odd] within each 64."""
    rows, channels = x.shape
    pairs = x.reshape(rows, channels // MINIMUM_BLOCK, _PAIRS, 2)
    return jnp.swapaxes(pairs, 2, 3).reshape(rows, channels)


def _fit(tiling: Tiling, out: int, contraction: int) -> Tiling:
    """The tiling with blocks that divide the matrix."""
    return Tiling(
        out=tiling.out if out % tiling.out == 0 else MINIMUM_BLOCK,
        rows=tiling.rows,
        step=tiling.step if contraction % tiling.step == 0 else MINIMUM_BLOCK,
        warps=tiling.warps,
        stages=tiling.stages,
    )


def gate_up(x, weights, order: RowOrder, tiles, slab, h, *, k, limit, tiling, interpret):
    """h [R, F], or a new array when None, with the rows of `tiles` filled in.

    Rows are in sorted order, channels in pair order for FP4; rows of no tile are undefined.
    """
    return _call(
        functools.partial(_gate_up_kernel, k=k, limit=limit, tiling=tiling),
        "routed_experts_gate_up",
        jax.ShapeDtypeStruct((order.rows.size, slab.width), x.dtype),
        (x, weights, order.rows, tiles.expert, tiles.start, tiles.count),
        (slab.gate_up, slab.gate_up_scale),
        (slab.width // tiling.out, tiles.expert.size),
        tiling,
        interpret,
        into=h,
    )


def down(h, order: RowOrder, tiles: RowTiles, slab, slots, *, tiling, interpret):
    """slots [R, D], or a new array when None, with the rows of `tiles` filled in."""
    return _call(
        functools.partial(_down_kernel, tiling=tiling),
        "routed_experts_down",
        jax.ShapeDtypeStruct((order.rows.size, slab.hidden), h.dtype),
        (h, order.rows, tiles.expert, tiles.start, tiles.count),
        (slab.down, slab.down_scale),
        (slab.hidden // tiling.out, tiles.expert.size),
        tiling,
        interpret,
        into=slots,
    )


def fill_unserved(slots, ids, order: RowOrder, *, interpret):
    """slots [R, D] with NaN in rows that no expert served, and 0 where ids [R] is -1."""
    rows, hidden = slots.shape
    block = (64, 512 if hidden % 512 == 0 else MINIMUM_BLOCK)
    return _call(
        functools.partial(_fill_kernel, block=block),
        "routed_experts_fill",
        jax.ShapeDtypeStruct(slots.shape, slots.dtype),
        (order.rows, order.starts, ids),
        (),
        (hidden // block[1], pl.cdiv(rows, block[0])),
        Tiling(out=64, rows=64, step=64, warps=8, stages=1),
        interpret,
        into=slots,
    )


def _call(kernel, name, out_shape, operands, weight, grid, tiling, interpret, *, into) -> jax.Array:
    """Runs `kernel(out, *operands)`, with `weight=` its codes and scales, on whole arrays.

    The result is a new array when `into` is None, or else that array, written in place.
    """
    arrays = (*operands, *(array for array in weight if array is not None))
    aliases = {}
    if into is not None:
        aliases = {len(arrays): 0}
        arrays = (*arrays, into)

    def named(*refs):
        inputs = refs[: len(operands)]
        if not weight:
            return kernel(refs[-1], *inputs)
        codes, scales = refs[len(operands)], refs[len(operands) + 1]
        reader = _Weight(codes, None if weight[1] is None else scales, tiling.step, interpret)
        return kernel(refs[-1], *inputs, weight=reader)

    named.__name__ = name  # the name of the compiled kernel
    return pl.pallas_call(
        named,
        grid=grid,
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        input_output_aliases=aliases,
        interpret=interpret,
        name=name,
    )(*arrays)


@dataclasses.dataclass(frozen=True)
class _Weight:
    """Reads bf16 tiles of a slab's matrix in a kernel; `scales` is None unless codes are FP4."""

    codes: Any
    scales: Any
    step: int
    interpret: bool

    @property
    def paired(self) -> bool:
        """Whether the other operand has its channels in pair order."""
        return self.scales is not None

    def scale_tile(self, expert, rows, index):
        """Scale bytes of the step, to be loaded one step ahead; () when there are none.

        A few bytes a row are too little for the asynchronous copies that the compiler arranges for
        the other operands: loaded where they are used, they would stall every step.
        """
        if not self.paired:
            return ()
        blocks = self.step // codecs.FP4_BLOCK
        block = index * blocks + jnp.arange(blocks, dtype=jnp.int32)
        return self.scales[expert, rows[:, None], block[None, :]]

    def tiles(self, expert, rows, index, scales):
        """Pieces of w[expert, rows, index * step :][:, :step], each with its channels of x."""
        first = index * self.step
        if not self.paired:
            channel = first + jnp.arange(self.step, dtype=jnp.int32)
            return [(channel, self.codes[expert, rows[:, None], channel[None, :]])]
        pairs = self.step // 2
        pair = jnp.arange(pairs, dtype=jnp.int32)
        codes = self.codes[expert, rows[:, None], (index * pairs + pair)[None, :]]
        # The decoder is written in PTX for the GPU and in plain operations for the interpreter.
        low, high = (_decode_plain if self.interpret else _decode_ptx)(codes, scales)
        # lax.div and lax.rem: the compiler sees runs of 32 channels through them, not through the
        # selects of // and % on signed numbers.
        channel = first + lax.div(pair, _PAIRS) * MINIMUM_BLOCK + lax.rem(pair, _PAIRS)
        return [(channel, low), (channel + _PAIRS, high)]


def _gate_up_kernel(
    h_ref,
    x_ref,
    weights_ref,
    rows_ref,
    expert_ref,
    start_ref,
    count_ref,
    *,
    weight: _Weight,
    k,
    limit,
    tiling: Tiling,
):
    block, tile = pl.program_id(0), pl.program_id(1)
    count = count_ref[tile]
    width, hidden = h_ref.shape[1], x_ref.shape[1]

    @pl.when(count > 0)
    def _():
        expert = expert_ref[tile]
        position, valid, row = _tile_rows(rows_ref, start_ref[tile], count, tiling.rows)
        token = lax.div(row, k)
        # Gate and up are one product of twice as many weight rows: w1's, then w3's. FP4: the h
        # channels of the block are in pair order, see the top of this file.
        lane = jnp.arange(2 * tiling.out, dtype=jnp.int32)
        channel = block * tiling.out + lax.rem(lane, tiling.out)
        channel = _pair_channel(channel) if weight.paired else channel
        weight_rows = channel + lax.div(lane, tiling.out) * width
        both = _product(weight, expert, weight_rows, x_ref, token, hidden)
        # Triton keeps a cast and its inverse, XLA under the interpreter would drop the pair.
        rounded = codecs.round_to if weight.interpret else lax.convert_element_type
        both = rounded(both, h_ref.dtype).astype(jnp.float32)
        gate, up = lax.split(both, (tiling.out, tiling.out), axis=0)
        gate = jnp.minimum(gate, limit)
        up = jnp.clip(up, -limit, limit)
        h = gate / (1.0 + jnp.exp(-gate)) * up * weights_ref[row][None, :]
        h = h.astype(h_ref.dtype).T
        column = block * tiling.out + jnp.arange(tiling.out, dtype=jnp.int32)
        plt.store(h_ref.at[position[:, None], column[None, :]], h, mask=valid[:, None])


def _down_kernel(
    out_ref,
    h_ref,
    rows_ref,
    expert_ref,
    start_ref,
    count_ref,
    *,
    weight: _Weight,
    tiling: Tiling,
):
    block, tile = pl.program_id(0), pl.program_id(1)
    count = count_ref[tile]
    rows, width = h_ref.shape

    @pl.when(count > 0)
    def _():
        expert = expert_ref[tile]
        position, valid, row = _tile_rows(rows_ref, start_ref[tile], count, tiling.rows)
        source = jnp.minimum(position, rows - 1)
        column = block * tiling.out + jnp.arange(tiling.out, dtype=jnp.int32)

        y = _product(weight, expert, column, h_ref, source, width).astype(out_ref.dtype).T
        # Rows outside the tile point past the end, for interpreters that write back masked lanes.
        target = jnp.where(valid, row, rows)
        plt.store(out_ref.at[target[:, None], column[None, :]], y, mask=valid[:, None])


def _fill_kernel(out_ref, rows_ref, starts_ref, ids_ref, *, block):
    (rows, columns), total = block, rows_ref.shape[0]
    first_column = pl.program_id(0) * columns
    start = starts_ref[starts_ref.shape[0] - 1] + pl.program_id(1) * rows

    @pl.when(start < total)
    def _():
        _, valid, row = _tile_rows(rows_ref, start, total - start, rows)
        value = jnp.where(ids_ref[row] >= 0, jnp.nan, 0.0).astype(out_ref.dtype)
        column = first_column + jnp.arange(columns, dtype=jnp.int32)
        target = jnp.where(valid, row, total)
        value = jnp.broadcast_to(value[:, None], (rows, columns))
        plt.store(out_ref.at[target[:, None], column[None, :]], value, mask=valid[:, None])


def _tile_rows(rows_ref, start, count, size):
    """Positions of a tile in the sorted order, which of them belong to it, and their rows.

    Lanes past the tile repeat rows of others: their columns are computed and never stored.
    """
    lane = jnp.arange(size, dtype=jnp.int32)
    position = start + lane
    row = rows_ref[jnp.minimum(position, rows_ref.shape[0] - 1)]
    return position, lane < count, row


def _pair_channel(column):
    """The channel that pair order has at `column`."""
    within = lax.rem(column, MINIMUM_BLOCK)
    return column - within + 2 * lax.rem(within, _PAIRS) + lax.div(within, _PAIRS)


def _product(weight: _Weight, expert, weight_rows, x_ref, x_rows, contraction):
    """w[expert, weight_rows] @ x[x_rows]^T in float32."""
    steps = contraction // weight.step

    def body(step, carry):
        total, scales = carry
        next_scales = weight.scale_tile(expert, weight_rows, jnp.minimum(step + 1, steps - 1))
        for channel, tile in weight.tiles(expert, weight_rows, step, scales):
            x = x_ref[x_rows[:, None], channel[None, :]]
            total = total + lax.dot_general(
                tile, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
        return total, next_scales

    zeros = jnp.zeros((weight_rows.size, x_rows.size), jnp.float32)
    return lax.fori_loop(0, steps, body, (zeros, weight.scale_tile(expert, weight_rows, 0)))[0]


def _decode_plain(codes, scales):
    """Low and high nibbles of codes u8 [M, 32] with scales u8 [M, 2], as bf16."""
    scales = jnp.repeat(scales, codecs.FP4_BLOCK // 2, axis=1)
    return tuple(
        codecs.scale_by(codecs.e2m1_values(nibble), scales).astype(jnp.bfloat16)
        for nibble in (codes & 15, codes >> 4)
    )


def _decode_ptx(codes, scales):
    """The same on the GPU: two codes at a time, as bit fields of a register with two bfloat16.

    The three magnitude bits of E2M1, put where bfloat16 has the low exponent bits and the top
    mantissa bit, are the value times 2^-126, subnormal for code 1; a product with 2^126 makes it
    exact, a second one applies the block scale.
    """
    bits = jnp.maximum(scales.astype(jnp.uint16) << 7, jnp.uint16(0x0040))  # byte 0 is 2^-127
    bits = jnp.where(scales == 255, jnp.uint16(0x7FC0), bits)
    scale = lax.bitcast_convert_type(bits, jnp.bfloat16)
    rows, width = codes.shape
    scale = jnp.broadcast_to(scale[:, :, None], (rows, scales.shape[1], codecs.FP4_BLOCK // 2))
    scale = scale.reshape(rows, width)
    out = jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)
    return tuple(
        plt.elementwise_inline_asm(
            asm,
            args=[codes, scale],
            constraints="=r,r,r",
            pack=2,
            result_shape_dtypes=[out],
        )[0]
        for asm in (_ptx(sign_left=4, magnitude_right=2), _ptx(sign_left=0, magnitude_right=6))
    )


def _ptx(*, sign_left, magnitude_right):
    """PTX for two bytes $1 and their scales $2 (a bf16 pair) to a bf16 pair $0."""
    return f"""{{
        .reg .b32 lanes, magnitude, unit, zero;
        mov.b32 unit, 0x7E807E80;  // 2^126, twice
        mov.b32 zero, 0x80008000;  // -0: fma, as a plain product of bf16 pairs needs a newer GPU
        prmt.b32 lanes, $1, 0, 0x1404;  // each byte to the upper half of 16 bits
        shr.u32 magnitude, lanes, {magnitude_right};
        and.b32 magnitude, magnitude, 0x01C001C0;
        shl.b32 lanes, lanes, {sign_left};
        lop3.b32 lanes, lanes, 0x80008000, magnitude, 0xEA;  // (lanes & signs) | magnitude
        fma.rn.bf16x2 lanes, lanes, unit, zero;
        fma.rn.bf16x2 $0, lanes, $2, zero;
    }}"""
