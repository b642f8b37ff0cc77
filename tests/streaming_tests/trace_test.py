"""Intervals, the account of a run from known times, and the timeline file."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming import ledger as accounts
from streaming import testing, write_timeline
from streaming.ledger import Prediction, SystemCounters
from streaming.trace import Span, chrome_trace, intersection, length, union
from streaming.uploader import Unit

LAYOUT = testing.small_layout(3, 4)
PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted).map(tuple))


def points(intervals):
    return {n for begin, end in intervals for n in range(int(begin), int(end))}


@given(PAIRS, PAIRS)
def test_unions_and_intersections_are_those_of_sets_of_points(first, second):
    a, b = union(first), union(second)
    assert points(a) == points(first)
    assert length(a) == len(points(first))
    assert all(x[1] < y[0] for x, y in itertools.pairwise(a))
    assert points(intersection(a, b)) == points(first) & points(second)
    assert length(intersection(a, b)) == len(points(first) & points(second))


def unit(index, *, put, copied, opened, done, reached=None, tail=-1, items=(0, 1)):
    made = Unit(
        index=index,
        step=index,
        wave=0,
        layer=index,
        items=items,
        rows=len(items),
        direct=True,
        price_bytes=len(items) * LAYOUT.item_bytes,
        tier="ram",
    )
    made.moved_bytes = len(items) * LAYOUT.item_bytes
    made.put_begin_s, made.copied_s, made.opened_s = put, copied, opened
    made.put_end_s = put
    made.done_s, made.reached_s, made.tail = done, reached, tail
    return made


def settle(units, *, after_compute=False, waits=(), distinct=()):
    return accounts.settle(
        layout=LAYOUT,
        predicted=Prediction({}, {}, 0, 0, True),
        complete=True,
        steps=len(units),
        units=units,
        waits=waits,
        distinct=dict(distinct),
        after_compute=after_compute,
        spans=[Span("disk", "read L0", 0.0, 0.5)],
        began_s=0.0,
        ended_s=20.0,
        system=(SystemCounters(100, 3), SystemCounters(350, 3)),
        files=(90, 100, 0),
        peak_live_bytes=7,
        peak_live_units=2,
        budget_bytes=None,
        registered_bytes=0,
    )


def test_compute_that_hides_every_copy_but_the_first():
    """Copies of 2 s under computes of 3 s, window 1: the first copy is a stall."""
    units = [
        unit(0, put=0, copied=2, opened=0, done=5),
        unit(1, put=0, copied=4, opened=5, done=8),
        unit(2, put=5, copied=7, opened=8, done=11),
    ]
    ledger = settle(units)
    assert ledger.copy_busy_s == 6
    assert ledger.compute_busy_s == 9
    # Both from 2 to 4 and from 5 to 7.
    assert ledger.both_busy_s == 4
    assert ledger.overlap == pytest.approx(4 / 6)
    assert ledger.stall_s == 2
    assert [row.stall_s for row in ledger.layers] == [2, 0, 0]
    assert ledger.layers[0].waited_for == 1
    rate = 2 * LAYOUT.item_bytes / 2 / 1e9
    assert ledger.copy_gb_per_s == (rate, rate, rate)
    assert ledger.histogram() == {"0-5": 3}
    assert ledger.storage_bytes == 250
    assert ledger.major_faults == 0
    assert ledger.read_padding_bytes == 10


def test_copies_that_run_one_after_the_other_with_the_compute_overlap_nothing():
    """Busy time of both is the whole span, and still nothing is hidden: a sum would not show it."""
    units = [
        unit(0, put=0, copied=2, opened=0, done=5),
        unit(1, put=5, copied=7, opened=5, done=10),
    ]
    ledger = settle(units)
    assert ledger.copy_busy_s + ledger.compute_busy_s == 10
    assert ledger.both_busy_s == 0
    assert ledger.overlap == 0
    assert ledger.stall_s == 4


def test_the_time_at_which_a_step_needs_its_slab_divides_computing_from_waiting():
    units = [unit(0, put=0, copied=3, opened=0, reached=1, done=5)]
    ledger = settle(units)
    assert ledger.compute_busy_s == 3
    assert ledger.stall_s == 2
    assert ledger.both_busy_s == 1


def test_copy_behind_queued_programs_begins_when_they_end():
    """Such a device holds a copy back until programs that were queued before it have run."""
    units = [
        unit(0, put=0, copied=1, opened=0, done=6),
        unit(1, put=2, copied=8, opened=6, done=9, tail=0),
    ]
    assert accounts.copy_intervals(units, False) == [(0, 1), (2, 8)]
    assert accounts.copy_intervals(units, True) == [(0, 1), (6, 8)]


def test_waiting_for_files_is_the_shortfall_of_the_disk():
    """Reads of 5 s, computes of 2 s: every step but the first waits 3 s for the last item read."""
    units = [
        unit(n, put=5 * n + 5, copied=5 * n + 5, opened=5 * n + 5, done=5 * n + 7) for n in range(3)
    ]
    waits = [("disk", units[0], 1, 5.0), *(("disk", u, 0, 3.0) for u in units[1:])]
    ledger = settle(units, waits=[*waits, ("room", units[2], None, 1.0)], distinct={0: 2, 2: 4})
    assert ledger.dispatch_wait_s == 11
    assert [row.dispatch_wait_s for row in ledger.layers] == [5, 3, 3]
    assert [row.waited_for for row in ledger.layers] == [1, 0, 0]
    assert [row.distinct_items for row in ledger.layers] == [2, None, 4]


def test_json_has_everything_and_no_spans():
    units = [unit(0, put=0, copied=1, opened=0, done=2)]
    plain = settle(units).to_json()
    json.dumps(plain)
    assert plain["overlap"] == 0
    assert plain["copy_gb_per_s"]["histogram"] == {"0-5": 1}
    assert "spans" not in plain
    assert plain["layers"][0]["bytes"] == 2 * LAYOUT.item_bytes
    assert settle([]).to_json()["copy_gb_per_s"]["median"] is None


def test_problems_name_wrong_bytes_items_and_totals():
    units = [unit(0, put=0, copied=1, opened=0, done=2), unit(1, put=0, copied=1, opened=0, done=2)]
    size = LAYOUT.item_bytes
    right = Prediction({"ram": 4}, {"ram": 4 * size}, 4, 4 * size, True)
    needs = {0: {0, 1}, 1: {0, 1}}
    assert accounts.problems(LAYOUT, right, units, needs) == []
    wrong = accounts.problems(LAYOUT, right, units, {0: {0, 1}, 1: {0, 2}})
    assert wrong == ["step 1 moved items [0, 1], expected [0, 2]"]
    units[0].moved_bytes += 5
    texts = accounts.problems(LAYOUT, right, units, needs)
    assert len(texts) == 2
    assert f"moved {2 * size + 5} bytes, expected {2 * size}" in texts[0]
    assert f"{4 * size + 5} bytes moved, predicted {4 * size}..{4 * size}" in texts[1]


def test_timeline_is_a_chrome_trace(tmp_path):
    ledger = settle([unit(0, put=1, copied=3, opened=1, done=5)])
    write_timeline(tmp_path / "timeline.json", ledger.spans)
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert trace == chrome_trace(ledger.spans)
    lanes = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert list(lanes.values()) == ["disk", "copy", "compute", "dispatch"]
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    found = {(lanes[e["tid"]], e["name"], e["ts"], e["dur"]) for e in spans}
    assert found == {
        ("disk", "read L0", 0, 0.5e6),
        ("dispatch", "put L0 step 0", 1e6, 0),
        ("copy", "copy L0 step 0", 1e6, 2e6),
        ("compute", "stall L0 step 0", 1e6, 2e6),
        ("compute", "compute L0 step 0", 3e6, 2e6),
    }
    assert chrome_trace([])["traceEvents"]
