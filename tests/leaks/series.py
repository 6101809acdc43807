"""Series of readings made by chance: leaks of every rhythm, and what only looks so.

A leak is a rate x a rhythm x noise x a fall; its signal is given in standard errors of
the slope of a line in that noise.  A look-alike is flat from two thirds of the run on,
or returns to where it was.
"""

# ruff: noqa: ARG001 -- each shape is given the same three arguments
import math
import random
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
BASE = 1e8
EPOCHS = 30


def normal(r):
    return r.gauss(0, 1)


def heavy(r):
    """Draw from Student's distribution of 3 degrees, with a standard deviation of 1."""
    return r.gauss(0, 1) / math.sqrt(sum(r.gauss(0, 1) ** 2 for _ in range(3)))


NOISES = {"normal": normal, "heavy": heavy}


def noise_for(rate, signal, fall_at=None):
    """Give the noise in which a line of 30 epochs is so many standard errors.

    Where memory falls once, the height of the fall is to be estimated too, so that two
    shorter lines say how fast it grows.
    """
    if not signal:
        return 0.0
    lengths = [EPOCHS] if fall_at is None else [fall_at, EPOCHS - fall_at]
    # A line's slope has a variance of 12 / length^3 of its noise's.
    return rate / signal * math.sqrt(sum(length**3 / 12 for length in lengths))


