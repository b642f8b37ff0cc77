"""The ring of host slots, alone."""

import threading

import numpy as np
import pytest

from streaming import DiskRing, FileRange, Pinner, numa, testing
from streaming.monitor import Monitor
from streaming.readers import PreadReader
from streaming.slab import PAGE_BYTES, Component, SlabLayout
from streaming.trace import Trace

LAYOUT = testing.small_layout(4, 6)


@pytest.fixture
def ring(tmp_path):
    made = DiskRing(
        LAYOUT,
        testing.write_files(LAYOUT, tmp_path, files=3),
        rows=4,
        slots=2,
        threads=3,
        poison=True,
    )
    made.attach(Monitor(20), Trace())
    yield made
    made.close()


def ask(ring, *units):
    with ring._monitor.changed:
        return [ring.request(*unit) for unit in units]


def test_slots_are_filled_in_order_and_reused_only_after_release(ring):
    first, second, third = ask(ring, (0, (0, 1)), (1, (5, 2, 3)), (2, (4,)))
    ring._monitor.wait(lambda: first.filled and second.filled, "the first two")
    assert third.slot is None
    (piece,) = ring.pieces(second)
    for row, item in enumerate((5, 2, 3)):
        data = b"".join(array[row].tobytes() for array in piece.arrays)
        assert data == testing.expected_item(LAYOUT, 1, item)
    (kept,) = ring.pieces(first)
    with ring._monitor.changed:
        ring.release(first)
    with pytest.raises(RuntimeError, match="given back or never filled"):
        ring.pieces(first)
    ring._monitor.wait(lambda: third.filled, "the third")
    # The old view shows the poison and the new item, never the old bytes.
    assert kept.arrays[0][0].tobytes() != testing.content(LAYOUT, 0, 0, "codes").tobytes()
    (piece,) = ring.pieces(third)
    assert piece.arrays[1][0].tobytes() == testing.content(LAYOUT, 2, 4, "scales").tobytes()


def test_dropped_requests_return_their_slots(ring):
    requests = ask(ring, *((layer, (0, 1)) for layer in range(4)))
    with ring._monitor.changed:
        for request in requests:
            ring.drop(request)
            ring.drop(request)
    ring._monitor.wait(ring.idle, "idle")
    (last,) = ask(ring, (3, (2,)))
    ring._monitor.wait(lambda: last.filled, "the last")


def test_wrong_rings_are_refused(ring):
    with pytest.raises(ValueError, match="a unit of 5 items, the slots hold 4"):
        ask(ring, (0, (0, 1, 2, 3, 4)))
    with pytest.raises(ValueError, match="0 slots of 1 rows"):
        DiskRing(LAYOUT, lambda *_: (), rows=1, slots=0)


def test_slots_are_locked_and_unlocked(tmp_path):
    driver = testing.FakeDriver()
    pinner = Pinner(driver)
    made = DiskRing(LAYOUT, testing.write_files(LAYOUT, tmp_path), rows=4, slots=3, pinner=pinner)
    pinner.wait()
    assert made.registered_bytes == made.nbytes == 3 * LAYOUT.block_bytes(4)
    pinner.pin_soon(1 << 40, PAGE_BYTES)
    pinner.wait()
    made.close()
    # Ranges of others stay locked: a store and a ring may share the thread that locks.
    assert driver.locked == {1 << 40: PAGE_BYTES}
    pinner.close()
    assert driver.locked == {}


def test_slots_lie_near_the_device(tmp_path):
    """Two nodes, the device on the second, which has room for two of three slots."""
    nbytes, bound = LAYOUT.block_bytes(4), []
    topology = numa.Topology((numa.Node(0, 1 << 30, (10, 20)), numa.Node(1, 3 * nbytes, (20, 10))))

    def bind(address, size, nodes):
        bound.append((address % PAGE_BYTES, size, nodes))
        return True

    def ring(policy):
        return DiskRing(
            LAYOUT,
            testing.write_files(LAYOUT, tmp_path),
            rows=4,
            slots=3,
            policy=policy,
            topology=topology,
            device_node=1,
            bind=bind,
        )

    assert ring("auto").nodes == ((1,), (1,), (0,))
    assert bound == [(0, nbytes, (1,)), (0, nbytes, (1,)), (0, nbytes, (0,))]
    assert ring("off").nodes == ((), (), ())
    with pytest.raises(ValueError, match=r"bind: \d+ bytes do not fit node 1"):
        ring("bind")


