"""Pallas-Triton kernel of the two attention operations: one program per token and head group.

A program holds the queries of up to 64 heads and walks over the token's keys in blocks with an
online softmax: first its window, then the compressed entries, either a contiguous prefix or the
rows of a list. It is one loop, so that the next block is always on its way. Everything that depends
on other tokens of the call is outside: a token's result has the same bits wherever it stands in a
chunk.

Norm and rotation of the queries and the rotation of the outputs run in the same program, with the
roundings of `rotary`: apart, each would move as many bytes as the attention.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import rotary

# Finite stand-in for -inf of the running maximum: a block without visible keys then gives zero
# weights and no NaN. Far below every score, far above the float32 minimum.
FLOOR = -1e30


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile shape and launch parameters."""

    heads: int  # rows of the score tile, at most 64
    keys: int  # keys of a block
    warps: int
    stages: int  # depth of the load pipeline; blocks are loaded stages - 1 ahead


PORTABLE = Config(heads=32, keys=32, warps=4, stages=2)


def refusal(q: jax.Array, rope: rotary.Table | None = None) -> str | None:
    """Why the kernel cannot take these queries [T, H, K] and angles; None when it can."""
    heads, width = q.shape[1:]
    if q.dtype != jnp.bfloat16:
        return f"q is {q.dtype}, the kernel multiplies bfloat16 (float32 runs on 'tiled')"
    if heads % 16:
        return f"{heads} heads, the kernel takes multiples of 16"
    if width & (width - 1) or not 64 <= width <= 512:
        return f"head_dim is {width}, the kernel takes powers of two from 64 to 512"
    if rope is not None:
        pairs = rope[0].shape[1]
        if pairs & (pairs - 1) or pairs < 16:
            return f"{pairs} channel pairs turn, the kernel takes powers of two from 16 up"
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
    norm_eps: float | None = None,
    rope: rotary.Table | None = None,
    interpret: bool,
    config: Config = PORTABLE,
) -> jax.Array:
    """Attention of every token over its window and its entries.

    entries None: window only. indices None: the entries i < (position + t + 1) // ratio, else the
    rows that indices [T, k] names (-1 = none). Other arguments as in the doors.
    """
    tokens, heads, width = q.shape
    group = math.gcd(heads, config.heads)
    block = config.keys
    # One array behind the other: one loop then walks over both, and entries are on their way while
    # the window is multiplied.
    keys = window_kv if entries is None else jnp.concatenate([window_kv, entries])
    arrays: dict[str, jax.Array] = {"keys": keys}
    specs = [pl.no_block_spec]
    if indices is not None:
        padded = -(-indices.shape[1] // block) * block
        if padded != indices.shape[1]:
            indices = jnp.pad(indices, ((0, 0), (0, padded - indices.shape[1])), constant_values=-1)
        arrays["indices"] = indices
        specs.append(pl.BlockSpec((None, padded), lambda t, h: (t, 0)))
    if rope is not None:
        arrays |= {"cos": rope[0], "sin": rope[1]}
        specs += [pl.no_block_spec] * 2
    kernel = functools.partial(
        _kernel,
        names=tuple(arrays),
        entries=0 if entries is None else entries.shape[0],
        ratio=ratio,
        window=window,
        scale=scale,
        norm_eps=norm_eps,
        block=block,
        interpret=interpret,
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
        # Behind a list the pipeline has two loads in a row, and divides its depth between them.
        compiler_params=plt.CompilerParams(
            num_warps=config.warps,
            num_stages=config.stages if indices is None else 2 * config.stages - 1,
        ),
        interpret=interpret,
        name="window_attention" if indices is None else "sparse_attention",
    )(position.reshape(1), q, sink, *arrays.values())


def _kernel(
    position_ref,
    q_ref,
    sink_ref,
    *refs,
    names: tuple[str, ...],
    entries: int,
    ratio: int,
    window: int,
    scale: float,
    norm_eps: float | None,
    block: int,
    interpret: bool,
):
    *refs, out_ref = refs
    inputs = dict(zip(names, refs, strict=True))
    token = pl.program_id(0)
    position = position_ref[0]
    q = q_ref[...]
    if norm_eps is not None or "cos" in inputs:
        if norm_eps is not None:
            q = _head_norm(q, norm_eps)
        if "cos" in inputs:
            q = turn(q, inputs["cos"], inputs["sin"], token)
        # By way of the output rows, which nobody else uses: Triton keeps an operand of a product in
        # shared memory when it was loaded, and in registers, of which there are none left, when it
        # was computed.
        out_ref[...] = q
        if not interpret:
            plt.debug_barrier()
        q = out_ref[...]
    factor = jnp.float32(scale * math.log2(math.e))

    lanes = jnp.arange(block, dtype=jnp.int32)
    width = jnp.arange(q.shape[1], dtype=jnp.int32)

    window_blocks = pl.cdiv(window, block)
    first_entry = inputs["keys"].shape[0] - entries
    seen = jnp.minimum((position + token + 1) // ratio, entries)

    def add_block(index, running):
        at = index * block + lanes
        rows = token + at
        visible = (at < window) & (position - (window - 1) + token + at >= 0)
        if entries:
            at = jnp.maximum(at - window_blocks * block, 0)
            listed = plt.load(inputs["indices"].at[at]) if "indices" in inputs else at
            there = listed >= 0 if "indices" in inputs else at < seen
            in_window = index < window_blocks
            rows = jnp.where(in_window, rows, first_entry + listed)
            visible = jnp.where(in_window, visible, there)
        keys = plt.load(
            inputs["keys"].at[rows[:, None], width[None, :]], mask=visible[:, None], other=0.0
        )
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
        total = total * shrink + jnp.sum(weights, axis=1)
        return new, total, values * shrink[:, None] + product

    blocks = inputs["indices"].shape[0] // block if "indices" in inputs else pl.cdiv(seen, block)
    running = (
        jnp.full(q.shape[:1], FLOOR, jnp.float32),
        jnp.zeros(q.shape[:1], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    running = jax.lax.fori_loop(0, window_blocks + blocks, add_block, running)
    highest, total, values = running
    total = total + jnp.exp2(sink_ref[...] * jnp.float32(math.log2(math.e)) - highest)
    out_ref[...] = (values / total[:, None]).astype(out_ref.dtype)
    if "cos" in inputs:
        if not interpret:
            plt.debug_barrier()
        _turn_rows(out_ref, inputs["cos"], inputs["sin"], token, -1.0)


def _head_norm(x, eps: float):
    """`rotary.head_norm` of x [h, K]; the compiler of these kernels keeps every rounding."""

    def rounded(value):
        return value.astype(x.dtype).astype(jnp.float32)

    wide = x.astype(jnp.float32)
    mean = rounded(jnp.sum(rounded(wide * wide), axis=1) / x.shape[1])
    factor = rounded(jax.lax.rsqrt(rounded(mean + eps)))
    return (wide * factor[:, None]).astype(x.dtype)


def turn(x, cos_ref, sin_ref, token):
    """`rotary.apply_rope` of x [h, K], the heads of one token."""
    heads, width = x.shape
    pair = jnp.arange(width // 2, dtype=jnp.int32) - (width // 2 - cos_ref.shape[1])
    turns = pair >= 0  # the others turn by nothing: cosine 1, sine 0
    at = (token, jnp.maximum(pair, 0))
    cos = plt.load(cos_ref.at[at], mask=turns, other=1.0)[None, :]
    sin = plt.load(sin_ref.at[at], mask=turns, other=0.0)[None, :]
    pairs = x.astype(jnp.float32).reshape(heads, width // 2, 2)
    # Values cannot be sliced here: a sum over the pair with a zero in it takes one of the two.
    first = (jnp.arange(2, dtype=jnp.int32) == 0)[None, None, :]
    even = jnp.sum(jnp.where(first, pairs, 0.0), axis=2)
    odd = jnp.sum(jnp.where(first, 0.0, pairs), axis=2)
    turned = jnp.where(
        first, (even * cos - odd * sin)[:, :, None], (even * sin + odd * cos)[:, :, None]
    )
    return turned.reshape(heads, width).astype(x.dtype)


def _turn_rows(ref, cos_ref, sin_ref, token, sign: float):
    """Turns rows [h, K] in memory by sign times the angles; touches only the channels that turn."""
    heads, width = ref.shape
    pair = jnp.arange(cos_ref.shape[1], dtype=jnp.int32)
    head = jnp.arange(heads, dtype=jnp.int32)[:, None]
    at = (width - 2 * pair.shape[0] + 2 * pair)[None, :]
    cos = plt.load(cos_ref.at[token, pair])[None, :]
    sin = sign * plt.load(sin_ref.at[token, pair])[None, :]
    even = plt.load(ref.at[head, at]).astype(jnp.float32)
    odd = plt.load(ref.at[head, at + 1]).astype(jnp.float32)
    plt.store(ref.at[head, at], (even * cos - odd * sin).astype(ref.dtype))
    plt.store(ref.at[head, at + 1], (even * sin + odd * cos).astype(ref.dtype))
