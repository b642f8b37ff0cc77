"""The streamer on JAX's own devices: real copies, real programs, notes from programs."""

import functools
import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streaming
from streaming import (
    ColdFirst,
    DiskRing,
    HostStore,
    Note,
    Notes,
    Step,
    Streamer,
    StreamError,
    Usage,
    even,
    item_counts,
    prefer_routed,
    split_owners,
    testing,
)
from streaming.link import DeviceLink

LAYERS, ITEMS, TOKENS, TOP = 8, 8, 18, 2
LAYOUT = testing.small_layout(LAYERS, ITEMS)


def test_put_copies_before_the_host_memory_changes():
    """The CPU backend may use a numpy array in place; a slot that is refilled must not show."""
    host = np.arange(4096 * 4, dtype=np.uint8).reshape(4, -1)
    device = DeviceLink(jax.devices()[1]).put(host)
    kept = host.copy()
    host[...] = 0xA5
    np.testing.assert_array_equal(np.asarray(device), kept)
    assert device.devices() == {jax.devices()[1]}


@pytest.mark.parametrize("counts", [(), (1,), (2, 1), (4, 2, 1)])
def test_assembled_slab_has_its_pieces_in_front_and_zeros_behind(counts):
    link = DeviceLink(jax.devices()[2])
    pieces, expected = [], [[] for _ in LAYOUT.components]
    for index, count in enumerate(counts):
        arrays = [
            np.stack([testing.content(LAYOUT, index, item, part.name) for item in range(count)])
            for part in LAYOUT.components
        ]
        pieces.append(tuple(map(link.put, arrays)))
        for rows, array in zip(expected, arrays, strict=True):
            rows.extend(array)
    slab = link.assemble(LAYOUT, 8, pieces)
    for part, array, rows in zip(LAYOUT.components, slab, expected, strict=True):
        assert array.shape == (8, *part.shape)
        assert array.devices() == {jax.devices()[2]}
        np.testing.assert_array_equal(
            np.asarray(array)[: len(rows)], np.array(rows).reshape(-1, *part.shape)
        )
        assert not np.asarray(array)[len(rows) :].any()


@jax.jit
def experts(ids, arrays, where, slots):
    """Stand-in for a MoE layer: each choice gets a sum over its item, exact in int32.

    Returns the slots, and a small output that tells when the program has run.
    """
    rows = where[ids]
    values = arrays["codes"].astype(jnp.int32).sum((1, 2)) + arrays["scales"].astype(jnp.int32).sum(
        1
    )
    values += arrays["pages"].astype(jnp.int32).sum((1, 2))
    if values.size:
        slots = jnp.where(rows >= 0, values[rows], slots)
    # An index from outside would be one more copy to the device, behind the slabs.
    return slots, slots[0, 0]


@jax.jit
def router(state, layer):
    return (state[:, None] * jnp.int32(7) + layer + jnp.arange(TOP, dtype=jnp.int32)[None]) % (
        jnp.int32(ITEMS)
    )


@jax.jit
def finish(state, slots):
    return (state * jnp.int32(31) + slots.sum(1)) % jnp.int32(65537)


def resident_arrays(residency, layer, device):
    """The resident slab of a layer, as an engine loads it."""
    items = residency.resident[layer]
    return {
        part.name: jax.device_put(
            np.array(
                [testing.content(LAYOUT, layer, item, part.name) for item in items], part.dtype
            ).reshape(len(items), *part.shape),
            device,
        )
        for part in LAYOUT.components
    }


