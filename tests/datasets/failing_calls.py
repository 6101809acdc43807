"""Pack (and whatever cache_jobs.py names) with system calls that fail, and look at it.

A ``Runner`` compiles failing_calls.c, starts one Python process with it, and has that
process fork for each run: torch is imported once, so that a thousand runs take a
minute.  Run as a script, this file is that process.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import json
import mmap
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

from cache_jobs import (
    COUNT,
    Pack,
    as_json,
    job_from_json,
    samples,
    write_raw,
)
from process_family import Family

HEADER = struct.Struct("=8q1024s256s64s")
"""``struct control`` of failing_calls.c."""
LOG_BYTES = 4 << 20
FOREVER = 1 << 40


class Action(enum.IntEnum):
    """What happens at the call that is chosen."""

    COUNT, FAIL, KILL, SHORT = range(4)


@dataclass(frozen=True)
class Fault:
    """Which calls are hit, and how."""

    action: Action = Action.COUNT
    error: int = 0
    first: int = 0
    last: int = 0
    kinds: str = ""
    """Only these calls count, such as "flock fsync"; all where it is empty."""
    refused: str = ""
    """These never succeed, as between two disks, and do not count."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: str
    """"ok", the name of an exception, "killed 9", or "hangs"."""
    text: str
    calls: int
    hits: int
    """How many calls failed."""
    log: tuple[str, ...]
    """The calls in order: process, kind, path."""


def compiled(folder):
    """Compile the shim."""
    library = Path(folder) / "failing_calls.so"
    source = Path(__file__).with_suffix(".c")
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    return library


