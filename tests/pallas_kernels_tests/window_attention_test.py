"""Window plus contiguous compressed attention: definition, forms, poison, equal bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention_kernel, attention_sm90, rotary
from pallas_kernels.specs import FLASH, PRO
from pallas_kernels.window_attention import window_attention

# 64 heads of 512 channels with the real tiles, and narrow shapes whose window is not a multiple of
# the kernels' blocks.
WIDE = {"heads": 64, "width": 512, "window": 128}
NARROW = {"heads": 16, "width": 64, "window": 40}
NARROW_SM90 = {"heads": 64, "width": 128, "window": 40}  # its products have 64 rows
KERNELS = {"portable": attention_kernel, "sm90": attention_sm90}


def narrow(implementation):
    return NARROW_SM90 if implementation == "sm90" else NARROW


def make(seed, tokens, capacity, *, heads, width, window, dtype=jnp.bfloat16):
    """Operands of a call; the compressed entries are finite everywhere."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    return (
        normal(tokens, heads, width) * jnp.asarray(4, dtype),
        normal(window - 1 + tokens, width),
        normal(capacity, width) if capacity else None,
        jnp.asarray(rng.normal(size=heads), jnp.float32),
    )


@functools.partial(jax.jit, static_argnames=("ratio", "norm_eps", "implementation", "interpret"))
def jitted(q, window_kv, compressed, sink, position, **options):
    window = window_kv.shape[0] - q.shape[0] + 1
    scale = q.shape[2] ** -0.5
    return window_attention(
        q, window_kv, compressed, sink, position, window=window, scale=scale, **options
    )


def attend(operands, position, *, ratio=4, **options):
    return np.asarray(jitted(*operands, position, ratio=ratio, **options), np.float32)


def rope_of(position, tokens, pairs=32):
    """cos and sin of every token."""
    angle = np.outer(position + np.arange(tokens), 100.0 ** (-np.arange(pairs) / pairs))
    return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


def by_definition(q, window_kv, compressed, sink, position, ratio, window):
    """One token and head at a time, in float64."""
    q, window_kv, sink = (np.asarray(x, np.float64) for x in (q, window_kv, sink))
    out = np.zeros(q.shape)
    for t in range(q.shape[0]):
        rows = [j for j in range(t, t + window) if position - (window - 1) + j >= 0]
        keys = window_kv[rows]
        if compressed is not None:
            seen = (position + t + 1) // ratio
            keys = np.concatenate([keys, np.asarray(compressed, np.float64)[:seen]])
        for h in range(q.shape[1]):
            scores = keys @ q[t, h] * q.shape[2] ** -0.5
            weights = np.exp(scores - scores.max())
            total = weights.sum() + np.exp(sink[h] - scores.max())
            out[t, h] = weights @ keys / total
    return out


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
@pytest.mark.parametrize(
    ("position", "ratio", "capacity"),
    [(0, 4, 12), (2, 4, 12), (31, 4, 12), (500, 128, 5), (7, 0, 0)],
)
def test_float32_follows_the_definition(implementation, position, ratio, capacity):
    shape = {"heads": 3, "width": 16, "window": 8}
    operands = make(position, 11, capacity, **shape, dtype=jnp.float32)
    got = attend(operands, position, ratio=ratio, implementation=implementation)
    wanted = by_definition(*operands, position, ratio, shape["window"])
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("sink", [-np.inf, -50.0, 60.0, 600.0])
@pytest.mark.parametrize("implementation", ["tiled", "portable", "sm90"])
def test_extreme_sinks(implementation, sink, distance):
    q, window_kv, compressed, _ = make(3, 5, 30, **narrow(implementation))
    operands = (q, window_kv, compressed, jnp.full(q.shape[1], sink, jnp.float32))
    got = attend(operands, 70, implementation=implementation, interpret=True)
    wanted = by_definition(*operands, 70, 4, NARROW["window"])
    assert np.isfinite(got).all()
    if np.abs(wanted).max() > 1e-30:
        assert distance(got, wanted) < 5e-3
    else:
        assert np.abs(got).max() < 1e-20


