"""A process that downloads and deletes shards is killed at random moments, many times;
and one that pushes to S3 at each of its requests.

``SOAK_CASES`` says how many (50), ``SOAK_SEED`` from which seed (0).  The figures go to
benchmarks/results/soak-object-stores.txt.
"""

import multiprocessing
import os
import signal

import pytest
from storages import Faults, FileServer, KillingProxy, s3_options, s3_server
from test_mirror import check_kills, make_cache

import loaderkit
from loaderkit.cache.transfer import OtherWriterError
from loaderkit.errors import CacheError

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
