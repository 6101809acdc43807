"""Choosing rows as Hugging Face's datasets do, many times over.

``CASES=1500 SEED=1 pytest tests/soak/habits.py``; it needs ``datasets``.
"""

import os
import random

from datasets import Dataset

from loaderkit import pack

CASES, SEED = (int(os.environ.get(k, v)) for k, v in (("CASES", 1500), ("SEED", 1)))
COUNTS = (1, 2, 3, 7, 23)
REFUSALS = (ValueError, TypeError, IndexError)


def numbers(dataset):
    return [sample["number"] for sample in dataset]


def size(r, count):
    return r.choice([None, r.randint(-1, count + 1), r.uniform(-0.1, 1.1), r.random()])


def drawn(r, count):
    """Draw a call: a function of a dataset that gives the rows it chose."""
    test, train, shuffled = size(r, count), size(r, count), r.random() < 0.8
    seed, parts, index = r.randint(0, 99), r.randint(1, count), r.random() < 0.5

    def split(data):
        halves = data.train_test_split(test, train, shuffled, seed=seed)
        return {name: numbers(part) for name, part in halves.items()}

    return r.choice(
        [
            split,
            lambda data: numbers(data.shuffle(seed=seed)),
            lambda data: numbers(data.shard(parts, parts - 1, index)),
            # skip past the last row gives none here, and an IndexError there
            lambda data: numbers(data.skip(min(parts, count - 1)).take(seed % 7)),
        ]
    )


def chosen(call, data):
    try:
        return call(data)
    except REFUSALS:
        return "refused"


def test_the_same_rows_are_chosen_or_both_refuse(tmp_path):
    r, pairs = random.Random(SEED), {}
    for count in COUNTS:
        rows = [{"number": number} for number in range(count)]
        packed = pack(rows, tmp_path / f"{count}.lk", workers=0)
        pairs[count] = packed, Dataset.from_list(rows)

    refused = 0
    for _ in range(CASES):
        count = r.choice(COUNTS)
        call = drawn(r, count)
        ours, theirs = (chosen(call, data) for data in pairs[count])
        assert ours == theirs
        refused += ours == "refused"

    print(f"{CASES - refused} chosen alike, {refused} refused by both")
