"""Loops over fixed tiles of rows.

A tile has the same shape whatever the number of rows of the call, so that a row's arithmetic does
not depend on it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def pad_rows(x: jax.Array, tile: int) -> jax.Array:
    """x with zero rows added up to a multiple of `tile`."""
    missing = -x.shape[0] % tile
    return jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1)) if missing else x


def slice_rows(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Rows start .. start + size - 1 of x, start traced."""
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=0)


def map_tiles(function: Callable[[jax.Array], Any], rows: int, tile: int) -> Any:
    """Calls function(first row) for every tile; joins the results along axis 0, cut to `rows`."""
    starts = jnp.arange(-(-rows // tile), dtype=jnp.int32) * tile
    results = jax.lax.map(function, starts)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:rows], results)
