"""What to give in place of a value that batches of torch, or a cache, do not hold.

Both rooms say it: ``datasets`` where a sample is packed, ``loader`` where it is joined.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderkit.fixes import Fix, Pack

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMATTED = Fix.of(
    "; or ", Pack('dataset.with_format("torch")'), ", of Hugging Face's datasets"
)
"""Pictures and texts come as objects of PIL and numpy from there, unless they are asked
for as tensors."""

_BY_CLASS: tuple[tuple[str, str, str | Fix], ...] = (
    # Module, beginning of a class's name, code of what holds the same.
    ("PIL", "", Fix.of("np.asarray(image)", FORMATTED)),
    ("pandas", "Timestamp", "x.timestamp()"),
    ("pandas", "Timedelta", "x.total_seconds()"),
    ("pandas", "NaT", "None"),
    ("pandas", "NA", "None"),
    (
        "pandas",
        "",
        "table.to_numpy(), or {name: table[name].to_numpy() for name in table}",
    ),
    ("datetime", "timedelta", "x.total_seconds()"),
    ("datetime", "datetime", "x.timestamp()"),
    ("datetime", "", "x.isoformat()"),
    ("pathlib", "", "str(x)"),
    ("uuid", "", "str(x)"),
    ("decimal", "", "float(x), or str(x)"),
    ("fractions", "", "float(x), or str(x)"),
    ("scipy", "", "x.toarray(), or its parts x.data, x.indices and x.indptr"),
    ("builtins", "set", "sorted(x)"),
    ("builtins", "frozenset", "sorted(x)"),
    ("builtins", "range", "torch.tensor(x), or list(x)"),
    ("builtins", "slice", "(x.start, x.stop)"),
    ("collections", "deque", "list(x)"),
    ("array", "array", "np.asarray(x)"),
    ("builtins", "memoryview", "np.asarray(x)"),
    ("builtins", "bytearray", "bytes(x)"),
    ("pyarrow", "Table", Fix.of("x.to_pylist()", FORMATTED)),
    ("pyarrow", "", "x.to_pylist(), or x.as_py() of a single value"),
    ("builtins", "generator", "list(x)"),
    # What is read from a file lies in it until it is asked for, and the file may be
    # closed by then.
    ("h5py", "Dataset", "x[()]"),
    ("torch", "Generator", "x.get_state()"),
    ("torch", "dtype", "str(x)"),
    ("torch", "device", "str(x)"),
    ("torch_geometric.typing", "SparseTensor", "x.coo()"),
)
"""By names, so that none of these libraries is imported for it.  The first row that
fits counts: the row of a whole module stands behind those of its classes."""


def stand_in_for(value: object) -> str | Fix:
    """Say what holds the same as a value, as code in which the value is ``x``.

    Args:
        value: Neither a tensor nor a nest.

    Returns:
        Code; empty where nothing is known.

    >>> stand_in_for({1, 2}), stand_in_for(np.array(["a"])), stand_in_for(print)
    ('sorted(x)', 'x.tolist()', '')
    """
    if isinstance(value, np.ndarray | np.generic):
        return _stand_in_for_array(value)
    if isinstance(value, enum.Enum):
        return "x.value"
    # The last class of each is object, of which nothing can be said.
    for cls in type(value).__mro__[:-1]:
        for module, name, code in _BY_CLASS:
            # The classes are mostly defined in modules below the one that has the name.
            is_of_module = f"{cls.__module__}.".startswith(f"{module}.")
            if is_of_module and cls.__name__.startswith(name):
                return code
    return ""


def _stand_in_for_array(value: NDArray[Any] | np.generic) -> str:
    if value.dtype.kind in "mM":
        # In microseconds whatever its own unit is, so that numbers of two arrays agree.
        kind_of_time = "datetime64" if value.dtype.kind == "M" else "timedelta64"
        return f'x.astype("{kind_of_time}[us]").astype("int64")'
    if value.dtype.kind == "O":
        return "list(x), or x.astype(np.float32) where it holds numbers"
    if value.dtype.kind in "US":
        return "x.tolist()"
    if value.dtype.kind in "fc":
        # Long doubles, which torch does not have: the widest that it has.
        widest = "float64" if value.dtype.kind == "f" else "complex128"
        return f"x.astype(np.{widest})"
    if value.dtype.names:
        return "{name: x[name] for name in x.dtype.names}"
    return ""


def array_in_place_of(array: Any) -> str:
    """Write code of a tensor or array that stands where a sample has no value.

    Args:
        array: One that other samples have there.

    >>> array_in_place_of(np.ones((2, 3), np.float32))
    "np.full((2, 3), np.nan, 'float32')"
    >>> array_in_place_of(np.ones(2, np.int64))
    "np.zeros((2,), 'int64')"
    """
    shape = tuple(array.shape)
    if isinstance(array, np.ndarray):
        if array.dtype.kind in "fc":
            return f"np.full({shape}, np.nan, {array.dtype.name!r})"
        return f"np.zeros({shape}, {array.dtype.name!r})"
    if array.dtype.is_floating_point or array.dtype.is_complex:
        return f"torch.full({shape}, torch.nan, dtype={array.dtype})"
    return f"torch.zeros({shape}, dtype={array.dtype})"


def value_in_place_of_none(other: object) -> str:
    """Say what to put where a sample has None and others have a value.

    Args:
        other: What another sample has there; None where that is not known.

    >>> value_in_place_of_none(1.5), value_in_place_of_none({"a": 1})
    ('a value such as nan', 'a dict of the same keys')
    """
    # Asked of the object, since importing torch here would cost whoever has none.
    if hasattr(other, "dtype") and getattr(other, "shape", ()) != ():
        stand_in = array_in_place_of(other)
        return f"an array of the others' shape and dtype ({stand_in})"
    if isinstance(other, Mapping):
        return "a dict of the same keys"
    if isinstance(other, list | tuple):
        return f"a {'list' if isinstance(other, list) else 'tuple'} of as many items"
    if isinstance(other, str | bytes):
        return f"a text such as {type(other)()!r}"
    if isinstance(other, bool | int):
        return "a number such as -1"
    return "a value such as nan"
