"""Order of the routed rows: those of one expert side by side, in their original order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowOrder:
    """R = T * k routed rows (row t * k + j is slot j of token t), sorted by the serving expert.

    rows    i32 [R]: the sorted rows; those that no expert of this call serves come last.
    starts  i32 [n + 1]: rows[starts[e] : starts[e + 1]] belong to expert e of the slabs.
    """

    rows: jax.Array
    starts: jax.Array


def order_rows(ids: jax.Array, where: jax.Array, experts: int) -> RowOrder:
    """Stable order of `ids` (i32 [T, k], -1 = no expert) by `where[id]` (i32 [E], -1 = absent)."""
    flat = ids.reshape(-1)
    rows = flat.size
    owner = jnp.where(flat >= 0, where[jnp.maximum(flat, 0)], -1)
    group = jnp.where(owner >= 0, owner, experts)
    # One unsigned key holds group and row: a plain sort of one array, stable by construction.
    if (experts + 1) * rows > np.iinfo(np.uint32).max:
        raise ValueError(f"{rows} routed rows and {experts} experts: expected a product below 2^32")
    key = group.astype(jnp.uint32) * np.uint32(rows) + jnp.arange(rows, dtype=jnp.uint32)
    key = jnp.sort(key)
    order = (key % np.uint32(rows)).astype(jnp.int32)
    bounds = jnp.arange(experts + 1, dtype=jnp.uint32) * np.uint32(rows)
    starts = jnp.sum(key[None, :] < bounds[:, None], axis=1, dtype=jnp.int32)
    return RowOrder(order, starts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Pieces of at most `size` sorted rows, each of one expert of one slab.

    expert  i32 [tiles]: row of the expert in its slab.
    start   i32 [tiles]: first position in `RowOrder.rows`.
    count   i32 [tiles]: rows of the piece, 0 for the unused tail of the table.
    """

    expert: jax.Array
    start: jax.Array
    count: jax.Array


def row_tiles(
    order: RowOrder, first: int, experts: int, sizes: tuple[int, ...]
) -> tuple[RowTiles, ...]:
    """Tiles of the experts [first, first + experts) of the concatenated slabs, a table per size.

    `sizes` decrease. The rows of an expert fill tiles of the first size, and what is left over goes
    to the next size if it fits one of its tiles. The tables have room for every routing.
    """
    starts = order.starts[first : first + experts + 1]
    left, rows = jnp.diff(starts), order.rows.size
    position = starts[:-1]
    tables = []
    for size, smaller in zip(sizes, (*sizes[1:], 0), strict=True):
        needed = (left + (size - 1 - smaller)) // size
        # Full tiles, and one partial tile of more than `smaller` rows per expert.
        capacity = rows // size + min(experts, rows // (smaller + 1))
        if tables:
            capacity = min(experts, rows)
        tables.append(_table(position, left, needed, size, capacity))
        done = jnp.minimum(needed * size, left)
        position, left = position + done, left - done
    return tuple(tables)


def _table(position, left, needed, size, capacity) -> RowTiles:
    """`needed[e]` tiles of `size` rows from `position[e]` on, `left[e]` rows at most."""
    experts = left.size
    ends = jnp.cumsum(needed)
    tile = jnp.arange(capacity, dtype=jnp.int32)
    expert = jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    used = expert < experts
    expert = jnp.minimum(expert, experts - 1)
    offset = (tile - (ends - needed)[expert]) * size
    count = jnp.where(used, jnp.minimum(left[expert] - offset, size), 0)
    return RowTiles(expert, position[expert] + offset, count)
