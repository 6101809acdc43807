"""``staged``: a block after which models are gone, or it says who still holds them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loaderkit.memory import process
from loaderkit.memory.holders import Holder, holders_of
from loaderkit.memory.probes import present_devices, read_device
from loaderkit.memory.release import HOST, release
from loaderkit.memory.tensors import describe, graph_of, tensors_below, tensors_in
from loaderkit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from typing_extensions import Self

_NAMED_TENSORS = 3
"""Tensors that outlived their object and are named one by one."""


@dataclass(frozen=True)
class Survivor:
    """An object that is still there after its stage."""

    what: str
    """Its type."""
    bytes: int
    """What its tensors take."""
    holders: tuple[Holder, ...]
    """Everybody who keeps it."""

    def __str__(self) -> str:
        lines = [f"{self.what} ({format_bytes(self.bytes)}) is still held by"]
        lines += [f"    {holder}" for holder in self.holders]
        return "\n".join(lines)


@dataclass(frozen=True)
class StageReceipt:
    """What a stage should have given back, and what it did."""

    name: str
    """Of the stage."""
    expected_bytes: Mapping[str, int]
    """Tensors of the named objects, by "host" or device."""
    returned_bytes: Mapping[str, int]
    """What is in use less than with them."""
    survivors: tuple[Survivor, ...]
    """Objects that are still there."""
    seconds: float
    """What collecting and emptying caches took."""

    @property
    def ok(self) -> bool:
        """Whether all named objects are gone."""
        return not self.survivors

    def __str__(self) -> str:
        places = [p for p, n in self.expected_bytes.items() if n] or [HOST]
        parts = [
            f"{format_bytes(self.returned_bytes.get(place, 0))} of "
            f"{format_bytes(self.expected_bytes.get(place, 0))} came back on {place}"
            for place in places
        ]
        head = (
            f"stage {self.name!r}: {', '.join(parts)} ({format_seconds(self.seconds)})"
        )
        return "\n".join([head, *(f"  {each}" for each in self.survivors)])


class Stage:
    """A block; ``receipt`` is there when it has ended.  See :func:`staged`."""

    def __init__(self, name: str, objects: tuple[Any, ...]) -> None:
        self.name = name
        self.receipt: StageReceipt | None = None
        self._named: list[tuple[weakref.ref[Any], str]] = []
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._expected: dict[str, int] = {}
        self._seen: set[int] = set()
        self._before = _in_use()
        for each in objects:
            self._take(each)

    def add(self, each: Any) -> Any:
        """Name one more object, made inside the block.

        Args:
            each: A module, optimizer, tensor or any object with tensors.

        Returns:
            The same object.
        """
        earlier = dict(self._expected)
        self._take(each)
        for place, size in self._expected.items():
            more = size - earlier.get(place, 0)
            self._before[place] = self._before.get(place, 0) + more
        return each

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        released = release()
        after = _in_use()
        returned = {p: n - after.get(p, 0) for p, n in self._before.items()}
        self.receipt = StageReceipt(
            self.name, self._expected, returned, tuple(self._survivors()),
            released.seconds,
        )  # fmt: skip

    def _survivors(self) -> Iterator[Survivor]:
        """List named objects that are there, then tensors that outlived theirs."""
        seen: set[int] = set()
        for ref, kind in self._named:
            each = ref()
            if each is not None:
                size = sum(_tensor_bytes(each, seen).values())
                yield Survivor(kind, size, tuple(holders_of(each)))
        left = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        left = [tensor for tensor in left if describe(tensor)[1] not in seen]
        for tensor in left[:_NAMED_TENSORS]:
            (kind, _, dtype, shape), _, size = describe(tensor)
            holders = tuple(_holders_of_tensor(tensor, [left]))
            yield Survivor(f"{kind} {list(shape)} {dtype}", size, holders)

    def _take(self, each: Any) -> None:
        try:
            self._named.append((weakref.ref(each), type(each).__name__))
        except TypeError as error:
            msg = "a stage needs objects that can be watched, such as a module or a "
            msg += f"tensor; a {type(each).__name__} cannot, so name what is in it"
            raise ValueError(msg) from error
        for tensor in tensors_below(each):
            self._tensors.append(weakref.ref(tensor))
            place, size = _weigh(tensor, self._seen)
            self._expected[place] = self._expected.get(place, 0) + size


def staged(name: str, *objects: Any) -> Stage:
    """Make a block after which the named objects are gone, and prove it.

    At the end garbage is collected and caches are emptied; ``receipt`` says how many
    bytes came back of those expected.  For an object that is still there it names each
    holder: the variable with its line, a traceback, a closure, an attribute, a cycle.

    Args:
        name: For the receipt.
        objects: Modules, optimizers, tensors, or anything with tensors that can be
            weakly referenced.  The stage keeps none of them.

    Returns:
        The block.

    Raises:
        ValueError: An object cannot be watched, such as a list.
    """
    return Stage(name, objects)


def _in_use() -> dict[str, int]:
    """Read what tensors use, without what caches keep."""
    quick = process.quick_counters()
    host = quick.get("malloc", quick.get("anonymous", quick.get("resident", 0)))
    found = {HOST: host + quick.get("shared", 0)}
    for device in present_devices():
        values, _ = read_device(device, full=False)
        if "allocated" in values:
            found[str(device)] = values["allocated"]
    return found


def _tensor_bytes(each: object, seen: set[int]) -> dict[str, int]:
    """Add up the storages that an object reaches, by "host" or kind of device."""
    found: dict[str, int] = {}
    for tensor in tensors_below(each):
        place, size = _weigh(tensor, seen)
        found[place] = found.get(place, 0) + size
    return found


def _weigh(tensor: torch.Tensor, seen: set[int]) -> tuple[str, int]:
    _, storage, size = describe(tensor)
    new = storage not in seen
    seen.add(storage)
    place = HOST if tensor.device.type == "cpu" else tensor.device.type
    return place, size if new else 0


def _holders_of_tensor(tensor: torch.Tensor, ignore: list[Any]) -> list[Holder]:
    """Find who keeps a tensor, or who keeps an autograd graph that needs it."""
    graphs = [
        other
        for other in tensors_in(gc.get_objects())
        if any(getattr(node, "variable", None) is tensor for node in graph_of(other))
    ]
    through = [
        replace(holder, kind=f"the autograd graph of {holder.kind}")
        for other in graphs
        for holder in holders_of(other, most=1, ignore=[*ignore, graphs])
    ]
    found = holders_of(tensor, ignore=ignore)
    named = [each for each in found if each.held]
    return [*named, *through] or found
