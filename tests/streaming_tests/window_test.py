"""Window arithmetic, against a simulation of what the rules say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming import BudgetError, window
from streaming.window import Event


def run(units, depth, known_step=None):
    """Events of a caller that keeps the rules, with outputs that come as late as allowed."""
    events, issued, live = [], 0, 0
    known = units if known_step is None else min(known_step, units)
    events += [Event("known", unit, 0, 0) for unit in range(known)]
    for unit in range(units):
        if unit >= known:
            events.append(Event("known", unit, live, live))
            known = unit + 1
        while issued <= window.last_to_issue(unit, depth, known):
            before = window.last_to_be_ready(issued, depth)
            if before >= 0:
                events.append(Event("ready", before, live, live))
            live = min(live, window.live_bound(depth) - 1) + 1
            events.append(Event("issue", issued, live, live))
            issued += 1
        events.append(Event("compute", unit, live, live))
    return events


@settings(deadline=None)
@given(units=st.integers(0, 30), depth=st.integers(0, 5), known=st.none() | st.integers(0, 30))
def test_every_copy_is_issued_before_the_compute_it_hides_under(units, depth, known):
    events = run(units, depth, known)
    assert window.violations(events, depth, None) == []
    assert window.violations(events, depth, window.live_bound(depth)) == []
    if known is None:
        place = {(event.kind, event.unit): number for number, event in enumerate(events)}
        for unit in range(units - depth):
            assert place["issue", unit + depth] < place["compute", unit]


@settings(deadline=None)
@given(units=st.integers(4, 30), depth=st.integers(1, 3), data=st.data())
def test_moving_a_copy_behind_its_compute_is_seen(units, depth, data):
    events = run(units, depth)
    late = data.draw(st.integers(depth, units - 1))
    place = next(i for i, e in enumerate(events) if e[:2] == ("issue", late))
    end = next(i for i, e in enumerate(events) if e[:2] == ("compute", late - depth))
    assert place < end
    moved = [*events[:place], *events[place + 1 : end + 1], events[place], *events[end + 1 :]]
    assert any("was computed when" in text for text in window.violations(moved, depth, None))


def test_other_broken_rules_are_seen():
    good = run(5, 1)
    assert "5 units alive" in window.violations([*good, Event("compute", 5, 5, 0)], 1, None)[-1]
    assert "9 bytes alive" in window.violations([*good, Event("compute", 5, 1, 9)], 1, 8)[-1]
    assert "unit 7 was issued after 4" in window.violations([*good, Event("issue", 7, 1, 1)], 1, 8)
    late = [event for event in good if event != Event("ready", 1, 2, 2)]
    assert len(late) == len(good) - 1
    assert window.violations(late, 1, None) == ["unit 4 was issued before the output of 1"]
    assert "unit 0 was computed after 4" in window.violations(
        [*good, Event("compute", 0, 1, 1)], 1, 8
    )


@settings(deadline=None)
@given(
    share=st.integers(0, 300),
    size=st.integers(1, 1000),
    depth=st.integers(0, 5),
    budget=st.integers(0, 10**6),
)
def test_waves_fit_the_budget_and_are_as_few_as_possible(share, size, depth, budget):
    room = budget // (window.live_bound(depth) * size)
    if share and not room:
        with pytest.raises(BudgetError, match=f"at least {window.live_bound(depth) * size} bytes"):
            window.wave_items(share, size, depth, budget)
        return
    items = window.wave_items(share, size, depth, budget)
    ranges = window.wave_ranges(share, items)
    assert [row for begin, end in ranges for row in range(begin, end)] == list(range(share))
    if share:
        assert items * size * window.live_bound(depth) <= budget
        assert len(ranges) == -(-share // room)
        # Equal parts: the last wave lacks less than one item per wave.
        assert len(ranges) * items - share < len(ranges)


def test_without_a_budget_a_layer_is_one_wave():
    assert window.wave_items(256, 13, 1, None) == 256
    assert window.wave_ranges(0, 0) == [(0, 0)]
