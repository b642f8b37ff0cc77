"""Two owners of a layer's items."""

import threading

import numpy as np
import pytest

from streaming import (
    ColdFirst,
    HostStore,
    Readiness,
    Step,
    Streamer,
    StreamError,
    StreamStalled,
    even,
    split_owners,
    testing,
)

LAYERS, ITEMS = 8, 10
LAYOUT = testing.small_layout(LAYERS, ITEMS)


@pytest.fixture
def pair():
    made = ColdFirst(timeout_s=20)
    yield made
    made.close()


def test_cold_owner_starts_first_and_hot_only_after_its_signal(pair):
    order = []
    queued = threading.Event()

    def cold(ready):
        order.append("cold input")
        ready.signal()
        # The hot owner is dispatched while this one still runs.
        queued.wait()
        order.append("cold end")
        return "c"

    def hot():
        order.append("hot")
        queued.set()
        return "h"

    assert pair.run(cold, hot) == ("c", "h")
    assert order == ["cold input", "hot", "cold end"]


def test_cold_owner_that_dies_before_its_signal_releases_the_hot_one(pair):
    def cold(ready):
        raise MemoryError("no room")

    with pytest.raises(StreamError, match="cold owner failed to start: no room"):
        pair.run(cold, lambda: pytest.fail("the hot owner was started"))
    assert pair.run(lambda ready: ready.signal(), lambda: 1) == (None, 1)


def test_cold_owner_that_forgets_its_signal_is_an_error(pair):
    with pytest.raises(StreamError, match="returned without signalling"):
        pair.run(lambda ready: 1, lambda: 2)


def test_cold_owner_that_fails_after_its_signal(pair):
    def cold(ready):
        ready.signal()
        raise ValueError("late")

    done = []
    with pytest.raises(ValueError, match="late"):
        pair.run(cold, lambda: done.append(1))
    assert done == [1]


def test_error_of_the_hot_owner_comes_after_the_cold_one_ended(pair):
    ended = threading.Event()

    def cold(ready):
        ready.signal()
        ended.set()

    def hot():
        raise ValueError("hot")

    with pytest.raises(ValueError, match="hot"):
        pair.run(cold, hot)
    assert ended.is_set()


def test_readiness_is_given_once():
    ready = Readiness()
    ready.signal()
    ready.wait(0)
    with pytest.raises(RuntimeError, match="signalled before"):
        ready.signal()
    ready.fail(ValueError("ignored"))
    ready.wait(0)
    with pytest.raises(StreamStalled, match="did not start within 0 s"):
        Readiness().wait(0)


def test_cold_owner_that_hangs_does_not_hang_the_other():
    release = threading.Event()
    pair = ColdFirst(timeout_s=0.05)

    def cold(ready):
        ready.signal()
        release.wait()

    with pytest.raises(StreamStalled, match="did not finish dispatching"):
        pair.run(cold, lambda: None)
    release.set()
    pair.close()


@pytest.mark.parametrize("cold_items", [0, 3, 8])
@pytest.mark.parametrize("mode", ["whole", "routed"])
def test_two_streamers_share_a_store_and_bring_the_same_bytes_as_one(pair, cold_items, mode):
    """The off switch is a cold share of 0."""
    residency = even(LAYERS, ITEMS, 2)
    hot_items, cold_share = split_owners(residency.streamed, cold_items)
    store = HostStore(LAYOUT, residency.streamed, policy="off")
    store.fill(testing.filler(LAYOUT))
    ids = np.array([[0, 3, 9], [4, 9, -1]], np.int32)
    order, found, ledgers = [], {}, []
    links = [testing.LateLink(2), testing.LateLink(2)]
    devices = [testing.FakeDevice(), testing.FakeDevice()]
    streamers = [
        Streamer(LAYOUT, share, store=store, link=link, window=1)
        for share, link in zip((hot_items, cold_share), links, strict=True)
    ]

    def owner(which, step):
        streamer = streamers[which]
        streamer.issue_ahead(step)
        if mode == "routed":
            streamer.routed(step, ids)
        slab = streamer.take(step)
        program = testing._read_program(dict(slab.arrays), slab.where)
        output = devices[which].dispatch(program)
        streamer.computed(step, output)
        order.append((step, which))
        return output

    for streamer in streamers:
        streamer.start([Step(layer, mode) for layer in range(LAYERS)])
    for step in range(LAYERS):

        def cold(ready, step=step):
            output = owner(1, step)
            ready.signal()
            return output

        outputs = pair.run(cold, lambda step=step: owner(0, step))
        found[step] = outputs
    for step, (cold_output, hot_output) in found.items():
        items = cold_output.value() | hot_output.value()
        assert not set(cold_output.value()) & set(hot_output.value())
        wanted = range(2, ITEMS) if mode == "whole" else (3, 4, 9)
        assert items == {n: testing.expected_item(LAYOUT, step, n) for n in wanted}
    assert order == [(step, which) for step in range(LAYERS) for which in (1, 0)]
    for streamer in streamers:
        ledgers.append(streamer.finish())
        assert streamer.violations() == []
        streamer.close()
    per_layer = ITEMS - 2 if mode == "whole" else 3
    assert sum(x.total_bytes for x in ledgers) == LAYERS * per_layer * LAYOUT.item_bytes
    for closing in (*links, *devices):
        closing.close()
