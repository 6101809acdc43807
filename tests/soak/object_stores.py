"""A process that downloads and deletes shards is killed at random moments, many times.

``SOAK_CASES`` says how many (50), ``SOAK_SEED`` from which seed (0).  The figures go to
benchmarks/results/soak-object-stores.txt.
"""

import os

from storages import Faults, FileServer
from test_mirror import check_kills, make_cache

KILLS = int(os.environ.get("SOAK_CASES", "50"))
SEED = int(os.environ.get("SOAK_SEED", "0"))


def test_killed_at_random_moments_nothing_is_left_half(tmp_path):
    make_cache(tmp_path / "served")
    server = FileServer(tmp_path / "served", faults=Faults())
    check_kills(server.url, tmp_path / "m", kills=KILLS, seed=SEED)
    server.stop()
