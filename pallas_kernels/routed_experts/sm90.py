"""Routed experts on Hopper GPUs: rows gathered by expert, two grouped products, slots by gather.

Weights stay FP4 in memory and are decoded in registers. With `quantize_input` both products run on
the FP8 units, exact products of E4M3 activations with the weights (see `sm90_fragments`), summed in
float32 per block of 128 channels; otherwise in bfloat16.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.routed_experts import sm90_fragments
from pallas_kernels.routed_experts.arrange import arrange, fresh_slots, put_back
from pallas_kernels.routed_experts.ordering import RowOrder, order_rows
from pallas_kernels.routed_experts.slab import ExpertSlab, scale_range, unreadable
from pallas_kernels.routed_experts.sm90_kernel import (
    ROW_GRAIN,
    Product,
    grouped_product,
)
from pallas_kernels.routed_experts.tiling import Schedule

MULTIPLE = 512  # of D and F: scale bytes are copied 16 at a time


def unsupported(x: jax.Array, slabs: tuple[ExpertSlab, ...]) -> str | None:
    """Why these operands cannot be served here; None when they can."""
    return unreadable(x, slabs, ("fp4",), MULTIPLE)


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
    schedule: Schedule,
    blocks: int,
    interpret: bool,
) -> jax.Array:
    """See the door; `x` is bfloat16. `blocks` run at a time, one per multiprocessor.

    Memory beside the result, per slab and place (T * k and up to 7 more per expert): rows of x and
    of h in the operand's dtype, of h and y in bfloat16; never all at once.
    """
    (tokens, hidden), k = x.shape, ids.shape[1]
    order = order_rows(ids, where, sum(slab.experts for slab in slabs))
    kind = "fp8" if quantize_input else "bf16"
    place = functools.partial(arrange, quantize=quantize_input, interpret=interpret)
    out = fresh_slots(x, ids) if slots is None else slots
    out = out.reshape(tokens * k, hidden)
    first = 0
    for slab in slabs:
        places = place_rows(order, first, slab.experts, schedule.rows)
        gate_up_bands, down_bands = _bands(slab, kind)
        first += slab.experts
        row = jnp.minimum(places.source, tokens * k - 1)
        rows, row_scale = place(x, row // k, places.used, order=kind)
        h = grouped_product(
            Product(kind, limit, schedule, blocks, interpret),
            rows,
            row_scale,
            slab.gate_up,
            slab.gate_up_scale,
            *gate_up_bands,
            places.tiles,
            weights.reshape(-1)[row],
        )
        if quantize_input:
            # Its channels are in operand order already.
            h, row_scale = place(h, None, places.used, order=None)
        y = grouped_product(
            Product(kind, None, schedule, blocks, interpret),
            h,
            row_scale,
            slab.down,
            slab.down_scale,
            *down_bands,
            places.tiles,
            None,
        )
        if slots is None:
            # XLA joins these passes, of all slabs, and what the program does with the result.
            served = places.position >= 0
            out = jnp.where(served[:, None], y[jnp.maximum(places.position, 0)], out)
        else:
            out = put_back(y, places.source, places.used, out, interpret=interpret)
    return out.reshape(tokens, k, hidden)


def _bands(slab, kind):
    """Of gate_up and of down: each expert's largest scale byte, and the bands of its scales."""
    if kind == "bf16":
        nothing = jnp.zeros(slab.experts, jnp.int32)
        return ((nothing, nothing),) * 2
    found = scale_range(slab) if slab.scale_range is None else slab.scale_range
    return tuple(bands(found[:, matrix]) for matrix in (0, 1))


def bands(found):
    """Largest scale byte, and bands that the scales span, i32 [n], of ranges u8 [n, 2]."""
    bottom, top = found[:, 0].astype(jnp.int32), found[:, 1].astype(jnp.int32)
    return top, (top - bottom) // sm90_fragments.BAND + 1


def wide_experts(slab: ExpertSlab) -> np.ndarray:
    """bool [n]: experts with a matrix whose scales span more octaves than one FP8 table holds.

    Their FP8 products run once for each band of 27 octaves. No weight is rounded for that: sums are
    exact where they are float32 of at least 2^-139 of the matrix's largest scale (2^-126, if that
    scale is 2^13 or less); what is smaller loses bits or is 0. A matrix whose largest scale is less
    than 2^-113 gives 0. The slab's arrays may be on the host or on a device; slabs of another
    format than FP4 have none.
    """
    if slab.format != "fp4":
        return np.zeros(slab.experts, bool)
    found = scale_range(slab) if slab.scale_range is None else slab.scale_range
    return (np.ptp(np.asarray(found, np.int32), axis=2) >= sm90_fragments.BAND).any(axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
    """Where the rows of some experts go: those of an expert from a multiple of ROW_GRAIN on.

    source    i32 [P]: routed row of each place, R in places that stay empty.
    position  i32 [R]: place of each routed row, -1 for rows of other experts.
    tiles     (expert, start, count) i32 [tiles], and i32 [1] how many of them are used.
    used      i32 [1]: places up to the last row.
    """

    source: jax.Array
    position: jax.Array
    tiles: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    used: jax.Array


def place_rows(order: RowOrder, first: int, experts: int, tile: int) -> Places:
    """Places of the rows of experts [first, first + experts), in tiles of at most `tile` rows."""
    total = order.rows.size
    starts = order.starts[first : first + experts + 1]
    counts = jnp.diff(starts)
    padded = (counts + ROW_GRAIN - 1) // ROW_GRAIN * ROW_GRAIN
    ends = jnp.cumsum(padded)
    places = total + min(experts, total) * (ROW_GRAIN - 1)
    # Tiles read whole, also where they end early.
    places = -(-places // ROW_GRAIN) * ROW_GRAIN + tile
    row = jnp.arange(total, dtype=jnp.int32)
    expert = jnp.sum(starts[None, 1:] <= row[:, None], axis=1, dtype=jnp.int32)
    served = (row >= starts[0]) & (expert < experts)
    expert = jnp.minimum(expert, experts - 1)
    place = (ends - padded)[expert] + row - starts[expert]
    position = jnp.full(total, -1, jnp.int32)
    position = position.at[order.rows].set(jnp.where(served, place, -1), unique_indices=True)
    source = jnp.full(places, total, jnp.int32)
    source = source.at[jnp.where(served, place, places)].set(order.rows, mode="drop")
    needed = (counts + tile - 1) // tile
    tile_ends = jnp.cumsum(needed)
    index = jnp.arange(total // tile + min(experts, total), dtype=jnp.int32)
    owner = jnp.sum(tile_ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    owner = jnp.minimum(owner, experts - 1)
    offset = (index - (tile_ends - needed)[owner]) * tile
    count = jnp.clip(counts[owner] - offset, 0, tile)
    start = jnp.minimum((ends - padded)[owner] + offset, places - tile)
    return Places(source, position, (owner, start, count, tile_ends[-1:]), ends[-1:])
