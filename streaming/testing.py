"""Doubles for tests without a GPU: a clock, a driver, a link that copies as late as it may."""

import collections
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streaming.pinned import PinError
from streaming.readers import FileRange
from streaming.slab import Component, SlabLayout
from streaming.streamer import Step, Streamer


class FakeClock:
    """A clock that stands still until it is told to advance."""

    def __init__(self, now_s: float = 0.0):
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class FakeDriver:
    """Locks nothing and keeps a list; fails for every range after the first `works`.

    page_table_share  device bytes that each locked byte costs
    """

    def __init__(self, works: int = 1 << 30, page_table_share: float = 0.0):
        self.locked: dict[int, int] = {}
        self.calls = 0
        self._works, self._share = works, page_table_share

    def register(self, address: int, nbytes: int) -> None:
        self.calls += 1
        if self.calls > self._works:
            raise PinError("cuMemHostRegister_v2 failed with CUDA_ERROR_OUT_OF_MEMORY (2)")
        self.locked[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.locked[address]

    def free_device_bytes(self) -> int:
        return (1 << 40) - int(sum(self.locked.values()) * self._share)


class LateArray:
    """The device's copy of a host array, made when the link gets to it."""

    def __init__(self, source: np.ndarray):
        self.nbytes, self.shape, self.dtype = source.nbytes, source.shape, source.dtype
        self.demanded = False
        self._source: np.ndarray | None = source
        self._value: np.ndarray | None = None
        self._error: Exception | None = None
        self._ready = threading.Event()
        self.wake: Callable[[], None] = lambda: None

    def copy_now(self, error: Exception | None = None) -> None:
        """Reads the host memory as it is at this moment."""
        if error is None:
            assert self._source is not None
            self._value = np.array(self._source)
        self._error, self._source = error, None
        self._ready.set()

    def block_until_ready(self) -> "LateArray":
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self

    def value(self) -> np.ndarray:
        """What a program sees; makes the link hurry."""
        self.demanded = True
        self.wake()
        self.block_until_ready()
        assert self._value is not None
        return self._value


class LateLink:
    """A link whose copies run in order on a thread, as late as it may.

    A copy is made when a program asks for it or a later one, or when `lag` later ones have been
    issued. lag 0 copies at once. `fail_copies` and `fail_puts` are numbers of puts that fail.
    """

    after_compute = False

    def __init__(
        self, lag: int = 0, *, fail_puts: Sequence[int] = (), fail_copies: Sequence[int] = ()
    ):
        self.lag = lag
        self.fail_puts, self.fail_copies = set(fail_puts), set(fail_copies)
        self.puts = 0
        self.during_put: Callable[[], None] = lambda: None
        self.during_copy: Callable[[], None] = lambda: None
        self._waiting: collections.deque[tuple[int, LateArray]] = collections.deque()
        self._changed = threading.Condition()
        self._hurry = self._closed = False
        self._thread = threading.Thread(target=self._work, name="late-link", daemon=True)
        self._thread.start()

    def put(self, array: np.ndarray) -> LateArray:
        self.during_put()
        number, self.puts = self.puts, self.puts + 1
        if number in self.fail_puts:
            raise MemoryError("RESOURCE_EXHAUSTED: out of memory")
        result = LateArray(array)
        result.wake = self._wake
        with self._changed:
            self._waiting.append((number, result))
            self._changed.notify_all()
        return result

    def assemble(
        self, layout: SlabLayout, rows: int, pieces: Sequence[Sequence[LateArray]]
    ) -> tuple["LateSlab", ...]:
        return tuple(
            LateSlab(part, rows, [piece[index] for piece in pieces])
            for index, part in enumerate(layout.components)
        )

    def hurry(self) -> None:
        """Copies everything without further delay, as at the end of a run."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread after the copies that were issued."""
        self.hurry()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _due(self) -> bool:
        late = self.puts - self._waiting[0][0] > self.lag if self._waiting else False
        return late or self._hurry or any(array.demanded for _, array in self._waiting)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self._waiting and self._due()) or self._closed)
                if not self._waiting:
                    return
                number, array = self._waiting.popleft()
            self.during_copy()
            failed = RuntimeError("the link broke") if number in self.fail_copies else None
            array.copy_now(failed)


class LateSlab:
    """Pieces one after the other, zeros behind, once a program asks."""

    def __init__(self, component: Component, rows: int, pieces: Sequence[LateArray]):
        self._component, self._rows, self._pieces = component, rows, pieces
        self.shape = (rows, *component.shape)

    def value(self) -> np.ndarray:
        whole = np.zeros(self.shape, self._component.dtype)
        row = 0
        for piece in self._pieces:
            part = piece.value()
            whole[row : row + len(part)] = part
            row += len(part)
        return whole


