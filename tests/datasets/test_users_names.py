"""Names of a user's subclass: none of ours is replaced by one of them in silence."""

import pytest
import torch

from loaderkit import SafeDataset, SafeGraphDataset
from loaderkit.datasets.taken_names import private_names_of
from loaderkit.errors import DatasetError

OURS = sorted(private_names_of(SafeGraphDataset))


class Squares(SafeDataset):
    def __init__(self, **options):
        super().__init__(**options)
        # Names that a dataset may well have for its own files and indices.
        self._rows, self._keys, self._opened = [1], ["none"], object()
        self._generation, self._plain, self._file, self._cache = "a", True, None, {}

    def keys(self):
        return range(4)

    def load(self, key):
        return {"x": torch.tensor(key * key)}


@pytest.mark.parametrize("is_packed", [False, True])
def test_attributes_of_a_subclass_decide_nothing(tmp_path, is_packed):
    dataset = Squares(cache=tmp_path / "c" if is_packed else None)

    assert [sample["x"].item() for sample in dataset] == [0, 1, 4, 9]
    assert dataset[2:][1]["x"] == 9
    assert dataset._rows == [1]


@pytest.mark.many_cases
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("kind", [SafeDataset, SafeGraphDataset])
def test_a_private_name_of_ours_is_refused_in_a_subclass(kind, name):
    if name not in private_names_of(kind):
        return
    for bases in ((kind,), (type("Mixin", (), {name: 1}), kind)):
        content = {name: lambda self: None} if len(bases) == 1 else {}
        with pytest.raises(DatasetError, match=f"'{name}' of its own"):
            type("Theirs", bases, content)
    dataset = type("Theirs", (kind,), {})()
    with pytest.raises(DatasetError, match=f"'{name}' of its own"):
        setattr(dataset, name, 1)


def test_what_python_and_notebooks_ask_for_may_be_replaced():
    content = {"_repr_html_": lambda self: "mine", "__repr__": lambda self: "mine"}

    assert repr(type("Theirs", (SafeDataset,), content)()) == "mine"
    assert "_open_cache" in OURS
