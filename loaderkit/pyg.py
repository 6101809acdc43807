"""PyG's classes, imported only once a sample is made of them.

Importing PyG takes 3 to 4 s of CPU on top of torch (it imports transformers, pandas and
torch's compiler), more than all else that happens before the first batch.  Datasets of
tensors and dicts do without, so no other module of loaderkit imports it (the ``demo``,
which trains a model of PyG's, aside).  Two ways lead to its classes:

    loaded_pyg()  to ask whether something is PyG's: None where nobody has imported it,
                  since then no object can be of its classes.  ``is_pyg_data`` asks that
                  of the usual case, a graph.
    import_pyg()  to make something of PyG's, or where a graph is in hand.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

if TYPE_CHECKING:
    from torch_geometric.data.data import BaseData

_WITH_CLASSES_OF_THEIR_OWN = {"torch_geometric", "torch_frame", "torch_sparse"}
"""``TensorFrame`` and ``SparseTensor``, which PyG takes in samples, come from libraries
that can be imported without it."""


class PygClasses(NamedTuple):
    """The classes of PyG that loaderkit knows, by PyG's names in snake case."""

    base_data: Any
    """Graphs of every kind, and batches of them."""
    data: Any
    hetero_data: Any
    temporal_data: Any
    batch: Any
    node_storage: Any
    in_memory_dataset: Any
    collater: Any
    """Makes the function that joins samples."""
    edge_index: Any
    index: Any
    summary: Any
    """Of nodes and edges of a dataset."""
    sparse_tensor: Any
    """torch_sparse's, or where that is absent a class that has no objects."""
    tensor_frame: Any
    """torch_frame's, or where that is absent a class that has no objects."""

    @property
    def joinable(self) -> tuple[type, ...]:
        """What the collater joins, beside nests of it."""
        return self.base_data, self.tensor_frame


def loaded_pyg() -> PygClasses | None:
    """Give PyG's classes to compare with; None where no object can be of them."""
    # Asked for each sample, and so no more than three look-ups: 0.2 us.
    if sys.modules.keys().isdisjoint(_WITH_CLASSES_OF_THEIR_OWN):
        return None
    return import_pyg()


@functools.cache
def import_pyg() -> PygClasses:
    """Give PyG's classes; import it if nobody has."""
    from torch_geometric import EdgeIndex, Index
    from torch_geometric.data import (
        Batch,
        Data,
        HeteroData,
        InMemoryDataset,
        TemporalData,
    )
    from torch_geometric.data.data import BaseData
    from torch_geometric.data.storage import NodeStorage
    from torch_geometric.data.summary import Summary
    from torch_geometric.loader.dataloader import Collater
    from torch_geometric.typing import SparseTensor, TensorFrame

    return PygClasses(
        base_data=BaseData,
        data=Data,
        hetero_data=HeteroData,
        temporal_data=TemporalData,
        batch=Batch,
        node_storage=NodeStorage,
        in_memory_dataset=InMemoryDataset,
        collater=Collater,
        edge_index=EdgeIndex,
        index=Index,
        summary=Summary,
        sparse_tensor=SparseTensor,
        tensor_frame=TensorFrame,
    )


def is_pyg_data(value: object) -> TypeGuard[BaseData]:
    """Tell whether a value is PyG data: a graph of any kind, or a batch of them.

    Args:
        value: Anything; PyG is not imported to tell.
    """
    pyg = loaded_pyg()
    return pyg is not None and isinstance(value, pyg.base_data)


def is_temporal_data(value: object) -> bool:
    """Tell whether a value is a stream of events of PyG's.

    Args:
        value: Anything; PyG is not imported to tell.
    """
    pyg = loaded_pyg()
    return pyg is not None and isinstance(value, pyg.temporal_data)


def classes_in_files() -> list[Any]:
    """List what a file may name that ``torch.save`` wrote of PyG data: no code."""
    from torch_geometric.data import storage
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.edge_index import CatMetadata, SortOrder

    pyg = import_pyg()
    return [
        *(pyg.data, pyg.hetero_data, pyg.edge_index, pyg.index),
        *(storage.BaseStorage, storage.NodeStorage, storage.EdgeStorage),
        *(storage.GlobalStorage, DataEdgeAttr, DataTensorAttr, SortOrder, CatMetadata),
    ]
