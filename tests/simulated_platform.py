"""The main paths, where Python lacks what it lacks on Windows or on macOS.

Run as ``python simulated_platform.py windows FOLDER``: names are deleted, and the rest
is called as a user calls it.  Workers are spawned; they import this file, and so lack
the same, and need not import pytest.  FOLDER/outcomes.json says of each step "fine", or
what was raised.
"""

import ctypes
import importlib
import json
import mmap
import multiprocessing
import multiprocessing.context
import os
import shutil
import signal
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import h5py  # noqa: F401 -- libraries have their own ways there: they come before
import numpy as np
import psutil
import torch
import tqdm.auto  # noqa: F401

LACKS = {
    "windows": {
        os: (
            "statvfs fstatvfs sched_getaffinity getuid geteuid getgid fork "
            "forkpty memfd_create MFD_CLOEXEC waitid P_ALL WEXITED WNOWAIT "
            "WIFSIGNALED WTERMSIG getloadavg sysconf posix_fallocate "
            "posix_fadvise pread preadv pwrite register_at_fork killpg getpgid "
            "setpgid setsid mkfifo sendfile O_DIRECTORY O_NOFOLLOW O_NONBLOCK "
            "O_CLOEXEC uname nice"
        ),
        signal: (
            "SIGKILL SIGBUS SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGQUIT SIGCHLD "
            "setitimer alarm sigwait"
        ),
        mmap: (
            "MAP_SHARED MAP_PRIVATE MAP_ANONYMOUS MAP_ANON MAP_POPULATE "
            "PROT_READ PROT_WRITE PROT_EXEC MADV_RANDOM MADV_WILLNEED "
            "MADV_DONTNEED"
        ),
    },
    "macos": {
        os: (
            "sched_getaffinity memfd_create MFD_CLOEXEC waitid P_ALL WEXITED "
            "WNOWAIT posix_fallocate posix_fadvise preadv"
        ),
        signal: "sigwaitinfo sigtimedwait",
    },
}
NO_MODULES = {"windows": ("resource", "fcntl", "pwd", "grp", "termios"), "macos": ()}
NO_FILES = ("/proc", "/sys", "/dev/shm")


def take_away(platform):
    """Delete what the platform lacks."""
    for module, names in LACKS[platform].items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in NO_MODULES[platform]:
        sys.modules[name] = None
    contexts = multiprocessing.context._concrete_contexts
    contexts.pop("fork", None)
    if platform == "windows":
        contexts.pop("forkserver", None)
    multiprocessing.set_start_method("spawn", force=True)
    multiprocessing.get_all_start_methods = lambda: [*contexts]
    multiprocessing.context.DefaultContext.get_all_start_methods = lambda _: [*contexts]
    if platform == "windows":
        # torch asks this where it would handle SIGCHLD.
        torch.utils.data._utils.signal_handling.IS_WINDOWS = True
        # Python asks these as shutil is imported, to delete folders by descriptors.
        os.supports_dir_fd.clear()
        os.supports_fd.clear()
        importlib.reload(shutil)
    hide_files()
    hide_c_functions(platform)


def hide_files():
    """Let nobody but psutil, which stands for another system's psutil, see /proc."""

    def without(function):
        def call(path, *arguments, **options):
            text = path if isinstance(path, str) else str(path)
            # psutil has ways of its own there; here it needs /proc.
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if text.startswith(NO_FILES) and not caller.startswith("psutil"):
                raise FileNotFoundError(2, "there is no such file here", text)
            if function is open_file and PLATFORM == "windows" and is_folder(path):
                raise PermissionError(13, "a folder cannot be opened", text)
            return function(path, *arguments, **options)

        return call

    open_file, is_folder = os.open, os.path.isdir
    import builtins
    import io

    builtins.open = io.open = without(open)
    for name in ("open", "listdir", "scandir", "readlink", "stat", "lstat"):
        setattr(os, name, without(getattr(os, name)))


def hide_c_functions(platform):
    """Give a C library as Python finds it there."""
    real = ctypes.CDLL

    class CDLL(real):
        def __init__(self, name, *arguments, **options):
            if name is None and platform == "windows":
                msg = "argument of type 'NoneType' is not iterable"
                raise TypeError(msg)
            super().__init__(name, *arguments, **options)

        def __getattr__(self, name):
            if name in {"mallinfo2", "mallinfo", "malloc_trim"}:
                raise AttributeError(name)
            return super().__getattr__(name)

    ctypes.CDLL = CDLL


PLATFORM = os.environ.get("SIMULATED_PLATFORM") or sys.argv[1]
os.environ["SIMULATED_PLATFORM"] = PLATFORM  # for spawned workers
take_away(PLATFORM)

import loaderkit  # noqa: E402
from loaderkit.cli.main import main  # noqa: E402
from loaderkit.datasets.pack import PackOptions  # noqa: E402
from loaderkit.memory.cache_cleaner import EpochCacheCleaner  # noqa: E402


def make_row(number):
    return {"t": torch.full((number % 3 + 1, 2), float(number)), "y": number}


class Rows(loaderkit.SafeDataset):
    """Packed on first use, by spawned workers."""

    def keys(self):
        return range(40)

    def load(self, key):
        return make_row(key)


class Dying(loaderkit.SafeDataset):
    """Its worker ends at the last sample."""

    def keys(self):
        return range(3)

    def load(self, key):
        if key == 2:
            os._exit(3)
        return key


def worker_died():
    loader = loaderkit.build_loader(Dying(), batch_size=1, num_workers=1, probe=False)
    told = "nothing"
    try:
        list(loader)
    except loaderkit.errors.LoaderError as error:
        told = str(error)
    assert "exit code 3" in told


