"""Law: a sample that is no graph among graphs, or the other way round, is not packed.

It is named by its key, whoever packs, and a cache that was there stays as it was.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData

import loaderkit
from loaderkit.cli.main import main
from loaderkit.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_COUNT = 40


def _graph(number: int) -> Data:
    return Data(x=torch.full((3, 2), float(number)))


def _hetero(number: int) -> HeteroData:
    return HeteroData(a={"x": torch.full((2, 1), float(number))})


_OTHERS: dict[str, Any] = {
    "dict": {"a": torch.ones(2)},
    "tensor": torch.ones(2),
    "list": [torch.ones(2), 1],
    "number": 3,
}


def _samples(kind: str, odd: str, at: int) -> list[Any]:
    """Make graphs with one other sample, or others with one graph."""
    usual = {"graphs": _graph, "typed graphs": _hetero}.get(kind)
    if usual is None:
        return [_graph(0) if i == at else _OTHERS[odd] for i in range(_COUNT)]
    return [_OTHERS[odd] if i == at else usual(i) for i in range(_COUNT)]


class _Named(loaderkit.SafeDataset[Any]):
    """Samples with names for keys."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples
        super().__init__()

    def keys(self) -> list[str]:
        return [f"name{number}" for number in range(len(self.samples))]

    def load(self, key: str) -> Any:
        return self.samples[int(key.removeprefix("name"))]


class _Spans:
    """A stream in two spans."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __call__(self, span: int, spans: int) -> Iterator[Any]:
        return iter(self.samples[span::spans])


def _pack(how: str, samples: list[Any], path: Path) -> object:
    options: dict[str, Any] = {"overwrite": True, "shard_bytes": 300}
    if how == "workers":
        return loaderkit.pack(_Named(samples), path, workers=2, **options)
    if how == "threads":
        with ThreadPoolExecutor(1) as executor:
            return loaderkit.pack(_Named(samples), path, executor=executor, **options)
    if how == "stream":
        return loaderkit.pack(iter(samples), path, **options)
    if how == "spans":
        return loaderkit.pack(_Spans(samples), path, spans=2, workers=0, **options)
    return loaderkit.pack(_Named(samples), path, workers=0, **options)


_HOWS = ("alone", "workers", "threads", "stream", "spans")


@pytest.fixture(scope="module")
def cache_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a cache that each case copies: to pack it took a quarter of their time."""
    path = tmp_path_factory.mktemp("before") / "a.lk"
    loaderkit.pack([_graph(7)], path, workers=0)
    return path


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("at", [0, 1, 17, _COUNT - 1])
@pytest.mark.parametrize("odd", _OTHERS)
@pytest.mark.parametrize("kind", ["graphs", "typed graphs", "others"])
@pytest.mark.parametrize("how", _HOWS)
def test_one_sample_of_another_kind_is_refused_and_the_cache_before_stays(
    tmp_path: Path, cache_before: Path, how: str, kind: str, odd: str, at: int
) -> None:
    path = tmp_path / "a.lk"
    shutil.copytree(cache_before, path)
    before = (path / "manifest.json").read_bytes()

    with pytest.raises(DatasetError) as raised:
        _pack(how, _samples(kind, odd, at), path)

    # The first that is unlike the first sample of all.
    key = f"name{at or 1}" if how not in {"stream", "spans"} else ""
    text = str(raised.value)
    assert key in text
    assert "the first sample is" in text
    assert "leave out what is of another kind" in text
    assert (path / "manifest.json").read_bytes() == before
    assert float(loaderkit.open_cache(path)[0].x[0, 0]) == 7


@pytest.mark.parametrize("how", _HOWS)
def test_samples_of_one_kind_are_packed_by_all(tmp_path: Path, how: str) -> None:
    """The twin: what is refused above is the one sample."""
    samples = [_graph(number) for number in range(_COUNT)]

    packed: Any = _pack(how, samples, tmp_path / "a.lk")

    assert len(packed) == _COUNT


def test_the_command_names_the_odd_file_and_leaves_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = tmp_path / "raw", tmp_path / "a.lk"
    folder.mkdir()
    for number in range(6):
        torch.save(_graph(number), folder / f"{number}.pt")
    assert main(["pack", str(folder), str(path), "--workers", "0"]) == 0
    torch.save({"x": torch.ones(2)}, folder / "3odd.pt")
    capsys.readouterr()

    code = main(["pack", str(folder), str(path), "--workers", "0", "--overwrite"])

    told = capsys.readouterr()
    assert code == 1
    assert "3odd.pt" in told.err
    assert main(["inspect", str(path)]) == 0
    assert len(loaderkit.open_cache(path)) == 6
