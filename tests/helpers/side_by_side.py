"""Run commands at the same time; what the last one prints is shown as it goes.

Run as ``python side_by_side.py COMMAND [ARGUMENT ...] [-- COMMAND [ARGUMENT ...]]...``.
Commands that use one CPU each are done sooner than one after the other.  What the
others have printed follows once all have ended.  The exit status is that of the first
command that failed, and 0 if none did.
"""

import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor


def split_commands(words: list[str]) -> list[list[str]]:
    """Part words at each ``--``."""
    commands: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


def run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run a command, and keep what it prints."""
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )


def show(command: list[str]) -> None:
    """Write a command above what it prints."""
    sys.stdout.write(f"$ {shlex.join(command)}\n")
    sys.stdout.flush()


def main(words: list[str]) -> int:
    """Run all commands, also where one of them fails."""
    *others, last = split_commands(words)
    with ThreadPoolExecutor(max(1, len(others))) as threads:
        running = [threads.submit(run, command) for command in others]
        show(last)
        status_of_last = subprocess.run(last, check=False).returncode
    ended = [future.result() for future in running]
    for done in ended:
        show(done.args)
        sys.stdout.buffer.write(done.stdout)
        sys.stdout.buffer.flush()
    exit_statuses = [*(done.returncode for done in ended), status_of_last]
    return next(filter(None, exit_statuses), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
