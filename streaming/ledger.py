"""What a run moved, against what it was predicted to move, and what hid behind what."""

import collections
import dataclasses
import resource
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from streaming.errors import LedgerError
from streaming.slab import SlabLayout
from streaming.trace import Interval, Span, intersection, length, union
from streaming.uploader import Unit

BIN_GB_PER_S = 5  # width of the bins of the copy rate histogram


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What steps will move, before they run.

    items, bytes        exact for steps whose items are known in advance, by tier
    most_items, most_bytes   the same plus the bound of routed steps: all their streamed items
    exact               whether there are no routed steps
    """

    items: Mapping[str, int]
    bytes: Mapping[str, int]
    most_items: int
    most_bytes: int
    exact: bool


@dataclasses.dataclass(frozen=True)
class SystemCounters:
    """Counters of this process: bytes that came from storage (None if the system hides them) and
    page faults that had to wait for storage."""

    storage_bytes: int | None
    major_faults: int

    @classmethod
    def read(cls) -> "SystemCounters":
        storage = None
        try:
            with open("/proc/self/io", encoding="ascii") as file:
                storage = next(int(x.split()[1]) for x in file if x.startswith("read_bytes:"))
        except (OSError, StopIteration, ValueError):
            pass
        return cls(storage, resource.getrusage(resource.RUSAGE_SELF).ru_majflt)


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """One layer over a run.

    distinct_items  largest number of distinct items that a step of the layer used; None if unknown
    stall_s         compute waited for the layer's slabs; dispatch_wait_s the dispatching thread
                    waited for its files
    waited_for      the item that the longest of these waits ended with, None without waits
    """

    layer: int
    items: int
    bytes: int
    distinct_items: int | None
    stall_s: float
    dispatch_wait_s: float
    waited_for: int | None


@dataclasses.dataclass(frozen=True)
class Ledger:
    """One run of a streamer.

    predicted       before the run; moved_* what went over the link, by tier ("ram", "disk")
    padding_bytes   moved beyond whole items (0), read_padding_bytes read from files beyond them
    pageable_bytes  moved from memory that was not page-locked
    table_bytes     row tables that travelled with the slabs
    file_bytes      bytes of items read from files; storage_bytes what the system took from
                    storage for this process (a warm page cache takes none), None if unknown
    copy_busy_s, compute_busy_s, both_busy_s   lengths of time; overlap = both / min(copy,
                    compute), None when one of them is 0. A copy begins when it was issued, the
                    copy before it had ended and, where the device orders copies behind programs
                    queued earlier, those had ended.
    copy_gb_per_s   rate of each copy in GB/s, in order of issue
    complete        all steps ran; False after an abort
    """

    predicted: Prediction
    complete: bool
    steps: int
    units: int
    moved_items: Mapping[str, int]
    moved_bytes: Mapping[str, int]
    padding_bytes: int
    pageable_bytes: int
    table_bytes: int
    file_bytes: int
    read_padding_bytes: int
    slow_fills: int
    storage_bytes: int | None
    major_faults: int
    wall_s: float
    copy_busy_s: float
    compute_busy_s: float
    both_busy_s: float
    stall_s: float
    dispatch_wait_s: float
    peak_live_bytes: int
    peak_live_units: int
    budget_bytes: int | None
    registered_bytes: int
    copy_gb_per_s: tuple[float, ...]
    layers: tuple[LayerRow, ...]
    spans: tuple[Span, ...] = dataclasses.field(repr=False)

    @property
    def overlap(self) -> float | None:
        """Share of the shorter of copying and computing during which the other one ran too."""
        least = min(self.copy_busy_s, self.compute_busy_s)
        return self.both_busy_s / least if least > 0 else None

    @property
    def total_bytes(self) -> int:
        """Bytes of items moved, all tiers."""
        return sum(self.moved_bytes.values())

    def histogram(self) -> dict[str, int]:
        """Copies per bin of rates, named by its bounds in GB/s."""
        counts = collections.Counter(int(rate // BIN_GB_PER_S) for rate in self.copy_gb_per_s)
        return {
            f"{number * BIN_GB_PER_S}-{(number + 1) * BIN_GB_PER_S}": counts[number]
            for number in sorted(counts)
        }

    def to_json(self) -> dict[str, Any]:
        """Everything but the spans, with the unit in every key."""
        plain = dataclasses.asdict(dataclasses.replace(self, spans=()))
        del plain["spans"]
        rates = plain.pop("copy_gb_per_s")
        rates = [rate for rate in rates if rate > 0]
        plain["overlap"] = self.overlap
        plain["copy_gb_per_s"] = {
            "histogram": self.histogram(),
            "min": min(rates, default=None),
            "median": statistics.median(rates) if rates else None,
            "max": max(rates, default=None),
        }
        return plain


def problems(
    layout: SlabLayout, predicted: Prediction, units: Sequence[Unit], needs: Mapping[int, set[int]]
) -> list[str]:
    """Where a complete run differs from its plan.

    needs  items that each step had to move
    """
    wrong = []
    seen: dict[int, list[int]] = {step: [] for step in needs}
    for unit in units:
        seen[unit.step].extend(unit.items)
        expected = len(unit.items) * layout.item_bytes
        if unit.moved_bytes != expected:
            wrong.append(f"{unit} moved {unit.moved_bytes} bytes, expected {expected}")
    for step, items in seen.items():
        if sorted(items) != sorted(needs[step]):
            wrong.append(f"step {step} moved items {sorted(items)}, expected {sorted(needs[step])}")
    moved = sum(unit.moved_bytes for unit in units)
    least = sum(predicted.bytes.values())
    if not least <= moved <= predicted.most_bytes:
        wrong.append(f"{moved} bytes moved, predicted {least}..{predicted.most_bytes}")
    return wrong


def require_equal(wrong: Sequence[str]) -> None:
    """Raises LedgerError when `problems` found any."""
    if wrong:
        raise LedgerError("the run differs from its plan:\n  " + "\n  ".join(wrong[:20]))


def copy_intervals(units: Sequence[Unit], after_compute: bool) -> list[Interval | None]:
    """When each unit's copy ran; None for copies that never ended."""
    done = {unit.index: unit.done_s for unit in units}
    found: list[Interval | None] = []
    previous = float("-inf")
    for unit in units:
        if unit.copied_s is None or unit.put_begin_s is None:
            found.append(None)
            continue
        begin = max(unit.put_begin_s, previous)
        if after_compute:
            begin = max(begin, done.get(unit.tail) or begin)
        found.append((min(begin, unit.copied_s), unit.copied_s))
        previous = unit.copied_s
    return found


