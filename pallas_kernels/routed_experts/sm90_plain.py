"""What `sm90_fragments` does, in plain operations for the interpreter."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import codecs, mosaic
from pallas_kernels.routed_experts import sm90_fragments


def operand(kind, codes_ref, scales_ref, top, *, paired):
    """f32 [64, block]: the rows of this warpgroup in the order of the accumulators."""
    codes, scales = (ref[...].reshape(128, -1) for ref in (codes_ref, scales_ref))
    lane = lax.iota(jnp.int32, 64)
    warp, row = lane // 16, lane % 8
    group = lax.axis_index(mosaic.WARPGROUP_AXIS)
    if not paired:
        rows = group * 64 + lane
    elif kind == "fp8":
        rows = warp % 2 * 32 + row // 4 * 16 + group * 8 + warp // 2 * 4 + row % 4
    else:
        rows = row // 2 * 16 + group * 8 + warp // 2 * 4 + warp % 2 * 2 + row % 2
    if paired:
        rows = rows + lane // 8 % 2 * 64
    codes, scales = codes[rows], scales[rows]
    values = codecs.e2m1_values(jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(64, -1))
    scales = jnp.repeat(scales, 32, axis=1)
    if kind == "bf16":
        exact = sm90_fragments.BF16_BYTES
        weight = jnp.where(scales >= exact.start, codecs.scale_by(values, scales), 0.0)
        weight = jnp.where(scales >= exact.stop, jnp.nan, weight)
    else:
        step = scales.astype(jnp.int32) - top + sm90_fragments.BAND
        used = (step >= 1) & (step <= sm90_fragments.BAND)
        weight = jnp.where(used, codecs.scale_by(values, (step + 113).astype(jnp.uint8)), 0.0)
    return sm90_fragments.reorder(weight, kind)


def step(kind, total, weight, x_ref, x_scale_ref, following, *, rows, chunk, under_way, paired):
    del chunk, under_way
    dimensions = (((1,), (1,)), ((), ()))
    x = x_ref[...].astype(jnp.float32)[:rows]
    product = lax.dot_general(weight, x, dimensions, precision=lax.Precision.HIGHEST)
    if kind == "fp8":
        product = product * x_scale_ref[...][None, :rows]
    weight = operand(kind, *following, paired=paired)
    # The interpreter's race detector wants a fence between ordinary reads and the copies that
    # refill a buffer. Threads arrive at its barrier with what they read in use already, so the
    # compiled kernel does without one.
    plgpu.commit_smem()
    return total + product, weight


def store_down(total, factor, out_ref, *, first, tokens):
    h = total[:, first : first + tokens] * factor
    out_ref[pl.ds(0, tokens)] = codecs.round_to(h.T, jnp.bfloat16)


def store_gate_up(total, factor, weights_ref, out_ref, *, first, tokens, limit):
    total = codecs.round_to(total[:, first : first + tokens] * factor, jnp.bfloat16)
    total = total.astype(jnp.float32).reshape(4, 2, 8, tokens)
    gate = jnp.minimum(total[:, 0].reshape(32, tokens), limit)
    up = jnp.clip(total[:, 1].reshape(32, tokens), -limit, limit)
    h = gate / (1.0 + jnp.exp(-gate)) * up * weights_ref[...][None, first : first + tokens]
    out_ref[pl.ds(0, tokens)] = codecs.round_to(h.T, jnp.bfloat16)
