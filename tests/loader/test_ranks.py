"""Several processes train on one dataset: under a real torchrun, and by number."""

import subprocess
import sys
from pathlib import Path

import pytest

from loaderkit import build_loader

SCRIPT = """
import sys
import torch.distributed as dist
import loaderkit

WAYS = ({"batch_size": 7}, {"max_nodes": 13}, {"batch_size": 7, "drop_last": True})
dist.init_process_group("gloo")
cache = loaderkit.open_cache(sys.argv[1])
for options in WAYS:
    loader = loaderkit.build_loader(cache, shuffle=True, seed=3, **options)
    rows = [batch.y.tolist() for batch in loader]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, rows)
    if dist.get_rank() == 0:
        rows = sorted(row for each in every for batch in each for row in batch)
        print([len(each) for each in every], rows)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_gives_every_rank_its_share(cache, tmp_path):
    len(cache)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]

    done = subprocess.run(
        [*run, str(script), str(cache.cache)],
        capture_output=True, text=True, check=False, timeout=120,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip

    lines = done.stdout.strip().splitlines()
    assert len(lines) == 3, done.stderr[-1500:]
    for line, low in zip(lines, [3, 5, 2], strict=True):
        steps, _, rows = line.partition("] ")
        left, right = (int(each) for each in steps.strip("[").split(", "))
        assert left == right
        assert left >= low
        assert set(eval(rows)) <= set(range(40))
    assert set(eval(lines[0].partition("] ")[2])) == set(range(40))


@pytest.mark.parametrize("options", [{"batch_size": 7}, {"max_nodes": 9}])
def test_ranks_agree_without_a_word(cache, options):
    part = cache[:39]
    loaders = [
        build_loader(part, shuffle=True, seed=1, rank=rank, world_size=4, **options)
        for rank in range(4)
    ]
    found = [[batch.y.tolist() for batch in loader] for loader in loaders]

    assert len({len(each) for each in found}) == 1
    assert {row for each in found for batch in each for row in batch} == set(range(39))
    assert "rank 2 of 4" in loaders[2].plan.batching


def test_rank_and_world_size_belong_together(cache):
    with pytest.raises(ValueError, match="together"):
        build_loader(cache, rank=1)
