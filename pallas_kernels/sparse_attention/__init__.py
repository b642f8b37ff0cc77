"""Attention over a sliding window and a per-token list of compressed entries (CSA)."""

from typing import Any

import jax

from pallas_kernels import attention_kernel, attention_sm90, checks, rotary
from pallas_kernels.sparse_attention import reference, tiled

__all__ = ["sparse_attention"]


def sparse_attention(
    q: jax.Array,
    window_kv: jax.Array,
    compressed: jax.Array,
    indices: jax.Array,
    sink: jax.Array,
    position: Any,
    *,
    window: int,
    scale: float,
    norm_eps: float | None = None,
    rope: rotary.Table | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """One softmax over the window, the listed compressed entries and the sink.

    Args:
      q: [T, H, K] float32 or bfloat16, queries as `norm_eps` and `rope` say.
      window_kv: [window - 1 + T, K], as in `window_attention`.
      compressed: [N, K]; rows that no list names may hold anything.
      indices: [T, k] int32, the entries token t sees; -1 = none, at any place of the list. The
        caller lists visible entries only, each at most once.
      sink: [H] float32 raw logits; they enter the denominator only.
      position: absolute position of the first token, int32 scalar (may be traced).
      window: rows of the sliding window, the token itself included.
      scale: factor on q . k, head_dim ** -0.5.
      norm_eps: normalises every query head first, see `rotary.head_norm`; None leaves them.
      rope: cos and sin [T, R / 2] float32 by which queries are rotated (after the norm) and
        outputs rotated back (after their rounding), see `rotary.apply_rope`; None leaves both.
      implementation: None (automatic), "reference", "tiled" (plain JAX, bounded workspace, any
        backend), "portable" (Pallas-Triton, any recent NVIDIA GPU) or "sm90" (Pallas-Mosaic, for
        Hopper). They differ in the last bits.
      interpret: run the kernels in the interpreter, on any backend.

    Returns:
      [T, H, K] in q.dtype, with the roundings of `window_attention`. The sum runs in list order:
      equal bits need equal lists.

    Raises:
      ValueError: shapes or dtypes that contradict each other.
      NotImplementedError: the implementation asked for cannot run this call.
    """
    shapes = checks.Shapes("sparse_attention")
    checks.positive("sparse_attention", window=window)
    shapes.bind("q", q, "THK", checks.FLOATS)
    shapes.bind("window_kv", window_kv, (window - 1 + q.shape[0], "K"), (q.dtype,))
    shapes.bind("compressed", compressed, "NK", (q.dtype,))
    shapes.bind("indices", indices, "Tk", checks.INT32)
    shapes.bind("sink", sink, "H", checks.FLOAT32)
    rotary.check(shapes, rope, q)
    compressed = checks.on_device(compressed)
    kernels = {"portable": attention_kernel, "sm90": attention_sm90}
    refusals = {name: kernel.refusal(q, rope) for name, kernel in kernels.items()}
    chosen = checks.pick("sparse_attention", implementation, refusals, interpret=interpret)
    position = checks.scalar("sparse_attention", "position", position)
    if chosen in kernels:
        return kernels[chosen].attend(
            q,
            window_kv,
            compressed,
            indices,
            sink,
            position,
            ratio=1,
            window=window,
            scale=scale,
            norm_eps=norm_eps,
            rope=rope,
            interpret=interpret,
        )
    if norm_eps is not None:
        q = rotary.head_norm(q, norm_eps)
    if rope is not None:
        q = rotary.apply_rope(q, rope)
    form = reference if chosen == "reference" else tiled
    out = form.sparse_attention(
        q, window_kv, compressed, indices, sink, position, window=window, scale=scale
    )
    return out if rope is None else rotary.apply_rope(out, rope, inverse=True)
