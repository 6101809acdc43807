"""Batches of samples whose first axes differ: padded, packed or jagged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from loaderkit.answers import answer_wrong_names
from loaderkit.arguments import check_integer
from loaderkit.datasets.ragged_answers import refuse_tensor_operations
from loaderkit.errors import DatasetError, OptionError
from loaderkit.memory.probes import is_present, present_kinds
from loaderkit.memory.reading import device_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loaderkit.array_types import Ints

RaggedLayout: TypeAlias = Literal["padded", "packed", "jagged"]
"""The names of ``layout_names``, for type checkers."""
T = TypeVar("T")
B = TypeVar("B", "Padded", "Packed")

_LONGEST_COMPARED = 1_000
"""Up to here a mask is compared, in int16; a longer one is written as runs.  Alone, 32
rows of 1,000 take 4 us compared and 3 as runs, of 16,000 18 and 8 (15 row by row); in a
batch short ones take 3 % more as runs.  Not by torch, whose threads wait for each
other on a busy machine."""
_FEW_KERNELS = "uint16 uint32 uint64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
_FEW_KERNELS += "float8_e5m2fnuz float8_e8m0fnu complex32"
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""
_INTEGER_OF = {
    dtype: _BITS[dtype.itemsize]
    for name in _FEW_KERNELS.split()
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""Of dtypes for which torch has no indexing: the integers of as many bytes."""


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


@answer_wrong_names("values")
@refuse_tensor_operations
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
@refuse_tensor_operations
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
    bits = [tensor.view(bits_of(dtype)) for tensor in tensors]
    padded = torch.nn.utils.rnn.pad_sequence(bits, batch_first=True)
    lengths = _lengths_of(tensors)
    mask = mask_of(lengths.numpy(), padded.shape[1])
    return Padded(padded.view(dtype), lengths, mask)


def bits_of(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype as which values are moved: their own, or integers of their bits.

    >>> bits_of(torch.float32), bits_of(torch.uint16)
    (torch.float32, torch.int16)
    """
    return _INTEGER_OF.get(dtype, dtype)


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
    # For each sample a run of True, and one of False.
    runs = np.zeros((len(lengths), 2), np.bool_)
    runs[:, 0] = True
    run_lengths = np.empty(runs.shape, np.int64)
    run_lengths[:, 0] = lengths
    run_lengths[:, 1] = longest - lengths
    mask = runs.repeat(run_lengths.ravel())
    return torch.from_numpy(mask.reshape(len(lengths), longest))


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
