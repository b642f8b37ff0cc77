"""Window plus selected-entry attention in tiles, for any backend: gathers one block at a time."""

import jax
import jax.numpy as jnp

from pallas_kernels import online_softmax
from pallas_kernels.tiles import map_tiles, pad_rows, slice_rows

TOKENS = 16  # tokens of a tile
ENTRIES = 64  # listed entries of a block


def sparse_attention(
    q: jax.Array,
    window_kv: jax.Array,
    compressed: jax.Array,
    indices: jax.Array,
    sink: jax.Array,
    position: jax.Array,
    *,
    window: int,
    scale: float,
) -> jax.Array:
    """See `pallas_kernels.sparse_attention.sparse_attention`.

    Blocks behind the last entry that any token of the tile lists are skipped.
    """
    rows = q.shape[0]
    width = min(ENTRIES, -(-indices.shape[1] // 8) * 8)
    q = pad_rows(q, TOKENS)
    window_kv = jnp.pad(window_kv, ((0, q.shape[0] - rows), (0, 0)))
    indices = jnp.pad(
        indices, ((0, q.shape[0] - rows), (0, -indices.shape[1] % width)), constant_values=-1
    )
    places = jnp.arange(indices.shape[1], dtype=jnp.int32)

    def tile(start: jax.Array) -> jax.Array:
        q_tile = slice_rows(q, start, TOKENS)
        band = slice_rows(window_kv, start, window - 1 + TOKENS)
        listed = slice_rows(indices, start, TOKENS)

        def block(index: jax.Array, running: online_softmax.Running) -> online_softmax.Running:
            chosen = jax.lax.dynamic_slice_in_dim(listed, index * width, width, axis=1)
            visible = chosen >= 0
            keys = compressed[jnp.where(visible, chosen, 0)]
            return online_softmax.add_block(running, q_tile, keys, visible, scale)

        running = online_softmax.window_blocks(
            q_tile, band, position + start, window=window, scale=scale
        )
        used = jnp.max(jnp.where(listed >= 0, places[None, :] + 1, 0))
        running = jax.lax.fori_loop(0, -(-used // width), block, running)
        return online_softmax.finish(running, sink, q.dtype)

    return map_tiles(tile, rows, TOKENS)
