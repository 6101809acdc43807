"""Which of the names there are was probably meant.  Pure."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from loaderkit.habits import DEVICES, MODELS, OF_OTHER_LIBRARIES

if TYPE_CHECKING:
    from collections.abc import Iterable


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Name the nearest of the names there are, or all of them.

    >>> suggest_name("batchsize", ["batch_size", "shuffle"])
    "did you mean 'batch_size'?"
    >>> suggest_name("xylophone", {"shuffle", "batch_size"})
    'it is one of batch_size, shuffle'
    """
    # The order of a set differs from process to process.
    names = sorted(known) if isinstance(known, AbstractSet) else list(known)
    nearest = nearest_name(name, names)
    if nearest is not None:
        return f"did you mean {nearest!r}?"
    if not names:
        return "drop it: there is none"
    return f"it is one of {', '.join(names)}"


_COMMON_WORDS = frozenset(
    {"num", "n", "max", "min", "total", "is", "has", "get", "set", "to", "from", "of"}
    | {"the", "by", "all", "per", "byte", "memory", "at", "in", "on", "ha", "i", "it"}
)
"""Words in many names, which say nothing about what was meant."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Find the name that was probably meant.

    That is one that is spelt alike, or else one that shares the most words: people
    write ``is_leaking`` for ``leaking`` and ``peak_memory`` for ``peak``.

    Args:
        name: What was written.
        known: The names there are.

    Returns:
        One of them; None where none is near.

    >>> nearest_name("bach_size", ["batch_size"]), nearest_name("peak_memory", ["peak"])
    ('batch_size', 'peak')
    >>> nearest_name("anything", ["peak"]) is None
    True
    """
    return _nearest_name(name, tuple(known))


@functools.lru_cache(maxsize=256)
def _nearest_name(name: str, names: tuple[str, ...]) -> str | None:
    """Find the nearest name; the last ones are kept.

    ``hasattr`` asks as well, torch and trainers with one name again and again, and it
    takes a third of a millisecond.
    """
    # A letter too many or too few; from 0.85 on no two words of a name differ wholly.
    alike = difflib.get_close_matches(name, names, 1, cutoff=0.85)
    if alike:
        return alike[0]
    words = _words_of(name)

    def nearness(candidate: str) -> tuple[int, int, int]:
        shared = words & _words_of(candidate)
        # Of equal ones the shortest, which says the least beyond what was asked for.
        return len(shared - _COMMON_WORDS), len(shared), -len(candidate)

    best = max(names, key=nearness, default="")
    # Common words alone say nothing: num_columns is not meant for num_workers.
    meant = words & _words_of(best)
    if meant - _COMMON_WORDS or (meant and meant == _words_of(best)):
        return best
    return similar_name(name, names)


def similar_name(name: str, names: Iterable[str]) -> str | None:
    """Find the name that is spelt most alike; None where none is.

    >>> similar_name("head", ["shard"]), similar_name("bb", ["b"])
    (None, 'b')
    """
    for match in difflib.get_close_matches(name, list(names), 1):
        # From 0.6 to 0.7 are words that only share letters, "head" and "shard", unless
        # one is the beginning of the other.
        if match.startswith(name) or name.startswith(match):
            return match
        if difflib.SequenceMatcher(None, match, name).ratio() >= 0.7:
            return match
    return None


def _words_of(name: str) -> set[str]:
    """Take a name apart; "growths" and "growth" are one word."""
    return {word.removesuffix("s") or word for word in name.lower().split("_") if word}


def suggest_device(device: object) -> str:
    """Name the device of torch's that was probably meant.

    >>> suggest_device("gpu:1"), suggest_device("cdua"), suggest_device("H100")
    ('cuda:1', 'cuda', 'cuda')
    >>> suggest_device("npu:0")  # the right name, where its library is not
    'cpu'
    >>> suggest_device("tpu")
    'cpu'
    """
    kind, colon, index = str(device).lower().partition(":")
    if kind in OF_OTHER_LIBRARIES:
        return "cpu"
    if kind in DEVICES:
        return f"{DEVICES[kind]}{colon}{index}"
    for pattern, torch_name in MODELS.items():
        if re.fullmatch(pattern, kind):
            return f"{torch_name}{colon}{index}"
    # A letter too many, too few or at the wrong place; but another letter of three is
    # another device: TPU is no misspelt XPU.
    names = sorted({*DEVICES.values()})
    nearest = difflib.get_close_matches(kind, names, 1, cutoff=0.7)
    return f"{nearest[0]}{colon}{index}" if nearest else "cpu"
