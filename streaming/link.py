"""The way from host arrays to device arrays."""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from streaming.slab import Component, SlabLayout, binary_runs
from streaming.store import HostPiece


class Link(Protocol):
    """Copies host arrays to one device; all calls come from the thread that dispatches.

    after_compute  whether a copy waits for programs that were queued before it was issued
    """

    after_compute: bool

    def put(self, array: np.ndarray) -> Any:
        """Issues a copy and returns at once; the host array stays as it is until the result is
        ready (`jax.block_until_ready`)."""
        ...

    def assemble(self, layout: SlabLayout, rows: int, pieces: Sequence[Any]) -> tuple[Any, ...]:
        """One array [rows, *shape] per component, with the pieces one after the other in front.

        pieces  arrays of `put`, one per component of some items; the rest is zeros
        """
        ...


class DeviceLink:
    """A JAX device. Copies from page-locked memory read it directly and run beside the compute."""

    def __init__(self, device: jax.Device):
        self.device = device
        # The CPU backend may use a numpy array in place, even when asked not to: there the copy
        # is made here, so that a host buffer can be refilled.
        self._copy_first = device.platform == "cpu"
        self.after_compute = not self._copy_first

    def put(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(np.array(array) if self._copy_first else array, self.device)

    def assemble(
        self, layout: SlabLayout, rows: int, pieces: Sequence[Sequence[jax.Array]]
    ) -> tuple[jax.Array, ...]:
        # The row counter lives on the device: a host scalar as argument would be one more copy,
        # and wait in line behind the slabs that are on their way.
        with jax.default_device(self.device):
            slab, row = _zeros(layout.components, rows)
        for piece in pieces:
            slab, row = _append(slab, row, tuple(piece))
        return slab


def split_piece(piece: HostPiece) -> list[HostPiece]:
    """A piece cut to row counts that are powers of two, so that few programs append them all."""
    return [
        HostPiece(piece.row + first, tuple(array[first : first + rows] for array in piece.arrays))
        for first, rows in binary_runs(0, len(piece.arrays[0]))
    ]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _zeros(components: tuple[Component, ...], rows: int) -> tuple[tuple[jax.Array, ...], jax.Array]:
    arrays = tuple(jnp.zeros((rows, *part.shape), part.dtype) for part in components)
    return arrays, jnp.zeros((), jnp.int32)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _append(
    slab: tuple[jax.Array, ...], row: jax.Array, piece: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    written = tuple(
        jax.lax.dynamic_update_slice_in_dim(whole, part, row, 0)
        for whole, part in zip(slab, piece, strict=True)
    )
    return written, row + jnp.int32(piece[0].shape[0])
