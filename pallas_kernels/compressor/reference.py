"""Gated pooling of token blocks with a carried partial block, in plain JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels.compressor.carry import Carry


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
    offset = position % ratio
    filled = offset + length
    value_blocks = _blocks(values, carry.partial_values, offset, filled, blocks, ratio)
    gate_blocks = _blocks(gates, carry.partial_gates, offset, filled, blocks, ratio)
    if overlap:
        half = values.shape[1] // 2
        previous_values = jnp.concatenate([carry.previous_values[None], value_blocks[..., :half]])
        previous_gates = jnp.concatenate([carry.previous_gates[None], gate_blocks[..., :half]])
        value_blocks = jnp.concatenate([previous_values[:-1], value_blocks[..., half:]], axis=1)
        gate_blocks = jnp.concatenate([previous_gates[:-1], gate_blocks[..., half:]], axis=1)
    entries = pool(value_blocks[:blocks], gate_blocks[:blocks])
    count = filled // ratio
    complete = jnp.arange(blocks, dtype=jnp.int32)[:, None] < count
    new_carry = advance(values, gates, carry, position, length, ratio=ratio, overlap=overlap)
    return jnp.where(complete, entries, 0), count, position // ratio, new_carry


def advance(
    values: jax.Array,
    gates: jax.Array,
    carry: Carry,
    position: jax.Array,
    length: jax.Array,
    *,
    ratio: int,
    overlap: bool,
) -> Carry:
    """The carry after `length` more tokens; reads only the rows that it keeps."""
    offset = position % ratio
    filled = offset + length
    count = filled // ratio
    slots = jnp.arange(ratio, dtype=jnp.int32)

    def rows_of(block: jax.Array, rows: jax.Array, partial: jax.Array) -> jax.Array:
        at = block * ratio + slots
        fresh = rows.at[at - offset].get(mode="clip")
        kept = jnp.where((at < offset)[:, None], partial, fresh)
        return jnp.where((at < filled)[:, None], kept, 0)

    partial = (
        rows_of(count, values, carry.partial_values),
        rows_of(count, gates, carry.partial_gates),
    )
    if not overlap:
        return Carry(*partial)
    half = values.shape[1] // 2
    closed = count > 0
    last_values = rows_of(count - 1, values, carry.partial_values)[:, :half]
    last_gates = rows_of(count - 1, gates, carry.partial_gates)[:, :half]
    return Carry(
        *partial,
        jnp.where(closed, last_values, carry.previous_values),
        jnp.where(closed, last_gates, carry.previous_gates),
    )


def _blocks(
    rows: jax.Array,
    partial: jax.Array,
    offset: jax.Array,
    filled: jax.Array,
    blocks: int,
    ratio: int,
) -> jax.Array:
    """[blocks + 1, ratio, w]: the carried rows, then the chunk's, zeros from `filled` on."""
    width = rows.shape[1]
    at = jnp.arange((blocks + 1) * ratio, dtype=jnp.int32)[:, None]
    buffer = jnp.zeros(((blocks + 1) * ratio, width), rows.dtype)
    buffer = jax.lax.dynamic_update_slice(buffer, rows, (offset, jnp.int32(0)))
    carried = jnp.pad(partial, ((0, blocks * ratio), (0, 0)))
    buffer = jnp.where(at < offset, carried, buffer)
    return jnp.where(at < filled, buffer, 0).reshape(blocks + 1, ratio, width)


def pool(values: jax.Array, gates: jax.Array) -> jax.Array:
    """Per channel, the softmax of the gates over axis 1 applied to the values."""
    weights = jnp.exp(gates - jnp.max(gates, axis=1, keepdims=True))
    return jnp.sum(weights * values, axis=1) / jnp.sum(weights, axis=1)
