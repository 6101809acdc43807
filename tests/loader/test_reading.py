"""What a plan says of reading: the bytes from disk, and the samples a second."""

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import clients
import numpy as np
import pytest
import torch

from loaderkit import build_loader, pack
from loaderkit.cache import stored_arrays as arrays
from loaderkit.cache.stored_arrays import DiskSpeed, StoredArrays, measure_disk
from loaderkit.loader.reading import forecast_reading

PAGE = arrays.PAGE_BYTES
DISK = DiskSpeed(1e9, 50_000.0, compressed_share=0.9, measured_s=0.1)


def cache_of(values, samples, *, room):
    """Describe a cache whose arrays have so many bytes a sample."""
    sizes = tuple(round(value * samples) for value in values)
    return StoredArrays(
        samples=samples,
        file_bytes=sum(sizes),
        array_bytes=sizes,
        disk_bytes=tuple(map(float, sizes)),
        read_bytes=tuple(map(float, values)),
        is_compressed=False,
        free_bytes=round(room * sum(sizes)),
        files=(),
    )


def forecast(stored, order="shuffled", *, rate=1e5, disk=DISK, **more):
    settings = {"samples": stored.samples, "batches": stored.samples // 16, **more}
    return forecast_reading(
        stored, order=order, samples_per_s=rate, disk=disk, **settings
    )


def pages_read(values, samples, room_pages, epochs=4):
    """Play epochs through a cache of pages in which the longest unused goes first."""
    generator, memory, missed = np.random.default_rng(0), OrderedDict(), 0
    for epoch in range(epochs):
        for sample in generator.permutation(samples):
            for number, value in enumerate(values):
                begin = int(sample * value)
                for page in range(begin // PAGE, int(begin + value - 1) // PAGE + 1):
                    if (number, page) in memory:
                        memory.move_to_end((number, page))
                        continue
                    missed += epoch > 0
                    memory[number, page] = None
                    if len(memory) > room_pages:
                        memory.popitem(last=False)
    return missed / (epochs - 1)


@pytest.mark.slow
@pytest.mark.parametrize("room", [0.1, 0.25, 0.5, 0.75])
@pytest.mark.parametrize(
    ("values", "samples"),
    [([50_000], 300), ([300, 1200, 40], 6000), ([9000, 50], 1500), ([8, 8], 60_000)],
    ids=["large", "molecules", "a large and a small field", "numbers"],
)
def test_shuffled_epochs_read_what_a_cache_of_pages_would_miss(values, samples, room):
    stored = cache_of(values, samples, room=room)

    predicted = forecast(stored).epoch_bytes / PAGE

    was = pages_read(values, samples, stored.free_bytes // PAGE)
    assert predicted == pytest.approx(was, rel=0.08)


def test_what_fits_memory_is_read_once():
    predicted = forecast(cache_of([1000], 1000, room=1.1))

    assert predicted.regime == "fits memory"
    assert (predicted.first_epoch_bytes, predicted.epoch_bytes) == (1_000_000, 0)
    assert predicted.samples_per_s == 1e5
    assert "then nothing, about 100,000 samples/s" in str(predicted)


def test_what_fits_only_as_it_is_compressed_is_said():
    stored = replace(
        cache_of([1000], 1000, room=0.5), file_bytes=400_000, is_compressed=True
    )

    assert forecast(stored).regime == "fits memory compressed"


def test_part_of_a_cache_that_fits_is_read_once():
    stored = cache_of([5000], 1000, room=0.5)

    assert forecast(stored).regime == "larger than memory"
    assert forecast(stored, samples=400).regime == "fits memory"


@pytest.mark.parametrize("order", ["in order", "shuffled in blocks"])
def test_in_order_and_in_blocks_each_page_is_read_once(order):
    stored = cache_of([300, 20], 10**6, room=0.3)

    assert forecast(stored, order).epoch_bytes == stored.file_bytes


def test_blocks_that_do_not_fit_memory_help_nothing():
    stored = cache_of([30_000], 10_000, room=0.1)  # 8 blocks have 8,192 samples

    assert (
        forecast(stored, "shuffled in blocks").epoch_bytes
        == forecast(stored).epoch_bytes
    )
    assert forecast(stored).better is None


def test_what_would_be_faster_is_named():
    predicted = forecast(cache_of([300, 20], 10**6, room=0.3))

    assert predicted.better.samples_per_s > 2 * predicted.samples_per_s
    assert predicted.better.epoch_bytes < predicted.epoch_bytes / 4
    assert 'shuffle="block" would read 305 MiB' in str(predicted)
    assert predicted.compressed_bytes is None


def test_compression_is_named_where_the_files_would_fit():
    stored, disk = cache_of([300], 10**6, room=0.3), replace(DISK, compressed_share=0.2)

    predicted = forecast(stored, disk=disk)

    assert predicted.compressed_bytes == 60_000_000
    assert 'pack(compression="gzip")' in str(predicted)
    packed = replace(stored, is_compressed=True)
    assert forecast(packed, disk=disk).compressed_bytes is None


def test_the_disk_and_the_gathering_are_waited_for_in_turn():
    stored = cache_of([40_000], 4000, room=0.2)

    predicted = forecast(stored, "in order", rate=10_000.0)

    disk_s = stored.file_bytes / 1e9 + 250 / 50_000
    assert predicted.samples_per_s == pytest.approx(4000 / (0.4 + disk_s))
    assert forecast(stored, "in order", disk=None).samples_per_s is None


@pytest.fixture
def packed(tmp_path):
    return pack([clients.graph(i) for i in range(40)], tmp_path / "c.lk", workers=0)


def test_a_loader_of_a_cache_says_its_regime_and_one_of_a_list_does_not(packed):
    plan = build_loader(packed, batch_size=8, shuffle=True).plan

    assert plan.reading.regime == "fits memory"
    assert plan.reading.order == "shuffled"
    assert f"\n{'reading':<24}fits memory: " in str(plan)
    assert "fits memory" in plan._repr_html_()
    assert build_loader([1, 2, 3]).plan.reading is None


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, "in order"),
        ({"shuffle": "block"}, "shuffled in blocks"),
        ({"bucket_by": "nodes"}, "shuffled"),
        ({"sampler": [3, 1]}, "shuffled"),
    ],
)
def test_the_order_is_that_of_the_loader(packed, options, order):
    part = torch.utils.data.Subset(packed, range(20))
    for dataset in (packed, packed[:20], part):
        reading = build_loader(dataset, batch_size=4, **options).plan.reading
        assert reading.order == order