@dataclass(frozen=True)
class Leak:
    """One way in which memory is kept, epoch after epoch."""

    rate: float
    """Bytes an epoch, on average."""
    period: int = 1
    """Something is kept every so many epochs."""
    noise: str = "normal"
    signal: float = 0.0
    """Standard errors of 30 epochs; 0 for a counter without noise."""
    fall: float = 0.0
    """Share of what had grown that falls away once."""
    fall_at: int = 15
    warmup: float = 0.0
    """Bytes that are taken within the first three epochs."""

    def readings(self, seed, epochs=EPOCHS):
        """Draw a run; a longer one of the same seed begins with the same readings."""
        r = random.Random(seed)
        sd = noise_for(self.rate, self.signal, self.fall_at if self.fall else None)
        readings = []
        for epoch in range(epochs + 1):
            grown = self.rate * self.period * (epoch // self.period)
            fallen = self.fall * self.rate * self.fall_at * (epoch >= self.fall_at)
            warm = self.warmup * min(epoch, 3) / 3
            readings.append(BASE + warm + grown - fallen + sd * NOISES[self.noise](r))
        return readings


def any_leak(seed):
    """Draw a leak of at least 40 KiB an epoch and 5 standard errors."""
    r = random.Random(seed)
    return Leak(
        rate=40 * KIB * 10 ** r.uniform(0, 3),
        period=r.choice([1, 1, 1, 2, 3, 5, 8, 10]),
        noise=r.choice(list(NOISES)),
        signal=r.choice([0.0, 0.0, r.uniform(5, 8), r.uniform(8, 30)]),
        fall=r.choice([0.0, 0.0, r.uniform(0.05, 0.5)]),
        fall_at=r.randint(8, 26),
        warmup=r.choice([0.0, 10 ** r.uniform(5, 8)]),
    )


def warm_up(r, epochs, end):
    return lambda epoch: min(1, epoch / min(end, epochs / 3))


def cache_that_fills(r, epochs, end):
    return lambda epoch: min(1, epoch / end)


def drift_that_ends(r, epochs, end):
    begin = r.uniform(0, end - 2)
    return lambda epoch: min(1, max(0, (epoch - begin) / (end - begin)))


def saturation(r, epochs, end):
    time = epochs / r.uniform(4, 15)
    return lambda epoch: 1 - math.exp(-epoch / time)


def coupons(r, epochs, end):
    """Each epoch asks for some of 40 things, which are made once."""
    seen, shares = set(), []
    for _ in range(epochs + 1):
        seen |= {r.randrange(40) for _ in range(round(255 / epochs))}
        shares.append(len(seen) / 40)
    return lambda epoch: shares[epoch]


def one_jump(r, epochs, end):
    at = r.randrange(1, epochs)
    return lambda epoch: float(epoch >= at)


def two_jumps(r, epochs, end):
    first, second = r.randrange(1, epochs), r.randrange(1, epochs)
    return lambda epoch: (epoch >= first) + (epoch >= second)


def saw(r, epochs, end):
    period = r.randint(2, max(3, epochs // 3))
    phase = r.randrange(period)
    return lambda epoch: (epoch + phase) % period / period


def records(r, epochs, end):
    """The largest batch so far, as a high-water mark shows it."""
    sizes = [r.random() ** 2 for _ in range(epochs + 1)]
    return lambda epoch: max(sizes[: epoch + 1])


def spikes(r, epochs, end):
    sizes = [(r.random() < 0.15) * r.expovariate(1) for _ in range(epochs + 1)]
    return lambda epoch: sizes[epoch]


def echo(r, epochs, end):
    levels = [0.0]
    for _ in range(epochs):
        levels.append(0.6 * levels[-1] + 0.1 * r.gauss(0, 1))
    return lambda epoch: levels[epoch]


def given_back(r, epochs, end):
    return lambda epoch: min(1, epoch / end) * (epoch < epochs * 0.75)


def nothing(r, epochs, end):
    return lambda epoch: 0.0


LOOKALIKES = {
    shape.__name__: shape
    for shape in (
        warm_up,
        cache_that_fills,
        drift_that_ends,
        saturation,
        coupons,
        one_jump,
        two_jumps,
        saw,
        records,
        spikes,
        echo,
        given_back,
        nothing,
    )
}


def lookalike(name, seed):
    """Draw a run that does not leak."""
    r = random.Random(f"{name} {seed}")
    epochs = r.choice([12, 20, 30, 30, 30, 45, 60, 90])
    noise = NOISES[r.choice(list(NOISES))]
    sd = r.choice([0.0, 0.0, r.uniform(1, 64) * KIB, 10 ** r.uniform(3, 6.5)])
    size = 10 ** r.uniform(4.5, 8)
    share = LOOKALIKES[name](r, epochs, epochs * r.uniform(0.1, 0.65) + 2)
    return [BASE + size * share(i) + sd * noise(r) for i in range(epochs + 1)]


@dataclass(frozen=True)
class DeviceRun:
    """A device's figures over a run in which only the driver's grows."""

    allocated: list[float]
    """Tensors: as many after each epoch, or as the last batch asks for."""
    outside: list[float]
    """What the driver has given out."""


def device_run(seed):
    """Draw calls that each keep a buffer, a kernel or a graph outside of tensors.

    As in pytorch's issues 125217 and 132332 (as much with each call), 121113 and 152550
    (with each new shape); Metal's driver gives memory in heaps of 8 MiB to 1 GiB.
    """
    r = random.Random(seed)
    epochs = r.choice([30, 30, 45, 60])
    base = r.choice([6, 600, 2900]) * MIB
    swing = r.choice([0.0, 0.0, 0.2])
    allocated = [base * (1 + swing * r.random()) for _ in range(epochs + 1)]
    heap = r.choice([1, 1, 8 * MIB, 32 * MIB, 512 * MIB])
    rate = max(10 ** r.uniform(5, 9), heap / 5)
    chance = r.choice([1.0, 1.0, 0.7, 0.4])
    cached = r.choice([0.0, 0.0, rate])
    warmup = 10 ** r.uniform(6, 9)
    kept, outside = 0.0, []
    for epoch in range(epochs + 1):
        if epoch and r.random() < chance:
            kept += rate / chance * r.uniform(0.5, 1.5)
        heaps = math.ceil((kept + cached * r.random()) / heap)
        outside.append(1.2 * base + warmup * min(1, epoch / 2) + heaps * heap)
    return DeviceRun(allocated, outside)


def start_up(seed, epochs):
    """Draw what a new program takes: imports of all sizes, then a table that is built.

    Returns:
        A reading an epoch, and the last epoch in which it was starting up.
    """
    r = random.Random(seed)
    ends = r.randint(2, epochs + 10)
    kind = r.choice(["even", "bursts", "slower and slower"])
    size, readings = 10.0 * MIB, []
    for epoch in range(epochs + 1):
        readings.append(size)
        if epoch < ends:
            step = 10 ** r.uniform(4, 7)
            if kind == "even":
                step = 2 * MIB * r.uniform(0.9, 1.1)
            elif kind == "slower and slower":
                step = 20 * MIB / (epoch + 1)
            size += step
    return readings, min(ends, epochs)
