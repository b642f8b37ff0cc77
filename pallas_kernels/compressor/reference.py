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
    count = filled // ratio
    partial_values = jax.lax.dynamic_index_in_dim(value_blocks, count, keepdims=False)
    partial_gates = jax.lax.dynamic_index_in_dim(gate_blocks, count, keepdims=False)
    if overlap:
        half = values.shape[1] // 2
        previous_values = jnp.concatenate([carry.previous_values[None], value_blocks[..., :half]])
        previous_gates = jnp.concatenate([carry.previous_gates[None], gate_blocks[..., :half]])
        new_carry = Carry(
            partial_values,
            partial_gates,
            jax.lax.dynamic_index_in_dim(previous_values, count, keepdims=False),
            jax.lax.dynamic_index_in_dim(previous_gates, count, keepdims=False),
        )
        entries = _pool(
            jnp.concatenate([previous_values[:blocks], value_blocks[:blocks, :, half:]], axis=1),
            jnp.concatenate([previous_gates[:blocks], gate_blocks[:blocks, :, half:]], axis=1),
        )
    else:
        new_carry = Carry(partial_values, partial_gates)
        entries = _pool(value_blocks[:blocks], gate_blocks[:blocks])
    complete = jnp.arange(blocks, dtype=jnp.int32)[:, None] < count
    return jnp.where(complete, entries, 0), count, position // ratio, new_carry


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


def _pool(values: jax.Array, gates: jax.Array) -> jax.Array:
    """Per channel, the softmax of the gates over axis 1 applied to the values."""
    weights = jnp.exp(gates - jnp.max(gates, axis=1, keepdims=True))
    return jnp.sum(weights * values, axis=1) / jnp.sum(weights, axis=1)
