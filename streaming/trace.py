"""Host-side record of a run: spans of time per lane, and the timeline file made from them.

The Chrome trace format is an object with a list `traceEvents`; chrome://tracing and Perfetto
read it.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from streaming.window import Event

LANES = ("disk", "copy", "compute", "dispatch")


class Span(NamedTuple):
    """Something that took from begin_s to end_s on a lane; times are of one clock."""

    lane: str
    name: str
    begin_s: float
    end_s: float
    arguments: Mapping[str, Any] = {}


class Trace:
    """Spans and window events of one run, in the order in which they were added.

    Adding is a list append: safe from any thread.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.events: list[Event] = []

    def add(self, span: Span) -> None:
        self.spans.append(span)

    def clear(self) -> None:
        """Starts a new record; the lists handed out before stay as they are."""
        self.spans, self.events = [], []


Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same set of points as disjoint intervals, ascending; empty intervals vanish."""
    merged: list[Interval] = []
    for begin, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Points that are in both; the arguments are results of `union`."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(intervals: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def chrome_trace(spans: Iterable[Span], process: str = "streaming") -> dict[str, Any]:
    """The spans as a Chrome trace; time zero is the begin of the first span."""
    spans = list(spans)
    zero = min((span.begin_s for span in spans), default=0.0)
    lanes = [*LANES, *sorted({span.lane for span in spans}.difference(LANES))]
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": process}}
    ]
    for number, lane in enumerate(lanes):
        named = {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": lane}}
        events.append(named)
    for span in spans:
        events.append(
            {
                "name": span.name,
                "ph": "X",
                "pid": 0,
                "tid": lanes.index(span.lane),
                "ts": (span.begin_s - zero) * 1e6,
                "dur": (span.end_s - span.begin_s) * 1e6,
                "args": dict(span.arguments),
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_timeline(path: str | os.PathLike[str], spans: Iterable[Span]) -> None:
    """Writes `chrome_trace(spans)` as a file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(chrome_trace(spans), file)
