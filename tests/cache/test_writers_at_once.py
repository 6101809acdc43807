"""Several writers of one URL, and what each of their requests may meet.

An interleaving is drawn: of the writers that have a request to make, one makes it, then
again one.  Some are killed before a request.  Whatever the order: the URL holds the
whole cache of one writer, and of the others nothing.
"""

import threading

import numpy as np
import pytest

import loaderkit
from loaderkit.cache import transfer
from loaderkit.cache.files import load_manifest
from loaderkit.cache.layout import MANIFEST
from loaderkit.cache.transfer import copy_to_store
from loaderkit.errors import CacheError, OtherWriterError

CACHES = ("first", "longer", "other")


class KilledError(BaseException):
    """The writer is killed: it makes no request any more."""


class Turns:
    """Lets one of several threads go on at a time, drawn.

    Args:
        rng: Draws.
        writers: So many threads.
        kill_at: By writer, before which of its requests it is killed.
    """

    def __init__(self, rng, writers, kill_at):
        self._rng = rng
        self._kill_at = kill_at
        self._requests = dict.fromkeys(range(writers), 0)
        self._condition = threading.Condition()
        self._running = set(range(writers))
        self._waiting = set()

    def wait_for(self, writer):
        """Wait for one's turn."""
        with self._condition:
            self._running.discard(writer)
            self._waiting.add(writer)
            self._draw()
            self._condition.wait_for(lambda: writer in self._running)
            self._requests[writer] += 1
            if self._requests[writer] >= self._kill_at.get(writer, np.inf):
                raise KilledError

    def end(self, writer):
        """Take no turn any more."""
        with self._condition:
            self._running.discard(writer)
            self._draw()

    def _draw(self):
        if self._running or not self._waiting:
            return
        drawn = int(self._rng.choice(sorted(self._waiting)))
        self._waiting.discard(drawn)
        self._running.add(drawn)
        self._condition.notify_all()


