"""How a value is shown and named in a message.  Pure."""

from __future__ import annotations


def with_article(name: str) -> str:
    """Write the name of a class as the beginning of a sentence does.

    >>> with_article("IterableDataset"), with_article("DatasetDict")
    ('An IterableDataset', 'A DatasetDict')
    >>> with_article("NoneType"), with_article("ndarray")
    ('None', 'An ndarray')
    """
    if name == "NoneType":
        return "None"
    is_spelt_as_vowel = name.startswith("ndarray")  # read letter by letter: en, dee
    is_vowel = name[:1] in "AEIOaeio" or is_spelt_as_vowel
    return f"An {name}" if is_vowel else f"A {name}"


def with_small_article(name: str) -> str:
    """Put "a" or "an" before the name of a class, within a sentence.

    >>> with_small_article("Subset"), with_small_article("int")
    ('a Subset', 'an int')
    """
    return f"a{with_article(name)[1:]}"


def kind_of(value: object) -> str:
    """Say of what kind a value is, within a sentence.

    >>> kind_of(3), kind_of("x"), kind_of(None)
    ('an int', 'a str', 'None')
    """
    name = type(value).__name__
    return "None" if value is None else with_small_article(name)


def show_value(value: object) -> str:
    """Show a value in a message: short, and also where it cannot show itself.

    >>> show_value([0] * 100)[-5:]
    ' 0...'
    """
    try:
        shown = repr(value)
    except Exception:  # noqa: BLE001 -- the message is about the value's type then
        return kind_of(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
