"""What a compressor keeps between chunks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Carry(NamedTuple):
    """Rows of the block that is not complete yet and, with overlap, of the one before it.

    partial_values, partial_gates: [ratio, w] float32; slot s holds the token whose position is s
      modulo the ratio. Slots of tokens that have not come yet are zero.
    previous_values, previous_gates: [ratio, w / 2] float32, the first half of the channels of the
      last complete block; None without overlap. While no block is complete the gates are -inf.
    """

    partial_values: jax.Array
    partial_gates: jax.Array
    previous_values: jax.Array | None = None
    previous_gates: jax.Array | None = None


def empty_carry(width: int, *, ratio: int, overlap: bool) -> Carry:
    """The carry before position 0 of a compressor whose projections have `width` channels.

    No two fields share a buffer, so that a carry can be donated.
    """
    values, gates = (jnp.zeros((ratio, width), jnp.float32) for _ in range(2))
    if not overlap:
        return Carry(values, gates)
    half = (ratio, width // 2)
    return Carry(values, gates, jnp.zeros(half, jnp.float32), jnp.full(half, -jnp.inf, jnp.float32))