@pytest.mark.parametrize("implementation", ["tiled", "portable", "sm90"])
@pytest.mark.parametrize(
    ("shape", "tokens", "capacity", "ratio", "position"),
    [
        (NARROW, 21, 70, 4, 190),
        (NARROW, 5, 40, 4, 0),
        (NARROW, 3, 0, 0, 1),
        (WIDE, 3, 150, 4, 501),
        (WIDE, 2, 3, 128, 255),
        (WIDE, 2, 0, 0, 0),
    ],
)
def test_bfloat16_agrees_with_the_reference(
    implementation, shape, tokens, capacity, ratio, position, distance
):
    shape = narrow(implementation) if shape is NARROW else shape
    operands = make(tokens, tokens, capacity, **shape)
    got = attend(operands, position, ratio=ratio, implementation=implementation, interpret=True)
    wanted = attend(operands, position, ratio=ratio, implementation="reference")
    assert distance(got, wanted) < 5e-3


@pytest.mark.parametrize("implementation", ["tiled", "portable", "sm90"])
@pytest.mark.parametrize("shape", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize(("norm_eps", "turned"), [(1e-3, True), (1e-3, False), (None, True)])
def test_norm_and_rotation_are_those_of_separate_steps(
    implementation, shape, norm_eps, turned, distance
):
    """Not rotated, channels have to be those of the call without a table: nothing is mixed up."""
    tokens, position, pairs = 3, 501, 16 if shape is NARROW else 32
    shape = narrow(implementation) if shape is NARROW else shape
    q, *rest = make(4, tokens, 130, **shape)
    rope = rope_of(position, tokens, pairs) if turned else None
    got = attend(
        (q, *rest),
        position,
        norm_eps=norm_eps,
        rope=rope,
        implementation=implementation,
        interpret=True,
    )
    if norm_eps is not None:
        q = rotary.head_norm(q, norm_eps)
    if turned:
        q = rotary.apply_rope(q, rope)
    wanted = jitted(*(q, *rest), position, ratio=4, implementation="reference")
    if turned:
        wanted = rotary.apply_rope(wanted, rope, inverse=True)
    wanted = np.asarray(wanted, np.float32)
    assert distance(got, wanted) < 5e-3
    assert distance(got[..., -2 * pairs :], wanted[..., -2 * pairs :]) < 5e-3
    if turned:  # a quarter turn more makes another result
        other = attend((q, *rest), position, rope=rope[::-1], implementation="reference")
        assert distance(other[..., -2 * pairs :], wanted[..., -2 * pairs :]) > 0.1


def test_kernels_round_the_norm_step_by_step():
    """Not jitted: XLA takes back roundings that are casts, which the kernels' compiler does not."""
    x = jnp.asarray(np.random.default_rng(8).normal(size=(32, 512)) * 3, jnp.bfloat16)
    np.testing.assert_array_equal(attention_kernel._head_norm(x, 1e-6), rotary.head_norm(x, 1e-6))


@pytest.mark.parametrize("implementation", ["reference", "tiled", "portable", "sm90"])
def test_rows_that_no_real_token_sees_may_hold_nan(implementation):
    tokens, real, position, window = 13, 10, 37, NARROW["window"]
    operands = make(5, tokens, 40, **narrow(implementation))
    q, window_kv, compressed, sink = operands
    seen = (position + real) // 4
    # The last rows are padding: their tokens see two entries that no real token sees.
    assert (position + tokens) // 4 > seen
    poisoned = (
        q,
        window_kv.at[: max(window - 1 - position, 0)].set(jnp.nan),
        compressed.at[seen:].set(jnp.nan),
        sink,
    )
    run = functools.partial(
        attend, position=position, implementation=implementation, interpret=True
    )
    np.testing.assert_array_equal(run(poisoned)[:real], run(operands)[:real])
    assert np.isnan(run((q, window_kv, compressed.at[0].set(jnp.nan), sink))).all()


@pytest.mark.parametrize(
    "implementation", ["tiled", "portable", pytest.param("sm90", marks=pytest.mark.slow)]
)
def test_bits_do_not_depend_on_chunks_capacity_or_neighbours(implementation):
    # The interpreter of Pallas-Mosaic takes its time over every call.
    slow = implementation == "sm90"
    total, capacity, ratio = 6 if slow else 48, 16, 4
    q, window_kv, compressed, sink = make(9, total, capacity, **narrow(implementation))
    window = NARROW["window"]
    run = functools.partial(attend, ratio=ratio, implementation=implementation, interpret=True)
    position = 3
    whole = run((q, window_kv, compressed, sink), position)
    for size, padded in ((1, 1), (4, 5)) if slow else ((1, 1), (7, 9), (16, 16), (33, 33)):
        for start in range(0, total, size):
            stop = min(start + size, total)
            rows = slice(start, start + padded)
            part = (
                jnp.zeros((padded, *q.shape[1:]), q.dtype).at[: stop - start].set(q[start:stop]),
                jnp.pad(window_kv, ((0, padded), (0, 0)))[start : start + window - 1 + padded],
                jnp.pad(compressed, ((0, 30 + size), (0, 0)), constant_values=7),
                sink,
            )
            got = run(part, position + start)[: stop - start]
            np.testing.assert_array_equal(got, whole[rows][: stop - start])
    others = q.at[::2].set(-q[::2])
    np.testing.assert_array_equal(
        run((others, window_kv, compressed, sink), position)[1::2], whole[1::2]
    )


@pytest.mark.parametrize("implementation", ["tiled", "portable", "sm90"])
def test_bits_of_rotated_tokens_do_not_depend_on_chunks(implementation):
    total, position = 12, 3
    q, window_kv, compressed, sink = make(9, total, 16, **narrow(implementation))
    rope, window = rope_of(position, total), NARROW["window"]
    run = functools.partial(attend, norm_eps=1e-6, implementation=implementation, interpret=True)
    whole = run((q, window_kv, compressed, sink), position, rope=rope)
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        part = (q[start:stop], window_kv[start : stop + window - 1], compressed, sink)
        got = run(part, position + start, rope=tuple(x[start:stop] for x in rope))
        np.testing.assert_array_equal(got, whole[start:stop])


@pytest.mark.parametrize("implementation", ["portable", "sm90"])
@pytest.mark.parametrize("spec", [FLASH, PRO], ids=lambda spec: spec.name)
@pytest.mark.parametrize(("ratio", "capacity"), [(0, 0), (128, 8256), (4, 2112)])
def test_lowers_at_the_shapes_of_the_models(implementation, spec, ratio, capacity, lower_for_gpu):
    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def call(cos, sin, *operands):
        return KERNELS[implementation].attend(
            *operands,
            ratio=ratio,
            window=spec.window,
            scale=spec.head_dim**-0.5,
            norm_eps=1e-6,
            rope=(cos, sin),
            interpret=False,
        )

    tokens = 8192
    text = lower_for_gpu(
        call,
        *[struct(tokens, spec.rope_dim // 2, dtype=jnp.float32)] * 2,
        struct(tokens, spec.heads, spec.head_dim),
        struct(tokens + spec.window - 1, spec.head_dim),
        struct(capacity, spec.head_dim) if capacity else None,
        None,
        struct(spec.heads, dtype=jnp.float32),
        struct(dtype=jnp.int32),
    )
    assert {"portable": "__gpu$xla.gpu.triton", "sm90": "mosaic_gpu"}[implementation] in text


def test_errors_name_the_argument():
    q, window_kv, compressed, sink = make(1, 4, 6, **NARROW)
    call = functools.partial(window_attention, ratio=4, window=NARROW["window"], scale=0.1)
    with pytest.raises(ValueError, match=r"window_kv has shape \(43, 64\).*expected 44"):
        window_attention(q, window_kv, compressed, sink, 0, ratio=4, window=41, scale=0.1)
    with pytest.raises(ValueError, match=r"compressed is float32, expected bfloat16"):
        call(q, window_kv, compressed.astype(jnp.float32), sink, 0)
    with pytest.raises(ValueError, match=r"sink has shape \(15,\).*expected 16 on axis 0 as in q"):
        call(q, window_kv, compressed, sink[1:], 0)
    with pytest.raises(ValueError, match=r"q has shape \(4, 64\), expected 3 axes"):
        call(q[:, 0], window_kv, compressed, sink, 0)
    table = rope_of(0, 4)
    with pytest.raises(ValueError, match=r"sin has shape \(4, 31\).*expected 32 on axis 1"):
        call(q, window_kv, compressed, sink, 0, rope=(table[0], table[1][:, 1:]))
    with pytest.raises(ValueError, match="cos has 33 channel pairs, expected at most 32"):
        call(q, window_kv, compressed, sink, 0, rope=rope_of(0, 4, 33))
    with pytest.raises(ValueError, match="ratio is 0, expected an integer >= 1"):
        window_attention(q, window_kv, compressed, sink, 0, ratio=0, window=40, scale=0.1)
    with pytest.raises(ValueError, match="implementation is 'fast', expected None or one of"):
        call(q, window_kv, compressed, sink, 0, implementation="fast")
    with pytest.raises(NotImplementedError, match="portable kernels need an NVIDIA GPU"):
        call(q, window_kv, compressed, sink, 0, implementation="portable")
    narrow = make(1, 4, 6, heads=16, width=48, window=40)
    with pytest.raises(NotImplementedError, match="head_dim is 48"):
        call(*narrow, 0, implementation="portable", interpret=True)
    few = make(1, 4, 6, heads=8, width=64, window=40)
    with pytest.raises(NotImplementedError, match="8 heads"):
        call(*few, 0, implementation="portable", interpret=True)
    with pytest.raises(NotImplementedError, match="16 heads of 64 channels"):
        call(q, window_kv, compressed, sink, 0, implementation="sm90", interpret=True)
    options = {"implementation": "portable", "interpret": True}
    for pairs in (8, 24):
        with pytest.raises(NotImplementedError, match=f"{pairs} channel pairs turn"):
            call(q, window_kv, compressed, sink, 0, rope=rope_of(0, 4, pairs), **options)
    options["implementation"] = "sm90"
    with pytest.raises(NotImplementedError, match="48 channel pairs turn"):
        call(*make(1, 4, 6, **NARROW_SM90), 0, rope=rope_of(0, 4, 48), **options)
    for implementation in ("portable", "sm90"):
        exact = make(1, 4, 6, **NARROW_SM90, dtype=jnp.float32)
        with pytest.raises(NotImplementedError, match="q is float32"):
            call(*exact, 0, implementation=implementation, interpret=True)


@pytest.mark.gpu1
@pytest.mark.parametrize("implementation", ["portable", "sm90"])
def test_on_the_gpu(implementation, distance):
    operands = make(1, 200, 600, **WIDE)
    heads = {"norm_eps": 1e-6, "rope": rope_of(2100, 200)}
    got = attend(operands, 2100, **heads, implementation=implementation)
    assert distance(got, attend(operands, 2100, **heads, implementation="reference")) < 5e-3
    q, window_kv, compressed, sink = operands
    part = (q[77:110], window_kv[77 : 110 + 127], compressed, sink)
    heads["rope"] = tuple(x[77:110] for x in heads["rope"])
    np.testing.assert_array_equal(
        attend(part, 2177, **heads, implementation=implementation), got[77:110]
    )
