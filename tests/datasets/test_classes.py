"""Classes of samples are found by name in a closed list, and made empty."""

import collections
import json
import pickle
import sys

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from loaderkit.datasets.classes import (
    ClassRegistry,
    class_name,
    loaded_classes,
    modules_of,
)
from loaderkit.datasets.structure import Nest, Structure
from loaderkit.errors import DatasetError

HERE = (__name__,)


class Outer:
    class Inner(Data):
        class Innermost(Data):
            pass

    alias = collections.OrderedDict
    number = 7


class Plain(Data):
    pass


Renamed = Plain


class Demanding(Data):
    """A graph whose constructor wants more than a cache knows."""

    def __init__(self, molecule):
        super().__init__(x=molecule)


class DemandingHetero(HeteroData):
    def __init__(self, molecule):
        super().__init__()
        self["atom"].x = molecule


class Filled(Data):
    """A graph that is never empty."""

    def __init__(self, **fields):
        super().__init__(z=torch.ones(1), **fields)


@pytest.mark.parametrize("cls", [Plain, Outer.Inner, Outer.Inner.Innermost])
def test_classes_of_the_datasets_own_module_are_found_also_inside_others(cls):
    assert ClassRegistry(modules=HERE)[class_name(cls)] is cls


@pytest.mark.parametrize(
    "name",
    [
        "Renamed",  # its own name is Plain
        "Outer.alias",  # a class of another module
        "Outer.number",
        "Outer.number.real",
        "Outer.Inner.Missing",
        "Outer.Inner.__init__",
        "Outer.",
        "Missing",
        "pytest",
    ],
)
def test_what_is_no_class_of_that_name_is_refused_with_the_argument_to_pass(name):
    with pytest.raises(DatasetError, match="not known here") as caught:
        ClassRegistry(modules=HERE)[f"{__name__}:{name}"]

    assert f"classes=[{name}]" in caught.value.fix


def test_classes_of_modules_that_are_not_loaded_are_not_imported():
    with pytest.raises(DatasetError, match="not known here"):
        ClassRegistry(modules=["this_is_no_module"])["this_is_no_module:Thing"]

    assert "this_is_no_module" not in sys.modules


def test_what_is_passed_must_be_classes():
    with pytest.raises(TypeError, match="classes must be classes, got 'Plain'"):
        ClassRegistry(["Plain"])


def test_known_classes_travel_to_a_worker():
    classes = ClassRegistry([collections.ChainMap], modules=["json"])

    again = pickle.loads(pickle.dumps(classes))

    assert again["collections:ChainMap"] is collections.ChainMap
    assert again["json.decoder:JSONDecodeError"] is json.JSONDecodeError


@pytest.mark.parametrize("cls", [Demanding, DemandingHetero, Filled, Plain, HeteroData])
def test_a_blank_graph_has_no_fields_whatever_its_constructor_wants(cls):
    classes = ClassRegistry([cls])

    blank = classes.blank(class_name(cls))

    assert type(blank) is cls
    assert blank.keys() == []


def test_blank_graphs_share_nothing():
    classes = ClassRegistry([Demanding])

    first, second = (classes.blank(class_name(Demanding)) for _ in range(2))
    first.x = torch.ones(1)

    assert "x" not in second


@pytest.mark.parametrize(
    ("kind", "cls", "fits"),
    [
        ("graph", "torch_geometric.data.data:Data", True),
        ("graph", "collections:OrderedDict", False),
        ("dict", "collections:OrderedDict", True),
        ("dict", "torch_geometric.data.data:Data", False),
        ("named", "collections:OrderedDict", False),
        ("dataclass", "collections:OrderedDict", False),
        ("dict", "os:system", False),
    ],
)
def test_a_class_fits_only_containers_of_its_kind(kind, cls, fits):
    assert ClassRegistry().fits(Nest(kind, cls)) is fits


def test_modules_are_those_of_the_user_alone():
    class OfMine(Plain):
        pass

    assert modules_of(OfMine) == HERE
    assert modules_of(dict) == ()


def test_classes_that_this_process_packed_are_found_and_others_left_out():
    names = [class_name(Outer.Inner), f"{__name__}:Gone", "gone:Gone", "os:sep"]
    structure = Structure([Nest("list", children=tuple(_graphs_of_classes(names)))])

    assert loaded_classes(structure) == (Outer.Inner,)


def _graphs_of_classes(names):
    return (Nest("graph", name) for name in names)