class InMemory:
    """A store like S3: each request is done whole or not at all, one after the other.

    Args:
        files: What is there; one dict for all writers.
        take_turn: Called before each request.
    """

    url = "memory://there"

    def __init__(self, files, take_turn=lambda: None):
        self._files = files
        self._take_turn = take_turn

    def read_file(self, name, _most_bytes):
        self._take_turn()
        if name not in self._files:
            raise FileNotFoundError(name)
        return self._files[name]

    def read_range(self, name, start, stop):
        return self.read_file(name, stop)[start:stop]

    def sizes(self):
        self._take_turn()
        return {name: len(content) for name, content in self._files.items()}

    def write_file(self, name, file):
        self._take_turn()
        self._files[name] = file.read_bytes()

    def commit(self, name, content, *, replace):
        self._take_turn()
        if not replace and name in self._files:
            raise FileExistsError(name)
        self._files[name] = content

    def remove(self, name):
        self._take_turn()
        self._files.pop(name, None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Caches of which two have shards in common."""
    folder = tmp_path_factory.mktemp("caches")
    first = list(range(8))
    for name, samples in (
        ("first", first),
        ("longer", [*first, *range(8, 12)]),
        ("other", list(range(100, 108))),
    ):
        loaderkit.pack(samples, folder / name, shard_bytes=100, workers=0)
    shards = [set(load_manifest(folder / name).files) for name in CACHES[:2]]
    assert shards[0] & shards[1]
    return {name: folder / name for name in CACHES}


def files_of(folder):
    names = {MANIFEST, *load_manifest(folder).files}
    return {name: (folder / name).read_bytes() for name in names}


def write_at_once(folders, files, writers, rng, kill_at, store_class):
    """Let writers write in a drawn order.

    Args:
        folders: Caches by name.
        files: The store's.
        writers: Of each the name of its cache, and whether it replaces one.
        rng: Draws.
        kill_at: By writer, before which request it is killed.
        store_class: Of the store.

    Returns:
        Of each writer "won", "refused" or "killed".
    """
    turns = Turns(rng, len(writers), kill_at)
    outcomes = [None] * len(writers)

    def write(number):
        name, overwrite = writers[number]
        store = store_class(files, lambda: turns.wait_for(number))
        try:
            target = transfer.ask_to_write(store, overwrite=overwrite)
            transfer.copy_to_target(folders[name], target, (0.0,) * 1000)
            outcomes[number] = "won"
        except OtherWriterError:
            outcomes[number] = "refused"
        except KilledError:
            outcomes[number] = "killed"
        except CacheError as error:
            outcomes[number] = repr(error)
        finally:
            turns.end(number)

    threads = [
        threading.Thread(target=write, args=(number,)) for number in range(len(writers))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def check_drawn(folders, rng, *, kills, store_class=InMemory):
    """Let drawn writers write in a drawn order, and see what is there then."""
    count = int(rng.integers(2, 5))
    writers = [
        (CACHES[rng.integers(len(CACHES))], bool(rng.random() < 0.5))
        for _ in range(count)
    ]
    before = [None, *CACHES][rng.integers(1 + len(CACHES))]
    files = {} if before is None else files_of(folders[before])
    kill_at = {}
    if kills:
        kill_at = {int(rng.integers(count)): int(rng.integers(1, 25))}

    outcomes = write_at_once(folders, files, writers, rng, kill_at, store_class)

    story = (before, writers, kill_at, outcomes, sorted(files))
    assert set(outcomes) <= {"won", "refused", "killed"}, story
    # What a killed one leaves beside a whole cache goes with the next that replaces it.
    left = {name for name in files if name != ".writable"}
    wrote = {
        name
        for (name, _), outcome in zip(writers, outcomes, strict=True)
        if outcome in ("won", "killed")
    }
    standing = [
        name
        for name in {*wrote, *([before] if before else [])}
        if files.get(MANIFEST) == (folders[name] / MANIFEST).read_bytes()
    ]
    if "won" in outcomes or before:
        assert len(standing) == 1, story
        expected = files_of(folders[standing[0]])
        assert expected.items() <= files.items(), story
        if "killed" not in outcomes:
            assert left == set(expected), story
    if "killed" in outcomes:
        files.pop(".writing", None)
        copy_to_store(folders["other"], InMemory(files), overwrite=True)
        files.pop(".writable", None)
        assert files == files_of(folders["other"]), story
    return outcomes


@pytest.mark.parametrize("kills", [False, True])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))]
)
def test_in_any_order_one_writers_cache_is_there_whole(folders, seed, kills):
    rng = np.random.default_rng([seed, kills])
    for _ in range(20):
        check_drawn(folders, rng, kills=kills)


class LettingAllIn(InMemory):
    """A store in which each of several writers is the only one who removes files."""

    def commit(self, name, content, *, replace):
        super().commit(name, content, replace=replace or name == ".writing")


@pytest.mark.slow
def test_without_the_claim_a_shard_is_lost(folders):
    """What the test above would say of it."""
    rng = np.random.default_rng(0)

    def check_many():
        for _ in range(2000):
            check_drawn(folders, rng, kills=False, store_class=LettingAllIn)

    with pytest.raises(AssertionError, match="won"):
        check_many()


def test_who_may_not_remove_is_told_before_a_cache_is_replaced(folders):
    class Keeping(InMemory):
        def remove(self, name):
            message = f"{name} could not be removed."
            raise CacheError(message, why="it is not allowed", fix="other credentials")

    files = files_of(folders["first"])
    with pytest.raises(CacheError, match="writable could not be removed"):
        copy_to_store(folders["other"], Keeping(files), overwrite=True)
    assert ".writing" not in files

    files = {"00007-0123456789abcdef.h5": b"of a push that was killed"}
    copy_to_store(folders["first"], Keeping(files), overwrite=False)
    assert files_of(folders["first"]).items() <= files.items()
    assert ".writing" not in files


def test_what_a_killed_push_left_goes_with_the_first_that_succeeds(folders):
    names = sorted(load_manifest(folders["other"]).files)
    left = {names[0]: (folders["other"] / names[0]).read_bytes()}
    files = {**left, "notes.txt": b"of the user"}

    copy_to_store(folders["first"], InMemory(files), overwrite=False)

    expected = {*files_of(folders["first"]), "notes.txt"}
    assert set(files) == expected
