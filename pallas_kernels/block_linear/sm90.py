"""FP8 product on Hopper GPUs in Pallas-Mosaic: E4M3 inputs and weights meet on the FP8 units.

One block per multiprocessor walks over tiles of ROWS x COLUMNS outputs: a producer warpgroup keeps
a ring of buffers filled, three consumers multiply PIECE rows each, in turns. The tensor cores sum
128 channels, whose operands share their scales; everything beyond is float32. An output sums over
its channels in one fixed order and sees no other row.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import codecs, mosaic
from pallas_kernels.tracing import traced_once

BLOCK = 128  # channels of a step, which share a scale
PIECE = 64  # rows of a product
CONSUMERS = 3
ROWS = CONSUMERS * PIECE  # inputs of a tile
COLUMNS = 128  # outputs of a tile, which share the scales of the weight
STRIP = 32  # columns that are written at a time
STAGES = 4
GROUP = 8  # neighbouring tiles of rows that run at a time, so that they share weights in L2

_OPERAND = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128))
_RESULT = (plgpu.TilingTransform((8, STRIP)), plgpu.SwizzleTransform(64))


def refusal(weight: jax.Array) -> str | None:
    """Why the kernel cannot take weight [N, K]; None when it can."""
    outputs, inputs = weight.shape
    if outputs % COLUMNS or inputs % BLOCK:
        return (
            f"weight is [{outputs}, {inputs}], the FP8 product takes multiples of {COLUMNS} and "
            f"{BLOCK}"
        )
    return None


@traced_once("blocks", "interpret")
def product(
    x: jax.Array,
    x_scale: jax.Array,
    weight: jax.Array,
    scales: jax.Array,
    *,
    blocks: int,
    interpret: bool = False,
) -> jax.Array:
    """bf16 [T, N]: x @ weight^T with the scales of both.

    x        e4m3 [T, K]; x_scale f32 [K / 128, T].
    weight   e4m3 [N, K]; scales u8 E8M0 [N / 128, K / 128].
    blocks   that run at a time, one per multiprocessor.
    """
    tokens, outputs = x.shape[0], weight.shape[0]
    # Whole groups of eight rows, and at least one tile.
    padding = max(-(-tokens // 8) * 8, ROWS) - tokens
    if padding:
        x, x_scale = jnp.pad(x, ((0, padding), (0, 0))), jnp.pad(x_scale, ((0, 0), (0, padding)))
    # In rows of the fewest bytes that a copy takes.
    weight_scale = jnp.repeat(codecs.decode_e8m0(scales)[:, :, None], 32, axis=2)
    run = mosaic.kernel(
        functools.partial(_kernel, blocks=blocks),
        "block_linear_fp8",
        out_type=jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.bfloat16),
        scratch_types={
            "x_smem": plgpu.SMEM((STAGES, ROWS, BLOCK), x.dtype, transforms=_OPERAND),
            "weight_smem": plgpu.SMEM((STAGES, COLUMNS, BLOCK), weight.dtype, transforms=_OPERAND),
            "x_scale_smem": plgpu.SMEM((STAGES, ROWS), jnp.float32),
            "weight_scale_smem": plgpu.SMEM((STAGES, 32), jnp.float32),
            "out_smem": plgpu.SMEM((CONSUMERS, 2, PIECE, STRIP), jnp.bfloat16, transforms=_RESULT),
            "full": plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
            "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
        },
        blocks=blocks,
        warpgroups=CONSUMERS + 1,
        interpret=interpret,
    )
    return run(x, x_scale, weight, weight_scale)[:tokens]


def _kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    out,
    *,
    x_smem,
    weight_smem,
    x_scale_smem,
    weight_scale_smem,
    out_smem,
    full,
    empty,
    blocks,
):
    steps = x.shape[1] // BLOCK
    row_tiles, column_tiles = -(-out.shape[0] // ROWS), out.shape[1] // COLUMNS
    group = lax.axis_index(mosaic.WARPGROUP_AXIS)
    block = lax.axis_index(mosaic.BLOCK_AXIS)
    items = lax.div(
        jnp.maximum(row_tiles * column_tiles - block, 0) + (blocks - 1), jnp.int32(blocks)
    )

    def item(index):
        """First row, and column, of the index-th tile of this block."""
        at = block + index * blocks
        strip = lax.div(at, GROUP * column_tiles)
        at = at - strip * (GROUP * column_tiles)
        rows = jnp.minimum(row_tiles - strip * GROUP, GROUP)
        column = lax.div(at, rows)
        row = strip * GROUP + at - column * rows
        # The last tile repeats rows of the one before rather than go over the end.
        return jnp.minimum(row * ROWS, out.shape[0] - ROWS), column

    @pl.when(group == CONSUMERS)
    def _():
        plgpu.set_max_registers(24, action="decrease")

        def load(index, step):
            row, column = item(index)

            def one(k, step):
                slot = mosaic.claim(empty, step)
                channels = pl.ds(k * BLOCK, BLOCK)
                plgpu.copy_gmem_to_smem(
                    x.at[pl.ds(row, ROWS), channels], x_smem.at[slot], full.at[slot]
                )
                plgpu.copy_gmem_to_smem(
                    x_scale.at[k, pl.ds(row, ROWS)], x_scale_smem.at[slot], full.at[slot]
                )
                plgpu.copy_gmem_to_smem(
                    weight.at[pl.ds(column * COLUMNS, COLUMNS), channels],
                    weight_smem.at[slot],
                    full.at[slot],
                )
                plgpu.copy_gmem_to_smem(
                    weight_scale.at[column, k], weight_scale_smem.at[slot], full.at[slot]
                )
                return step + 1

            return lax.fori_loop(0, steps, one, step)

        mosaic.drain(empty, lax.fori_loop(0, items, load, jnp.int32(0)))

    @pl.when(group < CONSUMERS)
    def _():
        plgpu.set_max_registers(160, action="increase")
        zeros = plgpu.layout_cast(jnp.zeros((PIECE, COLUMNS), jnp.float32), plgpu.Layout.WGMMA)

        def run_item(index, step):
            def one(k, carry):
                step, total = carry
                slot = lax.rem(step, STAGES)
                plgpu.barrier_wait(full.at[slot])
                rows = pl.ds(group * PIECE, PIECE)
                factor = plgpu.load(
                    x_scale_smem.at[slot, rows],
                    layout=plgpu.Layout.WGMMA.reduce(1),
                    optimized=False,
                )
                factor = factor * weight_scale_smem[slot, 0]

                def multiply(acc):
                    plgpu.wgmma(acc, x_smem.at[slot, rows], weight_smem.at[slot].T)
                    return acc[...]

                partial = pl.run_scoped(multiply, plgpu.ACC((PIECE, COLUMNS), jnp.float32))
                total = total + partial * lax.broadcast_in_dim(factor, total.shape, (0,))
                plgpu.barrier_arrive(empty.at[slot])
                return step + 1, total

            step, total = lax.fori_loop(0, steps, one, (step, zeros))
            row, column = item(index)
            for first in range(0, COLUMNS, STRIP):
                slot = out_smem.at[group, first // STRIP % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                slot[...] = total[:, first : first + STRIP].astype(out.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    slot,
                    out.at[
                        pl.ds(row + group * PIECE, PIECE),
                        pl.ds(column * COLUMNS + first, STRIP),
                    ],
                )
            return step

        lax.fori_loop(0, items, run_item, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
