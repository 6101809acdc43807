"""``staged``: a block after which models are gone, or it says who still holds them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from loaderkit.answers import answer_wrong_names
from loaderkit.arguments import check_text
from loaderkit.call_keywords import suggest_keywords
from loaderkit.errors import OptionError
from loaderkit.memory import process
from loaderkit.memory.holders import holders_of
from loaderkit.memory.probes import present_devices, read_device
from loaderkit.memory.release import HOST, release
from loaderkit.memory.tensors import describe, graph_of, tensors_below, tensors_in
from loaderkit.notebook import HasCard, repr_in_a_line
from loaderkit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from typing_extensions import Self

    from loaderkit.memory.holder import Holder

T = TypeVar("T")

_MOST_TENSORS_NAMED = 3
"""Tensors that outlived their object and are named one by one.  Chosen: the others
mostly have the same holder."""


@answer_wrong_names()
@dataclass(frozen=True)
class Survivor(HasCard):
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


@answer_wrong_names()
@dataclass(frozen=True)
class StageReceipt(HasCard):
    """What a stage should have given back, and what it did."""

    name: str
    """Of the stage."""
    expected_bytes: Mapping[str, int]
    """Tensors of the named objects, by "host" or a device's name with its index."""
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

    __repr__ = repr_in_a_line

    def __str__(self) -> str:
        devices = [name for name, size in self.expected_bytes.items() if size]
        amounts = []
        for device in devices or [HOST]:
            returned = format_bytes(self.returned_bytes.get(device, 0))
            expected = format_bytes(self.expected_bytes.get(device, 0))
            amounts.append(f"{returned} of {expected} came back on {device}")
        seconds = format_seconds(self.seconds)
        head = f"stage {self.name!r}: {', '.join(amounts)} ({seconds})"
        return "\n".join([head, *(f"  {survivor}" for survivor in self.survivors)])


@answer_wrong_names("receipt")
class Stage:
    """A block.  See :func:`staged`."""

    def __init__(self, name: str, objects: tuple[Any, ...]) -> None:
        self.name = name
        self._receipt: StageReceipt | None = None
        self._named: list[tuple[weakref.ref[Any], str]] = []
        """The objects, with the name of their type."""
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._expected_bytes: dict[str, int] = {}
        self._counted_storages: set[int] = set()
        self._bytes_before = _bytes_in_use()
        for item in objects:
            self._watch_item(item)

    def __repr__(self) -> str:
        state = "not ended" if self._receipt is None else "ended"
        return f"Stage({self.name!r}, {state})"

    @property
    def receipt(self) -> StageReceipt:
        """What came back, and what survived.

        Raises:
            OptionError: The block has not ended.
        """
        if self._receipt is None:
            message = f"Stage {self.name!r} has no receipt yet."
            fix = "read stage.receipt after the with block"
            raise OptionError(message, why="its block has not ended", fix=fix)
        return self._receipt

    def add(self, item: T) -> T:
        """Name one more object, made inside the block.

        Args:
            item: A module, optimizer, tensor or any object with tensors.

        Returns:
            The same object.
        """
        expected_earlier = dict(self._expected_bytes)
        self._watch_item(item)
        # It was not there when the block began: what was in use then counts as if it
        # had been.
        for device, size in self._expected_bytes.items():
            added = size - expected_earlier.get(device, 0)
            self._bytes_before[device] = self._bytes_before.get(device, 0) + added
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        released = release()
        bytes_after = _bytes_in_use()
        returned_bytes = {
            device: size - bytes_after.get(device, 0)
            for device, size in self._bytes_before.items()
        }
        self._receipt = StageReceipt(
            name=self.name,
            expected_bytes=self._expected_bytes,
            returned_bytes=returned_bytes,
            survivors=tuple(self._list_survivors()),
            seconds=released.seconds,
        )

    def _list_survivors(self) -> Iterator[Survivor]:
        """List named objects that are there, then tensors that outlived theirs."""
        counted_storages: set[int] = set()
        for ref, kind in self._named:
            item = ref()
            if item is not None:
                sizes = _tensor_bytes(item, counted_storages)
                yield Survivor(kind, sum(sizes.values()), tuple(holders_of(item)))
        alive = [ref() for ref in self._tensors]
        # Those of an object that is still there were told with it.
        outliving = [
            tensor
            for tensor in alive
            if tensor is not None
            and describe(tensor).storage_key not in counted_storages
        ]
        for tensor in outliving[:_MOST_TENSORS_NAMED]:
            look, _, size = describe(tensor)
            holders = tuple(_holders_of_tensor(tensor, [alive, outliving]))
            description = f"{look.kind} {list(look.shape)} {look.dtype}"
            yield Survivor(description, size, holders)

    def _watch_item(self, item: object) -> None:
        """Note an object and the tensors that it reaches, without keeping them."""
        try:
            self._named.append((weakref.ref(item), type(item).__name__))
        except TypeError as error:
            message = (
                "a stage needs objects that can be watched, such as a module or a "
                f"tensor; a {type(item).__name__} cannot."
            )
            why = "Python has no weak references to it"
            fix = f"name what is in the {type(item).__name__}"
            raise OptionError(message, why=why, fix=fix) from error
        for tensor in tensors_below(item):
            self._tensors.append(weakref.ref(tensor))
            device, size = _storage_bytes(tensor, self._counted_storages)
            self._expected_bytes[device] = self._expected_bytes.get(device, 0) + size


@suggest_keywords
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
    check_text("name", name, "model A")
    return Stage(name, objects)


def _bytes_in_use() -> dict[str, int]:
    """Read what tensors use, without what caches keep."""
    readings = process.quick_counters()
    # Of these the first that is there is the most exact.
    host_bytes = readings.get(
        "malloc", readings.get("anonymous", readings.get("resident", 0))
    )
    sizes = {HOST: host_bytes + readings.get("shared", 0)}
    for device in present_devices():
        values = read_device(device, full=False).values
        if "allocated" in values:
            sizes[str(device)] = values["allocated"]
    return sizes


def _tensor_bytes(item: object, counted_storages: set[int]) -> dict[str, int]:
    """Add up the storages that an object reaches, by "host" or device."""
    sizes: dict[str, int] = {}
    for tensor in tensors_below(item):
        device, size = _storage_bytes(tensor, counted_storages)
        sizes[device] = sizes.get(device, 0) + size
    return sizes


def _storage_bytes(tensor: torch.Tensor, counted_storages: set[int]) -> tuple[str, int]:
    """Give a tensor's device and its storage's bytes, 0 if those were counted."""
    _, storage_key, size = describe(tensor)
    is_new = storage_key not in counted_storages
    counted_storages.add(storage_key)
    device = HOST if tensor.device.type == "cpu" else str(tensor.device)
    return device, size if is_new else 0


def _holders_of_tensor(tensor: torch.Tensor, ignore: list[Any]) -> list[Holder]:
    """Find who keeps a tensor, or who keeps an autograd graph that needs it."""
    with_graph = [
        other
        for other in tensors_in(gc.get_objects())
        if any(getattr(node, "variable", None) is tensor for node in graph_of(other))
    ]
    # A graph refers to its leaves in C++, where Python's collector does not look.
    through_graphs = [
        replace(holder, through_graph=True)
        for other in with_graph
        for holder in holders_of(other, most=1, ignore=[*ignore, with_graph])
    ]
    direct = holders_of(tensor, ignore=ignore)
    held = [holder for holder in direct if holder.held]
    return [*held, *through_graphs] or direct
