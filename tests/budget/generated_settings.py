"""Allocator settings as people write and mistype them, drawn at random."""

import random

from loaderkit.budget.environment.allocator_conf import COMMON_OPTIONS, CUDA_OPTIONS

NAMES = [*COMMON_OPTIONS, *CUDA_OPTIONS, "max_split_size", "foo", "Expandable_Segments"]
VALUES = [
    "True",
    "False",
    "true",
    "Yes",
    "1",
    "0",
    "20",
    "19",
    "64",
    "64abc",
    "abc",
    "-5",
    "+64",
    "1e3",
    "64.5",
    "0x40",
    "0.8",
    "1.0",
    ".5",
    "0.5x",
    "nan",
    "1e-400",
    "1e400",
    "inf",
    "80%",
    "[256:1,512:2,>:4]",
    "[256:1",
    "[>:3]",
    "[]",
    "[300:1]",
    "256]",
    "3",
    "4",
    "native",
    "cudaMallocAsync",
    "99999999999999999999",
    "10",
    "11",
    "[256:1,]",
    "[256]",
    "[a:1]",
    "[1:a]",
    "128",
    "18446744073709551615",
    # digits, blanks and letters that only look like ASCII, quotes, other notations
    "\uff11\uff12\uff18",
    "12\uff18",
    "\u0661\u0662",
    "128\u200b",
    "\u00a0128",
    "\u0422rue",
    "'True'",
    '"128"',
    "`64`",
    "1_000",
    "0b1000",
    "0x1p-1",
    "1/2",
    "128MB",
    "on",
    "None",
]
SEPARATORS = [",", ",", ",", ",", ";", " ", ", ", "", ":", "=", ",,", "\t", "\n"]
SEPARATORS += ["|", "\uff0c"]
COLONS = [":", ":", ":", ":", "=", ": ", "::", "", " : ", "\uff1a"]
AROUND = ["", "", "", "", " ", "'", '"', "\t", "\u00a0", "\ufeff"]
TOKENS = [
    *[",", ":", "[", "]", ">", "True", "64", "0.5", "256", "x"],
    " ",
    *COMMON_OPTIONS,
]


def generate(random_numbers):
    """One setting: options as people mistype them, or a heap of tokens."""
    choose = random_numbers.choice
    if random_numbers.random() < 0.25:
        return "".join(choose(TOKENS) for _ in range(random_numbers.randint(1, 14)))
    text = choose(["", "", "", " ", ","])
    name = choose(NAMES) if random_numbers.random() < 0.2 else None  # one key, twice
    for number in range(random_numbers.randint(1, 3)):
        text += choose(SEPARATORS) if number else ""
        text += (name or choose(NAMES)) + choose(COLONS) + choose(["", *VALUES])
    around = choose(AROUND)
    return around + text + around


def generated(count, seed):
    random_numbers = random.Random(seed)
    return [generate(random_numbers) for _ in range(count)]
