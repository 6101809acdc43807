"""Pack on Ray: its tasks behind the methods of ``concurrent.futures.Executor``."""

from __future__ import annotations

import importlib
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class RayExecutor(Executor):
    """Runs each call as a task of the Ray cluster that this process is connected to.

    Args:
        options: What ``ray.remote`` takes, such as ``num_cpus=1``.
    """

    def __init__(self, **options: Any) -> None:
        self._ray = importlib.import_module("ray")
        self._options = options

    def submit(
        self, call: Callable[..., Any], /, *args: Any, **keywords: Any
    ) -> Future[Any]:
        """Start a call; a worker that is lost is an error of the future."""
        remote = self._ray.remote(**{"num_cpus": 1, **self._options})(call)
        future: Future[Any] = remote.remote(*args, **keywords).future()
        return future
