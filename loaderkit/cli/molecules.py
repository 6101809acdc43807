"""Real molecules as graphs: 1,282 with measured solubility (see solubility.md)."""

from __future__ import annotations

import gzip
import json
from importlib.resources import files
from typing import Any

import torch
from torch_geometric.data import Data

ATOMS = (6, 7, 8, 9, 15, 16, 17, 35, 53)
"""Atomic numbers that get a feature of their own; the rest share one."""
NODE_FEATURES = len(ATOMS) + 1 + 4
"""Which of these atoms it is, or another; its neighbours, charge and hydrogens, and
whether it is aromatic."""
EDGE_FEATURES = 4
"""Whether a bond is single, aromatic, double or triple."""


def read_molecules() -> list[Data]:
    """Read the molecules that come with loaderkit.

    Returns:
        Graphs with x ``[atoms, 14]``, edge_index ``[2, 2 * bonds]``, edge_attr
        ``[2 * bonds, 4]``, y ``[1, 1]`` (log10 mol/L), smiles, and ``test``, True for
        the molecules that are kept for testing.
    """
    packed = files("loaderkit.cli").joinpath("solubility.json.gz").read_bytes()
    return [as_graph(molecule) for molecule in json.loads(gzip.decompress(packed))]


def _class_of_element(atomic_number: torch.Tensor) -> int:
    """Number the elements of ``ATOMS``; all others are the last class."""
    number = int(atomic_number)
    return ATOMS.index(number) if number in ATOMS else len(ATOMS)


def as_graph(molecule: dict[str, Any]) -> Data:
    """Make a graph of one molecule.

    Args:
        molecule: SMILES, solubility, split, atoms and bonds, as in solubility.md.

    Returns:
        The graph; every bond is two directed edges.
    """
    atoms = torch.tensor(molecule["atoms"])
    element_classes = torch.tensor([_class_of_element(atom) for atom in atoms[:, 0]])
    elements = torch.nn.functional.one_hot(element_classes, len(ATOMS) + 1)
    x = torch.cat([elements, atoms[:, 1:]], dim=1)
    bonds = torch.tensor(molecule["bonds"]).reshape(-1, 3)
    both_ways = torch.cat([bonds, bonds[:, [1, 0, 2]]])
    # The file has twice the order of a bond: 3 is an aromatic one, of order 1.5.
    orders = (both_ways[:, 2:] == torch.tensor([2, 3, 4, 6])).float()
    return Data(
        x=x.float(),
        edge_index=both_ways[:, :2].t().contiguous(),
        edge_attr=orders,
        y=torch.tensor([[molecule["solubility"]]]),
        smiles=molecule["smiles"],
        test=molecule["split"] == "test",
    )
