"""``batch_transform`` is called with each batch, wherever batches are made."""

import re
import warnings
from pathlib import Path

import clients
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch_geometric import transforms
from torch_geometric.data import Batch, Data

from loaderkit import build_loader, pack
from loaderkit.errors import LoaderError, OptionError
from loaderkit.testing import assert_same

DOCS = Path(__file__).parents[2] / "docs" / "loader.md"


def doubled(batch):
    """Change a batch in place."""
    batch["x"] = batch["x"] * 2
    return batch


class Stream(IterableDataset):
    """Samples that come one after the other."""

    def __iter__(self):
        worker = get_worker_info()
        return iter(
            TABLES if worker is None else TABLES[worker.id :: worker.num_workers]
        )


GRAPHS = [clients.graph(i) for i in range(7)]
TABLES = [{"x": torch.full((3,), float(i)), "y": i} for i in range(7)]


def epochs(dataset, **options):
    """Read an epoch without the transform, and one with it."""
    options = {"batch_size": 3, "seed": 0, "probe": False, **options}
    plain = list(build_loader(dataset, **options))
    return plain, list(build_loader(dataset, batch_transform=doubled, **options))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_each_batch_of_any_dataset_goes_through_it(tmp_path, workers):
    packed = pack(GRAPHS, tmp_path / "graphs", workers=0)
    tables = pack(TABLES, tmp_path / "tables", workers=0)
    for dataset in (packed, packed[1:5], GRAPHS, tables, TABLES, Stream()):
        plain, transformed = epochs(dataset, num_workers=workers)

        assert len(plain) >= 2
        assert_same([doubled(batch) for batch in plain], transformed)


def test_it_comes_after_the_users_collate_fn():
    def largest(samples):
        return {"x": max(sample["x"].sum() for sample in samples)}

    plain, transformed = epochs(TABLES, collate_fn=largest, num_workers=0)

    assert [batch["x"] * 2 for batch in plain] == [b["x"] for b in transformed]


@pytest.mark.slow
def test_a_cache_is_still_gathered(tmp_path, monkeypatch):
    packed = pack(GRAPHS, tmp_path / "graphs", workers=0)
    # Batches are equal either way: reading samples must be out of reach.
    monkeypatch.setattr(type(packed), "read_together", None)

    [batch, *_] = build_loader(packed, batch_size=3, batch_transform=doubled)

    assert_same(batch, doubled(Batch.from_data_list(GRAPHS[:3])))


@pytest.mark.slow
def test_what_it_draws_follows_from_the_seed_for_any_number_of_workers(tmp_path):
    packed = pack([Data(pos=torch.ones(2, 3))] * 8, tmp_path / "c", workers=0)
    turn = transforms.RandomRotate(90)

    first, again, workers = (
        list(build_loader(packed, batch_size=2, seed=5, batch_transform=turn, **more))
        for more in ({}, {"probe": False}, {"num_workers": 2})
    )

    assert_same(first, again)
    assert_same(first, workers)
    assert len({batch.pos.sum().item() for batch in first}) == 4


def failing(batch):
    raise KeyError(batch["y"].tolist())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [TABLES, Stream()], ids=["list", "stream"])
def test_its_own_error_arrives_and_says_which_batch(dataset, workers):
    loader = build_loader(
        dataset, batch_size=3, batch_transform=failing, num_workers=workers, probe=False
    )

    with pytest.raises(KeyError, match="Joined, but not transformed: ") as raised:
        list(loader)
    assert "correct failing" in raised.value.fix


@pytest.mark.slow
def test_a_transform_that_returns_nothing_is_refused():
    loader = build_loader(TABLES, batch_transform=lambda batch: None)

    with pytest.raises(LoaderError, match="returned None"):
        next(iter(loader))


def test_it_is_refused_where_there_are_no_batches():
    with pytest.raises(OptionError, match="batch_transform"):
        build_loader(TABLES, batch_size=None, batch_transform=doubled)


