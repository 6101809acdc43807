"""Processes of one gloo group, begun anew where gloo could not connect them."""

import multiprocessing.connection
import os
import runpy
import sys

import torch.distributed
from fresh_process import CONTEXT

NOT_CONNECTED = "Gloo connectFullMesh failed"
"""What init_process_group raises when gloo could not connect the processes."""

TRIES = 3
"""Two tests of one CI run met it ("Connection closed by peer"); 900 groups begun on a
busy machine did not.  gloo's listener closes a connection whose first bytes it could
not read (gloo/transport/tcp/listener.cc), and torch does not connect again.  The code
under test has not seen the group by then."""


def connected(start):
    """Call start(attempt) until gloo connects its processes; gives what it gives.

    Every other error, and this one at the last attempt, reaches the test.
    """
    for attempt in range(TRIES - 1):
        try:
            return start(attempt)
        except Exception as error:
            if NOT_CONNECTED not in str(error):
                raise
    return start(TRIES - 1)


def launched(script, arguments, ranks, folder):
    """Run a script on ranks that are started as torchrun starts them, but forked.

    torchrun itself imports torch, and each rank does, and perhaps PyG: 6 s of CPU a
    process.  Here the server of ``fresh_process.py`` has imported them.  As torchrun
    does, this process serves the store in which the ranks meet.

    Returns:
        What the first rank printed.

    Raises:
        AssertionError: A rank failed; with the errors of all.
    """
    store = torch.distributed.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False
    )
    processes, errors = [], [folder / f"errors of {rank}" for rank in range(ranks)]
    printed = [folder / f"printed by {rank}" for rank in range(ranks)]
    for rank in range(ranks):
        variables = rank_variables(rank, ranks, store.port)
        outputs = (printed[rank], errors[rank])
        target = (script, arguments, variables, outputs)
        processes.append(CONTEXT.Process(target=_run_script, args=target))
        processes[-1].start()

    living = {process.sentinel: process for process in processes}
    while living:
        for sentinel in multiprocessing.connection.wait(list(living)):
            process = living.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                # The others may wait for it forever.
                for other in living.values():
                    other.kill()
    texts = [file.read_text() for file in errors]
    assert [process.exitcode for process in processes] == [0] * ranks, texts
    return printed[0].read_text()


def rank_variables(rank, ranks, port):
    """The variables that torchrun sets, for all ranks on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "ROLE_WORLD_SIZE": str(ranks),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def _run_script(script, arguments, variables, outputs):
    """Be one rank: run the script; what it prints and its errors go to files."""
    os.environ.update(variables)
    for number, file in zip((1, 2), outputs, strict=True):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
    sys.argv = [str(script), *map(str, arguments)]
    runpy.run_path(str(script), run_name="__main__")
