"""Shapes that a counter can follow, fitted by least squares.  Pure.

Two families are compared.  *Lines* go on: a line, or a line with one shift of its
level (a library that is loaded late, a fall when pages go back).  *Ended* shapes are
flat at the end: a constant, one or two jumps, a ramp that stops, a cache that
saturates, records that become rare.  A *bend* belongs to neither: it is flat, and rises
from some reading on until the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loaderkit.array_types import Floats

ENDED_BY = 2 / 3
"""A ramp that ended before this share of the run is one of the ended shapes.  One that
ended later can hardly be told from a line, wherever there is noise."""
_STOPPED_BY = 0.9
"""Without noise a ramp can be seen to stop as late as this."""
_BEFORE_SHIFT = 3
"""Readings before a shift beneath a line: fewer are the warm-up."""
_SHIFT_NATS = 4.0
"""By so much more than the criterion asks a shift must improve a line.  One is looked
for at every reading: without this, one noisy line in ten gets a shift (measured)."""
_SHIFTS_TRIED = 5
"""Places of a shift that are looked at, the best first."""
_SEARCH_NATS = 1.5
"""What shapes with two places to choose are set back by: among so many some fit noise
by chance."""
_FIRST_JUMPS = 40
"""Places that are tried for the first of two jumps; all pairs of a long series take
0.2 s."""


@dataclass(frozen=True)
class LineFit:
    """A line through readings, perhaps with one shift of its level."""

    slope: float
    """Growth per unit of time."""
    slope_error: float
    """Standard error of the slope for independent noise."""
    residuals: Floats
    """Readings less the fit [readings]."""
    parameters: int
    """That were fitted, the place of a shift included."""
    shift_at: int | None = None
    """Index of the first reading after the shift."""
    shift: float = 0.0
    """By how much the level moved there."""

    @property
    def freedom(self) -> int:
        """Degrees of freedom that are left."""
        return max(1, len(self.residuals) - self.parameters)


@dataclass(frozen=True)
class Bend:
    """Readings that are flat up to one of them, and lie on a rising line behind it."""

    at: int
    """Index of the last reading of the flat part."""
    slope: float
    """Growth per unit of time behind it; negative where it falls."""
    slope_error: float
    """Standard error of the slope for independent noise."""
    criterion: float
    """Its Bayesian information criterion; comparable with :func:`criterion_of`."""


def fit_line(
    times: Floats,
    values: Floats,
    noise_floor: float,
) -> LineFit:
    """Fit a line; with a shift of the level where that explains far more.

    Args:
        times: When, rising [readings].
        values: The readings [readings].
        noise_floor: Standard deviation below which residuals count as none.

    Returns:
        The line, unless the Bayesian information criterion clearly prefers a shift.
    """
    line = _fit_columns([np.ones_like(times), times], times, values)
    steps = _step_columns(times)[:, _BEFORE_SHIFT - 1 :]
    if steps.shape[1] == 0:
        return line
    basis = np.stack([np.ones_like(times), times], axis=1)
    squares = _squares_with_each(basis, steps, values)
    for best in map(int, np.argsort(squares)[:_SHIFTS_TRIED]):
        columns = [np.ones_like(times), times, steps[:, best]]
        shifted = _fit_columns(columns, times, values, best + _BEFORE_SHIFT)
        gain = criterion_of(line, noise_floor) - criterion_of(shifted, noise_floor)
        if gain < _SHIFT_NATS:
            break
        # An early rise beneath a line is how a cache looks that fills ever more slowly.
        if shifted.shift < 0 or best + _BEFORE_SHIFT > len(times) / 3:
            return shifted
    return line


def best_ended(
    times: Floats,
    values: Floats,
    noise_floor: float,
    *,
    stopped_late: bool = False,
) -> float:
    """Fit the shapes that are flat at the end.

    Args:
        times: When, rising [readings].
        values: The readings [readings].
        noise_floor: Standard deviation below which residuals count as none.
        stopped_late: Count ramps among them that stopped in the last third.

    Returns:
        The least Bayesian information criterion among them; comparable with
        :func:`criterion_of`.
    """
    count = len(times)
    constant = np.ones_like(times)
    start, span = times[0], times[-1] - times[0]
    progress = (times - start) / span
    steps = _step_columns(times)
    searched = 5 + 2 * _SEARCH_NATS / math.log(count)
    # The sum of squares of each shape, and how many parameters it has.
    fits: list[tuple[float, float]] = [
        (_squares_of(constant[:, None], values), 1),
        (float(_squares_with_each(constant[:, None], steps, values).min()), 3),
    ]
    for column in steps.T[:: max(1, count // _FIRST_JUMPS)]:
        two_jumps = np.stack([constant, column], axis=1)
        fits.append(
            (float(_squares_with_each(two_jumps, steps, values).min()), searched)
        )
    latest_end = _STOPPED_BY if stopped_late else ENDED_BY
    for curve in _ended_curves(progress, latest_end):
        basis = np.stack([constant, curve], axis=1)
        fits.append((_squares_of(basis, values), 3))
        # The same with one jump besides.
        fits.append((float(_squares_with_each(basis, steps, values).min()), searched))
    return min(
        _bayesian_criterion(squares, count, parameters, noise_floor)
        for squares, parameters in fits
    )


def fit_bend(
    times: Floats,
    values: Floats,
    noise_floor: float,
    *,
    first: int,
) -> Bend:
    """Fit a flat part with a line behind it, as well as one does.

    Args:
        times: When, rising [readings].
        values: The readings [readings].
        noise_floor: Standard deviation below which residuals count as none.
        first: Least index of the last flat reading.

    Returns:
        The best of all places that the bend can have.
    """
    count = len(times)
    candidates = np.arange(first, count - 1)
    ramps = np.maximum(times[:, None] - times[None, candidates], 0.0)
    constant = np.ones((count, 1))
    squares = _squares_with_each(constant, ramps, values)
    best = int(np.argmin(squares))

    ramp = _project_out(constant, ramps[:, [best]])[:, 0]
    power = float(ramp @ ramp)
    # Level, slope and place were fitted.
    variance = float(squares[best]) / max(1, count - 3)
    error = max(math.sqrt(variance), noise_floor) / math.sqrt(power)
    return Bend(
        at=int(candidates[best]),
        slope=float(ramp @ values) / power,
        slope_error=error,
        criterion=_bayesian_criterion(float(squares[best]), count, 3, noise_floor),
    )


def criterion_of(fit: LineFit, noise_floor: float) -> float:
    """Give the Bayesian information criterion of a line.

    Args:
        fit: A line.
        noise_floor: Standard deviation below which residuals count as none.

    Returns:
        Nats, half of the usual form; the lower, the better the fit.
    """
    squares = float(fit.residuals @ fit.residuals)
    return _bayesian_criterion(squares, len(fit.residuals), fit.parameters, noise_floor)


def _ended_curves(progress: Floats, latest: float) -> Iterator[Floats]:
    """Give curves over 0 to 1 that rise and are flat at the end."""
    # Ramps from the start; their ends as close as the epochs of a run of thirty.
    for end in np.arange(0.1, latest + 1e-9, 1 / 30):
        yield np.minimum(progress, end)
    # Ramps that begin later.
    for begin in (0.1, 0.2, 0.3, 0.4):
        for end in np.arange(begin + 0.1, latest + 1e-9, 0.1):
            yield np.clip(progress, begin, end)
    # Caches that saturate.
    for scale in (1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 0.4):
        yield 1 - np.exp(-progress / scale)
    # Records, which become rare but never end.
    for scale in (1 / 30, 1 / 10):
        yield np.log1p(progress / scale)


def _fit_columns(
    columns: list[Floats],
    times: Floats,
    values: Floats,
    shift_at: int | None = None,
) -> LineFit:
    """Fit columns, the second of which is time."""
    design = np.stack(columns, axis=1)
    # Centred times keep the normal equations well-conditioned.
    design[:, 1] -= times.mean()
    inverse = np.linalg.inv(design.T @ design)
    level = values.mean()
    coefficients = inverse @ (design.T @ (values - level))
    residuals = values - level - design @ coefficients
    parameters = 2 if shift_at is None else 4
    freedom = max(1, len(values) - parameters)
    variance = float(residuals @ residuals) / freedom
    return LineFit(
        slope=float(coefficients[1]),
        slope_error=math.sqrt(variance * float(inverse[1, 1])),
        residuals=residuals,
        parameters=parameters,
        shift_at=shift_at,
        shift=0.0 if shift_at is None else float(coefficients[2]),
    )


def _step_columns(times: Floats) -> Floats:
    """Give the shifts after each reading but the last [readings, shifts]."""
    return np.tri(len(times), len(times) - 1, -1)


def _squares_of(basis: Floats, values: Floats) -> float:
    """Give the sum of squared residuals of a fit."""
    residuals = _project_out(basis, values[:, None])
    return float((residuals * residuals).sum())


def _squares_with_each(
    basis: Floats,
    columns: Floats,
    values: Floats,
) -> Floats:
    """Give the sum of squared residuals with each column added in its turn."""
    residuals = _project_out(basis, values[:, None])[:, 0]
    # By the theorem of Frisch, Waugh and Lovell one projection serves all columns.
    new_parts = _project_out(basis, columns)
    power = (new_parts * new_parts).sum(axis=0)
    is_new = power > 1e-9 * len(values)  # the others are in the basis already
    gain = np.zeros(columns.shape[1])
    gain[is_new] = (residuals @ new_parts[:, is_new]) ** 2 / power[is_new]
    remaining: Floats = np.maximum(residuals @ residuals - gain, 0.0)
    return remaining


def _project_out(basis: Floats, columns: Floats) -> Floats:
    """Take out of columns what a basis explains."""
    orthonormal, _ = np.linalg.qr(basis)
    remaining: Floats = columns - orthonormal @ (orthonormal.T @ columns)
    return remaining


def _bayesian_criterion(
    squares: float,
    count: int,
    parameters: float,
    noise_floor: float,
) -> float:
    """Weigh a fit against its parameters, in nats (Schwarz 1978)."""
    variance = squares / count + noise_floor**2
    return count / 2 * math.log(variance) + parameters / 2 * math.log(count)
