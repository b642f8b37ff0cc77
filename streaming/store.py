"""Items in host memory, laid out so that what streams together lies together.

Per NUMA placement there is one anonymous region. A layer's block is page-aligned in it and keeps
the layer's items in the order that the caller gives, component by component: a run of consecutive
items is one contiguous range per component, which the device copies without any gathering.
"""

import collections
import concurrent.futures
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from streaming import numa
from streaming.errors import StreamError
from streaming.pinned import Pinner
from streaming.slab import SlabLayout, runs

log = logging.getLogger(__name__)

# fill(layer, item, component name, buffer [*shape]) writes the whole buffer; runs on many threads.
Fill = Callable[[int, int, str, np.ndarray], None]
# fill(layer, items, arrays [n, *shape] in component order) writes all of them.
FillLayer = Callable[[int, Sequence[int], Sequence[np.ndarray]], None]


class HostPiece(NamedTuple):
    """Consecutive rows of a slab, as arrays [n, *shape] in component order.

    They are host arrays, or those of another device where items come from there.
    """

    row: int
    arrays: tuple[Any, ...]


def allocate(nbytes: int) -> np.ndarray:
    """Page-aligned anonymous memory, uint8 [nbytes], zero until written.

    Raises MemoryError when the system refuses it.
    """
    try:
        region = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(
            f"{nbytes} bytes of host memory were refused ({error}): keep more items on the device, "
            "or stream from disk"
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            # Fewer page faults while filling and fewer pages to lock.
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            log.debug("store: the system has no transparent huge pages")
    # The array keeps the mapping alive, and with the last view of it the mapping goes.
    return np.frombuffer(region, np.uint8)[:nbytes]


def owners(order: Sequence[Sequence[int]], origins: Sequence[int] | None = None) -> tuple[int, ...]:
    """For each layer the first one whose memory can serve it: same origin, same items in order."""
    first: dict[tuple[int, tuple[int, ...]], int] = {}
    origins = range(len(order)) if origins is None else origins
    return tuple(
        first.setdefault((origin, tuple(items)), layer)
        for layer, (origin, items) in enumerate(zip(origins, order, strict=True))
    )


class HostStore:
    """The streamed items of all layers in host memory.

    order        items of each layer in store order; () for layers that are not in the store. Give
                 items that are copied together consecutive places (see `residency.split_owners`).
    origins      for each layer the first one whose items have the same bytes: layers of one origin
                 and one order share memory. None when all differ
    policy       NUMA placement, see `numa.place`
    device_node  the node that the device is attached to, None if unknown
    Raises MemoryError when the memory is refused, ValueError when placement is impossible.
    """

    def __init__(
        self,
        layout: SlabLayout,
        order: Sequence[Sequence[int]],
        *,
        origins: Sequence[int] | None = None,
        policy: numa.Policy = "auto",
        topology: numa.Topology | None = None,
        device_node: int | None = None,
        pinner: Pinner | None = None,
        allocate: Callable[[int], np.ndarray] = allocate,
        bind: Callable[[int, int, Sequence[int]], bool] = numa.bind,
    ):
        if len(order) != layout.layers:
            raise ValueError(f"order names {len(order)} layers, expected {layout.layers}")
        self.layout = layout
        self.order = tuple(layout.check_items(layer, items) for layer, items in enumerate(order))
        self._rows = [{item: row for row, item in enumerate(items)} for items in self.order]
        self._pinner = pinner or Pinner(None)
        self._owners = owners(self.order, origins)
        sizes = [
            layout.block_bytes(len(items)) if owner == layer else 0
            for layer, (owner, items) in enumerate(zip(self._owners, self.order, strict=True))
        ]
        topology = numa.read_topology() if topology is None else topology
        self.nodes = numa.place(sizes, topology, policy, device_node)
        groups: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
        for layer, nodes in enumerate(self.nodes):
            groups[nodes].append(layer)
        self._blocks: list[np.ndarray] = [np.empty(0, np.uint8)] * layout.layers
        for nodes, layers in groups.items():
            region = allocate(sum(sizes[layer] for layer in layers))
            if nodes and region.nbytes:
                bind(region.ctypes.data, region.nbytes, nodes)
            offset = 0
            for layer in layers:
                self._blocks[layer] = region[offset : offset + sizes[layer]]
                offset += sizes[layer]
        self._blocks = [self._blocks[owner] for owner in self._owners]
        self._views = [
            layout.carve(block, len(items))
            for block, items in zip(self._blocks, self.order, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Host memory held, page padding included."""
        return sum(self._blocks[layer].nbytes for layer in self._distinct())

    def _distinct(self) -> list[int]:
        """The layers that have memory of their own."""
        return [layer for layer, owner in enumerate(self._owners) if owner == layer]

    def holds(self, layer: int) -> bool:
        """Whether the items of a layer come from this store."""
        return bool(self.order[layer])

    def fill(
        self,
        fill: Fill,
        *,
        threads: int | None = None,
        pin: bool = True,
        on_layer: Callable[[int], None] = lambda layer: None,
    ) -> None:
        """Fills the store layer by layer from many threads and page-locks each finished layer.

        pin       False leaves it pageable until `pin`
        on_layer  called on this thread after each layer
        Raises StreamError naming the item when a call of `fill` raises.
        """
        workers = threads or min(16, 2 * (os.cpu_count() or 1))
        names = [component.name for component in self.layout.components]
        stop = threading.Event()

        def fill_item(layer: int, row: int, item: int) -> None:
            for name, view in zip(names, self._views[layer], strict=True):
                if stop.is_set():
                    return
                try:
                    fill(layer, item, name, view[row])
                except Exception as error:
                    stop.set()
                    raise StreamError(
                        f"loading {name} of item {item}, layer {layer} failed: "
                        f"{type(error).__name__}: {error}"
                    ) from error

        def finish(layer: int, jobs: list[concurrent.futures.Future[None]]) -> None:
            for job in jobs:
                job.result()
            if stop.is_set():  # a later layer failed; its jobs raise
                return
            self._filled(layer, pin)
            on_layer(layer)

        with concurrent.futures.ThreadPoolExecutor(workers, "stream-fill") as pool:
            # Two layers at a time keep all threads busy across the border between them.
            pending: collections.deque[tuple[int, list[concurrent.futures.Future[None]]]]
            pending = collections.deque()
            for layer, items in enumerate(self.order):
                own = enumerate(items) if self._owners[layer] == layer else ()
                jobs = [pool.submit(fill_item, layer, *pair) for pair in own]
                pending.append((layer, jobs))
                if len(pending) == 2:
                    finish(*pending.popleft())
            while pending:
                finish(*pending.popleft())

    def fill_layers(
        self, fill: FillLayer, *, on_layer: Callable[[int], None] = lambda layer: None
    ) -> None:
        """Fills the store a layer at a time on this thread and page-locks each finished layer."""
        for layer, items in enumerate(self.order):
            if items and self._owners[layer] == layer:
                fill(layer, items, self._views[layer])
            self._filled(layer, pin=True)
            on_layer(layer)

    def _filled(self, layer: int, pin: bool) -> None:
        for view in self._views[layer]:
            # From here on a copy may read it at any time.
            view.flags.writeable = False
        if pin and self._owners[layer] == layer:
            self._pin(layer)

    def pin(self) -> None:
        """Queues all layers for page-locking; for a store that was filled without."""
        for layer in self._distinct():
            self._pin(layer)

    def _pin(self, layer: int) -> None:
        block = self._blocks[layer]
        self._pinner.pin_soon(block.ctypes.data, block.nbytes)

    def is_pinned(self, layer: int) -> bool:
        """Whether a layer's block is page-locked by now."""
        return self._pinner.is_pinned(self._blocks[layer].ctypes.data)

    @property
    def registered_bytes(self) -> int:
        """Page-locked bytes."""
        return sum(
            self._blocks[layer].nbytes
            for layer in self._distinct()
            if self._blocks[layer].nbytes and self.is_pinned(layer)
        )

    def arrange(self, layer: int, items: Sequence[int]) -> tuple[int, ...]:
        """`items` in store order; ValueError for items that the store does not hold."""
        rows = self._rows[layer]
        missing = sorted(item for item in items if item not in rows)
        if missing:
            raise ValueError(
                f"the host store has no items {missing} of layer {layer}: it holds {len(rows)}"
            )
        return tuple(sorted(items, key=rows.__getitem__))

    def pieces(self, layer: int, items: Sequence[int]) -> tuple[HostPiece, ...]:
        """Views of `items` (in store order) as the fewest contiguous pieces."""
        rows = self._rows[layer]
        found, row = [], 0
        for first, length in runs([rows[item] for item in items]):
            arrays = tuple(view[first : first + length] for view in self._views[layer])
            found.append(HostPiece(row, arrays))
            row += length
        return tuple(found)

    def close(self) -> None:
        """Unlocks the memory and lets go of it; no copy may be under way."""
        for block in self._blocks:
            self._pinner.unpin(block.ctypes.data)
        self._blocks = [np.empty(0, np.uint8)] * self.layout.layers
        self._views = [()] * self.layout.layers
