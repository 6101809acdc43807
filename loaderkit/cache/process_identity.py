"""Which process another one is: its number, and among which processes it is unique.

Processes of two machines, or of two containers, may share a folder and have the same
number.  A container may even have the machine's name.  So a number counts only together
with the machine's boot and the PID namespace (pid_namespaces(7)) it is of.

No times are compared: whether a process lives is told by the locks that it holds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import xxhash

_STOPPED_STATES = {"T", "t"}
"""Of proc(5): stopped by a signal, or by a debugger."""
_ENDED_STATES = {"Z", "X"}
"""Of proc(5): only its parent has not asked yet how it ended."""


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of all that share a folder.

    >>> ProcessIdentity.read("12-9f86d081884c7d65-of-a-file")
    ProcessIdentity(number=12, space='9f86d081884c7d65')
    """

    number: int
    space: str
    """Where the number is unique; a hash.  Empty where that was not written down."""

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """Give the identity of the process that asks, which may have been forked."""
        return cls(os.getpid(), _space_of_this_process())

    @classmethod
    def read(cls, text: str) -> ProcessIdentity:
        """Read what ``str`` has written, from the beginning of a name.

        Of a name that nobody here has written it is no process.
        """
        number, space, *_ = [*text.split("-"), ""]
        # No process has the number 0: the kernel's own does not write names of files.
        pid = int(number) if number.isdecimal() else 0
        return cls(pid, space)

    def __str__(self) -> str:
        return f"{self.number}-{self.space}"

    @property
    def is_near(self) -> bool:
        """Whether its number means the same process here."""
        return self.space == _space_of_this_process()

    @property
    def is_stopped(self) -> bool:
        """Whether it is known to be stopped; False where that cannot be known."""
        return self.is_near and is_process_stopped(self.number)

    @property
    def has_started_this_one(self) -> bool:
        """Whether it is the parent of this process, or of the fork server that is.

        The server is looked at by proc(5); without it, it is not recognised.
        """
        parent = os.getppid()
        return self.is_near and self.number in {parent, _parent_of_process(parent)}

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended; False where that cannot be known.

        A later process may have got its number, which then looks alive.
        """
        return self.is_near and is_process_gone(self.number)


def is_process_stopped(number: int) -> bool:
    """Tell whether a process is stopped; False where none can tell.

    Args:
        number: As this process would name it.
    """
    return _state_of_process(number) in _STOPPED_STATES


def is_process_gone(number: int) -> bool:
    """Tell whether no process has a number; False where none can tell.

    Args:
        number: As this process would name it.
    """
    if os.name != "posix":
        return False  # Windows would end the process that is asked
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False  # another user's, or no number of a process
    return _state_of_process(number) in _ENDED_STATES


def _state_of_process(number: int) -> str:
    """Give the letter that proc(5) has for a process's state; "" for unknown."""
    return next(iter(_stat_of_process(number)), "")


def _parent_of_process(number: int) -> int | None:
    """Give the process that started another one; None for unknown."""
    stat = _stat_of_process(number)
    return int(stat[1]) if len(stat) > 1 else None


def _stat_of_process(number: int) -> list[str]:
    """Give what proc(5) has of a process, from its state on; empty for unknown."""
    try:
        # A container may see the /proc of its machine, where numbers are others.
        if Path("/proc/self").readlink().name != str(os.getpid()):
            return []
        stat = Path(f"/proc/{number}/stat").read_text("utf-8", "replace")
    except OSError:
        return []
    # The program's name is in brackets, and may hold any letter.
    return stat.rpartition(")")[2].split()


def _space_of_this_process() -> str:
    namespace = 0
    # Without it (no Linux, or a sandbox that hides it) the machine's name must do.
    with contextlib.suppress(OSError):
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    parts = (_boot_id(), socket.gethostname(), str(namespace))
    return xxhash.xxh3_64_hexdigest("\n".join(parts).encode())


@functools.cache
def _boot_id() -> str:
    """Name this start of the machine; "" where it has no name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
    except OSError:
        return ""