class LateOutput:
    """The result of a program that a `FakeDevice` runs later."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def finish(self, result: Any, error: BaseException | None = None) -> None:
        self._result, self._error = result, error
        self._ready.set()

    def block_until_ready(self) -> "LateOutput":
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self

    def value(self) -> Any:
        self.block_until_ready()
        return self._result


class FakeDevice:
    """Runs programs in order on a thread, as a device runs its queue."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[LateOutput, Callable[[], Any]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="fake-device", daemon=True)
        self._thread.start()

    def dispatch(self, program: Callable[[], Any]) -> LateOutput:
        output = LateOutput()
        self._queue.put((output, program))
        return output

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            output, program = job
            try:
                output.finish(program())
            except BaseException as error:
                output.finish(None, error)


def small_layout(layers: int = 8, items: int = 12) -> SlabLayout:
    """Three components: two of odd sizes, one of whole pages."""
    components = (
        Component("codes", (3, 5), np.dtype(np.uint8)),
        Component("scales", (7,), np.dtype(np.float32)),
        Component("pages", (2, 2048), np.dtype(np.uint8)),
    )
    return SlabLayout(layers, items, components)


def content(layout: SlabLayout, layer: int, item: int, component: str) -> np.ndarray:
    """The values of a component that `fill` and `write_files` store: different for every one."""
    names = [part.name for part in layout.components]
    part = layout.components[names.index(component)]
    generator = np.random.default_rng((layer, item, names.index(component)))
    values = generator.integers(0, 100, part.shape)
    return values.astype(part.dtype)


def filler(layout: SlabLayout) -> Callable[[int, int, str, np.ndarray], None]:
    """A `fill` function for `HostStore.fill` that stores `content`."""

    def fill(layer: int, item: int, component: str, buffer: np.ndarray) -> None:
        buffer[...] = content(layout, layer, item, component)

    return fill


def write_files(
    layout: SlabLayout, folder: str | os.PathLike[str], files: int = 2
) -> Callable[[int, int, str], Sequence[FileRange]]:
    """Writes `content` of all items into files, at odd offsets; returns the `locate` function.

    Components of more than one row are stored as two ranges, in different files.
    """
    paths = [str(Path(folder) / f"shard-{index}.bin") for index in range(files)]
    chunks: list[list[bytes]] = [[b"head"] for _ in paths]
    sizes = [4] * files
    places: dict[tuple[int, int, str], list[FileRange]] = {}
    for layer in range(layout.layers):
        for item in range(layout.items):
            for part in layout.components:
                values = content(layout, layer, item, part.name)
                half = (len(values) + 1) // 2 if values.ndim > 1 else len(values)
                ranges = []
                for index, piece in enumerate((values[:half], values[half:])):
                    data = np.ascontiguousarray(piece).tobytes()
                    if not data:
                        continue
                    file = (layer + item + index) % files
                    ranges.append(FileRange(paths[file], sizes[file], len(data)))
                    chunks[file].append(data)
                    sizes[file] += len(data)
                places[layer, item, part.name] = ranges
    for path, pieces in zip(paths, chunks, strict=True):
        Path(path).write_bytes(b"".join(pieces))
    return lambda layer, item, component: places[layer, item, component]


def expected_item(layout: SlabLayout, layer: int, item: int) -> bytes:
    """All components of an item, one after the other."""
    return b"".join(content(layout, layer, item, p.name).tobytes() for p in layout.components)


def run_steps(
    streamer: Streamer,
    steps: Sequence[Step],
    device: FakeDevice,
    ids: Callable[[int], Sequence[int]] = lambda step: (),
    on_step: Callable[[int], None] = lambda step: None,
) -> list[dict[int, bytes]]:
    """Runs a plan as an engine does; what each step found, by item.

    ids      the router's answer for routed steps
    on_step  called before each step
    Call `finish` afterwards. The programs run later, on the device's thread.
    """
    found: list[list[LateOutput]] = []
    streamer.start(steps)
    for number, step in enumerate(steps):
        on_step(number)
        streamer.issue_ahead(number)
        if step.mode == "routed":
            streamer.routed(number, np.asarray(ids(number), np.int32))
        outputs = []
        for wave in range(streamer.waves(number)):
            if wave:
                streamer.issue_ahead(number, wave)
            slab = streamer.take(number, wave)
            outputs.append(device.dispatch(_read_program(dict(slab.arrays), slab.where)))
            streamer.computed(number, outputs[-1], wave)
        found.append(outputs)
    merged: list[dict[int, bytes]] = []
    for outputs in found:
        step_items: dict[int, bytes] = {}
        for output in outputs:
            step_items.update(output.value())
        merged.append(step_items)
    return merged


def _read_program(arrays: dict[str, Any], where: Any) -> Callable[[], dict[int, bytes]]:
    def program() -> dict[int, bytes]:
        rows = where.value()
        values = [array.value() for array in arrays.values()]
        return {
            int(item): b"".join(array[rows[item]].tobytes() for array in values)
            for item in np.flatnonzero(rows >= 0)
        }

    return program
