"""Which items stay on the device: a static set, the same number in every layer.

A pass over the layers is a cyclic scan. A static set of N of M items misses M - N of them per pass,
which is the optimum without knowledge of the future; a least-recently-used cache of the same size
misses all M, because the item that it drops is always the one that is needed soonest. Items that
are streamed never enter the resident set. The simulators at the end count this.
"""

import collections
import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

PROFILE_SCHEMA = "streaming.profile/1"


@dataclasses.dataclass(frozen=True)
class Residency:
    """Resident items of each layer, ascending; all others are streamed.

    elsewhere  items of each layer that another owner keeps: neither resident nor streamed
    """

    items: int
    resident: tuple[tuple[int, ...], ...]
    elsewhere: tuple[tuple[int, ...], ...] = ()

    @functools.cached_property
    def streamed(self) -> tuple[tuple[int, ...], ...]:
        """Streamed items of each layer, ascending."""
        others = self.elsewhere or ((),) * len(self.resident)
        return tuple(
            tuple(item for item in range(self.items) if item not in kept)
            for kept in (frozenset(a + b) for a, b in zip(self.resident, others, strict=True))
        )

    @property
    def resident_items(self) -> int:
        """Resident items over all layers."""
        return sum(len(chosen) for chosen in self.resident)

    def tables(self) -> np.ndarray:
        """i32 [layers, items]: the row of each resident item in its layer's slab, else -1."""
        rows = np.full((len(self.resident), self.items), -1, np.int32)
        for table, chosen in zip(rows, self.resident, strict=True):
            table[list(chosen)] = np.arange(len(chosen), dtype=np.int32)
        return rows


def resident_per_layer(
    layers: int,
    items: int,
    item_bytes: int,
    *,
    fraction: float | None = None,
    total_bytes: int | None = None,
) -> int:
    """Resident items of each layer, from a share of the items or from the bytes they may take.

    Rounds down; the bytes left over are less than one item per layer.
    """
    if (fraction is None) == (total_bytes is None):
        raise ValueError(
            f"fraction={fraction}, total_bytes={total_bytes}: expected exactly one of them"
        )
    if total_bytes is not None:
        if total_bytes < 0:
            raise ValueError(f"total_bytes is {total_bytes}, expected at least 0")
        return min(items, total_bytes // (layers * item_bytes))
    assert fraction is not None
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction is {fraction}, expected 0..1")
    # Decimal fractions are meant as written: 0.29 of 100 items are 29, not 28.
    return int(Fraction(str(float(fraction))) * items)


def even(
    layers: int,
    items: int,
    per_layer: int,
    counts: np.ndarray | None = None,
    *,
    elsewhere: int = 0,
) -> Residency:
    """`per_layer` residents in every layer: those with the largest counts, ties to the lower id.

    elsewhere  items of every layer for another owner: those with the smallest counts
    counts  integers [layers, items], for example how often each item was used; None takes the
            lowest ids. Uneven sets would leave layers whose copies nothing hides.
    """
    if not 0 <= elsewhere <= items or not 0 <= per_layer <= items - elsewhere:
        raise ValueError(
            f"{per_layer} residents per layer and {elsewhere} items elsewhere, expected at least 0 "
            f"and {items} together at most"
        )
    if counts is None:
        counts = np.zeros((layers, items), np.int64)
    counts = np.asarray(counts)
    if counts.shape != (layers, items) or counts.dtype.kind not in "iu":
        raise ValueError(
            f"counts are {counts.dtype}{list(counts.shape)}, expected integers {[layers, items]}"
        )
    order = np.argsort(-counts.astype(np.int64), axis=1, kind="stable")

    def chosen(columns: np.ndarray) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(row.tolist())) for row in columns)

    others = chosen(order[:, items - elsewhere :]) if elsewhere else ()
    return Residency(items, chosen(order[:, :per_layer]), others)


def save_profile(path: str | os.PathLike[str], counts: np.ndarray) -> None:
    """Writes measured counts, integers [layers, items], for `load_profile`."""
    profile = {"schema": PROFILE_SCHEMA, "counts": np.asarray(counts).tolist()}
    aside = f"{os.fspath(path)}.partial"
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(profile, file)
    os.replace(aside, path)


def load_profile(path: str | os.PathLike[str], layers: int, items: int) -> np.ndarray:
    """Counts int64 [layers, items] that `save_profile` wrote; ValueError when they do not fit."""
    try:
        with open(path, encoding="utf-8") as file:
            profile = json.load(file)
        schema, counts = profile["schema"], profile["counts"]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a profile of item counts ({error!r})") from None
    if schema != PROFILE_SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}, expected {PROFILE_SCHEMA!r}")
    rows = counts if isinstance(counts, list) else [None]
    shape = {(len(rows), len(row) if isinstance(row, list) else None) for row in rows}
    if shape != {(layers, items)} or any(
        type(count) is not int or not 0 <= count < 2**62 for row in rows for count in row
    ):
        raise ValueError(
            f"{path} holds counts for (layers, items) {sorted(shape, key=str)}, expected whole "
            f"numbers >= 0 for {(layers, items)}: measure the profile with this model"
        )
    return np.asarray(counts, np.int64)


def split_owners(
    streamed: Sequence[Sequence[int]], cold_items: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Items of each layer divided between a hot and a cold owner, which gets the last ones.

    cold_items  items of every layer for the cold owner (fewer where the layer has fewer)
    return      (hot, cold); their concatenation per layer is the order for a shared host store
    """
    if cold_items < 0:
        raise ValueError(f"cold_items is {cold_items}, expected at least 0")
    cuts = [max(len(items) - cold_items, 0) for items in streamed]
    hot = tuple(tuple(items[:cut]) for items, cut in zip(streamed, cuts, strict=True))
    cold = tuple(tuple(items[cut:]) for items, cut in zip(streamed, cuts, strict=True))
    return hot, cold


# One pass needs, step after step, a set of items of one layer.
Pass = Sequence[tuple[int, Iterable[int]]]


def static_misses(needs: Pass, residency: Residency) -> list[tuple[int, ...]]:
    """Items that each step moves with a static resident set."""
    resident = [frozenset(chosen) for chosen in residency.resident]
    return [
        tuple(sorted(item for item in items if item not in resident[layer]))
        for layer, items in needs
    ]


def lru_misses(needs: Pass, capacity: int) -> list[tuple[int, ...]]:
    """Items that each step moves through a least-recently-used cache of `capacity` items."""
    cache: collections.OrderedDict[tuple[int, int], None] = collections.OrderedDict()
    misses = []
    for layer, items in needs:
        missed = []
        for item in sorted(items):
            if (layer, item) not in cache:
                missed.append(item)
            cache[layer, item] = None
            cache.move_to_end((layer, item))
            while len(cache) > capacity:
                cache.popitem(last=False)
        misses.append(tuple(missed))
    return misses


def demand_misses(needs: Pass) -> list[tuple[int, ...]]:
    """Items that each step moves when nothing stays on the device."""
    return [tuple(sorted(items)) for _, items in needs]
