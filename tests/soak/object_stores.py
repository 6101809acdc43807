"""A process that downloads and deletes shards is killed at random moments, many times;
one that pushes to S3 at each of its requests; and several write to one URL at once.

``SOAK_CASES`` says how many (50), ``SOAK_SEED`` from which seed (0).  The figures go to
benchmarks/results/soak-object-stores.txt.
"""

import collections
import multiprocessing
import os
import shutil
import signal
import time

import numpy as np
import pytest
from storages import (
    Faults,
    FileServer,
    KillingProxy,
    PassingProxy,
    s3_options,
    s3_server,
)
from test_mirror import check_kills, make_cache

import loaderkit
from loaderkit.errors import CacheError, OtherWriterError

KILLS = int(os.environ.get("SOAK_CASES", "50"))
SEED = int(os.environ.get("SOAK_SEED", "0"))


def test_killed_at_random_moments_nothing_is_left_half(tmp_path):
    make_cache(tmp_path / "served")
    server = FileServer(tmp_path / "served", faults=Faults())
    check_kills(server.url, tmp_path / "m", kills=KILLS, seed=SEED)
    server.stop()


FORK = multiprocessing.get_context("fork")
OLD, NEW = list(range(30)), list(range(100, 140))


def push_there(folder, url, options, overwrite):
    loaderkit.push(folder, url, storage_options=options, overwrite=overwrite)


def push_again(folder, url, options, overwrite, bucket):
    """Push, and do what it says where another push was killed."""
    try:
        push_there(folder, url, options, overwrite)
    except OtherWriterError as error:
        if f"delete {url}/.writing" in str(error):
            bucket.rm_file(f"{url}/.writing")
            push_there(folder, url, options, overwrite)


def read_there(url, options, mirror):
    """What a reader finds; None where there is no cache."""
    try:
        cache = loaderkit.open_cache(url, storage_options=options, mirror=mirror)
    except CacheError as error:
        return None if "There is no cache at" in str(error) else str(error)
    return [cache[row] for row in range(len(cache))]


@pytest.mark.needs("s3")
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("at", ["request", "answer"])
def test_a_push_that_is_killed_at_any_request_leaves_a_whole_cache_or_none(
    tmp_path, overwrite, at
):
    import s3fs

    for name, samples in (("old", OLD), ("new", NEW)):
        loaderkit.pack(samples, tmp_path / name, shard_bytes=200, workers=0)
    wanted = {
        file.name
        for file in (tmp_path / "new").iterdir()
        if file.is_file() and file.name != ".lock"
    }
    with s3_server() as server:
        direct = s3_options(server)
        bucket = s3fs.S3FileSystem(**direct, skip_instance_cache=True)
        bucket.mkdir("bucket")
        proxy = KillingProxy(server)
        options = s3_options(proxy.url)
        number, killed = 0, 0
        while killed == number:
            number += 1
            url = f"s3://bucket/{number}"
            if overwrite:
                loaderkit.push(tmp_path / "old", url, storage_options=direct)
            process = FORK.Process(
                target=push_there, args=(tmp_path / "new", url, options, overwrite)
            )
            # Before it has started nobody asks the proxy.
            proxy.aim_at(process, **{at: number})
            process.start()
            process.join()
            killed += process.exitcode == -signal.SIGKILL

            seen = read_there(url, direct, tmp_path / f"m{number}")
            assert seen in (OLD if overwrite else None, NEW)
            push_again(tmp_path / "new", url, direct, overwrite, bucket)
            left = {
                name.rsplit("/", 1)[-1]
                for name in bucket.ls(f"bucket/{number}", refresh=True)
            }
            assert left - {".writable"} == wanted
            assert read_there(url, direct, tmp_path / f"n{number}") == NEW
        print(f"{killed} kills, overwrite={overwrite}, at each {at}")
        assert killed > 8
        proxy.stop()


SHARED, EXTENDED, OTHER = list(range(30)), list(range(60)), list(range(100, 140))
JOBS = ("pack", "push", "push --overwrite", "extend", "concat")


