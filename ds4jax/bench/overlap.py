"""Which kernels of two GPUs ran at the same time, from a trace of the profiler."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Kernel(NamedTuple):
    """One run of a kernel, in nanoseconds of the profiler's clock."""

    name: str
    begin_ns: float
    end_ns: float


def kernels(folder: str | os.PathLike[str]) -> list[list[Kernel]]:
    """The kernels of every GPU in a trace, by time."""
    found: dict[str, list[Kernel]] = {}
    for path in sorted(Path(folder).rglob("*.xplane.pb")):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            if plane.name.startswith("/device:GPU"):
                found.setdefault(plane.name, []).extend(
                    Kernel(event.name, event.start_ns, event.start_ns + event.duration_ns)
                    for line in plane.lines
                    if line.name.startswith("Stream")
                    for event in line.events
                    if not event.name.startswith(("Memcpy", "Memset"))
                )
    return [sorted(found[name], key=lambda kernel: kernel.begin_ns) for name in sorted(found)]


def pairs(hot: Sequence[Kernel], cold: Sequence[Kernel], calls: int) -> dict[str, Any]:
    """How the two owners of `calls` expert calls ran beside each other.

    hot, cold  kernels of the two devices. The cold one runs nothing but its share of the calls; of
               the hot one those kernels count that ran as often as on the cold one.
    Start gaps are those of the hot share after the cold one. Raises ValueError when no kernel ran
    a multiple of `calls` times on both.
    """
    spans_hot, spans_cold = [], []
    runs = [_by_name(part) for part in (hot, cold)]
    shared = [
        name
        for name, rows in runs[1].items()
        if len(rows) % calls == 0 and len(rows) == len(runs[0].get(name, ()))
    ]
    if not shared:
        raise ValueError(f"no kernel ran a multiple of {calls} times on both devices")
    for call in range(calls):
        for part, spans in zip(runs, (spans_hot, spans_cold), strict=True):
            rows = []
            for name in shared:
                size = len(part[name]) // calls
                rows += part[name][call * size : (call + 1) * size]
            spans.append((min(row.begin_ns for row in rows), max(row.end_ns for row in rows)))
    both = [
        max(min(h[1], c[1]) - max(h[0], c[0]), 0)
        for h, c in zip(spans_hot, spans_cold, strict=True)
    ]
    gaps = sorted(h[0] - c[0] for h, c in zip(spans_hot, spans_cold, strict=True))
    lengths = [[end - begin for begin, end in spans] for spans in (spans_hot, spans_cold)]
    return {
        "calls": calls,
        "kernels": shared,
        "overlapping_calls": sum(ns > 0 for ns in both),
        "overlap_share": sum(both) / sum(map(min, *lengths)),
        "start_gap_us_median": gaps[calls // 2] / 1e3,
        "start_gap_us_min": gaps[0] / 1e3,
        "start_gap_us_max": gaps[-1] / 1e3,
        "hot_ms_median": sorted(lengths[0])[calls // 2] / 1e6,
        "cold_ms_median": sorted(lengths[1])[calls // 2] / 1e6,
    }


def _by_name(kernels: Sequence[Kernel]) -> dict[str, list[Kernel]]:
    found: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        found.setdefault(kernel.name, []).append(kernel)
    return found
