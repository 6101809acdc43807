"""Make containers of a user's class again, without doing to the items what it does.

A class may change what is put into it: ``Counter.update`` adds, a namedtuple's own
``__new__`` scales.  The items of a sample went through that once already.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

M = TypeVar("M", bound=MutableMapping[Any, Any])
T = TypeVar("T")

FACTORIES: Mapping[str, Callable[[], Any]] = {
    factory.__name__: factory
    for factory in (bool, bytes, complex, dict, float, int, list, set, str, tuple)
}
"""What a ``defaultdict`` of a cache may call, by name: Python's own types alone."""


class UnstorableValueError(Exception):
    """A cache cannot hold a value; ``encode`` says which one and raises it anew.

    Args:
        why: What about the value prevents it.
        fix: What to store instead; "" for the usual advice.
    """

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.why, self.fix = why, fix


def class_name(cls: type) -> str:
    """Name a class as a cache does.

    >>> class_name(collections.OrderedDict)
    'collections:OrderedDict'
    """
    return f"{cls.__module__}:{cls.__qualname__}"


def stored_class_name(value: object) -> str:
    """Name the class of a container.

    Raises:
        UnstorableValueError: No other process can find it.
    """
    cls = type(value)
    # "<locals>" is what Python writes for the function around it: no import finds it.
    if "<locals>" in cls.__qualname__:
        why = f"{cls.__qualname__} is written inside a function, where nobody finds it"
        fix = f"move `class {cls.__name__}` to the top of a module (in a notebook: to "
        fix += "the top of a cell)"
        raise UnstorableValueError(why, fix)
    return class_name(cls)


def stored_mapping_name(value: Mapping[Any, Any]) -> str | None:
    """Name the class of a mapping; None for a plain dict.

    Raises:
        UnstorableValueError: The mapping is more than its pairs.
    """
    if type(value) is dict:
        return None
    factory = getattr(value, "default_factory", None)
    is_known = factory is None
    if factory is not None:
        # ``is``: a function of the user's may be called "list", too.
        is_known = FACTORIES.get(getattr(factory, "__name__", "")) is factory
    if not is_known or not can_be_made_again(value):
        why = "its class and its pairs are not all there is to it: attributes, a "
        why += "factory"
        fix = "store dict(x), and what else it has by itself"
        raise UnstorableValueError(why, fix)
    return mapping_name(stored_class_name(value), value)


def mapping_name(name: str, value: object) -> str:
    """Name the class of a mapping, and what a ``defaultdict`` makes.

    >>> mapping_name("collections:defaultdict", collections.defaultdict(list))
    'collections:defaultdict[list]'
    """
    if type(value) is collections.defaultdict and value.default_factory is not None:
        return f"{name}[{value.default_factory.__name__}]"
    return name


def factory_name(name: str) -> str:
    """Say what a ``defaultdict`` makes, by the name ``mapping_name`` gave it.

    >>> factory_name("collections:defaultdict[list]"), factory_name("a:B")
    ('list', '')
    """
    return name.partition("[")[2].removesuffix("]")


def is_mapping_class(cls: type, name: str) -> bool:
    """Tell whether a class makes mappings, under the name it has in a cache."""
    if "[" in name:
        return factory_name(name) in FACTORIES and cls is collections.defaultdict
    return issubclass(cls, Mapping)


def is_storable_named_tuple(value: object) -> bool:
    """Tell whether a value is a namedtuple, with no attributes beside its fields."""
    fields = getattr(type(value), "_fields", None)
    return (
        isinstance(value, tuple)
        and type(fields) is tuple
        and len(fields) == len(value)
        and not getattr(value, "__dict__", None)
    )


def is_dataclass_value(value: object) -> bool:
    """Tell whether a value is of a dataclass, and no list or tuple beside that."""
    return dataclasses.is_dataclass(value) and not isinstance(
        value, (type, list, tuple)
    )


_PLAIN = (str, bytes, int, float, complex, bool, type(None))


def make_mapping(
    cls: type[T], pairs: Mapping[Any, Any], factory: Callable[[], Any] | None = None
) -> T:
    """Make a mapping of a class that holds just these pairs.

    Args:
        cls: ``dict``, a subclass of it, or another mapping that can be updated.
        pairs: What it is to hold, in order.
        factory: The ``default_factory`` of a ``collections.defaultdict``.

    Returns:
        The mapping.
    """
    if cls is collections.defaultdict:
        return cls(factory, pairs)  # type: ignore[call-arg]
    empty: Any
    try:
        empty = cls()
    except TypeError:  # its constructor asks for more
        empty = cls.__new__(cls)
    container: T = _filled_with(empty, pairs)
    return container


