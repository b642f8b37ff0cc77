"""Compressors of CSA, HCA and the indexer: one pooled entry for every `ratio` tokens."""

from typing import Any

import jax

from pallas_kernels import checks
from pallas_kernels.compressor import kernel, reference, tiled
from pallas_kernels.compressor.carry import Carry, empty_carry

__all__ = ["Carry", "compress", "empty_carry"]


def compress(
    values: jax.Array,
    gates: jax.Array,
    carry: Carry,
    position: Any,
    length: Any,
    *,
    ratio: int,
    overlap: bool,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, Carry]:
    """Pools the tokens of a chunk into entries, continuing the block a former chunk left open.

    Entry i covers tokens ratio * i .. ratio * i + ratio - 1. Per channel its value is the softmax
    of the gates over those tokens applied to the values. With overlap an entry has w / 2 channels
    and twice as many slots: the previous block through the first half of the channels, then its
    own block through the second half.

    Args:
      values: [T, w] float32, projected values of tokens position .. position + T - 1.
      gates: [T, w] float32, projected gates with the position bias already added.
      carry: state after the tokens before `position`; `empty_carry` at position 0.
      position: absolute position of the first token, int32 scalar (may be traced).
      length: rows that hold real tokens, 0 <= length <= T, int32 scalar (may be traced). Rows from
        `length` on may hold anything and are not read.
      ratio: tokens per entry.
      overlap: True for CSA and its indexer.
      implementation: None (automatic), "reference", "tiled" (plain JAX in fixed tiles, any
        backend), "portable" or "sm90" (one Pallas-Triton kernel for all NVIDIA GPUs).
      interpret: run the kernel in the interpreter, on any backend.

    Returns:
      entries [ceil(T / ratio), w or w / 2] float32, of which the first `count` rows are complete
      and the rest are zero; count (int32 scalar); index of the first entry (int32 scalar,
      position // ratio); the carry after `length` tokens.

    Raises:
      ValueError: shapes or dtypes that contradict each other.
      NotImplementedError: the implementation asked for cannot run this call.
    """
    shapes = checks.Shapes("compress")
    checks.positive("compress", ratio=ratio)
    shapes.bind("values", values, "Tw", checks.FLOAT32)
    shapes.bind("gates", gates, "Tw", checks.FLOAT32)
    shapes.bind("carry.partial_values", carry.partial_values, (ratio, "w"), checks.FLOAT32)
    shapes.bind("carry.partial_gates", carry.partial_gates, (ratio, "w"), checks.FLOAT32)
    if overlap:
        if values.shape[1] % 2:
            raise ValueError(
                f"compress: values has {values.shape[1]} channels, expected an even number "
                "(overlap splits them in halves)"
            )
        half = values.shape[1] // 2
        for name in ("previous_values", "previous_gates"):
            array = getattr(carry, name)
            if array is None:
                raise ValueError(
                    f"compress: carry.{name} is None, expected [{ratio}, {half}] float32: overlap "
                    "needs the previous block"
                )
            shapes.bind(f"carry.{name}", array, (ratio, half), checks.FLOAT32)
    if isinstance(length, int) and length > values.shape[0]:
        raise ValueError(
            f"compress: length is {length}, expected at most the {values.shape[0]} rows of values"
        )
    chosen = checks.pick(
        "compress",
        implementation,
        kernel.refusal(values, ratio=ratio, overlap=overlap),
        interpret=interpret,
    )
    arguments = (
        checks.on_device(values),
        checks.on_device(gates),
        carry,
        checks.scalar("compress", "position", position),
        checks.scalar("compress", "length", length),
    )
    if chosen in ("portable", "sm90"):
        return kernel.compress(*arguments, ratio=ratio, overlap=overlap, interpret=interpret)
    form = reference if chosen == "reference" else tiled
    return form.compress(*arguments, ratio=ratio, overlap=overlap)
