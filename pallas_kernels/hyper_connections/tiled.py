"""Hyper-connections in fixed tiles of rows, for any backend."""

import functools

import jax

from pallas_kernels.hyper_connections import reference
from pallas_kernels.tiles import map_tiles, pad_rows, slice_rows

TOKENS = 16  # tokens of a tile


def pre(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.hyper_connections.pre`."""
    function = functools.partial(reference.pre, iterations=iterations, eps=eps, norm_eps=norm_eps)
    padded = pad_rows(streams, TOKENS)
    return map_tiles(
        lambda start: function(slice_rows(padded, start, TOKENS), fn, base, scale),
        streams.shape[0],
        TOKENS,
    )


def post(y: jax.Array, streams: jax.Array, weights: jax.Array, comb: jax.Array) -> jax.Array:
    """See `pallas_kernels.hyper_connections.post`."""
    padded = [pad_rows(x, TOKENS) for x in (y, streams, weights, comb)]
    return map_tiles(
        lambda start: reference.post(*(slice_rows(x, start, TOKENS) for x in padded)),
        streams.shape[0],
        TOKENS,
    )


def collapse(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    norm_eps: float,
) -> jax.Array:
    """See `pallas_kernels.hyper_connections.collapse`."""
    function = functools.partial(reference.collapse, eps=eps, norm_eps=norm_eps)
    padded = pad_rows(streams, TOKENS)
    return map_tiles(
        lambda start: function(slice_rows(padded, start, TOKENS), fn, base, scale),
        streams.shape[0],
        TOKENS,
    )
