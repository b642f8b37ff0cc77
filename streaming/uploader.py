"""Moves units in order: host slots filled ahead, copies issued early, memory bounded.

The thread that dispatches the compute also issues the copies, because the device orders a copy
behind whatever was queued before it. Two threads only wait: one for copies (then the host slot may
be refilled, and the device memory of a slab that has been used up by then is free again), one for
outputs, which bound how far dispatching is ahead.
"""

import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from streaming import window as arithmetic
from streaming.disk import DiskRing, Request
from streaming.errors import StreamError
from streaming.link import Link, split_piece
from streaming.monitor import Monitor
from streaming.peers import PeerStore
from streaming.slab import Slab, SlabLayout
from streaming.store import HostPiece, HostStore
from streaming.trace import Span, Trace
from streaming.window import Event


@dataclasses.dataclass(eq=False)
class Unit:
    """Items of one layer that move and are computed together.

    rows         leading extent of the slab on the device
    direct       the items are one contiguous piece that fills the slab: nothing to assemble
    price_bytes  device memory from issue until it was computed, as far as dispatching goes, and
                 its copy has come
    state        planned, issued, taken, computing, done
    The *_s fields are clock readings, None for what has not happened.
    """

    index: int
    step: int
    wave: int
    layer: int
    items: tuple[int, ...]
    rows: int
    direct: bool
    price_bytes: int
    tier: str
    request: Request | None = None
    state: str = "planned"
    copied: bool = False
    where: Any = None
    pieces: tuple[tuple[Any, ...], ...] = ()
    slab: Slab | None = None
    moved_bytes: int = 0
    table_bytes: int = 0
    pageable: bool = False
    tail: int = -1
    opened_s: float | None = None
    put_begin_s: float | None = None
    put_end_s: float | None = None
    copied_s: float | None = None
    reached_s: float | None = None
    done_s: float | None = None

    def __str__(self) -> str:
        items = f"{len(self.items)} items"
        if self.items:
            items += f" {self.items[0]}..{self.items[-1]}"
        return f"step {self.step} wave {self.wave} (layer {self.layer}, {items}, {self.tier})"


