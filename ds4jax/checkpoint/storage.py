"""Writing folders so that a crash or a full disk leaves nothing half-written in place."""

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from orbax.checkpoint import v1 as ocp

from ds4jax.checkpoint.source import CheckpointError
from sharding import schema

HASH_STEP = 16 << 20  # bytes read at once while hashing


def require_free(path: pathlib.Path, needed: int) -> None:
    """Raises CheckpointError unless the file system of `path` has `needed` bytes free."""
    free = _free_bytes(path)
    if free < needed:
        raise CheckpointError(_full_disk_message(path, needed, free))


@contextlib.contextmanager
def write_errors_reported(path: pathlib.Path, needed: int) -> Generator[None]:
    """Turns a full disk and other failures to write below `path` into CheckpointError.

    needed  bytes that were still to be written when the block began
    """
    try:
        yield
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else None
        # Orbax wraps the operating system's error and keeps only its text.
        full = code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if full or "No space left" in str(error) or "File too large" in str(error):
            raise CheckpointError(_full_disk_message(path, needed, _free_bytes(path))) from error
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{error.filename or path} cannot be written ({error.strerror or error}): choose "
                "another folder"
            ) from error
        raise


def _free_bytes(path: pathlib.Path) -> int:
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def _full_disk_message(path: pathlib.Path, needed: int, free: int) -> str:
    return (
        f"{path} needs {needed} bytes, its disk has {free} free: free {max(needed - free, 0)} "
        "bytes or choose another folder, then run the command again"
    )


@contextlib.contextmanager
def _orbax_warnings_only() -> Generator[None]:
    """Keeps the dozens of progress lines of an Orbax call out of the log."""
    level = logging.get_verbosity()
    logging.set_verbosity(min(level, logging.WARNING))
    try:
        yield
    finally:
        logging.set_verbosity(level)


def save_tree(path: pathlib.Path, tree: Any) -> None:
    """Saves nested dicts of numpy arrays as an Orbax checkpoint, in place of what is there.

    A process of several has a child do it: Orbax would save one checkpoint of all of them, with
    numpy arrays of the first one only.
    """
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        _in_child(_save_on_cpu, path.absolute(), tree)
        return
    with _orbax_warnings_only():
        saving = ocp.save_async(str(path.absolute()), tree, overwrite=True)
        try:
            saving.result()
        except BaseException:
            # Interrupted: its threads go on, and would write into a folder that is deleted next.
            with contextlib.suppress(Exception):
                saving.result()
            raise


def _in_child[Result](job: Callable[..., Result], *arguments: Any) -> Result:
    """What `job` returns in a process of its own, which does not mind Ctrl-C: this one decides.

    Interrupted it ends the child, which would write on into a folder that is deleted next.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            answer = pool.submit(job, *arguments)  # starts the child, which inherits the mask
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            return answer.result()
        except BaseException:
            for child in multiprocessing.active_children():
                child.kill()
            raise


def _save_on_cpu(path: pathlib.Path, tree: Any) -> None:
    jax.config.update("jax_platforms", "cpu")
    save_tree(path, tree)


def load_tree(path: pathlib.Path, part: Any = None) -> Any:
    """Arrays of an Orbax checkpoint; of those that `part` names when it is given.

    part  nested dicts with numpy arrays of the right shapes and dtypes as leaves
    """
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    if jax.distributed.is_initialized():
        # Every process reads what it needs; by default Orbax would wait for all of them.
        number = jax.process_index()
        context.multiprocessing.primary_host = number
        context.multiprocessing.active_processes = {number}
        context.multiprocessing.barrier_sync_key_prefix = f"process{number}"
    try:
        with context, _orbax_warnings_only():
            return ocp.load(str(path.absolute()), part)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as an Orbax checkpoint ({type(error).__name__}: {error}): "
            "write it again"
        ) from error


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": x} -> {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    return tree


def at(tree: Any, name: str) -> Any:
    """The leaf "a.b" of {"a": {"b": leaf}}."""
    for part in name.split("."):
        tree = tree[part]
    return tree


def write_json(path: pathlib.Path, value: Any) -> None:
    """Replaces a JSON file in one step."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """An object from a JSON file; CheckpointError when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: the folder is incomplete") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): expected a JSON file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): write it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, expected an object")
    return value


def require_form(path: pathlib.Path, value: dict[str, Any], form: Any) -> None:
    """Raises CheckpointError unless what `path` holds has a form of `sharding.schema`."""
    if (wrong := schema.problem(value, form)) is not None:
        raise CheckpointError(f"{path}: {wrong}: the file was changed, write it again")


def hash_folder(folder: pathlib.Path) -> str:
    """SHA-256 over the relative paths, sizes and contents of all files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
            hash_range(path, 0, size, digest)
    return digest.hexdigest()


def hash_range(path: str | os.PathLike[str], offset: int, nbytes: int, digest: Any = None) -> str:
    """SHA-256 of bytes offset..offset + nbytes of a file, added to `digest` if given."""
    digest = digest or hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(offset)
        while nbytes > 0:
            piece = file.read(min(nbytes, HASH_STEP))
            if not piece:
                break
            digest.update(piece)
            nbytes -= len(piece)
    return digest.hexdigest()


def write_exactly(file: int, array: np.ndarray, offset: int) -> None:
    """Writes a contiguous array at `offset` of an open file."""
    rest = memoryview(array.reshape(-1).view(np.uint8))
    while rest:
        count = os.pwrite(file, rest, offset)
        rest = rest[count:]
        offset += count
