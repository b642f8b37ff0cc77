"""A neighbour device as a tier: its memory, its host link, and several paths at once."""

import dataclasses

import jax
import numpy as np
import pytest

from streaming import (
    HostStore,
    PeerLink,
    PeerStore,
    Step,
    Streamer,
    StreamError,
    Tiers,
    even,
    testing,
)
from streaming.tiers import merge

LAYERS, ITEMS = 4, 12
LAYOUT = testing.small_layout(LAYERS, ITEMS)
# Two residents; the other ten over three paths.
RESIDENCY = even(LAYERS, ITEMS, 2)
SHARES = {"peer": range(2, 5), "relay": range(5, 9), "ram": range(9, 12)}
IDS = np.array([[0, 3, 4, 7], [9, 11, 3, -1]], np.int32)


def pair() -> tuple[jax.Device, jax.Device]:
    """The device that computes, and its neighbour."""
    here, peer = jax.devices("cpu")[:2]
    return here, peer


def blocks(items):
    _, peer = pair()
    return [
        tuple(
            jax.device_put(
                np.stack([testing.content(LAYOUT, layer, item, part.name) for item in items]), peer
            )
            for part in LAYOUT.components
        )
        for layer in range(LAYERS)
    ]


def make(**options) -> Tiers:
    here, peer = pair()
    streamers = []
    for tier, share in SHARES.items():
        items = [tuple(share)] * LAYERS
        if tier == "peer":
            store = PeerStore(LAYOUT, items, blocks(share))
        else:
            store = HostStore(LAYOUT, items, policy="off")
            store.fill(testing.filler(LAYOUT))
        link = None if tier == "ram" else PeerLink(here, peer)
        streamers.append(
            Streamer(LAYOUT, items, here, store=store, link=link, tier=tier, **options)
        )
    return Tiers(streamers)


def read(slabs) -> dict[int, bytes]:
    here, _ = pair()
    found = {}
    for slab in slabs:
        where = np.asarray(slab.where)
        for item in np.flatnonzero(where >= 0).tolist():
            assert all(array.devices() == {here} for array in slab.arrays.values())
            found[item] = b"".join(
                np.asarray(array)[where[item]].tobytes() for array in slab.arrays.values()
            )
    return found


def run(tiers: Tiers, mode: str):
    """Visits every layer; returns what each step found, and the ledger."""
    predicted = tiers.start([Step(layer, mode, (3, 9)) for layer in range(LAYERS)])
    steps = []
    for step in range(LAYERS):
        tiers.issue_ahead(step)
        if mode == "routed":
            assert tiers.routed(step, IDS) == tiers.waves(step)
        found = {}
        for wave in range(tiers.waves(step)):
            if wave:
                tiers.issue_ahead(step, wave)
            slabs = tiers.take(step, wave)
            found |= read(slabs)
            tiers.computed(step, slabs[0].where + np.int32(0), wave)
        tiers.observed(step, 7)
        steps.append(found)
    return predicted, steps, tiers.finish()


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize(
    ("mode", "items"),
    [
        ("whole", {"peer": (2, 3, 4), "relay": (5, 6, 7, 8), "ram": (9, 10, 11)}),
        ("exact", {"peer": (3,), "ram": (9,)}),
        ("routed", {"peer": (3, 4), "relay": (7,), "ram": (9, 11)}),
    ],
)
def test_every_path_brings_its_items_and_is_counted_for_them(mode, items, window):
    tiers = make(window=window)
    for _ in range(2):
        predicted, steps, ledger = run(tiers, mode)
        for layer, found in enumerate(steps):
            wanted = sorted(sum(items.values(), ()))
            assert found == {n: testing.expected_item(LAYOUT, layer, n) for n in wanted}
        counts = {tier: LAYERS * len(chosen) for tier, chosen in items.items()}
        moved = {tier: count for tier, count in ledger.moved_items.items() if count}
        assert moved == counts
        assert {t: n for t, n in ledger.moved_bytes.items() if n} == {
            tier: count * LAYOUT.item_bytes for tier, count in counts.items()
        }
        if mode != "routed":
            assert predicted.exact
            assert predicted.items == counts
            assert ledger.predicted == predicted
        assert ledger.complete
        assert [row.items for row in ledger.layers] == [sum(map(len, items.values()))] * LAYERS
        assert [row.distinct_items for row in ledger.layers] == [7] * LAYERS
        assert tiers.violations() == []
    tiers.close()


