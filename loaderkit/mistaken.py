"""What is often given in place of a dataset: why it is none, and what to give."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Coroutine, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from loaderkit.function_arguments import DEFINE_READ_ALL, IMPORT_ASYNCIO
from loaderkit.habits import reader_of
from loaderkit.pyg import import_pyg, is_pyg_data, is_temporal_data
from loaderkit.units import count_of
from loaderkit.value_words import with_article


class Mistake(NamedTuple):
    """Something that has rows of some kind, but not samples."""

    message: str
    """What was given."""
    why: str
    """Why it is no dataset."""
    instead: str
    """What to give, as code."""
    preparation: tuple[str, ...] = ()
    """Lines of code that stand before it."""

    def fix(self, call: str) -> str:
        """Write the fix.

        Args:
            call: What was called, with ``{}`` for what is to be given.

        >>> Mistake("A generator.", "it is read once", "list(samples)").fix("pack({})")
        'pack(list(samples))'
        """
        return "\n".join([*self.preparation, call.replace("{}", self.instead)])


_SPLITS = frozenset({"train", "test", "val", "valid", "validation", "eval", "dev"})
"""What the parts of a split are called, by Hugging Face and by us."""


def mistaken_for_dataset(given: object) -> Mistake | None:
    """Recognise what is no dataset although it may have a length and an index.

    Args:
        given: What a caller was given as a dataset.

    Returns:
        What it is, and what was probably meant; None where it may be a dataset.
    """
    name = type(given).__name__
    if isinstance(given, str | bytes | os.PathLike):
        path = os.fsdecode(given)
        message = f"A path is no dataset: {given!r}."
        if reader := reader_of(path):
            why = "its letters are no samples; the file may have some"
            return Mistake(message, why, reader)
        if isinstance(given, str) and given in _SPLITS and not Path(given).exists():
            message = f"A text is no dataset: {given!r}."
            why = "it names a part of a split, whose names are what a loop, or "
            why += "train, test = ..., takes from it"
            return Mistake(message, why, f"split[{given!r}]")
        why = "its letters are no samples; what reads it is one"
        return Mistake(message, why, f"loaderkit.open_cache({path!r})")
    message = f"{with_article(name)} is no dataset."
    if isinstance(given, type):
        message = f"{given.__name__} is a class, not a dataset."
        return Mistake(message, "it was not called", f"{given.__name__}(...)")
    if is_pyg_data(given):
        if isinstance(given, import_pyg().batch):
            return Mistake(message, "it is one batch", "batch.to_data_list()")
        return Mistake(message, "it is one graph", "[graph]")
    if isinstance(given, AsyncIterable):
        why = "its samples are awaited one by one, and what reads them does not wait"
        preparation = (IMPORT_ASYNCIO, DEFINE_READ_ALL)
        return Mistake(message, why, "asyncio.run(read_all(samples))", preparation)
    if isinstance(given, Coroutine):
        why = "it was not awaited"
        return Mistake(message, why, "asyncio.run(coroutine)", (IMPORT_ASYNCIO,))
    numbers: object = given.dataset if isinstance(given, DataLoader) else None
    if isinstance(numbers, range):
        # PyG's loaders of events and of subgraphs draw numbers, and join what they
        # stand for.
        why = "it gives batches, not samples"
        is_of_events = is_temporal_data(getattr(given, "data", None))
        return Mistake(message, why, "loader.data" if is_of_events else "list(loader)")
    for kind, why, instead in _OTHER_THINGS:
        if isinstance(given, kind):
            return Mistake(message, why, instead)
    if hasattr(given, "ndim") and hasattr(given, "item") and not given.ndim:
        return Mistake(message, "it is one number", "[sample]")
    # A mapping or a list may well be a dataset: only some are told apart.
    if isinstance(given, Mapping):
        return _mistaken_mapping(given, message)
    if isinstance(given, list | tuple) and given and all(map(_is_dataset, given)):
        why = f"it holds {count_of(len(given), 'datasets')}, which would be its samples"
        instead = "torch.utils.data.ConcatDataset(datasets)"
        return Mistake(message, why, instead)
    if hasattr(given, "iloc") and getattr(given, "ndim", 2) == 1:
        return Mistake(message, "its [0] is a label, and no row", "column.tolist()")
    if hasattr(given, "iloc"):
        why = "its rows are not what table[0] gives"
        return Mistake(message, why, 'table.to_dict("records")')
    return None


def mistaken_for_batch(given: object) -> Mistake | None:
    """Recognise what is no batch, although batches come from it.

    Args:
        given: What a caller was given as a batch.

    Returns:
        What it is, and what was probably meant; None where it may be a batch.
    """
    name = type(given).__name__
    message = f"{with_article(name)} is no batch."
    if given is None:
        return Mistake("None is no batch.", "nothing was given", "next(iter(loader))")
    if isinstance(given, str | bytes | os.PathLike):
        path = os.fsdecode(given)
        instead = f"loaderkit.open_cache({path!r}).batch(range(32))"
        return Mistake(f"A path is no batch: {given!r}.", "it was not read", instead)
    if isinstance(given, type):
        message = f"{given.__name__} is a class, not a batch."
        return Mistake(message, "it was not called", f"{given.__name__}(...)")
    if isinstance(given, DataLoader):
        return Mistake(message, "it gives batches", "next(iter(loader))")
    if isinstance(given, Iterator):
        return Mistake(message, "it gives batches", "next(batches)")
    if isinstance(given, list) and given and all(map(is_pyg_data, given)):
        instead = "torch_geometric.data.Batch.from_data_list(graphs)"
        return Mistake(message, "its graphs were not joined", instead)
    if _is_dataset(given):
        instead = "next(iter(loaderkit.build_loader(dataset, batch_size=32)))"
        return Mistake(message, "it has samples, which a loader joins", instead)
    return None


def mistaken_for_tensors(given: object, model: torch.nn.Module) -> Mistake | None:
    """Recognise what describes a batch, where a model could not be called with it.

    Some models take numbers or arrays, so this is asked only when that has failed.

    Args:
        given: What a caller was given as a batch.
        model: It could not be called with it.

    Returns:
        What it is, and the line that makes a batch of it; None where it is neither a
        shape, nor a number of samples, nor arrays.
    """
    if isinstance(given, np.ndarray):
        dtype = _dtype_taken(model)
        is_of_other_dtype = str(dtype).removeprefix("torch.") != given.dtype.name
        code = f"torch.as_tensor(batch, dtype={dtype})"
        instead = code if is_of_other_dtype else "torch.from_numpy(batch)"
        return Mistake("An array is no tensor.", _TAKES_TENSORS, f"batch = {instead}")
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        loader = f"loaderkit.build_loader(dataset, batch_size={given})"
        why = "it may be how many samples one has"
        return Mistake(f"{given} is no batch.", why, f"batch = next(iter({loader}))")
    zeros = _zeros_of(given, _dtype_taken(model))
    if zeros is not None:
        message = f"A shape is no batch: {given!r}."
        return Mistake(message, _TAKES_TENSORS, f"batch = {zeros}")
    values: list[object] = []
    if isinstance(given, Mapping):
        values = list(given.values())
    elif isinstance(given, list | tuple):
        values = list(given)
    if any(isinstance(value, np.ndarray) for value in values):
        instead = "batch = torch.utils.data.default_convert(batch)"
        return Mistake("Arrays are no tensors.", _TAKES_TENSORS, instead)
    return None


_TAKES_TENSORS = "the model is called with tensors"


def _zeros_of(given: object, dtype: torch.dtype) -> str | None:
    """Write tensors of a shape, or of several; None where it is no shape."""
    if not isinstance(given, list | tuple) or not given:
        return None
    if all(isinstance(size, int) and size > 0 for size in given):
        sizes = ", ".join(map(str, given))
        return f"torch.zeros({sizes}{_dtype_in_code(dtype)})"
    zeros = [_zeros_of(shape, dtype) for shape in given]
    if None in zeros:
        return None
    # What a loss compares with is not always of the dtype that the model takes.
    shown = ", ".join(map(str, zeros))
    return f"({shown},)" if len(zeros) == 1 else f"({shown})"


def _dtype_in_code(dtype: torch.dtype) -> str:
    return "" if dtype is torch.get_default_dtype() else f", dtype={dtype}"


def _dtype_taken(model: torch.nn.Module) -> torch.dtype:
    """Say which dtype the first layer probably takes: an embedding takes numbers."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            return torch.int64
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                return parameter.dtype
    return torch.get_default_dtype()


