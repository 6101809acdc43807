"""``loaderkit demo``: real molecules, packed, trained on, and read in three ways."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from torch_geometric.data import InMemoryDataset
from torch_geometric.loader import DataLoader as GraphDataLoader
from torch_geometric.nn import GINEConv, global_add_pool

from loaderkit.cli.molecules import EDGE_FEATURES, NODE_FEATURES, read_molecules
from loaderkit.datasets.open import open_cache
from loaderkit.datasets.pack import pack
from loaderkit.memory.process import own_pid, process_anonymous
from loaderkit.units import count_of, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

# Chosen: widths at which training takes seconds on a laptop, and as many epochs of
# reading alone as give a median.
BATCH = 64
WIDTH = 64
READ_EPOCHS = 5


@dataclass(frozen=True)
class Reading:
    """How one way of reading the molecules did, in a process of its own."""

    way: str
    samples_per_s: float
    """Median over the epochs, shuffled, 0 workers, files in page cache."""
    private_bytes: int
    """Anonymous memory that reading added to a process that had imported torch."""


@dataclass(frozen=True)
class Demo:
    """What the demo found."""

    molecules: int
    pt_bytes: int
    """Bytes of the ``.pt`` files together."""
    cache_bytes: int
    """Bytes of the cache."""
    pack_s: float
    train_s: float
    epochs: int
    error: float
    """Root mean square error on the test molecules, in log10 mol/L."""
    guess: float
    """The same for always answering the mean of the training molecules."""
    readings: tuple[Reading, ...]

    def to_json(self) -> dict[str, Any]:
        """Write it for programs."""
        return asdict(self)

    def __str__(self) -> str:
        rate = self.molecules / self.pack_s
        base = self.readings[0].samples_per_s
        pt, cache = format_bytes(self.pt_bytes), format_bytes(self.cache_bytes)
        heading = "reading a shuffled epoch"
        text = (
            f"packed    {self.molecules:,} molecules, {pt} of .pt files into {cache}, "
            f"{rate:,.0f} samples/s\n"
            f"trained   {count_of(self.epochs, 'epochs')} in "
            f"{self.train_s:.1f} s; test error "
            f"{self.error:.2f} log mol/L (always the mean: {self.guess:.2f})\n\n"
            f"{heading:<34}{'samples/s':>12}{'':>9}{'private memory':>16}"
        )
        lines = [text]
        for reading in self.readings:
            ratio = reading.samples_per_s / base
            memory = format_bytes(reading.private_bytes)
            rate_and_ratio = f"{reading.samples_per_s:>12,.0f}{ratio:>7.1f} x"
            lines.append(f"{reading.way:<34}{rate_and_ratio}{memory:>16}")
        return "\n".join(lines)


def run_demo(*, epochs: int = 40, keep: str | None = None) -> Demo:
    """Do what a user does, on real molecules.

    Args:
        epochs: How long to train, at least 1.
        keep: Folder for the files and the cache; a temporary one if None.

    Returns:
        Sizes, times, the model's error, and how three ways of reading compare.

    Raises:
        ValueError: ``epochs`` is below 1.
    """
    if epochs < 1:
        msg = f"epochs must be at least 1, got {epochs}"
        raise ValueError(msg)
    working_folder = (
        tempfile.TemporaryDirectory() if keep is None else nullcontext(keep)
    )
    with working_folder as folder:
        raw, cache = Path(folder, "molecules"), Path(folder, "molecules.lk")
        raw.mkdir(parents=True, exist_ok=True)
        molecules = read_molecules()
        for number, molecule in enumerate(molecules):
            torch.save(molecule, raw / f"{number:04}.pt")
        start = time.perf_counter()
        dataset = pack(raw, cache, overwrite=True)
        packed = time.perf_counter()
        error, guess = train(dataset, epochs)
        trained = time.perf_counter()
        return Demo(
            molecules=len(molecules),
            pt_bytes=sum(file.stat().st_size for file in raw.iterdir()),
            cache_bytes=sum(file.stat().st_size for file in cache.iterdir()),
            pack_s=packed - start,
            train_s=trained - packed,
            epochs=epochs,
            error=error,
            guess=guess,
            readings=tuple(
                _measure_in_own_process(name, str(raw), str(cache)) for name in WAYS
            ),
        )


class Solubility(torch.nn.Module):
    """A small graph network that predicts solubility."""

    def __init__(self) -> None:
        super().__init__()
        widths = [NODE_FEATURES, WIDTH, WIDTH]
        self.layers = torch.nn.ModuleList(
            GINEConv(
                torch.nn.Sequential(
                    torch.nn.Linear(width, WIDTH),
                    torch.nn.ReLU(),
                    torch.nn.Linear(WIDTH, WIDTH),
                ),
                edge_dim=EDGE_FEATURES,
            )
            for width in widths
        )
        self.head = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1)
        )

    def forward(self, batch: Any) -> torch.Tensor:
        """Predict log10 mol/L of each molecule ``[B, 1]``."""
        x = batch.x
        for layer in self.layers:
            x = layer(x, batch.edge_index, batch.edge_attr).relu()
        log_solubility: torch.Tensor = self.head(global_add_pool(x, batch.batch))
        return log_solubility


def train(dataset: Any, epochs: int) -> tuple[float, float]:
    """Train on the molecules of the training split.

    Args:
        dataset: The molecules, packed.
        epochs: How often to go through them.

    Returns:
        Root mean square error on the test split: the model's, and the mean's.
    """
    torch.manual_seed(0)
    # All molecules at once, for the fields that say which of them are for testing.
    everything = dataset.batch(range(len(dataset)))
    testing, training = dataset[everything.test], dataset[~everything.test]
    target = everything.y[~everything.test]
    model = Solubility()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(
        training, batch_size=BATCH, shuffle=True, collate_fn=dataset.collate
    )
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), batch.y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        batch = testing.batch(range(len(testing)))
        model_error = (model(batch) - batch.y).square().mean().sqrt()
        mean_error = (target.mean() - batch.y).square().mean().sqrt()
    return float(model_error), float(mean_error)


def _measure_in_own_process(way: str, raw: str, cache: str) -> Reading:
    """Read in a fresh process, so that its memory is that of this way alone."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        rate, private_bytes = pool.apply(measure_way, (way, raw, cache))
    return Reading(way, rate, private_bytes)


