"""Fits a peak model to a model and a dataset, and solves for the largest batch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loaderkit.budget.batch.peak_model import (
    PeakModel,
    fit_peak_model,
    prediction_error,
)
from loaderkit.budget.batch.samples import SELF_LOOPS_COLUMN
from loaderkit.budget.step.assumed_scalars import LEAST, MOST, Assumed
from loaderkit.budget.step.estimate import estimate, upper_end
from loaderkit.budget.step.peaks import peaks_of, totals
from loaderkit.budget.step.step_errors import error_of_step
from loaderkit.budget.step.track import track_step
from loaderkit.budget.step.unknown_values import TrackedAnswers, costliest_answers
from loaderkit.error_texts import error_in_words
from loaderkit.errors import StepError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from numpy.typing import ArrayLike, NDArray

    from loaderkit.array_types import Floats
    from loaderkit.budget.batch.samples import SampleKind, Samples
    from loaderkit.budget.keywords import LoaderBounds
    from loaderkit.budget.step.allocation_log import Log
    from loaderkit.budget.step.train_step import Step

_SAMPLES_OF_STEPS: dict[SampleKind, tuple[int, ...]] = {
    "samples": (2, 4, 6),
    "sequences": (2, 3, 4, 5, 6, 8),
    "graphs": (2, 3, 4, 5, 6, 8),
    "graphs with self-loops": (2, 3, 4, 5, 6, 7, 8),
    "padded graphs": (2, 3, 4, 5, 6, 7, 8, 9),
    "paired graphs": (2, 3, 4, 5, 6, 7, 8, 9),
    "paired sequences": (2, 3, 4, 5, 6, 7, 8, 9),
    "paired samples": (2, 4, 6, 8),
}
"""Samples of the small steps that a peak model is fitted to: one step more than there
are unknowns, the last to see the error; never 1 alone, which takes other kernels
(measured on conv3d)."""
_MORE_SAMPLES = 8
"""How many times as many they are where a step needs more samples than that, such as a
loss of the five hardest of a batch.  Chosen."""
_COMPARED_SAMPLES = 16
"""Samples of the batches that a fit is compared with: twice those of its steps.
Chosen: more would take longer than the fit itself."""
_SAMPLES_OF_SMALL = 4
"""Samples of the small batch by which a peak model is tried on another device: as many
as the middle ones of those that it was fitted to."""
_LONGEST_OF_STEPS = (1.0, 0.1, 0.5, 1.0, 0.25, 0.75, 0.9, 0.0)
"""Of a model that pads: the quantile of lengths that the longest sample of each small
step has.  The largest of all is in two steps: a square that is learnt from short ones
cannot be extended to a single giant (predictions were a fifth of the peak)."""
_UNEXPLAINED = 0.05
"""Error above which graphs, nodes and edges do not explain a model.  Chosen between
what chance makes of them (self-loops that GCN and GAT replace: up to 0.025 in graphs
with random edges) and what padding does (0.5 and more).  Beyond it no bound of nodes
is given either: it would promise a peak for larger batches than were ever tracked."""
_SMALLEST_DIRECTION = 1e-10
"""Share of the largest, of products of sizes, below which they do not differ: chosen
between rounding and sizes of which one in a thousand differs (1e-6 and more)."""
_WORTH_COUNTING_SELF_LOOPS = 0.001
"""Error above which self-loops are counted.  Chosen: above rounding, and below what a
self-loop in 500 edges makes of a peak."""
_WORTH_LARGER_STEPS = 0.01
"""Error above which larger steps are tried too, which take as long as the small ones:
the peak may come at another moment there.  Chosen: above rounding; sizes that are equal
leave nothing to chance."""
_WORTH_LARGER_STEPS_OF_GRAPHS = 0.03
"""The same where chance is in the edges, as above.  Chosen between what it makes of
graphs (larger steps halved the error of one in six, that of 0.042), and models whose
peak comes at another moment (0.038 and more of 36 models as users write them)."""
_SAME_KERNELS = 0.005
"""Error up to which a peak model holds for another device: chosen between what devices
round differently (512 B a tensor: 0.0001 in small steps) and what a kernel takes
inside on one of them (0.15 and more; measured on 29 models)."""
_NEGLIGIBLE_BYTES = 1.0
"""Bytes for one padded place that count as none; chosen between the rounding of a fit
and the 4 bytes of a float32."""

_FEWEST_EPOCHS = 200
"""Epochs that are simulated of a large dataset; chosen: a chance is then known to 7
points at worst, and its ends say so."""
_MOST_EPOCHS = 20_000
"""Of a small one: a chance is then known to 0.7 points at worst (derived: two standard
errors)."""
_SAMPLES_DRAWN = 20_000_000
"""Between the two: the answer is then within a point or two (measured)."""
_EPOCHS_AT_ONCE = 50
"""Orders of so many epochs are in memory: 40 MB for 100,000 samples."""


class TrackedPeak(NamedTuple):
    """What a batch that was tracked takes.  Bytes."""

    likely: int
    """At the peak of the step."""
    upper_end: int
    """With what kernels may take inside, as far as it is not known."""


@dataclass(frozen=True)
class BatchCostModel:
    """What batches of a dataset take: predicted by a peak model, or tracked."""

    model: torch.nn.Module
    """The module."""
    samples: Samples
    """The dataset's sizes."""
    step: Step
    """How a step is made."""
    peak_model: PeakModel
    """Predicts what a batch takes."""
    assumed: Assumed = MOST
    """What values are taken for that a step reads and nobody knows: a plan is made for
    the branch that takes most."""
    fewest: int = 1
    """Samples that a step needs: 2 with statistics over the batch, more with a loss of
    the hardest ones."""
    tracked_peaks: dict[tuple[int, ...], TrackedPeak] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Batches that were tracked so far, by their rows, and their peaks."""

    def with_step(self, step: Step) -> BatchCostModel:
        """Track other steps of the same samples; which are worst stays as it was."""
        return replace(self, step=step, tracked_peaks={})

    def with_target(self, step: Step, batch_size: int) -> BatchCostModel:
        """Give the costs of the same samples on another device.

        The same operators make the same tensors there, and what is fitted holds as it
        is; where kernels take memory of their own, small steps are tracked anew.  A
        small batch and a large one tell which.

        Args:
            step: As it is made on that device.
            batch_size: Samples of a batch that is asked about.
        """
        other = self.with_step(step)
        largest = min(max(batch_size, _COMPARED_SAMPLES), len(self.samples))
        small = _choose_small_batch(
            self.samples, min(max(_SAMPLES_OF_SMALL, self.fewest), largest), 0
        )
        batches = [small, self.samples.worst_rows(self.peak_model, largest)]
        errors = [
            prediction_error(self.predict(rows), [other.track_likely_peak(rows)])
            for rows in batches
        ]
        error = max(self.peak_model.error, *errors)
        if error > self.peak_model.error + _SAME_KERNELS:
            return fit_cost_model(self.model, self.samples, step, batch_size)
        return replace(other, peak_model=replace(self.peak_model, error=error))

    def predict(self, rows: ArrayLike) -> Floats:
        """Predict the peak of batches of some rows.

        Args:
            rows: Rows of the samples ``[batches, samples]``.

        Returns:
            Bytes ``[batches]``.
        """
        return self.peak_model.predict(self.samples.batch_sizes(rows))

    def track_peak(self, rows: list[int]) -> int:
        """Track the batch of some rows, some 0.1 s: the upper end on a CPU.

        For a device, where it is wide, the likely peak: its margin is for the rest.
        """
        tracked = self._track_batch(rows)
        is_on_cpu = self.step.target.kind == "cpu"
        return tracked.upper_end if is_on_cpu else tracked.likely

    def track_likely_peak(self, rows: list[int]) -> int:
        """Track the batch of some rows, and give the likely peak on any device."""
        return self._track_batch(rows).likely

    def error_of(self, rows: list[int]) -> float:
        """Hold the prediction for the batch of some rows against the tracked batch."""
        return prediction_error(self.predict(rows), [self.track_likely_peak(rows)])

    def _track_batch(self, rows: list[int]) -> TrackedPeak:
        """Track a batch, unless it was tracked already."""
        key = tuple(rows)
        if key not in self.tracked_peaks:
            log = self._track_rows(rows)
            likely = max(totals(peaks_of(log)).values())
            self.tracked_peaks[key] = TrackedPeak(likely, upper_end(log, self.step))
        return self.tracked_peaks[key]

    def _track_rows(self, rows: list[int]) -> Log:
        batch = self.samples.join(rows)
        try:
            return track_step(self.model, batch, self.step, assumed=self.assumed)
        except StepError:
            raise
        except Exception as error:
            # Not looked into as ``_track_small_step`` does: small steps of this model
            # ran, so this batch is refused, or a remedy, and callers try another.
            raise error_of_step(error) from error

    def with_fewest_samples(self) -> BatchCostModel:
        """Find how many samples a step needs."""

        def runs(count: int) -> bool:
            try:
                self.track_peak(self.samples.worst_rows(self.peak_model, count))
            except StepError:
                return False
            return True

        most = len(self.samples)
        enough = 1
        while not runs(enough) and enough < most:
            enough = min(2 * enough, most)
        too_few = enough // 2
        while enough - too_few > 1:
            middle = (enough + too_few) // 2
            if runs(middle):
                enough = middle
            else:
                too_few = middle
        return replace(self, fewest=enough)

    def worst_peak(self, count: int) -> int:
        """Track the worst batch of so many samples, and bound what others take.

        Predictions choose which is the worst.  Where they may be wrong by a factor,
        another batch may take more than the tracked one: by that factor twice.
        """
        tracked = self.track_peak(self.samples.worst_rows(self.peak_model, count))
        return round(tracked * (1 + self.peak_model.error) ** 2)

    def largest_batch(self, limit: int, most: int | None = None) -> int:
        """Solve for the most samples of which every batch fits.

        Args:
            limit: Bytes.
            most: Samples that are asked for; all there are if None.

        Returns:
            Samples; 0 when not even every single one fits, or as few as a step needs.
        """
        factor = (1 + self.peak_model.error) ** 2
        predicted = self.samples.worst_peaks(self.peak_model) * factor
        guess = int(np.searchsorted(predicted, limit, side="right"))
        most = len(self.samples) if most is None else min(most, len(self.samples))

        def fits(count: int) -> bool:
            return self.worst_peak(max(count, self.fewest)) <= limit

        count = last_that_fits(fits, guess, most)
        return count if count >= self.fewest else 0


def last_that_fits(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """Search from a guess in strides that double, then by halves.

    Args:
        fits: Whether so many fit; if so, fewer do.
        guess: Where to begin.
        most: How many there are.

    Returns:
        The largest number that fits, 0 if not even 1 does.

    >>> last_that_fits(lambda count: count <= 37, guess=20, most=100)
    37
    """
    low, high = 0, most + 1
    probe = min(max(guess, 1), most)
    stride = 1
    while high - low > 1:
        if fits(probe):
            low = probe
            probe += stride
        else:
            high = probe
            probe -= stride
        stride *= 2
        if not low < probe < high:
            probe = (low + high) // 2
    return low


def fit_cost_model(
    model: torch.nn.Module, samples: Samples, step: Step, batch_size: int = 1
) -> BatchCostModel:
    """Track a few small batches of a dataset and fit a peak model to them.

    Args:
        model: A module on the CPU.
        samples: The dataset's sizes.
        step: How a step is made.
        batch_size: Samples of a batch that is asked about.

    Returns:
        What any batch takes.
    """
    search = _FitSearch(model, step, batch_size, _fit_small_steps(model, samples, step))
    others = samples.otherwise_described()
    if search.error > _WORTH_COUNTING_SELF_LOOPS:
        search.try_self_loops()
    if search.error > _UNEXPLAINED and search.best.peak_model.of_phases:
        # A loop over time steps has other operators in each batch, and a phase's peak
        # moves within it: more likely than that all samples meet.
        search.try_larger_steps(samples)
    if search.error > _UNEXPLAINED:
        # The model may pad inside (to_dense_batch, attention within graphs), or let
        # everything meet everything else (attention over the batch, contrastive loss).
        search.try_small_steps(others)
    has_edges = "graphs" in search.best.samples.kind
    worth = _WORTH_LARGER_STEPS_OF_GRAPHS if has_edges else _WORTH_LARGER_STEPS
    if search.error > worth:
        # In steps that small another moment may be the peak than in those asked about,
        # such as the update of the largest layer.
        search.try_larger_steps(search.best.samples)
    for described in others:
        if search.error > _UNEXPLAINED:
            # Both at once: all nodes meet, by a kernel that goes another way where they
            # are few (cdist up to 25 rows).
            search.try_larger_steps(described)
    return search.best


@dataclass
class _FitSearch:
    """The best fit so far; another one replaces it that explains most of what is left.

    Kernels whose workspace is only known within bounds miss by as much with any
    description.
    """

    model: torch.nn.Module
    step: Step
    batch_size: int
    """Samples of a batch that is asked about."""
    best: BatchCostModel
    """The fit with the smallest error."""
    error: float = field(init=False)
    """Of the best one, also on batches of the size that is asked about."""
    with_larger_steps: set[SampleKind] = field(default_factory=set, init=False)
    """Descriptions of which larger steps were tried."""

    def __post_init__(self) -> None:
        self.error = _error_with(self.best, self.batch_size)

    def try_small_steps(self, descriptions: Sequence[Samples]) -> None:
        """Fit small steps with other descriptions, until one explains them."""
        for samples in descriptions:
            if self.error <= _UNEXPLAINED:
                return
            self._keep_if_better(
                _fit_small_steps(self.model, samples, self.step, before=self.best)
            )

    def try_self_loops(self) -> None:
        """Fit small steps with the number of self-loops, where graphs have some."""
        counted = self.best.samples.with_self_loops()
        if counted is not None:
            self._keep_if_better(
                _fit_small_steps(self.model, counted, self.step, before=self.best)
            )

    def try_larger_steps(self, samples: Samples) -> None:
        """Fit larger steps with a description, once, if the model takes as many."""
        if samples.kind in self.with_larger_steps:
            return
        self.with_larger_steps.add(samples.kind)
        with contextlib.suppress(StepError):
            self._keep_if_better(
                _fit_steps_of(
                    _MORE_SAMPLES, self.model, samples, self.step, before=self.best
                )
            )

    def _keep_if_better(self, other: BatchCostModel) -> None:
        error = _error_with(other, self.batch_size)
        if error < self.error / 2:
            self.best, self.error = other, error


def _error_with(cost_model: BatchCostModel, batch_size: int) -> float:
    """Say how wrong predictions are, also of batches of the size that is asked about.

    What grows with the square of the samples is little in small batches.
    """
    size = min(batch_size, len(cost_model.samples))
    if size <= _COMPARED_SAMPLES:
        return cost_model.peak_model.error
    rows = cost_model.samples.worst_rows(cost_model.peak_model, size)
    return max(cost_model.peak_model.error, cost_model.error_of(rows))


def _fit_small_steps(
    model: torch.nn.Module,
    samples: Samples,
    step: Step,
    before: BatchCostModel | None = None,
) -> BatchCostModel:
    """Fit small steps, and compare with larger ones that the fit has not seen.

    Args:
        model: A module on the CPU.
        samples: The dataset's sizes.
        step: How a step is made.
        before: Another fit to the same dataset, which has tracked some batches.

    Raises:
        StepError: They do not run.
    """
    try:
        return _fit_steps_of(1, model, samples, step, before)
    except StepError as error:
        # A loss may choose the five hardest of a batch.
        try:
            return _fit_steps_of(_MORE_SAMPLES, model, samples, step, before)
        except StepError:
            raise error from error.__cause__


def _fit_steps_of(
    times: int,
    model: torch.nn.Module,
    samples: Samples,
    step: Step,
    before: BatchCostModel | None = None,
) -> BatchCostModel:
    """Fit steps of so many times as few samples as can be."""
    batches = [
        _choose_small_batch(samples, times * count, number)
        for number, count in enumerate(_samples_of_steps(samples))
    ]
    sizes = [samples.batch_sizes(rows) for rows in batches]
    *others, last = batches
    assumed, last_log = _track_to_plan_for(model, samples.join(last), step)
    logs = [
        _track_small_step(model, samples.join(rows), step, assumed) for rows in others
    ]
    logs.append(last_log)
    peak_model = fit_peak_model(samples.names, sizes, logs)

    # Many batches that fits are held against are the same.
    tracked_peaks: dict[tuple[int, ...], TrackedPeak] = {}
    if before is not None and before.assumed == assumed:
        tracked_peaks = before.tracked_peaks
    cost_model = BatchCostModel(
        model, samples, step, peak_model, assumed, tracked_peaks=tracked_peaks
    )
    # Also of larger steps: small batches are asked about where little fits.
    counts = {_COMPARED_SAMPLES, times * _COMPARED_SAMPLES}
    unseen = [
        rows for count in counts for rows in _unseen_batches(samples, peak_model, count)
    ]
    errors = [_error_of_batch(cost_model, rows) for rows in unseen]
    error = max(peak_model.error, *errors)
    cost_model = replace(cost_model, peak_model=replace(peak_model, error=error))
    return cost_model.with_fewest_samples()


def _track_to_plan_for(
    model: torch.nn.Module, batch: object, step: Step
) -> TrackedAnswers:
    """Track a step with the answers with which it takes most, or with which it runs.

    Raises:
        StepError: It runs with none.
    """
    try:
        log = track_step(model, batch, step)
    except Exception:  # noqa: BLE001 -- a branch may not fit its batch
        for assumed in (Assumed(share=0.0), LEAST):
            with contextlib.suppress(Exception):
                return TrackedAnswers(
                    assumed, track_step(model, batch, step, assumed=assumed)
                )
        # Fails again, and says why.
        return TrackedAnswers(MOST, _track_small_step(model, batch, step, MOST))
    return costliest_answers(model, batch, step, log)


def _error_of_batch(cost_model: BatchCostModel, rows: list[int]) -> float:
    """Hold a prediction against the tracked batch."""
    try:
        return cost_model.error_of(rows)
    except StepError:
        # Too few samples for this step, which ran with those that it was fitted to.
        return 0.0


def _track_small_step(
    model: torch.nn.Module, batch: object, step: Step, assumed: Assumed
) -> Log:
    """Track a step; where that fails, say whether the step itself fails.

    Raises:
        StepError: It does, or it asks for what tensors without memory do not have.
    """
    try:
        return track_step(model, batch, step, assumed=assumed)
    except StepError:
        raise
    except Exception as error:
        # Raises what is wrong with the step, which training would raise too.
        estimate(model, batch, step)
        message = "this step cannot be planned for: "
        message += error_in_words(error)
        why = "it asks for values, and a plan's steps have tensors without memory"
        fix = "[loaderkit.estimate_step(model, batch) for batch in loader]"
        raise StepError(message, why=why, fix=fix) from error


def _samples_of_steps(samples: Samples) -> Sequence[int]:
    """Give the samples of each of the small steps."""
    if samples.kind != "typed graphs":
        return _SAMPLES_OF_STEPS[samples.kind]
    # One step for each unknown (the names and a constant), and one to see the error.
    return [2 + number % 7 for number in range(len(samples.names) + 2)]


def _unseen_batches(
    samples: Samples, peak_model: PeakModel, count: int
) -> list[list[int]]:
    """Choose batches of so many samples to compare with, which a fit has not seen.

    Two are drawn at random.  In one the largest sample is beside the smallest, which
    shows where others are padded to it.  The last is the worst of its size.
    """
    count = min(count, len(samples))
    rng = np.random.default_rng(0)
    drawn = rng.choice(len(samples), count, replace=False)
    drawn_half = rng.choice(len(samples), count // 2, replace=False)
    by_size = np.argsort(samples.sizes.sum(axis=1), kind="stable")
    unlike = np.append(by_size[: count - 1], by_size[-1])
    batches = [rows.tolist() for rows in (drawn, drawn_half, unlike) if len(rows)]
    return [*batches, samples.worst_rows(peak_model, count)]


def _choose_small_batch(samples: Samples, count: int, number: int) -> list[int]:
    """Choose small samples whose sizes point in different directions.

    Args:
        samples: All of them.
        count: How many to choose.
        number: Of the step, 0 for the first: each chooses others.

    Returns:
        Rows; some twice where the dataset is smaller than the batch.
    """
    rng = np.random.default_rng(number)
    is_padded = samples.kind == "padded graphs" or samples.is_sequences
    is_odd = bool(number % 2)
    last: list[np.int64] = []
    if is_padded:
        by_size = np.argsort(samples.sizes[:, 1], kind="stable")
        longest = round(_LONGEST_OF_STEPS[number] * (len(by_size) - 1))
        candidates = by_size[: max(longest, count)]
        last = [by_size[longest]]
    else:
        by_size = np.argsort(samples.sizes.sum(axis=1), kind="stable")
        candidates = by_size[: max(count * 4, len(by_size) // 2)]
        if _rank(samples.sizes[candidates]) < _rank(samples.sizes):
            # The smaller half are all alike, and do not tell what a node takes.
            candidates = by_size
            last = [by_size[-1] if is_odd else by_size[0]]
    chosen = rng.choice(candidates, size=min(count, len(candidates)), replace=False)
    first: list[np.int64] = []
    if len(candidates) > count:
        first = _extreme_samples(samples, candidates, is_odd=is_odd)
    # The first ones replace the last where a batch is too small for all.
    chosen[len(chosen) - len(last) :] = last
    chosen[: len(first)] = first[: len(chosen)]

    rows = [int(row) for row in dict.fromkeys(chosen.tolist())]
    distinct = len(rows)
    while len(rows) < count:
        rows.append(rows[len(rows) % distinct])
    return rows


def _rank(sizes: Floats) -> int:
    """Count the directions in which sizes differ, each column by its own scale."""
    scaled = sizes / np.maximum(sizes.max(axis=0), 1)
    # Of the few columns' products, not of a million samples.
    products = scaled.T @ scaled
    return int(
        np.linalg.matrix_rank(products, rtol=_SMALLEST_DIRECTION, hermitian=True)
    )


def _extreme_samples(
    samples: Samples, candidates: NDArray[np.int64], *, is_odd: bool
) -> list[np.int64]:
    """Choose graphs at either end of what differs little among those drawn at random.

    Without them edges, or self-loops, could not be told apart from nodes.
    """
    extremes: list[np.int64] = []
    if "graphs" not in samples.kind or samples.kind == "typed graphs":
        return extremes
    nodes = np.maximum(samples.sizes[candidates, 1], 1)
    edges_per_node = samples.sizes[candidates, 2] / nodes
    extreme = edges_per_node.argmax() if is_odd else edges_per_node.argmin()
    extremes.append(candidates[extreme])
    if samples.kind == "graphs with self-loops":
        # Some in every step: convolutions may leave operators out where there are none.
        self_loops = samples.sizes[candidates, SELF_LOOPS_COLUMN]
        looped, counts = candidates[self_loops > 0], self_loops[self_loops > 0]
        if len(looped):
            extremes.append(looped[counts.argmin() if is_odd else counts.argmax()])
    return extremes


class ErrorFactors(NamedTuple):
    """How wrong predictions may be, as factors of at least 1."""

    too_high: float
    """How many times too high they may be."""
    too_low: float
    """How many times too low."""


_WIDEST_KNOWN = 0.9
"""Width of an interval above which a chance is said to be not known.  Chosen: nine
tenths of all that it could be."""


class Chance(NamedTuple):
    """How likely some batch exceeds a limit, from 0 to 1."""

    low: float
    """If every prediction is as much too high as the fit may be."""
    likely: float
    """With the predictions as they are."""
    high: float
    """If every prediction is as much too low, and the simulation was lucky."""

    @property
    def is_known(self) -> bool:
        """Whether the interval says anything: it is not nearly all there is."""
        return self.high - self.low <= _WIDEST_KNOWN

    def __str__(self) -> str:
        """Write it as a reader can use it.

        >>> str(Chance(0, 0, 0)), str(Chance(0.001, 0.016, 0.098))
        ('0.0%', '1.6% (0.1% to 9.8%)')
        >>> str(Chance(0, 1, 1))
        'not known (100.0% if the estimate is exact)'
        """
        if not self.high:
            return f"{self.likely:.1%}"
        if not self.is_known:
            return f"not known ({self.likely:.1%} if the estimate is exact)"
        return f"{self.likely:.1%} ({self.low:.1%} to {self.high:.1%})"

    def within(self, epochs: int) -> Chance:
        """Raise one epoch's chance to several, which are independent."""
        low, likely, high = (1 - (1 - chance) ** epochs for chance in self)
        return Chance(low, likely, high)