def test_neighbouring_ranges_are_read_at_once(tmp_path):
    """Slab files keep a component's items side by side: one read for as many as a task holds."""
    path = tmp_path / "codes.bin"
    codes = [testing.content(LAYOUT, 0, item, "codes") for item in range(6)]
    path.write_bytes(b"".join(values.tobytes() for values in codes))
    scattered = testing.write_files(LAYOUT, tmp_path)

    def locate(layer, item, component):
        if component == "codes":
            return [FileRange(str(path), 15 * item, 15)]
        return scattered(layer, item, component)

    ranges = []

    class Counted(PreadReader):
        def read(self, source, out):
            ranges.append(source)
            return super().read(source, out)

    made = DiskRing(LAYOUT, locate, rows=6, slots=1, reader=Counted())
    made.attach(Monitor(20), Trace())
    (request,) = ask(made, (0, (0, 1, 2, 4, 5)))
    made._monitor.wait(lambda: request.filled, "the unit")
    read = sorted(source[1:3] for source in ranges if source.path == str(path))
    assert read == [(0, 45), (60, 30)]
    (piece,) = made.pieces(request)
    np.testing.assert_array_equal(piece.arrays[0], np.stack([codes[n] for n in (0, 1, 2, 4, 5)]))
    with made._monitor.changed:
        made.release(request)
    made.close()


@pytest.mark.parametrize(
    ("items", "reads"),
    [
        (1, 3 * [1 << 20]),  # smaller reads would cost more than they gain
        (4, 12 * [1 << 20]),
        (40, 10 * [12 << 20]),
        (160, 16 * [30 << 20]),  # 32 MiB at most, whole items
    ],
)
def test_a_unit_is_cut_into_reads_for_all_threads(items, reads):
    """Components of 3 MiB side by side in one file, five threads: about ten reads."""
    layout = SlabLayout(1, 160, (Component("pages", (3 << 20,), np.dtype(np.uint8)),))
    found = []

    class Counted:
        def read(self, source, out):
            found.append(source[1:3])
            return source.nbytes

        def close(self):
            pass

    made = DiskRing(
        layout,
        lambda layer, item, component: [FileRange("pages.bin", item * (3 << 20), 3 << 20)],
        rows=items,
        slots=1,
        reader=Counted(),
        threads=5,
    )
    made.attach(Monitor(20), Trace())
    (request,) = ask(made, (0, tuple(range(items))))
    made._monitor.wait(lambda: request.filled, "the unit")
    assert [nbytes for _, nbytes in sorted(found)] == reads
    assert all(not (offset | nbytes) % PAGE_BYTES for offset, nbytes in found)
    with made._monitor.changed:
        made.release(request)
    made.close()


def test_a_late_read_of_a_unit_does_not_hold_up_the_next_ones(tmp_path):
    """Threads go on with the units behind; slots come in order, but nothing waits for the first."""
    late, release = threading.Event(), threading.Event()
    locate = testing.write_files(LAYOUT, tmp_path)
    held = locate(0, 0, "codes")[0]

    class Late(PreadReader):
        def read(self, source, out):
            if source[:3] == held[:3]:
                late.set()
                release.wait()
            return super().read(source, out)

    made = DiskRing(LAYOUT, locate, rows=4, slots=3, reader=Late(), threads=2)
    made.attach(Monitor(20), Trace())
    first, *others = ask(made, (0, (0, 1)), (1, (0, 1)), (2, (0, 1)))
    late.wait()
    made._monitor.wait(lambda: all(request.filled for request in others), "the units behind")
    assert not first.filled
    release.set()
    made._monitor.wait(lambda: first.filled, "the first unit")
    with made._monitor.changed:
        for request in (first, *others):
            made.release(request)
    made.close()


def test_closing_does_not_wait_for_ever_for_a_read(tmp_path, caplog):
    begun, release = threading.Event(), threading.Event()

    class Stuck(PreadReader):
        def read(self, source, out):
            begun.set()
            release.wait()
            return super().read(source, out)

    made = DiskRing(
        LAYOUT, testing.write_files(LAYOUT, tmp_path), rows=6, slots=1, reader=Stuck(), threads=1
    )
    made.attach(Monitor(0.05), Trace())
    ask(made, (0, (0,)))
    begun.wait()
    made.close()
    assert "a read does not end" in caplog.text
    release.set()
