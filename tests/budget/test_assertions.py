"""assert_fits fails above a limit, and when a peak rises over its snapshot."""

import json

import pytest
import torch
from models import Attention
from torch import nn

from loaderkit import assert_fits, estimate_step
from loaderkit.errors import DoesNotFitError, OptionError

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
