"""What a run leaves behind: arrays written row by row, run.json, a folder whole or absent."""

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

RUN_SCHEMA = "ds4jax.run/1"
RUN_FILE = "run.json"


def array_hash(array: np.ndarray, dtype: str) -> str:
    """sha256 of the values of `array` as the little-endian `dtype`, in C order."""
    return hashlib.sha256(np.ascontiguousarray(array, dtype).tobytes()).hexdigest()


def token_hash(ids: np.ndarray) -> str:
    """sha256 of token ids as little-endian int32."""
    return array_hash(ids, "<i4")


class OutputError(ValueError):
    """The output cannot be written as asked: names the path, what is wrong and what to do."""


class ArrayWriter:
    """A .npy file that grows row by row, so that it never has to fit in memory.

    rows   [n, *row_shape] of `dtype`, any n, in order; the sha256 that `close` returns covers
           the little-endian data bytes of all rows, without the file's header.

    As a context manager it lets go of the file when the block fails.
    """

    def __init__(self, path: Path, dtype: np.dtype, row_shape: tuple[int, ...]):
        self.path, self.rows = path, 0
        self._dtype, self._row_shape = np.dtype(dtype).newbyteorder("<"), row_shape
        self._hash = hashlib.sha256()
        with disk_errors(path):
            self._file = open(path, "wb")  # noqa: SIM115  (close() ends it)
            self._write_header()

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the error that led here is the one to tell
            self._file.close()

    def append(self, rows: np.ndarray) -> None:
        """Adds rows; raises OutputError when the disk is full."""
        assert rows.shape[1:] == self._row_shape, (rows.shape, self._row_shape)
        data = np.ascontiguousarray(rows, self._dtype)
        with disk_errors(self.path):
            self._file.write(data.data)
        self._hash.update(data.data)
        self.rows += len(rows)

    def close(self) -> str:
        """Completes the file and returns the sha256 of its data."""
        with disk_errors(self.path):
            self._file.flush()
            self._file.seek(0)
            self._write_header()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._hash.hexdigest()

    def _write_header(self) -> None:
        # NumPy pads the header so that the first dimension can grow in place.
        np.lib.format.write_array_header_1_0(
            self._file,
            {
                "shape": (self.rows, *self._row_shape),
                "fortran_order": False,
                "descr": np.lib.format.dtype_to_descr(self._dtype),
            },
        )


@contextlib.contextmanager
def disk_errors(path: Path) -> Generator[None]:
    """Turns a full disk and other failures to write below `path` into OutputError."""
    try:
        with _full_disk(path):
            yield
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else path
        raise OutputError(
            f"{place} cannot be written ({error.strerror or error}): take another --out_dir"
        ) from None


@contextlib.contextmanager
def _full_disk(path: Path) -> Generator[None]:
    """Turns a full disk into OutputError and leaves every other error as it is."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        place = Path(error.filename) if isinstance(error.filename, str) else path
        raise OutputError(
            f"{place}: the disk is full ({_free_bytes(place)} bytes are free): free some space, "
            "take another --out_dir, or keep less (config.prefill.logits, "
            "config.prefill.save_state)"
        ) from None


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raises OutputError when the file system of `folder` has less than `needed_bytes` free."""
    free = _free_bytes(folder)
    if free is not None and free < needed_bytes:
        raise OutputError(
            f"{folder}: the output takes {needed_bytes} bytes and {free} are free, "
            f"{needed_bytes - free} are missing: free some space, take another --out_dir, or keep "
            "less (config.prefill.logits, config.prefill.save_state)"
        )


@contextlib.contextmanager
def output_folder(path: str | os.PathLike[str], *, overwrite: bool) -> Generator[Path]:
    """A folder to write into that becomes `path` when the block ends, or vanishes if it raises.

    An existing folder is replaced only with `overwrite` and only if it holds an earlier run. Where
    one has come up meanwhile that may not be, the output gets another name, which OutputError says.
    """
    target = Path(os.path.abspath(path))
    if not target.name:
        raise OutputError(f"--out_dir: {path} is the root of the file system: take another folder")
    staging = target.with_name(f".{target.name}.partial-{os.getpid()}")
    with disk_errors(target):
        taken = _taken(target)
    if taken and not overwrite:
        raise OutputError(
            f"--out_dir: {path} exists already: take another folder, or pass --overwrite to "
            "replace an earlier run"
        )
    if taken and not _holds_run(target):
        raise OutputError(
            f"--out_dir: {path} exists and holds no {RUN_FILE}, so it is not an earlier run: "
            "take another folder"
        )
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
    try:
        with _full_disk(staging):
            yield staging
        with disk_errors(target):
            if _taken(target) and not (overwrite and _holds_run(target)):
                kept = target.with_name(f"{target.name}-{os.getpid()}")
                staging.rename(kept)
                raise OutputError(
                    f"--out_dir: {path} was made by something else during the run: the output is "
                    f"in {kept} instead, move it where you want it"
                )
            _replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _taken(target: Path) -> bool:
    """Whether something is there other than an empty folder."""
    return target.exists() and not (target.is_dir() and not any(target.iterdir()))


def _holds_run(target: Path) -> bool:
    return (target / RUN_FILE).is_file()


def _replace(staging: Path, target: Path) -> None:
    """Renames `staging` to `target`; an old target is deleted only after that."""
    if not target.exists():
        staging.rename(target)
        return
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    target.rename(old)
    staging.rename(target)
    shutil.rmtree(old)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes `value` as indented JSON, completely or not at all."""
    aside = path.with_name(f".{path.name}.partial")
    with disk_errors(path):
        try:
            with open(aside, "w", encoding="utf-8") as file:
                file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            with contextlib.suppress(OSError):  # it is gone, unless one of the steps failed
                aside.unlink()


def size(count: int) -> str:
    """A number of bytes for people, in decimal units: "1.53 GB"."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def versions() -> dict[str, str | None]:
    """Versions of everything that can change output bits, and the commit of a source checkout."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("ds4jax", "jax", "jaxlib", "flax", "numpy", "orbax-checkpoint"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout without install
            found[name] = None
    found["commit"] = _commit()
    return found


def device_facts(device: jax.Device) -> dict[str, Any]:
    """What the run computed on."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "index": device.id,
        "limit_bytes": stats["bytes_limit"] if stats else None,
        "peak_bytes": stats.get("peak_bytes_in_use") if stats else None,
        "cpu_count": os.cpu_count(),
        "system": platform.platform(terse=True),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _commit() -> str | None:
    folder = Path(__file__).parents[1]
    if not (folder / ".git").exists():
        return None  # installed as a package: a repository around it would not be ours
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _free_bytes(path: Path) -> int | None:
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None
