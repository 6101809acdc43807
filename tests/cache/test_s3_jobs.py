"""Jobs on caches in S3 that are killed, or harmed, at one of their requests.

The long version draws them: tests/soak/killed_s3_jobs.py.
"""

import pytest
from s3_jobs import BUCKET, SETTINGS, Harm, Jobs
from storages import PassingProxy, s3_options, s3_server

from loaderkit.cache.object_store import ObjectStore

pytestmark = [pytest.mark.needs("s3"), pytest.mark.slow]

LAST = -1


@pytest.fixture(scope="module")
def server():
    with s3_server() as url:
        yield url


@pytest.fixture(scope="module")
def jobs(server, tmp_path_factory):
    jobs = Jobs(server, tmp_path_factory.mktemp("jobs"))
    yield jobs
    jobs.close()


@pytest.mark.parametrize(
    ("name", "harm", "number"),
    [
        ("pull", Harm.KILL_AFTER, 3),
        ("push in parts", Harm.KILL_AFTER, 9),
        ("push", Harm.LOST, LAST),
    ],
)
def test_a_reader_sees_a_whole_cache_or_none_and_nothing_stays(
    jobs, name, harm, number
):
    if number == LAST:
        # The manifest is there, and the client asks again by itself.
        number = jobs.count_requests(SETTINGS[name]) - 1

    ending, hits, broken = jobs.broken_laws(SETTINGS[name], harm, number)

    assert ending.status == ("ok" if harm is Harm.LOST else "killed")
    assert (hits, broken) == (1, [])


def test_parts_that_stay_are_seen(jobs):
    """By an upload to no file of a cache, which nobody gives up."""

    def plant(url):
        key = f"{url.removeprefix(f's3://{BUCKET}/')}/foreign"
        jobs.bucket.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)

    _, _, broken = jobs.broken_laws(SETTINGS["push"], Harm.NONE, 0, plant=plant)

    assert len(broken) == 1
    assert "foreign" in broken[0]


def test_an_upload_that_another_writer_gives_up_is_made_again(server, tmp_path):
    class GivingUp(PassingProxy):
        """Has all uploads given up when the first part is there."""

        gave_up = 0

        def note_answer(self):
            if not self.gave_up and store.unfinished_uploads():
                for name, uploads in store.unfinished_uploads().items():
                    for upload in uploads:
                        self.gave_up += 1
                        store.give_up_upload(name, upload)

    import s3fs

    s3fs.S3FileSystem(**s3_options(server), skip_instance_cache=True).mkdir("parts")
    url = "s3://parts/cache"
    store = ObjectStore(url, s3_options(server))
    proxy = GivingUp(server)
    content = bytes(range(256)) * (80 << 10)
    (tmp_path / "file").write_bytes(content)

    ObjectStore(url, s3_options(proxy.url)).write_file("a.h5", tmp_path / "file")

    assert proxy.gave_up
    assert store.read_range("a.h5", 0, len(content)) == content
    assert store.unfinished_uploads() == {}
    proxy.stop()
