"""Layout of items in host blocks, and runs of rows."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming import Component, Slab, SlabLayout, testing
from streaming.slab import PAGE_BYTES, binary_runs, runs


def test_flash_expert_has_its_published_size():
    """Hidden size 4096, width 2048, FP4 codes with one scale byte per 32 values."""
    layout = SlabLayout(
        43,
        256,
        (
            Component("gate_up", (4096, 2048), np.uint8),
            Component("gate_up_scale", (4096, 128), np.uint8),
            Component("down", (4096, 1024), np.uint8),
            Component("down_scale", (4096, 64), np.uint8),
        ),
    )
    assert layout.item_bytes == 13_369_344
    assert layout.block_bytes(256) == 256 * 13_369_344


@given(count=st.integers(0, 9))
def test_components_of_a_block_start_on_pages_and_do_not_overlap(count):
    layout = testing.small_layout()
    block = np.zeros(layout.block_bytes(count), np.uint8)
    views = layout.carve(block, count)
    for number, view in enumerate(views):
        view[...] = number + 1
        assert view.shape == (count, *layout.components[number].shape)
        if count:
            assert (view.ctypes.data - block.ctypes.data) % PAGE_BYTES == 0
    for number, view in enumerate(views):
        assert (view == number + 1).all()


def test_any_dtype_of_the_device_has_a_view():
    layout = SlabLayout(1, 2, (Component("w", (4,), ml_dtypes.float8_e4m3fn),))
    assert layout.carve(np.zeros(PAGE_BYTES, np.uint8), 2)[0].dtype == ml_dtypes.float8_e4m3fn


@given(st.sets(st.integers(0, 60)))
def test_runs_cover_exactly_the_rows(rows):
    found = runs(sorted(rows))
    assert [r for first, length in found for r in range(first, first + length)] == sorted(rows)
    assert all(a[0] + a[1] < b[0] for a, b in itertools.pairwise(found))


@given(st.integers(0, 50), st.integers(0, 300))
def test_binary_runs_have_lengths_that_are_powers_of_two(first, length):
    found = binary_runs(first, length)
    assert [r for start, n in found for r in range(start, start + n)] == list(
        range(first, first + length)
    )
    assert all(n & (n - 1) == 0 for _, n in found)
    assert len(found) == length.bit_count()


def test_wrong_layouts_and_items_are_named():
    part = Component("w", (4,), np.uint8)
    with pytest.raises(ValueError, match="expected distinct names"):
        SlabLayout(1, 1, (part, part))
    with pytest.raises(ValueError, match="0 layers of 1 items"):
        SlabLayout(0, 1, (part,))
    with pytest.raises(ValueError, match="expected extents > 0"):
        Component("w", (4, 0), np.uint8)
    layout = SlabLayout(2, 3, (part,))
    with pytest.raises(ValueError, match=r"layer 2, expected 0\.\.1"):
        layout.check_items(2, ())
    with pytest.raises(ValueError, match=r"items \[-1, 3\] do not exist"):
        layout.check_items(0, (-1, 0, 3))
    with pytest.raises(ValueError, match=r"items \[1\] are named twice"):
        layout.check_items(0, (1, 1, 2))


def test_released_slab_says_what_it_was():
    slab = Slab(3, 1, 2, (0,), 1, {}, None)
    slab.release()
    with pytest.raises(RuntimeError, match=r"step 3, wave 1 \(layer 2\) was released"):
        _ = slab.arrays