def mistaken_for_model(given: object, call: str) -> Mistake | None:
    """Recognise what is no model.

    Args:
        given: What a caller was given as a model.
        call: How the caller is called, such as "estimate_step(model, batch)".

    Returns:
        What it is, and what was probably meant; None where it is a module.
    """
    if isinstance(given, torch.nn.Module):
        return None
    name = type(given).__name__
    message = f"{with_article(name)} is no model."
    if given is None:
        return Mistake("None is no model.", "nothing was given", "torch.nn.Module()")
    if isinstance(given, type):
        message = f"{given.__name__} is a class, not a model."
        return Mistake(message, "it was not called", f"{given.__name__}(...)")
    if isinstance(given, torch.optim.Optimizer):
        instead = call.removesuffix(")")
        if "optimizer" not in call:
            instead += ", optimizer=optimizer"
        return Mistake(message, "it is an optimizer", f"{instead})")
    values = list(given.values()) if isinstance(given, Mapping) else []
    if values and all(isinstance(value, torch.Tensor) for value in values):
        return Mistake(
            message, "it holds tensors", "model, after load_state_dict(state)"
        )
    # Some datasets can be called, and stand here where the arguments were exchanged.
    if callable(given) and not isinstance(given, Dataset):
        why = "its parameters are not known"
        return Mistake(message, why, "a torch.nn.Module that calls it in forward")
    return Mistake(message, "the model comes first", call)


