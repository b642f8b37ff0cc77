"""Pallas-Triton kernel of the indexer scores: one program per tile of tokens and entries.

A program keeps its entries and adds up relu(q . k) * weight head by head in registers, so that the
products [T, heads, N] never exist. The heads are added in order, in float32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.indexer import reference
from pallas_kernels.tiles import map_tiles, pad_rows, slice_rows
from pallas_kernels.top_k import kernel as top_k_kernel


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile shape and launch parameters."""

    tokens: int
    entries: int
    warps: int
    stages: int


# 80 KiB of shared memory: the best tile on Hopper fits other GPUs too.
CONFIGS = {name: Config(tokens=64, entries=128, warps=4, stages=3) for name in ("portable", "sm90")}

# Bytes of scores that may exist at one time during a selection; see `query_tile`.
SCORE_BYTES = 512 * 2**20


def refusal(queries: jax.Array) -> str | None:
    """Why the kernel cannot take these queries [T, Hi, Di]; None when it can."""
    width = queries.shape[2]
    if queries.dtype != jnp.bfloat16:
        return f"queries are {queries.dtype}, the kernel multiplies bfloat16"
    if width & (width - 1) or not 16 <= width <= 256:
        return f"the index head has {width} channels, the kernel takes powers of two from 16 to 256"
    return None


def query_tile(tokens: int, entries: int) -> int:
    """Tokens whose scores exist at one time: as many as SCORE_BYTES holds, a power of two."""
    most = max(SCORE_BYTES // (4 * entries), 16)
    return min(1 << (most.bit_length() - 1), -(-tokens // 16) * 16)


def indexer_scores(
    queries: jax.Array,
    keys: jax.Array,
    weights: jax.Array,
    position: jax.Array,
    *,
    ratio: int,
    config: Config,
    fill: bool = True,
    interpret: bool = False,
) -> jax.Array:
    """Scores [T, N rounded up to whole tiles]; fill=False leaves tiles nobody sees unwritten."""
    rows, entries = queries.shape[0], keys.shape[0]
    queries, weights = pad_rows(queries, config.tokens), pad_rows(weights, config.tokens)
    tokens, heads, _ = queries.shape
    columns = -(-entries // config.entries) * config.entries
    scores = pl.pallas_call(
        functools.partial(
            _kernel, heads=heads, entries=entries, ratio=ratio, config=config, fill=fill
        ),
        out_shape=jax.ShapeDtypeStruct((tokens, columns), jnp.float32),
        grid=(columns // config.entries, tokens // config.tokens),
        in_specs=[pl.no_block_spec] * 4,
        out_specs=pl.BlockSpec((config.tokens, config.entries), lambda n, t: (t, n)),
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="indexer_scores",
    )(position.reshape(1), queries, keys, weights)
    return scores[:rows]


def _kernel(
    position_ref,
    queries_ref,
    keys_ref,
    weights_ref,
    out_ref,
    *,
    heads: int,
    entries: int,
    ratio: int,
    config: Config,
    fill: bool,
):
    rows = pl.program_id(1) * config.tokens + jnp.arange(config.tokens, dtype=jnp.int32)
    columns = pl.program_id(0) * config.entries + jnp.arange(config.entries, dtype=jnp.int32)
    seen = (position_ref[0] + rows + 1) // ratio
    last = (position_ref[0] + (pl.program_id(1) + 1) * config.tokens) // ratio
    anything = pl.program_id(0) * config.entries < last
    width = jnp.arange(keys_ref.shape[1], dtype=jnp.int32)

    @pl.when(anything)
    def _():
        # Columns beyond the capacity repeat its last row; no token sees them.
        column = jnp.minimum(columns, entries - 1)
        keys = plt.load(keys_ref.at[column[:, None], width[None, :]])

        def add_head(head, scores):
            queries = plt.load(queries_ref.at[rows[:, None], head, width[None, :]])
            products = jax.lax.dot_general(
                queries, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            half = 0.5 * plt.load(weights_ref.at[rows, head])
            return scores + half[:, None] * reference.twice_relu(products)

        scores = jax.lax.fori_loop(
            0, heads, add_head, jnp.zeros((config.tokens, config.entries), jnp.float32)
        )
        visible = columns[None, :] < jnp.minimum(seen, entries)[:, None]
        out_ref[...] = jnp.where(visible, scores, -jnp.inf)

    if fill:

        @pl.when(jnp.logical_not(anything))
        def _():
            out_ref[...] = jnp.full((config.tokens, config.entries), -jnp.inf, jnp.float32)


def select_entries(
    queries: jax.Array,
    keys: jax.Array,
    weights: jax.Array,
    position: jax.Array,
    *,
    k: int,
    ratio: int,
    tile: int | None,
    config: Config,
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.indexer.select_entries`: tile by tile of tokens, scores then top-k."""
    tokens = queries.shape[0]
    tile = tile or query_tile(tokens, keys.shape[0])
    queries, weights = pad_rows(queries, tile), pad_rows(weights, tile)

    def one_tile(start: jax.Array) -> jax.Array:
        first = position + start
        seen = (first + jnp.arange(tile, dtype=jnp.int32) + 1) // ratio
        seen = jnp.minimum(seen, keys.shape[0])

        def best() -> jax.Array:
            scores = indexer_scores(
                slice_rows(queries, start, tile),
                keys,
                slice_rows(weights, start, tile),
                first,
                ratio=ratio,
                config=config,
                fill=False,
                interpret=interpret,
            )
            chosen, nan = top_k_kernel.top_k_and_nan(scores, k, seen, interpret=interpret)
            return reference.selection(chosen, nan, seen)

        return jax.lax.cond(seen[-1] <= k, lambda: reference.all_visible(seen, k), best)

    return map_tiles(one_tile, tokens, tile)
