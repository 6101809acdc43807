"""Values as text that is the same in every process: constants, and what objects hold.

``constant_text`` is for what cannot change; ``StateWriter`` is for an attribute's value
with all that it holds, as pickle would store it.
"""

from __future__ import annotations

import copyreg
import enum
import io
import random
import socket
import threading
import types
import weakref
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from loaderkit.library_files import is_users_code
from loaderkit.nests import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from numpy.typing import NDArray

_CONSTANTS = (int, float, complex, str, bytes, bool, type(None))
_USUAL_CONSTANTS = frozenset(_CONSTANTS)
_USUAL_CONTENT = frozenset({list, dict, set, torch.Tensor, np.ndarray})
"""What is known to be no constant by its type alone."""
_NUMBERS = frozenset({int, float, bool})
_SAYS_NOTHING = (
    io.IOBase,
    socket.socket,
    types.GeneratorType,
    types.FrameType,
    types.TracebackType,
    type(threading.Lock()),
    type(threading.RLock()),
    weakref.ref,
)
"""What cannot be pickled, and holds nothing that samples are made of: raw files have
times of their own."""
_RANDOM_GENERATORS = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    torch.Generator,
)
"""Left out: their states differ from process to process."""
_MAX_DEPTH = 100
"""Levels of nesting of a value that are followed.  Chosen: a transformer's layers are
35 levels deep, each takes four of Python's frames, and there are 1,000."""
_MAX_ITEMS_OF_TEXT = 100_000
"""Of a longer container the hash of its items is written, and not the items: part of
what a fingerprint is."""
_MAX_NESTED_ITEMS = 500_000
"""If a value holds more items that are no constants, in containers in containers, it is
not read.  Measured: a million items take 10 s."""
_MAX_MAPPED_BYTES = 256 << 20
"""Of a larger array that is mapped from a file, that file counts, and is not read."""


def is_absolute_path(text: str) -> bool:
    """Tell whether a string is an absolute path, of any operating system."""
    # There may be many strings, and pathlib takes 7 us for each.
    if text[:1] not in {"/", "\\"} and text[1:2] != ":":
        return False
    return PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()


def constant_text(value: object) -> str | None:
    """Convert an immutable value to text; None for any other value."""
    # The usual types first: 20,000 graphs on ``self`` are 700,000 values.
    kind = type(value)
    if kind in _USUAL_CONSTANTS:
        return repr(value)
    if kind in _USUAL_CONTENT:
        return None
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}={constant_text(value.value)}"
    # Not of their subclasses: a named tuple may hold anything else besides.
    if kind is tuple or kind is frozenset:
        texts = []
        elements: Any = value
        for element in elements:
            text = constant_text(element)
            if text is None:
                return None
            texts.append(text)
        # A set of texts has another order in each process.
        if kind is frozenset:
            texts.sort()
        return f"{kind.__name__}{texts}"
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSUmM":
        return f"{value.dtype.str}{value.tobytes()!r}"
    if isinstance(value, torch.dtype | np.dtype | torch.device):
        return repr(value)
    return repr(value) if isinstance(value, _CONSTANTS) else None