def test_a_cache_larger_than_memory_has_its_disk_measured(packed, monkeypatch):
    # A machine of two pages: a cache larger than this one's memory is none for a test.
    monkeypatch.setattr(
        "loaderkit.datasets.cached_samples.page_cache_bytes", lambda: 2 * PAGE
    )

    reading = build_loader(packed, batch_size=8, shuffle=True).plan.reading

    assert reading.regime == "larger than memory"
    assert reading.disk.bytes_per_s > 0
    assert reading.disk.pieces_per_s > 0
    assert 0 < reading.disk.compressed_share <= 1.1
    assert reading.samples_per_s > 0
    assert "pages/s at random, measured in" in str(reading)
    unmeasured = build_loader(packed, batch_size=8, probe=False).plan.reading
    assert unmeasured.disk is None
    assert "samples/s" not in str(unmeasured)


def test_a_disk_that_cannot_be_measured_is_not(tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    assert measure_disk([tmp_path / "none"]) is None
    assert measure_disk([empty]) is None
    file = tmp_path / "file"
    file.write_bytes(bytes(10 * PAGE))
    assert measure_disk([file]).pieces_per_s > 0
    monkeypatch.delattr("os.posix_fadvise")
    assert measure_disk([file]) is None


def test_of_a_compressed_cache_what_is_mapped_takes_its_own_bytes(tmp_path):
    noise = np.random.default_rng(0).bytes(4000)
    samples = [{"noise": np.frombuffer(noise, "u1"), "zeros": np.zeros(2000)}] * 20
    dataset = pack(samples, tmp_path / "c.lk", workers=0, compression="gzip")

    stored = dataset.stored_arrays()

    disk_bytes = dict(zip(stored.array_bytes, stored.disk_bytes, strict=True))
    assert stored.is_compressed
    assert disk_bytes[20 * 4000] == 20 * 4000
    # What the file has beside both counts as theirs.
    assert disk_bytes[20 * 16_000] < 0.1 * 20 * 16_000
    assert sum(stored.disk_bytes) <= stored.file_bytes


def test_the_sums_are_those_of_the_files(packed):
    stored = packed.stored_arrays()

    files = list(Path(packed.cache).glob("*.h5"))
    assert stored.file_bytes == sum(file.stat().st_size for file in files)
    assert stored.unpacked_bytes <= stored.file_bytes
    assert stored.samples == 40
    assert set(stored.files) == set(files)
