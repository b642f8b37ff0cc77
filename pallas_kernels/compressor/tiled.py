"""Compressors in fixed tiles of entries, for any backend."""

import jax
import jax.numpy as jnp

from pallas_kernels.compressor import reference
from pallas_kernels.compressor.carry import Carry
from pallas_kernels.tiles import map_tiles

ROWS = 64  # tokens of a tile, at least one entry


def compress(
    values: jax.Array,
    gates: jax.Array,
    carry: Carry,
    position: jax.Array,
    length: jax.Array,
    *,
    ratio: int,
    overlap: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, Carry]:
    """See `pallas_kernels.compressor.compress`."""
    blocks = -(-values.shape[0] // ratio)
    tile = max(1, ROWS // ratio)
    offset = position % ratio
    filled = offset + length
    half = values.shape[1] // 2

    def rows_of(block: jax.Array, rows: jax.Array, partial: jax.Array) -> jax.Array:
        """[tile, ratio, w] of blocks `block`; zeros for tokens that are not there."""
        at = block[:, None] * ratio + jnp.arange(ratio, dtype=jnp.int32)[None, :]
        fresh = rows.at[at - offset].get(mode="clip")
        kept = jnp.where((at < offset)[:, :, None], partial[None], fresh)
        return jnp.where((at < filled)[:, :, None], kept, 0)

    def entries(start: jax.Array) -> jax.Array:
        block = start + jnp.arange(tile, dtype=jnp.int32)
        pair = []
        for rows, partial, previous in (
            (values, carry.partial_values, carry.previous_values),
            (gates, carry.partial_gates, carry.previous_gates),
        ):
            own = rows_of(block, rows, partial)
            if overlap:
                before = rows_of(block - 1, rows, partial)[:, :, :half]
                before = jnp.where((block == 0)[:, None, None], previous[None], before)
                own = jnp.concatenate([before, own[:, :, half:]], axis=1)
            pair.append(own)
        complete = (block + 1) * ratio <= filled
        return jnp.where(complete[:, None], reference.pool(*pair), 0)

    new_carry = reference.advance(
        values, gates, carry, position, length, ratio=ratio, overlap=overlap
    )
    return map_tiles(entries, blocks, tile), filled // ratio, position // ratio, new_carry