class StateWriter:
    """Converts an attribute's value to text: all that it holds, each object once."""

    def __init__(self) -> None:
        self.classes: dict[type, None] = {}
        """Classes of the objects that were met, in order: their code makes samples
        too.  A dict serves as an ordered set."""
        self._texts: dict[int, str | None] = {}
        """Text of each object, by its id."""
        self.functions: list[Any] = []
        """Functions and classes that were met: the code of these makes samples too."""
        self.unread: dict[str, None] = {}
        """Types of what cannot be read, in order."""
        self._num_items = 0
        self._written_objects: list[object] = []
        """Keeps objects that ``__reduce__`` made alive, so that no later object gets
        the id of one of them."""

    def write(self, value: object, depth: int = 0) -> str | None:
        """Convert a value to text.

        Args:
            value: Any object.
            depth: Containers around it.

        Returns:
            Its text; None if it holds something that cannot be pickled, or is a random
            generator.

        Raises:
            OverflowError: It holds too many items, or is too deep.
        """
        if value is None:
            return "None" if depth else None
        kind = type(value)
        if kind not in _USUAL_CONTENT:
            if isinstance(value, PurePath) or (
                isinstance(value, str) and is_absolute_path(value)
            ):
                # The raw data may move to another folder, under the same name.
                path = PurePath(value)
                name = path.name if path.is_absolute() else path.as_posix()
                return f"path {name!r}"
            if (text := constant_text(value)) is not None:
                return text
            if kind is not tuple and isinstance(value, _RANDOM_GENERATORS):
                return None
        if depth > _MAX_DEPTH:
            raise OverflowError
        if id(value) not in self._texts:
            self._written_objects.append(value)
            # Read if the object is met again inside of itself.
            self._texts[id(value)] = f"{type(value).__name__} that holds itself"
            self._texts[id(value)] = self._write_once(value, depth + 1)
        return self._texts[id(value)]

    def _write_once(self, value: Any, depth: int) -> str | None:
        name = type(value).__qualname__
        if _is_named_code(value):
            self.functions.append(value)
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, types.MethodType):
            self.functions.append(value)
            return (
                f"{value.__func__.__qualname__} of {self.write(value.__self__, depth)}"
            )
        if isinstance(value, torch.nn.Module) and "_orig_mod" in value._modules:
            # What torch.compile made cannot be pickled; it computes the same.
            return self.write(value._modules["_orig_mod"], depth)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            return _array_text(value)
        if isinstance(value, np.ndarray):
            text = _array_text(value)
            if text is None:  # an array of Python's objects
                text = self._container_text(name, value.tolist(), depth)
            return text
        if type(value) in {list, tuple}:
            return self._container_text(name, value, depth)
        if type(value) in {set, frozenset}:
            return self._container_text(name, value, depth, ordered=False)
        if type(value) in {dict, types.MappingProxyType}:
            return self._dict_text(name, value, depth)
        return self._object_text(value, depth)

    def _object_text(self, value: object, depth: int) -> str | None:
        """Convert any other object to text, from what pickle would store of it.

        If an object of a user's class cannot be pickled, those of its attributes that
        can are taken instead: with a lock beside a vocabulary, the vocabulary counts.
        """
        self.classes[type(value)] = None
        text = self._pickled_text(value, depth)
        if text is None and not is_users_code(type(value)):
            if not isinstance(value, _SAYS_NOTHING):
                kind = type(value)
                self.unread[f"{kind.__module__}.{kind.__qualname__}"] = None
            return None
        if text is not None:
            return text

        texts = []
        for name, attribute in getattr(value, "__dict__", {}).items():
            attribute_text = self.write(attribute, depth)
            if attribute_text is not None:
                texts.append(f"{name}={attribute_text}")
        return f"{type(value).__qualname__}({','.join(sorted(texts))})"

    def _pickled_text(self, value: object, depth: int) -> str | None:
        """Convert what an object's ``__reduce_ex__`` returns; None if it raises."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced: Any = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 -- user code; files and locks raise anything
            return None
        if isinstance(reduced, str):
            return reduced
        # A function, its arguments and a state, then iterators over items, or None.
        items = [*reduced[:3], *map(_list_of_items, reduced[3:5]), *reduced[5:]]
        return self._container_text(type(value).__qualname__, items, depth)

    def _container_text(
        self, name: str, items: Collection[Any], depth: int, *, ordered: bool = True
    ) -> str | None:
        """Convert a container's items to text; None if one of them has no text.

        Args:
            name: Name of its class.
            items: What is in it; of a dict, pairs.
            depth: Containers around the items.
            ordered: False for sets: equal ones may differ in their order.
        """
        texts = self._texts_of(items, depth)
        known = [text for text in texts if text is not None]
        if len(known) < len(texts):
            return None
        return _joined(name, known if ordered else sorted(known))

    def _dict_text(self, name: str, value: Mapping[Any, Any], depth: int) -> str | None:
        """Convert a dict to text, without the items that have none, such as locks.

        Equal dicts may differ in their order.
        """
        texts = []
        for pair in value.items():
            text = constant_text(pair)
            texts.append(self.write(pair, depth) if text is None else text)
        pairs = [text for text in texts if text is not None]
        if value and not pairs:
            return None
        return _joined(name, sorted(pairs))

    def _texts_of(self, items: Collection[Any], depth: int) -> list[str | None]:
        """Convert items to texts; None for those that have none."""
        if _NUMBERS.issuperset(map(type, items)):
            return list(map(repr, items))  # a million in 0.1 s, not in 2
        if set(map(type, items)) != {str}:
            self._num_items += len(items)
            if self._num_items > _MAX_NESTED_ITEMS:
                raise OverflowError
        return [self.write(item, depth) for item in items]


def _is_named_code(value: object) -> bool:
    """Tell whether a value is a class or a function, also one that Cython made."""
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return True
    # Cython's have a type for each of its versions, which nothing public names.
    return type(value).__name__ == "cython_function_or_method"


def _joined(name: str, texts: list[str]) -> str:
    """Join the texts of items to that of their container."""
    joined = ",".join(texts)
    if len(texts) > _MAX_ITEMS_OF_TEXT:
        digest = xxhash.xxh3_128_hexdigest(joined.encode("utf-8", "backslashreplace"))
        return f"{name} of {len(texts)}: {digest}"
    return f"{name}({joined})"


def _list_of_items(items: Iterator[object] | None) -> list[object] | None:
    return None if items is None else list(items)


def _array_text(value: torch.Tensor | NDArray[Any]) -> str | None:
    """Give the dtype, the shape and a hash of the numbers.

    None for arrays of Python's objects, and for tensors on the meta device, which have
    no numbers.
    """
    signature = f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, np.memmap) and value.nbytes > _MAX_MAPPED_BYTES:
        return signature
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return None
        content = tensor_bytes(value.cpu()).numpy()
    elif value.dtype.hasobject:
        return None
    else:
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return f"{signature}{xxhash.xxh3_128_hexdigest(content.data)}"