class DelayingProxy(PassingProxy):
    """Passes requests on after a drawn time.

    Args:
        url: Of the store.
        rng: Draws.
    """

    def __init__(self, url, rng):
        self._rng = rng
        super().__init__(url)

    def refusal_of(self, _headers):
        time.sleep(self._rng.exponential(0.02))


def write_as(job, folder, url, options, outcome):
    """Write to the URL by one command, from a node with a disk of its own."""
    common = {"storage_options": options}
    try:
        if job == "pack":
            loaderkit.pack(
                OTHER,
                url,
                **common,
                mirror=folder / "m",
                shard_bytes=200,
                workers=0,
            )
        elif job == "extend":
            loaderkit.pack(SHARED, folder / "c", shard_bytes=200, workers=0)
            loaderkit.extend(folder / "c", EXTENDED[30:])
            loaderkit.push(folder / "c", url, **common, overwrite=True)
        elif job == "concat":
            for name, samples in (("a", SHARED), ("b", EXTENDED[30:])):
                loaderkit.pack(samples, folder / name, shard_bytes=200, workers=0)
            loaderkit.concat([folder / "a", folder / "b"], folder / "c")
            loaderkit.push(folder / "c", url, **common)
        else:
            loaderkit.pack(SHARED, folder / "c", shard_bytes=200, workers=0)
            overwrite = job == "push --overwrite"
            loaderkit.push(folder / "c", url, **common, overwrite=overwrite)
    except CacheError as error:
        other_was_quicker = "has packed other samples into" in str(error)
        is_clear = isinstance(error, OtherWriterError) or other_was_quicker
        outcome.write_text("refused" if is_clear else f"{type(error)} {error}")
    else:
        outcome.write_text("won")


@pytest.mark.needs("s3")
def test_of_writers_at_once_on_s3_one_cache_is_there_whole(tmp_path):
    import s3fs

    loaderkit.pack(OTHER, tmp_path / "last", shard_bytes=200, workers=0)
    counts = collections.Counter()
    with s3_server() as server:
        direct = s3_options(server)
        bucket = s3fs.S3FileSystem(**direct, skip_instance_cache=True)
        bucket.mkdir("bucket")
        rng = np.random.default_rng(SEED)
        proxy = DelayingProxy(server, rng)
        for case in range(KILLS):
            folder = tmp_path / f"{case}"
            url = f"s3://bucket/drawn {case}"
            count = int(rng.integers(2, 5))
            jobs = [JOBS[rng.integers(len(JOBS))] for _ in range(count)]
            processes = []
            for number, job in enumerate(jobs):
                own = folder / f"{number}"
                own.mkdir(parents=True)
                arguments = (job, own, url, s3_options(proxy.url), own / "outcome")
                processes.append(FORK.Process(target=write_as, args=arguments))
            for process in processes:
                process.start()
            is_killing = rng.random() < 0.5
            if is_killing:
                time.sleep(rng.uniform(0.1, 1.5))
                processes[rng.integers(count)].kill()
            for process in processes:
                process.join()
            outcomes = [
                file.read_text() if file.exists() else "killed"
                for file in (folder / f"{n}" / "outcome" for n in range(count))
            ]
            counts.update(outcomes)
            story = (case, jobs, outcomes)
            assert set(outcomes) <= {"won", "refused", "killed"}, story

            seen = read_there(url, direct, folder / "reader")
            wholes = [SHARED, EXTENDED, OTHER]
            assert seen in (wholes if "won" in outcomes else [None, *wholes]), story
            if seen is not None:
                assert loaderkit.verify(url, storage_options=direct).ok, story
            names = {path.rsplit("/", 1)[-1] for path in bucket.find(url, refresh=True)}
            if "killed" not in outcomes:
                loaderkit.pull(url, folder / "pulled", storage_options=direct)
                pulled = {file.name for file in (folder / "pulled").glob("[!.]*")}
                assert names == pulled, story
            else:
                push_again(tmp_path / "last", url, direct, True, bucket)
                names = {p.rsplit("/", 1)[-1] for p in bucket.find(url, refresh=True)}
                last = {file.name for file in (tmp_path / "last").glob("[!.]*")}
                assert names - {".writable"} == last, story
            shutil.rmtree(folder)
        proxy.stop()
    print(f"{KILLS} cases: {dict(counts)}")
