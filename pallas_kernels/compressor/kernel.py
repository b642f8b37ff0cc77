"""Pallas-Triton kernel of the compressors: one pass over the values and gates of a chunk.

One program pools one entry for a block of channels, reading its slots from the chunk and, at the
chunk's start, from the carry. The carry itself is a few rows and is updated outside.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.compressor import reference
from pallas_kernels.compressor.carry import Carry

CHANNELS = 128  # channels of a program; a quarter of them when a block has many rows


def refusal(values: jax.Array, *, ratio: int, overlap: bool) -> str | None:
    """Why the kernel cannot take these values [T, w]; None when it can."""
    width = values.shape[1] // 2 if overlap else values.shape[1]
    if width % CHANNELS:
        return f"entries have {width} channels, the kernel takes multiples of {CHANNELS}"
    if ratio & (ratio - 1):
        return f"ratio is {ratio}, the kernel takes powers of two"
    return None


def compress(
    values: jax.Array,
    gates: jax.Array,
    carry: Carry,
    position: jax.Array,
    length: jax.Array,
    *,
    ratio: int,
    overlap: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, Carry]:
    """See `pallas_kernels.compressor.compress`."""
    tokens, width = values.shape
    blocks = -(-tokens // ratio)
    channels = width // 2 if overlap else width
    lanes = CHANNELS if ratio < 64 else CHANNELS // 4
    arrays = [values, gates, carry.partial_values, carry.partial_gates]
    if overlap:
        arrays += [carry.previous_values, carry.previous_gates]
    entries = pl.pallas_call(
        functools.partial(
            _kernel, tokens=tokens, ratio=ratio, overlap=overlap, channels=channels, lanes=lanes
        ),
        out_shape=jax.ShapeDtypeStruct((blocks, channels), jnp.float32),
        grid=(blocks, channels // lanes),
        in_specs=[pl.no_block_spec] * (1 + len(arrays)),
        out_specs=pl.BlockSpec((None, lanes), lambda b, c: (b, c)),
        compiler_params=plt.CompilerParams(num_warps=1 if ratio < 64 else 4, num_stages=1),
        interpret=interpret,
        name="compress",
    )(jnp.stack([position, length]), *arrays)
    count = (position % ratio + length) // ratio
    new_carry = reference.advance(
        values, gates, carry, position, length, ratio=ratio, overlap=overlap
    )
    return entries, count, position // ratio, new_carry


def _kernel(where_ref, *refs, tokens: int, ratio: int, overlap: bool, channels: int, lanes: int):
    out_ref = refs[-1]
    block = pl.program_id(0)
    offset = where_ref[0] % ratio
    length = where_ref[1]
    slots = jnp.arange(ratio, dtype=jnp.int32)
    lanes = pl.program_id(1) * lanes + jnp.arange(lanes, dtype=jnp.int32)
    complete = (block + 1) * ratio <= offset + length

    def rows_of(block, first_channel, used):
        """Values and gates [ratio, lanes] of one block, from the carried rows or the chunk."""
        at = block * ratio + slots - offset
        old = ((at < 0) & used)[:, None]
        new = ((at >= 0) & (at < length) & used)[:, None]
        lane = (first_channel + lanes)[None, :]
        row = jnp.clip(at, 0, tokens - 1)[:, None]
        pair = []
        for chunk_ref, partial_ref in ((refs[0], refs[2]), (refs[1], refs[3])):
            kept = plt.load(partial_ref.at[slots[:, None], lane], mask=old, other=0.0)
            fresh = plt.load(chunk_ref.at[row, lane], mask=new, other=0.0)
            pair.append(jnp.where(old, kept, fresh))
        return pair

    values, gates = rows_of(block, channels if overlap else 0, complete)
    highest = jnp.max(gates, axis=0)
    if overlap:
        inside = complete & (block > 0)
        before_values, before_gates = rows_of(block - 1, 0, inside)
        carried = (complete & (block == 0)) & (slots >= 0)[:, None]
        at = (slots[:, None], lanes[None, :])
        before_values += plt.load(refs[4].at[at], mask=carried, other=0.0)
        before_gates += plt.load(refs[5].at[at], mask=carried, other=0.0)
        highest = jnp.maximum(highest, jnp.max(before_gates, axis=0))
    weights = jnp.exp(gates - highest[None, :])
    total = jnp.sum(weights, axis=0)
    pooled = jnp.sum(weights * values, axis=0)
    if overlap:
        weights = jnp.exp(before_gates - highest[None, :])
        total += jnp.sum(weights, axis=0)
        pooled += jnp.sum(weights * before_values, axis=0)
    out_ref[...] = jnp.where(complete, pooled / total, 0.0)
