"""Options of a dataset that are set as attributes: they count, or are refused.  Pure.

The constructor keeps each option in an attribute of its name.  Users assign to these
later, as they do in PyG and torch, or set them in the body of a class or before
``super().__init__()``, where the constructor would replace them without a word.
"""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderkit.arguments import check_choice, check_names
from loaderkit.datasets.padding import check_pad_value
from loaderkit.datasets.ragged import layout_names
from loaderkit.datasets.taken_names import is_own
from loaderkit.errors import NotChangeableError, OptionError
from loaderkit.function_arguments import check_callable
from loaderkit.units import size_in_bytes
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from collections.abc import Mapping

_OF_OPENING = frozenset({"raw", "cache", "packing", "classes", "checksums"})
"""What decides what is opened and how: nothing asks for it behind that."""
_OF_READING = ("transform", "ragged", "pad_value", "largest_column_bytes")
_OF_GRAPHS = ("follow_batch", "exclude_keys")
_ALIKE = 0.85
"""Share of letters in common from which a name is one of ours misspelt.  Chosen:
"transforms" and "pad_val" are, "train_transform" and "padding" are attributes of the
user's own."""


class GivenOption(NamedTuple):
    """An option as the constructor was given it."""

    value: object
    default: object


def checked_option(dataset: Any, name: str, value: object) -> object:
    """Check what is assigned to a dataset, as its constructor would.

    Args:
        dataset: Which is assigned to.
        name: The attribute.
        value: What it is to be.

    Returns:
        What to keep in the attribute.

    Raises:
        OptionError: The option cannot have this value, or the name is misspelt.
        NotChangeableError: It would do nothing any more.
    """
    attributes = vars(dataset)
    if name == "transform" and value is not None:
        check_callable("transform", value, "lambda sample: sample", "sample")
    elif name == "ragged":
        layout = check_choice("ragged", value, layout_names())
        if "pad_value" in attributes:
            check_pad_value(attributes["pad_value"], layout)
    elif name == "pad_value":
        return check_pad_value(value, attributes.get("ragged", "padded"))  # type: ignore[arg-type]
    elif name in _OF_GRAPHS and dataset._sizes_are_of_graphs:
        return check_names(name, value)
    elif name == "largest_column_bytes":
        return size_in_bytes(name, value)  # type: ignore[arg-type]
    elif name in _OF_OPENING:
        state = attributes.get("_loaderkit")
        if state is not None and state.opened is not None:
            raise _is_open(dataset, name, value)
    elif "_loaderkit" in attributes and is_own(type(dataset)):
        _refuse_misspelt(dataset, name, value)
    return value


def _is_open(dataset: Any, name: str, value: object) -> NotChangeableError:
    kind, shown = type(dataset).__name__, show_value(value)
    message = f"{kind} cannot be changed: {kind}.{name} = {shown}."
    why = "its cache is open, and what is read is what was opened"
    fix = f"{kind}(..., {name}={shown}), a dataset of its own"
    if name == "cache":
        fix = f"loaderkit.open_cache({shown})"
    elif is_own(type(dataset)):
        fix = f"loaderkit.open_cache(dataset.cache, {name}={shown})"
        if name == "packing":
            fix = "loaderkit.pack(dataset, path), with its options, for another cache"
        elif name == "raw":
            fix = "drop it: a cache is read without what it was made of"
    return NotChangeableError(message, why=why, fix=fix)


def _refuse_misspelt(dataset: Any, name: str, value: object) -> None:
    """Refuse a new attribute of a class of ours that is nearly one of its options."""
    if name in vars(dataset) or hasattr(type(dataset), name) or name.startswith("_"):
        return
    known = [*_OF_READING, *(_OF_GRAPHS if dataset._sizes_are_of_graphs else ())]
    message = f"{type(dataset).__name__} has no option {name!r}."
    if name in _OF_GRAPHS:
        why = "the samples are no graphs, and it would do nothing"
        raise OptionError(message, why=why, fix="drop it")
    near = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
    if near:
        why = "a new attribute of that name would do nothing"
        fix = f"dataset.{near[0]} = {show_value(value)}"
        raise OptionError(message, why=why, fix=fix)


def refuse_options_set_beside(dataset: Any, options: Mapping[str, GivenOption]) -> None:
    """Refuse options that a class, or an attribute set too early, tries to give.

    Args:
        dataset: Which is being made; nothing is set of it yet but by the user.
        options: What its constructor was given.

    Raises:
        OptionError: One would be replaced by the constructor's default.
    """
    kind = type(dataset)
    if is_own(kind):
        return
    for name, option in options.items():
        if option.value is not option.default:
            continue
        if name in vars(dataset):
            beside = vars(dataset)[name]
            where = f"self.{name} was set before super().__init__()"
            example = f"super().__init__(..., {name}=...)"
        else:
            owner = next((base for base in kind.__mro__ if name in vars(base)), kind)
            beside = vars(owner).get(name, option.default)
            if is_own(owner) or inspect.isdatadescriptor(beside):
                continue
            where = f"{owner.__name__}.{name} is an attribute of the class"
            example = f"{kind.__name__}(..., {name}=...), or super().__init__(..., "
            example += f"{name}=...) in its __init__"
            if name == "transform":
                example = "do it in load(key); or give the function another name, and "
                example += f"{kind.__name__}(..., transform=function)"
        if beside is option.default:
            continue
        message = f"{where}, and would do nothing."
        why = f"{name} is an option of the constructor, which keeps there what that is "
        why += "given"
        raise OptionError(message, why=why, fix=example)
