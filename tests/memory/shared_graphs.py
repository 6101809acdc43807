"""What another process sends; a spawned one imports it by name.

PyG is imported where it is used: the leak detector's tests, which run beside these,
walk every object that there is.
"""

import torch

from loaderkit.memory.shm_batch import SegmentRing, SharedBatch, parcels_work


def graphs():
    from torch_geometric.data import Data

    return [
        Data(x=torch.rand(n, 30), edge_index=torch.randint(n, (2, 9)), name=f"g{n}")
        for n in (300, 400)
    ]


def batch_of_graphs():
    from torch_geometric.data import Batch

    return Batch.from_data_list(graphs())


def give(queue, works):
    works.put(parcels_work())
    segments = SegmentRing(4)
    for _ in range(3):
        queue.put(SharedBatch(batch_of_graphs(), segments))
    works.get()  # ends only when all have arrived
