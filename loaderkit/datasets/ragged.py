"""Batches of samples whose first axes differ: padded, packed or jagged.  Pure."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch.overrides import resolve_name

from loaderkit.answers import answer_wrong_names
from loaderkit.arguments import check_integer
from loaderkit.datasets.column_names import escape
from loaderkit.errors import DatasetError, NoSuchRowError, OptionError
from loaderkit.habits import REDUCTIONS
from loaderkit.memory.probes import is_present, present_kinds
from loaderkit.memory.reading import device_of
from loaderkit.operations import ARITHMETIC, COMPARISONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.array_types import Ints

    Path: TypeAlias = tuple[Any, ...]
    """The keys, names of attributes and numbers that lead to a field of a sample."""

RaggedLayout: TypeAlias = Literal["padded", "packed", "jagged"]
"""The names of ``layout_names``, for type checkers."""
Number: TypeAlias = int | float | bool
PadValue: TypeAlias = Number | Mapping[str, Number]
"""What stands behind a sample's end in padded batches: of all fields, or by the name or
path of a field."""
T = TypeVar("T")
B = TypeVar("B", "Padded", "Packed")

_LONGEST_COMPARED = np.iinfo(np.int16).max
"""Up to here a mask is compared, in int16: 32 rows of 1,000 take 13 us (in int64 29,
row by row 25), of 16,000 38 (84 and 45).  A longer one is written row by row.  Not by
torch, whose threads wait for each other on a busy machine."""
_FEW_KERNELS = "uint16 uint32 uint64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
_FEW_KERNELS += "float8_e5m2fnuz float8_e8m0fnu complex32"
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""
_SIGNED = {
    dtype: _BITS[dtype.itemsize]
    for name in _FEW_KERNELS.split()
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""As what bits values are moved for whose own dtype torch has no indexing."""


def _made_of_parts(cls: type[T]) -> type[T]:
    """Let ``cls(parts)`` mean ``cls(*parts)``, as it does for a plain tuple.

    Hugging Face's Trainer moves a batch to the device by ``type(part)(moved)`` for
    every tuple in it, where ``moved`` is a generator; a named tuple would take that for
    its first field.  A NamedTuple's body may not define ``__new__``, hence this.
    """
    of_fields: Callable[..., T] = cls.__new__

    def __new__(kind: type[T], *parts: Any, **named: Any) -> T:  # noqa: N807
        if len(parts) == 1 and not named and not isinstance(parts[0], torch.Tensor):
            parts = tuple(parts[0])
        return of_fields(kind, *parts, **named)

    # No type checker lets a method be replaced, though this class is ours.
    cls.__new__ = __new__  # type: ignore[method-assign, assignment]
    return cls


_SIGNS = {"neg": "-", "abs": "abs", "invert": "~"}


def _refuses_arithmetic(cls: type[T]) -> type[T]:
    """Have operators say that the values have them.

    As those of a tuple, ``batch["x"] * 2`` would be a tuple of six tensors, and
    ``batch["x"] == 0`` False.
    """
    for method, symbol in (ARITHMETIC | COMPARISONS).items():
        _refuse_operator(cls, method, symbol)
    for method, symbol in _SIGNS.items():
        _refuse_sign(cls, method, symbol)
    for method, answer in _ANSWERS_OF_A_TUPLE.items():
        setattr(cls, method, answer)
    for name, value in _ASKED_BY_LIBRARIES.items():
        setattr(cls, name, value)
    setattr(cls, "__hash__", tuple.__hash__)  # noqa: B010 -- __eq__ would take it away
    return cls


def _no_tensor_error(batch: Any, template: str) -> OptionError:
    """Say that a batch is no tensor, with the same expression of its values.

    Args:
        batch: What was computed with.
        template: The expression, with ``{}`` where the batch stands.
    """
    name = type(batch).__name__
    shown = template.format(name.lower())
    message = f"{name} is no tensor to compute with: {shown}."
    why = f"it holds {', '.join(batch._fields)}, and only values are the samples'"
    values = f"{name.lower()}.values"
    reductions = {f"torch.{reduction}({{0}})" for reduction in REDUCTIONS}
    # What stands behind the ends of samples belongs to none of them.
    if template in reductions and "mask" in batch._fields:
        values += f"[{name.lower()}.mask]"
    fix = template.format(values)
    return OptionError(message, why=why, fix=fix)


