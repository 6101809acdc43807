"""Pieces of files side by side: the bytes of the files, and nothing else."""

import ctypes
import gc
import mmap
import os

import numpy as np
import pytest

from loaderkit.cache.address_space import (
    AddressRange,
    PageReadAhead,
    free_mappings,
    is_available,
    map_whole_file,
    read_at_random,
)

PAGE = mmap.PAGESIZE

pytestmark = pytest.mark.skipif(not is_available(), reason="no mmap of one's own here")


@pytest.fixture
def files(tmp_path):
    descriptors = []
    for number in range(3):
        file = tmp_path / str(number)
        file.write_bytes(bytes([number + 1]) * (PAGE + 100))
        descriptors.append(os.open(file, os.O_RDONLY))
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def test_pieces_of_files_lie_side_by_side(files):
    addresses = AddressRange(6 * PAGE)

    for number, descriptor in enumerate(files):
        addresses.map_file(descriptor, PAGE, nbytes=2 * PAGE, at=2 * number * PAGE)

    array = addresses.as_array()
    for number in range(3):
        start = 2 * number * PAGE
        assert (array[start : start + 100] == number + 1).all()


def test_pieces_of_files_are_read_from_any_byte_on(files):
    addresses = AddressRange(3 * PAGE)
    addresses.map_file(files[0], 0, nbytes=PAGE, at=0)

    addresses.copy_file(files[1], PAGE - 7, nbytes=50, at=PAGE)

    array = addresses.as_array()
    assert (array[:PAGE] == 1).all()
    assert array[PAGE : 2 * PAGE].tolist() == [2] * 50 + [0] * (PAGE - 50)


def test_a_file_that_ends_before_the_piece_is_an_error(files):
    addresses = AddressRange(PAGE)

    with pytest.raises(OSError, match="ended before"):
        addresses.copy_file(files[1], PAGE + 90, nbytes=50, at=0)


@pytest.mark.slow
def test_an_array_keeps_the_range_alive_and_cannot_be_written_to(files):
    addresses = AddressRange(PAGE)
    addresses.map_file(files[1], 0, nbytes=PAGE, at=0)
    array = addresses.as_array()[10:20]

    del addresses
    gc.collect()

    assert array.tolist() == [2] * 10
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_a_range_that_is_let_go_gives_its_mappings_back(files):
    before = free_mappings()
    for _ in range(200):
        addresses = AddressRange(4 * PAGE)
        addresses.map_file(files[0], 0, nbytes=PAGE, at=PAGE)

    del addresses

    assert free_mappings() >= before - 50


def test_a_file_is_mapped_whole_and_not_kept_open(files):
    array = map_whole_file(os.dup(files[2]), PAGE + 100)
    assert array.tolist() == [3] * (PAGE + 100)


def test_a_piece_outside_of_the_range_is_refused(files):
    addresses = AddressRange(PAGE)
    with pytest.raises(ValueError, match="of a range of"):
        addresses.map_file(files[0], 0, nbytes=PAGE, at=PAGE)


def test_more_addresses_than_the_system_has_is_an_error():
    with pytest.raises(OSError, match="memory"):
        AddressRange(1 << 62)


def test_a_descriptor_that_is_none_is_an_error():
    addresses = AddressRange(PAGE)
    with pytest.raises(OSError, match="descriptor"):
        addresses.map_file(987_654, 0, nbytes=PAGE, at=0)
    assert np.asarray(addresses).shape == (PAGE,)


PAGES = 4096


@pytest.fixture
def cold_file(tmp_path):
    """A file of which no page is in memory."""
    file = tmp_path / "cold"
    file.write_bytes(os.urandom(PAGES * PAGE))
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(map_whole_file(descriptor, PAGES * PAGE)):
        pytest.skip("this file system keeps all pages in memory")
    yield descriptor
    os.close(descriptor)


def resident_pages(mapped):
    """List the pages of a mapped file that are in memory: mincore(2)."""
    libc = ctypes.CDLL(None)
    page_states = (ctypes.c_ubyte * PAGES)()
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert libc.mincore(mapped.ctypes.data, mapped.nbytes, page_states) == 0
    return [page for page in range(PAGES) if page_states[page] & 1]


def pages_read_ahead(descriptor, *batches):
    """Ask for batches of rows of 512 bytes; say which pages came of it."""
    mapped = map_whole_file(descriptor, PAGES * PAGE)
    read_at_random(mapped)
    rows, ahead = mapped.reshape(-1, 512), PageReadAhead()
    for runs in batches:
        starts, lengths = np.array(runs, np.int64).T
        ahead.ask(rows, starts, lengths)
        for start, length in runs:
            assert len(rows[start : start + length].tobytes()) == 512 * length
    return resident_pages(mapped)


def test_only_the_pages_of_a_batch_are_read(cold_file):
    rows = PAGE // 512

    resident = pages_read_ahead(
        cold_file, [(900 * rows, rows), (40 * rows, 3 * rows), (7, 2)]
    )

    assert resident == [0, 1, 40, 41, 42, 900]


def test_of_batches_that_follow_each_other_the_next_is_read_too(cold_file):
    rows = PAGE // 512

    resident = pages_read_ahead(cold_file, [(0, 10 * rows)], [(10 * rows, 10 * rows)])

    assert resident[:20] == list(range(20))
    assert resident[-1] <= 29
