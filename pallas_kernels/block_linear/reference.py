"""Plain JAX: decode the weight, one dense product."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import codecs


def block_linear(
    x: jax.Array,
    weight: jax.Array,
    scales: jax.Array | None,
    *,
    quantize_input: bool,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """See the door."""
    if quantize_input:
        x = codecs.fake_quant_fp8(x, 128)
    decoded = weight if scales is None else codecs.decode_fp8(weight, scales, dtype)
    # The product itself rounds its float32 sums: a float32 result would be written and read again.
    return lax.dot_general(
        codecs.round_to(x, dtype),
        decoded.astype(dtype),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.dtype(dtype),
    )
