"""The processes of a loader's workers, noted so that they can be ended.

torch ends the workers of its iterator.  Where one of them could not be started there is
no iterator, and an error that is kept (by a notebook, a debugger, pytest) would keep
the workers before it until Python ends.
"""

from __future__ import annotations

from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_ENDING_S = 5.0
"""What a worker is given to end by itself.  Chosen, as torch gives it."""


class NotingContext(BaseContext):
    """A context of multiprocessing that notes the processes it makes.

    Args:
        context: What makes them, and all else.
    """

    def __init__(self, context: BaseContext) -> None:
        self._context = context
        self._processes: list[BaseProcess] = []

    def get_context(self, method: str | None = None) -> Any:
        """Give the context that queues, locks and events are made with."""
        return self._context if method is None else self._context.get_context(method)

    def get_start_method(self, allow_none: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Say how its processes start."""
        return self._context.get_start_method(allow_none)

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:  # noqa: N802
        """Make a process, as ``multiprocessing.Process`` does, and note it."""
        context: Any = self._context
        process: BaseProcess = context.Process(*args, **kwargs)
        self._processes.append(process)
        return process

    def end_processes(self) -> None:
        """End those that run, and wait until they have."""
        running = [process for process in self._processes if process.is_alive()]
        for process in running:
            process.terminate()
        for process in running:
            process.join(_ENDING_S)
            # A handler of the user's may have kept it from ending.
            if process.is_alive():
                process.kill()
                process.join()
