"""The law of allocator settings, where torch is built for CUDA and a GPU reads them."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from generated_settings import generated
from torch_settings import clean_environ, is_accepted

from loaderkit.budget.environment.allocator_conf import read_allocator_settings

FIRST_USE = """
import json, os, sys
import torch
answers = []
for settings in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.environ["PYTORCH_ALLOC_CONF"] = settings
        try:
            torch.empty(1 << 20, device="cuda")
            answer = "in effect: "
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode()[:2000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answers.append(pipe.read())
    os.wait()
print(json.dumps(answers))
"""


def is_read(settings):
    return read_allocator_settings(settings, "cuda").rejected is None


def disagreements(settings, answers):
    return [
        (setting, answer[:200])
        for setting, answer in zip(settings, answers, strict=True)
        if is_read(setting) != is_accepted(answer)
    ]


def test_what_is_said_of_a_setting_is_what_the_first_tensor_on_the_gpu_does():
    settings = generated(64, seed=19)

    def first_use(part):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_USE, json.dumps(part)],
            env=clean_environ(),
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    parts = [settings[begin::8] for begin in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(first_use, parts))
    asked = [setting for part in parts for setting in part]
    told = [answer for part in answers for answer in part]

    assert disagreements(asked, told) == []
