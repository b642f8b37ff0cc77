"""Two owners of one layer's items: the slower one starts first, the other one hides it.

The cold owner (a second device, or the CPU) gets its input and its programs first, on a thread of
its own because dispatching to it may block. As soon as its input copy is queued it says so, once,
and the hot owner is dispatched. A cold owner that fails or returns without a word releases the hot
one as well: nobody waits for a signal that cannot come.
"""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

from streaming.errors import StreamError, StreamStalled

C = TypeVar("C")
H = TypeVar("H")


class Readiness:
    """A signal that is given once: ready, or failed."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def signal(self) -> None:
        """The input copy is queued; RuntimeError when something was signalled before."""
        with self._lock:
            if self._event.is_set():
                raise RuntimeError("readiness was signalled before: it is for a single use")
            self._event.set()

    def fail(self, error: BaseException) -> None:
        """Releases the waiter with an error, unless it was released already."""
        with self._lock:
            if not self._event.is_set():
                self._error = error
                self._event.set()

    def wait(self, timeout_s: float) -> None:
        """Returns when ready; raises the owner's error, or StreamStalled after `timeout_s`."""
        if not self._event.wait(timeout_s):
            raise StreamStalled(f"the cold owner did not start within {timeout_s:g} s")
        if self._error is not None:
            raise StreamError(f"the cold owner failed to start: {self._error}") from self._error


class ColdFirst:
    """Runs pairs of dispatches, the cold owner's first; `close` ends its thread.

    timeout_s  for the start, and again for the end, of the cold dispatch
    """

    def __init__(self, timeout_s: float = 60.0):
        self._timeout_s = timeout_s
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "stream-cold")

    def run(self, cold: Callable[[Readiness], C], hot: Callable[[], H]) -> tuple[C, H]:
        """Calls cold(ready) on the cold thread and, once it signalled, hot() on this one.

        Returns both results. An error of either is raised after the other has returned; the hot
        owner is not started when the cold one fails before its signal.
        """
        ready = Readiness()

        def work() -> C:
            try:
                return cold(ready)
            except BaseException as error:
                ready.fail(error)
                raise
            finally:
                ready.fail(StreamError("it returned without signalling"))

        future = self._pool.submit(work)
        try:
            ready.wait(self._timeout_s)
            result = hot()
        except BaseException:
            concurrent.futures.wait([future], self._timeout_s)
            raise
        if not concurrent.futures.wait([future], self._timeout_s).done:
            raise StreamStalled(
                f"the cold owner did not finish dispatching within {self._timeout_s:g} s"
            )
        return future.result(), result

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)
