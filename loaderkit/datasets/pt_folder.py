"""A folder of ``.pt`` files as samples: which files, and what they may hold."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from loaderkit.answers import answer_wrong_calls
from loaderkit.arguments import check_text, check_truth
from loaderkit.cache.layout import BUILDING, MANIFEST
from loaderkit.cache.storage import is_url
from loaderkit.datasets.fingerprint import Fingerprint, fingerprint_of
from loaderkit.errors import DatasetError, OptionError
from loaderkit.fixes import Fix, Open, Pack, Setting
from loaderkit.habits import reader_of
from loaderkit.path_arguments import check_path
from loaderkit.pyg import classes_in_files, import_pyg, loaded_pyg
from loaderkit.units import count_of
from loaderkit.value_words import show_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loaderkit.fixes import Part

_NAME_ON_THE_HUB = re.compile(r"[A-Za-z][\w-]*(/[A-Za-z][\w.-]*)?")
"""A dataset's name, mostly with its owner's."""


@answer_wrong_calls
class PtFolder:
    """A folder of files written by ``torch.save``, one sample each.

    Args:
        path: The folder.
        pattern: Which files, as ``Path.glob`` understands it; ``**/*.pt`` goes deeper.
        weights_only: False lets the files run code when they are read: only for files
            whose author you trust.

    Raises:
        DatasetError: There is no such folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        pattern: str = "*.pt",
        weights_only: bool = True,
    ) -> None:
        if is_url(path):
            message = f"{path} is a URL, and no folder of .pt files."
            why = "files are read from a folder on this machine; in a store is a cache"
            fix = f"open_cache({path!r}), or copy the files to this machine"
            raise DatasetError(message, why=why, fix=fix)
        self.path = check_path("path", path, "samples/train")
        check_text("pattern", pattern, "*.pt")
        check_truth("weights_only", weights_only)
        self.pattern = pattern
        self.weights_only = weights_only
        self._check_is_folder()
        self._files = self._matching_files()
        if _names_pyg(self.path / self._files[0]):
            # Here, so that packing workers that are forked need not each import it.
            import_pyg()

    def _check_is_folder(self) -> None:
        if not self.path.is_dir():
            message = f"There is no folder {self.path}."
            why = "a path names a folder of .pt files, one for each sample"
            fix = Fix.of(f"its whole path; a relative one begins at {Path.cwd()}")
            name = self.path.as_posix()
            if _NAME_ON_THE_HUB.fullmatch(name):
                # As Hugging Face's load_dataset takes it.
                loaded = Pack(f'datasets.load_dataset({name!r}, split="train")')
                fix = Fix.of(fix, "; or ", loaded, " for one of Hugging Face's hub")
            if self.path.is_file():
                message = f"{self.path} is a file, no folder."
                reader = reader_of(str(self.path))
                fix = Fix.of("a SafeDataset with keys(), and load(key) that reads it")
                if reader:
                    fix = Fix.of(Pack(reader), ", for samples in a file")
            raise DatasetError(message, why=why, fix=fix)

    def _matching_files(self) -> Sequence[str]:
        """List the files by their paths below the folder: the same order everywhere."""
        try:
            files = list(self.path.glob(self.pattern))
        except (NotImplementedError, ValueError) as error:
            message = f"pattern cannot be {show_value(self.pattern)}."
            why = f"it is below {self.path}; Path.glob says: {error}"
            usual = Setting("pattern", "*.pt")
            raise OptionError(message, why=why, fix=usual) from error
        paths = sorted(file.relative_to(self.path).as_posix() for file in files)
        if paths:
            return paths

        if (self.path / MANIFEST).exists():
            message = f"{self.path} is a cache, and no folder of samples."
            cache = Open(str(self.path))
            raise DatasetError(message, why="it is packed already", fix=cache)
        if (self.path / BUILDING).exists():
            message = f"{self.path} is a half-packed cache, and no folder of samples."
            why = "a packing run was stopped before it ended"
            raise DatasetError(message, why=why, fix="run that one again")
        other_names = sorted(file.name for file in self.path.iterdir())[:3]
        message = f"No file in {self.path} matches {self.pattern!r}."
        why = f"it holds {', '.join(other_names) or 'nothing'}"
        fix: Part = Setting("pattern", "**/*.pt", within="PtFolder(path, {})")
        if next(self.path.rglob("*.pt"), None) is None:
            # Images, tables: how they are read is the user's to say.
            fix = "a SafeDataset with keys() that lists the files, and load(file)"
        raise DatasetError(message, why=why, fix=fix)

    def __len__(self) -> int:
        return len(self._files)

    def key(self, row: int) -> str:
        """Give the file's path below the folder."""
        return self._files[row]

    def read(self, row: int) -> Any:
        """Load one file to the CPU."""
        file = self.path / self._files[row]
        try:
            sample = _load_file(file, weights_only=self.weights_only)
        except pickle.UnpicklingError as error:
            raise _unreadable_file_error(file, error) from error
        _refuse_whole_dataset(file, sample)
        return sample

    def fingerprint(self) -> Fingerprint:
        """Look at the names of the files."""
        return fingerprint_of(_load_file, self._files)

    def root(self) -> Path | None:
        """Give the folder."""
        return self.path

    def named_files(self) -> Iterator[str]:
        """List the files."""
        return (os.path.abspath(self.path / name) for name in self._files)

    def runs_user_code(self) -> bool:
        """Classes in the files may be the user's."""
        return True

    def state(self) -> str | None:
        """Hash the one setting that changes samples."""
        return str(self.weights_only)

    def values(self) -> Mapping[str, str]:
        """Name none: the folder and its files are the keys."""
        return {}


