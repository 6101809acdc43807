"""Records what torch's readers for CUDA make of drawn settings, a column a version.

    python tests/corpora/record_allocator_settings.py 2.5.1=READER 2.6.0=READER ...

READER is ``record_allocator_settings.cpp``, built with the wheel of that version.
"""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "budget"))

from generated_settings import generated  # noqa: E402

from loaderkit.budget.environment.allocator_options import (  # noqa: E402
    ALLOCATOR_OPTIONS,
    OptionKind,
)

COUNT, SEED = 400, 31
RIGHT_VALUES = {
    OptionKind.FLAG: "True",
    OptionKind.MEGABYTES: "64",
    OptionKind.SEGMENT: "32",
    OptionKind.SPLIT: "32",
    OptionKind.RATIO: "0.8",
    OptionKind.SHARE: "0.5",
    OptionKind.DIVISIONS: "4",
    OptionKind.THREADS: "8",
    OptionKind.POSITIVE: "64",
    OptionKind.BACKEND: "native",
}
"""Values that every torch takes which has the option."""


def main(arguments):
    readers = dict(argument.split("=", 1) for argument in arguments)
    right_values = {
        option.name: RIGHT_VALUES[option.kind] for option in ALLOCATOR_OPTIONS
    }
    drawn = generated(COUNT, SEED)
    settings = [f"{name}:{value}" for name, value in right_values.items()]
    settings = list(dict.fromkeys([*settings, *drawn]))
    columns = [ask(reader, settings) for reader in readers.values()]
    answers = ["".join(row) for row in zip(*columns, strict=True)]
    table = {
        "how": "record_allocator_settings.cpp with each wheel's libraries, no GPU",
        "marks": {"+": "accepted", "-": "first use raises", "!": "import aborts"},
        "versions": list(readers),
        "right_values": right_values,
    }
    rows = [json.dumps(row) for row in zip(settings, answers, strict=True)]
    # A row a line, so that a change of one shows as one.
    head = json.dumps(table, indent=1).removesuffix("\n}")
    text = head + ',\n "answers": [\n' + ",\n".join(rows) + "\n]}\n"
    (FOLDER / "allocator_settings.json").write_text(text)


def ask(reader, settings):
    return subprocess.run(
        [reader],
        input=b"".join(setting.encode() + b"\0" for setting in settings),
        capture_output=True,
        check=True,
    ).stdout.decode()


if __name__ == "__main__":
    main(sys.argv[1:])
