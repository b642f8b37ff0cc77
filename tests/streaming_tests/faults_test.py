"""Every way to fail: the error surfaces in time and names the thing, and the next run is right."""

import logging
import os
import re
import threading

import numpy as np
import pytest

from streaming import (
    DiskRing,
    HostStore,
    Pinner,
    ReadError,
    Step,
    StreamCancelled,
    Streamer,
    StreamError,
    StreamStalled,
    even,
    testing,
)
from streaming.readers import DirectReader, MmapReader, PreadReader
from streaming.store import allocate

LAYERS, ITEMS = 8, 6
LAYOUT = testing.small_layout(LAYERS, ITEMS)
STREAMED = even(LAYERS, ITEMS, 0).streamed
STEPS = [Step(layer) for _ in range(3) for layer in range(LAYERS)]


class Rig:
    """A streamer, its link and its device, closed in the right order."""

    def __init__(self, *, store=None, ring=None, window=4, timeout_s=20.0, **link_options):
        self.link = testing.LateLink(**{"lag": 10_000, **link_options})
        self.device = testing.FakeDevice()
        self.streamer = Streamer(
            LAYOUT,
            STREAMED,
            store=store,
            ring=ring,
            window=window,
            timeout_s=timeout_s,
            link=self.link,
        )

    def run(self):
        """One whole run; the contents of all steps are checked."""
        found = testing.run_steps(self.streamer, STEPS, self.device)
        ledger = self.streamer.finish()
        for step, items in zip(STEPS, found, strict=True):
            expected = {n: testing.expected_item(LAYOUT, step.layer, n) for n in range(ITEMS)}
            assert items == expected
        assert ledger.total_bytes == len(STEPS) * ITEMS * LAYOUT.item_bytes
        return ledger

    def run_program(self, program):
        """One whole run whose steps are all this program."""
        self.streamer.start(STEPS)
        for step in range(len(STEPS)):
            self.streamer.issue_ahead(step)
            self.streamer.take(step)
            self.streamer.computed(step, self.device.dispatch(program))
        self.streamer.finish()

    def recover(self):
        """What an engine does after an error: abort, then the next run has to be right."""
        # Copies that no program will ask for any more.
        self.link.hurry()
        ledger = self.streamer.abort()
        assert ledger is not None
        assert not ledger.complete
        self.run()

    def close(self):
        self.link.hurry()
        self.streamer.close()
        self.link.close()
        self.device.close()


@pytest.fixture
def rig():
    rigs = []

    def make(**options):
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for made in rigs:
        made.close()


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def make_ring(folder, reader, *, window=4, **options):
    locate = testing.write_files(LAYOUT, folder)
    options = {"threads": 3, "poison": True, **options}
    return DiskRing(LAYOUT, locate, rows=ITEMS, slots=window + 1, reader=reader, **options)


def make_store(**options):
    store = HostStore(LAYOUT, STREAMED, policy="off", **options)
    store.fill(testing.filler(LAYOUT), threads=2)
    return store


class Faulty:
    """A reader that raises `error` at read number `at`, once."""

    def __init__(self, at, error):
        self.inner, self.at, self.error = PreadReader(), at, error
        self.reads = 0
        self.lock = threading.Lock()

    def read(self, source, out):
        with self.lock:
            number, self.reads = self.reads, self.reads + 1
        if number == self.at:
            raise self.error
        return self.inner.read(source, out)

    def close(self):
        self.inner.close()


@pytest.mark.parametrize("at", [0, 40, 150, 400])
@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(5, "Input/output error"), ReadError),
        (SystemExit("thread killed"), StreamError),
    ],
)
def test_failed_read_surfaces_and_the_next_run_is_right(rig, folder, at, window, error, kind):
    """A SystemExit is how a thread dies without a trace: it must not leave its readers waiting."""
    here = rig(ring=make_ring(folder, Faulty(at, error), window=window), window=window)
    with pytest.raises(kind, match=r"reading \w+ of item \d, layer \d failed") as caught:
        here.run()
    if kind is ReadError:  # of a file, which the message names with what to do
        assert re.search(r"shard-\d\.bin: OSError: .* check the disk", str(caught.value))
    else:
        assert not isinstance(caught.value, ReadError)
    with pytest.raises(kind):
        here.streamer.take(0)
    here.recover()


