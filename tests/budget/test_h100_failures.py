"""Failures that were planted on an H100, by what was planted.

The texts are what torch 2.11, CuPy, JAX and Numba raised there: limits of a process,
memory that another process holds, pieces that do not join, libraries that find the GPU
full; and errors of other kinds.
"""

import json
from pathlib import Path

import pytest

from loaderkit import diagnose_oom

FILE = Path(__file__).parents[1] / "corpora" / "h100_failures.json"
PLANTED = {entry["planted"]: entry for entry in json.loads(FILE.read_text())}


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_said(name):
    planted = PLANTED[name]

    diagnosis = diagnose_oom(f"{planted['type']}: {planted['text']}")

    assert diagnosis.is_oom == planted["ran_out"]


@pytest.mark.parametrize("name", [n for n in PLANTED if "verdict" in PLANTED[n]])
def test_the_verdict_is_what_was_planted(name):
    planted = PLANTED[name]

    diagnosis = diagnose_oom(f"{planted['type']}: {planted['text']}")

    assert diagnosis.verdict == planted["verdict"]


def test_a_limit_below_its_explanation_is_read():
    planted = PLANTED["malloc async fraction"]

    diagnosis = diagnose_oom(planted["text"])

    assert diagnosis.limit == 2 << 30
    assert "limit 2.00 GiB" in str(diagnosis)
    without = planted["text"].replace(": 2.00 GiB", ": 17179869184.00 GiB")
    assert "limit" not in str(diagnose_oom(without)).splitlines()[2]