def compute_intervals(units: Sequence[Unit]) -> tuple[list[list[Interval]], list[float]]:
    """When each unit's programs ran, and how long they waited for their slab.

    Programs of a unit run from the end of the unit before, or from their dispatch if that is
    later. They need the slab when `reached` was ready, at once if that was not given.
    """
    spans: list[list[Interval]] = []
    stalls: list[float] = []
    previous = float("-inf")
    for unit in units:
        if unit.done_s is None or unit.opened_s is None:
            spans.append([])
            stalls.append(0.0)
            continue
        begin = max(unit.opened_s, previous)
        reached = begin if unit.reached_s is None else max(unit.reached_s, begin)
        copied = reached if unit.copied_s is None or not unit.items else unit.copied_s
        resumed = min(max(reached, copied), unit.done_s)
        spans.append([(begin, reached), (resumed, unit.done_s)])
        stalls.append(max(resumed - reached, 0.0))
        previous = unit.done_s
    return spans, stalls


def settle(
    *,
    layout: SlabLayout,
    predicted: Prediction,
    complete: bool,
    steps: int,
    units: Sequence[Unit],
    waits: Sequence[tuple[str, Unit, int | None, float]],
    distinct: Mapping[int, int],
    after_compute: bool,
    spans: Sequence[Span],
    began_s: float,
    ended_s: float,
    system: tuple[SystemCounters, SystemCounters],
    files: tuple[int, int, int],
    peak_live_bytes: int,
    peak_live_units: int,
    budget_bytes: int | None,
    registered_bytes: int,
) -> Ledger:
    """Adds up a run.

    distinct  distinct items by step, as far as known
    files     item bytes read from files, bytes asked for, slow fills
    """
    copies = copy_intervals(units, after_compute)
    computes, stalls = compute_intervals(units)
    timeline = list(spans)
    for unit, copy, compute, stall in zip(units, copies, computes, stalls, strict=True):
        name = f"L{unit.layer} step {unit.step}" + (f" wave {unit.wave}" if unit.wave else "")
        arguments = {"layer": unit.layer, "items": len(unit.items), "bytes": unit.moved_bytes}
        if unit.put_begin_s is not None and unit.put_end_s is not None:
            # Long ones tell of copies that are not asynchronous, as from pageable memory.
            timeline.append(
                Span("dispatch", f"put {name}", unit.put_begin_s, unit.put_end_s, arguments)
            )
        if copy is not None and unit.items:
            timeline.append(Span("copy", f"copy {name}", *copy, arguments))
        for begin, end in compute:
            if end > begin:
                timeline.append(Span("compute", f"compute {name}", begin, end, arguments))
        if stall > 0:
            begin = compute[0][1]
            timeline.append(Span("compute", f"stall {name}", begin, begin + stall, arguments))
    copy_busy = union(c for c, unit in zip(copies, units, strict=True) if c and unit.items)
    compute_busy = union(interval for intervals in computes for interval in intervals)
    first, last = system
    storage = None
    if first.storage_bytes is not None and last.storage_bytes is not None:
        storage = last.storage_bytes - first.storage_bytes
    moved = [unit for unit in units if unit.moved_bytes or unit.items]
    file_waits = [(unit, item, s) for what, unit, item, s in waits if what == "disk"]
    return Ledger(
        predicted=predicted,
        complete=complete,
        steps=steps,
        units=len(units),
        moved_items=_by_tier(moved, lambda unit: len(unit.items)),
        moved_bytes=_by_tier(moved, lambda unit: unit.moved_bytes),
        padding_bytes=sum(u.moved_bytes - len(u.items) * layout.item_bytes for u in moved)
        if complete
        else 0,
        pageable_bytes=sum(unit.moved_bytes for unit in moved if unit.pageable),
        table_bytes=sum(unit.table_bytes for unit in units),
        file_bytes=files[0],
        read_padding_bytes=files[1] - files[0],
        slow_fills=files[2],
        storage_bytes=storage,
        major_faults=last.major_faults - first.major_faults,
        wall_s=ended_s - began_s,
        copy_busy_s=length(copy_busy),
        compute_busy_s=length(compute_busy),
        both_busy_s=length(intersection(copy_busy, compute_busy)),
        stall_s=sum(stalls),
        dispatch_wait_s=sum(seconds for _, _, seconds in file_waits),
        peak_live_bytes=peak_live_bytes,
        peak_live_units=peak_live_units,
        budget_bytes=budget_bytes,
        registered_bytes=registered_bytes,
        copy_gb_per_s=tuple(
            unit.moved_bytes / (copy[1] - copy[0]) / 1e9 if copy[1] > copy[0] else 0.0
            for unit, copy in zip(units, copies, strict=True)
            if copy is not None and unit.items
        ),
        layers=_layer_rows(layout, units, stalls, file_waits, distinct),
        spans=tuple(timeline),
    )


