"""What benchmarks share: timing of a jitted function, distances, where numbers come from."""

import argparse
import dataclasses
import datetime
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import support


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call; `compile_s` is the first call, which traces and compiles."""

    compile_s: float
    min_s: float
    median_s: float
    max_s: float
    runs: int

    def as_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)


def output_file(text: str) -> pathlib.Path:
    """A file that a bench can write at its end, as a type of argparse, which reports the error."""
    path = pathlib.Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no file that can be written, expected one in an existing folder"
        )
    return path


def count(text: str) -> int:
    """A whole number of at least 1, as a type of argparse, which reports the error."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def measure(
    function: Callable[..., Any],
    *args: Any,
    runs: int = 10,
    calls_per_run: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Times `function(*args)`, a jitted function of arrays on one device.

    Every run makes `calls_per_run` calls and waits for the last: more than one hides the launch
    from the host, as in a program that queues ahead. Raises ValueError for counts below one.
    """
    if runs < 1 or calls_per_run < 1:
        raise ValueError(f"{runs=} and {calls_per_run=}: expected at least 1 of each")
    start = clock()
    jax.block_until_ready(function(*args))
    compile_s = clock() - start
    jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(runs):
        start = clock()
        for _ in range(calls_per_run):
            result = function(*args)
        jax.block_until_ready(result)
        seconds.append((clock() - start) / calls_per_run)
        del result
    return Timing(compile_s, min(seconds), statistics.median(seconds), max(seconds), runs)


def distance(got: jax.Array, wanted: jax.Array) -> float:
    """Relative Frobenius distance of arrays of one shape; infinite or NaN when a value is."""
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.linalg.norm((got - wanted).ravel()) / jnp.linalg.norm(wanted.ravel()))


def origin(module: str, argv: Sequence[str]) -> dict[str, str]:
    """Device, version, day and command line of measurements, for their file."""
    return {
        "device": support.default_device().device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python -m", module, *argv]),
    }
