"""assert_fits fails above a limit, and when a peak rises over its snapshot."""

import json

import pytest
import torch
from models import Attention
from torch import nn

from loaderkit import assert_fits, estimate_step
from loaderkit.errors import (
    BudgetError,
    DoesNotFitError,
    NotWrittenError,
    OptionError,
)

X = torch.zeros(16, 40, 7)


@pytest.mark.slow
def test_what_fits_passes_and_what_does_not_fails_with_the_cause():
    assert assert_fits(Attention(), X, "1 GiB", device="mps").target.kind == "mps"

    with pytest.raises(DoesNotFitError, match=r"more than 1\.00 MiB") as caught:
        assert_fits(Attention(), X, 2**20, device="mps")

    assert isinstance(caught.value, AssertionError)
    assert "mostly activations" in str(caught.value)
    assert "plan_batch" in caught.value.fix


@pytest.mark.slow
def test_a_peak_that_rises_over_its_snapshot_fails(tmp_path, monkeypatch):
    file = tmp_path / "memory.json"
    assert_fits(Attention(), X, snapshot=file)
    assert_fits(Attention(), X, snapshot=file)
    assert_fits(nn.Linear(7, 7), X, snapshot=file)  # an entry of its own

    with pytest.raises(DoesNotFitError, match="rose by") as caught:
        assert_fits(Attention(layers=3), X, snapshot=file)
    assert "grew by" in str(caught.value)
    assert_fits(Attention(layers=3), X, snapshot=file, rise=2.0)

    monkeypatch.setenv("LOADERKIT_UPDATE_SNAPSHOTS", "1")
    assert_fits(Attention(layers=3), X, snapshot=file)
    # Others grew: what says no, or nothing that can be read, accepts no peak.
    for text in ("0", "no", "False", "OFF"):
        monkeypatch.setenv("LOADERKIT_UPDATE_SNAPSHOTS", text)
        with pytest.raises(DoesNotFitError, match="rose by"):
            assert_fits(Attention(layers=5), X, snapshot=file)
    for text in ("2", "maybe", " ", "²"):
        monkeypatch.setenv("LOADERKIT_UPDATE_SNAPSHOTS", text)
        with pytest.raises(OptionError, match="LOADERKIT_UPDATE_SNAPSHOTS must be"):
            assert_fits(Attention(layers=5), X, snapshot=file)
    monkeypatch.delenv("LOADERKIT_UPDATE_SNAPSHOTS")
    peaks = json.loads(file.read_text())
    peak = estimate_step(Attention(layers=3), X).peak
    assert peaks["Attention on cpu"]["peak"] == peak
    assert set(peaks) == {"Attention on cpu", "Linear on cpu"}
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
def test_a_rise_below_the_allowed_one_passes(tmp_path):
    file = tmp_path / "memory.json"
    assert_fits(Attention(), X, snapshot=file, name="small")
    peaks = json.loads(file.read_text())
    peaks["small"]["peak"] = round(peaks["small"]["peak"] / 1.009)
    file.write_text(json.dumps(peaks))

    assert_fits(Attention(), X, snapshot=file, name="small")


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="needs limit=, snapshot="):
        assert_fits(Attention(), X)
    with pytest.raises(TypeError, match="no option 'margin'"):
        assert_fits(Attention(), X, "1 GiB", margin=3)


ENTRY = {"peak": 900, "phase": "step", "parts": {"batch": 40}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "Expecting"),
        (b"", "Expecting"),
        (b"\xff\xfe\x00", "decode"),
        (b"[]", "a list"),
        (b"7", "an int"),
        (b'{"small": 7}', "'small' is 7"),
        (b'{"small": null}', "'small' is None"),
        (b'{"small": {}}', "'small' is {}"),
        *(
            (json.dumps({"small": {**ENTRY, name: value}}).encode(), "'small' is")
            for name, value in [
                ("peak", 0),
                ("peak", -3),
                ("peak", None),
                ("peak", "900"),
                ("peak", float("nan")),
                ("parts", []),
                ("parts", {"batch": "40"}),
            ]
        ),
    ],
)
def test_a_file_that_holds_no_snapshots_is_told_and_stays_as_it_is(
    tmp_path, content, reason
):
    file = tmp_path / "memory.json"
    file.write_bytes(content)

    with pytest.raises(BudgetError, match=f"(?s)memory.json holds no.*{reason}"):
        assert_fits(nn.Linear(7, 1), X, snapshot=file, name="small")
    assert file.read_bytes() == content


def test_an_entry_as_it_is_written_here_is_taken(tmp_path):
    file = tmp_path / "memory.json"
    peak = estimate_step(nn.Linear(7, 1), X).peak
    file.write_text(json.dumps({"small": {**ENTRY, "peak": peak}}))

    assert_fits(nn.Linear(7, 1), X, snapshot=file, name="small")


def test_snapshots_that_cannot_be_written_are_told_with_the_folder(tmp_path):
    with pytest.raises(BudgetError, match="holds no snapshots"):
        assert_fits(nn.Linear(7, 1), X, snapshot=tmp_path)
    with pytest.raises(NotWrittenError, match="there is no folder"):
        assert_fits(nn.Linear(7, 1), X, snapshot=tmp_path / "none" / "memory.json")
