"""``loaderkit doctor``: machine, limits, devices, settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderkit.cli.command import Command, add_no_arguments

if TYPE_CHECKING:
    import argparse

    from loaderkit.cli.examination import Examination


def _run_doctor(options: argparse.Namespace) -> Examination:  # noqa: ARG001
    from loaderkit.cli.examination import examine

    return examine()


COMMAND = Command(
    "doctor",
    "machine, limits, devices, settings",
    add_no_arguments,
    _run_doctor,
    has_page=True,
    bad_news="a setting does not do what it says",
)
