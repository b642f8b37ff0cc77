"""The lock, the wake-ups and the first failure that the threads of one streamer share."""

import threading
import time
from collections.abc import Callable

from streaming.errors import StreamCancelled, StreamError, StreamStalled


class Monitor:
    """One condition for all state of a streamer, with failure, cancellation and a watchdog.

    timeout_s  a wait ends with StreamStalled when nothing has progressed for so long
    describe   says who waits for what; called with the lock held

    The lock guards bookkeeping only: nobody reads, copies or waits for a device while holding it.
    """

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.changed = threading.Condition(threading.Lock())
        self.describe: Callable[[], str] = str
        self._progress = 0
        self._failure: BaseException | None = None
        self._cancelled = False

    def progressed(self) -> None:
        """Something moved; call with the lock held."""
        self._progress += 1
        self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stores the first failure; every later call on the streamer raises it."""
        with self.changed:
            self.fail_locked(error)

    def fail_locked(self, error: BaseException) -> None:
        """`fail` for a caller that holds the lock."""
        if self._failure is None:
            self._failure = error
        self.changed.notify_all()

    def cancel(self) -> None:
        """Makes every wait and every later call raise StreamCancelled."""
        with self.changed:
            self._cancelled = True
            self.changed.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether work should end early; readable without the lock."""
        return self._cancelled or self._failure is not None

    def clear(self) -> None:
        """Forgets failure and cancellation."""
        with self.changed:
            self._failure, self._cancelled = None, False

    def check(self) -> None:
        """Raises the stored failure, or StreamCancelled."""
        if self._failure is not None:
            failure = self._failure
            kind = type(failure) if isinstance(failure, StreamError) else StreamError
            text = str(failure) if kind is type(failure) else f"{type(failure).__name__}: {failure}"
            raise kind(text) from failure
        if self._cancelled:
            raise StreamCancelled("streaming was cancelled")

    def wait(self, ready: Callable[[], bool], what: str, *, checked: bool = True) -> bool:
        """Waits until `ready()`, evaluated with the lock held; returns whether it was not at once.

        checked  False waits on in spite of a failure, to let running work end
        Raises StreamStalled with the full picture when nothing progresses in time.
        """
        waited = False
        with self.changed:
            seen, deadline = self._progress, time.monotonic() + self.timeout_s
            while True:
                if checked:
                    self.check()
                if ready():
                    return waited
                if self._progress != seen:
                    seen, deadline = self._progress, time.monotonic() + self.timeout_s
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StreamStalled(
                        f"no progress for {self.timeout_s:g} s while waiting for {what}\n"
                        f"{self.describe()}"
                    )
                waited = True
                self.changed.wait(left)