def _refuse_operator(cls: type, method: str, symbol: str) -> None:
    """Give a class an operator that raises, and its reflection."""

    def operate(self: Any, other: object) -> Any:
        raise _no_tensor_error(self, f"{{}} {symbol} {_shown_operand(other)}")

    def operate_reflected(self: Any, other: object) -> Any:
        raise _no_tensor_error(self, f"{_shown_operand(other)} {symbol} {{}}")

    setattr(cls, f"__{method}__", operate)
    if method not in COMPARISONS:  # whose reflections are each other
        setattr(cls, f"__r{method}__", operate_reflected)


def _refuse_sign(cls: type, method: str, symbol: str) -> None:
    template = "abs({})" if symbol == "abs" else symbol + "{}"

    def operate(self: Any) -> Any:
        raise _no_tensor_error(self, template)

    setattr(cls, f"__{method}__", operate)


def _is_equal(self: Any, other: object) -> Any:
    _check_comparable(self, "==", other)
    return tuple.__eq__(self, other)


def _is_unequal(self: Any, other: object) -> Any:
    _check_comparable(self, "!=", other)
    return tuple.__ne__(self, other)


def _check_comparable(batch: Any, symbol: str, other: object) -> None:
    """Refuse to compare with numbers, and with a batch of other tensors.

    Raises:
        OptionError: The comparison is meant for the values.
    """
    if _is_numeric(other):
        raise _no_tensor_error(batch, f"{{}} {symbol} {_shown_operand(other)}")
    if not _has_other_parts(batch, other):
        return
    name = type(batch).__name__.lower()
    message = f"{type(batch).__name__} is no tensor to compare: {name} {symbol} other."
    why = f"it holds {', '.join(batch._fields)}, which are compared item by item"
    fix = "not " if symbol == "!=" else ""
    fix += f"torch.equal({name}.values, other.values)"
    raise OptionError(message, why=why, fix=fix)


def _is_numeric(value: object) -> bool:
    return isinstance(value, int | float | complex | torch.Tensor | np.ndarray)


def _has_item(self: Any, item: object) -> bool:
    if _is_numeric(item):
        raise _no_tensor_error(self, f"{_shown_operand(item)} in {{}}")
    return tuple.__contains__(self, item)


def _count_item(self: Any, item: object) -> int:
    raise _no_tensor_error(self, f"({{}} == {_shown_operand(item)}).sum()")


def _index_of_item(self: Any, item: object, *_: int) -> int:
    raise _no_tensor_error(self, f"({{}} == {_shown_operand(item)}).nonzero()")


def _get_item(self: Any, index: Any) -> Any:
    if isinstance(index, slice):
        return tuple.__getitem__(self, index)
    # A tensor of one number has an __index__ too, and is meant for the samples.
    if hasattr(index, "__index__") and not isinstance(index, torch.Tensor):
        _check_part(self, int(operator.index(index)))
        return tuple.__getitem__(self, index)

    indices = index if type(index) is tuple else (index,)
    shown = ", ".join(map(_shown_index, indices))
    refusal = _no_tensor_error(self, f"{{}}[{shown}]")
    if isinstance(index, str) and index in self._fields:
        name = type(self).__name__.lower()
        raise OptionError(refusal.what, why=refusal.why, fix=f"{name}.{index}")
    raise refusal


def _check_part(batch: Any, index: int) -> None:
    """Refuse the number of a sample as the number of a part.

    Raises:
        NoSuchRowError: There is no such part.
    """
    if -len(batch) <= index < len(batch):
        return
    name = type(batch).__name__
    message = f"{name} has no part {index}: {name.lower()}[{index}]."
    why = f"it is a tuple of {', '.join(batch._fields)}, and not of the samples"
    fix = f"{name.lower()}.to_list()[{index}]"
    raise NoSuchRowError(message, why=why, fix=fix)


def _torch_function(
    kind: type, function: object, _: Any, args: Any = (), kwargs: Any = None
) -> Any:
    batch, shown = _shown_call(function, kind, args, kwargs or {})
    raise _no_tensor_error(batch, shown)


def _as_numpy_array(self: Any, *_: Any, **__: Any) -> Any:
    raise _no_tensor_error(self, "numpy.asarray({})")


