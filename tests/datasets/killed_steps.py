"""Whatever process dies at whatever step, a cache is whole or absent.

A step is a system call that changes what stands in a folder, or waits until it is on
the disk.  One process of a job is killed right before one; then a reader looks, and the
job is done again.  Nothing that was not finished may be trusted, and nothing may stay
that nobody will remove.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from cache_jobs import (
    COUNT,
    Concat,
    Extend,
    Job,
    Pack,
    PackToStore,
    Pull,
    Push,
    ReadMirrored,
    moved,
    samples,
    samples_in_order,
)
from failing_calls import (
    Action,
    Fault,
    copy_tree,
    files_of,
    finished_shards,
    lost_shards,
    what_is_seen,
)

from loaderkit.cache.build import finish_killed_commit

STEPS = "rename link unlink rmdir mkdir fsync"
_AN_HOUR_AND_MORE_S = 4000.0
_IS_THERE = "There is a cache at"


@dataclass(frozen=True)
class Setting:
    """A job, and what is there when it begins; files are in the folder "@"."""

    job: Job
    prepared: tuple[Job, ...] = ()
    """Done before."""
    old: tuple[Pack, ...] = ()
    """What the cache holds that stands there already."""
    new: tuple[Pack, ...] = ()
    """What it holds afterwards; nothing where the job only reads."""
    refused: str = ""
    """See ``Fault``."""
    may_be_repeated: bool = True
    """Done once more when it was done, it leaves the same."""


_ONE, _TWO = Pack("@/one.lk"), Pack("@/two.lk", factor=2)
_STREAM = Pack("@/c.lk", factor=2, spans=2)
_STORED = (Pack("@/store"),)
_JOINED = Concat("@/c.lk", ("@/one.lk", "@/two.lk"))

SETTINGS = {
    "stream": Setting(
        _STREAM, (replace(_ONE, path="@/c.lk"),), old=(_ONE,), new=(_STREAM,)
    ),
    "stream by workers": Setting(replace(_STREAM, workers=2), new=(_STREAM,)),
    "pack once": Setting(replace(_ONE, overwrite=False), new=(_ONE,)),
    "pool": Setting(replace(_TWO, pool=2), new=(_TWO,)),
    "stream by a pool": Setting(replace(_STREAM, pool=2), new=(_STREAM,)),
    "extend": Setting(Extend("@/one.lk"), (_ONE,), old=(_ONE,), new=(_ONE, _TWO)),
    "extend by workers": Setting(
        Extend("@/one.lk", workers=2, spans=2),
        (_ONE,),
        old=(_ONE,),
        new=(_ONE, _STREAM),
    ),
    "concat with links": Setting(_JOINED, (_ONE, _TWO), new=(_ONE, _TWO)),
    "concat once": Setting(
        replace(_JOINED, overwrite=False), (_ONE, _TWO), new=(_ONE, _TWO)
    ),
    "concat with copies": Setting(
        _JOINED, (_ONE, _TWO), new=(_ONE, _TWO), refused="link"
    ),
    "concat over a part": Setting(
        Concat("@/one.lk", ("@/two.lk", "@/one.lk")),
        (_ONE, _TWO),
        old=(_ONE,),
        new=(_TWO, _ONE),
        may_be_repeated=False,
    ),
    "concat of other structures": Setting(
        Concat("@/c.lk", ("@/two.lk", "@/one.lk")),
        (_ONE, replace(_STREAM, path="@/two.lk")),
        new=(_STREAM, _ONE),
    ),
    "push": Setting(Push("@/store", "@/one.lk"), (_ONE,), new=(_ONE,)),
    "push over old": Setting(
        Push("@/store", "@/two.lk", overwrite=True),
        (*_STORED, _TWO),
        old=(_ONE,),
        new=(_TWO,),
    ),
    "pack to a store": Setting(PackToStore("@/store", "@/mirror"), new=(_ONE,)),
    "pack to a store over old": Setting(
        PackToStore("@/store", "@/mirror", factor=2, overwrite=True),
        _STORED,
        old=(_ONE,),
        new=(_TWO,),
    ),
    "pull": Setting(Pull("@/c.lk", "@/store"), _STORED, new=(_ONE,)),
    "mirror": Setting(ReadMirrored("@/mirror", "file://@/store"), _STORED),
    "small mirror": Setting(
        ReadMirrored("@/mirror", "file://@/store", mirror_bytes=120_000), _STORED
    ),
}


@dataclass(frozen=True)
class StepScenario:
    """A setting in a folder."""

    setting: Setting
    before: Path
    """A folder with all that the job finds."""
    steps: int
    """How many an undisturbed run has."""
    wanted: dict[str, bytes]
    """The files of an undisturbed run."""
    old: list | None
    """What a reader finds before; None where there is no cache."""
    new: list | None
    """What a reader finds afterwards."""


def set_up(runner, folder, setting):
    """Do what comes before a job, and the job without a fault.

    Args:
        runner: A ``Runner``.
        folder: An empty one.
        setting: The job.

    Returns:
        The scenario.
    """
    before, after = folder / "before", folder / "after"
    before.mkdir()
    for earlier in setting.prepared:
        outcome = runner.run(moved(earlier, "@", before))
        assert outcome.status == "ok", outcome.text
    copy_tree(before, after)
    job = moved(setting.job, "@", after)
    outcome = runner.run(job, kill_at(0, setting), top=after)
    assert outcome.status == "ok", outcome.text
    return StepScenario(
        setting,
        before,
        steps=outcome.calls,
        wanted=lasting_files(setting, after),
        old=samples_of(setting.old),
        new=samples_of(setting.new),
    )


def samples_of(packs):
    """The samples of some runs, one behind the other; None of none."""
    rows = []
    for pack in packs:
        rows += samples_in_order(pack) if pack.spans else samples(COUNT, pack.factor)
    return rows or None


def kill_at(step, setting):
    """Kill whoever is about to do a step.

    Args:
        step: Which of the steps of all processes, from 1; 0 for none.
        setting: Says what calls are refused.
    """
    action = Action.KILL if step else Action.COUNT
    return Fault(action, 0, step, step, STEPS, setting.refused)


def broken_step_laws(runner, scenario, kills, folder):
    """Do a job again and again, each time with a kill but the last, and look each time.

    Args:
        runner: A ``Runner``.
        scenario: Where, and what.
        kills: At which step of each run a process is killed.
        folder: Replaced by the scenario's folder first.

    Returns:
        How the first run ended, and a sentence for each law that is broken.
    """
    copy_tree(scenario.before, folder)
    job = moved(scenario.setting.job, "@", folder)
    outcomes, broken, finished = [], [], {}
    for kill in (*kills, 0):
        outcome = _run(runner, scenario, job, kill, folder)
        outcomes.append(outcome)
        broken += _wrong_ending(outcome, kill)
        allowed = {"new", "nothing" if scenario.old is None else "old"}
        if outcome.status == "ok" or not kill:
            allowed = {"new"}
        broken += _what_readers_see(scenario, job, allowed)
        broken += _lost_shards(finished, scenario)
        if _is_done(scenario, job, folder):
            break
        finished = _finished_shards(job)
    broken += _changed_inputs(scenario, job, folder)
    left = lasting_files(scenario.setting, folder)
    if left != scenario.wanted:
        names = sorted(left.keys() ^ scenario.wanted.keys())
        broken.append(f"other files are left: {names or 'contents'}")
    return outcomes[0], broken


def _run(runner, scenario, job, kill, folder):
    """Do a job once, and before what an error of it says is to be done."""
    fault = kill_at(kill, scenario.setting)
    outcome = runner.run(job, fault, top=folder)
    claim = Path(job.path) / ".writing"
    if f"delete {claim}" in outcome.text:
        claim.unlink()
        outcome = runner.run(job, fault, top=folder)
    for file in _partial_files(job):
        # Another process may be writing it, as far as anybody knows, for an hour.
        before_s = file.stat().st_mtime - _AN_HOUR_AND_MORE_S
        os.utime(file, (before_s, before_s))
    if not kill and _IS_THERE in outcome.text and any(_partial_files(job)):
        # Those go when the cache is replaced.
        outcome = runner.run(replace(job, overwrite=True), fault, top=folder)
    return outcome


def _partial_files(job):
    """The files that writers to a store were at when they were killed."""
    return list(Path(job.path).rglob(".*.partial"))


def _wrong_ending(outcome, kill):
    """Say in which way a run must not end."""
    allowed = {"ok", "killed 9", "DatasetError"} if kill else {"ok"}
    # Who was killed behind the last step finds the cache there.
    if outcome.status not in allowed and _IS_THERE not in outcome.text:
        yield f"it ended with {outcome.status}: {outcome.text}"


def _is_done(scenario, job, folder):
    """Whether the job had come to its end, and is not to be done again."""
    if not scenario.setting.may_be_repeated:
        # Whatever is done there next begins with this.
        finish_killed_commit(Path(job.path))
        return what_is_seen(Path(job.path), scenario) == "new"
    return lasting_files(scenario.setting, folder) == scenario.wanted


def _what_readers_see(scenario, job, allowed):
    """Say what is wrong with what a reader finds."""
    if isinstance(job, ReadMirrored):
        yield from _damaged_mirror(job)
        return
    seen = what_is_seen(Path(job.path), scenario)
    if seen not in allowed:
        yield f"a reader sees {seen}"


def _damaged_mirror(job):
    """Say which files of a mirror have the name of a shard and are none."""
    nbytes = 0
    for file in Path(job.path).glob("*/*.h5"):
        content = file.read_bytes()
        nbytes += len(content)
        packed = Path(job.url.removeprefix("file://")) / file.name
        if content != packed.read_bytes():
            yield f"{file.name} in the mirror has other bytes"
    if job.mirror_bytes is not None and nbytes > job.mirror_bytes:
        yield f"the mirror has {nbytes} bytes"


def _changed_inputs(scenario, job, folder):
    """Say which files of caches that the job only reads are not what they were."""
    for name, content in files_of(scenario.before).items():
        cache = name.partition("/")[0]
        if folder / cache != Path(job.path) and (folder / name).read_bytes() != content:
            yield f"{name} was written to"


def _finished_shards(job):
    """The shards that are finished, of a cache and of what it is extended with."""
    folders = [Path(job.path), Path(job.path) / ".extending"]
    return {
        folder: finished_shards(folder)
        for folder in folders
        if (folder / ".building").is_dir()
    }


def _lost_shards(finished, scenario):
    wanted = {Path(name).name for name in scenario.wanted}
    for folder, shards in finished.items():
        if folder.exists():
            lasting = {name: at for name, at in shards.items() if name in wanted}
            yield from lost_shards(lasting, folder)


def lasting_files(setting, folder):
    """The files that a job leaves, but locks that processes take in turn."""
    is_mirror = isinstance(setting.job, ReadMirrored)
    files = {}
    for name, content in files_of(folder).items():
        is_lock = name.endswith((".lock", ".holder")) and "/leases/" not in name
        # Which shards a small mirror has depends on who came when.
        may_go = is_mirror and name.endswith((".h5", ".used"))
        # What is opened behind packing is mirrored.
        may_go |= name.startswith("mirror/") and isinstance(setting.job, PackToStore)
        may_go &= not name.startswith("mirror/packing/")
        if not (is_lock or may_go):
            files[name] = content
    return files
