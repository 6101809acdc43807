"""The law of allocator settings, where torch is built for CUDA and a GPU reads them."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from generated_settings import generated
from torch_settings import clean_environ, is_accepted

from loaderkit.budget.environment.allocator_conf import read_allocator_settings

TORCH_VERSION = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
USE = """
def use_first():
    try:
        torch.empty(1 << 20, device="cuda")
        torch.empty(8).pin_memory()  # where cudaMallocAsync's options are read
    except torch.OutOfMemoryError:
        return "in effect: it leaves no memory"  # such as a fraction of 0
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "in effect: "
"""
FIRST_USES = (
    """
import json, os, sys
import torch
"""
    + USE
    + """
answers = []
for settings in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings
        os.write(write, use_first().encode()[:2000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answers.append(pipe.read())
    os.wait()
print(json.dumps(answers))
"""
)
ONE_USE = "import torch\n" + USE + "print(use_first())"


def is_read(settings):
    return read_allocator_settings(settings, "cuda", TORCH_VERSION).rejected is None


def disagreements(settings, answers):
    return [
        (setting, answer[:200])
        for setting, answer in zip(settings, answers, strict=True)
        if is_read(setting) != is_accepted(answer)
    ]


def test_what_is_said_of_a_setting_is_what_the_first_tensor_on_the_gpu_does():
    # Torch reads the backend while it is imported: with the others, it would be native.
    settings = [s for s in generated(80, seed=19) if "backend" not in s]

    def first_use(part):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_USES, json.dumps(part)],
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


def test_what_is_said_of_a_backend_is_what_a_process_started_with_it_does():
    settings = [s for s in generated(300, seed=23) if "backend" in s][:12]
    settings += ["backend:cudaMallocAsync", "backend : cudaMallocAsync", "backend"]

    def answer_of_process(setting):
        done = subprocess.run(
            [sys.executable, "-c", ONE_USE],
            env=clean_environ(PYTORCH_CUDA_ALLOC_CONF=setting),
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout or f"ends with {done.returncode}"

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answer_of_process, settings))

    assert disagreements(settings, answers) == []


ASK = """
import torch
from loaderkit import check_environment
findings = check_environment(ask_torch=True).findings
print([(finding.number, finding.level) for finding in findings])
"""


def test_what_only_the_reader_of_cuda_rejects_is_found_before_it_has_read():
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=clean_environ(PYTORCH_CUDA_ALLOC_CONF="backend:x"),
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == "[(7, 'crash')]\n"
