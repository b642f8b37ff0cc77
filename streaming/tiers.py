"""Several streamers that serve the same steps as one: each brings its own items of a layer.

The items of a layer may come over several paths at once (the device's host link, a neighbour's
memory, a neighbour's host link). Every path has a streamer with items, window, budget and account
of its own; a step has all their slabs.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from streaming.ledger import LayerRow, Ledger, Prediction
from streaming.slab import Slab
from streaming.streamer import Step, Streamer
from streaming.trace import Interval, Span, intersection, length, union


class Tiers:
    """Streamers with the calls of one; see `Streamer` for what they mean.

    A step has as many waves as the streamer with the most; `take` gives the slabs of those that
    have this one. An error of one streamer leaves the others in their run: `abort` ends all.
    """

    def __init__(self, streamers: Sequence[Streamer]):
        if not streamers:
            raise ValueError("there are no streamers: expected at least one")
        self.streamers = tuple(streamers)

    def start(self, steps: Iterable[Step]) -> Prediction:
        """Begins a run of all streamers; returns the sum of their predictions."""
        plan = tuple(steps)
        return merge_predictions([streamer.start(plan) for streamer in self.streamers])

    def prefetch(self) -> None:
        """Issues the first copies of all paths of a run that has been started."""
        for streamer in self.streamers:
            streamer.prefetch()

    def issue_ahead(self, step: int, wave: int = 0) -> None:
        """Issues the copies of all paths that have to be under way before `step` computes."""
        for streamer in self._having(step, wave):
            streamer.issue_ahead(step, wave)

    def routed(self, step: int, ids: np.ndarray) -> int:
        """Tells the items of a routed step to all paths; returns the number of waves."""
        return max([streamer.routed(step, ids) for streamer in self.streamers])

    def observed(self, step: int, distinct: int) -> None:
        """Notes for the ledger how many distinct items a step used."""
        for streamer in self.streamers:
            streamer.observed(step, distinct)

    def waves(self, step: int) -> int:
        """Into how many slabs the path with the most cuts a step."""
        return max(streamer.waves(step) for streamer in self.streamers)

    def take(self, step: int, wave: int = 0) -> list[Slab]:
        """The slabs of a wave, one per path that has it."""
        return [streamer.take(step, wave) for streamer in self._having(step, wave)]

    def computed(self, step: int, output: Any, wave: int = 0, *, reached: Any = None) -> None:
        """All programs that use the slabs of a wave have been dispatched."""
        for streamer in self._having(step, wave):
            streamer.computed(step, output, wave, reached=reached)

    def finish(self) -> Ledger:
        """Waits for the last outputs and closes the run of every path."""
        return merge([streamer.finish() for streamer in self.streamers])

    def abort(self) -> Ledger | None:
        """Ends the run of every path; an error of one is raised after all have been told."""
        ledgers, errors = [], []
        for streamer in self.streamers:
            try:
                ledgers.append(streamer.abort())
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        found = [ledger for ledger in ledgers if ledger is not None]
        return merge(found) if found else None

    def cancel(self) -> None:
        """Makes the current and all later calls raise StreamCancelled, until `abort`."""
        for streamer in self.streamers:
            streamer.cancel()

    def violations(self) -> list[str]:
        """Where a path broke the rules of its window."""
        return [line for streamer in self.streamers for line in streamer.violations()]

    def close(self) -> None:
        """Ends the threads of all paths."""
        for streamer in self.streamers:
            streamer.close()

    def _having(self, step: int, wave: int) -> list[Streamer]:
        if wave == 0:
            return list(self.streamers)
        return [streamer for streamer in self.streamers if wave < streamer.waves(step)]


def merge_predictions(parts: Sequence[Prediction]) -> Prediction:
    """The sum over paths, by tier."""
    return Prediction(
        _added(part.items for part in parts),
        _added(part.bytes for part in parts),
        sum(part.most_items for part in parts),
        sum(part.most_bytes for part in parts),
        all(part.exact for part in parts),
    )


# Amounts that add up over paths.
_SUMS = (
    "units",
    "padding_bytes",
    "pageable_bytes",
    "table_bytes",
    "file_bytes",
    "read_padding_bytes",
    "slow_fills",
    "dispatch_wait_s",
    "peak_live_bytes",
    "registered_bytes",
)


def merge(ledgers: Sequence[Ledger]) -> Ledger:
    """One account of paths that served the same steps.

    Amounts add up. A time with several copies is busy once, and a layer waited as long as its
    slowest path. `peak_live_bytes` is the sum of peaks that need not have come together. Counters
    of the process are those of the first path.
    """
    first = ledgers[0]
    if len(ledgers) == 1:
        return first
    copies = union(_intervals(ledgers, "copy"))
    # Programs are the same for all paths; the first one's stalls are taken for all.
    computes = union(_intervals(ledgers[:1], "compute"))
    layers = _merge_layers([row for ledger in ledgers for row in ledger.layers])
    budgets = [ledger.budget_bytes for ledger in ledgers]
    return dataclasses.replace(
        first,
        predicted=merge_predictions([ledger.predicted for ledger in ledgers]),
        complete=all(ledger.complete for ledger in ledgers),
        moved_items=_added(ledger.moved_items for ledger in ledgers),
        moved_bytes=_added(ledger.moved_bytes for ledger in ledgers),
        wall_s=max(ledger.wall_s for ledger in ledgers),
        copy_busy_s=length(copies),
        compute_busy_s=length(computes),
        both_busy_s=length(intersection(copies, computes)),
        stall_s=sum(row.stall_s for row in layers),
        peak_live_units=max(ledger.peak_live_units for ledger in ledgers),
        budget_bytes=None if None in budgets else sum(filter(None, budgets)),
        copy_gb_per_s=tuple(rate for ledger in ledgers for rate in ledger.copy_gb_per_s),
        layers=layers,
        spans=tuple(_spans(ledgers)),
        **{name: sum(getattr(ledger, name) for ledger in ledgers) for name in _SUMS},
    )


def _intervals(ledgers: Sequence[Ledger], lane: str) -> list[Interval]:
    return [
        (span.begin_s, span.end_s)
        for ledger in ledgers
        for span in ledger.spans
        if span.lane == lane and not span.name.startswith("stall ")
    ]


def _merge_layers(rows: Sequence[LayerRow]) -> tuple[LayerRow, ...]:
    found = []
    for layer in sorted({row.layer for row in rows}):
        same = [row for row in rows if row.layer == layer]
        slowest = max(same, key=lambda row: row.stall_s + row.dispatch_wait_s)
        distinct = [row.distinct_items for row in same if row.distinct_items is not None]
        found.append(
            LayerRow(
                layer,
                sum(row.items for row in same),
                sum(row.bytes for row in same),
                max(distinct, default=None),
                max(row.stall_s for row in same),
                sum(row.dispatch_wait_s for row in same),
                slowest.waited_for,
            )
        )
    return tuple(found)


def _spans(ledgers: Sequence[Ledger]) -> Iterable[Span]:
    """Copies of every path in a lane of their own; programs once."""
    for number, ledger in enumerate(ledgers):
        tier = "+".join(ledger.moved_bytes) or "none"
        for span in ledger.spans:
            if span.lane == "copy":
                yield span._replace(lane=f"copy {tier}")
            elif number == 0 or span.lane != "compute":
                yield span


def _added(amounts: Iterable[Any]) -> dict[str, int]:
    total: dict[str, int] = {}
    for amount in amounts:
        for tier, count in amount.items():
            total[tier] = total.get(tier, 0) + count
    return total