_ANSWERS_OF_A_TUPLE: dict[str, Callable[..., Any]] = {
    "__eq__": _is_equal,
    "__ne__": _is_unequal,
    "__contains__": _has_item,
    "__getitem__": _get_item,
    "count": _count_item,
    "index": _index_of_item,
}
"""In place of what a tuple would answer."""
_ASKED_BY_LIBRARIES: dict[str, object] = {
    # torch asks here before it computes with what is no tensor.
    "__torch_function__": classmethod(_torch_function),
    # numpy would make an array of three arrays; without ``__array_ufunc__`` it asks for
    # __radd__ and its like.
    "__array__": _as_numpy_array,
    "__array_ufunc__": None,
}


def _has_other_parts(batch: tuple[Any, ...], other: object) -> bool:
    """Tell whether comparing a batch would ask whether two tensors are equal."""
    if not isinstance(other, tuple) or len(other) != len(batch):
        return False
    return any(
        component is not other_component and isinstance(other_component, torch.Tensor)
        for component, other_component in zip(batch, other, strict=True)
    )


def _shown_call(
    function: object, kind: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, str]:
    """Write a call of torch's with ``{0}`` for the ragged batch that it was given.

    Returns:
        The batch, and the call.
    """
    name = resolve_name(function) or getattr(function, "__name__", str(function))
    batches: list[Any] = []

    def shown(argument: object) -> str:
        if isinstance(argument, kind):
            batches.append(argument)
            return "{0}"
        if type(argument) in {list, tuple}:
            return f"[{', '.join(map(shown, cast('list[object]', argument)))}]"
        if argument is None or isinstance(argument, bool | int | float | str):
            return repr(argument)
        return "tensor" if isinstance(argument, torch.Tensor) else "..."

    parts = [*map(shown, args)]
    # Functions of torch.nn.functional hand on what has a default, too.
    parts += [
        f"{key}={shown(value)}" for key, value in kwargs.items() if value is not None
    ]
    # torch comes here only where there is one; deeper down it is not looked for.
    batch = batches[0] if batches else object.__new__(kind)
    return batch, f"{name}({', '.join(parts)})"


def _shown_index(index: object) -> str:
    """Write an index as it stands in brackets."""
    if isinstance(index, slice):
        borders = (index.start, index.stop)
        return ":".join("" if border is None else str(border) for border in borders)
    if isinstance(index, torch.Tensor | np.ndarray):
        return "rows"
    return "..." if index is ... else repr(index)


def _shown_operand(operand: object) -> str:
    """Write a number as it is, and anything else by the name of its class."""
    if isinstance(operand, int | float | complex):
        return repr(operand)
    if isinstance(operand, torch.Tensor | np.ndarray):
        return "tensor"
    name = type(operand).__name__.lower()
    return f"{name}.values" if isinstance(operand, Padded | Packed) else name


@answer_wrong_names("values")
@_refuses_arithmetic
@_made_of_parts
class Padded(NamedTuple):
    """Samples side by side, each filled up to the longest.

    It is a tuple of three tensors, so that ``values, lengths, mask = padded`` works,
    and trainers move and pin it as any tuple: Hugging Face's goes through the tensors,
    accelerate joins such batches by ``len`` and index, and torch's ``DataParallel``
    cuts them.  Nothing can tell these from a loop of the user's.  So ``len(padded)`` is
    3, ``for part in padded`` goes through the tensors, ``padded[0]`` is ``values``, and
    it is never false.  There are ``len(padded.lengths)`` samples, and
    ``padded.to_list()`` gives them, also for ``zip`` with other fields.  What only
    a tensor has, such as ``padded[:, 0]``, ``padded * 2`` and ``5 in padded``, is
    refused with the same of ``padded.values``.
    """

    values: torch.Tensor
    """``[B, L, *rest]``; the dataset's ``pad_value`` (0) behind each end."""
    lengths: torch.Tensor
    """Rows of each sample ``[B]``, int64."""
    mask: torch.Tensor
    """True where ``values`` holds a sample's row ``[B, L]``."""

    def __repr__(self) -> str:
        return _shapes_of(self)

    def to(self, *args: Any, **kwargs: Any) -> Padded:
        """Move to a device, and cast the values, as ``torch.Tensor.to`` does."""
        return _move_to(self, *args, **kwargs)

    def pin_memory(self, device: object = None) -> Padded:
        """Copy to page-locked memory, as ``torch.Tensor.pin_memory`` does."""
        return _pin_all(self, device)

    def to_list(self) -> list[torch.Tensor]:
        """Give the samples back, as views ``[lengths[i], *rest]``."""
        pairs = zip(self.values, self.lengths.tolist(), strict=True)
        return [row[:length] for row, length in pairs]

    def pad_to(self, length: int) -> Padded:
        """Fill each sample up further, with zeros.

        Args:
            length: Rows of each sample, no fewer than there are.
        """
        samples, longest, *trailing = self.values.shape
        check_integer("length", length, least=longest)
        zeros = self.values.new_zeros(samples, length - longest, *trailing)
        no_rows = self.mask.new_zeros(samples, length - longest)
        values = torch.cat([self.values, zeros], dim=1)
        return Padded(values, self.lengths, torch.cat([self.mask, no_rows], dim=1))