def measure_way(way: str, raw: str, cache: str) -> tuple[float, int]:
    """Read some shuffled epochs.

    Args:
        way: A key of ``WAYS``.
        raw: Folder of the ``.pt`` files.
        cache: Folder of the cache.

    Returns:
        Samples a second (median epoch), and anonymous bytes that reading added.
    """
    before = _anonymous_bytes()
    loader = WAYS[way](raw, cache)
    times = []
    for _ in range(READ_EPOCHS):
        start = time.perf_counter()
        for _batch in loader:
            pass
        times.append(time.perf_counter() - start)
    # The median: the first epoch opens files, and any may meet another program.
    count = len(loader.dataset)
    return count / sorted(times)[len(times) // 2], _anonymous_bytes() - before


def _anonymous_bytes() -> int:
    """Memory of this process that no file backs; all of its own where unknown."""
    anonymous = process_anonymous(own_pid())
    if anonymous is not None:
        return anonymous
    import psutil

    return int(psutil.Process(own_pid()).memory_full_info().uss)


class PtFiles(torch.utils.data.Dataset[Any]):
    """What people do today: one ``torch.load`` an item."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*.pt"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> Any:
        # As people who do this have it: PyG's graphs need classes allowed by name else.
        return torch.load(self.files[row], weights_only=False)


class InMemory(InMemoryDataset):  # type: ignore[misc]
    """PyG's way for what fits in memory."""

    def __init__(self, folder: str) -> None:
        super().__init__(None)  # without a folder PyG writes nothing to disk
        files = PtFiles(folder)
        graphs = [files[row] for row in range(len(files))]
        self.data, self.slices = self.collate(graphs)


def _pt_loader(raw: str, cache: str) -> Any:
    del cache
    return GraphDataLoader(PtFiles(raw), batch_size=BATCH, shuffle=True)


def _in_memory_loader(raw: str, cache: str) -> Any:
    del cache
    return GraphDataLoader(InMemory(raw), batch_size=BATCH, shuffle=True)


def _cache_loader(raw: str, cache: str) -> Any:
    del raw
    dataset = open_cache(cache)
    return DataLoader(
        dataset, batch_size=BATCH, shuffle=True, collate_fn=dataset.collate
    )


WAYS: dict[str, Callable[[str, str], Any]] = {
    "torch.load per item": _pt_loader,
    "PyG InMemoryDataset": _in_memory_loader,
    "loaderkit cache": _cache_loader,
}
