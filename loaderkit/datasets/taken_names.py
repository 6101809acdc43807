"""Private names that a user's subclass of a dataset may not have.

A dataset is subclassed by people who do not read its code.  An attribute of theirs that
is called as a private method of ours would replace it, without a word.
"""

from __future__ import annotations

from types import FunctionType

from loaderkit.errors import DatasetError, NotChangeableError

_PROTOCOLS = frozenset({"_repr_html_"})
"""Private names that are not ours alone: notebooks ask for this one."""


def private_names_of(dataset_type: type) -> frozenset[str]:
    """Name the private methods and class attributes that a class has of ours."""
    names: set[str] = set()
    for cls in dataset_type.__mro__:
        if is_own(cls):
            names.update(name for name in vars(cls) if name.startswith("_"))
    return frozenset(
        name
        for name in names - _PROTOCOLS
        if not name.startswith(("__", "_abc_")) and name != "_taken_names"
    )


def is_own(dataset_type: type) -> bool:
    """Tell whether a class is loaderkit's own."""
    return dataset_type.__module__.startswith("loaderkit.")


def name_is_taken(where: str, name: str) -> DatasetError:
    """Make the error for a name that is taken, and say which class has it too."""
    message = f"{where} has {name!r} of its own, which SafeDataset reads samples with."
    return DatasetError(message, why="one would replace the other", fix="another name")


def is_own_method(dataset_type: type, name: str) -> bool:
    """Tell whether a public name is a method of ours, which the user's class has not.

    >>> from loaderkit import SafeDataset
    >>> is_own_method(SafeDataset, "keys"), is_own_method(SafeDataset, "transform")
    (True, False)
    """
    if name.startswith("_"):
        return False
    owner = next((base for base in dataset_type.__mro__ if name in vars(base)), object)
    return is_own(owner) and isinstance(vars(owner)[name], FunctionType)


def is_a_method(where: str, name: str, shown: str) -> NotChangeableError:
    """Make the error for a value under the name of a method."""
    message = f"{where}.{name} is a method, and cannot be {shown}."
    fix = f"another name; or, in the class, def {name}(self, ...): return ..."
    return NotChangeableError(message, why="the dataset calls it", fix=fix)