def test_one_that_cannot_be_sent_to_a_spawned_worker_is_named():
    with pytest.raises(LoaderError, match="batch_transform"):
        build_loader(
            TABLES,
            batch_transform=lambda batch: batch,
            num_workers=1,
            multiprocessing_context="spawn",
        )


ARGUMENTS = {
    "Cartesian": {"norm": False},
    "Distance": {"norm": False},
    "LocalCartesian": {"norm": False},
    "Spherical": {"norm": False},
    "TargetIndegree": {"norm": False},
    "OneHotDegree": {"max_degree": 40},
    "LinearTransformation": {"matrix": torch.eye(3) * 2},
    "RandomScale": {"scales": (1, 2)},
    "RandomRotate": {"degrees": 30},
    "RandomJitter": {"translate": 0.1},
    "RandomFlip": {"axis": 0, "p": 0.5},
    "RandomShear": {"shear": 0.1},
    "RandomNodeSplit": {"num_val": 1, "num_test": 1},
    "ToDevice": {"device": "cpu"},
}
"""What transforms of PyG are made with here, where they need something."""
OTHER_GRAPHS = {"ToSLIC", "HalfHop", "AddGPSE", "AddMetaPaths", "AddRandomMetaPaths"}
"""Transforms of images, typed graphs or with models of their own."""


def drawn_graph(generator):
    """Draw a graph with all that transforms of PyG look at."""
    nodes, edges = torch.randint(3, 20, (2,), generator=generator).tolist()
    ends = torch.randint(nodes, (2, edges), generator=generator)
    ends = ends[:, ends[0] != ends[1]]
    ends = torch.cat([ends, ends[:, :3]], dim=1)
    return Data(
        x=torch.rand(nodes, 4, generator=generator),
        edge_index=ends,
        pos=torch.randn(nodes, 3, generator=generator),
        y=torch.randint(3, (nodes,), generator=generator),
        mask=torch.rand(nodes, generator=generator) > 0.5,
        edge_attr=torch.rand(ends.shape[1], 1, generator=generator),
        face=torch.randint(nodes, (3, 4), generator=generator),
    )


def is_equal_on_batches(name):
    """Tell whether a transform of PyG does to a batch what it does to each graph."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        graphs = [drawn_graph(generator) for _ in range(4)]
        try:
            transform = getattr(transforms, name)(**ARGUMENTS.get(name, {}))
            torch.manual_seed(0)
            of_graphs = Batch.from_data_list(
                [transform(graph.clone()) for graph in graphs]
            )
            torch.manual_seed(0)
            whole = transform(Batch.from_data_list(graphs))
            assert_same(
                sorted(whole.to_dict().items()), sorted(of_graphs.to_dict().items())
            )
        except Exception:  # noqa: BLE001 -- what a transform refuses is not equal
            return False
    return True


@pytest.mark.slow
def test_the_docs_name_the_transforms_of_pyg_that_do_to_a_batch_what_they_do_to_each():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        equal = {
            name
            for name in transforms.__all__
            if name not in OTHER_GRAPHS and is_equal_on_batches(name)
        }

    [row] = re.findall(r"^\| the same for a batch \| (.*) \|", DOCS.read_text(), re.M)
    assert {name.split("(")[0] for name in re.findall(r"`(.*?)`", row)} == equal


class Keeping:
    """Keeps what it was given, and sees that nobody changes it."""

    def __init__(self):
        self.batches, self.copies = [], []

    def __call__(self, batch):
        self.batches.append(batch["x"])
        self.copies.append(batch["x"].clone())
        batch["is_kept"] = all(map(torch.equal, self.batches, self.copies))
        return batch


@pytest.mark.slow
def test_what_a_transform_keeps_in_a_worker_is_not_written_over(tmp_path):
    """Batches without one are made in memory that is used again for later ones."""
    samples = [{"x": torch.full((9_000,), number)} for number in range(32)]
    dataset = pack(samples, tmp_path / "c", workers=0)

    loader = build_loader(
        dataset, batch_size=4, batch_transform=Keeping(), num_workers=1, probe=False
    )

    assert [batch["is_kept"] for batch in loader] == [True] * 8