@answer_wrong_names("values")
@_refuses_arithmetic
@_made_of_parts
class Packed(NamedTuple):
    """Samples end to end.

    It is a tuple of two tensors: ``len(packed)`` is 2, and so on, as of ``Padded``.
    There are ``len(packed.offsets) - 1`` samples, and ``packed.to_list()`` gives them.
    """

    values: torch.Tensor
    """``[N, *rest]``, ``N`` rows of all samples together."""
    offsets: torch.Tensor
    """Where each sample begins, and the last ends ``[B + 1]``, int64."""

    def __repr__(self) -> str:
        return _shapes_of(self)

    def to(self, *args: Any, **kwargs: Any) -> Packed:
        """Move to a device, and cast the values, as ``torch.Tensor.to`` does."""
        return _move_to(self, *args, **kwargs)

    def pin_memory(self, device: object = None) -> Packed:
        """Copy to page-locked memory, as ``torch.Tensor.pin_memory`` does."""
        return _pin_all(self, device)

    def to_list(self) -> list[torch.Tensor]:
        """Give the samples back, as views ``[offsets[i + 1] - offsets[i], *rest]``."""
        lengths = (self.offsets[1:] - self.offsets[:-1]).tolist()
        return list(torch.split(self.values, lengths))


END_TO_END: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "packed": Packed,
    "jagged": torch.nested.nested_tensor_from_jagged,
}
"""Ways to hold samples of different lengths beside ``padded``, whose values are copied
straight to where they go.  Each makes a batch of values that lie end to end, and of
where each sample begins, and the last ends.

A new one is a row here, its name in ``RaggedLayout`` and its class above; a row of
``PADDED`` too if it has places to fill."""
PADDED: dict[str, type] = {"padded": Padded}
"""Those that have places to fill: with ``values``, ``lengths``, ``mask`` and ``pad_to``
as ``Padded`` has them, wherever in a row a sample stands."""


def layout_names() -> tuple[str, ...]:
    """Name the ways to hold samples of different lengths, the usual one first."""
    return ("padded", *END_TO_END)


def join_ragged(tensors: Sequence[torch.Tensor], ragged: str) -> Any:
    """Join tensors whose first axes may differ, and nothing else.

    Args:
        tensors: At least one, each ``[n_i, *rest]``.
        ragged: One of ``layout_names``.

    Raises:
        DatasetError: They differ in dtype, or in more than their first axis.
    """
    if ragged == "padded":
        return pad(tensors)
    return END_TO_END[ragged](*concatenate(tensors))


def _shapes_of(batch: Padded | Packed) -> str:
    """Write a batch as PyG writes graphs: the shapes, and what the values are.

    >>> _shapes_of(pad([torch.tensor([1]), torch.tensor([2, 3])]))
    'Padded(values=[2, 2] int64, lengths=[2], mask=[2, 2])'
    """
    dtype = str(batch.values.dtype).removeprefix("torch.")
    device_text = (
        "" if batch.values.device.type == "cpu" else f" on {batch.values.device}"
    )
    tensors = batch._asdict()
    shapes = [f"{name}={list(tensor.shape)}" for name, tensor in tensors.items()]
    shapes[0] += f" {dtype}{device_text}"
    return f"{type(batch).__name__}({', '.join(shapes)})"


def _move_to(batch: B, *args: Any, **kwargs: Any) -> B:
    """Move all parts; a dtype is for the values, not for what counts rows."""
    values, *others = batch
    try:
        values = values.to(*args, **kwargs)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise _refused_move(batch, error, *args, **kwargs) from error
    non_blocking = bool(kwargs.get("non_blocking", False))
    device = values.device
    moved = [tensor.to(device, non_blocking=non_blocking) for tensor in others]
    return type(batch)(values, *moved)


