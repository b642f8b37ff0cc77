"""Items from files: the ring of host slots that threads fill ahead of the copies.

Reads are split over threads. A slot is filled for one unit, copied to the device, and free again
when the device has the data; the lock is never held while reading.
"""

import collections
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from streaming import numa
from streaming.errors import ReadError, StreamError
from streaming.monitor import Monitor
from streaming.pinned import Pinner
from streaming.readers import FileRange, Reader, ReaderKind, open_reader
from streaming.slab import SlabLayout, page_round
from streaming.store import HostPiece, allocate
from streaming.trace import Span, Trace

log = logging.getLogger(__name__)

# Bytes of one read. A unit is cut into a few reads for each thread, so that the threads end
# together and those of a small unit are all busy; smaller reads would cost more calls than time.
_MOST_TASK_BYTES, _LEAST_TASK_BYTES = 32 << 20, 1 << 20
_TASKS_PER_THREAD = 2
_JUDGED_S = 0.1  # shorter fills say nothing about the disk

# Where a component of an item is: ranges that follow each other in the component's buffer.
Locate = Callable[[int, int, str], Sequence[FileRange]]

# Raises for bytes (uint8) of a component that cannot be right; runs on the reading threads.
Check = Callable[[str, FileRange, np.ndarray], None]


def _joined(
    sources: Sequence[tuple[int, FileRange]], most_bytes: int
) -> list[tuple[int, FileRange]]:
    """Ranges that continue each other as one, up to `most_bytes`, with their last item."""
    joined: list[tuple[int, FileRange]] = []
    for item, source in sources:
        if joined:
            last = joined[-1][1]
            nbytes = last.nbytes + source.nbytes
            continues = (last.path, last.offset + last.nbytes) == (source.path, source.offset)
            if continues and nbytes <= most_bytes:
                joined[-1] = (item, last._replace(nbytes=nbytes))
                continue
        joined.append((item, source))
    return joined


class _Slot(NamedTuple):
    block: np.ndarray
    generation: list[int]  # counts the uses; a request remembers which use was its own


@dataclasses.dataclass(eq=False)
class Request:
    """A unit's items on their way from the files to a slot.

    waiting_for   the item that was read last
    """

    layer: int
    items: tuple[int, ...]
    slot: _Slot | None = None
    generation: int = 0
    tasks_left: int = 0
    filled: bool = False
    dropped: bool = False
    began_s: float = 0.0
    waiting_for: int | None = None


@dataclasses.dataclass(frozen=True)
class _Task:
    request: Request
    item: int
    component: str
    source: FileRange
    out: np.ndarray


