"""What another process sends; a spawned one imports it by name."""

import torch

from loaderkit.memory.shm_batch import SharedBatch
from loaderkit.memory.shm_segments import SegmentRing, can_share_batches


def send_batches(queue, works):
    # As torch does in its workers: OpenMP's threads do not survive a fork.
    torch.set_num_threads(1)
    works.put(can_share_batches())
    segments = SegmentRing(4)
    for number in range(3):
        queue.put(SharedBatch({"x": torch.full((200, 300), float(number))}, segments))
    works.get()  # ends only when all have arrived
