"""Functions whose every call is an epoch: refused where a call would run none of it.

A check of such a function would be green, and have looked at nothing.
"""

from __future__ import annotations

import inspect
from typing import Any

from loaderkit.errors import OptionError
from loaderkit.function_arguments import check_callable, check_takes_nothing
from loaderkit.value_words import kind_of

LEAK_FREE = "@pytest.mark.leak_free"


def check_epoch_function(name: str, function: Any) -> None:
    """Refuse what cannot be called without arguments, again and again.

    Raises:
        OptionError: It is no such function; for a test, which takes fixtures, the
            message names the mark.
    """
    check_callable(name, function, "lambda: train_one_epoch()")
    try:
        check_takes_nothing(name, function)
    except OptionError as error:
        refusal = error
    else:
        return
    fix = refusal.fix
    test = getattr(function, "__name__", "")
    if test.startswith("test"):
        fix = f"{LEAK_FREE} above {test}, which is then called with its fixtures"
    raise OptionError(refusal.what, why=refusal.why, fix=fix)


def check_has_run(result: object) -> None:
    """Refuse what a call gave that has yet to run.

    ``lambda: train()`` shows before the call neither that ``train`` is async nor that
    it is a generator.

    Raises:
        OptionError: It is a coroutine, another awaitable, or a generator.
    """
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        fix = "lambda: list(train_one_epoch()), which reads all of it"
    elif inspect.isawaitable(result):
        fix = "lambda: asyncio.run(train_one_epoch())"
    else:
        return
    if inspect.iscoroutine(result):
        result.close()  # or Python warns that nobody has awaited it
    message = f"A call returned {kind_of(result)}, whose code has not run."
    why = "memory would be read before anything was done"
    raise OptionError(message, why=why, fix=fix)


def refuse_class(kind: type) -> None:
    """Refuse a class that is decorated to be watched.

    Raises:
        OptionError: Always.
    """
    message = f"A LeakDetector watches functions, got the class {kind.__name__}."
    why = "each call of it would be an epoch, and make an object"
    fix = f"decorate the method that trains one epoch, or {LEAK_FREE} above tests"
    raise OptionError(message, why=why, fix=fix)
