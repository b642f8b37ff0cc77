"""Host memory: placement, filling, page-locking."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming import HostStore, Pinner, even, numa, testing
from streaming.slab import PAGE_BYTES

LAYERS, ITEMS = 5, 9
LAYOUT = testing.small_layout(LAYERS, ITEMS)


def make(order, **options):
    store = HostStore(LAYOUT, order, **{"policy": "off", **options})
    store.fill(testing.filler(LAYOUT), threads=3)
    return store


def test_store_holds_every_item_where_it_says():
    order = [(8, 1, 2), (), (5,), tuple(range(ITEMS)), (0, 4)]
    finished = []
    store = HostStore(LAYOUT, order, policy="off")
    store.fill(testing.filler(LAYOUT), on_layer=finished.append)
    assert finished == list(range(LAYERS))
    assert [store.holds(layer) for layer in range(LAYERS)] == [True, False, True, True, True]
    for layer, items in enumerate(order):
        (piece,) = store.pieces(layer, items) or (None,)
        for row, item in enumerate(items):
            data = b"".join(array[row].tobytes() for array in piece.arrays)
            assert data == testing.expected_item(LAYOUT, layer, item)
    assert store.nbytes == sum(LAYOUT.block_bytes(len(items)) for items in order)


def test_items_come_in_as_few_pieces_as_their_places_allow():
    store = make([(8, 1, 2, 7, 3)] + [()] * (LAYERS - 1))
    assert store.arrange(0, (1, 2, 3, 8)) == (8, 1, 2, 3)
    pieces = store.pieces(0, (8, 1, 2, 3))
    assert [(piece.row, len(piece.arrays[0])) for piece in pieces] == [(0, 3), (3, 1)]
    assert pieces[1].arrays[0][0].tobytes() == testing.content(LAYOUT, 0, 3, "codes").tobytes()
    with pytest.raises(ValueError, match=r"no items \[0, 4\] of layer 0: it holds 5"):
        store.arrange(0, (0, 1, 4))


def test_filled_memory_cannot_be_written():
    store = make(even(LAYERS, ITEMS, 0).streamed)
    with pytest.raises(ValueError, match="read-only"):
        store.pieces(0, (0,))[0].arrays[0][...] = 0


def test_each_layer_is_locked_alone_on_page_borders_and_unlocked_at_the_end():
    driver = testing.FakeDriver(page_table_share=0.01)
    pinner = Pinner(driver)
    store = make(even(LAYERS, ITEMS, 2).streamed, pinner=pinner)
    report = pinner.wait()
    assert len(driver.locked) == LAYERS
    assert all(address % PAGE_BYTES == 0 for address in driver.locked)
    assert all(nbytes % PAGE_BYTES == 0 for nbytes in driver.locked.values())
    assert report.registered_bytes == store.registered_bytes == store.nbytes
    assert 0 < report.device_bytes <= store.nbytes * 0.011
    assert report.seconds > 0
    assert all(store.is_pinned(layer) for layer in range(LAYERS))
    store.close()
    assert driver.locked == {}
    assert store.nbytes == 0


def test_locking_can_wait():
    pinner = Pinner(testing.FakeDriver())
    store = HostStore(LAYOUT, even(LAYERS, ITEMS, 2).streamed, policy="off", pinner=pinner)
    store.fill(testing.filler(LAYOUT), pin=False)
    assert pinner.wait().registered_bytes == 0
    store.pin()
    assert pinner.wait().registered_bytes == store.nbytes
    store.close()


def test_without_a_driver_memory_stays_pageable_without_a_word(caplog):
    store = make(even(LAYERS, ITEMS, 0).streamed)
    assert not store.is_pinned(0)
    assert store.registered_bytes == 0
    assert not caplog.records
    store.close()


def test_layers_on_several_nodes_get_a_region_each():
    regions, bound = [], []

    def allocate(nbytes):
        regions.append(np.zeros(nbytes, np.uint8))
        return regions[-1]

    def bind(address, nbytes, nodes):
        # Placement has to come before the first write.
        region = next(r for r in regions if r.ctypes.data == address)
        assert not region.any()
        bound.append((nbytes, tuple(nodes)))
        return False

    block = LAYOUT.block_bytes(ITEMS)
    topology = machine([(3 * block / 0.9, (10, 20)), (9 * block, (20, 10))])
    store = make(
        even(LAYERS, ITEMS, 0).streamed,
        policy="auto",
        topology=topology,
        device_node=0,
        allocate=allocate,
        bind=bind,
    )
    assert store.nodes == ((0,), (0,), (0,), (1,), (1,))
    assert bound == [(3 * block, (0,)), (2 * block, (1,))]
    assert store.pieces(4, (3,))[0].arrays[0][0].tobytes() == (
        testing.content(LAYOUT, 4, 3, "codes").tobytes()
    )


def machine(nodes):
    return numa.Topology(
        tuple(numa.Node(number, int(free), tuple(far)) for number, (free, far) in enumerate(nodes))
    )


FOUR = machine(
    [
        (100, (10, 12, 32, 32)),
        (100, (12, 10, 32, 32)),
        (100, (32, 32, 10, 12)),
        (100, (32, 32, 12, 10)),
    ]
)


def test_auto_fills_the_nearest_nodes_first():
    assert numa.place([50] * 4, FOUR, "auto", 2) == ((2,), (3,), (0,), (1,))
    assert numa.place([40] * 6, FOUR, "auto", 2) == ((2,), (2,), (3,), (3,), (0,), (0,))
    assert numa.place([40] * 6, FOUR, "auto", 1) == ((1,), (1,), (0,), (0,), (2,), (2,))


def test_auto_leaves_placement_alone_where_it_cannot_help(caplog):
    assert numa.place([40], numa.Topology(), "auto", None) == ((),)
    assert numa.place([40], machine([(1000, (10,))]), "auto", 0) == ((),)
    assert numa.place([90] * 9, FOUR, "auto", 0) == ((),) * 9
    assert "do not fit the free memory" in caplog.text


def test_auto_without_the_device_s_node_takes_the_emptiest():
    topology = machine([(100, (10, 20)), (300, (20, 10))])
    assert numa.place([50], topology, "auto", None) == ((1,),)
    assert numa.place([50], topology, "auto", -1) == ((1,),)
    assert numa.place([50], topology, "auto", 7) == ((1,),)


def test_bind_and_interleave_and_off():
    assert numa.place([40, 40], FOUR, "bind", 3) == ((3,), (3,))
    with pytest.raises(ValueError, match=r"120 bytes do not fit node 3, which has 95 usable"):
        numa.place([40, 80], FOUR, "bind", 3)
    with pytest.raises(ValueError, match="the system says None and has nodes"):
        numa.place([40], FOUR, "bind", None)
    with pytest.raises(ValueError, match="the system says -1"):
        numa.place([40], numa.Topology(), "bind", -1)
    assert numa.place([40], FOUR, "interleave", 1) == ((0, 1, 2, 3),)
    assert numa.place([40], numa.Topology(), "interleave", None) == ((),)
    assert numa.place([40], FOUR, "off", 1) == ((),)
    with pytest.raises(ValueError, match="'nearest', expected one of auto, bind"):
        numa.place([40], FOUR, "nearest", 1)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), max_size=12),
    free=st.lists(st.integers(0, 200), min_size=2, max_size=4),
    near=st.integers(-1, 4),
)
def test_auto_never_plans_more_than_a_node_has(sizes, free, near):
    topology = machine([(nbytes, ()) for nbytes in free])
    used = dict.fromkeys(range(len(free)), 0)
    for nbytes, nodes in zip(sizes, numa.place(sizes, topology, "auto", near), strict=True):
        assert len(nodes) <= 1
        for node in nodes:
            used[node] += nbytes
    assert all(used[node] <= nbytes * 0.95 for node, nbytes in enumerate(free))


def write_system(root, nodes, devices=()):
    for number, (free_kb, distances) in nodes.items():
        folder = root / "devices" / "system" / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "meminfo").write_text(
            f"Node {number} MemTotal:  99999 kB\nNode {number} MemFree:  {free_kb} kB\n"
            f"Node {number} Inactive(file):  7 kB\n"
        )
        if distances:
            (folder / "distance").write_text(distances)
    for address, node in devices:
        folder = root / "bus" / "pci" / "devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")


def test_topology_of_a_system_tree(tmp_path):
    write_system(
        tmp_path,
        {0: (100, "10 21\n"), 2: (50, "21 10\n")},
        [("0000:1a:00.0", 2), ("0000:1b:00.0", -1)],
    )
    (tmp_path / "devices" / "system" / "node" / "possible").write_text("0-2\n")
    topology = numa.read_topology(tmp_path)
    assert topology.nodes == (
        numa.Node(0, 107 * 1024, (10, 21)),
        numa.Node(2, 57 * 1024, (21, 10)),
    )
    assert [node.number for node in topology.nearest(2)] == [2, 0]
    assert numa.device_node("0000:1A:00.0", tmp_path) == 2
    # Machines without NUMA information say -1.
    assert numa.device_node("0000:1b:00.0", tmp_path) is None
    assert numa.device_node("0000:ff:00.0", tmp_path) is None
    assert numa.device_node(None, tmp_path) is None


def test_system_that_tells_nothing_has_no_nodes(tmp_path):
    assert numa.read_topology(tmp_path) == numa.Topology()
    folder = tmp_path / "devices" / "system" / "node"
    (folder / "node0").mkdir(parents=True)
    (folder / "node1").mkdir()
    (folder / "node1" / "meminfo").write_text("Node 1 Strange: 1\n")
    assert numa.read_topology(tmp_path) == numa.Topology()


def test_refused_binding_is_logged_and_harmless(caplog):
    region = np.zeros(4 * PAGE_BYTES, np.uint8)
    address = -(-region.ctypes.data // PAGE_BYTES) * PAGE_BYTES
    assert not numa.bind(address, PAGE_BYTES, [900])
    assert "binding 4096 bytes to nodes [900] failed" in caplog.text


def test_this_machine_can_be_read_and_used():
    store = HostStore(LAYOUT, even(LAYERS, ITEMS, 0).streamed)
    store.fill(testing.filler(LAYOUT))
    assert len(store.nodes) == LAYERS


def test_order_must_name_every_layer():
    with pytest.raises(ValueError, match="order names 1 layers, expected 5"):
        HostStore(LAYOUT, [(0,)])


def test_layers_of_one_origin_share_memory_where_their_items_agree():
    driver = testing.FakeDriver()
    pinner = Pinner(driver)
    order = [(0, 1, 2), (3, 4), (0, 1, 2), (0, 1, 2), (3, 5)]
    store = HostStore(LAYOUT, order, origins=[0, 1, 0, 3, 1], policy="off", pinner=pinner)
    calls: list[tuple[int, int]] = []
    write, told = testing.filler(LAYOUT), []

    def fill(layer, item, component, buffer):
        calls.append((layer, item))
        write(layer, item, component, buffer)

    store.fill(fill, threads=2, on_layer=told.append)
    assert told == list(range(LAYERS))
    assert {layer for layer, _ in calls} == {0, 1, 3, 4}
    shared, first = store.pieces(2, order[2])[0], store.pieces(0, order[0])[0]
    assert all(np.shares_memory(a, b) for a, b in zip(shared.arrays, first.arrays, strict=True))
    other = store.pieces(3, order[3])[0]
    assert not np.shares_memory(other.arrays[0], first.arrays[0])
    assert store.nbytes == sum(LAYOUT.block_bytes(n) for n in (3, 2, 3, 2))
    assert pinner.wait().registered_bytes == store.registered_bytes == store.nbytes
    assert all(store.is_pinned(layer) for layer in range(LAYERS))
    store.close()
    assert driver.locked == {}


def test_a_store_is_filled_layer_by_layer():
    order = [(8, 1), (), (8, 1), (2,), (2,)]
    store = HostStore(LAYOUT, order, origins=[0, 1, 0, 3, 4], policy="off")
    names, told = [component.name for component in LAYOUT.components], []

    def fill(layer, items, arrays):
        for name, array in zip(names, arrays, strict=True):
            for row, item in enumerate(items):
                array[row] = testing.content(LAYOUT, layer, item, name)

    store.fill_layers(fill, on_layer=told.append)
    assert told == list(range(LAYERS))
    for layer, origin in ((0, 0), (2, 0), (3, 3), (4, 4)):
        (piece,) = store.pieces(layer, order[layer])
        for row, item in enumerate(order[layer]):
            data = b"".join(array[row].tobytes() for array in piece.arrays)
            assert data == testing.expected_item(LAYOUT, origin, item)