def refilled(value: Mapping[Any, Any], pairs: Mapping[Any, Any]) -> Any:
    """Copy a mapping with other values under its keys.

    Args:
        value: The mapping; its attributes are kept.
        pairs: The new values by key, in order.

    Returns:
        A mapping of the same class.

    Raises:
        TypeError: The class keeps its items in a way that is not known.
    """
    if can_be_made_again(value):
        return make_mapping(type(value), pairs, getattr(value, "default_factory", None))
    if isinstance(value, dict | collections.UserDict):
        return _filled_with(copy.copy(value), pairs)
    msg = f"how a {type(value).__name__} keeps its items is not known"
    raise TypeError(msg)


def can_be_made_again(value: Mapping[Any, Any]) -> bool:
    """Tell whether class and pairs are all there is to a mapping.

    Args:
        value: A mapping; it is made again to see.

    Returns:
        False when attributes or a ``default_factory`` would be lost, or when the class
        keeps something else than pairs, as ``ChainMap`` does.
    """
    cls = type(value)
    # Tried out, and not told by a list of classes: what a user's class does in its
    # constructor no look at its attributes shows.
    try:
        pairs = dict(value.items())
        factory = getattr(value, "default_factory", None)
        mapping = make_mapping(cls, pairs, factory)
        return (
            type(mapping) is cls
            and list(mapping) == list(value) == list(pairs)
            and all(mapping[key] is item for key, item in pairs.items())
            and _same_attributes(value, mapping)
        )
    except Exception:  # noqa: BLE001 -- the class is the user's, and may do anything
        return False


def make_named_tuple(cls: type[T], items: Iterable[Any]) -> T:
    """Make a namedtuple of items that went through its own ``__new__`` already."""
    named_tuple: T = tuple.__new__(cls, items)  # type: ignore[type-var]
    return named_tuple


def make_dataclass(cls: type[T], attributes: Mapping[str, Any]) -> T:
    """Make a dataclass of attributes that went through its own ``__init__`` already.

    Args:
        cls: The dataclass; a frozen one too.
        attributes: What ``attribute_names`` of ``nests`` lists, by name.
    """
    instance = cls.__new__(cls)
    for name, value in attributes.items():
        # A frozen dataclass refuses its own __setattr__; others may change the value.
        object.__setattr__(instance, name, value)
    return instance


def same_plain(left: object, right: object) -> bool:
    """Tell whether two plain values, or nests of them, are certainly the same."""
    if left is right:
        return True
    # 1 == True == 1.0, which are three different values to whoever reads them back.
    if type(left) is not type(right):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        if list(left) != list(right):
            return False
        return all(same_plain(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            return False
        return all(map(same_plain, left, right))
    # Of anything else ``==`` may give an array, raise, or call two things equal.
    return type(left) in _PLAIN and bool(left == right)


def _filled_with(container: M, pairs: Mapping[Any, Any]) -> M:
    """Put pairs into a mapping, in place of those that it has."""
    if isinstance(container, collections.UserDict):
        container.data = dict(pairs)
    elif isinstance(container, dict):
        # Not the class's own __setitem__ or update, which may change what is put in.
        base: Any = dict
        if isinstance(container, collections.OrderedDict):
            base = collections.OrderedDict
        base.clear(container)
        for key, item in pairs.items():
            base.__setitem__(container, key, item)
    else:
        container.update(pairs)
    return container


def _same_attributes(left: object, right: object) -> bool:
    if getattr(left, "default_factory", None) is not getattr(
        right, "default_factory", None
    ):
        return False
    for cls in type(left).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        # ``__slots__ = "name"`` is one slot, and not four.
        for name in [slots] if isinstance(slots, str) else slots:
            if name in {"__dict__", "__weakref__"}:
                continue
            if not same_plain(getattr(left, name, None), getattr(right, name, None)):
                return False
    ours, theirs = getattr(left, "__dict__", None), getattr(right, "__dict__", None)
    if ours is left:  # a dict whose items are its attributes
        return theirs is right
    return same_plain(ours, theirs)
