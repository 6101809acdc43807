"""Make the pictures of the documentation: python tests/pages/screenshots.py FOLDER.

Needs Chromium, and Pillow, which makes the files small.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from browser import QUIET
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import loaderkit


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Graphs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(16, 256), GCNConv(256, 256)
        self.head = torch.nn.Linear(256, 1)

    def forward(self, batch):
        hidden = torch.relu(self.first(batch.x, batch.edge_index))
        return self.head(torch.relu(self.second(hidden, batch.edge_index)))


def random_graphs(count):
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for _ in range(count):
        nodes = 2 + int(20 * torch.randn((), generator=generator).mul(0.6).exp())
        edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
        graphs.append(Data(x=torch.ones(nodes, 16), edge_index=edges))
    return graphs


def step_page(folder):
    model = torch.nn.Sequential(*(Block(128) for _ in range(6)))
    estimate = loaderkit.estimate_step(model, torch.zeros(512, 128))
    return estimate.to_html(folder / "step.html")


def plan_page(folder):
    plan = loaderkit.plan_batch(
        Graphs(), random_graphs(400), "cuda", limit="16 MiB", batch_size=64
    )
    return plan.to_html(folder / "plan.html")


def sizes_page(folder):
    dataset = loaderkit.pack(random_graphs(2000), folder / "graphs.lk", workers=0)
    return dataset.sizes().to_html(folder / "sizes.html", max_nodes=200)


def leak_page(folder):
    kept = []
    weights = torch.zeros(64, 64, requires_grad=True)

    def epoch():
        for _ in range(10):
            hidden = torch.randn(64, 64) @ weights
            kept.append(hidden.relu())

    report = loaderkit.LeakDetector("cpu", on_leak=print).run(epoch, epochs=20)
    return report.to_html(folder / "leak.html")


def meter_page(folder):
    meter = loaderkit.MemoryMeter("cpu", log=None, every_s=0.01)
    blocks = []
    with meter:
        with meter.stage("load"):
            for _ in range(20):
                blocks.append(torch.ones(1 << 20))
                time.sleep(0.02)
        with meter.stage("train"):
            while blocks:
                blocks.pop()
                time.sleep(0.02)
    return meter.timeline.to_html(folder / "meter.html")


PAGES = {
    step_page: 760,
    plan_page: 980,
    sizes_page: 700,
    leak_page: 1000,
    meter_page: 900,
}
"""What makes each page, and how many pixels of its height are shown."""


def take(page, picture, height):
    """Photograph a page in headless Chromium."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            shutil.which("chromium"),
            *QUIET,
            "--hide-scrollbars",
            "--blink-settings=preferredColorScheme=1",
            f"--user-data-dir={profile}",
            f"--window-size=1000,{height}",
            f"--screenshot={picture}",
            page.as_uri(),
        ]
        subprocess.run(command, check=True, capture_output=True)


def main(folder):
    """Make every page and its picture."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as pages:
        for make_page, height in PAGES.items():
            page = make_page(Path(pages))
            picture = folder / f"{page.stem}.png"
            take(page, picture, height)
            # a few flat colours: a quarter of the bytes
            Image.open(picture).convert("P", palette=Image.Palette.ADAPTIVE).save(
                picture, optimize=True
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