class Uploader:
    """Takes units of one run through their states; see `Streamer`, which decides what they are."""

    def __init__(
        self,
        layout: SlabLayout,
        link: Link,
        store: HostStore | PeerStore | None,
        ring: DiskRing | None,
        *,
        window: int,
        budget_bytes: int | None,
        monitor: Monitor,
        trace: Trace,
        clock: Callable[[], float],
    ):
        self.layout, self.link, self.store, self.ring = layout, link, store, ring
        self.window, self.budget_bytes = window, budget_bytes
        self.monitor, self.trace, self.clock = monitor, trace, clock
        self.units: list[Unit] = []
        self.live_bytes = self.live_units = self.peak_bytes = self.peak_units = 0
        self.issued = 0
        self.last_computed = -1
        self.waits: list[tuple[str, Unit, int | None, float]] = []
        self._copies: queue.SimpleQueue[tuple[Unit, Any] | None] = queue.SimpleQueue()
        self._outputs: queue.SimpleQueue[tuple[Unit, Any, Any] | None] = queue.SimpleQueue()
        self._watched = self._computing = self._coming = 0
        self._threads: list[threading.Thread] = []
        monitor.describe = self.describe
        if ring is not None:
            ring.attach(monitor, trace)

    def begin(self) -> None:
        """Starts a run with no units."""
        if not self._threads:
            for name, work in (("copies", self._watch_copies), ("outputs", self._watch_outputs)):
                thread = threading.Thread(target=work, name=f"stream-{name}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self.units, self.issued, self.last_computed = [], 0, -1
        self.live_bytes = self.live_units = self.peak_bytes = self.peak_units = 0
        self._coming = 0
        self.waits = []
        self.trace.clear()

    def add(self, unit: Unit) -> None:
        """Appends a unit; the disk starts on it when a slot is free."""
        with self.monitor.changed:
            self.units.append(unit)
            self._event("known", unit)
            if unit.tier == "disk" and unit.items:
                assert self.ring is not None
                unit.request = self.ring.request(unit.layer, unit.items)

    def issue_to(self, last: int) -> None:
        """Issues the copies of all known units up to number `last`."""
        while self.issued <= min(last, len(self.units) - 1):
            self._issue(self.units[self.issued])

    def opened(self, unit: Unit) -> None:
        """The programs of a unit are about to be dispatched."""
        if unit.opened_s is None:
            unit.opened_s = self.clock()

    def take(self, unit: Unit) -> Slab:
        """The slab of an issued unit; RuntimeError unless the window was issued before."""
        self.monitor.check()
        needed = arithmetic.last_to_issue(unit.index, self.window, len(self.units))
        if self.issued <= needed:
            raise RuntimeError(
                f"{unit} was taken before the copies up to unit {needed} were issued: call "
                "issue_ahead() before dispatching the step"
            )
        if unit.state != "issued":
            raise RuntimeError(f"{unit} was taken already")
        if unit.direct:
            (arrays,) = unit.pieces
        else:
            try:
                arrays = self.link.assemble(self.layout, unit.rows, unit.pieces)
            except Exception as error:
                raise StreamError(
                    f"the slab of {unit}, {unit.rows} rows, could not be put together: "
                    f"{type(error).__name__}: {error}"
                ) from error
        names = (component.name for component in self.layout.components)
        unit.slab = Slab(
            unit.step,
            unit.wave,
            unit.layer,
            unit.items,
            unit.rows,
            dict(zip(names, arrays, strict=True)),
            unit.where,
        )
        unit.pieces, unit.where = (), None
        self.opened(unit)
        with self.monitor.changed:
            unit.state = "taken"
            self._event("compute", unit)
        return unit.slab

    def computed(self, unit: Unit, output: Any, reached: Any) -> None:
        """The last program that uses the slab was dispatched; `output` tells when it has run."""
        self.monitor.check()
        if unit.slab is None or unit.state != "taken":
            raise RuntimeError(f"{unit} is {unit.state}: take() it before computed()")
        unit.slab.release()
        unit.slab = None
        with self.monitor.changed:
            unit.state = "computing"
            self.last_computed = unit.index
            self._watched += 1
            self._computing += 1
            if unit.copied:
                self._free(unit)
            else:
                self._coming += 1
        self._outputs.put((unit, reached, output))

    def drain(self) -> None:
        """Waits until everything that was computed is done and its copies are ready."""
        self.monitor.wait(lambda: self._watched == 0, "the outputs of the last steps")

    def abort(self) -> None:
        """Drops what has not been computed and waits for copies and programs under way."""
        with self.monitor.changed:
            for unit in self.units:
                if unit.request is not None and unit.state == "planned":
                    assert self.ring is not None
                    self.ring.drop(unit.request)
                if unit.slab is not None:
                    unit.slab.release()
                unit.pieces, unit.slab, unit.where = (), None, None

        def quiet() -> bool:
            return self._watched == 0 and (self.ring is None or self.ring.idle())

        self.monitor.wait(quiet, "copies and reads that are under way", checked=False)

    def close(self) -> None:
        """Ends the threads."""
        self._copies.put(None)
        self._outputs.put(None)
        for thread in self._threads:
            thread.join(self.monitor.timeout_s)
        self._threads.clear()

    def describe(self) -> str:
        """Who waits for what, one line each; call with the lock held."""
        lines = [
            f"{self.issued} of {len(self.units)} units issued, {self.last_computed + 1} computed, "
            f"{self.live_units} alive with {self.live_bytes} bytes (budget {self.budget_bytes})"
        ]
        for unit in self.units[max(self.last_computed - 2, 0) : self.issued + self.window + 2]:
            if unit.state == "done" and unit.copied:
                continue
            state = unit.state
            if unit.state == "planned" and unit.request is not None:
                request = unit.request
                state = (
                    "in its slot"
                    if request.filled
                    else "waiting for a slot"
                    if request.slot is None
                    else f"waiting for {request.tasks_left} reads"
                )
            elif unit.state != "planned" and not unit.copied:
                state += ", its copy is under way"
            lines.append(f"  {unit}: {state}")
        if self.ring is not None:
            lines.append(f"  {self.ring.describe()}")
        return "\n".join(lines)

    def _issue(self, unit: Unit) -> None:
        self._wait(unit, "room", lambda: self._has_room(unit))
        request = unit.request
        if request is not None:
            self._wait(unit, "disk", lambda: request.filled)
        pieces = self._host_pieces(unit)
        with self.monitor.changed:
            self.live_units += 1
            self.live_bytes += unit.price_bytes
            self.peak_units = max(self.peak_units, self.live_units)
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            unit.tail = self.last_computed
        table = np.full(self.layout.items, -1, np.int32)
        table[list(unit.items)] = np.arange(len(unit.items), dtype=np.int32)
        put: list[list[Any]] = []
        unit.put_begin_s = self.clock()
        try:
            # The table goes first: behind the slab it would be just as late, but ahead of the
            # next unit's copy, which a table sent later would have to wait for.
            unit.where = self.link.put(table)
            for piece in pieces:
                put.append([])
                for array in piece.arrays:
                    put[-1].append(self.link.put(array))
        except BaseException as error:
            failure = _put_failed(unit, error)
            self.monitor.fail(failure)
            if not isinstance(error, Exception):  # an interrupt stays one
                raise
            raise failure from error
        finally:
            unit.put_end_s = self.clock()
            unit.table_bytes = table.nbytes
            unit.moved_bytes = sum(array.nbytes for piece in put for array in piece)
            unit.pieces = tuple(map(tuple, put))
            with self.monitor.changed:
                unit.state = "issued"
                self.issued += 1
                self._watched += 1
                self._event("issue", unit)
            # Also after a failure: a slot that the device still reads must not be refilled.
            self._copies.put((unit, (unit.where, *put)))

    def _host_pieces(self, unit: Unit) -> list[HostPiece]:
        if unit.request is not None:
            assert self.ring is not None
            unit.pageable = not self.ring.is_pinned(unit.request)
            pieces = self.ring.pieces(unit.request)
        elif unit.items:
            assert self.store is not None
            unit.pageable = not self.store.is_pinned(unit.layer)
            pieces = self.store.pieces(unit.layer, unit.items)
        else:
            pieces = ()
        if unit.direct and not unit.items:
            empty = (np.empty((0, *part.shape), part.dtype) for part in self.layout.components)
            return [HostPiece(0, tuple(empty))]
        if unit.direct:
            return list(pieces)
        return [part for piece in pieces for part in split_piece(piece)]

    def _free(self, unit: Unit) -> None:
        self.live_units -= 1
        self.live_bytes -= unit.price_bytes

    def _has_room(self, unit: Unit) -> bool:
        before = arithmetic.last_to_be_ready(unit.index, self.window)
        if (
            (before < 0 or self.units[before].state == "done")
            and self.live_units < arithmetic.live_bound(self.window)
            and (
                self.budget_bytes is None or self.live_bytes + unit.price_bytes <= self.budget_bytes
            )
        ):
            return True
        if self._computing == self._coming == 0:
            # Waiting would never end: nothing that was dispatched can give memory back.
            raise StreamError(
                f"{unit} needs {unit.price_bytes} bytes beside {self.live_bytes} of "
                f"{self.live_units} units that are not computed yet (budget {self.budget_bytes}, "
                f"at most {arithmetic.live_bound(self.window)} units): take and compute units in "
                "order"
            )
        return False

    def _wait(self, unit: Unit, what: str, ready: Callable[[], bool]) -> None:
        began = self.clock()
        if self.monitor.wait(ready, f"{what} for {unit}"):
            ended = self.clock()
            last = unit.request.waiting_for if unit.request is not None else None
            self.waits.append((what, unit, last, ended - began))
            arguments = {"layer": unit.layer, "unit": unit.index, "item": last}
            self.trace.add(Span("dispatch", f"wait for {what}", began, ended, arguments))

    def _watch_copies(self) -> None:
        while (job := self._copies.get()) is not None:
            unit, arrays = job
            failure: BaseException | None = None
            try:
                jax.block_until_ready(arrays)
            except BaseException as error:
                failure = _copy_failed(unit, error)
            job = arrays = None
            with self.monitor.changed:
                unit.copied, unit.copied_s = True, self.clock()
                if unit.state in ("computing", "done"):
                    self._coming -= 1
                    self._free(unit)
                if unit.request is not None and self.ring is not None:
                    try:
                        self.ring.release(unit.request)
                    except RuntimeError as error:
                        failure = failure or error
                if failure is not None:
                    self.monitor.fail_locked(failure)
                self._watched -= 1
                self.monitor.progressed()

    def _watch_outputs(self) -> None:
        while (job := self._outputs.get()) is not None:
            unit, reached, output = job
            failure: BaseException | None = None
            try:
                if reached is not None:
                    jax.block_until_ready(reached)
                    unit.reached_s = self.clock()
                jax.block_until_ready(output)
            except BaseException as error:
                failure = StreamError(
                    f"the output of {unit} failed, or was donated to a later program: "
                    f"{type(error).__name__}: {error}"
                )
                failure.__cause__ = error
            job = reached = output = None
            with self.monitor.changed:
                unit.state, unit.done_s = "done", self.clock()
                self._computing -= 1
                self._event("ready", unit)
                if failure is not None:
                    self.monitor.fail_locked(failure)
                self._watched -= 1
                self.monitor.progressed()

    def _event(self, kind: str, unit: Unit) -> None:
        self.trace.events.append(Event(kind, unit.index, self.live_units, self.live_bytes))


def _put_failed(unit: Unit, error: BaseException) -> StreamError:
    failure = StreamError(
        f"the copy of {unit}, {unit.price_bytes} bytes, could not be issued: "
        f"{type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return failure


def _copy_failed(unit: Unit, error: BaseException) -> StreamError:
    failure = StreamError(f"the copy of {unit} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