def _by_tier(units: Sequence[Unit], amount: Any) -> dict[str, int]:
    totals: dict[str, int] = {}
    for unit in units:
        totals[unit.tier] = totals.get(unit.tier, 0) + amount(unit)
    return totals


def _layer_rows(
    layout: SlabLayout,
    units: Sequence[Unit],
    stalls: Sequence[float],
    file_waits: Sequence[tuple[Unit, int | None, float]],
    distinct: Mapping[int, int],
) -> tuple[LayerRow, ...]:
    items, moved = [0] * layout.layers, [0] * layout.layers
    stall, waited = [0.0] * layout.layers, [0.0] * layout.layers
    used: list[int | None] = [None] * layout.layers
    longest: list[tuple[float, int | None]] = [(0.0, None)] * layout.layers
    for unit, seconds in zip(units, stalls, strict=True):
        items[unit.layer] += len(unit.items)
        moved[unit.layer] += unit.moved_bytes
        stall[unit.layer] += seconds
        if seconds > longest[unit.layer][0]:
            longest[unit.layer] = (seconds, unit.items[-1] if unit.items else None)
        if unit.step in distinct:
            used[unit.layer] = max(used[unit.layer] or 0, distinct[unit.step])
    for unit, item, seconds in file_waits:
        waited[unit.layer] += seconds
        if seconds > longest[unit.layer][0]:
            longest[unit.layer] = (seconds, item)
    return tuple(
        LayerRow(
            layer, items[layer], moved[layer], used[layer], stall[layer], waited[layer],
            longest[layer][1],
        )
        for layer in range(layout.layers)
        if used[layer] is not None or any(unit.layer == layer for unit in units)
    )  # fmt: skip
