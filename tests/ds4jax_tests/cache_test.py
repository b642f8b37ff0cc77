"""Sizes and growth of the state."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax import cache
from ds4jax.config import PRESETS, ModelConfig, Numerics

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "models"
FLASH = ModelConfig.from_json(CONFIGS / "flash.json")
TINY = dataclasses.replace(
    FLASH,
    num_hidden_layers=3,
    compress_ratios=(0, 4, 128, 0),
    head_dim=32,
    qk_rope_head_dim=16,
    index_head_dim=16,
    sliding_window=8,
)


@pytest.mark.parametrize("preset", ["oracle", "bfloat16", "official"])
@pytest.mark.parametrize("capacity", [1, 512, 5000])
def test_bytes_are_known_before_anything_is_allocated(preset, capacity):
    numerics = PRESETS[preset]
    state = cache.empty_state(TINY, numerics, capacity)
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert cache.state_bytes(TINY, numerics, capacity) == allocated
    shapes = cache.abstract_state(TINY, numerics, capacity)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )


def test_bytes_of_flash():
    """Window and carries of fixed size, 6880 bytes a token in bfloat16."""
    numerics = Numerics("bfloat16")
    small, large = (cache.state_bytes(FLASH, numerics, 1 << n) for n in (17, 20))
    assert (large - small) / ((1 << 20) - (1 << 17)) == 6880
    window = 43 * 127 * 512 * 2
    hca = 20 * 2 * 128 * 512 * 4
    csa = 21 * 2 * (4 * 1024 + 4 * 512 + 4 * 256 + 4 * 128) * 4
    assert small - 6880 * (1 << 17) == window + hca + csa


def test_rows_cover_the_capacity():
    for capacity in (1, 511, 512, 513, 100_000):
        for ratio in (4, 8, 128):
            rows = cache.entry_rows(ratio, capacity)
            assert rows % 128 == 0
            assert rows * ratio >= capacity - capacity % ratio
            assert rows - capacity // ratio <= 128


def test_each_kind_has_what_it_needs():
    window, csa, hca = cache.empty_state(TINY, PRESETS["bfloat16"], 600).layers
    assert window.window.shape == (7, 32)
    assert window.window.dtype == jnp.bfloat16
    assert len(jax.tree.leaves(window)) == 1
    assert csa.compressed.shape == (256, 32)
    assert csa.index_keys.shape == (256, 16)
    assert csa.carry.partial_values.shape == (4, 64)
    assert csa.index_carry.previous_gates.shape == (4, 16)
    # No block is closed yet: the overlap must have weight zero.
    assert np.all(np.isneginf(csa.carry.previous_gates))
    assert csa.carry.partial_gates.dtype == jnp.float32
    assert hca.compressed.shape == (128, 32)
    assert hca.carry.partial_values.shape == (128, 32)
    assert (hca.carry.previous_values, hca.index_keys, hca.index_carry) == (None, None, None)


def test_position_is_a_host_integer_and_no_leaf():
    state = cache.empty_state(TINY, PRESETS["oracle"], 64)
    moved = jax.tree.map(lambda leaf: leaf + 1, state)
    assert moved.position == 0
    assert isinstance(moved.position, int)


def test_growing_adds_empty_rows_and_never_shrinks():
    state = cache.empty_state(TINY, PRESETS["oracle"], 600)
    state = dataclasses.replace(state, position=77)
    state = jax.tree.map(lambda leaf: leaf + 1, state)
    grown = cache.grow_state(state, TINY, 5000)
    assert grown.position == 77
    wanted = cache.abstract_state(TINY, PRESETS["oracle"], 5000)
    for one, old, shape in zip(grown.layers, state.layers, wanted.layers, strict=True):
        assert jax.tree.map(lambda leaf: leaf.shape, one) == jax.tree.map(
            lambda leaf: leaf.shape, shape
        )
        np.testing.assert_array_equal(one.window, old.window)
        for name in ("compressed", "index_keys"):
            before, after = getattr(old, name), getattr(one, name)
            if before is not None:
                np.testing.assert_array_equal(after[: before.shape[0]], before)
                assert not np.any(after[before.shape[0] :])
    assert jax.tree.map(lambda leaf: leaf.shape, cache.grow_state(grown, TINY, 1)) == jax.tree.map(
        lambda leaf: leaf.shape, grown
    )


def test_chunk_positions_count_from_its_place():
    chunk = cache.make_chunk(np.int32([5, 6, 7]), 40, 6)
    np.testing.assert_array_equal(chunk.tokens, [5, 6, 7, 0, 0, 0])
    np.testing.assert_array_equal(chunk.positions, range(40, 46))
    np.testing.assert_array_equal(chunk.real, [True] * 3 + [False] * 3)
    assert (chunk.position.dtype, chunk.length.dtype) == (jnp.int32, jnp.int32)
