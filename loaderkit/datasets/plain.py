"""Lists, tuples and dicts of plain Python values, as bytes in a column.  Pure.

Most are JSON, in which tags stand for what JSON lacks.  A list of texts, such as the
name of each atom, is kept in a form that numpy reads: the texts that occur, and for
each item the number of its text.

    FF  texts, with 00 between them  [FF  numbers]      FE for a tuple

The numbers have one byte each where up to 256 texts occur, else two or four, little
endian; without them the texts are the items.  UTF-8 has no bytes FE and FF, so neither
begins JSON, nor can one be within the texts.  A list with a text that contains 00 is
kept as JSON.
"""

from __future__ import annotations

import base64
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.errors import DamagedCacheError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LIST = b"\xff"
_TUPLE = b"\xfe"
_NUMBERS_FOLLOW = b"\xff"
_BETWEEN = "\0"
_MOST_BY_HAND = 64
"""Up to so many items Python is quicker than numpy, which takes 3 us to begin: 3 us
either way for 64 items, 16 and 5 us for 400."""

_PLAIN_TYPES = frozenset({str, int, float, bool, complex, bytes, type(None)})
_JSON_TYPES = frozenset({str, int, float, bool, type(None)})
"""Those that JSON has."""
_TEXTS = frozenset({str})
MOST_DEPTH = 100
"""Containers in containers; chosen.  Reading takes about three of Python's 1,000 frames
for each."""
_MOST_KEY_BITS = 1024
"""Chosen.  Python writes integers of up to 4,300 digits."""

CONTRADICTIONS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
)
"""What Python, torch and PyG raise about parts that make no whole."""


def to_bytes(value: list[Any] | tuple[Any, ...]) -> bytes:
    r"""Write a plain value.

    Args:
        value: A list or tuple of plain Python values: numbers, texts, bytes, None, and
            lists, tuples and dicts of them.

    Returns:
        Bytes from which ``from_bytes`` makes an equal value, type by type.

    Raises:
        ValueError: An integer has more digits than Python writes.

    >>> to_bytes(["C", "N", "C", "C"]), to_bytes(("a", "b")), to_bytes([1, None])
    (b'\xffC\x00N\xff\x00\x01\x00\x00', b'\xfea\x00b', b'[1, null]')
    """
    if value and _TEXTS.issuperset(map(type, value)):
        written = _texts_to_bytes(value)
        if written is not None:
            kind = _LIST if type(value) is list else _TUPLE
            return kind + written
    return encode_text(to_json(value))


def from_bytes(column: str, raw: bytes) -> Any:
    """Read what ``to_bytes`` wrote.

    Args:
        column: Name of the column, for the error.
        raw: The bytes of one value.

    Returns:
        The value, new.

    Raises:
        DamagedCacheError: The bytes are nothing that ``pack`` writes.
    """
    kind = raw[:1]
    if kind == _LIST:
        return _texts_from_bytes(column, raw)
    if kind == _TUPLE:
        return tuple(_texts_from_bytes(column, raw))
    return from_json(column, decode_text(column, raw))


def count_items(column: str, raw: bytes) -> int:
    """Count the items of a list or tuple without making them, where that is possible.

    Args:
        column: Name of the column, for the error.
        raw: What ``to_bytes`` wrote of it.

    Raises:
        DamagedCacheError: The bytes are no list or tuple that ``pack`` writes.

    >>> values = ([3, 1], [], ("a,b",), ["a", "b", "a", "a"], ("a", ""))
    >>> [count_items("x", to_bytes(value)) for value in values]
    [2, 0, 1, 4, 2]
    """
    if raw[:1] in {_LIST, _TUPLE}:
        texts, numbers = _split_texts(raw)
        count = texts.count(_BETWEEN.encode()) + 1
        return len(_as_array(column, numbers, count)) if numbers else count
    # Without another list, a text or a dict in it each comma is between two items.
    flat = raw.rfind(b"[") == 0 and b'"' not in raw and b"{" not in raw
    if flat and len(raw) > len("[]"):
        return raw.count(b",") + 1  # five times as fast as reading the numbers
    value = from_bytes(column, raw)
    if not isinstance(value, list | tuple):
        raise damaged(f"{column!r} holds no list, as its samples say")
    return len(value)


def is_plain(value: object, depth: int = 0) -> bool:
    """Tell whether a value is made of plain Python values alone.

    Args:
        value: Any object.
        depth: Containers that it lies in.
    """
    if type(value) in _PLAIN_TYPES:
        return True
    if depth >= MOST_DEPTH:
        return False
    if type(value) is list or type(value) is tuple:
        # Most have numbers or texts alone, and this loop is not Python's.
        return _PLAIN_TYPES.issuperset(map(type, value)) or all(
            is_plain(item, depth + 1) for item in value
        )
    if type(value) is dict:
        return all(
            _is_literal(key) and is_plain(item, depth + 1)
            for key, item in value.items()
        )
    return False


def is_storable_key(key: object) -> bool:
    """Tell whether a dict's key can be written in the manifest, as Python writes it."""
    if type(key) is str:
        return True
    if type(key) is int:
        return key.bit_length() <= _MOST_KEY_BITS
    if type(key) is float:
        return math.isfinite(key)
    if type(key) is tuple:
        return _is_literal(key) and all(is_storable_key(item) for item in key)
    return type(key) in {bool, type(None)}


