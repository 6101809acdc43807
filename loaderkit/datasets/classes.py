"""Which classes samples may be made of: a closed list, for which only PyG is imported.

A cache names the classes of its samples.  It may come from a stranger, so a name alone
never leads to a class: only those count that torch and PyG make data of, those the
caller passes, and those that the module of the caller's own dataset class knows.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import importlib
import sys
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from loaderkit.datasets.containers import (
    FACTORIES,
    class_name,
    factory_name,
    make_mapping,
    same_plain,
)
from loaderkit.datasets.kinds import NEST_KINDS, Kind
from loaderkit.errors import DamagedCacheError, DatasetError, OptionError
from loaderkit.fixes import PACK_AGAIN
from loaderkit.pyg import import_pyg
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loaderkit.datasets.structure import Nest, Structure

_ALWAYS_KNOWN = (
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
)
"""Beside the graphs of PyG, see ``_class_of_pyg``."""


def private_names(cls: type, attributes: Mapping[str, Any]) -> list[str]:
    """List the attributes of a graph or its store that an empty graph lacks.

    Args:
        cls: The graph's class.
        attributes: All attributes, of the graph or of one of its stores.

    Returns:
        Names of those that would be lost; seldom any.
    """
    known = _template_attributes(cls)
    return [
        name
        for name, value in attributes.items()
        if name not in pyg_attributes()
        and (name not in known or not same_plain(value, known[name]))
    ]


def check_classes(classes: Iterable[type]) -> tuple[type, ...]:
    """Take a list of classes.

    Raises:
        OptionError: It is one class without a list, or holds something else.
    """
    # It comes from the user, and types are not checked when a program runs.
    value: object = classes
    why = "a name in a cache leads to a class only if the class itself is given"
    if isinstance(value, type):
        message = f"classes must be a list of classes, got {value.__name__} alone."
        raise OptionError(message, why=why, fix=f"classes=[{value.__name__}]")
    if isinstance(value, str) or not isinstance(value, Iterable):
        message = f"classes must be classes, got {show_value(value)}."
        raise OptionError(message, why=why, fix="classes=[MyData]")
    passed: tuple[object, ...] = tuple(value) if getattr(value, "ndim", 1) else (value,)
    for cls in passed:
        if not isinstance(cls, type):
            message = f"classes must be classes, got {show_value(cls)}."
            name = cls if isinstance(cls, str) else type(cls).__name__
            raise OptionError(message, why=why, fix=f"classes=[{name}]")
    return cast("tuple[type, ...]", passed)


class ClassRegistry:
    """The classes that samples may be made of, by name.

    Args:
        known: Classes the caller passes.
        modules: Names of loaded modules whose classes count too: the one in which the
            caller's dataset class is written.
    """

    def __init__(self, known: Iterable[type] = (), modules: Iterable[str] = ()) -> None:
        passed: tuple[Any, ...] = check_classes(known)
        self._passed, self._modules = passed, tuple(modules)
        self._known = {class_name(cls): cls for cls in (*_ALWAYS_KNOWN, *passed)}

    # What was found by name stays behind: the other process has modules of its own.
    def __reduce__(self) -> tuple[type[ClassRegistry], tuple[Any, ...]]:
        return ClassRegistry, (self._passed, self._modules)

    def __getitem__(self, name: str) -> Any:
        """Give a class by name.

        Args:
            name: ``module:qualname``.

        Raises:
            DatasetError: It is not one of the known ones.
        """
        name = name.partition("[")[0]  # defaultdict[list]
        if name not in self._known:
            candidate = _class_of_pyg(name) or self._in_modules(name)
            if candidate is None:
                raise _unknown_classes_error({name})
            self._known[name] = candidate
        return self._known[name]

    @property
    def passed(self) -> tuple[type, ...]:
        """The classes the caller passed."""
        return self._passed

    def and_of_module(self, name: str) -> ClassRegistry:
        """Give these classes and those that one more loaded module knows."""
        return ClassRegistry(self._passed, (*self._modules, name))

    def fits(self, nest: Nest) -> bool:
        """Tell whether a container's class is known, and can be such a container."""
        try:
            cls = self[str(nest.cls)]
        except DatasetError:
            return False
        return NEST_KINDS[nest.kind].class_fits(cls, str(nest.cls), nest.keys)

    def mapping(self, name: str, pairs: Mapping[Any, Any]) -> Any:
        """Make a mapping of a class, by name, that holds these pairs."""
        return make_mapping(self[name], pairs, FACTORIES.get(factory_name(name)))

    def check(self, structure: Structure) -> None:
        """Refuse samples that are made of classes beyond the known ones.

        Args:
            structure: How the samples are made.

        Raises:
            DatasetError: It names the classes, and the argument to pass.
            DamagedCacheError: A graph has parts that its class does not have.
        """
        with_class = [nest for nest in structure.nests() if nest.cls is not None]
        unfit = {str(nest.cls) for nest in with_class if not self.fits(nest)}
        if unfit:
            raise _unknown_classes_error(unfit)
        for nest in with_class:
            if nest.kind is Kind.GRAPH:
                self._check_stores(nest)

    def _check_stores(self, graph: Nest) -> None:
        """Refuse node and edge types of a graph whose class has one store, unnamed."""
        pyg = import_pyg()
        homogeneous = issubclass(self[str(graph.cls)], (pyg.data, pyg.temporal_data))
        # Their one store has no name, and PyG no place for another.
        if homogeneous and graph.keys != (None,):
            message = (
                f"The manifest gives {graph.cls} the node and edge types {graph.keys}."
            )
            fix = PACK_AGAIN
            raise DamagedCacheError(message, why="it was changed", fix=fix)

    def blank(self, name: str) -> Any:
        """Make an empty graph of a class, even one whose constructor asks for more."""
        return copy.copy(_class_template(self[name]))

    def blanks(self, name: str, count: int) -> list[Any]:
        """Make several empty graphs of a class, as ``blank`` makes one."""
        template = _class_template(self[name])
        return [copy.copy(template) for _ in range(count)]

    def _in_modules(self, name: str) -> type | None:
        """Look for a class among the names of the caller's own modules.

        The module's dictionary is asked, never its ``__getattr__``, which may import.
        """
        for module_name in self._modules:
            module = sys.modules.get(module_name)
            if isinstance(module, types.ModuleType):
                # A list: another thread may import while we look.
                for value in list(vars(module).values()):
                    member = _named_inside(value, name)
                    if member is not None:
                        return member
        return None


