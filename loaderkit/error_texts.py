"""The text of an error, whoever wrote its class.  Pure."""

from __future__ import annotations


def text_of_error(error: BaseException) -> str:
    """Print an error whose own ``__str__`` may fail: that must not hide the error.

    >>> text_of_error(ValueError("no molecule"))
    'no molecule'
    """
    try:
        return str(error)
    except Exception:  # noqa: BLE001 -- code of the user's class
        return "<str() of it failed>"


def error_in_words(error: BaseException | None) -> str:
    """Write an error as the last line of its traceback.

    >>> error_in_words(ValueError("no molecule"))
    'ValueError: no molecule'
    """
    text = "" if error is None else text_of_error(error)
    return f"{type(error).__name__}: {text}"
