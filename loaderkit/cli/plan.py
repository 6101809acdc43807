"""``loaderkit plan``: which batch fits, and what to change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaderkit.cache.storage import is_url
from loaderkit.cli.command import (
    Command,
    byte_size,
    complete_files,
    positive_integer,
)
from loaderkit.cli.named_objects import named_dataset, named_object
from loaderkit.errors import LoaderkitError, OptionError
from loaderkit.function_arguments import refusal_of_call
from loaderkit.value_words import kind_of, show_value

if TYPE_CHECKING:
    import argparse

    from loaderkit.budget.batch.plan import BatchPlan

_SHAPE = r"\d+(x\d+)*(:\w+)?"
"""Such as 3x32x32:uint8."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument(
        "model", help="module:name or file.py:name of a torch module"
    )
    complete_files(model)
    data = parser.add_argument(
        "data",
        help="a cache, module:name or file.py:name of a dataset, or the shape of each "
        "argument for one sample, such as 80x7 or 3x32x32,20:int64",
    )
    complete_files(data)
    parser.add_argument(
        "--device",
        default="cpu",
        help="such as cuda, which need not be here (default: %(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=byte_size,
        metavar="SIZE",
        help="memory to use, such as 8GiB (default: what is free)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive_integer,
        default=32,
        metavar="N",
        help="samples of a training step (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs",
        type=positive_integer,
        default=100,
        metavar="N",
        help="length of the run, for its chance to fail (default: %(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        default="adam",
        metavar="NAME",
        help="such as adamw or sgd (default: %(default)s)",
    )
    parser.add_argument(
        "--autocast", metavar="DTYPE", help="such as bfloat16 (default: none)"
    )
    parser.add_argument(
        "--loss",
        metavar="NAME",
        help="module:name or file.py:name (default: the mean of what the model gives)",
    )


def _run_plan(options: argparse.Namespace) -> BatchPlan:
    from loaderkit.budget.batch.plan import plan_batch
    from loaderkit.errors import StepError

    _check_optimizer(options.optimizer)
    loss = None if options.loss is None else _named_loss(options.loss)
    # With its unit: from Python, a small number without one is refused.
    limit = None if options.limit is None else f"{options.limit} B"
    try:
        return plan_batch(
            _build_model(options.model),
            _open_data(options),
            options.device,
            limit=limit,
            batch_size=options.batch_size,
            epochs=options.epochs,
            optimizer=options.optimizer,
            autocast=options.autocast,
            loss=loss,
        )
    except StepError as error:  # an error of the user's own code is shown whole
        message = f"The plan cannot be made: {error.what}"
        raise LoaderkitError(message, why=error.why, fix=error.advice) from error


def _named_loss(name: str) -> Any:
    """Find a loss by its name; say where torch has one that is named alone."""
    import torch

    if ":" not in name and callable(getattr(torch.nn.functional, name, None)):
        message = f"The loss {name!r} is named without its module."
        fix = f"--loss torch.nn.functional:{name}"
        raise OptionError(message, why="module:name, or file.py:name", fix=fix)
    return named_object(name)


def _check_optimizer(name: str) -> None:
    from loaderkit.budget.step.train_step import refusal_of_optimizer

    refused = refusal_of_optimizer(name)
    if refused is not None:
        raise OptionError(refused.what, why=refused.why, fix=refused.advice)


def _build_model(name: str) -> Any:
    """Find a model; call what makes one."""
    model = named_object(name)
    # A class of modules has ``parameters`` too, and is what makes one.
    if not isinstance(model, type) and hasattr(model, "parameters"):
        return model
    fix = "def make_model(): return Model(16, 32), and file.py:make_model"
    if not callable(model):
        message = f"{name} is no model: {show_value(model)}."
        why = f"it is {kind_of(model)}, and makes none either"
        raise LoaderkitError(message, why=why, fix=fix)
    refused = refusal_of_call(model)
    if refused is not None:
        message = f"{name} cannot be called: {refused}."
        why = "what makes a model is called with nothing"
        raise LoaderkitError(message, why=why, fix=fix)
    return model()


def _open_data(options: argparse.Namespace) -> Any:
    """Open a cache, find a dataset, or make samples of the given shapes."""
    from loaderkit.budget.batch.samples import samples_of_shape
    from loaderkit.datasets.open import open_cache

    # A shape first: no cache is called "80x7" where somebody means that.
    if re.fullmatch(f"{_SHAPE}(,{_SHAPE})*", options.data):
        return samples_of_shape(options.data, options.batch_size)
    if is_url(options.data) or Path(options.data).is_dir():
        return open_cache(options.data)
    if ":" not in options.data:
        message = f"There is no data {options.data!r}."
        why = "it is no cache here, no name of a dataset, and no shape of arguments"
        fix = "file.py:name of a dataset, or the shape for one sample, such as 80x7"
        raise LoaderkitError(message, why=why, fix=fix)
    return named_dataset(options.data)


COMMAND = Command(
    "plan",
    "what batch fits, and what to change",
    _add_arguments,
    _run_plan,
    has_page=True,
    bad_news="nothing fits",
    cache="data",
)
