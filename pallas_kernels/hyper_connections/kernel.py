"""Pallas-Triton kernels of the hyper-connections; a site is bound by reading its streams.

`pre` is two passes over the streams: the projection to the mixing logits (with the sum of squares
in the same pass), stream by stream so that enough programs read at a time, then, for a few tokens a
program, the maps and the weighted sum. `post` is one pass, in place. The products of the
projection are exact: bfloat16 streams times the three bfloat16 terms that make up a float32 weight.
What is left is the rounding of the tensor cores' float32 accumulation, which reaches 2e-5 of the
logits over 16,384 channels (measured on an H200).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.codecs import round_to
from pallas_kernels.tiles import pad_rows
from pallas_kernels.tracing import traced_once


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile shapes and launch parameters of the three kernels."""

    project_tokens: int = 64
    project_columns: int = 64
    project_warps: int = 4
    project_stages: int = 4
    pre_tokens: int = 8
    pre_columns: int = 512
    pre_warps: int = 4
    post_tokens: int = 1
    post_columns: int = 1024
    post_warps: int = 4


DEFAULT = Config()


def refusal(streams: jax.Array, config: Config = DEFAULT) -> str | None:
    """Why the kernels cannot take these streams [T, S, D]; None when they can."""
    count, width = streams.shape[1:]
    if streams.dtype != jnp.bfloat16:
        return f"streams are {streams.dtype}, the kernel multiplies bfloat16"
    if count & (count - 1):
        return f"{count} streams, the kernel takes powers of two"
    columns = max(config.pre_columns, config.post_columns, config.project_columns)
    if width % columns:
        return f"streams are {width} wide, the kernel takes multiples of {columns}"
    return None


