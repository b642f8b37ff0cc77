"""Readers of file ranges, alone."""

import errno
import os

import numpy as np
import pytest

from streaming import FileRange, ReadError, open_reader
from streaming.readers import READERS, DirectReader, PreadReader
from streaming.slab import PAGE_BYTES
from streaming.store import allocate


@pytest.fixture(params=sorted(READERS))
def reader(request):
    made = open_reader(request.param)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data.bin"
    values = np.random.default_rng(1).integers(0, 256, 5 * PAGE_BYTES + 77, np.uint8)
    path.write_bytes(values.tobytes())
    return str(path), values


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, PAGE_BYTES),
        (PAGE_BYTES, 2 * PAGE_BYTES),
        (1, 1),
        (4095, 2),
        (100, 3 * PAGE_BYTES),
        (5 * PAGE_BYTES, 77),
        (4 * PAGE_BYTES - 1, PAGE_BYTES + 78),
        (12, 0),
    ],
)
def test_every_reader_gives_the_bytes_of_the_range(reader, file, offset, nbytes):
    path, values = file
    out = allocate(nbytes)
    asked = reader.read(FileRange(path, offset, nbytes), out)
    np.testing.assert_array_equal(out, values[offset : offset + nbytes])
    assert asked >= nbytes


def test_direct_reads_of_whole_pages_need_no_second_copy(file):
    path, values = file
    targets = []

    def preadv(descriptor, buffers, offset):
        targets.append(len(buffers[0]))
        return os.preadv(descriptor, buffers, offset)

    reader = DirectReader(preadv)
    out = allocate(4 * PAGE_BYTES)
    assert reader.read(FileRange(path, PAGE_BYTES, 4 * PAGE_BYTES), out) == 4 * PAGE_BYTES
    np.testing.assert_array_equal(out, values[PAGE_BYTES : 5 * PAGE_BYTES])
    assert targets == [4 * PAGE_BYTES]
    # A range across a page border costs both pages.
    small = np.empty(2, np.uint8)
    assert reader.read(FileRange(path, PAGE_BYTES - 1, 2), small) == 2 * PAGE_BYTES
    reader.close()


def test_reads_that_come_in_parts_are_completed(file):
    path, values = file

    def stingy(descriptor, buffers, offset):
        return os.preadv(descriptor, [buffers[0][:1000]], offset)

    reader, out = PreadReader(stingy), np.empty(PAGE_BYTES, np.uint8)
    reader.read(FileRange(path, 3, PAGE_BYTES), out)
    np.testing.assert_array_equal(out, values[3 : 3 + PAGE_BYTES])
    reader.close()


def test_file_system_without_direct_reads_is_read_through_the_cache(file, monkeypatch, caplog):
    path, values = file
    opening = os.open

    def refuse(path, flags):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opening(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    reader, out = DirectReader(), np.empty(PAGE_BYTES, np.uint8)
    reader.read(FileRange(path, 5, PAGE_BYTES), out)
    np.testing.assert_array_equal(out, values[5 : 5 + PAGE_BYTES])
    assert "no direct reads" in caplog.text
    reader.close()


def test_range_beyond_the_end_is_named(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    with pytest.raises(ReadError, match="has 3 bytes, expected at least 9"):
        open_reader("direct").read(FileRange(str(tmp_path / "x"), 0, 9), np.empty(9, np.uint8))


def test_unknown_reader_is_named():
    with pytest.raises(ValueError, match="'aio', expected one of preadv, mmap, direct"):
        open_reader("aio")