def leaking():
    tensors = []
    detector = loaderkit.LeakDetector("cpu", on_leak=id)
    report = detector.run(lambda: tensors.append(torch.zeros(200_000)), epochs=10)
    assert report.leaking, str(report)
    assert report.growths, str(report)


def staged():
    with loaderkit.staged("model", torch.nn.Linear(2, 2)):
        pass


def packed(folder):
    dataset = Rows(cache=folder / "rows.lk", packing=PackOptions(workers=1))
    assert [row["y"] for row in dataset] == [*range(40)]


def loaded(folder):
    dataset = loaderkit.open_cache(folder / "rows.lk")
    loader = loaderkit.build_loader(dataset, batch_size=8, num_workers=1)
    batches = [batch["y"].tolist() for batch in loader]
    assert batches == [[*range(start, start + 8)] for start in range(0, 40, 8)], batches


def loaded_large_arrays():
    """Send a worker 3 MB of arrays, and take batches of 3 MB from it."""
    images = [np.full((500, 375), number, np.float64) for number in range(2)]
    dataset = [{"image": images[number % 2], "y": number} for number in range(6)]
    loader = loaderkit.build_loader(dataset, batch_size=2, num_workers=1, probe=False)
    for batch in loader:
        expected = torch.stack([torch.from_numpy(images[y % 2]) for y in batch["y"]])
        assert torch.equal(batch["image"], expected)


def loaded_here(folder):
    dataset = loaderkit.open_cache(folder / "rows.lk")
    loader = loaderkit.build_loader(dataset, batch_size=8, shuffle=True)
    assert len(list(loader)) == 5
    assert dataset.batch([3, 1])["y"].tolist() == [3, 1]


def packed_by(make_executor, path):
    rows = [make_row(number) for number in range(40)]
    with make_executor() as executor:
        dataset = loaderkit.pack(rows, path, executor=executor)
    assert [row["y"] for row in dataset] == [*range(40)]


def packed_by_two_at_once(path):
    """A lock file lets one of them pack; the other waits, and opens what is there."""
    packing = PackOptions(workers=0)
    with ThreadPoolExecutor(2) as threads:
        opened = [threads.submit(Rows, cache=path, packing=packing) for _ in range(2)]
    assert [len(dataset.result()) for dataset in opened] == [40, 40]
    assert [dataset.result()[3]["y"] for dataset in opened] == [3, 3]


def from_a_bucket(folder):
    bucket = f"memory://bucket{folder.as_posix().replace(':', '')}"
    loaderkit.pack([make_row(number) for number in range(40)], bucket)
    mirrored = loaderkit.open_cache(bucket, mirror=folder / "mirror")
    loader = loaderkit.build_loader(mirrored, batch_size=8)
    assert [batch["y"][0].item() for batch in loader] == [0, 8, 16, 24, 32]


MODEL_FILE = """
import numpy as np
import torch

model = torch.nn.Linear(2, 1)
data = [torch.ones(2)] * 9
"""
SCRIPT = """
import time

for _ in range(10):
    time.sleep(0.05)
"""


def planned_by_command(folder):
    file = folder / "my_model.py"
    file.write_text(MODEL_FILE)
    called("plan", f"{file}:model", f"{file}:data", "--batch-size", "4")


def watched(folder):
    (folder / "train.py").write_text(SCRIPT)
    called("watch", str(folder / "train.py"))


def planned():
    model = torch.nn.Linear(2, 1)
    plan = loaderkit.plan_batch(
        model, [torch.ones(2)] * 9, "cpu", batch_size=4, epochs=1
    )
    assert plan.ok


def called(*words):
    assert main([*words]) == 0


def steps(folder):
    cache = str(folder / "rows.lk")
    return {
        "pack with a spawned worker": lambda: packed(folder),
        "pack by threads": lambda: packed_by(
            lambda: ThreadPoolExecutor(2), folder / "threads.lk"
        ),
        "pack by processes": lambda: packed_by(
            lambda: ProcessPoolExecutor(1), folder / "processes.lk"
        ),
        "a lock file": lambda: packed_by_two_at_once(folder / "twice.lk"),
        "a bucket": lambda: from_a_bucket(folder),
        "load in this process": lambda: loaded_here(folder),
        "load with a spawned worker": lambda: loaded(folder),
        "large arrays from a spawned worker": loaded_large_arrays,
        "a worker's death": worker_died,
        "verify": lambda: called("verify", cache),
        "inspect": lambda: called("inspect", cache),
        "read_memory": loaderkit.read_memory,
        "release": loaderkit.release,
        "detector": leaking,
        "staged": staged,
        "meter": lambda: loaderkit.MemoryMeter("cpu").__enter__().__exit__(*[None] * 3),
        "hygiene": lambda: EpochCacheCleaner("cpu"),
        "estimate": lambda: loaderkit.estimate_step(
            torch.nn.Linear(2, 2), torch.ones(3, 2)
        ),
        "plan": planned,
        "plan by command": lambda: planned_by_command(folder),
        "watch": lambda: watched(folder),
        "explain": lambda: loaderkit.diagnose_oom("Killed"),
        "doctor": lambda: called("doctor"),
        "planted": lambda: os.memfd_create("a call that neither platform has"),
    }


def outcome(step):
    try:
        step()
    except Exception:  # noqa: BLE001 -- it is what is looked for
        return traceback.format_exc()[-1500:]
    return "fine"


if __name__ == "__main__":
    assert psutil.Process().pid == os.getpid()
    folder = Path(sys.argv[2])
    outcomes = {name: outcome(step) for name, step in steps(folder).items()}
    (folder / "outcomes.json").write_text(json.dumps(outcomes))
