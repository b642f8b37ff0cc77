"""Norms, rotary embedding and matrix products shared by every sublayer."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ds4jax.config import ModelConfig, Numerics
from ds4jax.quant import QTensor
from pallas_kernels import block_linear, codecs


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis: float32 inside, one rounding.

    x       [..., C] bfloat16 or float32; the result has its dtype.
    weight  [C] bfloat16 or float32, used in float32.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    factor = weight.astype(jnp.float32)
    wide = wide * factor.reshape((1,) * (wide.ndim - 1) + factor.shape)
    return codecs.round_to(wide, x.dtype)


@nnx.dataclass
class RMSNorm(nnx.Module):
    """`rms_norm` with a stored weight [C]."""

    weight: jax.Array = nnx.data()
    eps: float = nnx.static()

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight, self.eps)


@nnx.dataclass
class Linear(nnx.Module):
    """x @ weight^T without bias.

    quantized_input says that the published code runs this product on FP8 activations (the
    simulation "q1"). It belongs to the linear, not to its input: the same activations enter other
    products unquantised. It is independent of how the weight happens to be stored.
    """

    weight: QTensor = nnx.data()
    quantized_input: bool = nnx.static(default=False)

    def __call__(self, x: jax.Array, numerics: Numerics) -> jax.Array:
        """x [T, K] -> [T, N], accumulated in float32 and rounded once to the compute dtype."""
        return block_linear.block_linear(
            x,
            self.weight.codes,
            self.weight.scales,
            quantize_input=self.quantized_input and numerics.q1,
            dtype=numerics.dtype,
        )

    def wide(self, x: jax.Array) -> jax.Array:
        """x [T, K] -> [T, N] float32 by `wide_product`; for weights without scales."""
        return wide_product(x, self.weight.codes)


def wide_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x @ weight^T as float32 without any rounding of operands or result: [T, K], [N, K] -> [T, N].

    Two bfloat16 operands multiply exactly into a float32 accumulator, which is the float32
    product of the upcast operands at the speed of bfloat16; anything else is upcast and
    multiplied as true float32.
    """
    dims = (((1,), (1,)), ((), ()))
    if x.dtype == weight.dtype == jnp.bfloat16:
        return jax.lax.dot_general(x, weight, dims, preferred_element_type=jnp.float32)
    return jax.lax.dot_general(
        x.astype(jnp.float32),
        weight.astype(jnp.float32),
        dims,
        precision=jax.lax.Precision.HIGHEST,
    )


def rope_frequencies(config: ModelConfig, ratio: int) -> np.ndarray:
    """Radians per token of each channel pair of a layer with compression ratio `ratio`.

    [R / 2] float32, computed in float64 and rounded once. Window-only layers (ratio 0) use
    rope_theta as it is; every other layer uses compress_rope_theta with YaRN for everything it
    rotates, short prompts included: pairs that turn often within the original context keep
    their frequency, slow ones are divided by the factor, with a linear ramp between.
    """
    channels = config.rope_channels
    pairs = np.arange(channels // 2, dtype=np.float64)
    if ratio == 0:
        return (config.rope_theta ** (-2 * pairs / channels)).astype(np.float32)
    theta, yarn = config.compress_rope_theta, config.rope_scaling
    frequencies = theta ** (-2 * pairs / channels)

    def pair_that_turns(rotations: float) -> float:
        length = yarn.original_max_position_embeddings
        return channels * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), channels - 1)
    # The published code widens an empty ramp by 0.001 instead of dividing by zero.
    ramp = np.clip((pairs - low) / (high - low if high != low else 0.001), 0, 1)
    return (frequencies * (1 - ramp) + frequencies / yarn.factor * ramp).astype(np.float32)


def rope_table(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position * frequency: i32 [T], f32 [R / 2] -> two f32 [T, R / 2].

    The angle is one float32 product and cos and sin are taken of exactly that value. XLA reduces
    the full range of float32: against float64 the error stays below 1e-7 at positions of 2**20.
    """
    angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
    return jnp.cos(angle), jnp.sin(angle)
