"""What to give in place of a value that batches of torch, or a cache, do not hold.

Both rooms say it: ``datasets`` where a sample is packed, ``loader`` where it is joined.
"""

from __future__ import annotations

import enum
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

_OF_CLASSES: tuple[tuple[str, str, str | Fix], ...] = (
    # Module, beginning of a class's name, what holds the same.
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
    ("torch_geometric.typing", "SparseTensor", "x.coo()"),
)
"""By whose class it is: none of these libraries is imported for it."""


def stand_in_for(value: object) -> str | Fix:
    """Say what holds the same as a value, as code in which the value is ``x``.

    Args:
        value: No tensor, and no nest.

    Returns:
        Code; empty where nothing is known.

    >>> stand_in_for({1, 2}), stand_in_for(np.array(["a"])), stand_in_for(print)
    ('sorted(x)', 'x.tolist()', '')
    """
    if isinstance(value, np.ndarray | np.generic):
        return _stand_in_for_array(value)
    if isinstance(value, enum.Enum):
        return "x.value"
    for kind in type(value).__mro__[:-1]:
        for module, name, code in _OF_CLASSES:
            is_of_module = f"{kind.__module__}.".startswith(f"{module}.")
            if is_of_module and kind.__name__.startswith(name):
                return code
    return ""


def _stand_in_for_array(value: NDArray[Any] | np.generic) -> str:
    if value.dtype.kind in "mM":
        kind_of_time = "datetime64" if value.dtype.kind == "M" else "timedelta64"
        return f'x.astype("{kind_of_time}[us]").astype("int64")'
    if value.dtype.kind == "O":
        return "list(x), or x.astype(np.float32) where it holds numbers"
    if value.dtype.kind in "US":
        return "x.tolist()"
    if value.dtype.kind in "fc":  # wider than torch has them: long doubles
        wide = "float64" if value.dtype.kind == "f" else "complex128"
        return f"x.astype(np.{wide})"
    if value.dtype.names:
        return "{name: x[name] for name in x.dtype.names}"
    return ""
