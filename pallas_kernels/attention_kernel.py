"""Pallas-Triton kernel of the two attention operations: one program per token and head group.

A program holds the queries of up to 64 heads and walks over the token's keys in blocks with an
online softmax: first its window, then the compressed entries, either a contiguous prefix or the
rows of a list. Everything that depends on other tokens of the call is outside: a token's result
has the same bits wherever it stands in a chunk.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# Finite stand-in for -inf of the running maximum: a block without visible keys then gives zero
# weights and no NaN. Far below every score, far above the float32 minimum.
FLOOR = -1e30


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile shape and launch parameters."""

    heads: int  # rows of the score tile, at most 64
    keys: int  # keys of a block
    warps: int
    stages: int  # depth of the load pipeline


CONFIGS = {
    "portable": Config(heads=32, keys=32, warps=4, stages=2),
    "sm90": Config(heads=64, keys=64, warps=8, stages=2),
}


def refusal(q: jax.Array) -> str | None:
    """Why the kernel cannot take these queries [T, H, K]; None when it can."""
    heads, width = q.shape[1:]
    if q.dtype != jnp.bfloat16:
        return f"q is {q.dtype}, the kernel multiplies bfloat16 (float32 runs on 'tiled')"
    if heads % 16:
        return f"{heads} heads, the kernel takes multiples of 16"
    if width & (width - 1) or not 64 <= width <= 512:
        return f"head_dim is {width}, the kernel takes powers of two from 64 to 512"
    return None


def attend(
    q: jax.Array,
    window_kv: jax.Array,
    entries: jax.Array | None,
    indices: jax.Array | None,
    sink: jax.Array,
    position: jax.Array,
    *,
    ratio: int,
    window: int,
    scale: float,
    config: Config,
    interpret: bool,
) -> jax.Array:
    """Attention of every token over its window and its entries.

    entries None: window only. indices None: the entries i < (position + t + 1) // ratio, else the
    rows that indices [T, k] names (-1 = none). Other arguments as in the doors.
    """
    tokens, heads, width = q.shape
    group = math.gcd(heads, config.heads)
    block = config.keys
    arrays: list[jax.Array] = [window_kv]
    specs = [pl.no_block_spec]
    if entries is not None:
        arrays.append(entries)
        specs.append(pl.no_block_spec)
        if indices is not None:
            padded = -(-indices.shape[1] // block) * block
            arrays.append(
                jnp.pad(indices, ((0, 0), (0, padded - indices.shape[1])), constant_values=-1)
            )
            specs.append(pl.BlockSpec((None, padded), lambda t, h: (t, 0)))
    kernel = functools.partial(
        _kernel,
        has_entries=entries is not None,
        has_indices=indices is not None,
        capacity=0 if entries is None else entries.shape[0],
        ratio=ratio,
        window=window,
        scale=scale,
        block=block,
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(tokens, heads // group),
        in_specs=[
            pl.no_block_spec,
            pl.BlockSpec((None, group, width), lambda t, h: (t, h, 0)),
            pl.BlockSpec((group,), lambda t, h: (h,)),
            *specs,
        ],
        out_specs=pl.BlockSpec((None, group, width), lambda t, h: (t, h, 0)),
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="window_attention" if indices is None else "sparse_attention",
    )(position.reshape(1), q, sink, *arrays)


def _kernel(
    position_ref,
    q_ref,
    sink_ref,
    window_ref,
    *refs,
    has_entries: bool,
    has_indices: bool,
    capacity: int,
    ratio: int,
    window: int,
    scale: float,
    block: int,
):
    out_ref = refs[-1]
    token = pl.program_id(0)
    position = position_ref[0]
    q = q_ref[...]
    factor = jnp.float32(scale * math.log2(math.e))

    def update(keys, visible, running):
        highest, total, values = running
        scores = jax.lax.dot_general(
            q, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        scores = jnp.where(visible[None, :], scores * factor, -jnp.inf)
        new = jnp.maximum(highest, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - new[:, None])
        shrink = jnp.exp2(highest - new)
        product = jax.lax.dot_general(
            weights.astype(keys.dtype),
            keys,
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return (
            new,
            total * shrink + jnp.sum(weights, axis=1),
            values * shrink[:, None] + product,
        )

    lanes = jnp.arange(block, dtype=jnp.int32)
    width = jnp.arange(q.shape[1], dtype=jnp.int32)

    def window_block(index, running):
        rows = index * block + lanes
        visible = (rows < window) & (position - (window - 1) + token + rows >= 0)
        keys = plt.load(
            window_ref.at[(token + rows)[:, None], width[None, :]], mask=visible[:, None], other=0.0
        )
        return update(keys, visible, running)

    def entry_block(index, running):
        at = index * block + lanes
        if has_indices:
            rows = refs[1][pl.ds(index * block, block)]
            visible = rows >= 0
        else:
            rows = at
            visible = at < seen
        keys = plt.load(refs[0].at[rows[:, None], width[None, :]], mask=visible[:, None], other=0.0)
        return update(keys, visible, running)

    running = (
        jnp.full(q.shape[:1], FLOOR, jnp.float32),
        jnp.zeros(q.shape[:1], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    running = jax.lax.fori_loop(0, pl.cdiv(window, block), window_block, running)
    if has_entries:
        if has_indices:
            blocks = refs[1].shape[0] // block
        else:
            seen = jnp.minimum((position + token + 1) // ratio, capacity)
            blocks = pl.cdiv(seen, block)
        running = jax.lax.fori_loop(0, blocks, entry_block, running)
    highest, total, values = running
    total = total + jnp.exp2(sink_ref[...] * jnp.float32(math.log2(math.e)) - highest)
    out_ref[...] = (values / total[:, None]).astype(out_ref.dtype)