def _refused_move(
    batch: Padded | Packed, error: Exception, *args: Any, **kwargs: Any
) -> Exception:
    """Say that a device is not there; the error itself where that is not what failed.

    torch says "Torch not compiled with CUDA enabled", and asserts.
    """
    device = kwargs.get("device", args[0] if args else None)
    if not isinstance(device, str | int | torch.device):
        return error
    try:
        if is_present(device_of(torch.device(device))):
            return error
    except (OptionError, RuntimeError):
        pass  # torch knows no device of that name
    kind, shown = type(batch).__name__, str(device)
    message = f"{kind} cannot be moved to {shown!r}: there is no such device here."
    why = f"none is there, or this torch ({torch.__version__}) was built without it"
    here = next(iter(present_kinds()), torch.device("cpu"))
    fix = f"{kind.lower()}.to({str(here)!r}), which is here"
    return OptionError(message, why=why, fix=fix)


def _pin_all(batch: B, device: object) -> B:
    # torch warns of ``pin_memory(None)`` too: the argument is deprecated.
    arguments: Any = () if device is None else (device,)
    try:
        return type(batch)(*[tensor.pin_memory(*arguments) for tensor in batch])
    except RuntimeError as error:
        if present_kinds():
            raise
        kind = type(batch).__name__
        message = f"{kind} cannot be copied to page-locked memory: no device is here."
        why = "page-locked memory is what a device copies from"
        fix = f"{kind.lower()}, as it is"
        raise OptionError(message, why=why, fix=fix) from error


def pad(tensors: Sequence[torch.Tensor]) -> Padded:
    """Put tensors side by side.

    Args:
        tensors: At least one, each ``[n_i, *rest]``.

    Returns:
        The samples padded with zeros (False) to the longest.

    Raises:
        DatasetError: They differ in dtype, or in more than their first axis.

    >>> pad([torch.tensor([1]), torch.tensor([2, 3])]).values
    tensor([[1, 0],
            [2, 3]])
    """
    check_alike(tensors)
    dtype = tensors[0].dtype
    bits = [tensor.view(_SIGNED.get(dtype, dtype)) for tensor in tensors]
    padded = torch.nn.utils.rnn.pad_sequence(bits, batch_first=True)
    lengths = _lengths_of(tensors)
    mask = mask_of(lengths.numpy(), padded.shape[1])
    return Padded(padded.view(dtype), lengths, mask)


def check_pad_value(pad_value: PadValue, ragged: str) -> PadValue:
    """Take what can fill up samples, as numbers of Python's.

    Args:
        pad_value: A number, or numbers by the names of fields.
        ragged: What batches hold for samples of different lengths.

    Returns:
        The same, where scalars of numpy's and torch's are Python's numbers.

    Raises:
        OptionError: It holds something else than numbers, or nothing is padded.
    """
    # These come from the user, and types are not checked when a program runs.
    names: list[object] = []
    numbers: list[object] = [pad_value]
    if isinstance(pad_value, Mapping):
        names, numbers = list(pad_value), list(pad_value.values())
    numbers = [_python_number(number) for number in numbers]
    are_names = all(isinstance(name, str) for name in names)
    if not are_names or not all(isinstance(number, int | float) for number in numbers):
        message = f"pad_value must be a number, or numbers by field, got {pad_value!r}."
        why = "it is written behind the end of shorter samples"
        raise OptionError(message, why=why, fix='pad_value={"labels": -100}')
    if ragged not in PADDED and (names or pad_value != 0):
        message = f"pad_value={pad_value!r} was given beside ragged={ragged!r}."
        why = "only padded batches have places to fill"
        raise OptionError(message, why=why, fix='ragged="padded"')
    if isinstance(pad_value, Mapping):
        return cast("PadValue", dict(zip(names, numbers, strict=True)))
    return cast("PadValue", numbers[0])


def _python_number(value: object) -> object:
    """Take the number out of a scalar of numpy's or torch's."""
    is_scalar = isinstance(value, np.generic)
    if isinstance(value, torch.Tensor | np.ndarray):
        is_scalar = value.ndim == 0
    return cast("np.generic", value).item() if is_scalar else value