def forward(residency, mode, *, window, tier, locate, budget_items=None, order="chunk", notes=None):
    """Two chunks through all layers; the hash of the final states."""
    device = jax.devices()[0]
    store = ring = None
    if tier == "ram":
        store = HostStore(LAYOUT, residency.streamed)
        store.fill(testing.filler(LAYOUT))
    else:
        ring = DiskRing(LAYOUT, locate, rows=ITEMS, slots=window + 1, poison=True, threads=2)
    budget = None if budget_items is None else budget_items * LAYOUT.item_bytes
    tables = jax.device_put(residency.tables(), device)
    residents = [resident_arrays(residency, layer, device) for layer in range(LAYERS)]
    chunks = [jnp.arange(TOKENS, dtype=jnp.int32) + 100 * chunk for chunk in range(2)]
    if order == "chunk":
        visits = [((chunk,), layer) for chunk in range(2) for layer in range(LAYERS)]
    else:
        visits = [((0, 1), layer) for layer in range(LAYERS)]
    layers = [jnp.int32(layer) for layer in range(LAYERS)]
    with Streamer(
        LAYOUT,
        residency.streamed,
        device,
        store=store,
        ring=ring,
        window=window,
        budget_bytes=budget,
        timeout_s=30,
    ) as streamer:
        streamer.start([Step(layer, mode) for _, layer in visits])
        for step, (members, layer) in enumerate(visits):
            streamer.issue_ahead(step)
            ids = [router(chunks[chunk], layers[layer]) for chunk in members]
            if mode == "routed":
                if notes is not None:
                    notes.send(step, layer, jnp.concatenate(ids), as_ids=True)
                    asked = notes.wait(step, 30).values
                else:
                    asked = np.concatenate([np.asarray(each) for each in ids])
                streamer.routed(step, asked)
            empty = jnp.full((TOKENS, TOP), -9, jnp.int32)
            slots = [experts(each, residents[layer], tables[layer], empty)[0] for each in ids]
            for wave in range(streamer.waves(step)):
                if wave:
                    streamer.issue_ahead(step, wave)
                slab = streamer.take(step, wave)
                found = [
                    experts(each, dict(slab.arrays), slab.where, mine)
                    for each, mine in zip(ids, slots, strict=True)
                ]
                slots = [mine for mine, _ in found]
                streamer.computed(step, found[-1][1], wave, reached=ids[-1])
            for chunk, mine in zip(members, slots, strict=True):
                chunks[chunk] = finish(chunks[chunk], mine)
        ledger = streamer.finish()
        assert streamer.violations() == []
    assert (ledger.overlap or 0) <= 1
    return hashlib.sha256(np.concatenate([np.asarray(c) for c in chunks]).tobytes()).hexdigest()


@pytest.fixture(scope="module")
def locate(tmp_path_factory):
    return testing.write_files(LAYOUT, tmp_path_factory.mktemp("items"))


@pytest.fixture(scope="module")
def reference():
    return forward(even(LAYERS, ITEMS, ITEMS), "whole", window=1, tier="ram", locate=None)


@pytest.mark.parametrize(
    ("resident", "mode", "window", "tier", "budget", "order"),
    [
        (0, "whole", 0, "ram", None, "chunk"),
        (0, "routed", 1, "disk", 24, "layer"),
        (2, "whole", 1, "disk", None, "layer"),
        (2, "routed", 2, "ram", None, "chunk"),
        (4, "whole", 4, "ram", 12, "layer"),
        (4, "routed", 0, "disk", None, "chunk"),
        (7, "whole", 2, "disk", 4, "chunk"),
        (8, "routed", 1, "ram", None, "layer"),
    ],
)
def test_result_does_not_depend_on_where_items_come_from(
    resident, mode, window, tier, budget, order, locate, reference
):
    got = forward(
        even(LAYERS, ITEMS, resident),
        mode,
        window=window,
        tier=tier,
        locate=locate,
        budget_items=budget,
        order=order,
    )
    assert got == reference


@pytest.mark.parametrize("by_callback", [False, True])
def test_routed_steps_fed_by_notes(by_callback, reference):
    notes = Notes(ITEMS, by_callback=by_callback)
    residency = even(LAYERS, ITEMS, 3)
    got = forward(residency, "routed", window=1, tier="ram", locate=None, notes=notes)
    assert got == reference


def test_two_owners_on_two_devices_give_the_same_result(reference):
    """The cold owner's slots come back and are completed by the hot owner's."""
    residency = even(LAYERS, ITEMS, 0)
    shares = split_owners(residency.streamed, 3)
    devices = jax.devices()[:2]
    store = HostStore(LAYOUT, residency.streamed)
    store.fill(testing.filler(LAYOUT))
    streamers = [
        Streamer(LAYOUT, share, device, store=store, timeout_s=30)
        for share, device in zip(shares, devices, strict=True)
    ]
    pair = ColdFirst(30)
    state = [jnp.arange(TOKENS, dtype=jnp.int32) + 100 * chunk for chunk in range(2)]
    steps = list(itertools.product(range(2), range(LAYERS)))
    for streamer in streamers:
        streamer.start([Step(layer) for _, layer in steps])

    def owner(which, step, ids, ready=None):
        mine = jax.device_put(ids, devices[which])
        if ready is not None:
            ready.signal()
        slab = streamers[which].take(step)
        empty = jax.device_put(np.full((TOKENS, TOP), -9, np.int32), devices[which])
        slots, done = experts(mine, dict(slab.arrays), slab.where, empty)
        streamers[which].computed(step, done)
        return slots

    for step, (chunk, layer) in enumerate(steps):
        for streamer in streamers:
            streamer.issue_ahead(step)
        ids = router(state[chunk], jnp.int32(layer))
        cold, hot = pair.run(
            functools.partial(
                lambda ready, step, ids: owner(1, step, ids, ready), step=step, ids=ids
            ),
            functools.partial(owner, 0, step, ids),
        )
        cold = jax.device_put(cold, devices[0])
        state[chunk] = finish(state[chunk], jnp.where(hot == -9, cold, hot))
    for streamer in streamers:
        streamer.finish()
        streamer.close()
    pair.close()
    assert hashlib.sha256(np.concatenate(state).tobytes()).hexdigest() == reference


