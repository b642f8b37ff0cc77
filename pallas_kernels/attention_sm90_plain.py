"""What `attention_sm90_lanes` does, in plain operations for the interpreter."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def _by_key(rows):
    return rows.reshape(4, 2, 16)[:, 0].reshape(-1)


def store_bias(rows, bias_ref):
    bias_ref[...] = jnp.where(_by_key(rows) >= 0, 0.0, -jnp.inf)


def copy_rows(source_ref, rows, slot_ref, first):
    rows = _by_key(rows)[:, None]
    values = source_ref[:, pl.ds(first, slot_ref.shape[1])]
    values = jnp.take_along_axis(values, jnp.maximum(rows, 0), axis=0)
    slot_ref[...] = jnp.where(rows >= 0, values, jnp.zeros_like(values))


def await_copies(under_way):
    del under_way


def scores(q_ref, keys_ref):
    q, keys = q_ref[...], keys_ref[...]
    dimensions = (((2,), (2,)), ((0,), (0,)))
    return jnp.sum(lax.dot_general(q, keys, dimensions, preferred_element_type=jnp.float32), axis=0)


def add_products(sums, weights, keys_ref):
    product = jnp.dot(
        weights.astype(jnp.bfloat16), keys_ref[...], preferred_element_type=jnp.float32
    )
    parts = jnp.split(product, len(sums), axis=1)
    # The interpreter's race detector wants a fence between ordinary reads and the copies that
    # refill a buffer; the compiled kernel has read it when its products are done.
    plgpu.commit_smem()
    return tuple(total + part for total, part in zip(sums, parts, strict=True))


def turn(value, rope_ref, sign):
    cos, sin = (rope_ref[side][None, :] for side in range(2))
    sin = sign * sin
    pairs = value.reshape(*value.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(value.shape)
