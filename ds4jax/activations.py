"""Where the activations of a micro-batch wait while other chunks of it are computed.

A micro-batch that is longer than what fits on the device keeps its activations in page-locked host
memory. A chunk's share comes back before the programs of the chunk ahead of it are dispatched, so
that the copy runs beside them, and leaves beside those of the next one. Nothing is rounded on the
way: the bits are the same in either place.
"""

import collections
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

# Shares that are on their way to the device while one is computed. One more than it takes to hide
# a copy of the same size: the copies of a layer's slabs share the link, first come, first served.
AHEAD = 2
# Shares on the device at once: those, the one that is computed, and the one that leaves.
LIVE_CHUNKS = AHEAD + 2
PLACES = ("device", "host")
# JAX's pool of page-locked memory holds 64 GB unless told otherwise.
HOST_POOL_BYTES = 60 * 10**9


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def on_device[T](tree: T, device: jax.Device) -> T:
    """The tree on the device: copied from host memory, or as it is."""
    return jax.device_put(tree, SingleDeviceSharding(device))


@dataclasses.dataclass(frozen=True)
class Moved:
    """Bytes of activations that were copied because they wait in host memory."""

    to_host: int = 0
    to_device: int = 0

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(self.to_host + other.to_host, self.to_device + other.to_device)


class Shelf[T]:
    """One tree of arrays for each chunk of a micro-batch.

    `take` hands a tree out for the device, `put` brings back what became of it. Sweeps visit all
    chunks in order. On the host at most `LIVE_CHUNKS` trees are on the device at a time, however
    far dispatching is ahead of computing.

    chunks   how many there are; nothing lies on a new shelf
    device   the one that computes
    on_host  whether trees wait in page-locked host memory
    """

    def __init__(self, chunks: int, device: jax.Device, *, on_host: bool):
        self._on_host = on_host
        self._device = device
        self._host = SingleDeviceSharding(device, memory_kind="pinned_host") if on_host else None
        self._coming: dict[int, T] = {}
        self._leaving: collections.deque[T] = collections.deque()
        self._trees: list[T | None] = [None] * chunks
        self._moved = [0, 0]  # to the host, to the device; shared with the shelves beside this one

    @property
    def trees(self) -> tuple[T, ...]:
        """What lies on the shelf, where it lies; every chunk has to have a tree."""
        return tuple(self._lying(index) for index in range(len(self._trees)))

    @property
    def moved(self) -> Moved:
        """What was copied so far, from and to the shelves beside this one as well."""
        return Moved(*self._moved)

    def beside(self) -> "Shelf[Any]":
        """An empty shelf for the same chunks in the same place."""
        other: Shelf[Any] = copy.copy(self)
        other._trees = [None] * len(self._trees)
        other._coming, other._leaving = {}, collections.deque()
        return other

    def holds(self, index: int) -> bool:
        """Whether a tree of this chunk lies here."""
        return self._trees[index] is not None

    def put(self, index: int, tree: T) -> None:
        """Puts a tree on the shelf. May wait for the trees put before it to have left the device.

        The caller keeps no reference: the device memory is free when the copy is done.
        """
        if self._on_host:
            tree = jax.device_put(tree, self._host)
            self._moved[0] += nbytes(tree)
            self._leaving.append(tree)
            while len(self._leaving) > 1:
                jax.block_until_ready(self._leaving.popleft())
        self._trees[index] = tree

    def take(self, index: int, *, keep: bool = False) -> T:
        """The tree of a chunk on the device; the shelf forgets it, unless told to keep it."""
        self.fetch(index)
        tree = self._coming.pop(index) if self._on_host else self._lying(index)
        if not keep:
            self._trees[index] = None
        return tree

    def fetch(self, index: int) -> None:
        """Issues the copy of a tree to the device, if it lies on the host and does not come yet."""
        tree = self._trees[index]
        if self._on_host and tree is not None and index not in self._coming:
            self._coming[index] = on_device(tree, self._device)
            self._moved[1] += nbytes(tree)

    def sweep(self, *, again: bool = True) -> Iterator[int]:
        """Visits all chunks: what the next ones need is on its way when a number is given.

        again  whether another sweep follows: its first trees are fetched at the end of this one
        """
        count = len(self._trees)
        for index in range(count):
            self.fetch_ahead(index, again=again)
            yield index

    def fetch_ahead(self, index: int, *, again: bool = True) -> None:
        """Issues the copies that have to be under way when chunk `index` is dispatched."""
        count = len(self._trees)
        for near in range(index, index + 1 + AHEAD):
            if near < count or again:
                self.fetch(near % count)

    def _lying(self, index: int) -> T:
        tree = self._trees[index]
        if tree is None:
            raise RuntimeError(f"chunk {index} of {len(self._trees)} has nothing on the shelf")
        return tree