class Runner:
    """A process that packs with failing calls; a context manager."""

    def __init__(self, folder):
        self._control_file = Path(folder) / "control"
        self._control_file.write_bytes(bytes(HEADER.size + LOG_BYTES))
        with self._control_file.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), 0)
        environment = {
            **os.environ,
            "LD_PRELOAD": str(compiled(folder)),
            "FAILING_CALLS": str(self._control_file),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._control.close()

    def run(self, job, fault=Fault(), *, top=None):
        """Do a job once.

        Args:
            job: What, and where.
            fault: What goes wrong.
            top: Calls below this folder count; None for the one that the cache is in.

        Returns:
            How it ended.
        """
        folder = os.fspath(top or Path(job.path).parent).encode()
        kinds = f" {fault.kinds} " if fault.kinds else ""
        refused = f" {fault.refused} " if fault.refused else ""
        is_active, calls, hits, log_length = 1, 0, 0, 0
        self._control[: HEADER.size] = HEADER.pack(
            is_active,
            fault.action,
            fault.error,
            fault.first,
            fault.last,
            calls,
            hits,
            log_length,
            folder,
            kinds.encode(),
            refused.encode(),
        )
        print(as_json(job), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())

        # What the shim counted, and where its log ends.
        *_, calls, hits, log_length, _, _, _ = HEADER.unpack(
            self._control[: HEADER.size]
        )
        # The first field says whether the shim is active.
        self._control[:8] = bytes(8)
        log_end = HEADER.size + min(log_length, LOG_BYTES)
        log = self._control[HEADER.size : log_end].decode(errors="replace")
        lines = tuple(log.splitlines())
        return Outcome(answer["status"], answer["text"], calls, hits, lines)


def serve():
    """Fork for each request of the ``Runner``."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        # What is imported and looked up now is not in each run.
        Pack(folder + "/c", count=1).run()
    # Collections in each run would else copy the pages of all that torch has made.
    gc.collect()
    gc.freeze()
    requests, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # What outlives a run may go on beside the next one.  Workers of a pool of Python's
    # whose process was killed wait for tasks for ever.
    earlier_runs = []
    for line in requests:
        if len(earlier_runs) > 1:
            end_group(earlier_runs.pop(0))
        job = job_from_json(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.setsid()
            tell_how_it_went(job, writer)
        os.close(writer)
        earlier_runs.append(child)
        status, text = wait_for(child, reader)
        print(json.dumps({"status": status, "text": text}), file=answers, flush=True)
    for run in earlier_runs:
        end_group(run)


def end_group(child):
    """End what is left of a run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def tell_how_it_went(job, writer):
    """Do a job, write down how that went, and end this process."""
    status, text = "ok", ""
    # Progress bars and warnings are not what is looked at here.
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    try:
        job.run()
    except BaseException as error:  # noqa: BLE001
        status, text = type(error).__name__, str(error)
        if status not in {"CacheError", "DatasetError"}:
            text += "\n" + traceback.format_exc()
    os.write(writer, json.dumps([status, text]).encode())
    os._exit(0)


def wait_for(child, reader):
    """Wait for a run to end; end what is left of it."""
    content = bytearray()

    def goes_on():
        # Its workers hold the pipe open too, where they outlive it.
        if select.select([reader], [], [], 0.05)[0]:
            content.extend(os.read(reader, 1 << 16))
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    if not Family(child).wait_while(goes_on):
        end_group(child)
        os.waitpid(child, 0)
        os.close(reader)
        return "hangs", ""
    _, code = os.waitpid(child, 0)
    while select.select([reader], [], [], 0)[0] and (piece := os.read(reader, 1 << 16)):
        content.extend(piece)
    os.close(reader)
    if content:
        return json.loads(content)
    return f"killed {os.WTERMSIG(code)}" if os.WIFSIGNALED(code) else "ended", ""


def files_of(path):
    """Everything that lies in a cache's folder but the lock, by name."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(Path(path).rglob("*"))
        if file.is_file() and file.name != ".lock"
    }


def finished_shards(path):
    """The shards that a stopped run finished, by name: their inode."""
    inodes = {}
    building = Path(path) / ".building"
    if is_committed(path):
        return {}
    for note in sorted(building.glob("[0-9]*.json")):
        finished = json.loads(note.read_bytes())
        shard = Path(path) / finished["shard"]["file"]
        # A span of a stream is read again where other spans' variants are numbered.
        if shard.exists() and not finished["evidence"].get("renumbered"):
            inodes[shard.name] = shard.stat().st_ino
    return inodes


def is_committed(path):
    """Tell whether the manifest is that of the build which lies there still."""
    obsolete = Path(path) / ".building" / "obsolete.json"
    manifest = Path(path) / "manifest.json"
    if not (obsolete.exists() and manifest.exists()):
        return False
    generation = json.loads(obsolete.read_bytes())["generation"]
    return generation in manifest.read_text()


def copy_tree(source, path):
    """Put a folder into the state of another."""
    shutil.rmtree(path, ignore_errors=True)
    if source is not None:
        shutil.copytree(source, path)


@dataclass(frozen=True)
class Scenario:
    """A folder as it stands before a run, and what is packed into it then."""

    name: str
    pack: Pack
    before: Path | None
    """A copy of the folder; None where there is none yet."""
    wanted: dict[str, bytes]
    """The files of an undisturbed run."""
    old: list | None
    """The samples of the cache that stands there already."""
    new: list
    """The samples that are packed."""


KINDS = [(None, False), (None, True), ("gzip", False), ("gzip", True)]
"""Compression, and whether the samples are read from files."""


def make_scenarios(runner, folder, kinds=KINDS):
    """Set up the states in which a run may find a folder.

    Args:
        runner: A ``Runner``.
        folder: An empty one, for all of them.
        kinds: Compressions and sources.

    Yields:
        Each scenario: what stands there, times what is packed.
    """
    old = folder / "old"
    assert runner.run(Pack(str(old), factor=1)).status == "ok"
    raw = folder / "raw"
    write_raw(raw, COUNT, 2)
    for compression, from_files in kinds:
        raw_folder = str(raw) if from_files else ""
        sources = "files" if raw_folder else "list"
        wanted_path = folder / f"wanted-{compression}-{sources}"
        pack = Pack(str(wanted_path), compression=compression, factor=2, raw=raw_folder)
        assert runner.run(pack).status == "ok"
        before = {
            "fresh": None,
            "overwrite": old,
            "resumed": stopped_after(runner, pack, folder, None, 2),
            "resumed over old": stopped_after(runner, pack, folder, old, 2),
            "not tidied up": stopped_after(runner, pack, folder, old, 99),
        }
        for state, template in before.items():
            yield Scenario(
                f"{state}, {compression}, {sources}",
                pack,
                template,
                files_of(wanted_path),
                samples(COUNT, 1) if "over" in state or "not" in state else None,
                samples(COUNT, 2),
            )


def stopped_after(runner, pack, folder, start, shards):
    """Kill a run when it has finished some shards; 99: right behind its last step."""
    name = f"stopped-{pack.compression}-{bool(pack.raw)}-{start is not None}-{shards}"
    path = folder / name
    copy_tree(start, path)
    pack = replace(pack, path=str(path))
    log = runner.run(pack).log
    renames = [number for number, line in enumerate(log, 1) if " rename " in line]
    last = [at for at in renames if log[at - 1].endswith("manifest.json")]
    # The note of a shard is its last step.
    finished = [at for at in renames if re.search(r"/\d{5}\.json$", log[at - 1])]
    at = last[0] if shards == 99 else finished[shards - 1]
    copy_tree(start, path)
    fault = Fault(Action.KILL, first=at + 1, last=at + 1)
    assert runner.run(pack, fault).status == "killed 9"
    return path


def count_calls(runner, scenario, workers, path):
    """Count the calls of an undisturbed run."""
    copy_tree(scenario.before, path)
    return runner.run(replace(scenario.pack, path=str(path), workers=workers)).calls


def broken_laws(runner, scenario, fault, workers, path):
    """Pack with a fault, pack again without, and look at what is left each time.

    Args:
        runner: A ``Runner``.
        scenario: What stands there, and what is packed.
        fault: What goes wrong.
        workers: Processes that read.
        path: Where; replaced by the scenario's folder first.

    Returns:
        What happened, and a sentence for each law that it breaks.
    """
    copy_tree(scenario.before, path)
    pack = replace(scenario.pack, path=str(path), workers=workers)
    before = finished_shards(path)

    outcome = runner.run(pack, fault)

    broken = []
    expected = {"ok", "CacheError"}
    if fault.action is Action.KILL:
        expected |= {"killed 9", "DatasetError"}
    if outcome.status not in expected:
        broken.append(f"it ended with {outcome.status}: {outcome.text}")
    if outcome.status == "CacheError":
        parts = (str(path), "  why: ", "  fix: ")
        if not all(part in outcome.text for part in parts):
            broken.append(f"the error lacks path, why or fix: {outcome.text}")
    seen = what_is_seen(path, scenario)
    if seen not in {"old", "new"} and scenario.old is not None:
        broken.append(f"a reader sees {seen}")
    if seen not in {"nothing", "new"} and scenario.old is None:
        broken.append(f"a reader sees {seen}")
    if outcome.status == "ok" and seen != "new":
        broken.append(f"it was packed, and a reader sees {seen}")
    broken += lost_shards(before, path)

    finished = finished_shards(path)
    again = runner.run(replace(pack, workers=0))
    if again.status != "ok":
        broken.append(f"the next run ended with {again.status}: {again.text}")
    else:
        # A shard of a stream may have been finished with other numbers of variants.
        lasting = {name: at for name, at in finished.items() if name in scenario.wanted}
        broken += lost_shards(lasting, path)
        left = files_of(path)
        if left != scenario.wanted:
            names = sorted(left.keys() ^ scenario.wanted.keys())
            broken.append(f"the next run left other files: {names or 'contents'}")
        if (Path(path) / ".building").exists():
            broken.append("the next run left .building")
    return outcome, broken


def lost_shards(finished, path):
    """Say which finished shards are gone or were written again."""
    for name, inode in finished.items():
        file = Path(path) / name
        if not file.exists() or file.stat().st_ino != inode:
            yield f"finished shard {name} was not kept"


def unsynced(log, path, top, *, needs_notes=True):
    """Find what a power cut could undo though a later step builds on it.

    Args:
        log: The calls of a run in order.
        path: The cache's folder.
        top: The folder that was there before.
        needs_notes: What is noted of shards is worth keeping.  Of links it is not:
            they are made again (test_links_whose_notes_a_power_cut_has_taken).

    Returns:
        A sentence for each name that was given too early.
    """
    dirty_files = set()
    made_folders = set()
    unsynced_names = {}
    problems = []
    for line in log:
        _, kind, names = line.split(" ", 2)
        name, _, to = names.partition(" -> ")
        if kind == "write":
            dirty_files.add(name)
        elif kind == "fsync":
            dirty_files.discard(name)
            unsynced_names.pop(name, None)
        # A second mkdir finds the folder there, and changes nothing.
        elif kind == "mkdir" and name not in made_folders:
            made_folders.add(name)
            unsynced_names.setdefault(str(Path(name).parent), []).append(name)
        elif kind in {"rename", "link"}:
            is_note = re.fullmatch(r".*/\.building/\d+\.json", to) is not None
            if name in dirty_files and (needs_notes or not is_note):
                problems.append(f"{to} had its name before its bytes were on the disk")
            folder = str(Path(to).parent)
            if to == f"{path}/manifest.json":
                problems += [
                    f"the manifest had its name before {', '.join(waiting)}"
                    for parent, waiting in unsynced_names.items()
                    if parent.startswith(str(top)) and ".building" not in parent
                ]
            unsynced_names.setdefault(folder, []).append(to)
    for parent, waiting in unsynced_names.items():
        # What lies there is thrown away by the next run, whatever names it has.
        if ".building" not in parent:
            problems.append(f"{', '.join(waiting)} may have no name after the run")
    return problems


def what_is_seen(path, scenario):
    """Open a cache as a reader would: "old", "new", "nothing", or what else it is."""
    from loaderkit import open_cache, verify
    from loaderkit.errors import CacheError
    from loaderkit.testing import assert_same

    try:
        dataset = open_cache(path, checksums="always")
        rows = [dataset[row] for row in range(len(dataset))]
    except CacheError as error:
        known = "half packed" in str(error) or "There is no cache" in str(error)
        return "nothing" if known else str(error)
    report = verify(path)
    if not report.ok:
        return str(report)
    for name, whole in (("old", scenario.old), ("new", scenario.new)):
        if whole is not None:
            with contextlib.suppress(AssertionError):
                assert_same(rows, whole)
                return name
    return "a mix"


if __name__ == "__main__":
    serve()