def fill_padding(batch: object, pad_value: PadValue, path: Path = ()) -> None:
    """Write a value behind the end of each sample, in place.

    Args:
        batch: A nest with ``Padded`` values in it.
        pad_value: A number for all of them, or numbers by fields: by the name of one,
            wherever it is, or by its path, such as "answer.ids", as ``inspect`` shows
            it.  What is nearest to a value counts.  Fields that it does not name keep
            what they have.
        path: The keys that lead to the nest.

    Raises:
        DatasetError: A field's dtype cannot hold its number.

    >>> one, other = (pad([torch.tensor([1]), torch.tensor([2, 3])]) for _ in range(2))
    >>> batch = {"question": {"ids": one}, "answer": {"ids": other}}
    >>> fill_padding(batch, {"answer.ids": -100})
    >>> one.values[0], other.values[0]
    (tensor([1, 0]), tensor([   1, -100]))
    """
    if isinstance(batch, tuple(PADDED.values())):
        number = padding_of(path, pad_value)
        if number is not None:
            _fill_outside_samples(cast("Padded", batch), number, path_text(path))
        return
    for key, value in parts_with_keys(batch):
        fill_padding(value, pad_value, (*path, key))


def padding_of(path: Path, pad_value: PadValue) -> Number | None:
    """Look up what stands behind the ends of a field's samples.

    Args:
        path: The keys that lead to it.
        pad_value: As for ``fill_padding``.

    Returns:
        None where the field is not named, nor anything that it is in.

    >>> padding_of(("a", "x", 0), {"x": 1, "a": 2}), padding_of(("a", 0), {"b": 2})
    (1, None)
    >>> padding_of(("a", "x"), {"x": 1, "a.x": 3})
    3
    """
    if not isinstance(pad_value, Mapping):
        return pad_value
    for depth in range(len(path), 0, -1):
        name = path_text(path[:depth])
        if name in pad_value:
            return pad_value[name]
        key = path[depth - 1]
        if isinstance(key, str) and key in pad_value:
            return pad_value[key]
    return None


def path_text(path: Path) -> str:
    """Write the keys that lead to a field, as a cache calls its column."""
    return ".".join(map(escape, path))


def parts_with_keys(batch: object) -> Iterator[tuple[Any, Any]]:
    """Go through what is in a container, with its keys, names or numbers."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            # A number is a name in a dict, and no place in a list.
            yield str(key) if not isinstance(key, tuple) else key, value
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        yield from vars(batch).items()
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        yield from zip(batch._fields, batch, strict=True)
    elif isinstance(batch, list | tuple):
        yield from enumerate(batch)


def _fill_outside_samples(padded: Padded, number: Number, name: str) -> None:
    values, mask = padded.values, padded.mask
    value = _as_dtype(number, values.dtype, name)
    bits = _SIGNED.get(values.dtype, values.dtype)
    axes_behind = (1,) * (values.dim() - mask.dim())
    is_outside = ~mask.reshape(*mask.shape, *axes_behind)
    values.view(bits).masked_fill_(is_outside, value.view(bits))


def _as_dtype(number: Number, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Give a number as a tensor ``[]`` of a dtype that can hold it."""
    if dtype is torch.bool:
        fits = number in {0, 1}
    elif dtype.is_floating_point or dtype.is_complex:
        largest = torch.finfo(dtype).max
        fits = not math.isfinite(number) or abs(number) <= largest
    else:
        bounds = torch.iinfo(dtype)
        fits = number == number // 1 and bounds.min <= number <= bounds.max
    if not fits:
        field = f"field {name!r}" if name else "the samples"
        message = f"pad_value {number!r} cannot be written into {field}, of {dtype}."
        why = "a value of that dtype cannot be it"
        nearest = _nearest_of_dtype(number, dtype)
        fix = f"pad_value={{{name!r}: {nearest}}}" if name else f"pad_value={nearest}"
        raise DatasetError(message, why=why, fix=fix)
    # An integer beyond 64 bits fits into a float, and not into torch's integers.
    is_integer = not dtype.is_floating_point and not dtype.is_complex
    return torch.tensor(number if is_integer else float(number)).to(dtype)


