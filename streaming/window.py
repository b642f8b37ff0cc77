"""Arithmetic of the prefetch window, on plain integers.

Loads move in units: a whole layer's share, or a wave of it. Units are numbered in the order in
which they are computed. With a window of W:

* before unit i is computed, the copies of units up to i + W have been issued. A device buffer that
  is allocated after a program was queued may be written only after that program, so a copy issued
  later would not run beside it.
* before the copy of unit i + W is issued, the output of unit i - 2 is ready. Unit i - 1 may still
  be running, so the device never idles, and dispatching is at most two units ahead.
* at most W + 1 units are alive. A unit's memory is given back when its programs have been
  dispatched and its copy has come, whether they have run or not: whatever is put there next waits
  for them on the device.
"""

from collections.abc import Iterable
from typing import NamedTuple

from streaming.errors import BudgetError


def live_bound(window: int) -> int:
    """Units that may have memory on the device at once."""
    return window + 1


def last_to_be_ready(unit: int, window: int) -> int:
    """The last unit whose output is ready before the copy of `unit` is issued."""
    return unit - window - 2


def last_to_issue(unit: int, window: int, known: int) -> int:
    """The last unit to be issued before `unit` is computed, when units 0..known - 1 are known."""
    return min(unit + window, known - 1)


def wave_items(share: int, item_bytes: int, window: int, budget_bytes: int | None) -> int:
    """Items of a wave: the largest equal parts of `share` items of which the window fits a budget.

    item_bytes    device bytes that an item of the wave costs
    budget_bytes  for all live units together; None for no limit
    Raises BudgetError when not even single items fit.
    """
    if budget_bytes is None or share == 0:
        return share
    most = budget_bytes // (live_bound(window) * item_bytes)
    if most < 1:
        raise BudgetError(
            f"a budget of {budget_bytes} bytes for slabs holds less than {live_bound(window)} "
            f"items of {item_bytes} bytes, which a window of {window} needs: raise the budget to "
            f"at least {live_bound(window) * item_bytes} bytes or lower the window"
        )
    waves = -(-share // min(most, share))
    return -(-share // waves)


def wave_ranges(count: int, items: int) -> list[tuple[int, int]]:
    """Ranges that cut `count` items into waves of `items`, the last one shorter; one when empty."""
    if count == 0:
        return [(0, 0)]
    return [(start, min(start + items, count)) for start in range(0, count, items)]


class Event(NamedTuple):
    """Something that happened to a unit.

    kind        "known" when it entered the plan, "issue" when its copy had been issued, "compute"
                when it was handed out to be computed, "ready" when its output was
    live_units, live_bytes   on the device at that moment
    """

    kind: str
    unit: int
    live_units: int
    live_bytes: int


def violations(events: Iterable[Event], window: int, budget_bytes: int | None) -> list[str]:
    """Where a run broke the rules of the window; empty for a correct one."""
    wrong: list[str] = []
    known = issued = computed = 0
    ready: set[int] = set()
    for event in events:
        if event.kind == "known":
            known = event.unit + 1
        elif event.kind == "issue":
            if event.unit != issued:
                wrong.append(f"unit {event.unit} was issued after {issued - 1}")
            issued = event.unit + 1
            before = last_to_be_ready(event.unit, window)
            if before >= 0 and before not in ready:
                wrong.append(f"unit {event.unit} was issued before the output of {before}")
        elif event.kind == "ready":
            ready.add(event.unit)
        else:
            if event.unit != computed:
                wrong.append(f"unit {event.unit} was computed after {computed - 1}")
            needed = last_to_issue(event.unit, window, known)
            if issued <= needed:
                wrong.append(
                    f"unit {event.unit} was computed when {issued - 1} was the last issued, "
                    f"expected {needed}"
                )
            computed = event.unit + 1
        if event.live_units > live_bound(window):
            wrong.append(
                f"{event.live_units} units alive at {event.kind} of {event.unit}, expected at most "
                f"{live_bound(window)}"
            )
        if budget_bytes is not None and event.live_bytes > budget_bytes:
            wrong.append(
                f"{event.live_bytes} bytes alive at {event.kind} of {event.unit}, the budget is "
                f"{budget_bytes}"
            )
    return wrong
