"""Samples that are read in order: an iterable, or a function that gives one a span.

How many there are is known when the last one was read.  An iterable is read by one
process.  Spans are read by several, each span from its first sample to its last.
"""

from __future__ import annotations

import abc
import functools
import types
from collections.abc import Iterator, Sized
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from loaderkit.datasets.fingerprint import (
    Fingerprint,
    fingerprint_of,
    fingerprint_value,
)
from loaderkit.datasets.shared_iterators import (
    are_held_elsewhere,
    iterators_behind,
    other_span_reads,
)
from loaderkit.datasets.state_hash import hash_state
from loaderkit.errors import DatasetError
from loaderkit.mistaken import mistaken_for_dataset
from loaderkit.randomness import RandomStates, mix_seed, seed_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


_NOTHING = object()
"""Stands for no sample; None may be one."""


class StreamedSample(NamedTuple):
    """A sample as a stream gives it."""

    key: str
    sample: Any


class StreamSource(abc.ABC):
    """Samples that can only be read in order.

    Args:
        span_count: Into how many spans they are cut.
    """

    takes_workers = False
    """Whether other processes may read the spans."""

    def __init__(self, span_count: int) -> None:
        self.span_count = span_count

    @abc.abstractmethod
    def iterate(self, span: int) -> Iterator[Any]:
        """Begin to read a span, from its first sample on.

        Raises:
            DatasetError: There is nothing to iterate over.
        """

    @abc.abstractmethod
    def key(self, span: int, index: int) -> str:
        """Name a sample by its place.

        Args:
            span: Which span it is in.
            index: Which of its samples, from 0.
        """

    @abc.abstractmethod
    def name_span(self, span: int) -> str:
        """Name a span for messages."""

    def told_length(self) -> int | None:
        """Say how many samples the user's object says there are, for a bar alone."""
        return None

    @abc.abstractmethod
    def fingerprint(self) -> Fingerprint:
        """Say what the samples are made from: code.  Its count of keys is 0."""

    @abc.abstractmethod
    def state(self) -> str | None:
        """Hash what samples are made from besides code and files; None: not known."""

    def root(self) -> Path | None:
        """Nobody knows where the raw data lies."""
        return None

    def named_files(self) -> Iterator[str]:
        """Name no files: those that are opened are noted."""
        return iter(())

    def runs_user_code(self) -> bool:
        """Reading runs the user's code."""
        return True

    def first_sample(self, seed: int | None) -> StreamedSample | None:
        """Read the first sample; None where there is none."""
        return next(self.samples(seed), None)

    def samples(self, seed: int | None) -> Iterator[StreamedSample]:
        """Read all samples of all spans, in order.

        Random states are as the last sample left them.
        """
        for span in range(self.span_count):
            reader = SpanReader(self, span, seed)
            while (streamed := reader.read_next()) is not None:
                yield streamed


class IterableSource(StreamSource):
    """An iterable of samples: a generator, an ``IterableDataset``, and the like.

    Args:
        iterable: It.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        super().__init__(1)
        self._iterable = iterable

    def iterate(self, span: int) -> Iterator[Any]:  # noqa: ARG002 -- there is one
        """Begin to read; a generator goes on where it is."""
        return iter(self._iterable)

    def first_sample(self, seed: int | None) -> StreamedSample | None:
        """Read the first sample; who reads from the beginning gets it again."""
        iterator = self.iterate(0)
        seed_all_for(seed, 0, 0)
        sample = next(iterator, _NOTHING)
        if sample is _NOTHING:
            return None
        self._iterable = chain([sample], iterator)
        return StreamedSample(self.key(0, 0), sample)

    def key(self, span: int, index: int) -> str:  # noqa: ARG002 -- there is one span
        """Number the sample."""
        return str(index)

    def name_span(self, span: int) -> str:  # noqa: ARG002 -- there is one
        """Name the iterable's type."""
        return f"The {type(self._iterable).__name__}"

    def told_length(self) -> int | None:
        """Ask for ``len``, which many iterables do not know."""
        try:
            return len(self._iterable) if isinstance(self._iterable, Sized) else None
        except Exception:  # noqa: BLE001 -- the user's code; a bar is no reason to fail
            return None

    def fingerprint(self) -> Fingerprint:
        """Look at the code that iterates; a generator's own is not to be had."""
        return fingerprint_of(getattr(type(self._iterable), "__iter__", iter), ())

    def state(self) -> str | None:
        """Nothing but the samples themselves can tell."""
        return None


