"""Post-mortem 4: ragged clips, 128 a batch, and "Killed"."""

import os
import signal
import tempfile

import torch

import loaderkit

WIDTHS = {"text": 768, "video": 256, "audio": 768}


class Killed(torch.utils.data.Dataset[int]):
    """Stands for a worker that the kernel takes memory back from."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return row


torch.manual_seed(0)
lengths = torch.randn(256).mul(0.8).exp().mul(12).long().clamp(1, 200).tolist()
clips = [{name: torch.zeros(n, w) for name, w in WIDTHS.items()} for n in lengths]
with tempfile.TemporaryDirectory() as folder:
    cache = loaderkit.pack(clips, f"{folder}/clips.lk")
    before = loaderkit.build_loader(cache, shuffle=True, seed=0, batch_size=128)
    after = loaderkit.build_loader(
        cache, shuffle=True, seed=0, max_tokens=1000, bucket_by="tokens"
    )
    for words, loader in {"before": before, "after": after}.items():
        sizes = (sum(b[name].values.nbytes for name in WIDTHS) for b in loader)
        print(f"{words}: {len(loader)} batches, up to {max(sizes) / 2**20:.0f} MiB")
try:
    next(iter(torch.utils.data.DataLoader(Killed(), num_workers=1)))
except RuntimeError as error:
    print(str(loaderkit.diagnose_oom(error)).splitlines()[0])
