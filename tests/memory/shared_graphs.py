"""What another process sends; a spawned one imports it by name."""

import torch
from torch_geometric.data import Batch, Data

from loaderkit.memory.shm_batch import SegmentRing, SharedBatch, parcels_work


def graphs():
    return [
        Data(x=torch.rand(n, 30), edge_index=torch.randint(n, (2, 9)), name=f"g{n}")
        for n in (300, 400)
    ]


def give(queue, works):
    works.put(parcels_work())
    segments = SegmentRing(4)
    for _ in range(3):
        queue.put(SharedBatch(Batch.from_data_list(graphs()), segments))
    works.get()  # ends only when all have arrived
