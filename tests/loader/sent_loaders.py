"""What other processes do with a loader; a spawned one imports it by name."""

import torch
import torch.distributed

from loaderkit.errors import LoaderError

COUNT = 20


class Rows(torch.utils.data.Dataset):
    """Gives row numbers, and says sizes."""

    def __len__(self):
        return COUNT

    def __getitem__(self, row):
        return torch.tensor(row)

    def sizes(self):
        return {"nodes": [1 + row % 5 for row in range(COUNT)]}


def epochs(loader):
    """Give what the next two epochs give."""
    return [[batch.tolist() for batch in loader] for _ in range(2)]


def read_as_rank(rank, loaders, folder, store):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / store}", rank=rank, world_size=2
    )
    for name, loader in loaders.items():
        try:
            text = str(epochs(loader))
        except LoaderError as error:
            text = str(error)
        (folder / f"{name} {rank}").write_text(text)
    torch.distributed.destroy_process_group()
