"""What happens to index queries and keys before they meet: one function, as a kernel and plain."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import codecs, rotary
from pallas_kernels.attention_kernel import turn


def refusal(queries: jax.Array) -> str | None:
    """Why the kernel cannot take these queries [T, Hi, Di]; None when it can."""
    heads, width = queries.shape[1:]
    if queries.dtype != jnp.bfloat16:
        return f"queries are {queries.dtype}, the kernel multiplies bfloat16"
    if heads & (heads - 1) or heads < 16:
        return f"{heads} index heads, the kernel takes powers of two from 16 up"
    if width & (width - 1) or not 32 <= width <= 256:
        return f"the index head has {width} channels, the kernel takes powers of two from 32 to 256"
    return None


def mix_channels(x: jax.Array, *, quantise: bool) -> jax.Array:
    """See `pallas_kernels.indexer.mix_channels`."""
    x = codecs.hadamard(x)
    return codecs.fake_quant_fp4(x) if quantise else x


def prepare_queries(
    queries: jax.Array, rope: rotary.Table, *, quantise: bool, interpret: bool = False
) -> jax.Array:
    """See `pallas_kernels.indexer.prepare_queries`; a program takes the heads of one token."""
    tokens, heads, width = queries.shape
    spec = pl.BlockSpec((None, heads, width), lambda t: (t, 0, 0))
    return pl.pallas_call(
        functools.partial(_kernel, quantise=quantise),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        grid=(tokens,),
        in_specs=[spec, *[pl.no_block_spec] * 3],
        out_specs=spec,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="index_queries",
    )(queries, *rope, jnp.asarray(codecs.hadamard_matrix(width), queries.dtype))


def _kernel(queries_ref, cos_ref, sin_ref, matrix_ref, out_ref, *, quantise: bool):
    x = turn(queries_ref[...], cos_ref, sin_ref, pl.program_id(0))
    x = jax.lax.dot_general(
        x, matrix_ref[...], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    x = (x * jnp.float32(x.shape[1] ** -0.5)).astype(out_ref.dtype)
    out_ref[...] = codecs.fake_quant_fp4(x) if quantise else x