def test_output_that_was_donated_is_named():
    residency = even(LAYERS, ITEMS, 0)
    store = HostStore(LAYOUT, residency.streamed)
    store.fill(testing.filler(LAYOUT))
    add = jax.jit(lambda x: x + jnp.int32(1), donate_argnums=0)
    with Streamer(LAYOUT, residency.streamed, store=store, timeout_s=30) as streamer:
        streamer.start([Step(0)])
        streamer.issue_ahead(0)
        streamer.take(0)
        output = jnp.arange(5, dtype=jnp.int32)
        jax.block_until_ready(add(output))
        streamer.computed(0, output)
        with pytest.raises(StreamError, match="was donated to a later program"):
            streamer.finish()
        assert streamer.abort() is not None


@pytest.mark.parametrize("by_callback", [False, True])
@pytest.mark.parametrize("ids", [False, True])
def test_notes_arrive_with_their_step_in_any_order(by_callback, ids):
    notes = Notes(ITEMS, by_callback=by_callback)
    usage = Usage(2, ITEMS)
    sent = {}
    for step in range(6):
        values = np.random.default_rng(step).integers(-1, ITEMS, (5, TOP)).astype(np.int32)
        sent[step] = values
        notes.send(step, step % 2, jax.device_put(values, jax.devices()[1]), as_ids=ids)
    late = notes.wait(4, 30)
    assert (late.step, late.layer) == (4, 0)
    found = {late.step: late}
    found |= {note.step: note for note in notes.drain(30)}
    assert sorted(found) == list(range(6))
    expected = np.zeros((2, ITEMS), np.int64)
    for step, note in found.items():
        real = sent[step][sent[step] >= 0]
        assert usage.add(note) == len(set(real.tolist()))
        np.add.at(expected[step % 2], real, 1)
    np.testing.assert_array_equal(usage.counts, expected)
    assert len(usage.distinct[0]) == 3
    with pytest.raises(TimeoutError, match="no note of step 9 within 0 s"):
        notes.wait(9, 0)


@pytest.mark.parametrize("by_callback", [False, True])
def test_notes_of_a_run_that_was_given_up_never_reach_the_next_one(by_callback):
    notes, device = Notes(ITEMS, by_callback=by_callback), jax.devices()[1]
    for run in range(3):
        notes.begin(device)
        for step in range(4):
            ids = jax.device_put(np.full((2, TOP), run, np.int32), device)
            notes.send(step, 0, ids)
        if run < 2:  # given up with some notes taken and others on their way
            notes.wait(1, 30)
            continue
        found = list(notes.drain(30))
    assert [note.step for note in found] == [0, 1, 2, 3]
    for note in found:
        assert note.counts(ITEMS)[run] == 2 * TOP
    if by_callback:  # one program for all runs
        assert notes._send._cache_size() == 1


def test_note_that_does_not_come_is_named():
    notes = Notes(ITEMS, by_callback=True)
    notes.begin(jax.devices()[1])
    notes._send = lambda number, ids, as_ids: number
    notes.send(3, 0, jax.device_put(np.zeros((2, TOP), np.int32), jax.devices()[1]))
    with pytest.raises(TimeoutError, match=r"no notes of steps \[3\] within 0 s"):
        next(notes.drain(0))


def test_counts_ignore_what_is_no_item():
    ids = jnp.array([[-1, 0], [3, 3], [-5, -1]], jnp.int32)
    assert item_counts(ids, 5).tolist() == [1, 0, 0, 2, 0]
    assert Note(0, 0, np.asarray(ids), counted=False).counts(5).tolist() == [1, 0, 0, 2, 0]


def test_routed_pays_when_it_saves_more_than_the_whole_layer_hides():
    def prefer(misses, compute_s):
        return prefer_routed(
            distinct_misses=misses,
            share=200,
            item_bytes=13_369_344,
            link_bytes_per_s=50e9,
            compute_s=compute_s,
        )

    assert prefer(60, 0.005)
    assert not prefer(190, 0.005)
    assert not prefer(60, 0.100)


def test_package_names_what_it_exports():
    assert all(hasattr(streaming, name) for name in streaming.__all__)