class SpanSource(StreamSource):
    """A function that gives one iterable a span.

    Args:
        function: Called with the number of a span and how many there are.
        span_count: How many.
    """

    takes_workers = True

    def __init__(self, function: Callable[[int, int], Any], span_count: int) -> None:
        super().__init__(span_count)
        self._function = function
        self._was_compared = False
        """Whether two spans were looked at, and read different iterators."""

    def iterate(self, span: int) -> Iterator[Any]:
        """Call the function, and begin to read what it gives.

        Raises:
            DatasetError: It gave something that holds no samples, or that another span
                reads too.
        """
        if self.span_count == 1 or self._was_compared:
            return self._begin(span)
        states = RandomStates.read()
        iterator = self._begin(span)
        iterators = iterators_behind(iterator)
        # What a function has just made nobody else holds: no other span can read it.
        if not are_held_elsewhere(iterators):
            self._was_compared = True
            return iterator
        self._check_differs(span, iterators)
        self._was_compared = True
        # The function was called for another span meanwhile, and may keep something of
        # the last one it was called for.  So it is called for this one again, with the
        # random numbers of the first time.
        states.put_back()
        return self._begin(span)

    def _check_differs(self, span: int, iterators: list[Iterator[Any]]) -> None:
        """See that another span does not read one of this span's iterators.

        Raises:
            DatasetError: It does.
        """
        other = (span + 1) % self.span_count
        if not other_span_reads(self._function, other, self.span_count, iterators):
            return
        name = _name_of(self._function)
        message = (
            f"{name}({span}, {self.span_count}) and {name}({other}, {self.span_count}) "
            "read the same iterator."
        )
        why = (
            "each span is read to its end, by a process that may have a copy of it: "
            "samples would be missing, or there several times"
        )
        fix = "make a new iterator for each span; or give pack the iterator itself"
        raise DatasetError(message, why=why, fix=f"{fix}, without spans")

    def _begin(self, span: int) -> Iterator[Any]:
        iterable = self._function(span, self.span_count)
        mistake = mistaken_for_dataset(iterable)
        if mistake is not None and not isinstance(iterable, Iterator):
            message = (
                f"{_name_of(self._function)}({span}, "
                f"{self.span_count}) gave no samples. {mistake.message}"
            )
            fix = mistake.fix("return {}")
            raise DatasetError(message, why=mistake.why, fix=fix)
        if hasattr(iterable, "__iter__"):
            return iter(iterable)
        if hasattr(iterable, "__getitem__") and hasattr(iterable, "__len__"):
            # Python would iterate over a map-style dataset until an IndexError, which
            # many of them never raise.
            return (iterable[row] for row in range(len(iterable)))
        message = (
            f"{_name_of(self._function)}({span}, "
            f"{self.span_count}) gave {iterable!r:.80}, which cannot be iterated over."
        )
        why = "a span is read sample by sample"
        fix = "return a list, a generator or a dataset with the span's samples"
        raise DatasetError(message, why=why, fix=fix)

    def key(self, span: int, index: int) -> str:
        """Number the sample within its span."""
        return f"{span}/{index}"

    def name_span(self, span: int) -> str:
        """Number the span.

        >>> SpanSource(lambda span, spans: [], 8).name_span(3)
        'Span 3 of 8'
        """
        return f"Span {span:,} of {self.span_count:,}"

    def fingerprint(self) -> Fingerprint:
        """Look at the function's code and at the number of spans."""
        spans = xxhash.xxh3_128_hexdigest(str(self.span_count).encode())
        return Fingerprint(fingerprint_value(self._function), spans, 0)

    def state(self) -> str | None:
        """Hash the values that the function has with it, beside its code."""
        return hash_state(_values_of(self._function))


class SpanReader:
    """Reads the samples of one span, from the first to the last.

    The random numbers that a sample draws follow from its span and its place in it:
    so they do not depend on what a process read before.

    Args:
        source: Where they come from.
        span: Which span.
        seed: What random numbers follow from; None: of nothing.
    """

    def __init__(self, source: StreamSource, span: int, seed: int | None) -> None:
        self._source, self._span, self._seed = source, span, seed
        self._iterator: Iterator[Any] | None = None
        self._index = -1
        """Which sample is being read, or was read last."""

    def read_next(self) -> StreamedSample | None:
        """Read the next sample; None behind the last.

        Raises:
            Exception: What the user's code raises.
        """
        if self._iterator is None:
            seed_all_for(self._seed, self._span, 0)
            self._iterator = self._source.iterate(self._span)
        self._index += 1
        seed_all_for(self._seed, self._span, self._index)
        try:
            sample = next(self._iterator)
        except StopIteration:
            return None
        return StreamedSample(self._source.key(self._span, self._index), sample)

    @property
    def has_begun(self) -> bool:
        """Whether there is what the samples come from: they can be asked for."""
        return self._iterator is not None

    def name_last(self) -> str:
        """Name the sample that was asked for last, as a message begins."""
        name = self._source.name_span(self._span)
        if not self.has_begun:
            return name
        return f"Sample {self._index:,} of {name[0].lower()}{name[1:]}"


def seed_all_for(seed: int | None, span: int, index: int) -> None:
    """Seed torch, numpy and random for one sample of a span.

    Args:
        seed: What random numbers follow from; None: of nothing.
        span: The span.
        index: Which of its samples.
    """
    if seed is not None:
        # Epoch 0 is that of samples that are read by number.
        seed_all(mix_seed(seed, 1 + span, index))


def _values_of(function: object) -> list[Any]:
    """List the values that a function has with it: of closure, defaults, partial."""
    if isinstance(function, functools.partial):
        values = _values_of(function.func)
        return [*values, function.args, function.keywords]
    if isinstance(function, types.MethodType):
        return [function.__self__]
    if isinstance(function, types.FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        return [cells, function.__defaults__, function.__kwdefaults__]
    return [function]


def _name_of(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)
