"""Hash what objects hold, as another process would receive it."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from loaderkit.nests import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_STATE_BYTES = 1 << 28
"""256 MiB of pickled attributes: chosen.  xxh3 takes them in well under a second, so a
dataset that keeps more of its samples in memory does not make every start wait."""


class _HashSink(io.RawIOBase):
    """A file that keeps only the hash of what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.digest = xxhash.xxh3_128()
        self._bytes = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        # Larger arrays come as a PickleBuffer, which has no len.
        nbytes = memoryview(data).nbytes
        self.count(nbytes)
        return nbytes

    def count(self, nbytes: int) -> None:
        """Count bytes that go into the hash.

        Raises:
            OverflowError: They are too many.
        """
        self._bytes += nbytes
        if self._bytes > _MOST_STATE_BYTES:
            msg = "more than a hash should wait for"
            raise OverflowError(msg)


class _StatePickler(pickle.Pickler):
    """Pickles to a sink; of a plain tensor the hash of its numbers.

    torch saves a file for each storage, at 90 us of a tensor with a few numbers.
    """

    def __init__(self, sink: _HashSink) -> None:
        super().__init__(sink, pickle.HIGHEST_PROTOCOL)
        self._sink = sink

    def reducer_override(self, value: Any) -> Any:
        if not _is_plain_tensor(value):
            return NotImplemented
        content = tensor_bytes(value).numpy().data
        self._sink.count(len(content))
        signature = (str(value.dtype), tuple(value.shape), value.requires_grad)
        hashed: tuple[Callable[..., Any], tuple[Any, ...]]
        hashed = (torch.empty, (*signature, xxhash.xxh3_128_digest(content)))
        return hashed


def _is_plain_tensor(value: object) -> bool:
    """Tell whether a tensor is nothing but its numbers, dtype and shape."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and not vars(value)
    )


def hash_state(value: object) -> str | None:
    """Hash a value by what pickle writes of it.

    Returns:
        The hash; None where it cannot be pickled, or is too large.
    """
    sink = _HashSink()
    try:
        _StatePickler(sink).dump(value)
    except Exception:  # noqa: BLE001 -- pickling runs code of the user's objects
        return None
    return sink.digest.hexdigest()
