"""Grouped products on Hopper GPUs in Pallas-Mosaic: a producer and two consumer warpgroups.

One block per multiprocessor walks over pairs of (row tile, 128 weight rows). The producer keeps a
ring of buffers filled with rows of x, FP4 codes and scale bytes; the consumers decode their 64
weight rows in registers and multiply. Every output sums over the contraction in one fixed order and
sees no other row.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.routed_experts import sm90_fragments, sm90_plain
from pallas_kernels.routed_experts.sm90_fragments import BAND, BLOCKS, TOP, TRANSFORMS
from pallas_kernels.routed_experts.tiling import Schedule
from pallas_kernels.tracing import traced_once

WEIGHT_ROWS = 128  # of a block: 64 for each consumer
ROW_GRAIN = 8  # routed rows are stored in pieces of this many
CONSUMERS = 2


@dataclasses.dataclass(frozen=True)
class Product:
    """What tells the kernels apart.

    kind    "fp8" or "bf16": of the operands.
    limit   of gate and up, which are fused with it; None for down.
    blocks  of the grid, one per multiprocessor.
    """

    kind: str
    limit: float | None
    schedule: Schedule
    blocks: int
    interpret: bool

    @property
    def paired(self) -> bool:
        return self.limit is not None

    @property
    def out_columns(self) -> int:
        """Of one block."""
        return WEIGHT_ROWS // 2 if self.paired else WEIGHT_ROWS


@traced_once("product")
def grouped_product(
    product: Product,
    x: jax.Array,
    x_scale: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    tops: jax.Array,
    bands: jax.Array,
    tiles: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    weights: jax.Array | None,
) -> jax.Array:
    """bf16 [rows, columns]: row tiles times the weights of their experts.

    x        e4m3 or bf16 [rows, K] in `channel_order`, rows of an expert side by side; the last
             `schedule.rows` rows belong to no tile.
    x_scale  f32 [K / 128, rows], for FP8.
    codes    u8 [n, N, K / 2] and scales u8 [n, N, K / 32], of a slab.
    tops     i32 [n]: largest scale byte of an expert; bands i32 [n]: bands that its scales span.
    tiles    (expert, start, count) i32 [tiles], and i32 [1] how many of them are used.
    weights  f32 [rows] for gate and up, columns N / 2; None for down, columns N.
    """
    schedule = product.schedule
    kind, rows = product.kind, schedule.rows
    experts, weight_rows, packed = codes.shape
    columns = weight_rows // 2 if product.paired else weight_rows
    out = jax.ShapeDtypeStruct((x.shape[0], columns), jnp.bfloat16)
    row_bytes = BLOCKS[kind] // 2
    stages = schedule.stages
    slot_columns = 32 if product.paired else 64
    out_transforms = sm90_fragments.OUT_GATE_UP if product.paired else sm90_fragments.OUT_DOWN
    # Rows in groups, of which a tile takes 16 each: see `sm90_fragments._fragment_rows`.
    grouped = 32 if kind == "fp8" and product.paired else 16
    codes, scales = (
        a.reshape(experts, weight_rows // grouped, grouped, -1) for a in (codes, scales)
    )
    scratch = {
        "x_smem": plgpu.SMEM((stages, rows, BLOCKS[kind]), x.dtype, transforms=TRANSFORMS[kind]),
        "codes_smem": plgpu.SMEM((stages, WEIGHT_ROWS // 16, 16, row_bytes), jnp.uint8),
        "scales_smem": plgpu.SMEM((stages, WEIGHT_ROWS // 16, 16, 16), jnp.uint8),
        "x_scale_smem": plgpu.SMEM((stages, rows), jnp.float32),
        "out_smem": plgpu.SMEM(
            (CONSUMERS, 2, max(map(schedule.store_rows, schedule.sizes)), slot_columns),
            jnp.bfloat16,
            transforms=out_transforms,
        ),
        "full": plgpu.Barrier(
            num_arrivals=(1 if kind == "bf16" else 2) + (4 if product.paired else 2),
            num_barriers=stages,
        ),
        "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
    }
    run = mosaic.kernel(
        functools.partial(_kernel, product=product, packed=packed, columns=columns),
        f"routed_experts_{'gate_up' if product.paired else 'down'}_{kind}",
        out_type=out,
        scratch_types=scratch,
        blocks=product.blocks,
        warpgroups=CONSUMERS + 1,
        interpret=product.interpret,
    )
    if weights is None:
        weights = jnp.zeros(1, jnp.float32)
    return run(x, x_scale, codes, scales, tops, bands, *tiles, weights)


def _kernel(
    x,
    x_scale,
    codes,
    scales,
    tops,
    bands,
    tile_expert,
    tile_start,
    tile_count,
    used,
    weights,
    out,
    *,
    x_smem,
    codes_smem,
    scales_smem,
    x_scale_smem,
    out_smem,
    full,
    empty,
    product,
    packed,
    columns,
):
    schedule, kind = product.schedule, product.kind
    rows = schedule.rows
    row_bytes = BLOCKS[kind] // 2
    scale_bytes = BLOCKS[kind] // 32
    k_blocks = packed // row_bytes
    column_blocks = columns // product.out_columns
    group = lax.axis_index(mosaic.WARPGROUP_AXIS)
    block, blocks = lax.axis_index(mosaic.BLOCK_AXIS), product.blocks
    total_items = used[0] * column_blocks
    items = lax.div(jnp.maximum(total_items - block, 0) + (blocks - 1), blocks)

    def item(index):
        """Tile and column block of the index-th item of this block."""
        at = block + index * blocks
        tile = lax.div(at, column_blocks)
        return tile, at - tile * column_blocks

    def for_size(count, run):
        """Runs `run(size)` for the size that a tile of `count` rows is computed with."""
        for smaller, size in itertools.pairwise((0, *schedule.sizes)):
            pl.when((smaller < count) & (count <= size))(functools.partial(run, size))

    def steps_of(expert):
        if kind == "bf16":
            return jnp.int32(k_blocks)
        return bands[expert] * k_blocks

    @pl.when(group == CONSUMERS)
    def _():
        plgpu.set_max_registers(24, action="decrease")

        def run_item(index, step):
            tile, column = item(index)
            expert, start, count = tile_expert[tile], tile_start[tile], tile_count[tile]

            def load(inner, step):
                k = lax.rem(inner, k_blocks)
                slot = mosaic.claim(empty, step)

                def load_rows(size):
                    plgpu.copy_gmem_to_smem(
                        x.at[pl.ds(start, size), pl.ds(k * BLOCKS[kind], BLOCKS[kind])],
                        x_smem.at[slot, pl.ds(0, size)],
                        full.at[slot],
                    )

                for_size(count, load_rows)
                if kind == "fp8":
                    plgpu.copy_gmem_to_smem(
                        x_scale.at[k, pl.ds(start, rows)], x_scale_smem.at[slot], full.at[slot]
                    )
                halves = 2 if product.paired else 1
                groups = WEIGHT_ROWS // 16 // halves
                first, offset = column * groups, 0
                if codes.shape[2] == 32:
                    first, offset = lax.div(column, 2) * groups, lax.rem(column, 2) * 16
                scale_column = lax.div(k * scale_bytes, 16) * 16
                for half in range(halves):
                    at = first + half * (codes.shape[1] // 2)
                    for source, target, first_byte, size in (
                        (codes, codes_smem, k * row_bytes, row_bytes),
                        (scales, scales_smem, scale_column, 16),
                    ):
                        plgpu.copy_gmem_to_smem(
                            source.at[
                                expert,
                                pl.ds(at, groups),
                                pl.ds(offset, 16),
                                pl.ds(first_byte, size),
                            ],
                            target.at[slot, pl.ds(half * groups, groups)],
                            full.at[slot],
                        )
                return step + 1

            return lax.fori_loop(0, steps_of(expert), load, step)

        mosaic.drain(empty, lax.fori_loop(0, items, run_item, jnp.int32(0)))

    @pl.when(group < CONSUMERS)
    def _():
        plgpu.set_max_registers(240, action="increase")
        hardware = sm90_plain if product.interpret else sm90_fragments
        buffers = (x_smem, codes_smem, scales_smem, x_scale_smem, full, empty)

        def run_item(index, step):
            tile, column = item(index)
            expert, start, count = tile_expert[tile], tile_start[tile], tile_count[tile]
            top = tops[expert]

            def compute(size):
                scaled = (top, bands[expert] if kind == "fp8" else 1)
                total = _sum(hardware, product, size, step, k_blocks, scaled, buffers)
                factor = _power(top - TOP) if kind == "fp8" else jnp.float32(1)
                place = (start, count, column, size)
                _store(hardware, product, total, factor, weights, out, out_smem, place)

            for_size(count, compute)
            return step + steps_of(expert)

        lax.fori_loop(0, items, run_item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _power(exponent):
    """2^exponent, 0 below the normal numbers; NaN where the largest scale byte is 255."""
    bits = jnp.maximum(exponent + 127, 0) << 23
    bits = jnp.where(exponent == 255 - TOP, jnp.int32(0x7FC00000), bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _sum(hardware, product, size, step, k_blocks, scaled, buffers):
    """Sum over the contraction; FP8 band after band, in units of 2^(t - TOP).

    t is the largest scale byte of the expert's matrix. As every float32, a sum keeps all its bits
    down to 2^-126 of that unit, 2^(t - 266); below, GPUs round it to multiples of 2^(t - 289), and
    CPUs to 0. For t of at most TOP that is below the normal float32 numbers anyway.
    """
    x_smem, codes_smem, scales_smem, x_scale_smem, full, empty = buffers
    top, bands = scaled
    schedule, kind = product.schedule, product.kind
    stages = schedule.stages
    scale_bytes = BLOCKS[kind] // 32

    def run_band(band, total):
        # From small scales to large ones.
        band_top = top - (bands - 1 - band) * BAND
        first = step + band * k_blocks

        def weight(k):
            """What `operand` takes."""
            slot = lax.rem(first + k, stages)
            column = lax.rem(k * scale_bytes, 16)
            scales = scales_smem.at[slot, :, :, pl.ds(column, scale_bytes)]
            return codes_smem.at[slot], scales, band_top

        def body(k, carry):
            @pl.when(k + 1 < k_blocks)
            def _():
                plgpu.barrier_wait(full.at[lax.rem(first + k + 1, stages)])

            # The last step decodes its own weights once more, to no effect.
            following = weight(jnp.minimum(k + 1, k_blocks - 1))
            slot = lax.rem(first + k, stages)
            carry = hardware.step(
                kind,
                *carry,
                x_smem.at[slot],
                x_scale_smem.at[slot],
                following,
                rows=size,
                chunk=schedule.product_rows(size),
                under_way=schedule.under_way,
                paired=product.paired,
            )
            plgpu.barrier_arrive(empty.at[slot])
            return carry

        if kind == "fp8":
            total = total * jnp.float32(2.0**-BAND)
        plgpu.barrier_wait(full.at[lax.rem(first, stages)])
        operand = hardware.operand(kind, *weight(0), paired=product.paired)
        return lax.fori_loop(0, k_blocks, body, (total, operand))[0]

    zeros = jnp.zeros((64, size), jnp.float32)
    if not product.interpret:
        zeros = plgpu.layout_cast(zeros, sm90_fragments.ACCUMULATOR)
    if kind == "bf16":
        return run_band(0, zeros)
    return lax.fori_loop(0, bands, run_band, zeros)


def _store(hardware, product, total, factor, weights, out, out_smem, place):
    """Writes the rows of a tile, and of the grain that it ends in, through shared memory."""
    start, count, column, size = place
    group = lax.axis_index(mosaic.WARPGROUP_AXIS)
    width = out_smem.shape[-1]
    first_column = column * product.out_columns + group * width
    tokens = product.schedule.store_rows(size)
    for piece in range(size // tokens):
        first = piece * tokens
        slot = out_smem.at[group, piece % 2]
        # The tile before may have ended with either slot.
        plgpu.wait_smem_to_gmem(min(piece, 1), wait_read_only=True)
        if product.paired:
            hardware.store_gate_up(
                total,
                factor,
                weights.at[pl.ds(start, product.schedule.rows)],
                slot,
                first=first,
                tokens=tokens,
                limit=product.limit,
            )
        else:
            hardware.store_down(total, factor, slot, first=first, tokens=tokens)
        plgpu.commit_smem()
        for grain in range(tokens // ROW_GRAIN):
            offset = first + grain * ROW_GRAIN

            @pl.when(offset < count)
            def _(piece=piece, grain=grain, offset=offset):
                # Not a part of `slot`: JAX takes its time over every index after another.
                plgpu.copy_smem_to_gmem(
                    out_smem.at[group, piece % 2, pl.ds(grain * ROW_GRAIN, ROW_GRAIN)],
                    out.at[pl.ds(start + offset, ROW_GRAIN), pl.ds(first_column, width)],
                    commit_group=False,
                )

        plgpu.commit_smem_to_gmem_group()