@traced_once("iterations", "eps", "norm_eps", "config", "interpret")
def pre(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    config: Config = DEFAULT,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.hyper_connections.pre`."""
    rows = streams.shape[0]
    streams = pad_rows(streams, math.lcm(config.pre_tokens, config.project_tokens))
    tokens, count, width = streams.shape
    parts, squares = project(streams, fn, config=config, interpret=interpret)
    results = pl.pallas_call(
        functools.partial(
            _pre_kernel,
            shape=(count, width),
            iterations=iterations,
            eps=eps,
            norm_eps=norm_eps,
            rows=config.pre_tokens,
            columns=config.pre_columns,
        ),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, width), streams.dtype),
            jax.ShapeDtypeStruct((tokens, count), jnp.float32),
            jax.ShapeDtypeStruct((tokens, count, count), jnp.float32),
        ),
        grid=(tokens // config.pre_tokens,),
        in_specs=[pl.no_block_spec] * 5,
        out_specs=(pl.no_block_spec,) * 3,
        compiler_params=plt.CompilerParams(num_warps=config.pre_warps, num_stages=1),
        interpret=interpret,
        name="hyper_pre",
    )(parts, squares, base, scale, streams)
    return tuple(x[:rows] for x in results)


def project(
    streams: jax.Array, fn: jax.Array, *, config: Config, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """What each stream adds to the mixing logits and to the sum of squares.

    Returns products [S, T, rows of fn rounded up to a power of two] (the extra ones are zero) and
    squares [S, T], both float32. T is a multiple of config.project_tokens.
    """
    tokens, count, width = streams.shape
    padded = max(16, 1 << (fn.shape[0] - 1).bit_length())
    terms = jnp.pad(split3(fn), ((0, 0), (0, padded - fn.shape[0]), (0, 0)))
    return pl.pallas_call(
        functools.partial(
            _project_kernel,
            width=width,
            rows=config.project_tokens,
            columns=config.project_columns,
        ),
        out_shape=(
            jax.ShapeDtypeStruct((count, tokens, padded), jnp.float32),
            jax.ShapeDtypeStruct((count, tokens), jnp.float32),
        ),
        grid=(tokens // config.project_tokens, count),
        in_specs=[pl.no_block_spec] * 2,
        out_specs=(pl.no_block_spec,) * 2,
        compiler_params=plt.CompilerParams(
            num_warps=config.project_warps, num_stages=config.project_stages
        ),
        interpret=interpret,
        name="hyper_project",
    )(streams.reshape(tokens, count * width), terms)


def split3(x: jax.Array) -> jax.Array:
    """Three bfloat16 arrays [3, ...] whose sum is the float32 x (24 bits, short of underflow)."""
    terms = []
    for _ in range(3):
        term = round_to(x, jnp.bfloat16)
        terms.append(term)
        x = x - term.astype(jnp.float32)
    return jnp.stack(terms)


def _project_kernel(
    streams_ref, terms_ref, parts_ref, squares_ref, *, width: int, rows: int, columns: int
):
    padded = terms_ref.shape[1]
    outputs = jnp.arange(padded, dtype=jnp.int32)
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    stream = pl.program_id(1)

    def step(index, carry):
        product, squares = carry
        lanes = stream * width + index * columns + jnp.arange(columns, dtype=jnp.int32)
        x = plt.load(streams_ref.at[row[:, None], lanes[None, :]])
        # Summed over the terms first, then added: the products are then complete before the step
        # ends. As accumulator of the last product, `product` would still be in the making when
        # Triton loads a later x over this one, whose buffer it takes for free once x was read for
        # the squares.
        terms = [
            jax.lax.dot_general(
                x,
                plt.load(terms_ref.at[term, outputs[:, None], lanes[None, :]]),
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            for term in range(3)
        ]
        x = x.astype(jnp.float32)
        return product + (terms[0] + terms[1] + terms[2]), squares + jnp.sum(x * x, axis=1)

    product, squares = jax.lax.fori_loop(
        0,
        width // columns,
        step,
        (jnp.zeros((rows, padded), jnp.float32), jnp.zeros((rows,), jnp.float32)),
    )
    plt.store(parts_ref.at[stream, row[:, None], outputs[None, :]], product)
    plt.store(squares_ref.at[stream, row], squares)


def _sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))


def _pre_kernel(
    parts_ref,
    squares_ref,
    base_ref,
    scale_ref,
    streams_ref,
    u_ref,
    post_ref,
    comb_ref,
    *,
    shape: tuple[int, int],
    iterations: int,
    eps: float,
    norm_eps: float,
    rows: int,
    columns: int,
):
    count, width = shape
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    index = jnp.arange(count, dtype=jnp.int32)
    squares = sum(plt.load(squares_ref.at[j, row]) for j in range(count))
    factor = jax.lax.rsqrt(squares / (count * width) + norm_eps)

    def mixes(at, axes):
        """Logits of the outputs `at`, which has `axes` axes: [rows, ...]."""
        there = row.reshape(rows, *(1,) * axes)
        total = sum(plt.load(parts_ref.at[j, there, at]) for j in range(count))
        return total * factor.reshape(rows, *(1,) * axes)

    at = count + index
    logits = mixes(at[None, :], 1) * scale_ref[1]
    plt.store(
        post_ref.at[row[:, None], index[None, :]],
        2.0 * _sigmoid(logits + plt.load(base_ref.at[at])[None, :]),
    )

    at = 2 * count + index[:, None] * count + index[None, :]
    logits = mixes(at[None], 2) * scale_ref[2]
    comb = logits + plt.load(base_ref.at[at])[None]
    comb = jnp.exp(comb - jnp.max(comb, axis=2, keepdims=True))
    comb = comb / jnp.sum(comb, axis=2, keepdims=True) + eps
    comb = comb / (jnp.sum(comb, axis=1, keepdims=True) + eps)

    def one_round(_, comb):
        comb = comb / (jnp.sum(comb, axis=2, keepdims=True) + eps)
        return comb / (jnp.sum(comb, axis=1, keepdims=True) + eps)

    plt.store(
        comb_ref.at[row[:, None, None], index[None, :, None], index[None, None, :]],
        jax.lax.fori_loop(0, iterations - 1, one_round, comb),
    )

    weights = [_sigmoid(mixes(j, 0) * scale_ref[0] + base_ref[j]) + eps for j in range(count)]

    def step(index, _):
        lanes = index * columns + jnp.arange(columns, dtype=jnp.int32)
        total = jnp.zeros((rows, columns), jnp.float32)
        for j, weight in enumerate(weights):
            x = plt.load(streams_ref.at[row[:, None], j, lanes[None, :]])
            total += weight[:, None] * x.astype(jnp.float32)
        plt.store(
            u_ref.at[row[:, None], lanes[None, :]],
            total.astype(u_ref.dtype),
        )

    jax.lax.fori_loop(0, width // columns, step, None)


@traced_once("config", "interpret")
def post(
    y: jax.Array,
    streams: jax.Array,
    weights: jax.Array,
    comb: jax.Array,
    *,
    config: Config = DEFAULT,
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.hyper_connections.post`."""
    rows = streams.shape[0]
    y, streams, weights, comb = (
        pad_rows(x, config.post_tokens) for x in (y, streams, weights, comb)
    )
    tokens, count, width = streams.shape
    mixed = pl.pallas_call(
        functools.partial(
            _post_kernel,
            count=count,
            rows=config.post_tokens,
            columns=config.post_columns,
        ),
        out_shape=jax.ShapeDtypeStruct(streams.shape, streams.dtype),
        grid=(tokens // config.post_tokens, width // config.post_columns),
        in_specs=[pl.no_block_spec] * 4,
        out_specs=pl.no_block_spec,
        # In place: a program reads its part of every stream before it writes any.
        input_output_aliases={1: 0},
        compiler_params=plt.CompilerParams(num_warps=config.post_warps, num_stages=1),
        interpret=interpret,
        name="hyper_post",
    )(y, streams, weights, comb)
    return mixed[:rows]


def _post_kernel(
    y_ref,
    streams_ref,
    weights_ref,
    comb_ref,
    out_ref,
    *,
    count: int,
    rows: int,
    columns: int,
):
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    lanes = pl.program_id(1) * columns + jnp.arange(columns, dtype=jnp.int32)
    y = plt.load(y_ref.at[row[:, None], lanes[None, :]]).astype(jnp.float32)
    streams = [
        plt.load(streams_ref.at[row[:, None], j, lanes[None, :]]).astype(jnp.float32)
        for j in range(count)
    ]
    for k in range(count):
        total = plt.load(comb_ref.at[row, 0, k])[:, None] * streams[0]
        for j in range(1, count):
            total += plt.load(comb_ref.at[row, j, k])[:, None] * streams[j]
        total += plt.load(weights_ref.at[row, k])[:, None] * y
        plt.store(
            out_ref.at[row[:, None], k, lanes[None, :]],
            total.astype(out_ref.dtype),
        )
