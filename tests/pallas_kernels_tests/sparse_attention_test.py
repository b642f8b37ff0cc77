"""Window plus selected-entry attention: definition, forms, lists of any content, equal bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention_kernel, attention_sm90, rotary
from pallas_kernels.sparse_attention import sparse_attention
from pallas_kernels.specs import FLASH, PRO
from pallas_kernels.window_attention import window_attention

WIDE = {"heads": 64, "width": 512, "window": 128, "k": 70}
NARROW = {"heads": 16, "width": 64, "window": 40, "k": 37}
NARROW_SM90 = {"heads": 64, "width": 128, "window": 40, "k": 70}  # its products have 64 rows
KERNELS = {"portable": attention_kernel, "sm90": attention_sm90}
FORMS = ["reference", "tiled", "portable", "sm90"]


def narrow(implementation):
    return NARROW_SM90 if implementation == "sm90" else NARROW


def make(seed, tokens, capacity, position, *, heads, width, window, k, dtype=jnp.bfloat16):
    """Operands of a call: sorted lists of visible entries, some shorter than k."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    indices = np.full((tokens, k), -1, np.int32)
    for t in range(tokens):
        seen = min((position + t + 1) // 4, capacity)
        count = min(k, seen) if t % 3 else rng.integers(0, min(k, seen) + 1)
        indices[t, :count] = np.sort(rng.choice(seen, count, replace=False))
    return (
        normal(tokens, heads, width) * jnp.asarray(4, dtype),
        normal(window - 1 + tokens, width),
        normal(capacity, width),
        jnp.asarray(indices),
        jnp.asarray(rng.normal(size=heads), jnp.float32),
    )


@functools.partial(jax.jit, static_argnames=("implementation",))
def jitted(q, window_kv, compressed, indices, sink, position, implementation):
    return sparse_attention(
        q,
        window_kv,
        compressed,
        indices,
        sink,
        position,
        window=window_kv.shape[0] - q.shape[0] + 1,
        scale=q.shape[2] ** -0.5,
        implementation=implementation,
        interpret=jax.default_backend() == "cpu",
    )


def attend(operands, position, implementation):
    return np.asarray(jitted(*operands, position, implementation), np.float32)


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
@pytest.mark.parametrize("position", [0, 3, 45])
def test_float32_follows_the_definition(implementation, position):
    operands = make(position, 9, 14, position, heads=3, width=16, window=8, k=5, dtype=jnp.float32)
    got = attend(operands, position, implementation)
    q, window_kv, compressed, indices, sink = (np.asarray(x, np.float64) for x in operands)
    for t in range(9):
        rows = [j for j in range(t, t + 8) if position - 7 + j >= 0]
        chosen = indices[t][indices[t] >= 0].astype(int)
        keys = np.concatenate([window_kv[rows], compressed[chosen]])
        for h in range(3):
            scores = keys @ q[t, h] / 4
            weights = np.exp(scores)
            wanted = weights @ keys / (weights.sum() + np.exp(sink[h]))
            np.testing.assert_allclose(got[t, h], wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("implementation", ["tiled", "portable", "sm90"])
@pytest.mark.parametrize(
    ("shape", "tokens", "capacity", "position"),
    [(NARROW, 19, 60, 230), (NARROW, 5, 30, 0), (WIDE, 3, 150, 590)],
)
def test_bfloat16_agrees_with_the_reference(
    implementation, shape, tokens, capacity, position, distance
):
    shape = narrow(implementation) if shape is NARROW else shape
    operands = make(tokens, tokens, capacity, position, **shape)
    got = attend(operands, position, implementation)
    assert distance(got, attend(operands, position, "reference")) < 5e-3


@pytest.mark.parametrize("implementation", FORMS)
def test_empty_lists_and_holes(implementation, distance):
    """No entry at all gives the window; -1 counts for nothing wherever it stands."""
    position = 150
    q, window_kv, compressed, indices, sink = make(4, 6, 80, position * 3, **narrow(implementation))
    nothing = jnp.full_like(indices, -1)
    got = attend((q, window_kv, compressed * jnp.nan, nothing, sink), position, implementation)
    options = {"ratio": 1, "window": 40, "scale": q.shape[2] ** -0.5}
    wanted = window_attention(q, window_kv, None, sink, position, **options)
    assert distance(got, wanted) < 5e-3
    indices = jnp.tile(jnp.arange(indices.shape[1], dtype=jnp.int32)[None], (6, 1))
    holes = jnp.where(indices % 3 == 1, -1, indices)
    dense = jnp.sort(jnp.where(holes < 0, 99, holes), axis=1)
    dense = jnp.where(dense == 99, -1, dense)
    results = [
        attend((q, window_kv, compressed, x, sink), position, implementation)
        for x in (holes, dense)
    ]
    assert distance(*results) < 5e-3


@pytest.mark.parametrize("implementation", FORMS)
def test_entries_that_no_list_names_may_hold_nan(implementation):
    position = 200
    q, window_kv, compressed, indices, sink = make(5, 7, 60, position, **narrow(implementation))
    indices = jnp.where(indices % 2 == 0, indices, -1)
    poisoned = compressed.at[1::2].set(jnp.nan).at[51:].set(jnp.nan)
    got = attend((q, window_kv, poisoned, indices, sink), position, implementation)
    np.testing.assert_array_equal(
        got, attend((q, window_kv, compressed, indices, sink), position, implementation)
    )


@pytest.mark.parametrize(
    "implementation", ["tiled", "portable", pytest.param("sm90", marks=pytest.mark.slow)]
)
def test_bits_do_not_depend_on_chunks_or_neighbours(implementation):
    # The interpreter of Pallas-Mosaic takes its time over every call.
    slow = implementation == "sm90"
    total, position = 7 if slow else 40, 101
    q, window_kv, compressed, indices, sink = make(9, total, 36, position, **narrow(implementation))
    whole = attend((q, window_kv, compressed, indices, sink), position, implementation)
    for size, padded in ((1, 1), (4, 6)) if slow else ((1, 1), (9, 12), (33, 33)):
        for start in range(0, total, size):
            stop = min(start + size, total)
            fill = ((0, padded - (stop - start)), (0, 0))
            part = (
                jnp.pad(q[start:stop], (*fill, (0, 0))),
                jnp.pad(window_kv[start : stop + 39], fill),
                jnp.pad(compressed, ((0, 20), (0, 0)), constant_values=jnp.nan),
                jnp.pad(indices[start:stop], fill, constant_values=3),
                sink,
            )
            got = attend(part, position + start, implementation)[: stop - start]
            np.testing.assert_array_equal(got, whole[start:stop])


@pytest.mark.parametrize("implementation", ["tiled", "portable", "sm90"])
def test_norm_and_rotation_are_those_of_separate_steps(implementation, distance):
    position = 501
    q, *rest = make(4, 3, 120, position, **narrow(implementation))
    angle = np.outer(position + np.arange(3), 100.0 ** (-np.arange(16) / 16))
    rope = tuple(jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    options = {
        "window": NARROW["window"],
        "scale": q.shape[2] ** -0.5,
        "norm_eps": 1e-3,
        "rope": rope,
    }
    call = functools.partial(sparse_attention, **options, interpret=True)
    got = jax.jit(functools.partial(call, implementation=implementation))(q, *rest, position)
    turned = rotary.apply_rope(rotary.head_norm(q, 1e-3), rope)
    options |= {"norm_eps": None, "rope": None, "implementation": "reference"}
    wanted = sparse_attention(turned, *rest, position, **options)
    wanted = rotary.apply_rope(wanted, rope, inverse=True)
    assert distance(got.astype(jnp.float32), wanted.astype(jnp.float32)) < 5e-3
    with pytest.raises(ValueError, match=r"cos has shape \(2, 16\).*expected 3 on axis 0"):
        call(q, *rest, position, rope=(rope[0][1:], rope[1]))


@pytest.mark.parametrize("implementation", ["portable", "sm90"])
@pytest.mark.parametrize("spec", [FLASH, PRO], ids=lambda spec: spec.name)
@pytest.mark.parametrize("tokens", [1, 8192])
def test_lowers_at_the_shapes_of_the_models(implementation, spec, tokens, lower_for_gpu):
    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def call(cos, sin, *operands):
        return KERNELS[implementation].attend(
            *operands,
            ratio=1,
            window=spec.window,
            scale=spec.head_dim**-0.5,
            norm_eps=1e-6,
            rope=(cos, sin),
            interpret=False,
        )

    text = lower_for_gpu(
        call,
        *[struct(tokens, spec.rope_dim // 2, dtype=jnp.float32)] * 2,
        struct(tokens, spec.heads, spec.head_dim),
        struct(tokens + spec.window - 1, spec.head_dim),
        struct(262272, spec.head_dim),
        struct(tokens, spec.index_topk, dtype=jnp.int32),
        struct(spec.heads, dtype=jnp.float32),
        struct(dtype=jnp.int32),
    )
    assert {"portable": "__gpu$xla.gpu.triton", "sm90": "mosaic_gpu"}[implementation] in text


def test_errors_name_the_argument():
    q, window_kv, compressed, indices, sink = make(1, 4, 6, 40, **NARROW)
    call = functools.partial(sparse_attention, window=40, scale=0.1)
    with pytest.raises(ValueError, match=r"indices has shape \(3, 37\).*expected 4 on axis 0"):
        call(q, window_kv, compressed, indices[1:], sink, 0)
    with pytest.raises(ValueError, match="indices is float32, expected int32"):
        call(q, window_kv, compressed, indices.astype(jnp.float32), sink, 0)
    with pytest.raises(ValueError, match=r"compressed has shape \(6, 32\).*expected 64 on axis 1"):
        call(q, window_kv, compressed[:, :32], indices, sink, 0)
    with pytest.raises(NotImplementedError, match="16 heads of 64 channels"):
        call(q, window_kv, compressed, indices, sink, 0, implementation="sm90")
    wide = make(1, 4, 6, 40, **NARROW_SM90)
    with pytest.raises(NotImplementedError, match="sm90 kernels need an NVIDIA GPU"):
        call(*wide, 0, implementation="sm90")


@pytest.mark.gpu1
@pytest.mark.parametrize("implementation", ["portable", "sm90"])
def test_on_the_gpu(implementation, distance):
    position = 4000
    q, window_kv, compressed, indices, sink = make(1, 200, 1100, position, **WIDE)
    got = attend((q, window_kv, compressed, indices, sink), position, implementation)
    wanted = attend((q, window_kv, compressed, indices, sink), position, "reference")
    assert distance(got, wanted) < 5e-3
    part = (q[77:110], window_kv[77 : 110 + 127], compressed, indices[77:110], sink)
    np.testing.assert_array_equal(attend(part, position + 77, implementation), got[77:110])
