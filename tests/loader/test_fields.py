"""Names in ``follow_batch`` and ``exclude_keys`` have their effect, or are told."""

import warnings

import clients
import pytest
import torch
from torch.utils.data import Subset

from loaderkit import build_loader, open_cache, pack
from loaderkit.errors import OptionError


def graphs_with(fields):
    """Make graphs; the second has a field that the others lack."""
    graphs = [clients.graph(i) for i in range(6)]
    for name in fields:
        graphs[1][name] = torch.ones(1)
    return graphs


def sources(folder, fields=()):
    """Give the same graphs as every kind of dataset whose fields are known."""
    packed = pack(graphs_with(fields), folder / "c.lk", workers=0)
    return {
        "list": graphs_with(fields),
        "tuple": tuple(graphs_with(fields)),
        "part of a list": Subset(graphs_with(fields), [3, 1, 2]),
        "packed": packed,
        "part": packed[1:4],
        "subset": Subset(packed, [0, 1, 4]),
    }


@pytest.mark.parametrize("option", ["follow_batch", "exclude_keys"])
def test_names_of_fields_that_no_graph_has_are_refused(tmp_path, option):
    for kind, data in sources(tmp_path).items():
        for wrong, near in (
            ("edge_idx", "edge_index"),
            ("X", "x"),
            ("weight_", "weight"),
        ):
            with pytest.raises(
                OptionError, match=f"{option} names '{wrong}'"
            ) as caught:
                build_loader(data, num_workers=0, **{option: ["y", wrong]})
            assert near in caught.value.fix, kind


@pytest.mark.parametrize("option", ["follow_batch", "exclude_keys"])
def test_a_field_that_only_some_graphs_have_is_taken(tmp_path, option):
    for data in sources(tmp_path, ["rare"]).values():
        build_loader(data, num_workers=0, probe=False, **{option: ["rare"]})


class Adding:
    """A transform that adds a field."""

    def __call__(self, graph):
        graph.added = graph.x
        return graph


def test_a_field_that_a_transform_adds_is_taken_and_a_misspelt_one_warned_of(tmp_path):
    pack(graphs_with([]), tmp_path / "c.lk", workers=0)
    changed = open_cache(tmp_path / "c.lk", transform=Adding())
    options = {"num_workers": 0, "probe": False, "batch_size": 3}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [first, _] = build_loader(changed, follow_batch=["added"], **options)
    assert "added_batch" in first
    with pytest.warns(UserWarning, match="follow_batch names 'added_'.*mean 'added'"):
        list(build_loader(changed, follow_batch=["added_"], **options))
    with pytest.raises(OptionError, match="no graph of the dataset"):
        open_cache(tmp_path / "c.lk").batch([0, 1], exclude_keys=["added"])


def test_fields_of_hetero_graphs_and_of_nests_are_known(tmp_path):
    hetero = pack([clients.hetero(i) for i in range(4)], tmp_path / "h.lk", workers=0)
    nests = [{"g": clients.graph(i), "n": i} for i in range(4)]
    options = {"num_workers": 0, "probe": False, "batch_size": 2}

    for data, good in ((hetero, "x"), (nests, "x")):
        for batch in build_loader(data, follow_batch=[good], **options):
            assert "x_batch" in str(batch)
        with pytest.raises(OptionError, match="'pos'"):
            build_loader(data, follow_batch=["pos"], **options)
