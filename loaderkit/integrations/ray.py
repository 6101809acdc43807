"""Pack on Ray: ``pack(dataset, path, executor=RayExecutor(num_cpus=1))``."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import ray


class RayExecutor(Executor):
    """Gives each call to Ray as a task.

    Args:
        options: Of the tasks, as ``ray.remote`` has them: ``memory=2 << 30``.
    """

    def __init__(self, **options: Any) -> None:
        if not ray.is_initialized():
            ray.init()
        # A lost worker comes back as an error: ``pack`` counts the tries.
        self._call = ray.remote(**{"max_retries": 0, **options})(_call)

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Start a task."""
        if not ray.is_initialized():
            # It would start another Ray, on this machine alone.
            msg = "Ray is not connected any more: ray.shutdown() was called"
            raise ConnectionError(msg)
        reference = self._call.remote(fn, *args, **kwargs)
        future: Future[Any] = reference.future()
        future.add_done_callback(
            lambda _: (
                future.cancelled() and ray.is_initialized() and ray.cancel(reference)
            )
        )
        return future


def _call(fn: Any, *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)