@pytest.mark.parametrize("reader", [PreadReader, DirectReader])
def test_short_read_is_named(rig, folder, reader):
    reads = iter(range(10**6))

    def preadv(descriptor, buffers, offset):
        return 0 if next(reads) == 30 else os.preadv(descriptor, buffers, offset)

    here = rig(ring=make_ring(folder, reader(preadv)))
    with pytest.raises(ReadError, match=r"shard-\d\.bin gave \d+ of \d+ bytes at offset \d+"):
        here.run()
    here.recover()


@pytest.mark.parametrize("reader", [PreadReader, MmapReader, DirectReader])
def test_file_that_changes_during_a_run_is_named(rig, folder, reader):
    here = rig(ring=make_ring(folder, reader()))

    def change(step):
        if step == 9:
            os.utime(folder / "shard-0.bin", (1, 1))

    with pytest.raises(ReadError, match=r"shard-0\.bin changed while it was being read"):
        testing.run_steps(here.streamer, STEPS, here.device, on_step=change)


@pytest.mark.parametrize("reader", [PreadReader, MmapReader, DirectReader])
def test_file_that_changed_before_its_first_read_is_named(rig, folder, reader):
    locate = testing.write_files(LAYOUT, folder)

    def stamped(layer, item, component):
        return [
            place._replace(stamp=stamps[place.path]) for place in locate(layer, item, component)
        ]

    stamps = {}
    for path in map(str, folder.glob("shard-*.bin")):
        stamps[path] = (os.stat(path).st_size, os.stat(path).st_mtime_ns)
    ring = DiskRing(LAYOUT, stamped, rows=ITEMS, slots=5, reader=reader(), poison=True)
    rig(ring=ring).run()
    os.utime(folder / "shard-0.bin", (1, 1))
    ring = DiskRing(LAYOUT, stamped, rows=ITEMS, slots=5, reader=reader(), poison=True)
    with pytest.raises(ReadError, match=r"shard-0\.bin changed after it was opened .* load"):
        rig(ring=ring).run()


def test_removed_and_truncated_files_are_named(rig, folder):
    here = rig(ring=make_ring(folder, "mmap"))
    os.truncate(folder / "shard-1.bin", 100)
    with pytest.raises(ReadError, match=r"shard-1\.bin has 100 bytes, expected at least"):
        here.run()
    here = rig(ring=make_ring(folder, "preadv"))

    def remove(step):
        if step == 5:
            os.remove(folder / "shard-1.bin")

    with pytest.raises(ReadError, match=r"shard-1\.bin was removed"):
        testing.run_steps(here.streamer, STEPS, here.device, on_step=remove)


def test_slow_disk_is_counted_and_logged_once(rig, folder, caplog):
    clock = testing.FakeClock()
    slow = threading.Event()

    class Slow(PreadReader):
        def read(self, source, out):
            clock.advance(1e-2 if slow.is_set() else 0)
            return super().read(source, out)

    here = rig(
        ring=make_ring(folder, Slow(), threads=1, clock=clock, slow_bytes_per_s=1e6), window=4
    )
    assert here.run().slow_fills == 0
    slow.set()
    with caplog.at_level(logging.WARNING):
        assert here.run().slow_fills == len(STEPS)
    warnings = [record.message for record in caplog.records if "MB/s" in record.message]
    assert len(warnings) == 1
    assert "expected at least 1:" in warnings[0]


def test_failed_registration_costs_speed_and_says_so(rig, caplog):
    driver = testing.FakeDriver(works=3)
    with caplog.at_level(logging.WARNING):
        store = make_store(pinner=Pinner(driver))
        report = store._pinner.wait()
    assert report.registered_bytes == 3 * LAYOUT.block_bytes(ITEMS)
    assert report.failed_bytes == 5 * LAYOUT.block_bytes(ITEMS)
    assert "stay pageable" in caplog.text
    assert "2 to 9 GB/s instead of 50" in caplog.text
    assert caplog.text.count("stay pageable") == 1
    ledger = rig(store=store).run()
    assert ledger.pageable_bytes == ledger.total_bytes * 5 // 8
    assert ledger.registered_bytes == report.registered_bytes
    store.close()
    assert driver.locked == {}


