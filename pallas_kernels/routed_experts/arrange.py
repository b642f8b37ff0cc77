"""Rows to their places, ordered for the operands and rounded if wanted; results to their slots."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.codecs.decode import power_of_two

ROWS = 32  # places of a program
BLOCK = 128  # channels of a program that arranges, which share a scale
COLUMNS = 512  # channels of a program that puts back


def arrange(
    x: jax.Array,
    source: jax.Array | None,
    used: jax.Array,
    *,
    order: str | None,
    quantize: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """x[source] for the first `used` places; what is beyond is not written.

    x        bf16 [rows, K], K a multiple of 128.
    source   i32 [places], or None for the rows as they are; used i32 [1].
    order    "fp8" or "bf16": see `sm90_fragments.channel_order`; None keeps the order.
    quantize E4M3 codes and float32 scales [K / 128, places] by the rule of `codecs.quantize_fp8`;
             otherwise bf16 and scales [1, 1] without meaning.
    """
    places = x.shape[0] if source is None else source.size
    blocks = x.shape[1] // BLOCK
    dtype = jnp.float8_e4m3fn if quantize else x.dtype
    out = (
        jax.ShapeDtypeStruct((places, x.shape[1]), dtype),
        jax.ShapeDtypeStruct((blocks, places) if quantize else (1, 1), jnp.float32),
    )
    arrays = (used, x) if source is None else (used, x, source)
    return pl.pallas_call(
        functools.partial(_kernel, order=order, quantize=quantize, places=places),
        grid=(blocks, pl.cdiv(places, ROWS)),
        out_shape=out,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="routed_experts_arrange",
    )(*arrays)


def fresh_slots(x: jax.Array, ids: jax.Array) -> jax.Array:
    """Slots [T, k, D] of x [T, D] in its dtype that no expert served: NaN, 0 where ids are -1."""
    fill = jnp.where(ids >= 0, jnp.nan, 0.0).astype(x.dtype)
    return jnp.broadcast_to(fill[..., None], (*ids.shape, x.shape[1]))


def put_back(
    y: jax.Array, source: jax.Array, used: jax.Array, slots: jax.Array, *, interpret: bool
) -> jax.Array:
    """`slots` with y[place] in row source[place], for the first `used` places; written in place.

    y       [places, D], D a multiple of 512; slots [rows, D] of the same dtype.
    source  i32 [places], all different or `rows` for none, as in the last place; used i32 [1].
    """
    places, hidden = y.shape
    return pl.pallas_call(
        _put_back_kernel,
        grid=(hidden // COLUMNS, pl.cdiv(places, ROWS)),
        out_shape=jax.ShapeDtypeStruct(slots.shape, slots.dtype),
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        input_output_aliases={3: 0},
        interpret=interpret,
        name="routed_experts_put_back",
    )(used, y, source, slots)


def _put_back_kernel(used_ref, y_ref, source_ref, _, out_ref):
    block, first = pl.program_id(0), pl.program_id(1) * ROWS

    @pl.when(first < used_ref[0])
    def _():
        # Lanes beyond the last place repeat it; no row belongs there.
        place = jnp.minimum(first + jnp.arange(ROWS, dtype=jnp.int32), y_ref.shape[0] - 1)
        column = block * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
        row = source_ref[place]
        y = y_ref[place[:, None], column[None, :]]
        valid = (row < out_ref.shape[0])[:, None]
        plt.store(out_ref.at[row[:, None], column[None, :]], y, mask=valid)


def _kernel(used_ref, x_ref, *refs, order, quantize, places):
    *source, out_ref, scale_ref = refs
    block, first = pl.program_id(0), pl.program_id(1) * ROWS

    @pl.when(first < used_ref[0])
    def _():
        place = first + jnp.arange(ROWS, dtype=jnp.int32)
        valid = place < places
        row = jnp.minimum(place, places - 1)
        if source:
            row = source[0][row]
        position = jnp.arange(BLOCK, dtype=jnp.int32)
        channel = position
        if order == "fp8":
            channel = (
                lax.rem(lax.div(position, 4), 4) * 32
                + lax.div(position, 16) * 4
                + lax.rem(position, 4)
            )
        elif order == "bf16":
            within = lax.rem(position, 64)
            channel = (
                position
                - within
                + lax.rem(lax.div(within, 2), 4) * 16
                + lax.div(within, 16) * 4
                + lax.rem(lax.div(within, 8), 2) * 2
                + lax.rem(within, 2)
            )
        x = x_ref[row[:, None], block * BLOCK + channel[None, :]]
        column = block * BLOCK + position
        if quantize:
            x = x.astype(jnp.float32)
            x, scale = _codes(x)
            plt.store(scale_ref.at[block, place], scale, mask=valid)
            x = x.astype(out_ref.dtype)
        plt.store(out_ref.at[place[:, None], column[None, :]], x, mask=valid[:, None])


def _codes(x):
    """E4M3 values (before their rounding) of f32 [rows, 128], and the scale of each row."""
    amax = jnp.maximum(jnp.max(jnp.abs(x), axis=1), 1e-4)
    bits = lax.bitcast_convert_type(amax / 448.0, jnp.int32)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)
    bounded = jnp.minimum(exponent, 126)
    scaled = jnp.clip(x * power_of_two(-bounded)[:, None], -448.0, 448.0)
    return scaled, jnp.where(exponent > 127, jnp.nan, power_of_two(bounded))
