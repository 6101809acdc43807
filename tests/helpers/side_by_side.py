"""Run commands at the same time; what each has printed is shown once it has ended.

Run as ``python side_by_side.py COMMAND [ARGUMENT ...] [-- COMMAND [ARGUMENT ...]]...``.
Commands that use one CPU each are done sooner than one after the other.  The exit
status is that of the first command that failed, and 0 if none did.
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


def main(words: list[str]) -> int:
    """Run all commands, also where one of them fails."""
    commands = split_commands(words)
    exit_statuses = []
    with ThreadPoolExecutor(len(commands)) as threads:
        for done in threads.map(run, commands):
            sys.stdout.write(f"$ {shlex.join(done.args)}\n")
            sys.stdout.flush()
            sys.stdout.buffer.write(done.stdout)
            sys.stdout.buffer.flush()
            exit_statuses.append(done.returncode)
    return next(filter(None, exit_statuses), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
