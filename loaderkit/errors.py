"""Everything loaderkit raises.

LoaderkitError
+-- OptionError            no such option, or a value it cannot have; also a ValueError
|   |                      and a TypeError
|   +-- VariableError      a variable of the environment cannot have this value
+-- CacheError             the bytes on disk are not the bytes asked for
|   +-- StaleCacheError    the cache was packed by other code or from other samples
|   +-- DamagedCacheError  a file is short, changed, missing or not ours
|   +-- CacheVersionError  a newer loaderkit wrote it
+-- DatasetError           a sample cannot be loaded, stored or batched
|   +-- UnlikeKeysError    a sample lacks a field that another one of its batch has
+-- NoSuchAttributeError   a dataset, a loader or a result has no attribute of that
|                          name; also an AttributeError
+-- LoaderError            a loader cannot be built, or a worker of it died
+-- LeakError              memory grows from epoch to epoch; also an AssertionError
+-- BudgetError            it cannot be planned, split, or changed any more
|   +-- DoesNotFitError    a step takes more than it may; also an AssertionError
+-- NotStartedError        a detector has not begun to watch; also a RuntimeError
+-- StepError              what was passed cannot make a training step; a ValueError
+-- MissingMethodError     a dataset has no keys() or load(); a NotImplementedError
+-- NoSuchRowError         a dataset has no such row; also an IndexError
+-- NotWrittenError        a file that you named cannot be written; also an OSError
+-- NotChangeableError     an object, or an item of it, that stays as it is; also an
                           AttributeError and a TypeError

LeakWarning                what LeakDetector(on_leak="warn") warns with
NotJudgedWarning           a run was watched and could not be judged, or nobody asked
"""

from __future__ import annotations

import functools
from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING, Any

from loaderkit.fixes import Fix

if TYPE_CHECKING:
    from loaderkit.fixes import Dialect, Part


class LoaderkitError(Exception):
    """Base class.  A message says what happened, why, and what to do.

    One positional string is enough to build it, because torch rebuilds a worker's
    exception as ``type(error)(message)``.
    """

    advice = Fix()
    """The fix in parts, for who writes it for users that called something else."""

    def __init__(self, what: str, *, why: str = "", fix: Part | Fix = "") -> None:
        self.what, self.why, self.fix = what, why, str(fix)
        self.advice = Fix.of(fix)
        parts = [what, why and f"  why: {why}", self.fix and f"  fix: {self.fix}"]
        super().__init__("\n".join(filter(None, parts)))

    def fix_in(self, dialect: Dialect) -> str:
        """Write the fix as the users of a dialect would."""
        # An error that was built from the user's own has its text alone.
        return self.advice.text(dialect) if self.advice.parts else self.fix

    def __reduce__(self) -> tuple[Any, ...]:
        again = functools.partial(type(self), self.what, why=self.why, fix=self.advice)
        notes = getattr(self, "__notes__", None)  # Python 3.11: add_note
        return (again, ()) if notes is None else (again, (), {"__notes__": notes})


class OptionError(LoaderkitError, ValueError, TypeError):
    """There is no such option, or it cannot have this value, or two contradict.

    It is both a ``ValueError`` and a ``TypeError``: whoever wrote ``batch_size="32"``
    may expect either.
    """


class VariableError(OptionError):
    """There is no such variable of the environment, or it cannot have this value."""


class CacheError(LoaderkitError, ValueError):
    """The bytes on disk are not the bytes asked for."""


class StaleCacheError(CacheError):
    """The cache was packed by other code, or from other samples, than are here now."""


class DamagedCacheError(CacheError):
    """A file of the cache is short, changed, missing, or was never ours."""


class CacheVersionError(CacheError):
    """A newer loaderkit wrote the cache."""


class NoAnswerError(CacheError):
    """A store failed, or was silent, as often as it was asked."""


class NoRoomError(CacheError):
    """The mirror has no room for a shard, and nothing in it may go."""


class OtherWriterError(CacheError):
    """Another process has written, or writes, a cache to the same URL."""


class DatasetError(LoaderkitError, ValueError):
    """A sample cannot be loaded, stored or batched."""


class UnlikeKeysError(DatasetError):
    """A sample of a batch lacks a field that another one has."""

    unlike: Any = None
    """The :class:`loaderkit.unlike_keys.UnlikeKey`."""


class NoSuchAttributeError(LoaderkitError, AttributeError):
    """What was asked for is no attribute; the message says what to use."""


class NotChangeableError(LoaderkitError, FrozenInstanceError, TypeError):
    """An object, or an item of it, stays as it is.

    Python raises an ``AttributeError`` for an attribute that cannot be set, dataclasses
    a ``FrozenInstanceError``, which is one, and ``TypeError`` is that of items.
    """


class LoaderError(LoaderkitError, RuntimeError):
    """A loader cannot be built, or a worker of it died."""


class LeakError(LoaderkitError, RuntimeError, AssertionError):
    """Memory grows from epoch to epoch; ``report`` says what, and who holds it.

    It is an ``AssertionError`` too, as ``unittest`` and others tell a test that fails
    from one that could not be run.
    """

    report: Any = None
    """The :class:`loaderkit.leaks.report.LeakReport`."""


class LeakWarning(UserWarning):
    """Memory grows from epoch to epoch.

    Python shows a ``UserWarning`` unless it is told otherwise; it hides a
    ``ResourceWarning``, outside of tests.
    """


class NotJudgedWarning(UserWarning):
    """Whether memory grows is not known: a run was too short, or nobody asked.

    Tests fail for it with ``pytest -W error::loaderkit.errors.NotJudgedWarning``, and
    scripts with ``warnings.simplefilter("error", NotJudgedWarning)``: Python's own
    ``-W`` reads its options before it can import this class.
    """


class BudgetError(LoaderkitError, RuntimeError):
    """Something cannot be planned, split, or changed any more."""


class DoesNotFitError(BudgetError, AssertionError):
    """A step takes more memory than it may, or than it did."""


class NotStartedError(LoaderkitError, RuntimeError):
    """A detector was asked before it had begun to watch."""


class StepError(LoaderkitError, ValueError):
    """What was passed cannot make a training step, however it is run."""


class MissingMethodError(LoaderkitError, NotImplementedError):
    """A dataset lacks ``keys`` or ``load``, which its class has to have."""


class NoSuchRowError(LoaderkitError, IndexError):
    """A dataset has no such row."""


class NoSuchKeyError(LoaderkitError, KeyError):
    """A dataset has no sample of that key."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError writes its text in quotes


class NotWrittenError(LoaderkitError, OSError):
    """A file that the caller named cannot be written."""

    def __str__(self) -> str:
        return str(self.args[0])  # an OSError writes its number and text alone