def _refuse_whole_dataset(file: Path, sample: object) -> None:
    """Refuse a file that holds many samples, as PyG's InMemoryDataset writes them.

    Raises:
        DatasetError: It does.
    """
    parts = sample if isinstance(sample, tuple) else ()
    if len(parts) >= 2 and isinstance(parts[1], Mapping):
        message = (
            f"{file} holds a whole InMemoryDataset (data and slices), not a sample."
        )
        whole = Pack("MyInMemoryDataset(root)")
        fix = Fix.of("pack the dataset object itself: ", whole)
        raise DatasetError(message, why="PyG saves all graphs in one file", fix=fix)
    if isinstance(sample, list) and sample and hasattr(sample[0], "stores"):
        message = (
            f"{file} holds a list of {count_of(len(sample), 'graphs')}, not a sample."
        )
        loaded = Pack(f"torch.load({str(file)!r}, weights_only=False)")
        raise DatasetError(message, why="a folder has one sample a file", fix=loaded)


def _names_pyg(file: Path) -> bool:
    """Tell whether a file of ``torch.save`` names classes of PyG; it is not unpickled.

    Those that torch wrote before version 1.6 do not tell; PyG is imported to read them.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            # Tensors are members of their own: this one says how the sample is built.
            members = [name for name in archive.namelist() if name.endswith("data.pkl")]
            return any(b"torch_geometric" in archive.read(name) for name in members)
    except Exception:  # noqa: BLE001 -- a damaged file is told of when it is read
        return False


def _load_file(file: Path, *, weights_only: bool) -> Any:
    """Load a file to the CPU; what torch and PyG write needs no trust."""
    if not weights_only:
        return torch.load(file, map_location="cpu", weights_only=False)
    if loaded_pyg() is None:
        # Only a file that names what is not allowed here may need PyG to be imported.
        with contextlib.suppress(pickle.UnpicklingError):
            return _load_with_classes(file, _plain_classes())
    return _load_with_classes(file, [*_plain_classes(), *classes_in_files()])


def _load_with_classes(file: Path, allowed: list[Any]) -> Any:
    with torch.serialization.safe_globals(allowed):
        return torch.load(file, map_location="cpu", weights_only=True)


def _plain_classes() -> list[Any]:
    """List what a file may name beside PyG's graphs: data, not code."""
    # numpy 2 has renamed the module whose functions a pickled array calls.
    core_name = "numpy._core" if "numpy._core" in sys.modules else "numpy.core"
    core: Any = sys.modules[core_name]
    numpy = [np.ndarray, np.dtype, core.multiarray._reconstruct, core.multiarray.scalar]
    numpy += [type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"]
    return [*numpy, collections.OrderedDict, collections.defaultdict, set]


def _unreadable_file_error(file: Path, error: Exception) -> DatasetError:
    forbidden = re.search(
        r"unsupported (?:global: )?GLOBAL (\S+)", str(error), re.IGNORECASE
    )
    if forbidden:
        message = f"{file} needs {forbidden[1]}, which could run code when it is read."
        why = "it is no tensor and none of PyG's classes"
        within = "pack(PtFolder(path, {}), ...)"
        unsafe = Setting("weights_only", value=False, within=within)
        fix = Fix.of("if you trust its author: ", unsafe)
        return DatasetError(message, why=why, fix=fix)
    message = f"{file} is no file that torch.save wrote, or a damaged one."
    why = str(error).splitlines()[0]
    return DatasetError(
        message, why=why, fix="write it again, or take it out of the folder"
    )
