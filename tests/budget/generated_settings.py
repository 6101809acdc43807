"""Allocator settings as people write and mistype them, drawn at random."""

import random

from loaderkit.budget.environment.allocator_options import (
    ALLOCATOR_OPTIONS,
    OptionKind,
)

OPTION_NAMES = [option.name for option in ALLOCATOR_OPTIONS]
COMMON_NAMES = [option.name for option in ALLOCATOR_OPTIONS if option.builds == "every"]
NAMES = [*OPTION_NAMES, "max_split_size", "foo", "Expandable_Segments"]
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
    # the ends of ranges, of int and of size_t, and the name that ROCm has
    "21",
    "0.0",
    "-0.0",
    "1.5",
    "2147483647",
    "2147483648",
    "-2147483649",
    "hipMallocAsync",
    "256",
    "[",
    "[256:1,>:4",
    "[4:2:1]",
    "[512:0,1024:1]",
    "[256:-1]",
    "[99999999999:1]",
    "128MB",
    "on",
    "None",
]
VALUES_OF_KIND = {
    OptionKind.FLAG: ["True", "False", "True", "1"],
    OptionKind.MEGABYTES: ["0", "64", "64MB", "-1"],
    OptionKind.SEGMENT: ["10", "11", "20", "32"],
    OptionKind.SPLIT: ["19", "20", "21", "32", "128", "-5", "4294967296"],
    OptionKind.RATIO: ["0.8", "0.01", "0", "1", "1e-3"],
    OptionKind.SHARE: ["0.5", "0", "1", "-0.0", "1.0001"],
    OptionKind.DIVISIONS: ["4", "0", "[256:1,512:2,>:4]", "[1:0]", "[>:8]", "[2:3]"],
    OptionKind.THREADS: ["1", "8", "128", "256", "12"],
    OptionKind.POSITIVE: ["1", "64", "0"],
    OptionKind.BACKEND: ["native", "native", "cudaMallocAsync", "hipMallocAsync"],
}
"""Values that fit, and those at the ends of what fits."""
SEPARATORS = [",", ",", ",", ",", ";", " ", ", ", "", ":", "=", ",,", "\t", "\n"]
SEPARATORS += ["|", "\uff0c"]
COLONS = [":", ":", ":", ":", "=", ": ", "::", "", " : ", "\uff1a"]
AROUND = ["", "", "", "", " ", "'", '"', "\t", "\u00a0", "\ufeff"]
TOKENS = [
    *[",", ":", "[", "]", ">", "True", "64", "0.5", "256", "x"],
    " ",
    *COMMON_NAMES,
]


def careful(random_numbers):
    """Options that exist, with values that fit or nearly do."""
    options = random_numbers.choices(ALLOCATOR_OPTIONS, k=random_numbers.randint(1, 3))
    return random_numbers.choice([",", ",", ", ", ",\t"]).join(
        f"{option.name}:{random_numbers.choice(VALUES_OF_KIND[option.kind])}"
        for option in options
    )


def generate(random_numbers):
    """One setting: careful, or options as people mistype them, or a heap of tokens."""
    choose = random_numbers.choice
    way = random_numbers.random()
    if way < 0.4:
        return careful(random_numbers)
    if way < 0.55:
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