class DiskRing:
    """Host slots that threads fill from files in the order in which units will be computed.

    rows     most items of a unit
    slots    window + 1 keep the disk busy while the units before are copied and computed
    locate   where the bytes of an item's components are in files
    poison   overwrites a slot when it is given back, so that reading it too late shows
    check    sees all bytes after they were read, in pieces
    slow_bytes_per_s  fills below this rate are counted and the first one is logged
    policy   NUMA placement of the slots, see `numa.place`; device_node is that of the device

    Raises MemoryError when the slots are refused, ValueError when placement is impossible.
    """

    def __init__(
        self,
        layout: SlabLayout,
        locate: Locate,
        *,
        rows: int,
        slots: int,
        reader: Reader | ReaderKind = "preadv",
        threads: int | None = None,
        pinner: Pinner | None = None,
        slow_bytes_per_s: float = 200e6,
        poison: bool = False,
        check: Check = lambda component, source, data: None,
        policy: numa.Policy = "auto",
        topology: numa.Topology | None = None,
        device_node: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        allocate: Callable[[int], np.ndarray] = allocate,
        bind: Callable[[int, int, Sequence[int]], bool] = numa.bind,
    ):
        if slots < 1 or rows < 0:
            raise ValueError(f"{slots} slots of {rows} rows, expected at least 1 slot, 0 rows")
        self.layout, self.rows, self.slots = layout, rows, slots
        self._locate, self._check_bytes = locate, check
        self._reader = open_reader(reader) if isinstance(reader, str) else reader
        self._threads = threads or min(16, 2 * (os.cpu_count() or 1))
        self._pinner = pinner or Pinner(None)
        self._slow_bytes_per_s, self._poison, self._clock = slow_bytes_per_s, poison, clock
        nbytes = layout.block_bytes(rows)
        region = allocate(slots * nbytes)
        self._blocks = [region[index * nbytes : (index + 1) * nbytes] for index in range(slots)]
        topology = numa.read_topology() if topology is None else topology
        self.nodes = numa.place([nbytes] * slots, topology, policy, device_node)
        for block, nodes in zip(self._blocks, self.nodes, strict=True):
            if nodes and block.nbytes:
                bind(block.ctypes.data, block.nbytes, nodes)
        for block in self._blocks:
            self._pinner.pin_soon(block.ctypes.data, block.nbytes)
        self._free = collections.deque(_Slot(block, [0]) for block in self._blocks)
        self._queue: collections.deque[Request] = collections.deque()
        self._tasks: collections.deque[_Task] = collections.deque()
        self._workers: list[threading.Thread] = []
        self._running, self._closed = 0, False
        self._monitor: Monitor | None = None
        self._trace = Trace()
        self.needed_bytes = self.asked_bytes = self.slow_fills = 0

    def attach(self, monitor: Monitor, trace: Trace) -> None:
        """Makes the ring part of one streamer; RuntimeError when it is part of another."""
        if self._monitor is not None:
            raise RuntimeError("this ring serves another streamer: give each one its own")
        self._monitor, self._trace = monitor, trace

    @property
    def nbytes(self) -> int:
        """Host memory of all slots."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def registered_bytes(self) -> int:
        """Page-locked bytes."""
        return sum(
            block.nbytes
            for block in self._blocks
            if block.nbytes and self._pinner.is_pinned(block.ctypes.data)
        )

    def is_pinned(self, request: Request) -> bool:
        """Whether the slot of a filled request is page-locked."""
        assert request.slot is not None
        return self._pinner.is_pinned(request.slot.block.ctypes.data)

    def request(self, layer: int, items: tuple[int, ...]) -> Request:
        """Queues a unit (call with the monitor's lock held); filled as soon as a slot is free."""
        if len(items) > self.rows:
            raise ValueError(f"a unit of {len(items)} items, the slots hold {self.rows}")
        request = Request(layer, items)
        if not self._workers:
            self._start()
        self._queue.append(request)
        self._schedule()
        return request

    def pieces(self, request: Request) -> tuple[HostPiece, ...]:
        """The host arrays of a filled request; valid until `release`."""
        self._check(request)
        assert request.slot is not None
        count = len(request.items)
        if not count:
            return ()
        return (HostPiece(0, self.layout.carve(request.slot.block, count)),)

    def release(self, request: Request) -> None:
        """Gives the slot back: the device has the data. Call with the monitor's lock held."""
        if not request.dropped:
            self._check(request)
            self._give_back(request)

    def drop(self, request: Request) -> None:
        """Gives up a request that nothing copies from; call with the monitor's lock held.

        A slot that threads still write to returns when they are done.
        """
        if request in self._queue:
            self._queue.remove(request)
        unread = [task for task in self._tasks if task.request is request]
        for task in unread:
            self._tasks.remove(task)
        request.tasks_left -= len(unread)
        self._drop(request)

    def idle(self) -> bool:
        """Whether all slots are free; call with the lock held."""
        return len(self._free) == self.slots and not self._running

    def describe(self) -> str:
        """State of the slots in one line; call with the lock held."""
        return (
            f"disk: {len(self._free)} of {self.slots} slots free, {len(self._queue)} units wait "
            f"for a slot, {self._running} reads running, {len(self._tasks)} reads queued"
        )

    def close(self) -> None:
        """Ends the threads, closes the files and unlocks the memory; no copy may be under way."""
        self._closed = True
        if self._monitor is not None:
            with self._monitor.changed:
                self._tasks.clear()
                self._monitor.changed.notify_all()
            deadline = time.monotonic() + self._monitor.timeout_s
            for worker in self._workers:
                worker.join(max(deadline - time.monotonic(), 0))
        if any(worker.is_alive() for worker in self._workers):
            # Its memory and files stay: the read may still return.
            log.warning("disk: a read does not end, its slot stays in memory")
            return
        self._workers.clear()
        self._reader.close()
        for block in self._blocks:
            self._pinner.unpin(block.ctypes.data)
        self._free.clear()
        self._blocks = []

    def _start(self) -> None:
        for index in range(self._threads):
            worker = threading.Thread(target=self._work, name=f"stream-read-{index}", daemon=True)
            self._workers.append(worker)
            worker.start()

    def _schedule(self) -> None:
        """Gives free slots to waiting requests, in order. The lock is held."""
        assert self._monitor is not None
        while self._queue and self._free:
            request = self._queue.popleft()
            request.slot = self._free.popleft()
            request.slot.generation[0] += 1
            request.generation = request.slot.generation[0]
            request.began_s = self._clock()
            try:
                tasks = self._split(request)
            except Exception as error:
                # Raised where the unit is asked for, like every other failure of a read.
                request.slot, slot = None, request.slot
                request.dropped = True
                self._free.append(slot)
                self._report(request, error)
                return
            request.tasks_left, request.filled = len(tasks), not tasks
            self._tasks.extend(tasks)
            self._monitor.progressed()

    def _split(self, request: Request) -> list[_Task]:
        assert request.slot is not None
        tasks = []
        most = self._task_bytes(len(request.items))
        views = self.layout.carve(request.slot.block, len(request.items))
        for component, view in zip(self.layout.components, views, strict=True):
            out = view.reshape(-1).view(np.uint8)
            sources: list[tuple[int, FileRange]] = []
            for item in request.items:
                found = self._locate(request.layer, item, component.name)
                nbytes = sum(source.nbytes for source in found)
                if nbytes != component.nbytes:
                    raise StreamError(
                        f"{component.name} of item {item}, layer {request.layer} has {nbytes} "
                        f"bytes in files, expected {component.nbytes}"
                    )
                sources.extend((item, source) for source in found)
            done = 0
            for item, source in _joined(sources, most):
                parts = max(-(-source.nbytes // most), 1)
                even = page_round(-(-source.nbytes // parts))
                for start in range(0, source.nbytes, even or 1):
                    nbytes = min(even, source.nbytes - start)
                    part = source._replace(offset=source.offset + start, nbytes=nbytes)
                    target = out[done + start : done + start + nbytes]
                    tasks.append(_Task(request, item, component.name, part, target))
                done += source.nbytes
        return tasks

    def _task_bytes(self, items: int) -> int:
        """Most bytes of a read for a unit of so many items: whole pages, as direct reads ask."""
        share = items * self.layout.item_bytes // (_TASKS_PER_THREAD * self._threads)
        return page_round(min(max(share, _LEAST_TASK_BYTES), _MOST_TASK_BYTES))

    def _work(self) -> None:
        assert self._monitor is not None
        changed = self._monitor.changed
        while True:
            with changed:
                changed.wait_for(lambda: self._tasks or self._closed)
                if self._closed:
                    return
                task = self._tasks.popleft()
                self._running += 1
            began, asked = self._clock(), 0
            failure: BaseException | None = None
            try:
                if not self._monitor.stopped:
                    asked = self._reader.read(task.source, task.out)
                    if len(task.out) != task.source.nbytes:
                        raise StreamError(f"{task.source} does not fit its buffer")
                    self._check_bytes(task.component, task.source, task.out)
            except BaseException as error:  # a thread that ended silently would leave a hang
                failure = error
            with changed:
                self._running -= 1
                self._done(task, began, asked, failure)

    def _done(self, task: _Task, began: float, asked: int, failure: BaseException | None) -> None:
        """Accounts for a finished task. The lock is held."""
        assert self._monitor is not None
        request, ended = task.request, self._clock()
        request.tasks_left -= 1
        if failure is not None:
            request.dropped = True
            self._report(request, failure, task)
        elif not request.dropped and not self._monitor.stopped:
            self.needed_bytes += task.source.nbytes
            self.asked_bytes += asked
            request.waiting_for = task.item
            arguments = {"layer": request.layer, "item": task.item, "bytes": task.source.nbytes}
            self._trace.add(Span("disk", f"read L{request.layer}", began, ended, arguments))
            if request.tasks_left == 0:
                request.filled = True
                self._watch_speed(request, ended - request.began_s)
        if request.dropped:
            self._drop(request)
        self._monitor.progressed()

    def _report(self, request: Request, error: BaseException, task: _Task | None = None) -> None:
        """Stores a failure. The lock is held, so the monitor's own method cannot be used."""
        assert self._monitor is not None
        where = f"layer {request.layer}"
        if task is not None:
            where = f"{task.component} of item {task.item}, layer {request.layer}"
        # Files and disks are the user's to mend; anything else is a fault of the program.
        kind = ReadError if isinstance(error, ReadError | OSError) else StreamError
        reason = str(error) if isinstance(error, ReadError) else f"{type(error).__name__}: {error}"
        if task is not None and isinstance(error, OSError):
            reason = f"{task.source.path}: {reason}: check the disk, or fetch the file again"
        failure = kind(f"reading {where} failed: {reason}")
        failure.__cause__ = error
        self._monitor.fail_locked(failure)

    def _watch_speed(self, request: Request, seconds: float) -> None:
        nbytes = len(request.items) * self.layout.item_bytes
        if seconds > _JUDGED_S and nbytes / seconds < self._slow_bytes_per_s:
            self.slow_fills += 1
            if self.slow_fills == 1:
                log.warning(
                    "disk: layer %d came at %.0f MB/s, expected at least %.0f: the disk or another "
                    "user of it slows this run down",
                    request.layer,
                    nbytes / seconds / 1e6,
                    self._slow_bytes_per_s / 1e6,
                )

    def _drop(self, request: Request) -> None:
        request.dropped = True
        if request.tasks_left == 0 and request.slot is not None:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        slot, request.slot = request.slot, None
        assert slot is not None
        request.dropped, request.filled = True, False
        if self._poison:
            slot.block[:] = 0xA5
        self._free.append(slot)
        self._schedule()

    def _check(self, request: Request) -> None:
        slot = request.slot
        if slot is None or not request.filled or slot.generation[0] != request.generation:
            raise RuntimeError(
                f"the host slot of layer {request.layer}, items {request.items[:4]}..., was given "
                "back or never filled"
            )