def modules_of(dataset_class: type) -> tuple[str, ...]:
    """Name the modules in which a dataset class and its bases are written.

    Args:
        dataset_class: A subclass of ``SafeDataset``.

    Returns:
        The modules of the classes that are not loaderkit's, torch's or Python's.
    """
    libraries = {"loaderkit", "torch", "torch_geometric", "builtins", "typing", "abc"}
    names = (cls.__module__ for cls in dataset_class.__mro__)
    return tuple(
        dict.fromkeys(n for n in names if n.partition(".")[0] not in libraries)
    )


def loaded_classes(structure: Structure) -> tuple[type, ...]:
    """Find the classes of samples that this very process has packed.

    Args:
        structure: How they are made, as this process noted it; not read from a cache.

    Returns:
        Those of their classes that are loaded; others are left out.
    """
    classes = []
    for name in sorted(structure.class_names()):
        value: Any = sys.modules.get(name.partition(":")[0])
        for attribute in name.partition(":")[2].split("."):
            value = vars(value).get(attribute) if hasattr(value, "__dict__") else None
        if isinstance(value, type) and class_name(value) == name:
            classes.append(value)
    return tuple(classes)


def import_classes(structure: Structure) -> None:
    """Import the modules of samples' classes, as ``load`` has in a packing worker.

    Args:
        structure: How samples are made that this very process had read; not read from
            a cache, which may name any module.
    """
    for name in sorted(structure.class_names()):
        # What cannot be imported here is told where the class is needed.
        with contextlib.suppress(Exception):
            importlib.import_module(name.partition(":")[0])


def _class_of_pyg(name: str) -> type | None:
    """Find one of PyG's own graphs by its name; PyG is imported for such a name."""
    if not name.startswith("torch_geometric."):
        return None
    pyg = import_pyg()
    graphs = {
        class_name(cls): cls for cls in (pyg.data, pyg.hetero_data, pyg.temporal_data)
    }
    return graphs.get(name)


def _named_inside(value: object, name: str) -> type | None:
    """Find a class by name: the value itself, or a class that is written in it."""
    if not isinstance(value, type):
        return None
    own = class_name(value)
    if own == name:
        return value
    if not name.startswith(own + "."):
        return None
    # Step by step through classes alone: a name of a stranger's must not reach what
    # hangs on a class besides, such as a module or a property.
    member: Any = value
    for attribute in name[len(own) + 1 :].split("."):
        member = vars(member).get(attribute) if isinstance(member, type) else None
    return member if isinstance(member, type) and class_name(member) == name else None


@functools.cache
def pyg_attributes() -> frozenset[str]:
    """Name where PyG keeps the fields, and what it works out of them again.

    The last two are what ``to_homogeneous`` leaves for ``to_heterogeneous``, which
    takes them as arguments too; docs/cache.md says that they do not come back.
    """
    pyg = import_pyg()
    empty_graphs = (pyg.data(), pyg.hetero_data(), pyg.temporal_data())
    return frozenset().union(
        *map(vars, empty_graphs),
        ("_mapping", "_parent", "_key", "_cached_attr"),
        ("_node_type_names", "_edge_type_names"),
    )


@functools.lru_cache(maxsize=256)
def _template_attributes(cls: type) -> Mapping[str, Any]:
    """Give the attributes that an empty graph of a class has from its constructor."""
    template = _class_template(cls)
    attributes = dict(vars(template))
    for store in template.stores:
        attributes.update(vars(store))
    return attributes


@functools.lru_cache(maxsize=256)
def _class_template(cls: Any) -> Any:
    try:
        data = cls()
    except TypeError:
        # Its constructor asks for more.  PyG's own makes the stores, without which no
        # attribute can be set.
        data = cls.__new__(cls)
        pyg = import_pyg()
        base = pyg.data if issubclass(cls, pyg.data) else pyg.hetero_data
        base.__init__(data)
    # Fields that a constructor makes are those of no sample.
    for store in data.stores:
        for key in list(store.keys()):
            del store[key]
    return data


def _unknown_classes_error(names: set[str]) -> DatasetError:
    listed = sorted(names)
    short = [name.rpartition(":")[2] for name in listed]
    where = ", ".join(
        f"{n.rpartition(':')[2]} of {n.partition(':')[0]}" for n in listed
    )
    message = f"The samples are made of classes that are not known here: {where}."
    why = (
        "a cache may come from a stranger, so a name in it neither imports nor calls "
        "anything"
    )
    fix = (
        f"import them and pass classes=[{', '.join(short)}] to open_cache or to your "
        'dataset, or open_cache(path, unknown_classes="plain") for dicts and Data'
    )
    return DatasetError(message, why=why, fix=fix)
