"""Indexer scores and selection in tiles of tokens and entries, for any backend."""

import jax
import jax.numpy as jnp

from pallas_kernels.indexer import reference
from pallas_kernels.online_softmax import precision
from pallas_kernels.tiles import map_tiles, pad_rows, slice_rows

TOKENS = 16  # tokens of a tile
ENTRIES = 128  # entries of a block


def indexer_scores(
    queries: jax.Array, keys: jax.Array, weights: jax.Array, position: jax.Array, *, ratio: int
) -> jax.Array:
    """See `pallas_kernels.indexer.indexer_scores`."""
    rows, entries = queries.shape[0], keys.shape[0]
    queries, weights = pad_rows(queries, TOKENS), pad_rows(weights, TOKENS)

    def tile(start: jax.Array) -> jax.Array:
        return _scores(queries, keys, weights, start, position, ratio=ratio)

    return map_tiles(tile, rows, TOKENS)[:, :entries]


def select_entries(
    queries: jax.Array,
    keys: jax.Array,
    weights: jax.Array,
    position: jax.Array,
    *,
    k: int,
    ratio: int,
) -> jax.Array:
    """See `pallas_kernels.indexer.select_entries`."""
    rows = queries.shape[0]
    queries, weights = pad_rows(queries, TOKENS), pad_rows(weights, TOKENS)

    def tile(start: jax.Array) -> jax.Array:
        seen = (position + start + jnp.arange(TOKENS, dtype=jnp.int32) + 1) // ratio
        seen = jnp.minimum(seen, keys.shape[0])

        def best() -> jax.Array:
            scores = _scores(queries, keys, weights, start, position, ratio=ratio)
            return reference.select(scores, k, seen)

        return jax.lax.cond(seen[-1] <= k, lambda: reference.all_visible(seen, k), best)

    return map_tiles(tile, rows, TOKENS)


def _scores(
    queries: jax.Array,
    keys: jax.Array,
    weights: jax.Array,
    start: jax.Array,
    position: jax.Array,
    *,
    ratio: int,
) -> jax.Array:
    """Scores of one tile, [TOKENS, N rounded up to blocks]; blocks that nobody sees are skipped."""
    heads, width = queries.shape[1:]
    queries = slice_rows(queries, start, TOKENS).reshape(TOKENS * heads, width)
    weights = slice_rows(weights, start, TOKENS)
    seen = (position + start + jnp.arange(TOKENS, dtype=jnp.int32) + 1) // ratio
    blocks = -(-keys.shape[0] // ENTRIES)

    def block(index: jax.Array, scores: jax.Array) -> jax.Array:
        entries = index * ENTRIES + jnp.arange(ENTRIES, dtype=jnp.int32)
        products = jax.lax.dot_general(
            queries,
            keys.at[entries].get(mode="clip"),
            (((1,), (1,)), ((), ())),
            precision=precision(queries.dtype),
            preferred_element_type=jnp.float32,
        ).reshape(TOKENS, heads, ENTRIES)
        twice = reference.twice_relu(products)
        fresh = jnp.sum(0.5 * weights[:, :, None] * twice, axis=1)
        visible = entries[None, :] < jnp.minimum(seen, keys.shape[0])[:, None]
        fresh = jnp.where(visible, fresh, -jnp.inf)
        return jax.lax.dynamic_update_slice(scores, fresh, (jnp.int32(0), index * ENTRIES))

    scores = jnp.full((TOKENS, blocks * ENTRIES), -jnp.inf, jnp.float32)
    return jax.lax.fori_loop(0, jnp.minimum(-(-seen[-1] // ENTRIES), blocks), block, scores)
