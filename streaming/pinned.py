"""Page-locking of our own memory for the CUDA driver.

A copy from page-locked memory goes straight from the store to the device at the speed of the link
and runs beside the compute. From pageable memory it goes through a staging copy, several times
slower, and hides little. Locking takes time (tens of milliseconds per GB in large blocks) and some
device memory for page tables; both are measured.
"""

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

log = logging.getLogger(__name__)

_PORTABLE = 0x01  # page-locked for every CUDA context of the process


class PinError(RuntimeError):
    """Memory could not be page-locked."""


class Driver(Protocol):
    """What locks memory; every method may be called from any thread and raises PinError."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-locks a page-aligned range."""

    def unregister(self, address: int) -> None:
        """Undoes `register`."""

    def free_device_bytes(self) -> int:
        """Free memory of the device."""


class CudaDriver:
    """The CUDA driver library through ctypes, on the primary context that JAX uses as well.

    ordinal  index of the device among those that CUDA shows to this process
    """

    def __init__(self, ordinal: int = 0):
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PinError(f"the CUDA driver library cannot be loaded ({error})") from None
        self._call("cuInit", ctypes.c_uint(0))
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(ordinal))
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)

    def register(self, address: int, nbytes: int) -> None:
        self._enter()
        self._call(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_uint(_PORTABLE),
        )

    def unregister(self, address: int) -> None:
        self._enter()
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def read(self, address: int, device_address: int, nbytes: int) -> None:
        """Copies device memory to `address` of the host; returns when it is there."""
        self._enter()
        self._call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(address),
            ctypes.c_uint64(device_address),
            ctypes.c_size_t(nbytes),
        )

    def free_device_bytes(self) -> int:
        self._enter()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def pci_address(self) -> str:
        """PCI address of the device, as in the system's device tree."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, ctypes.c_int(32), self._device)
        return text.value.decode()

    def _enter(self) -> None:
        # The current context belongs to a thread.
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
            reason = text.value.decode() if text.value else "unknown error"
            raise PinError(f"{name} failed with {reason} ({status})")


class PinReport(NamedTuple):
    """What page-locking did so far.

    device_bytes  device memory that it cost, other allocations of the same time included
    """

    registered_bytes: int
    failed_bytes: int
    seconds: float
    device_bytes: int
    errors: tuple[str, ...]


class Pinner:
    """Page-locks ranges one after the other on a thread of its own.

    driver  None where there is nothing to lock memory for: ranges stay pageable, silently
    """

    def __init__(self, driver: Driver | None, clock: Callable[[], float] = time.perf_counter):
        self._driver, self._clock = driver, clock
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._queue: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._pinned: dict[int, int] = {}
        self._failed_bytes, self._seconds = 0, 0.0
        self._device_before = self._device_after = 0
        self._errors: list[str] = []
        self._thread: threading.Thread | None = None

    def pin_soon(self, address: int, nbytes: int) -> None:
        """Queues a page-aligned range; until its turn has come it is pageable."""
        if self._driver is None or nbytes == 0:
            return
        with self._lock:
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="stream-pin", daemon=True)
                self._thread.start()
        self._queue.put((address, nbytes))

    def is_pinned(self, address: int) -> bool:
        """Whether the range that begins at `address` is page-locked."""
        with self._lock:
            return address in self._pinned

    def wait(self, timeout_s: float | None = None) -> PinReport:
        """Waits until the queue is empty; returns what was done."""
        with self._idle:
            self._idle.wait_for(lambda: self._waiting == 0, timeout_s)
        return self.report()

    def report(self) -> PinReport:
        """What was done so far."""
        with self._lock:
            return PinReport(
                sum(self._pinned.values()),
                self._failed_bytes,
                self._seconds,
                max(self._device_before - self._device_after, 0),
                tuple(self._errors),
            )

    def unpin(self, address: int) -> None:
        """Unlocks the range that begins at `address`, if it is locked; no copy may use it."""
        if self._driver is None:
            return
        self.wait()
        with self._lock:
            locked = self._pinned.pop(address, None) is not None
        if locked:
            try:
                self._driver.unregister(address)
            except PinError as error:
                log.warning("pinned: memory at %#x stays page-locked: %s", address, error)

    def close(self) -> None:
        """Unlocks everything that is left and ends the thread."""
        self.wait()
        for address in list(self._pinned):
            self.unpin(address)
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        assert self._driver is not None
        while (job := self._queue.get()) is not None:
            address, nbytes = job
            error: str | None = None
            first, before, after = False, 0, 0
            began = self._clock()
            try:
                before = self._driver.free_device_bytes()
                self._driver.register(address, nbytes)
                after = self._driver.free_device_bytes()
            except Exception as problem:
                error = str(problem)
            seconds = self._clock() - began
            with self._idle:
                self._seconds += seconds
                if error is None:
                    self._pinned[address] = nbytes
                    self._device_before += before
                    self._device_after += after
                else:
                    self._failed_bytes += nbytes
                    self._errors.append(error)
                    first = len(self._errors) == 1
                self._waiting -= 1
                self._idle.notify_all()
            if error is not None and first:
                log.warning(
                    "pinned: %d bytes of host memory stay pageable (%s): copies from them run at "
                    "2 to 9 GB/s instead of 50 on a PCIe 5.0 link and do not run beside the "
                    "compute; raise the memlock limit or the memory limit of the container",
                    nbytes,
                    error,
                )
