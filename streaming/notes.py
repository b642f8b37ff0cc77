"""Small messages from running programs to the host: how often each item was used, or which ones.

Two ways, one interface. By callback: a program of its own calls back into Python; dispatching such
a program returns only after the callback has run, so keep it small and use it only where the host
needs the answer early. By fetching: the router's output is copied to the host beside the compute,
and looked at later.
"""

import collections
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback


class Note(NamedTuple):
    """What one step sent.

    values   i32: how often each item occurs [items] if `counted`, else ids, -1 for none
    """

    step: int
    layer: int
    values: np.ndarray
    counted: bool

    def counts(self, items: int) -> np.ndarray:
        """How often each item occurs, integers [items]."""
        if self.counted:
            return self.values
        flat = self.values.reshape(-1)
        return np.bincount(flat[flat >= 0], minlength=items)


def item_counts(ids: jax.Array, items: int) -> jax.Array:
    """How often each item occurs: i32 [items]. Ids of any shape, i32; negative ones are dropped."""
    flat = ids.reshape(-1)
    # A negative index would count from the end.
    return jnp.zeros(items, jnp.int32).at[jnp.where(flat < 0, items, flat)].add(1, mode="drop")


class Notes:
    """Collects notes of one device by step; keep it for all runs, its program is compiled once.

    items   number of items of a layer
    by_callback  see the module; both ways give the same notes
    """

    def __init__(self, items: int, *, by_callback: bool = False):
        self._items, self.by_callback = items, by_callback
        # What arrives: the number of the message and its values, both perhaps arrays.
        self._arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._sent: dict[int, tuple[int, int, bool]] = {}
        self._count = 0
        self._kept: dict[int, Note] = {}
        self._lock = threading.Lock()
        self._send = jax.jit(self._program, static_argnums=2)
        self._number: jax.Array | None = None

    def begin(self, device: jax.Device) -> None:
        """Starts a run: notes of an earlier one are forgotten, also those that are still to come.

        Call it before copies are issued, which a number for the device would wait behind.
        """
        with self._lock:
            self._sent.clear()
            self._kept.clear()
        if self.by_callback:
            # Numbers go on, so that a late message of an earlier run is told from one of this.
            self._number = jax.device_put(np.int32(self._count), device)

    def send(self, step: int, layer: int, ids: jax.Array, *, as_ids: bool = False) -> None:
        """Sends a note about the router's output, i32 of any shape, -1 for none.

        as_ids  sends the ids as they are instead of counts: what a routed step needs
        The message is on the host when the router has run, see `wait`.
        """
        number, self._count = self._count, self._count + 1
        with self._lock:
            self._sent[number] = (step, layer, not as_ids)
        if not self.by_callback:
            values = ids if as_ids else _counts(ids, self._items)
            values.copy_to_host_async()
            self._arrived.put((number, values))
            return
        if self._number is None:
            self._number = jax.device_put(np.int32(number), next(iter(ids.devices())))
        self._number = self._send(self._number, ids, as_ids)

    def wait(self, step: int, timeout_s: float) -> Note:
        """The note of a step; TimeoutError when it has not come in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if step in self._kept:
                    return self._kept[step]
            self._keep_next(deadline, f"no note of step {step} within {timeout_s:g} s")

    def drain(self, timeout_s: float) -> Iterator[Note]:
        """All notes of the run by step, and forgets them; waits for those still to come."""
        deadline = time.monotonic() + timeout_s
        while self._sent:
            missing = sorted({step for step, _, _ in self._sent.values()})
            self._keep_next(deadline, f"no notes of steps {missing} within {timeout_s:g} s")
        with self._lock:
            kept = sorted(self._kept.values(), key=lambda note: note.step)
            self._kept.clear()
        yield from kept

    def _program(self, number: jax.Array, ids: jax.Array, as_ids: bool) -> jax.Array:
        """Calls back with the number of the message; returns the next number.

        The number stays on the device: as a host scalar it would be one more copy, in line behind
        the slabs. Callbacks that JAX orders would be so within one thread only.
        """
        values = ids if as_ids else item_counts(ids, self._items)

        def put(number: Any, values: Any) -> None:
            # Nothing else: waiting for something, or using JAX, could block the device's thread.
            self._arrived.put((number, values))

        io_callback(put, None, number, values, ordered=False)
        return number + jnp.int32(1)

    def _keep_next(self, deadline: float, late: str) -> None:
        """Takes a message in; TimeoutError beginning with `late` when none comes in time."""
        try:
            number, values = self._arrived.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            raise TimeoutError(f"{late}; notes at hand: {sorted(self._kept)}") from None
        number = int(number)
        with self._lock:
            if number in self._sent:  # not one of an earlier run
                step, layer, counted = self._sent.pop(number)
                self._kept[step] = Note(step, layer, np.asarray(values), counted)


_counts = jax.jit(item_counts, static_argnums=1)


class Usage:
    """Adds up counts over a run: the profile of used items and the distinct ones per layer."""

    def __init__(self, layers: int, items: int):
        self.counts = np.zeros((layers, items), np.int64)
        self.distinct: dict[int, list[int]] = collections.defaultdict(list)

    def add(self, note: Note) -> int:
        """Takes a note; returns the number of distinct items in it."""
        counts = note.counts(self.counts.shape[1])
        self.counts[note.layer] += counts
        distinct = int(np.count_nonzero(counts))
        self.distinct[note.layer].append(distinct)
        return distinct


def prefer_routed(
    *,
    distinct_misses: float,
    share: int,
    item_bytes: int,
    link_bytes_per_s: float,
    compute_s: float,
) -> bool:
    """Whether a layer takes less time when only the items that its router asks for move.

    distinct_misses  measured: distinct streamed items that a step used
    compute_s        time of a layer's programs

    A whole share moves while other layers compute; routed items move while the layer waits, after
    its router. So routed pays when the time saved on the link exceeds what the whole share hides:
    compute + misses < max(compute, share), in seconds.
    """
    move = item_bytes / link_bytes_per_s
    return compute_s + distinct_misses * move < max(compute_s, share * move)
