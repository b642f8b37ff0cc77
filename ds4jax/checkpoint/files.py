"""Checkpoints in folders: files that are kept open, and whether they are still what they were."""

import abc
import dataclasses
import os
import pathlib
import weakref
from collections.abc import Mapping

import numpy as np

from ds4jax.checkpoint.source import CheckpointError, TensorInfo, TensorSource
from ds4jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Extent:
    """Where a tensor lies on disk: `nbytes` bytes from `offset` of the file `path`."""

    path: str
    offset: int
    nbytes: int


class OpenFiles:
    """Files opened by path; reads notice that one was changed in place since it was opened.

    stamps  size and modification time in ns of each path when it was opened; kept after `close`
    """

    def __init__(self) -> None:
        self.stamps: dict[str, tuple[int, int]] = {}
        self._descriptors: dict[str, int] = {}

    def open(self, path: str) -> None:
        """Opens a file for reading; OSError when the system refuses."""
        self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.stamps[path] = self._stamp(path)

    def close(self) -> None:
        """Closes all files; reading afterwards is an error."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read(self, path: str, buffer: np.ndarray, offset: int) -> None:
        """Fills `buffer` (contiguous) from `offset` of a file; safe from several threads.

        Raises CheckpointError when the file cannot be read, ends before the buffer is full or has
        changed since it was opened.
        """
        if path not in self._descriptors:
            raise ValueError(f"{path} was read after its checkpoint was closed")
        rest = memoryview(buffer).cast("B")
        while rest:
            # One call moves at most 2 GiB - 4 KiB on Linux, hence the loop.
            try:
                count = os.preadv(self._descriptors[path], [rest], offset)
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be read at offset {offset} ({error.strerror}): check the disk"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{path} ended {len(rest)} bytes early at offset {offset}: it was cut while "
                    "being read, fetch it again"
                )
            rest = rest[count:]
            offset += count
        if (found := self._stamp(path)) != self.stamps[path]:
            raise CheckpointError(
                f"{path} changed after it was opened (size and time in ns: {self.stamps[path]} "
                f"before, {found} now): run the command again when nothing writes to it"
            )

    def _stamp(self, path: str) -> tuple[int, int]:
        status = os.fstat(self._descriptors[path])
        return status.st_size, status.st_mtime_ns


class FolderSource(TensorSource):
    """Tensors that lie in ranges of files of a folder, beside its `config.json`."""

    def __init__(
        self, folder: pathlib.Path, config: ModelConfig, infos: Mapping[str, TensorInfo]
    ) -> None:
        self.folder, self.config = folder, config
        self.files = OpenFiles()
        self._infos = dict(infos)
        self._close = weakref.finalize(self, self.files.close)

    @abc.abstractmethod
    def extent(self, name: str) -> Extent:
        """The file range of a tensor."""

    def close(self) -> None:
        self._close()

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def config_text(self) -> str:
        return (self.folder / "config.json").read_text(encoding="utf-8")

    def read_into(self, name: str, buffer: np.ndarray, start: int = 0) -> None:
        self.require_range(name, buffer, start)
        extent = self.extent(name)
        self.files.read(extent.path, buffer, extent.offset + start)
