"""What every ``Storage`` must do; a third party calls ``check_storage`` on its own."""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING

import pytest

from loaderkit.errors import DamagedCacheError

if TYPE_CHECKING:
    from pathlib import Path

    from loaderkit.cache.storage import Storage


def check_storage(storage: Storage, folder: Path) -> None:
    """See that a storage keeps what it promises.

    Args:
        storage: A storage at a place where there is nothing yet.
        folder: An empty folder on local disk.
    """
    _check_nothing_is_there(storage)
    file = folder / "shard"
    content = bytes(range(256)) * 40
    file.write_bytes(content)
    storage.write_file("a.h5", file)

    assert storage.read_file("a.h5", len(content)) == content
    assert storage.read_range("a.h5", 3, 777) == content[3:777]
    assert storage.read_range("a.h5", 0, len(content)) == content
    assert storage.read_range("a.h5", 5, 5) == b""
    assert storage.sizes() == {"a.h5": len(content)}
    with pytest.raises(DamagedCacheError, match="bytes"):
        storage.read_file("a.h5", len(content) - 1)

    file.write_bytes(b"other")
    storage.write_file("a.h5", file)
    assert storage.read_file("a.h5", 5) == b"other"

    storage.commit("manifest.json", b"one", replace=False)
    with pytest.raises(FileExistsError):
        storage.commit("manifest.json", b"two", replace=False)
    assert storage.read_file("manifest.json", 10) == b"one"
    storage.commit("manifest.json", b"three", replace=True)
    assert storage.read_file("manifest.json", 10) == b"three"

    travelled = pickle.loads(pickle.dumps(storage))
    assert travelled.read_file("manifest.json", 10) == b"three"

    assert sorted(storage.sizes()) == ["a.h5", "manifest.json"]
    storage.remove("a.h5")
    storage.remove("a.h5")
    storage.remove("manifest.json")
    _check_nothing_is_there(storage)


def check_one_of_two_commits_wins(storage: Storage, tries: int) -> None:
    """See that of several commits at once exactly one succeeds."""
    for number in range(tries):
        name, winners, losers = f"commit-{number}", [], []
        start = threading.Barrier(3)

        def commit(
            content: bytes, name=name, start=start, winners=winners, losers=losers
        ) -> None:
            start.wait()
            try:
                storage.commit(name, content, replace=False)
            except FileExistsError:
                losers.append(content)
            else:
                winners.append(content)

        threads = [
            threading.Thread(target=commit, args=(content,))
            for content in (b"a" * 1000, b"b" * 1000, b"c" * 1000)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        assert len(losers) == 2
        assert storage.read_file(name, 1000) == winners[0]


def _check_nothing_is_there(storage: Storage) -> None:
    assert storage.sizes() == {}
    with pytest.raises(FileNotFoundError):
        storage.read_file("a.h5", 100)
    with pytest.raises(FileNotFoundError):
        storage.read_range("a.h5", 0, 10)
