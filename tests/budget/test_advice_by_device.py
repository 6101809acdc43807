"""Advice is for the device that a text names: no other vendor's tool, no other name."""

import itertools
import json
import re
from pathlib import Path

import pytest

from loaderkit.budget.diagnosis.diagnose import diagnose, diagnose_oom
from loaderkit.budget.diagnosis.judge import VERDICTS
from loaderkit.budget.diagnosis.messages import Message
from loaderkit.budget.remedies import remedies_for

CORPUS = Path(__file__).parents[1] / "corpora" / "oom_messages.json"
TEXTS = [entry["text"] for entry in json.loads(CORPUS.read_text())]
WORDS_OF = {
    r"nvidia-smi|PYTORCH_CUDA": {"cuda"},
    r"torch\.cuda|['\"]cuda['\"]": {"cuda", "hip"},
    r"rocm-smi": {"hip"},
    r"xpu-smi|torch\.xpu|['\"]xpu['\"]": {"xpu"},
    r"npu-smi|torch\.npu|['\"]npu['\"]": {"npu"},
    r"torch\.mps|['\"]mps['\"]": {"mps"},
}
UNKNOWN = [
    "RuntimeError: {} out of memory. Tried to allocate 2.00 GiB ({}:0; 16.00 GiB total \
capacity; 14.00 GiB already allocated; 1.00 GiB free)",
    "RuntimeError: [{}] out of memory: requested 2.00 GiB on device {}:0",
    "topsError: out of memory while allocating 2147483648 bytes on {}:0",
    "torch.{}.OutOfMemoryError: {} out of memory. requested 2.00 GiB",
]
DEVICES = ["gcu", "hpu", "mlu", "musa", "sdaa", "privateuseone", "vx"]


def wrong_advice(backend, codes):
    return [
        (code, words)
        for code in codes
        for words, backends in WORDS_OF.items()
        if re.search(words, code) and backend not in backends
    ]


@pytest.mark.parametrize("backend", ["cuda", "hip", "xpu", "npu", "mps", "cpu", None])
def test_every_remedy_is_written_for_its_device(backend):
    for verdict in VERDICTS:
        codes = [remedy.code for remedy in remedies_for(verdict, backend)]

        assert wrong_advice(backend, codes) == []


@pytest.mark.slow
def test_what_is_advised_on_texts_that_people_met_is_for_their_device():
    for text in TEXTS:
        diagnosis = diagnose_oom(text)

        codes = [entry.remedy.code for entry in diagnosis.advice]
        assert wrong_advice(diagnosis.backend, codes) == [], text


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_that_no_table_knows_is_the_users_own(device):
    for text in UNKNOWN:
        diagnosis = diagnose_oom(text.replace("{}", device))

        codes = [entry.remedy.code for entry in diagnosis.advice]
        assert diagnosis.requested == 2 << 30
        assert wrong_advice(None, codes) == []


def test_what_is_said_to_be_missing_is_missing():
    amounts = [None, 1 << 30, 6 << 30]
    names = ("requested", "free", "capacity", "allocated")
    for values in itertools.product(amounts, repeat=len(names)):
        stated = dict(zip(names, values, strict=True))
        diagnosis = diagnose(Message(is_oom=True, kind="device_oom", **stated))

        if diagnosis.verdict == "unclear":
            assert diagnosis.shortfall is None
            assert "does not say how much is missing" in str(diagnosis)