def test_host_memory_that_is_refused_is_named(folder):
    with pytest.raises(MemoryError, match="bytes of host memory were refused"):
        allocate(1 << 62)

    def refuse(nbytes):
        raise MemoryError(f"{nbytes} bytes of host memory were refused")

    with pytest.raises(MemoryError):
        HostStore(LAYOUT, STREAMED, allocate=refuse)
    with pytest.raises(MemoryError):
        make_ring(folder, "preadv", allocate=refuse)


# Every unit makes four puts: its table and three components.
@pytest.mark.parametrize("put", [0, 1, 2, 45, 47])
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_device_memory_that_is_refused_surfaces(rig, folder, put, tier):
    source = {"store": make_store()} if tier == "ram" else {"ring": make_ring(folder, "preadv")}
    here = rig(**source, fail_puts=[put])
    with pytest.raises(StreamError, match="could not be issued: MemoryError: RESOURCE_EXHAUSTED"):
        here.run()
    with pytest.raises(StreamError, match="could not be issued"):
        here.streamer.issue_ahead(0)
    here.recover()


@pytest.mark.parametrize("lag", [0, 10_000])
def test_copy_that_fails_on_the_way_surfaces(rig, folder, lag):
    here = rig(ring=make_ring(folder, "preadv"), fail_copies=[50], lag=lag)
    with pytest.raises((StreamError, RuntimeError), match="link broke"):
        here.run()
    here.recover()


def test_program_that_fails_surfaces(rig):
    here = rig(store=make_store(), lag=0)

    def broken():
        raise FloatingPointError("boom")

    with pytest.raises(StreamError, match=r"output of step 0 wave 0 .* FloatingPointError: boom"):
        here.run_program(broken)
    here.recover()


@pytest.mark.parametrize("step", [0, 1, 7, 20])
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_error_in_the_engine_between_two_steps(rig, folder, step, tier):
    """Copies and reads are queued deep when the run is given up."""
    source = {"store": make_store()} if tier == "ram" else {"ring": make_ring(folder, "preadv")}
    here = rig(**source)

    def fail(number):
        if number == step:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        testing.run_steps(here.streamer, STEPS, here.device, on_step=fail)
    here.recover()


def test_interrupt_while_issuing_stays_an_interrupt(rig):
    here = rig(store=make_store())

    def interrupt():
        if here.link.puts == 60:
            here.link.during_put = lambda: None
            raise KeyboardInterrupt

    here.link.during_put = interrupt
    with pytest.raises(KeyboardInterrupt):
        here.run()
    here.recover()


class Gate:
    """A reader that waits at read number `at` until it is opened."""

    def __init__(self, at):
        self.inner, self.at, self.reads = PreadReader(), at, 0
        self.lock, self.opened, self.reached = (
            threading.Lock(),
            threading.Event(),
            threading.Event(),
        )

    def read(self, source, out):
        with self.lock:
            number, self.reads = self.reads, self.reads + 1
        if number >= self.at:
            self.reached.set()
            self.opened.wait()
        return self.inner.read(source, out)

    def close(self):
        self.opened.set()
        self.inner.close()


@pytest.mark.parametrize("at", [0, 100])
def test_cancel_from_another_thread_ends_a_wait(rig, folder, at):
    gate = Gate(at)
    here = rig(ring=make_ring(folder, gate))

    def cancel():
        gate.reached.wait()
        here.streamer.cancel()
        gate.opened.set()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    with pytest.raises(StreamCancelled):
        here.run()
    canceller.join()
    with pytest.raises(StreamCancelled):
        here.streamer.finish()
    here.recover()


def test_cancel_between_steps_and_before_a_run(rig):
    here = rig(store=make_store())

    def cancel(step):
        if step == 5:
            here.streamer.cancel()

    with pytest.raises(StreamCancelled):
        testing.run_steps(here.streamer, STEPS, here.device, on_step=cancel)
    here.recover()
    here.streamer.cancel()
    with pytest.raises(StreamCancelled):
        here.streamer.start(STEPS)
    assert here.streamer.abort() is None
    here.run()