def probability_of_running_out(
    cost_model: BatchCostModel,
    batch_size: int,
    limit: int,
    *,
    epochs: int = 1,
    seed: int = 0,
    errors: ErrorFactors | None = None,
) -> Chance:
    """Estimate how likely some batch exceeds a limit within a number of epochs.

    Args:
        cost_model: What a batch takes.
        batch_size: Samples of a batch, shuffled, the last one whatever is left.
        limit: Bytes.
        epochs: How many.
        seed: Of the simulated shuffles.
        errors: How wrong predictions may be; the fit's own error if None.

    Returns:
        The chance with its ends; exactly 0 where not even the worst batch exceeds.
    """
    total = len(cost_model.samples)
    size = min(batch_size, total)
    if errors is None:
        factor = 1 + cost_model.peak_model.error
        errors = ErrorFactors(factor, factor)
    # As if predictions were too high, right and too low, each by the most.
    limits = np.array([limit * errors.too_high, limit, limit / errors.too_low])

    worst = cost_model.samples.worst_peaks(cost_model.peak_model)[size - 1]
    if worst <= limits[2] and cost_model.worst_peak(size) <= limit:
        return Chance(0.0, 0.0, 0.0)

    simulated = int(np.clip(_SAMPLES_DRAWN // total, _FEWEST_EPOCHS, _MOST_EPOCHS))
    rng = np.random.default_rng(seed)
    epochs_out = np.zeros(3)
    for start in range(0, simulated, _EPOCHS_AT_ONCE):
        count = min(_EPOCHS_AT_ONCE, simulated - start)
        unshuffled = np.tile(np.arange(total), (count, 1))
        orders = rng.permuted(unshuffled, axis=1)
        peaks = _worst_of_epochs(cost_model, orders, size)
        epochs_out += (peaks[:, None] > limits).sum(axis=0)
    return _chance_of_counts(epochs_out, simulated).within(epochs)


def _chance_of_counts(epochs_out: Floats, simulated: int) -> Chance:
    """Tell how likely an epoch runs out, from how many simulated ones did.

    Args:
        epochs_out: Epochs that ran out, counted with predictions that are too high,
            right and too low ``[3]``.
        simulated: Epochs in all.
    """
    shares = epochs_out / simulated
    two_standard_errors = 2 * np.sqrt(shares * (1 - shares) / simulated)
    # Where none of n epochs ran out, the standard error is 0 and says nothing: the rule
    # of three gives the upper end of the 95 % interval.
    rule_of_three = np.where(epochs_out == 0, 3 / simulated, 0.0)
    spread = two_standard_errors + rule_of_three
    low = float(max(shares[0] - spread[0], 0.0))
    high = float(min(shares[2] + spread[2], 1.0))
    return Chance(low, float(shares[1]), high)


def _worst_of_epochs(
    cost_model: BatchCostModel, orders: NDArray[np.int64], size: int
) -> Floats:
    """Predict the worst batch of each shuffled epoch.

    Args:
        cost_model: What a batch takes.
        orders: The order of the rows in each ``[epochs, n]``.
        size: Samples of a batch.

    Returns:
        Bytes ``[epochs]``.
    """
    epochs, total = orders.shape
    in_whole_batches = total // size * size
    batches = orders[:, :in_whole_batches].reshape(-1, size)
    worst: Floats = cost_model.predict(batches).reshape(epochs, -1).max(axis=1)
    if in_whole_batches < total:
        last = cost_model.predict(orders[:, in_whole_batches:])
        worst = np.maximum(worst, last)
    return worst


@dataclass(frozen=True)
class BatchBudget:
    """Bounds of a batch within which every one fits; None sets no bound."""

    batch_size: int | None = None
    """Samples at most."""
    max_nodes: int | None = None
    """Nodes at most, of all types."""
    max_edges: int | None = None
    """Edges at most, of all relations."""
    max_tokens: int | None = None
    """Tokens at most, of sequences end to end."""
    bucket_by: str | None = None
    """"tokens" where samples of about one length go together, to pad less."""

    def loader_options(self) -> LoaderBounds:
        """Give the bounds that are set, as ``build_loader`` takes them.

        >>> BatchBudget(batch_size=8, max_nodes=900).loader_options()
        {'batch_size': 8, 'max_nodes': 900}
        """
        bounds: LoaderBounds = {}
        if self.batch_size is not None:
            bounds["batch_size"] = self.batch_size
        if self.max_nodes is not None:
            bounds["max_nodes"] = self.max_nodes
        if self.max_edges is not None:
            bounds["max_edges"] = self.max_edges
        if self.max_tokens is not None:
            bounds["max_tokens"] = self.max_tokens
        if self.bucket_by is not None:
            bounds["bucket_by"] = self.bucket_by
        return bounds

    def __str__(self) -> str:
        options = self.loader_options().items()
        return ", ".join(f"{name}={_format_option(value)}" for name, value in options)


def _format_option(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else repr(value)


def choose_budget(
    cost_model: BatchCostModel, limit: int, count: int, most: int
) -> BatchBudget:
    """Turn a limit into bounds that a loader keeps.

    Args:
        cost_model: What a batch takes.
        limit: Bytes.
        count: Samples of which every batch fits.
        most: Samples of a batch at most.

    Returns:
        ``max_nodes`` and ``max_edges`` for graphs, ``max_tokens`` for sequences end to
        end, each with ``batch_size``, the samples asked for: for more nothing was ever
        tracked, and each takes bytes of its own.  Only ``batch_size`` for padded ones,
        for equal samples, where the sizes do not explain the peak, and where a single
        sample is beyond the bounds though it fits.  Every batch within them fits.
    """
    samples, peak_model = cost_model.samples, cost_model.peak_model
    by_samples = BatchBudget(batch_size=count)
    if peak_model.error > _UNEXPLAINED:
        return by_samples

    # Bytes that each line leaves for nodes, edges or tokens, when a batch has as many
    # samples as it may have.
    free = limit / (1 + peak_model.error) - peak_model.lines[:, 0]
    free = free - np.maximum(peak_model.lines[:, 1], 0) * most
    if samples.kind == "sequences" and samples.loader_counts_tokens():
        if (np.abs(peak_model.lines[:, 3:]) > _NEGLIGIBLE_BYTES).any():
            # Padded places take bytes too, which no bound of tokens limits.
            return BatchBudget(batch_size=count, bucket_by="tokens")
        return _budget_of_tokens(cost_model, free, most) or by_samples
    is_graphs = samples.kind in {"graphs", "graphs with self-loops", "typed graphs"}
    if is_graphs and samples.loader_counts_nodes():
        return _budget_of_nodes(cost_model, free, most) or by_samples
    return by_samples


def _budget_of_tokens(
    cost_model: BatchCostModel, room: Floats, most: int
) -> BatchBudget | None:
    samples, lines = cost_model.samples, cost_model.peak_model.lines
    tokens = _most_that_fits(room, lines[:, 2])
    if tokens < samples.sizes[:, 1].max():
        return None
    return BatchBudget(batch_size=most, max_tokens=tokens)


def _budget_of_nodes(
    cost_model: BatchCostModel, room: Floats, most: int
) -> BatchBudget | None:
    samples, lines = cost_model.samples, cost_model.peak_model.lines
    node_columns = _columns_named("nodes", samples)
    edge_columns = _columns_named("edges", samples)
    nodes_of_samples = samples.sizes[:, node_columns].sum(axis=1)
    edges_of_samples = samples.sizes[:, edge_columns].sum(axis=1)
    # A loader's bounds are for all nodes and all edges: of typed graphs, each may be of
    # the type that takes most.  It takes at least 0: a batch may have as many edges as
    # it may and few nodes, so that a line which falls with each node saves nothing.
    of_nodes = lines[:, [1 + column for column in node_columns]]
    of_edges = lines[:, [1 + column for column in edge_columns]]
    bytes_per_node = of_nodes.max(axis=1, initial=0.0)
    bytes_per_edge = of_edges.max(axis=1, initial=0.0)
    if samples.kind == "graphs with self-loops":
        # As if every edge were one where that takes more; a batch may have none.
        bytes_per_edge += np.maximum(lines[:, 1 + SELF_LOOPS_COLUMN], 0.0)

    # Nodes and edges share the room in the ratio that the dataset has.
    edges_per_node = edges_of_samples.sum() / max(nodes_of_samples.sum(), 1)
    nodes = _most_that_fits(room, bytes_per_node + edges_per_node * bytes_per_edge)
    edges = int(nodes * edges_per_node)
    largest_nodes, largest_edges = nodes_of_samples.max(), edges_of_samples.max()
    if nodes < max(largest_nodes, 1) or edges < largest_edges:
        return None
    # Graphs without edges need no bound of them, and a loader takes none of 0.
    return BatchBudget(most, max_nodes=nodes, max_edges=edges or None)


def _columns_named(word: str, samples: Samples) -> list[int]:
    """Give the columns of sizes whose name begins with a word."""
    return [i for i, name in enumerate(samples.names) if name.startswith(word)]


def _most_that_fits(room: Floats, bytes_of_one: Floats) -> int:
    """Divide where one more takes something; 0 where nothing fits."""
    if (room < 0).any():
        return 0
    costs = bytes_of_one > 0
    if not costs.any():
        return 0
    return int((room[costs] / bytes_of_one[costs]).min())
