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
