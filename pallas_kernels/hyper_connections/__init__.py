"""Manifold-constrained hyper-connections: the residual path of S parallel streams."""

import jax

from pallas_kernels import checks
from pallas_kernels.hyper_connections import kernel, reference, tiled

__all__ = ["collapse", "post", "pre"]


def pre(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Input of a sublayer and the weights with which its output returns to the streams.

    Args:
      streams: [T, S, D] float32 or bfloat16.
      fn: [S * (2 + S), S * D] float32: S rows for the input weights, S for the output weights,
        S * S for the mixing matrix (row-major). Columns: stream 0's D channels first.
      base: [S * (2 + S)] float32.
      scale: [3] float32, one factor for each of the three groups.
      iterations: column steps of the Sinkhorn normalisation.
      eps: added to input weights and to every sum the normalisation divides by.
      norm_eps: added to the mean square of a token's S * D values.
      implementation: None (automatic), "reference", "tiled" (plain JAX, bounded workspace, any
        backend), "portable" (Pallas-Triton, any recent NVIDIA GPU) or "sm90" (tiles for Hopper).
        They differ in the last bits.
      interpret: run the kernels in the interpreter, on any backend.

    Returns:
      u [T, D] in streams.dtype (float32 sum, one rounding), output weights [T, S] float32 in
      (0, 2), mixing matrix [T, S, S] float32 for `post`.

    Raises:
      ValueError: shapes or dtypes that contradict each other.
      NotImplementedError: the implementation asked for cannot run this call.
    """
    shapes = checks.Shapes("hyper_connections.pre")
    shapes.bind("streams", streams, "TSD", checks.FLOATS)
    count, width = streams.shape[1:]
    shapes.bind("fn", fn, (count * (2 + count), count * width), checks.FLOAT32)
    shapes.bind("base", base, (count * (2 + count),), checks.FLOAT32)
    shapes.bind("scale", scale, (3,), checks.FLOAT32)
    checks.positive("hyper_connections.pre", iterations=iterations)
    chosen = checks.pick(
        "hyper_connections.pre", implementation, kernel.refusal(streams), interpret=interpret
    )
    values = {"iterations": iterations, "eps": eps, "norm_eps": norm_eps}
    if chosen in ("portable", "sm90"):
        return kernel.pre(streams, fn, base, scale, **values, interpret=interpret)
    form = reference if chosen == "reference" else tiled
    return form.pre(streams, fn, base, scale, **values)


def post(
    y: jax.Array,
    streams: jax.Array,
    weights: jax.Array,
    comb: jax.Array,
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """New streams: stream k = weights[k] * y + sum over j of comb[j, k] * stream j.

    Args:
      y: [T, D] output of the sublayer, dtype of the streams.
      streams: [T, S, D] float32 or bfloat16, the ones `pre` read.
      weights: [T, S] float32, from `pre`.
      comb: [T, S, S] float32, from `pre`.
      implementation: None (automatic), "reference", "tiled" (plain JAX, bounded workspace, any
        backend), "portable" (Pallas-Triton, any recent NVIDIA GPU) or "sm90" (tiles for Hopper).
        They differ in the last bits.
      interpret: run the kernels in the interpreter, on any backend.

    Returns:
      [T, S, D] in streams.dtype: float32 sums, one rounding.

    Raises:
      ValueError: shapes or dtypes that contradict each other.
      NotImplementedError: the implementation asked for cannot run this call.
    """
    shapes = checks.Shapes("hyper_connections.post")
    shapes.bind("streams", streams, "TSD", checks.FLOATS)
    shapes.bind("y", y, "TD", (streams.dtype,))
    shapes.bind("weights", weights, "TS", checks.FLOAT32)
    shapes.bind("comb", comb, "TSS", checks.FLOAT32)
    chosen = checks.pick(
        "hyper_connections.post", implementation, kernel.refusal(streams), interpret=interpret
    )
    if chosen in ("portable", "sm90"):
        return kernel.post(y, streams, weights, comb, interpret=interpret)
    form = reference if chosen == "reference" else tiled
    return form.post(y, streams, weights, comb)


def collapse(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    norm_eps: float,
    implementation: str | None = None,
) -> jax.Array:
    """One stream from S before the final norm: no normalisation of the weights, no factor 2.

    Args:
      streams: [T, S, D] float32 or bfloat16.
      fn: [S, S * D] float32; base: [S] float32; scale: [1] float32.
      eps: added to the weights.
      norm_eps: added to the mean square of a token's S * D values.
      implementation: None (automatic), "reference" or "tiled"; a few rows need no kernel.

    Returns:
      [T, D] in streams.dtype: float32 sum, one rounding.

    Raises:
      ValueError: shapes or dtypes that contradict each other.
      NotImplementedError: the implementation asked for cannot run this call.
    """
    shapes = checks.Shapes("hyper_connections.collapse")
    shapes.bind("streams", streams, "TSD", checks.FLOATS)
    count, width = streams.shape[1:]
    shapes.bind("fn", fn, (count, count * width), checks.FLOAT32)
    shapes.bind("base", base, (count,), checks.FLOAT32)
    shapes.bind("scale", scale, (1,), checks.FLOAT32)
    chosen = checks.pick(
        "hyper_connections.collapse", implementation, "there is none for the collapse"
    )
    form = reference if chosen == "reference" else tiled
    return form.collapse(streams, fn, base, scale, eps=eps, norm_eps=norm_eps)
