"""When, where and with which versions a page was made."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from datetime import datetime, timezone

from loaderkit.library_files import installed_version

_PACKAGES = ("loaderkit", "torch", "torch-geometric", "numpy", "h5py")


@dataclass(frozen=True)
class Provenance:
    """What someone must know who finds a page a year later."""

    made_at: datetime
    """With its time zone."""
    host: str
    """Name of the machine."""
    system: str
    """Such as "Linux-6.8.0-x86_64"."""
    versions: tuple[tuple[str, str], ...]
    """Name and version of Python and of each package that is installed."""

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions)
        moment = self.made_at.strftime("%Y-%m-%d %H:%M %Z")
        return f"Made {moment} on {self.host} ({self.system}), with {versions}."


def read_provenance() -> Provenance:
    """Read the clock, the machine's name and the installed versions.

    Returns:
        What :class:`loaderkit.pages.document.Page` prints at its end.
    """
    versions = [("Python", platform.python_version())]
    for package in _PACKAGES:
        version = installed_version(package)
        if version is not None:
            versions.append((package, version))
    return Provenance(
        # In UTC: a page is read elsewhere than it was made.
        made_at=datetime.now(timezone.utc),
        host=platform.node() or "a machine without a name",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=tuple(versions),
    )