def _is_literal(key: object, depth: int = 0) -> bool:
    if type(key) is tuple:
        return depth < MOST_DEPTH and all(_is_literal(item, depth + 1) for item in key)
    # NaN is not found again: it is unequal to itself.
    is_nan = key != key
    return type(key) in {str, int, bool, float, type(None)} and not is_nan


def to_json(value: object) -> str:
    """Write a plain value as JSON.

    Raises:
        ValueError: An integer has more digits than Python writes.
    """
    tagged = _to_tagged_json(value)
    text = json.dumps(tagged)
    # JSON's escapes of two surrogates that follow each other mean one character.
    if "\\ud" in text and json.loads(text) != tagged:
        return json.dumps(tagged, ensure_ascii=False)
    return text


def from_json(column: str, text: str) -> Any:
    """Read what ``to_json`` wrote.

    Args:
        column: Name of the column, for the error.
        text: JSON, in which tags stand for what JSON lacks.

    Returns:
        Numbers, lists, tuples, dicts and what they hold.

    Raises:
        DamagedCacheError: The text is nothing that ``pack`` writes.
    """
    try:
        return json.loads(text, object_hook=_from_tagged_json)
    except (*CONTRADICTIONS, RecursionError) as error:
        raise damaged(f"{column!r} is no value as it is packed: {error}") from None


def encode_text(text: str) -> bytes:
    """Write a text as a column keeps it; surrogates without their partner too."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(column: str, raw: bytes | memoryview) -> str:
    """Turn bytes of a column of texts into text.

    Args:
        column: Its name, for the error.
        raw: One text, or several without anything in between.

    Returns:
        The text.

    Raises:
        DamagedCacheError: The bytes are no text that ``pack`` writes.
    """
    try:
        return str(raw, "utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise damaged(f"{column!r} is no text as it is packed: {error}") from None


def damaged(why: str) -> DamagedCacheError:
    """Make the error for bytes that are no sample."""
    message = "A sample of the cache cannot be put together."
    return DamagedCacheError(
        message, why=why, fix="loaderkit verify CACHE; pack it again"
    )


def _texts_to_bytes(items: list[str] | tuple[str, ...]) -> bytes | None:
    """Write texts, without the byte that says in what they are; None if they cannot."""
    number_of: dict[str, int] = {}
    numbers = [number_of.setdefault(item, len(number_of)) for item in items]
    # A number takes a byte, and so does what is between two texts that are repeated.
    is_worth_it = 2 * len(number_of) <= len(items)
    texts: Any = number_of if is_worth_it else items
    joined = _BETWEEN.join(texts)
    # A text has the mark in it: where it ends could not be told.
    if joined.count(_BETWEEN) != len(texts) - 1:
        return None
    written = encode_text(joined)
    if is_worth_it:
        dtype = _dtype_of_numbers(len(number_of))
        written += _NUMBERS_FOLLOW + np.array(numbers, dtype).tobytes()
    return written


def _texts_from_bytes(column: str, raw: bytes) -> list[str]:
    text_bytes, numbers = _split_texts(raw)
    texts = decode_text(column, text_bytes).split(_BETWEEN)
    if not numbers:
        return texts
    try:
        if len(texts) <= 256 and len(numbers) <= _MOST_BY_HAND:
            return [texts[number] for number in numbers]
        numbered = np.array(texts, object)
        items: list[str] = numbered[_as_array(column, numbers, len(texts))].tolist()
    except IndexError as error:
        raise damaged(f"{column!r} is no list of texts: {error}") from None
    return items


def _split_texts(raw: bytes) -> tuple[bytes, bytes]:
    """Part the texts of a list from its numbers, which may be none."""
    texts, _, numbers = raw[1:].partition(_NUMBERS_FOLLOW)
    return texts, numbers


def _as_array(column: str, numbers: bytes, text_count: int) -> NDArray[Any]:
    dtype = np.dtype(_dtype_of_numbers(text_count))
    if len(numbers) % dtype.itemsize:
        raise damaged(f"{column!r} is no list of texts: half a number is left over")
    return np.frombuffer(numbers, dtype)


def _dtype_of_numbers(text_count: int) -> str:
    """Say which integers hold the numbers of so many texts.

    >>> [_dtype_of_numbers(count) for count in (1, 256, 257, 65_536, 65_537)]
    ['|u1', '|u1', '<u2', '<u2', '<u4']
    """
    if text_count <= 1 << 8:
        return "|u1"
    return "<u2" if text_count <= 1 << 16 else "<u4"


def _to_tagged_json(value: object) -> Any:
    """Make plain Python JSON, marking what JSON has no notion of."""
    if isinstance(value, tuple):
        return {"t": _to_tagged_json(list(value))}
    if isinstance(value, list):
        if _JSON_TYPES.issuperset(map(type, value)):
            return value
        return [_to_tagged_json(element) for element in value]
    if isinstance(value, dict):
        return {
            "d": [[_to_tagged_json(k), _to_tagged_json(v)] for k, v in value.items()]
        }
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"b": base64.b64encode(value).decode()}
    return value


def _from_tagged_json(tagged: dict[str, Any]) -> Any:
    """Make what a tag stands for; what is inside is made already."""
    ((tag, inside),) = tagged.items()
    if tag == "c":
        return complex(*inside)
    if tag == "b":
        return base64.b64decode(inside)
    if tag == "d":
        return dict(inside)
    return tuple(inside)
