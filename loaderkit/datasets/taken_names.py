"""Private names that a user's subclass of a dataset may not have.

A dataset is subclassed by people who do not read its code.  An attribute of theirs that
is called as a private method of ours would replace it, without a word.
"""

from __future__ import annotations

from loaderkit.errors import DatasetError

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
