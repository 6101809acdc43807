"""Hash what objects hold, as another process would receive it."""

from __future__ import annotations

import pickle

import xxhash

_MOST_STATE_BYTES = 1 << 28
"""256 MiB of pickled attributes: chosen.  xxh3 takes them in well under a second, so a
dataset that keeps more of its samples in memory does not make every start wait."""


class _HashSink:
    """A file that keeps only the hash of what is written to it."""

    def __init__(self) -> None:
        self.digest = xxhash.xxh3_128()
        self._bytes = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self._bytes += len(data)
        if self._bytes > _MOST_STATE_BYTES:
            msg = "more than a hash should wait for"
            raise OverflowError(msg)
        return len(data)


def hash_state(value: object) -> str | None:
    """Hash a value by what pickle writes of it.

    Returns:
        The hash; None where it cannot be pickled, or is too large.
    """
    sink = _HashSink()
    try:
        pickle.Pickler(sink, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:  # noqa: BLE001 -- pickling runs code of the user's objects
        return None
    return sink.digest.hexdigest()
