"""Functions that are traced once."""

import jax
import jax.numpy as jnp

from pallas_kernels.block_linear import kernel
from pallas_kernels.tracing import traced_once


def test_a_function_is_traced_once_for_several_programs_and_changes_none():
    traced = []

    def scale(x, factor):
        traced.append(factor)
        return x * jnp.float32(factor) + 1.0

    shared = traced_once("factor")(scale)
    x = jax.ShapeDtypeStruct((3,), jnp.float32)

    def text(function):
        return jax.jit(lambda x: function(x, 2.0) - function(-x, 2.0)).lower(x).as_text()

    wanted = text(scale)
    traced.clear()
    assert text(shared) == wanted
    assert text(shared) == wanted
    assert traced == [2.0]
    jax.jit(lambda x: shared(x, 3.0)).lower(x)
    assert traced == [2.0, 3.0]


def test_equal_kernels_of_a_program_are_traced_once(lower_for_gpu, monkeypatch):
    calls = []
    codes = kernel._codes
    monkeypatch.setattr(
        kernel, "_codes", lambda *refs, **how: calls.append(0) or codes(*refs, **how)
    )
    x = jax.ShapeDtypeStruct((48, 384), jnp.bfloat16)
    text = lower_for_gpu(lambda x: (kernel.quantize_fp8(x), kernel.quantize_fp8(-x)), x)
    assert text.count("__gpu$xla.gpu.triton") == 2
    assert len(calls) == 1