def test_watchdog_says_what_waits_for_what(rig, folder):
    gate = Gate(100)
    here = rig(ring=make_ring(folder, gate), timeout_s=0.05)
    with pytest.raises(StreamStalled) as caught:
        here.run()
    text = str(caught.value)
    assert "no progress for 0.05 s while waiting for disk for step" in text
    assert "reads running" in text
    assert re.search(
        r"step \d wave 0 \(layer \d, 6 items 0\.\.5, disk\): waiting for \d+ reads", text
    )
    # The reads have not come back: the slots cannot be used again yet, and abort says so.
    with pytest.raises(StreamStalled, match="copies and reads that are under way"):
        here.streamer.abort()
    gate.opened.set()
    here.streamer._monitor.timeout_s = 20
    here.recover()


def test_watchdog_of_a_device_that_hangs(rig):
    here = rig(store=make_store(), timeout_s=0.05, window=1)
    hang = threading.Event()
    with pytest.raises(StreamStalled, match=r"room for step [23]") as caught:
        here.run_program(hang.wait)
    with pytest.raises(StreamStalled):
        here.streamer.abort()
    assert "step 0 wave 0 (layer 0, 6 items 0..5, ram): computing" in str(caught.value)
    hang.set()
    here.streamer._monitor.timeout_s = 20
    here.recover()


def test_memory_that_nothing_can_give_back_is_an_error_not_a_hang(rig):
    here = rig(store=make_store(), window=1)
    here.streamer.start(STEPS)
    here.streamer.issue_ahead(0)
    with pytest.raises(StreamError, match="take and compute units in order"):
        here.streamer.issue_ahead(4)


def test_no_lock_is_held_while_bytes_move(rig, folder):
    """The lock cannot be taken twice: whoever held it here would wait for himself."""
    checks = []

    def free():
        lock = here.streamer._monitor.changed
        assert lock.acquire(timeout=10), "the lock is held across a copy"
        lock.release()
        checks.append(threading.current_thread().name)

    class Checked(PreadReader):
        def read(self, source, out):
            free()
            return super().read(source, out)

    here = rig(ring=make_ring(folder, Checked()))
    here.link.during_put = here.link.during_copy = free
    here.run()
    names = {name.rstrip("0123456789") for name in checks}
    assert names == {"MainThread", "stream-read-", "late-link"}


def test_filling_the_store_stops_at_the_first_error_and_names_it():
    calls = []

    def fill(layer, item, component, buffer):
        calls.append((layer, item))
        if (layer, item, component) == (1, 2, "scales"):
            raise OSError("bad sector")
        buffer[...] = 0

    store = HostStore(LAYOUT, STREAMED, policy="off")
    with pytest.raises(
        StreamError, match=r"loading scales of item 2, layer 1 failed: OSError: bad sector"
    ):
        store.fill(fill, threads=2)
    assert max(layer for layer, _ in calls) <= 3


def test_locations_that_do_not_fit_a_component_are_named(rig, folder):
    locate = testing.write_files(LAYOUT, folder)
    ring = DiskRing(
        LAYOUT,
        lambda layer, item, name: locate(layer, item, name)[:1],
        rows=ITEMS,
        slots=2,
    )
    here = rig(ring=ring, window=1)
    with pytest.raises(StreamError, match=r"item 0, layer 0 has 10 bytes in files, expected 15"):
        here.run()


def test_a_ring_serves_one_streamer(rig, folder):
    ring = make_ring(folder, "preadv")
    rig(ring=ring)
    with pytest.raises(RuntimeError, match="serves another streamer"):
        Streamer(LAYOUT, STREAMED, ring=ring, link=testing.LateLink())


def test_cold_warm_and_interrupted_runs_give_the_same_bytes(rig, folder):
    """The first run, a repeat, one after an abort, and one beside a colder cache."""
    here = rig(ring=make_ring(folder, "preadv"))
    here.run()
    warm = here.run()
    assert warm.major_faults == 0
    np.testing.assert_array_equal(warm.file_bytes, warm.total_bytes)
    with pytest.raises(ZeroDivisionError):
        testing.run_steps(here.streamer, STEPS, here.device, on_step=lambda step: 1 // (9 - step))
    here.recover()
