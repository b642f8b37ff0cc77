"""Window plus contiguous compressed attention in tiles, for any backend: no [H, T, keys]."""

import jax
import jax.numpy as jnp

from pallas_kernels import online_softmax
from pallas_kernels.tiles import map_tiles, pad_rows, slice_rows

TOKENS = 16  # tokens of a tile
ENTRIES = 64  # compressed entries of a block


def window_attention(
    q: jax.Array,
    window_kv: jax.Array,
    compressed: jax.Array | None,
    sink: jax.Array,
    position: jax.Array,
    *,
    ratio: int,
    window: int,
    scale: float,
) -> jax.Array:
    """See `pallas_kernels.window_attention.window_attention`.

    The blocks a tile visits end with the last entry its last token sees: time follows the entries
    that exist, not the rows of `compressed`.
    """
    rows = q.shape[0]
    q = pad_rows(q, TOKENS)
    window_kv = jnp.pad(window_kv, ((0, q.shape[0] - rows), (0, 0)))
    offsets = jnp.arange(TOKENS, dtype=jnp.int32)

    def tile(start: jax.Array) -> jax.Array:
        q_tile = slice_rows(q, start, TOKENS)
        band = slice_rows(window_kv, start, window - 1 + TOKENS)
        first = position + start
        running = online_softmax.window_blocks(q_tile, band, first, window=window, scale=scale)
        if compressed is not None:
            seen = (first + offsets + 1) // ratio
            running = _entries(running, q_tile, compressed, seen, scale)
        return online_softmax.finish(running, sink, q.dtype)

    return map_tiles(tile, rows, TOKENS)


def _entries(
    running: online_softmax.Running,
    q: jax.Array,
    compressed: jax.Array,
    seen: jax.Array,
    scale: float,
) -> online_softmax.Running:
    def block(index: jax.Array, running: online_softmax.Running) -> online_softmax.Running:
        entries = index * ENTRIES + jnp.arange(ENTRIES, dtype=jnp.int32)
        keys = compressed.at[entries].get(mode="clip")
        return online_softmax.add_block(running, q, keys, entries[None, :] < seen[:, None], scale)

    blocks = jnp.minimum(-(-seen[-1] // ENTRIES), -(-compressed.shape[0] // ENTRIES))
    return jax.lax.fori_loop(0, blocks, block, running)
