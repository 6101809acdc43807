"""Names a cache that is not a folder on this machine, and how it is mirrored here."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from loaderkit.answers import answer_wrong_names
from loaderkit.arguments import refuse_value
from loaderkit.cache.files import refuse_cut_url, unreadable
from loaderkit.cache.folder_storage import FolderStorage
from loaderkit.cache.object_store import ObjectStore
from loaderkit.cache.storage import Patience, is_url, without_password
from loaderkit.cache.verified import user_cache_folder
from loaderkit.errors import CacheError, OptionError
from loaderkit.fixes import Fix, Setting, Without
from loaderkit.path_arguments import check_cache_path, check_path
from loaderkit.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from loaderkit.cache.storage import Storage

    OpenUrl = Callable[[str, Mapping[str, Any] | None, Patience | None], Storage]

STORAGES: dict[str, OpenUrl] = {
    "file": FolderStorage.from_url,
    "local": FolderStorage.from_url,
}
"""What opens URLs of a scheme, by the scheme; all others are for fsspec.

A storage of your own is a file like folder_storage.py, and a line here; or, outside of
this library, ``STORAGES["mine"] = MyStorage`` in a module that workers import too."""
_BROKEN_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9]*)(:/*|/{2,})(?P<rest>[^/].*)")
"""Such as "s3:/bucket/a" and "s3//bucket/a"."""
_MAX_BYTES_AHEAD = 4 << 30
"""Chosen: some 16 shards of the usual size, a minute of a network of 70 MB/s."""


@answer_wrong_names()
@dataclass(frozen=True)
class RemoteCache:
    """A cache in a store, and the folder on local disk that its shards are kept in.

    It travels to other processes as it is; each opens the store for itself.
    """

    url: str
    """Of the folder that is the cache, such as "s3://bucket/molecules"."""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What fsspec's file system is made with.  Not shown: it may hold secrets."""
    mirror: Path | None = None
    """Folder of the mirror, which all caches and processes of a node may share; None
    for ``mirror`` in the user's own cache folder."""
    mirror_bytes: int | None = None
    """The most that the mirror may take of the disk; None for all there is."""
    patience: Patience = field(default_factory=Patience)
    """How long the store is waited for."""

    def __str__(self) -> str:
        return without_password(self.url)

    @property
    def mirror_folder(self) -> Path:
        """Where shards are kept on local disk.

        Raises:
            CacheError: The user has no home, and no folder was named.
        """
        if self.mirror is not None:
            return self.mirror
        folder = user_cache_folder()
        if folder is None:
            message = f"There is no folder to mirror {self} to."
            why = "this user has no home directory"
            raise CacheError(message, why=why, fix="mirror='/local/disk/mirror'")
        return folder / "mirror"

    @property
    def ahead_bytes(self) -> int:
        """How much may be downloaded before it is needed."""
        if self.mirror_bytes is None:
            return _MAX_BYTES_AHEAD
        # The other half is for what is being read.
        return min(_MAX_BYTES_AHEAD, self.mirror_bytes // 2)

    @functools.cached_property
    def storage(self) -> Storage:
        """The store, opened when it is first needed; no request is made.

        Once for all threads of a process: a client of S3 takes 0.4 s of CPU to make.

        Raises:
            OptionError: There is no file system for such URLs.
            CacheError: Its library is not installed.
        """
        return open_storage(self.url, self.storage_options, self.patience)

    def __getstate__(self) -> dict[str, Any]:
        """Travel without the open store."""
        return {
            name: value for name, value in self.__dict__.items() if name != "storage"
        }


CacheLocation = Path | RemoteCache
"""Where a cache is: a folder on this machine, or a store."""


@overload
def locate_cache(
    path: str | os.PathLike[str] | RemoteCache,
    storage_options: Mapping[str, Any] | None = None,
    mirror: str | os.PathLike[str] | None = None,
    mirror_bytes: int | str | None = None,
) -> CacheLocation: ...


@overload
def locate_cache(
    path: str | os.PathLike[str] | RemoteCache | None,
    storage_options: Mapping[str, Any] | None = None,
    mirror: str | os.PathLike[str] | None = None,
    mirror_bytes: int | str | None = None,
) -> CacheLocation | None: ...


def locate_cache(
    path: str | os.PathLike[str] | RemoteCache | None,
    storage_options: Mapping[str, Any] | None = None,
    mirror: str | os.PathLike[str] | None = None,
    mirror_bytes: int | str | None = None,
) -> CacheLocation | None:
    """Say where a cache is.

    Args:
        path: A folder, or a URL that fsspec knows; None for no cache.
        storage_options: What fsspec's file system is made with; of a URL only.
        mirror: Folder on local disk that shards are kept in; of a URL only.
        mirror_bytes: The most it may take, such as "200 GB"; of a URL only.

    Returns:
        An absolute path, since programs change the current folder; or a store; None
        for no cache.

    Raises:
        OptionError: An option has no effect here, or cannot have this value.

    >>> locate_cache("s3://bucket/molecules", mirror_bytes="2 GB").mirror_bytes
    2000000000
    """
    if is_url(path) and isinstance(path, str):
        _check_storage_options(storage_options)
        return RemoteCache(
            path,
            storage_options=dict(storage_options or {}),
            mirror=_mirror_from_option(mirror),
            mirror_bytes=_mirror_bytes_from_option(mirror_bytes),
        )
    options_of_urls = {
        "storage_options": storage_options,
        "mirror": mirror,
        "mirror_bytes": mirror_bytes,
    }
    for name, value in options_of_urls.items():
        if value is not None:
            message = f"{name} was given for the cache {path!s}, which is no URL."
            why = "a folder is read where it is"
            fix = Fix.of(Without(name), "; for a slow disk, name it 'file:///...'")
            raise OptionError(message, why=why, fix=fix)
    if path is None or isinstance(path, RemoteCache):
        return path
    check_cache_path(path)
    return Path(path).absolute()


def _check_storage_options(given: object) -> None:
    if given is not None and not isinstance(given, Mapping):
        name, example = "storage_options", {"profile": "training"}
        raise refuse_value(name, given, "a dict", example)


def open_storage(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    patience: Patience | None = None,
) -> Storage:
    """Open a store; no request is made.

    Args:
        url: Any URL that fsspec knows.
        storage_options: What fsspec's file system is made with.
        patience: How long it is waited for.

    Returns:
        The store.

    Raises:
        OptionError: There is no file system for such URLs.
        CacheError: Its library is not installed.
    """
    _check_storage_options(storage_options)
    if not is_url(url):
        raise _refuse_path(url)
    # "filecache::s3" is no scheme of ours, and fsspec reads such chains.
    scheme = url.split("://", 1)[0].lower()
    open_url = STORAGES.get(scheme, ObjectStore)
    return open_url(url, storage_options, patience)


def _refuse_path(value: object) -> OptionError:
    """Make the error for what is no URL, with the URL that was meant.

    Args:
        value: A path, a URL whose slashes are not two, or something else.
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        name, example = "url", "s3://bucket/molecules"
        return refuse_value(name, value, "a URL that fsspec knows", example)
    path = str(value)
    why = "it is a path on this machine"
    meant = f"file://{Path(path).expanduser().absolute()}"
    broken = _BROKEN_URL.fullmatch(path)
    if broken is not None:
        import fsspec

        if broken["scheme"] in fsspec.available_protocols():
            why = "a URL has :// behind the name of its store"
            # The path of a file begins with a slash of its own.
            is_local = broken["scheme"] in {"file", "local"}
            root = "/" if is_local and broken["rest"][:1] != "." else ""
            meant = f"{broken['scheme']}://{root}{broken['rest']}"
    message = f"url must be a URL that fsspec knows, got {path!r}."
    return OptionError(message, why=why, fix=Setting("url", meant))


def _mirror_from_option(value: object) -> Path | None:
    """Read the option ``mirror``.

    Raises:
        OptionError: It is no folder on this machine.
    """
    if value is None:
        return None
    name, example = "mirror", "/local/disk/mirror"
    if is_url(value):
        raise refuse_value(name, value, "a folder on this machine", example)
    folder = check_path(name, value, example).absolute()
    refuse_cut_url(name, value, Setting(name, example))
    try:
        is_taken = folder.exists() and not folder.is_dir()
    except OSError as error:
        raise unreadable(folder, error) from error
    if is_taken:
        message = f"mirror names a file, and no folder: {str(folder)!r}."
        why = "each cache's shards are kept in a folder of it"
        raise OptionError(message, why=why, fix=f"mirror={str(folder.parent)!r}")
    return folder


def _mirror_bytes_from_option(value: object) -> int | None:
    """Read the option ``mirror_bytes``.

    Raises:
        OptionError: It is no number of bytes above zero.
    """
    if value is None:
        return None
    nbytes = None
    if isinstance(value, str):
        # A text that cannot be read is refused below, with what can be.
        with contextlib.suppress(ValueError):
            nbytes = parse_bytes(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    if nbytes is None or nbytes < 1:
        wanted = "a number of bytes, or a text such as '200 GB'"
        name = "mirror_bytes"
        example: int | str = "200 GB"
        if isinstance(value, float) and value.is_integer() and value > 0:
            example = int(value)
        raise refuse_value(name, value, wanted, example)
    return nbytes
