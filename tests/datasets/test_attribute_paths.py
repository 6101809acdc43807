"""Of an object that code reads, the attributes that it reads count, and no others."""

import argparse
import dataclasses
import enum
import types
import typing

import pytest
import torch
from torch_geometric.data import Data

from loaderkit.datasets.fingerprint import read_code


class Plain:
    def __init__(self, root, lr):
        self.root, self.lr = root, lr

    @property
    def doubled(self):
        return self.root * 2

    def twice(self):
        return self.doubled

    def through_super(self):
        return super().__getattribute__("root")

    def by_name(self):
        return getattr(self, "root")  # noqa: B009

    def other(self):
        return self.lr


@dataclasses.dataclass
class Fields(Plain):
    root: int
    lr: int


class Slotted(Plain):
    __slots__ = ("lr", "root")


class OnlySlots:
    __slots__ = ("lr", "root")

    def __init__(self, root, lr):
        self.root, self.lr = root, lr

    def twice(self):
        return self.root * 2


class Answering:
    """Has its attributes elsewhere, as OmegaConf's have them."""

    def __init__(self, root, lr):
        object.__setattr__(self, "_content", {"root": root, "lr": lr})

    def __getattr__(self, name):
        return self._content[name]

    def __setattr__(self, name, value):
        self._content[name] = value


class Table(dict):
    """A dict with a method; what it holds is no attribute."""

    def __init__(self, root, lr):
        super().__init__(root=root, lr=lr)

    def __setattr__(self, name, value):
        self[name] = value

    def twice(self):
        return self["root"] * 2

    def through_super(self):
        return super().get("root")


class Graph(Data):
    """Its attributes are in a store of PyG's."""

    def __init__(self, root=0, lr=0):
        super().__init__()
        self.root, self.lr = root, lr

    def twice(self):
        return self.root * 2


class Layer(torch.nn.Module):
    def __init__(self, root, lr):
        super().__init__()
        self.register_buffer("root", torch.tensor(root))
        self.lr = lr

    def twice(self):
        return int(self.root) * 2


class Mode(enum.Enum):
    ONE = 1
    TWO = 2

    @property
    def twice(self):
        return self.value * 2


@dataclasses.dataclass
class Holder:
    """Such as a configuration with a part for each purpose."""

    part: object
    epochs: int = 1


KINDS = {
    "argparse": lambda root, lr: argparse.Namespace(root=root, lr=lr),
    "namespace": lambda root, lr: types.SimpleNamespace(root=root, lr=lr),
    "object": Plain,
    "dataclass": Fields,
    "slots and dict": Slotted,
    "slots": OnlySlots,
    "attributes elsewhere": Answering,
    "dict": Table,
    "graph": Graph,
    "module": Layer,
}
ARE_TOLD = {"argparse", "namespace", "object", "dataclass", "slots and dict", "slots"}
"""Those of which it can be told that code reads ``root`` and nothing else."""

CONFIG = Holder(None)


class Owner:
    """Has the configuration as an attribute; an object of a class that has it; ..."""

    shared = CONFIG

    def __init__(self, config):
        self.config = config


def reads_of_self(self, key):
    return int(self.config.part.root) + key


def reads_by_method(self, key):
    return self.config.part.twice() + key


def reads_inside(self, _key):
    return [int(self.config.part.root) for _ in range(1)]


def reads_all(self, _key):
    return int(vars(self.config)["part"].root)


def reads_by_another_name(self, _key):
    config = self.config
    return int(config.part.root)


def reads_of_class(self, _key):
    return int(self.shared.part.root)


def reads_global(_self, _key):
    return int(CONFIG.part.root)


def reads_global_by_method(_self, _key):
    return CONFIG.part.twice()


def reads_super(self, _key):
    return self.config.part.through_super()


def reads_by_name(self, _key):
    return self.config.part.by_name()


def reads_default(_self, _key, *, config=CONFIG):
    return int(config.part.root)


READS = {
    function: are_told
    for are_told, functions in {
        "told": (
            reads_of_self,
            reads_by_method,
            reads_inside,
            reads_of_class,
            reads_global,
            reads_global_by_method,
            reads_default,
        ),
        "all": (reads_all, reads_by_another_name, reads_super, reads_by_name),
    }.items()
    for function in functions
}


def attempt(load):
    """Read a sample; None where the object has no such method."""
    try:
        return load(1)
    except (AttributeError, KeyError):
        return None


CASES = [(kind, read) for kind in KINDS for read in READS]


@pytest.mark.many_cases(quick=68)
@pytest.mark.parametrize(
    ("kind", "read"), CASES, ids=[f"{k} {r.__name__}" for k, r in CASES]
)
def test_a_change_of_what_the_sample_is_made_of_counts_and_no_other(kind, read):
    CONFIG.part = KINDS[kind](1, 2)
    owner = type("Owner", (Owner,), {"load": read})(CONFIG)
    sample, before = attempt(owner.load), read_code(owner.load)
    assert read_code(owner.load).xxh3 == before.xxh3

    CONFIG.part.lr = 3
    assert attempt(owner.load) == sample
    of_other_part = read_code(owner.load)
    CONFIG.epochs += 1
    of_other = read_code(owner.load)
    CONFIG.part.root = 5 if kind != "module" else torch.tensor(5)

    if sample is None:
        return  # an object without that method
    assert attempt(owner.load) != sample
    assert read_code(owner.load).xxh3 != of_other.xxh3
    if READS[read] == "told":
        assert of_other.xxh3 == of_other_part.xxh3
        if kind in ARE_TOLD:
            assert of_other_part.xxh3 == before.xxh3


def test_an_enum_that_a_property_reads_counts():
    CONFIG.part = Mode.ONE
    owner = type("Owner", (Owner,), {"load": lambda self, _: self.config.part.twice})
    before = read_code(owner(CONFIG).load)

    CONFIG.part = Mode.TWO

    assert read_code(owner(CONFIG).load).xxh3 != before.xxh3


def test_what_a_class_on_self_holds_counts():
    class Settings:
        sizes: typing.ClassVar = {"a": 1}

        @classmethod
        def size(cls):
            return cls.sizes["a"]

    owner = type("Owner", (Owner,), {"load": lambda self, _: self.config.size()})
    before = read_code(owner(Settings).load)

    Settings.sizes["a"] = 2

    assert read_code(owner(Settings).load).xxh3 != before.xxh3
