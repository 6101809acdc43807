"""What is named on the command line: ``module:name``, or ``file.py:name``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit.errors import LoaderkitError
from loaderkit.function_arguments import refusal_of_call
from loaderkit.nearest_names import suggest_name

if TYPE_CHECKING:
    from types import ModuleType

HOW_TO_NAME = "what is in code is named module:name, or file.py:name"


def named_dataset(text: str) -> Any:
    """Find a dataset by its name; call what makes one.

    Args:
        text: ``module:name`` or ``file.py:name`` of a dataset, or of a class or
            function that takes no arguments and gives one.

    Returns:
        The dataset.

    Raises:
        LoaderkitError: There is nothing of that name, or it needs arguments.
    """
    # Python starts without torch where no command needs it.
    from loaderkit.mistaken import mistaken_for_dataset

    # A class has __len__ too, of its objects; a dataset may be callable, as some are.
    target = named_object(text)
    makes_a_dataset = isinstance(target, type) or not hasattr(target, "__len__")
    if not makes_a_dataset or not callable(target):
        return target
    if not isinstance(target, type) and mistaken_for_dataset(target) is not None:
        return target  # a model can be called too; who takes it says what it is
    refused = refusal_of_call(target)
    if refused is not None:
        message = f"{text} cannot be called: {refused}."
        why = "it is called without arguments, to make the dataset"
        name = text.rpartition(":")[2]
        fix = f"name a function that calls it: def make(): return {name}(...)"
        raise LoaderkitError(message, why=why, fix=fix)
    return target()


def named_object(text: str) -> Any:
    """Find something by its name.

    Args:
        text: ``module:name`` or ``file.py:name``.

    Returns:
        It, as it is there.

    Raises:
        LoaderkitError: There is nothing of that name.  An error of the code itself
            reaches its user whole.
    """
    where, _, name = text.rpartition(":")
    if not where:
        raise _nothing_called(text, "there is no module in front of a colon")
    module = (
        _run_file(text, Path(where)) if where.endswith(".py") else _import_module(text)
    )
    if not hasattr(module, name):
        public_names = [known for known in vars(module) if not known.startswith("_")]
        raise _nothing_called(
            text, f"{where} has no {name!r}", suggest_name(name, public_names)
        )
    return getattr(module, name)


def _import_module(text: str) -> ModuleType:
    """Import the module of ``module:name``, which may lie in the current folder."""
    where, _, _ = text.rpartition(":")
    # "python -m loaderkit" looks there, and the installed command does not.
    _find_modules_in(Path())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        # Another name is that of a module which the user's own code imports.
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise
        raise _nothing_called(text, str(error)) from None
    except ValueError as error:  # there is no module's name before the colon
        raise _nothing_called(text, str(error)) from None


def _run_file(text: str, file: Path) -> ModuleType:
    """Run the file of ``file.py:name``, beside which its own imports may lie."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise _nothing_called(text, f"there is no file {str(file)!r}")
    _find_modules_in(file.parent)
    module = importlib.util.module_from_spec(spec)
    # Processes that are spawned find its classes by this name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _find_modules_in(folder: Path) -> None:
    """Let a folder's modules be imported, here and in processes that are spawned."""
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.insert(0, path)


def _nothing_called(
    text: str, reason: str, fix: str = "check the name"
) -> LoaderkitError:
    message = f"There is nothing called {text!r}: {reason}."
    return LoaderkitError(message, why=HOW_TO_NAME, fix=fix)
