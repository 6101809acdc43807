"""A torch process as the judge of allocator settings: what it accepts and raises."""

import atexit
import functools
import json
import os
import subprocess
import sys

FOREIGN = ("PYTORCH_", "OMP_", "MKL_", "MALLOC_", "GOMP_", "CUDA_LAUNCH")
ASKING = """
import json, os, sys
import torch
for line in sys.stdin:
    answers = []
    for environ in json.loads(line):
        # A child for each: torch reads its settings once, and keeps some of them.
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.environ.update(environ)
            try:
                answer = torch._C._accelerator_getAllocatorSettings()
                answer = "in effect: " + answer
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(write, answer.encode()[:2000])
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            answers.append(pipe.read())
        os.waitpid(child, 0)
    print(json.dumps(answers), flush=True)
"""


def clean_environ(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    return kept | more


@functools.cache
def _torch_process():
    process = subprocess.Popen(
        [sys.executable, "-c", ASKING],
        env=clean_environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end_process, process)
    return process


def _end_process(process):
    process.stdin.close()
    process.stdout.close()
    process.wait()


def ask_torch(environs):
    """Give what torch says to each set of variables: "in effect: ..." or an error."""
    process = _torch_process()
    process.stdin.write(json.dumps(environs) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def is_accepted(answer):
    return answer.startswith("in effect: ")
