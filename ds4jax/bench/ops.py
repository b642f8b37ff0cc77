"""Device time of the programs of a run against what the device could do.

A run is attend, route, experts, finish for every layer, one program each, and a few small ones. The
profiler says which program a kernel belongs to; the floor of a program is that of its layer part,
summed over layers and chunks. Copies between host and device belong to none and run beside them.
"""

import collections
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ds4jax import events
from ds4jax.config import ModelConfig, Numerics
from ds4jax.costs import PARTS, work

PROGRAM = re.compile(r"jit__?(\w+?)(\.\d+)?$")
OTHER = "other"
COPIES = {"MemcpyH2D": "host to device", "MemcpyD2H": "device to host"}


def program_seconds(folder: str | os.PathLike[str]) -> dict[str, float]:
    """Device seconds by program name ("attend", ...) or kind of copy, from a profiler's trace."""
    totals: dict[str, float] = collections.defaultdict(float)
    for event in _device_events(folder):
        found = PROGRAM.match(str(dict(event.stats).get("hlo_module", "")))
        name = COPIES.get(event.name) or (found[1] if found else OTHER)
        totals[name] += event.duration_ns / 1e9
    return dict(totals)


def kernel_seconds(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Device seconds and calls by kernel name, longest first, from a trace of the profiler."""
    totals: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0])
    for event in _device_events(folder):
        total = totals[event.name]
        total[0] += event.duration_ns / 1e9
        total[1] += 1
    rows = [
        {"kernel": name, "seconds": seconds, "calls": int(calls)}
        for name, (seconds, calls) in totals.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])


def against_floors(
    seconds: Mapping[str, float],
    config: ModelConfig,
    chunks: Sequence[events.ChunkDone],
    numerics: Numerics,
) -> list[dict[str, Any]]:
    """Rows of an op: seconds measured, its floor and the share of the floor, longest first.

    Programs come before copies. "other" are the embedding, the head, tables and sums of notes.
    chunks  those of the run that was traced; floors are those of bfloat16 products
    """
    floors = dict.fromkeys(PARTS, 0.0)
    for chunk in chunks:
        for layer in range(config.num_hidden_layers):
            parts = work(config, layer, chunk.tokens, chunk.position)
            for part in PARTS:
                floors[part] += parts[part].floor_s
    measured = {part: seconds.get(part, 0.0) for part in PARTS}
    copies = {name: seconds[name] for name in COPIES.values() if name in seconds}
    measured[OTHER] = sum(seconds.values()) - sum(measured.values()) - sum(copies.values())
    rows = [
        {
            "op": name,
            "copy": name in copies,
            "seconds": took,
            "floor_s": floors.get(name),
            "share_of_floor": floors[name] / took if name in floors and took else None,
            "numerics": str(numerics),
        }
        for name, took in (measured | copies).items()
    ]
    return sorted(rows, key=lambda row: (row["copy"], -row["seconds"]))


def line(row: Mapping[str, Any]) -> str:
    """An op in a line."""
    text = f"    {row['op']:14} {row['seconds'] * 1e3:9.2f} ms"
    if row["share_of_floor"] is not None:
        text += f", floor {row['floor_s'] * 1e3:8.2f} ms = {row['share_of_floor']:.1%}"
    return text


def _device_events(folder: str | os.PathLike[str]) -> Iterator[Any]:
    """The kernels and copies of all streams; copies of memory are events like kernels."""
    for path in sorted(Path(folder).rglob("*.xplane.pb")):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for part in plane.lines:
                if part.name.startswith("Stream"):
                    yield from part.events
