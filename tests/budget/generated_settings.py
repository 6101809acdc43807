"""Allocator settings as people write and mistype them, drawn at random."""

import random

from loaderkit.budget.allocator_conf import COMMON_OPTIONS, CUDA_OPTIONS

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
]
SEPARATORS = [",", ",", ",", ",", ";", " ", ", ", "", ":", "=", ",,", "\t", "\n"]
COLONS = [":", ":", ":", ":", "=", ": ", "::", "", " : "]
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
    for number in range(random_numbers.randint(1, 3)):
        text += choose(SEPARATORS) if number else ""
        text += choose(NAMES) + choose(COLONS) + choose(["", *VALUES])
    return text


def generated(count, seed):
    random_numbers = random.Random(seed)
    return [generate(random_numbers) for _ in range(count)]
