"""Containers that share a folder, and whose processes have the same numbers.

Two PID namespaces with one folder are two containers with one volume: in each the first
process is number 1, and both have the name of this machine.
"""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from loaderkit.cache.leases import Lease, shards_in_use
from loaderkit.cache.process_identity import ProcessIdentity

HOLDER = """
import os, sys, time
from pathlib import Path
from loaderkit.cache.leases import Lease
from loaderkit.cache.lock_files import hold_lock_file

folder = Path(sys.argv[1])
lease = Lease(folder, [3])
if not os.fork():
    with hold_lock_file(folder / "lock"):
        print(os.getpid(), flush=True)
        time.sleep(600)
os.wait()
"""
WAITER = """
import json, os, signal, sys
from pathlib import Path
from loaderkit.cache.leases import Lease, shards_in_use
from loaderkit.cache.lock_files import LockPatience, StuckHolderError, hold_lock_file
from loaderkit.cache.process_identity import ProcessIdentity, is_process_stopped

folder = Path(sys.argv[1])
own = ProcessIdentity.of_this_process()
lease = Lease(folder, [5])
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
os.waitpid(child, os.WUNTRACED)
seen = {
    "number": own.number,
    "stopped": [child] if is_process_stopped(child) else [],
    "in use": sorted(shards_in_use(folder, but_of=own, but_of_stopped=True)),
}
try:
    with hold_lock_file(folder / "lock", LockPatience(silent_s=1.0, stopped_s=0.5)):
        pass
except StuckHolderError as error:
    holder = error.holder
    seen["holder"] = holder.process.number
    seen["is stopped"] = holder.is_stopped
    seen["name"], seen["fix"] = str(holder), holder.how_to_free
print(json.dumps(seen))
os.kill(child, signal.SIGKILL)
"""
UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def container():
    """Give a command that runs another in a PID namespace of its own."""
    if shutil.which("unshare"):
        for command in (UNSHARE, [*UNSHARE, "--user", "--map-root-user"]):
            if not subprocess.run([*command, "true"], capture_output=True).returncode:
                return command
    return pytest.skip("this machine lets nobody make PID namespaces")


@pytest.mark.slow
def test_processes_of_two_containers_with_one_number_are_two(tmp_path):
    command = [*container(), sys.executable, "-c"]
    with subprocess.Popen(
        [*command, HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout.readline() == "2\n"
            waiter = subprocess.run(
                [*command, WAITER, str(tmp_path)], capture_output=True, text=True
            )
            assert not waiter.stderr
            # This machine is a third place.
            assert shards_in_use(tmp_path) == {3}
        finally:
            holder.kill()
    seen = json.loads(waiter.stdout)

    # The same numbers, of which one process is stopped here and one holds a lock there.
    assert (seen["number"], seen["stopped"], seen["holder"]) == (1, [2], 2)
    assert seen["in use"] == [3]
    assert not seen["is stopped"]
    assert seen["name"].endswith(", in another container")
    assert seen["fix"].startswith("kill -CONT 2 in that container")
    # Killed, it is known to be gone, whatever lives under its numbers elsewhere.
    while shards_in_use(tmp_path):
        time.sleep(0.01)


def test_its_twin_in_one_container_is_one(tmp_path):
    own = ProcessIdentity.of_this_process()
    lease = Lease(tmp_path, [5])
    other = ProcessIdentity(own.number, "0123456789abcdef")

    assert shards_in_use(tmp_path, but_of=own) == set()
    assert shards_in_use(tmp_path, but_of=other) == {5}
    assert own.is_near
    assert not other.is_near
    assert own.number == os.getpid()
    lease.close()


@pytest.mark.parametrize("name", ["", "-", "x-y", "7", "7-0123.shards", "-7-a"])
def test_names_that_nobody_has_written_are_no_process_of_here(name):
    assert not ProcessIdentity.read(name).is_near
    assert not ProcessIdentity.read(name).is_stopped