def _mistaken_mapping(given: Mapping[Any, Any], message: str) -> Mistake | None:
    """Recognise several datasets by name, and columns by name."""
    if not given or not all(isinstance(name, str) for name in given):
        return None
    names = list(given)
    if all(map(_is_dataset, given.values())):
        why = f"it holds the datasets {', '.join(names)}"
        return Mistake(message, why, f"datasets[{names[0]!r}]")
    columns = list(given.values())
    if not all(map(_is_column, columns)) or len(set(map(len, columns))) != 1:
        return None
    if not isinstance(given, dict) and any(isinstance(c, list) for c in columns):
        # A library's own mapping of lists is what a tokenizer gives, perhaps for one
        # text.
        return None
    why = "it holds columns, and a dataset has rows"
    return Mistake(message, why, "torch.utils.data.StackDataset(**columns)")


def _is_column(values: object) -> bool:
    """Tell whether values may be a field of many samples.

    Lists of graphs or dicts are no column: they are samples.
    """
    if isinstance(values, torch.Tensor | np.ndarray):
        return values.ndim > 0
    if not isinstance(values, list | tuple):
        return False
    return not any(isinstance(v, Mapping) or is_pyg_data(v) for v in values)


def _is_dataset(part: object) -> bool:
    """Recognise the datasets of torch, and of Hugging Face, which have no base."""
    if isinstance(part, Dataset):
        return True
    return type(part).__module__.partition(".")[0] == "datasets" and hasattr(
        part, "features"
    )


_OTHER_THINGS: tuple[tuple[type, str, str], ...] = (
    (DataLoader, "it gives batches, not samples", "loader.dataset"),
    (torch.nn.Module, "it is a model", "dataset"),
    (AbstractSet, "its order is not fixed", "sorted(samples)"),
    (Iterator, "it can be read only once, in order", "list(samples)"),
)
