"""Tests that need a process which has run nothing else.

What earlier tests left behind decides otherwise what a test of memory sees: free heap
that a limit of mappings does not count, a thread that ends and gives its stack back.
"""

import functools
import importlib.util
import inspect
import multiprocessing
import sys
import traceback
from pathlib import Path

FROM_A_SERVER = "forkserver" in multiprocessing.get_all_start_methods()
"""The server has imported torch and PyG (see ``conftest.py``) and done nothing else."""
CONTEXT = multiprocessing.get_context("forkserver" if FROM_A_SERVER else "spawn")


def in_fresh_process(test):
    """Run a test function in a process of its own.

    Args:
        test: A function of a module, whose arguments can be pickled.

    Returns:
        A function that fails as it fails there.
    """

    @functools.wraps(test)
    def run_there(*args, **kwargs):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            target=_run_here,
            args=(sender, inspect.getfile(test), test.__name__, args, kwargs),
        )
        process.start()
        sender.close()
        try:
            failure = receiver.recv()
        except EOFError:
            failure = "it ended without an answer"
        process.join()
        assert failure is None, failure

    return run_there


def _run_here(sender, file, name, args, kwargs):
    """Run the function that was wrapped, and send how it failed, or None."""
    try:
        # By its file: pytest gives modules names under which nobody can import them.
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        getattr(module, name).__wrapped__(*args, **kwargs)
    except BaseException:  # noqa: BLE001 -- pytest's own failures are no Exceptions
        sender.send(traceback.format_exc())
    else:
        sender.send(None)
