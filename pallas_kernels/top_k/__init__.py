"""The k best entries of every row as an exact set."""

import jax

from pallas_kernels import checks
from pallas_kernels.top_k import kernel, reference

__all__ = ["top_k"]


def top_k(
    scores: jax.Array, k: int, *, implementation: str | None = None, interpret: bool = False
) -> jax.Array:
    """Indices of the k largest scores of each row, ascending.

    The set is exact. Equal scores (0.0 and -0.0 are equal) are taken from the lowest index up.
    -inf and NaN are never selected.

    Args:
      scores: [T, N] float32.
      k: entries to select, at least 1; may exceed N.
      implementation: None (automatic), "reference" (a stable sort, any backend), "portable" or
        "sm90" (one Pallas-Triton kernel for all NVIDIA GPUs). The result is the same.
      interpret: run the kernel in the interpreter, on any backend.

    Returns:
      [T, k] int32, ascending, padded with -1 where fewer than k scores qualify.

    Raises:
      ValueError: wrong shape, dtype or k.
      NotImplementedError: the implementation asked for cannot run this call.
    """
    shapes = checks.Shapes("top_k")
    shapes.bind("scores", scores, "TN", checks.FLOAT32)
    checks.positive("top_k", k=k)
    chosen = checks.pick("top_k", implementation, kernel.refusal(k), interpret=interpret)
    if chosen in ("portable", "sm90"):
        return kernel.top_k(scores, k, interpret=interpret)
    return reference.top_k(scores, k)
