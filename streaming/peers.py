"""A neighbour device as a tier: items in its memory, or its host link as a second path.

Both ways end with a copy over the link between the devices, which is several times faster than the
link to the host. Small tables travel the same way, so that they do not wait behind the slabs on the
device's own host link.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from streaming.link import DeviceLink
from streaming.slab import SlabLayout, runs
from streaming.store import HostPiece

PEER_TIER, RELAY_TIER = "peer", "relay"


class PeerRows:
    """Consecutive rows of an array on the neighbour; the device does nothing until `read`."""

    def __init__(self, array: jax.Array, first: int, rows: int):
        self._array, self._first, self._rows = array, first, rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, part: slice) -> "PeerRows":
        first, stop, _ = part.indices(self._rows)
        return PeerRows(self._array, self._first + first, stop - first)

    def read(self) -> jax.Array:
        """The rows as an array on the neighbour; all of them are the array itself."""
        if self._rows == len(self._array):
            return self._array
        return _rows(self._array, np.int32(self._first), self._rows)


class PeerStore:
    """The streamed items of all layers in a neighbour's memory; stands in for a `HostStore`.

    order   items of each layer in store order; () for layers that are not in the store
    blocks  one array [n, *shape] per component and layer, on the neighbour
    Raises ValueError for blocks that do not fit the layout.
    """

    registered_bytes = 0

    def __init__(
        self,
        layout: SlabLayout,
        order: Sequence[Sequence[int]],
        blocks: Sequence[Sequence[jax.Array]],
    ):
        if not len(order) == len(blocks) == layout.layers:
            raise ValueError(
                f"{len(order)} orders and {len(blocks)} blocks, expected {layout.layers} each"
            )
        self.layout = layout
        self.order = tuple(layout.check_items(layer, items) for layer, items in enumerate(order))
        for layer, (items, arrays) in enumerate(zip(self.order, blocks, strict=True)):
            found = [(array.shape, np.dtype(array.dtype)) for array in arrays]
            wanted = [
                ((len(items), *part.shape), np.dtype(part.dtype)) for part in layout.components
            ]
            if items and found != wanted:
                raise ValueError(f"layer {layer} has blocks {found}, expected {wanted}")
        self._rows = [{item: row for row, item in enumerate(items)} for items in self.order]
        self._blocks = [tuple(arrays) for arrays in blocks]

    @property
    def nbytes(self) -> int:
        """Memory held on the neighbour."""
        return sum(map(len, self.order)) * self.layout.item_bytes

    def holds(self, layer: int) -> bool:
        """Whether the items of a layer come from this store."""
        return bool(self.order[layer])

    def is_pinned(self, layer: int) -> bool:
        """Device memory is never pageable."""
        return True

    def arrange(self, layer: int, items: Sequence[int]) -> tuple[int, ...]:
        """`items` in store order; ValueError for items that the store does not hold."""
        rows = self._rows[layer]
        missing = sorted(item for item in items if item not in rows)
        if missing:
            raise ValueError(
                f"the peer store has no items {missing} of layer {layer}: it holds {len(rows)}"
            )
        return tuple(sorted(items, key=rows.__getitem__))

    def pieces(self, layer: int, items: Sequence[int]) -> tuple[HostPiece, ...]:
        """Views of `items` (in store order) as the fewest contiguous pieces."""
        found, row = [], 0
        for first, length in runs([self._rows[layer][item] for item in items]):
            arrays = tuple(PeerRows(block, first, length) for block in self._blocks[layer])
            found.append(HostPiece(row, arrays))
            row += length
        return tuple(found)

    def close(self) -> None:
        """Lets go of the memory."""
        self._blocks = [()] * self.layout.layers


class PeerLink(DeviceLink):
    """The way to a device through its neighbour `via`.

    Rows of a `PeerStore` cross the link between the devices; host arrays (the relay, and tables)
    cross the neighbour's host link first.
    """

    def __init__(self, device: jax.Device, via: jax.Device):
        if device == via:
            raise ValueError(f"{device} is its own neighbour: expected two devices")
        super().__init__(device)
        self._up = DeviceLink(via)

    def put(self, array: Any) -> jax.Array:
        staged = array.read() if isinstance(array, PeerRows) else self._up.put(array)
        return jax.device_put(staged, self.device)


@functools.partial(jax.jit, static_argnums=2)
def _rows(array: jax.Array, first: jax.Array, rows: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, first, rows)
