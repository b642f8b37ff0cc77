"""What can go wrong while slabs move."""


class StreamError(RuntimeError):
    """Moving slabs failed; the message names what failed. `Streamer.abort` makes it usable again.

    An error of another thread is raised by the next call on the streamer.
    """


class ReadError(StreamError):
    """A file gave fewer bytes than it should, is no longer the file that was opened, or its disk
    fails; the message names the file and what to do.
    """


class StreamStalled(StreamError):
    """Nothing moved for the time limit; the message lists who waits for what."""


class StreamCancelled(StreamError):
    """`Streamer.cancel` was called."""


class LedgerError(StreamError):
    """The bytes or items that moved are not those that the plan predicted."""


class BudgetError(ValueError):
    """A plan that the device memory given to slabs cannot hold."""
