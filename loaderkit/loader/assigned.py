"""What may be assigned to a built loader, and counts from its next epoch on."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loaderkit.errors import NotChangeableError
from loaderkit.library_files import is_users_code
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from loaderkit.loader.loader_setup import LoaderSetup

MAY_BE_ASSIGNED = frozenset({"collate_fn", "generator", "timeout", "worker_init_fn"})
"""What an epoch reads as it begins, and Lightning and accelerate set."""


def check_assigned(setup: LoaderSetup, name: str, value: Any) -> Any:
    """Check what is assigned to an attribute, as ``build_loader`` checks the option.

    Args:
        setup: What the loader was built of.
        name: One of ``MAY_BE_ASSIGNED``.
        value: What it is to be.

    Returns:
        The value, such as Python's number for one of numpy's.

    Raises:
        OptionError: The option cannot have this value, or not beside another that was
            asked for, or has no effect without workers.
        NotChangeableError: It would put another option out of effect.
    """
    if name == "collate_fn":
        _check_collate(setup, value)
    num_workers = setup.plan.num_workers.value
    if name == "worker_init_fn" and not num_workers and _is_of_library(value):
        # Lightning's seed_everything(workers=True) sets its own on every loader.
        return value
    changed = replace(setup.asked, num_workers=num_workers, **{name: value})
    return getattr(changed, name)


def _check_collate(setup: LoaderSetup, value: object) -> None:
    message = f"A loader cannot be changed: loader.collate_fn = {show_value(value)}."
    if value is None:
        why = "it is called with the samples of each batch"
        fix = "loader = build_loader(dataset), which joins them in the dataset's way"
        raise NotChangeableError(message, why=why, fix=fix)
    if setup.asked.batch_transform is not None:
        why = "batch_transform was asked for, and is a part of the collate_fn that it "
        why += "would replace"
        fix = "loader = build_loader(dataset, collate_fn=..., batch_transform=...)"
        raise NotChangeableError(message, why=why, fix=fix)


def _is_of_library(function: object) -> bool:
    """Tell whether a function is a library's, and not the user's."""
    while isinstance(function, functools.partial):
        function = function.func
    return callable(function) and not is_users_code(function)
