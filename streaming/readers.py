"""Interchangeable ways of reading ranges of files; every read ends with a check of the file."""

import dataclasses
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from streaming.errors import ReadError
from streaming.slab import PAGE_BYTES, page_round
from streaming.store import allocate

log = logging.getLogger(__name__)

ReaderKind = Literal["preadv", "mmap", "direct"]

_BOUNCE_BYTES = 4 << 20  # direct reads of unaligned ranges pass through a buffer of this size


class FileRange(NamedTuple):
    """Bytes offset..offset + nbytes of a file.

    stamp  size and modification time (ns) of the file when the range was found in it: a read of a
           file that has another by then fails
    """

    path: str
    offset: int
    nbytes: int
    stamp: tuple[int, int] | None = None


class Identity(NamedTuple):
    """What tells that a file is still the one that was opened."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: str) -> "Identity":
        stat = os.stat(path)
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


class Reader(Protocol):
    """Reads file ranges; safe to use from several threads."""

    def read(self, source: FileRange, out: np.ndarray) -> int:
        """Fills `out` (uint8 [source.nbytes]); returns the bytes asked from the system.

        Raises ReadError for a short or changed file, OSError for what the system reports.
        """
        ...

    def close(self) -> None:
        """Closes the files."""
        ...


@dataclasses.dataclass
class _File:
    identity: Identity
    descriptor: int
    mapping: mmap.mmap | None = None


class _Files:
    """Open files by path, opened on first use; every read ends with a check of their identity."""

    def __init__(self, *, flags: int = 0, mapped: bool = False):
        self._flags, self._mapped = flags, mapped
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}

    def get(self, source: FileRange) -> _File:
        with self._lock:
            file = self._files.get(source.path)
            if file is None:
                identity = Identity.of(source.path)
                file = _File(identity, self._open(source.path))
                if self._mapped and identity.nbytes:
                    file.mapping = mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ)
                self._files[source.path] = file
        stamp = (file.identity.nbytes, file.identity.modified_ns)
        if source.stamp not in (None, stamp):
            raise ReadError(
                f"{source.path} changed after it was opened (size and time in ns: {source.stamp} "
                f"before, {stamp} now): load the model again"
            )
        if source.offset + source.nbytes > file.identity.nbytes:
            raise ReadError(
                f"{source.path} has {file.identity.nbytes} bytes, expected at least "
                f"{source.offset + source.nbytes}: the file is truncated, fetch it again"
            )
        return file

    def _open(self, path: str) -> int:
        try:
            return os.open(path, os.O_RDONLY | self._flags)
        except OSError as error:
            if not self._flags or error.errno != errno.EINVAL:
                raise
            log.warning("disk: the file system of %s has no direct reads, it is cached", path)
            self._flags = 0
            return os.open(path, os.O_RDONLY)

    def check(self, source: FileRange, file: _File) -> None:
        """Raises ReadError when the file at the path is no longer the one that is open."""
        try:
            found = Identity.of(source.path)
        except FileNotFoundError:
            raise ReadError(
                f"{source.path} was removed while it was being read: put it back and load the "
                "model again"
            ) from None
        if found != file.identity:
            raise ReadError(
                f"{source.path} changed while it was being read (size, time or inode: "
                f"{tuple(file.identity)} before, {tuple(found)} now): load the model again"
            )

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                if file.mapping is not None:
                    file.mapping.close()
                os.close(file.descriptor)
            self._files.clear()


class PreadReader:
    """Reads with `preadv` straight into the buffer."""

    def __init__(self, preadv: Callable[[int, Sequence[Any], int], int] = os.preadv):
        self._files, self._preadv = _Files(), preadv

    def read(self, source: FileRange, out: np.ndarray) -> int:
        file = self._files.get(source)
        _read_fully(self._preadv, file.descriptor, source, memoryview(out))
        self._files.check(source, file)
        return source.nbytes

    def close(self) -> None:
        self._files.close()


class MmapReader:
    """Copies out of a memory map; shows what the page cache and page faults cost."""

    def __init__(self) -> None:
        self._files = _Files(mapped=True)

    def read(self, source: FileRange, out: np.ndarray) -> int:
        file = self._files.get(source)
        # Touching a page beyond the end of a file that shrank would kill the process.
        self._files.check(source, file)
        if source.nbytes:
            assert file.mapping is not None
            out[:] = np.frombuffer(file.mapping, np.uint8, source.nbytes, source.offset)
        self._files.check(source, file)
        return source.nbytes

    def close(self) -> None:
        self._files.close()


class DirectReader:
    """Reads past the page cache, where the file system can.

    Ranges whose offset, size and buffer are page-aligned go straight into the buffer; others are
    read as the whole pages around them and copied.
    """

    def __init__(self, preadv: Callable[[int, Sequence[Any], int], int] = os.preadv):
        self._files, self._preadv = _Files(flags=getattr(os, "O_DIRECT", 0)), preadv
        self._local = threading.local()

    def read(self, source: FileRange, out: np.ndarray) -> int:
        file = self._files.get(source)
        if not (source.offset | source.nbytes | out.ctypes.data) % PAGE_BYTES:
            _read_fully(self._preadv, file.descriptor, source, memoryview(out))
            asked = source.nbytes
        else:
            asked = self._through_bounce(file.descriptor, source, out)
        self._files.check(source, file)
        return asked

    def _through_bounce(self, descriptor: int, source: FileRange, out: np.ndarray) -> int:
        if not hasattr(self._local, "bounce"):
            self._local.bounce = allocate(_BOUNCE_BYTES)
        bounce: np.ndarray = self._local.bounce
        done = asked = 0
        while done < source.nbytes:
            position = source.offset + done
            begin = position - position % PAGE_BYTES
            wanted = min(page_round(source.offset + source.nbytes - begin), _BOUNCE_BYTES)
            got = self._preadv(descriptor, [memoryview(bounce)[:wanted]], begin)
            asked += wanted
            useful = min(begin + got - position, source.nbytes - done)
            if useful <= 0:
                raise _short(source, done)
            skip = position - begin
            out[done : done + useful] = bounce[skip : skip + useful]
            done += useful
        return asked

    def close(self) -> None:
        self._files.close()


def _read_fully(
    preadv: Callable[[int, Sequence[Any], int], int],
    descriptor: int,
    source: FileRange,
    out: memoryview,
) -> None:
    done = 0
    while done < source.nbytes:
        got = preadv(descriptor, [out[done:]], source.offset + done)
        if got <= 0:
            raise _short(source, done)
        done += got


def _short(source: FileRange, done: int) -> ReadError:
    return ReadError(
        f"{source.path} gave {done} of {source.nbytes} bytes at offset {source.offset}: the file "
        "is truncated or its disk is failing, check the disk or fetch the file again"
    )


READERS: dict[ReaderKind, Callable[[], Reader]] = {
    "preadv": PreadReader,
    "mmap": MmapReader,
    "direct": DirectReader,
}


def open_reader(kind: ReaderKind) -> Reader:
    """A reader by name; ValueError for another name."""
    if kind not in READERS:
        raise ValueError(f"reader is {kind!r}, expected one of {', '.join(READERS)}")
    return READERS[kind]()
