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
    """The carry before position 0 of a compressor whose projections have `width` channels."""
    partial = jnp.zeros((ratio, width), jnp.float32)
    if not overlap:
        return Carry(partial, partial)
    half = (ratio, width // 2)
    return Carry(
        partial, partial, jnp.zeros(half, jnp.float32), jnp.full(half, -jnp.inf, jnp.float32)
    )