def test_paths_of_different_waves():
    """The path with the smallest budget decides how often a step is called for."""
    tiers = make(window=0)
    small = tiers.streamers[1]
    tiers.streamers[1].close()
    here, peer = pair()
    slow = Streamer(
        LAYOUT,
        [tuple(SHARES["relay"])] * LAYERS,
        here,
        store=small.store,
        link=PeerLink(here, peer),
        tier="relay",
        window=0,
        budget_bytes=2 * LAYOUT.item_bytes,
    )
    uneven = Tiers([tiers.streamers[0], slow, tiers.streamers[2]])
    _, steps, ledger = run(uneven, "whole")
    assert ledger.units == LAYERS * (1 + 2 + 1)
    for layer, found in enumerate(steps):
        assert found == {n: testing.expected_item(LAYOUT, layer, n) for n in range(2, ITEMS)}
    uneven.close()


def test_peer_store_in_waves_reads_parts_of_its_blocks():
    tiers = make(window=0, budget_bytes=2 * LAYOUT.item_bytes)
    _, steps, ledger = run(tiers, "whole")
    assert ledger.units == LAYERS * 2 * 3
    for layer, found in enumerate(steps):
        assert found == {n: testing.expected_item(LAYOUT, layer, n) for n in range(2, ITEMS)}
    tiers.close()


def test_error_of_one_path_ends_all_and_the_next_run_is_right(monkeypatch):
    tiers = make(window=1)
    with monkeypatch.context() as patch:
        patch.setattr(
            PeerLink, "put", lambda self, array: (_ for _ in ()).throw(MemoryError("no room"))
        )
        with pytest.raises(StreamError, match="no room"):
            run(tiers, "whole")
        assert not tiers.abort().complete
    assert tiers.abort() is None
    _, steps, _ = run(tiers, "whole")
    assert steps[0] == {n: testing.expected_item(LAYOUT, 0, n) for n in range(2, ITEMS)}
    tiers.cancel()
    with pytest.raises(StreamError):
        tiers.start([Step(0)])
    tiers.abort()
    tiers.close()


def test_abort_tells_all_paths_before_it_raises(monkeypatch):
    tiers = make(window=1)
    tiers.start([Step(0)])
    monkeypatch.setattr(
        tiers.streamers[0], "abort", lambda: (_ for _ in ()).throw(StreamError("stuck"))
    )
    with pytest.raises(StreamError, match="stuck"):
        tiers.abort()
    assert tiers.streamers[1]._run is tiers.streamers[2]._run is None


def test_merged_account_adds_amounts_and_counts_time_once():
    tiers = make(window=1)
    run(tiers, "whole")
    tiers.start([Step(layer) for layer in range(LAYERS)])
    parts = []
    for streamer in tiers.streamers:
        for step in range(LAYERS):
            streamer.issue_ahead(step)
            slab = streamer.take(step)
            streamer.computed(step, slab.where + np.int32(0))
        parts.append(streamer.finish())
    tiers.close()
    parts = [dataclasses.replace(part, budget_bytes=7) for part in parts]
    whole = merge(parts)
    assert whole.budget_bytes == 21
    assert whole.copy_busy_s <= sum(part.copy_busy_s for part in parts)
    assert whole.total_bytes == sum(part.total_bytes for part in parts)
    assert {span.lane for span in whole.spans if span.lane.startswith("copy")} == {
        "copy peer",
        "copy relay",
        "copy ram",
    }
    assert whole.to_json()["moved_bytes"] == dict(whole.moved_bytes)
    assert merge(parts[:1]) is parts[0]


def test_what_does_not_fit_is_refused():
    here, _ = pair()
    with pytest.raises(ValueError, match="its own neighbour"):
        PeerLink(here, here)
    with pytest.raises(ValueError, match="no streamers"):
        Tiers([])
    order = [(0, 1)] * LAYERS
    with pytest.raises(ValueError, match="expected 4 each"):
        PeerStore(LAYOUT, order, [])
    with pytest.raises(ValueError, match="layer 0 has blocks"):
        PeerStore(LAYOUT, order, blocks((0, 1, 2)))
    store = PeerStore(LAYOUT, order, blocks((0, 1)))
    assert store.nbytes == LAYERS * 2 * LAYOUT.item_bytes
    with pytest.raises(ValueError, match=r"no items \[5\] of layer 1"):
        store.arrange(1, (0, 5))
    store.close()


def test_items_elsewhere_are_neither_resident_nor_streamed():
    counts = np.tile(np.arange(ITEMS), (LAYERS, 1))
    residency = even(LAYERS, ITEMS, 3, counts, elsewhere=4)
    assert residency.resident[0] == (9, 10, 11)
    assert residency.elsewhere[0] == (0, 1, 2, 3)
    assert residency.streamed[0] == (4, 5, 6, 7, 8)
    with pytest.raises(ValueError, match="10 residents per layer and 3 items elsewhere"):
        even(LAYERS, ITEMS, 10, elsewhere=3)
