"""The law of allocator settings, where torch is built for CUDA and a GPU reads them."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from generated_settings import generated
from torch_settings import ask_torch, clean_environ, is_accepted

from loaderkit.budget.environment.allocator_conf import (
    COMMON_OPTIONS,
    CUDA_OPTIONS,
    read_allocator_settings,
)
from loaderkit.budget.environment.allocator_settings import UNIFIED

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


def keep(name, answers):
    if "OUT" in os.environ:
        with open(f"{os.environ['OUT']}/{name}.json", "w") as file:  # noqa: PTH123
            json.dump(answers, file, indent=0)


def test_what_is_said_of_a_setting_is_what_a_build_for_cuda_does():
    settings = generated(400, seed=17)
    answers = ask_torch([{UNIFIED: setting} for setting in settings])
    keep("settings", list(zip(settings, answers, strict=True)))

    assert disagreements(settings, answers) == []


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
    keep("settings_first_use", list(zip(asked, told, strict=True)))

    assert disagreements(asked, told) == []


def test_known_options_are_those_whose_values_a_build_for_cuda_looks_at():
    names = [*COMMON_OPTIONS, *CUDA_OPTIONS]

    answers = ask_torch([{UNIFIED: f"{name}:@"} for name in names])
    keep("options", list(zip(names, answers, strict=True)))

    accepted = [n for n, a in zip(names, answers, strict=True) if is_accepted(a)]
    assert accepted == []
    [unknown] = ask_torch([{UNIFIED: "no_such_option:1"}])
    assert not is_accepted(unknown)
