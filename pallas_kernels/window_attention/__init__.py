"""Attention over a sliding window and a contiguous prefix of compressed entries (SWA, HCA)."""

from typing import Any

import jax

from pallas_kernels import attention_kernel, attention_sm90, checks, rotary
from pallas_kernels.window_attention import reference, tiled

__all__ = ["window_attention"]


def window_attention(
    q: jax.Array,
    window_kv: jax.Array,
    compressed: jax.Array | None,
    sink: jax.Array,
    position: Any,
    *,
    ratio: int,
    window: int,
    scale: float,
    norm_eps: float | None = None,
    rope: rotary.Table | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """One softmax over the window, the visible compressed entries and the sink.

    Every key is also the value (one KV head shared by all query heads). Token t of the call has
    absolute position position + t and sees the `window` raw rows that end at itself and the
    compressed entries i < (position + t + 1) // ratio.

    Args:
      q: [T, H, K] float32 or bfloat16, queries as `norm_eps` and `rope` say.
      window_kv: [window - 1 + T, K]; row j has absolute position position - (window - 1) + j. Rows
        of negative position are masked and may hold anything.
      compressed: [N, K] or None when the layer has no compressor. Rows a token does not see may
        hold anything.
      sink: [H] float32 raw logits; they enter the denominator only.
      position: absolute position of the first token, int32 scalar (may be traced).
      ratio: tokens per compressed entry (not used without `compressed`).
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
      [T, H, K] in q.dtype. bfloat16: scores and sums in float32, probabilities rounded to bfloat16
      before the product with the values, one rounding at the end.

    Raises:
      ValueError: shapes or dtypes that contradict each other.
      NotImplementedError: the implementation asked for cannot run this call.
    """
    shapes = checks.Shapes("window_attention")
    checks.positive("window_attention", window=window)
    shapes.bind("q", q, "THK", checks.FLOATS)
    shapes.bind("window_kv", window_kv, (window - 1 + q.shape[0], "K"), (q.dtype,))
    if compressed is not None:
        checks.positive("window_attention", ratio=ratio)
        shapes.bind("compressed", compressed, "NK", (q.dtype,))
    shapes.bind("sink", sink, "H", checks.FLOAT32)
    rotary.check(shapes, rope, q)
    if compressed is not None:
        compressed = checks.on_device(compressed)
    kernels = {"portable": attention_kernel, "sm90": attention_sm90}
    refusals = {name: kernel.refusal(q, rope) for name, kernel in kernels.items()}
    chosen = checks.pick("window_attention", implementation, refusals, interpret=interpret)
    position = checks.scalar("window_attention", "position", position)
    if chosen in kernels:
        return kernels[chosen].attend(
            q,
            window_kv,
            compressed,
            None,
            sink,
            position,
            ratio=ratio,
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
    out = form.window_attention(
        q, window_kv, compressed, sink, position, ratio=ratio, window=window, scale=scale
    )
    return out if rope is None else rotary.apply_rope(out, rope, inverse=True)
