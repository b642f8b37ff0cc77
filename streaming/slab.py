"""How the items of a layer lie in memory, on the host and on the device.

An item (a routed expert, say) consists of named components. A slab holds some items of one layer,
one array per component with the items along the first axis, so that a run of consecutive items is
one contiguous range per component.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

PAGE_BYTES = 4096  # unit of page-locking and of direct I/O


def page_round(nbytes: int) -> int:
    """The smallest multiple of a page that holds `nbytes`."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@dataclasses.dataclass(frozen=True)
class Component:
    """One array of an item: shape and dtype as the device gets them.

    Keep sub-byte values packed in uint8: arrays of 4-bit dtypes are repacked on the way to the
    device instead of copied.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if any(extent <= 0 for extent in self.shape):
            raise ValueError(f"component {self.name} has shape {self.shape}, expected extents > 0")

    @property
    def nbytes(self) -> int:
        """Bytes of this component in one item."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class SlabLayout:
    """`layers` layers of `items` items each; every item has the same components.

    A block of n items is its components one after the other, [n, *shape] each, every component
    starting on a page; block_bytes(n) is a whole number of pages.
    """

    layers: int
    items: int
    components: tuple[Component, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "components", tuple(self.components))
        names = [component.name for component in self.components]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"components are named {names}, expected distinct names, at least one")
        if self.layers < 1 or self.items < 1:
            raise ValueError(
                f"{self.layers} layers of {self.items} items, expected at least 1 each"
            )

    @property
    def item_bytes(self) -> int:
        """Bytes that move when one item moves."""
        return sum(component.nbytes for component in self.components)

    def block_bytes(self, count: int) -> int:
        """Size of a host block of `count` items, page padding included."""
        return sum(page_round(count * component.nbytes) for component in self.components)

    def carve(self, block: np.ndarray, count: int) -> tuple[np.ndarray, ...]:
        """Views [count, *shape] of the components in a block, at least block_bytes(count) bytes."""
        views, offset = [], 0
        for component in self.components:
            nbytes = count * component.nbytes
            data = block[offset : offset + nbytes].view(component.dtype)
            views.append(data.reshape(count, *component.shape))
            offset += page_round(nbytes)
        return tuple(views)

    def check_items(self, layer: int, items: Iterable[int]) -> tuple[int, ...]:
        """`items` as a tuple; ValueError unless layer and items exist and no item repeats."""
        chosen = tuple(items)
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer {layer}, expected 0..{self.layers - 1}")
        wrong = [item for item in chosen if not 0 <= item < self.items]
        if wrong or len(set(chosen)) != len(chosen):
            repeated = sorted({item for item in chosen if chosen.count(item) > 1})
            raise ValueError(
                f"layer {layer}: items {wrong or repeated} "
                f"{'do not exist' if wrong else 'are named twice'}, expected distinct items "
                f"0..{self.items - 1}"
            )
        return chosen


def runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending rows as (first, length) of maximal runs of consecutive rows."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and found[-1][0] + found[-1][1] == row:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((row, 1))
    return found


def binary_runs(first: int, length: int) -> list[tuple[int, int]]:
    """A run cut into runs whose lengths are powers of two, longest first."""
    cut = []
    while length:
        piece = 1 << (length.bit_length() - 1)
        cut.append((first, piece))
        first, length = first + piece, length - piece
    return cut


class Slab:
    """Items of one layer on a device, as `Streamer.take` hands them out.

    step, wave   what it was asked for; layer names where its items belong
    items        row r of every array holds items[r]
    rows         leading extent of the arrays, at least len(items); further rows hold zeros and
                 `where` names none of them
    where        i32 [layout.items] on the device: the row of each item, -1 for items that are not
                 in this slab

    The arrays may still be on their way: programs that take them wait on the device. They are
    gone once `Streamer.computed` was called, so that the memory returns when the last program
    that uses them ends; keep no reference of your own.
    """

    def __init__(
        self,
        step: int,
        wave: int,
        layer: int,
        items: tuple[int, ...],
        rows: int,
        arrays: Mapping[str, jax.Array],
        where: jax.Array,
    ):
        self.step, self.wave, self.layer = step, wave, layer
        self.items, self.rows = items, rows
        self._arrays: Mapping[str, jax.Array] | None = arrays
        self._where: jax.Array | None = where

    @property
    def arrays(self) -> Mapping[str, jax.Array]:
        """Arrays [rows, *shape] by component name."""
        return self._held(self._arrays)

    @property
    def where(self) -> jax.Array:
        return self._held(self._where)

    def release(self) -> None:
        """Drops the arrays."""
        self._arrays = self._where = None

    def _held(self, value: Any) -> Any:
        if value is None:
            raise RuntimeError(
                f"the slab of step {self.step}, wave {self.wave} (layer {self.layer}) was released "
                "by computed(): take it again in a later step"
            )
        return value
