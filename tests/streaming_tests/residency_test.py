"""Which items stay, and what that saves."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming import even, load_profile, resident_per_layer, save_profile, split_owners
from streaming import residency as policy


@settings(deadline=None)
@given(
    layers=st.integers(1, 6),
    items=st.integers(1, 20),
    size=st.integers(1, 100),
    total=st.integers(0, 20_000),
    seed=st.integers(0, 9),
)
def test_even_fills_a_budget_with_the_most_used_items(layers, items, size, total, seed):
    per_layer = resident_per_layer(layers, items, size, total_bytes=total)
    assert per_layer == items or total - layers * per_layer * size < layers * size
    assert per_layer * layers * size <= total
    counts = np.random.default_rng(seed).integers(0, 4, (layers, items))
    chosen = even(layers, items, per_layer, counts)
    assert chosen.resident_items == layers * per_layer
    for layer, (resident, streamed) in enumerate(
        zip(chosen.resident, chosen.streamed, strict=True)
    ):
        assert sorted([*resident, *streamed]) == list(range(items))
        assert list(resident) == sorted(resident)
        for kept in resident:
            for moved in streamed:
                # Ties go to the lower id, so that the choice is one and the same everywhere.
                assert (counts[layer, kept], -kept) > (counts[layer, moved], -moved)


def test_fractions_are_meant_as_they_are_written():
    assert [resident_per_layer(1, 100, 1, fraction=share / 100) for share in range(101)] == list(
        range(101)
    )
    assert resident_per_layer(43, 256, 13, fraction=0.95) == 243


def test_residents_without_counts_are_the_lowest_ids_and_the_table_finds_them():
    chosen = even(2, 5, 2)
    assert chosen.resident == ((0, 1), (0, 1))
    chosen = even(1, 5, 2, np.array([[0, 9, 0, 0, 7]]))
    assert chosen.resident == ((1, 4),)
    assert chosen.tables().tolist() == [[-1, 0, -1, -1, 1]]


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="exactly one of them"):
        resident_per_layer(1, 1, 1)
    with pytest.raises(ValueError, match=r"fraction is 1\.5"):
        resident_per_layer(1, 1, 1, fraction=1.5)
    with pytest.raises(ValueError, match="total_bytes is -1"):
        resident_per_layer(1, 1, 1, total_bytes=-1)
    with pytest.raises(ValueError, match="6 residents per layer"):
        even(1, 5, 6)
    with pytest.raises(ValueError, match=r"counts are int64\[1, 4\], expected integers \[1, 5\]"):
        even(1, 5, 2, np.zeros((1, 4), np.int64))
    with pytest.raises(ValueError, match="cold_items is -1"):
        split_owners([(0,)], -1)


def test_profile_survives_a_file_and_a_wrong_one_is_named(tmp_path):
    counts = np.random.default_rng(3).integers(0, 50, (4, 6))
    path = tmp_path / "profile.json"
    save_profile(path, counts)
    np.testing.assert_array_equal(load_profile(path, 4, 6), counts)
    with pytest.raises(ValueError, match="measure the profile with this model"):
        load_profile(path, 4, 7)
    for text, message in (
        ("{", "is not a profile"),
        ("[]", "is not a profile"),
        (json.dumps({"schema": "x/1", "counts": []}), "has schema 'x/1'"),
        (json.dumps({"schema": policy.PROFILE_SCHEMA, "counts": [[1, -1]]}), "whole numbers >= 0"),
        (json.dumps({"schema": policy.PROFILE_SCHEMA, "counts": [[1, 0.5]]}), "whole numbers >= 0"),
        ("[" * 100_000, "is not a profile"),
        *(
            (json.dumps({"schema": policy.PROFILE_SCHEMA, "counts": counts}), "whole numbers >= 0")
            for counts in (5, None, [5], [None], [[1, 2**64]], [[1, True]], {"a": 1})
        ),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_profile(path, 1, 2)


def scan(layers, items, passes):
    return [(layer, range(items)) for _ in range(passes) for layer in range(layers)]


@pytest.mark.parametrize("percent", [25, 50, 95])
def test_least_recently_used_never_hits_in_a_scan_where_a_static_set_always_does(percent):
    layers, items, passes = 10, 40, 4
    needs = scan(layers, items, passes)
    kept = items * percent // 100
    lru = policy.lru_misses(needs, layers * kept)
    static = policy.static_misses(needs, even(layers, items, kept))
    demand = policy.demand_misses(needs)
    assert lru == demand
    assert all(len(missed) == items - kept for missed in static)
    everything = policy.lru_misses(needs, layers * items)
    assert sum(map(len, everything)) == layers * items


@settings(deadline=None)
@given(seed=st.integers(0, 100), capacity=st.integers(1, 30))
def test_lru_equals_a_plain_list(seed, capacity):
    generator = np.random.default_rng(seed)
    needs = [
        (int(generator.integers(4)), set(generator.integers(0, 9, 5).tolist())) for _ in "abcdefgh"
    ]
    cache, expected = [], []
    for layer, items in needs:
        missed = []
        for item in sorted(items):
            if (layer, item) in cache:
                cache.remove((layer, item))
            else:
                missed.append(item)
            cache = [*cache, (layer, item)][-capacity:]
        expected.append(tuple(missed))
    assert policy.lru_misses(needs, capacity) == expected


def test_owners_divide_the_items_of_each_layer():
    hot, cold = split_owners([(1, 2, 3, 7), (4,), ()], 2)
    assert hot == ((1, 2), (), ())
    assert cold == ((3, 7), (4,), ())
    assert split_owners([(1, 2)], 0) == (((1, 2),), ((),))