def _nearest_of_dtype(number: Number, dtype: torch.dtype) -> Number:
    """Give the number nearest to one that a dtype cannot hold; 0 for NaN."""
    if dtype is torch.bool or math.isnan(number):
        return 0
    if dtype.is_floating_point or dtype.is_complex:
        largest = torch.finfo(dtype).max
        return min(max(number, -largest), largest)
    bounds = torch.iinfo(dtype)
    return int(min(max(number, bounds.min), bounds.max))


def mask_of(lengths: Ints, longest: int) -> torch.Tensor:
    """Say where a padded batch holds rows of samples.

    Args:
        lengths: Rows of each sample ``[B]``.
        longest: Rows of the batch for each, ``L``.

    Returns:
        True before each sample's end ``[B, L]``.

    >>> mask_of(np.array([1, 2]), 2)
    tensor([[ True, False],
            [ True,  True]])
    """
    if longest <= _LONGEST_COMPARED:
        ends = lengths.astype(np.int16)[:, None]
        return torch.from_numpy(np.arange(longest, dtype=np.int16) < ends)
    mask = np.zeros((len(lengths), longest), np.bool_)
    for row, length in zip(mask, lengths.tolist(), strict=True):
        row[:length] = True
    return torch.from_numpy(mask)


def concatenate(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put tensors end to end.

    Args:
        tensors: At least one, each ``[n_i, *rest]``.

    Returns:
        The values ``[sum n_i, *rest]``, and where each sample begins, and the last
        ends ``[B + 1]``, int64.

    Raises:
        DatasetError: They differ in dtype, or in more than their first axis.
    """
    check_alike(tensors)
    return torch.cat(list(tensors)), _offsets_of(_lengths_of(tensors))


def check_alike(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that cannot be rows of one batch.

    Args:
        tensors: At least one.

    Raises:
        DatasetError: They differ in dtype, or in more than their first axis.
    """
    first = tensors[0]
    for position, tensor in enumerate(tensors):
        same_axes = tensor.dim() == first.dim() and tensor.shape[1:] == first.shape[1:]
        if not (same_axes and tensor.dtype is first.dtype):
            raise _unlike_tensors_error(position, first, tensor)
    # Numbers have no axis along which they could be put end to end.
    if not first.dim():
        raise _unlike_tensors_error(len(tensors) - 1, first, tensors[-1])


def error_of_shapes(field: str, shapes: Sequence[Sequence[int]]) -> DatasetError:
    """Say which shapes of a field cannot be joined.

    Args:
        field: What it is called.
        shapes: Those of the samples of a batch, at least one.
    """
    # Such as [3, 20, 30] and [3, 21, 30]: their first axis alone would be joined along.
    others = [shape for shape in shapes if shape[1:] != shapes[0][1:]]
    why = "an axis that they are not joined along differs, or the number of axes"
    if not others:
        others = [shape for shape in shapes if shape != shapes[0]]
        why = "they differ in their first axis alone, but other samples of the dataset "
        why += "in other axes, too, so that the field is not padded"
    called = f"Field {field!r} has shapes in these samples"
    if not field:
        called = "These samples have shapes"
    message = f"{called} that cannot be joined: {list(shapes[0])} and "
    message += f"{list((others or shapes)[0])}."
    fix = "give the samples one shape in load() or transform, or a batch size of 1"
    axis = _only_differing_axis(shapes)
    if axis:
        fix += f"; or movedim({axis}, 0) there: along the first axis they may differ"
    return DatasetError(message, why=why, fix=fix)


def _only_differing_axis(shapes: Sequence[Sequence[int]]) -> int | None:
    """Find the axis in which shapes differ; None where these are several, or none."""
    if len({len(shape) for shape in shapes}) > 1:
        return None
    sizes_by_axis = zip(*shapes, strict=True)
    differing = [n for n, sizes in enumerate(sizes_by_axis) if len(set(sizes)) > 1]
    return differing[0] if len(differing) == 1 else None


def _unlike_tensors_error(
    position: int, first: torch.Tensor, tensor: torch.Tensor
) -> DatasetError:
    """Make the error for a tensor that cannot be joined with that of sample 0."""
    message = (
        f"Samples 0 and {position} of a batch cannot be joined: "
        f"{list(first.shape)} {first.dtype}, {list(tensor.shape)} {tensor.dtype}."
    )
    why = "they may differ in their first axis only"
    fix = "give them one shape and dtype in load() or transform"
    return DatasetError(message, why=why, fix=fix)


def _lengths_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([len(tensor) for tensor in tensors])


def _offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    offsets = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets
