"""Compressors: definition, every way to cut a sequence into chunks, padding, equal bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compressor import compress, empty_carry, kernel
from pallas_kernels.specs import FLASH, PRO

KINDS = {"overlap": (4, True, 256), "plain": (16, False, 128)}  # ratio, overlap, channels


@functools.partial(jax.jit, static_argnames=("ratio", "overlap", "implementation"))
def run(values, gates, carry, position, length, ratio, overlap, implementation):
    return compress(
        values,
        gates,
        carry,
        position,
        length,
        ratio=ratio,
        overlap=overlap,
        implementation=implementation,
        interpret=jax.default_backend() == "cpu",
    )


def make(seed, tokens, width):
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.normal(size=(tokens, width)), jnp.float32),
        jnp.asarray(rng.normal(size=(tokens, width)) * 3, jnp.float32),
    )


def by_definition(values, gates, ratio, overlap):
    """One entry after the other, float64."""
    values, gates = np.asarray(values, np.float64), np.asarray(gates, np.float64)
    half = values.shape[1] // 2
    entries = []
    for i in range(values.shape[0] // ratio):
        own = slice(ratio * i, ratio * (i + 1))
        v, g = values[own], gates[own]
        if overlap:
            v, g = v[:, half:], g[:, half:]
            if i > 0:
                before = slice(ratio * (i - 1), ratio * i)
                v = np.concatenate([values[before, :half], v])
                g = np.concatenate([gates[before, :half], g])
        weights = np.exp(g - g.max(axis=0))
        entries.append((weights * v).sum(axis=0) / weights.sum(axis=0))
    return np.stack(entries)


def in_chunks(values, gates, sizes, ratio, overlap, implementation, padded=0):
    """Entries and last carry when the sequence comes in chunks, each padded to `padded` rows."""
    carry = empty_carry(values.shape[1], ratio=ratio, overlap=overlap)
    position, entries = 0, []
    for size in sizes:
        rows = max(size, padded)
        part = []
        for x in (values, gates):
            chunk = np.full((rows, x.shape[1]), np.nan, np.float32)
            chunk[:size] = x[position : position + size]
            part.append(chunk)
        fresh, count, first, carry = run(
            *part, carry, position, size, ratio, overlap, implementation
        )
        assert fresh.shape[0] == -(-rows // ratio)
        assert int(first) == position // ratio
        assert int(count) == (position + size) // ratio - position // ratio
        assert not np.asarray(fresh)[int(count) :].any()
        entries.append(np.asarray(fresh)[: int(count)])
        position += size
    return np.concatenate(entries), carry


@pytest.mark.parametrize("implementation", ["tiled", "portable"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_chunks_give_the_definition_and_the_same_bits(kind, implementation):
    ratio, overlap, width = KINDS[kind]
    tokens = 75
    values, gates = make(1, tokens, width)
    whole, carry = in_chunks(values, gates, [tokens], ratio, overlap, implementation)
    wanted = by_definition(values, gates, ratio, overlap)
    np.testing.assert_allclose(whole, wanted, rtol=0, atol=3e-6)
    for sizes, padded in (
        ([1] * 21 + [54], 60),
        ([3, 1, 5, 2, 64], 75),
        ([32, 32, 11], 32),
        ([7] * 10 + [5], 7),
        ([0, 74, 1], 75),
    ):
        entries, last = in_chunks(values, gates, sizes, ratio, overlap, implementation, padded)
        np.testing.assert_array_equal(entries, whole)
        for got, right in zip(jax.tree.leaves(last), jax.tree.leaves(carry), strict=True):
            np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_follows_the_definition(kind):
    ratio, overlap, width = KINDS[kind]
    values, gates = make(4, 90, width)
    wanted = by_definition(values, gates, ratio, overlap)
    for sizes in ([90], [3, 1, 60, 26]):
        entries, _ = in_chunks(values, gates, sizes, ratio, overlap, "reference", 90)
        np.testing.assert_allclose(entries, wanted, rtol=0, atol=3e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_carry_holds_the_open_block_and_zeros(kind):
    ratio, overlap, width = KINDS[kind]
    values, gates = make(2, 2 * ratio + 3, width)
    _, carry = in_chunks(values, gates, [values.shape[0]], ratio, overlap, "reference")
    np.testing.assert_array_equal(carry.partial_values[:3], values[-3:])
    np.testing.assert_array_equal(carry.partial_gates[:3], gates[-3:])
    assert not np.asarray(carry.partial_values)[3:].any()
    if overlap:
        rows = slice(ratio, 2 * ratio)
        np.testing.assert_array_equal(carry.previous_values, values[rows, : width // 2])
        np.testing.assert_array_equal(carry.previous_gates, gates[rows, : width // 2])
    else:
        assert carry.previous_values is None
        assert carry.previous_gates is None


def test_no_block_closed_keeps_the_absent_previous_block():
    values, gates = make(3, 3, 256)
    _, carry = in_chunks(values, gates, [2, 1], 4, True, "portable")
    assert np.isneginf(carry.previous_gates).all()


@pytest.mark.parametrize("spec", [FLASH, PRO], ids=lambda spec: spec.name)
@pytest.mark.parametrize("kind", ["csa", "indexer", "hca"])
def test_lowers_at_the_shapes_of_the_models(spec, kind, lower_for_gpu):
    width, ratio, overlap = {
        "csa": (2 * spec.head_dim, 4, True),
        "indexer": (2 * spec.index_head_dim, 4, True),
        "hca": (spec.head_dim, 128, False),
    }[kind]
    values = jax.ShapeDtypeStruct((8192, width), jnp.float32)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    assert kernel.refusal(values, ratio=ratio, overlap=overlap) is None
    carry = jax.eval_shape(lambda: empty_carry(width, ratio=ratio, overlap=overlap))
    call = functools.partial(kernel.compress, ratio=ratio, overlap=overlap)
    text = lower_for_gpu(call, values, values, carry, scalar, scalar)
    assert "__gpu$xla.gpu.triton" in text


def test_errors_name_the_argument():
    values, gates = make(1, 4, 8)
    call = functools.partial(compress, values, gates)
    plain, overlapped = (empty_carry(8, ratio=4, overlap=overlap) for overlap in (False, True))
    with pytest.raises(ValueError, match="previous_values is None, expected"):
        call(plain, 0, 4, ratio=4, overlap=True)
    with pytest.raises(ValueError, match=r"partial_values has shape \(4, 8\).*expected 16"):
        call(plain, 0, 4, ratio=16, overlap=False)
    with pytest.raises(ValueError, match="7 channels, expected an even number"):
        compress(
            values[:, 1:],
            gates[:, 1:],
            empty_carry(7, ratio=4, overlap=True),
            0,
            4,
            ratio=4,
            overlap=True,
        )
    with pytest.raises(ValueError, match="gates is bfloat16, expected float32"):
        compress(values, gates.astype(jnp.bfloat16), plain, 0, 4, ratio=4, overlap=False)
    with pytest.raises(NotImplementedError, match="entries have 4 channels"):
        call(overlapped, 0, 4, ratio=4, overlap=True, implementation="portable", interpret=True)
    values, gates = make(1, 4, 128)
    with pytest.raises(NotImplementedError, match="ratio is 6"):
        compress(
            values,
            gates,
            empty_carry(128, ratio=6, overlap=False),
            0,
            4,
            ratio=6,
            overlap=False,
            implementation="portable",
            interpret=True,
        )


@pytest.mark.gpu1
@pytest.mark.parametrize(("ratio", "overlap", "width"), [(4, True, 1024), (128, False, 512)])
def test_on_the_gpu(ratio, overlap, width):
    values, gates = make(5, 1000, width)
    whole, _ = in_chunks(values, gates, [1000], ratio, overlap, "sm90")
    np.testing.assert_allclose(
        whole, by_definition(values, gates, ratio, overlap), rtol=0, atol=1e-5
    )
    entries, _ = in_chunks(values, gates, [300, 1, 128, 571], ratio, overlap, "sm90")
    np.testing.assert_array_equal(entries, whole)
