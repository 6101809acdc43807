"""What is read: W1, molecules as in QM9; W2, protein pockets; W3, ragged clips."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch_geometric.data import Data, InMemoryDataset

if TYPE_CHECKING:
    from collections.abc import Sized
    from pathlib import Path

    from benchmarks.harness import ReadSamples

COUNTS = {"w1": 20_000, "w2": 2_000, "w3": 10_000}
BATCH = {"w1": 128, "w2": 16, "w3": 32}
CLIP_WIDTHS = {"text": 768, "video": 256, "audio": 768}


def make_graphs(workload: str, count: int) -> list[Data]:
    """Make the graphs of a workload, the same every time.

    Args:
        workload: "w1" or "w2".
        count: How many.

    Returns:
        W1: 10 to 26 nodes, 2 edges a node, x [n, 11], edge_attr [e, 4], pos [n, 3],
        y [1, 19], z [n], two strings.  W2: 200 to 600 nodes, 20 edges a node,
        x [n, 64], edge_attr [e, 8], y [1, 512].
    """
    torch.manual_seed(0)
    if workload == "w1":
        return [_make_molecule(number) for number in range(count)]
    return [_make_pocket() for _ in range(count)]


def _make_molecule(number: int) -> Data:
    nodes = int(torch.randint(10, 27, ()))
    return Data(
        x=torch.randn(nodes, 11),
        edge_index=torch.randint(nodes, (2, 2 * nodes)),
        edge_attr=torch.randn(2 * nodes, 4),
        y=torch.randn(1, 19),
        pos=torch.randn(nodes, 3),
        z=torch.randint(1, 10, (nodes,)),
        name=f"gdb_{number}",
        smiles="C" * (nodes // 2) + "O",
    )


def _make_pocket() -> Data:
    nodes = int(torch.randint(200, 601, ()))
    return Data(
        x=torch.randn(nodes, 64),
        edge_index=torch.randint(nodes, (2, 20 * nodes)),
        edge_attr=torch.randn(20 * nodes, 8),
        y=torch.randn(1, 512),
    )


def make_clips(count: int) -> list[dict[str, Any]]:
    """Make ragged samples of three modes.

    Args:
        count: How many.

    Returns:
        Dicts of text [L, 768], video [L, 256], audio [L, 768] and a label; L from 10
        to 50.
    """
    torch.manual_seed(0)
    clips: list[dict[str, Any]] = []
    for number in range(count):
        length = int(torch.randint(10, 51, ()))
        clip: dict[str, Any] = {
            name: torch.randn(length, width) for name, width in CLIP_WIDTHS.items()
        }
        clip["label"] = number % 10
        clips.append(clip)
    return clips


def pad_clips(clips: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Join clips as people do: each mode padded to the longest."""
    batch = {
        name: pad_sequence([clip[name] for clip in clips], batch_first=True)
        for name in CLIP_WIDTHS
    }
    batch["lengths"] = torch.tensor([len(clip["text"]) for clip in clips])
    batch["label"] = torch.tensor([clip["label"] for clip in clips])
    return batch


class InMemory(InMemoryDataset):  # type: ignore[misc]
    """PyG's way for what fits in memory."""

    def __init__(self, graphs: list[Data]) -> None:
        super().__init__(None)
        self.data, self.slices = self.collate(graphs)


class PtFiles(torch.utils.data.Dataset[Any]):
    """One ``torch.load`` an item."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.pt"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> Any:
        return torch.load(self.files[row], weights_only=False)


def write_pt_files(graphs: list[Data], folder: Path) -> Path:
    """Write one ``.pt`` a graph, as people have them."""
    folder.mkdir()
    for number, graph in enumerate(graphs):
        torch.save(graph, folder / f"{number:06}.pt")
    return folder


def epoch_reader(loader: Any, *, share: float = 1.0) -> ReadSamples:
    """Make a contestant of a loader.

    Args:
        loader: Any loader of graphs, or of dicts with a ``label``.
        share: Part of the epoch's batches to read; a slow loader needs fewer for the
            same precision.

    Returns:
        What reads an epoch, or its start, and counts samples.
    """

    def read_epoch() -> int:
        last_batch = max(1, int(len(loader) * share)) if share < 1 else None
        samples = 0
        for batch_number, batch in enumerate(loader, 1):
            samples += count_samples(batch)
            if batch_number == last_batch:
                break
        return samples

    return read_epoch


def count_samples(batch: Any) -> int:
    """Count the graphs of a PyG batch, or the labels of a dict."""
    if isinstance(batch, dict):
        labels: Sized = batch["label"]
        return len(labels)
    return int(batch.num_graphs)
