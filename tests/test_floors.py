"""The lowest versions that are promised are those that ``tox -e lowest`` tests."""

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_versions_of_tox_lowest_are_the_declared_floors():
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    floors = re.findall(r"^([\w-]+)>=([\d.]+)$", requirements(declared), re.M)
    pinned = (ROOT / "constraints-lowest.txt").read_text()
    tested = dict(re.findall(r"^([\w-]+)==([\d.]+)$", pinned, re.M))

    assert set(tested) == {name for name, _ in floors}
    for name, floor in floors:
        assert f"{tested[name]}.".startswith(f"{floor}."), (name, floor)


def test_every_requirement_has_a_floor():
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")

    for line in requirements(declared).split():
        assert ">=" in line, line


def requirements(declared):
    return declared["options"]["install_requires"].strip()
