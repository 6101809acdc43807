"""The long version of the law that a table is refused where one of its shards would be.

The figures go to ``benchmarks/results/soak-shard-tables.txt``.  SOAK_TABLES says how
many tables are drawn; SOAK_SEED draws others.
"""

import os
import platform
import time
from pathlib import Path

import numpy as np
from drawn_shards import changed_tables, fault_of
from hypothesis import HealthCheck, given, seed, settings

from loaderkit.cache.shard_table import ShardTable

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TABLES = int(os.environ.get("SOAK_TABLES", "100000"))
SEED = int(os.environ.get("SOAK_SEED", "0"))


def test_a_table_is_refused_where_one_of_its_shards_would_be():
    started, outcomes = time.monotonic(), {True: 0, False: 0}

    @seed(SEED)
    @given(changed_tables())
    @settings(
        max_examples=TABLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def law(groups):
        try:
            ShardTable.from_json([group.to_json() for group in groups])
            refused = False
        except ValueError:
            refused = True
        assert refused == bool(fault_of(groups))
        outcomes[refused] += 1

    law()

    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    refused, read = outcomes[True], outcomes[False]
    lines = [
        f"Tables of shards with numbers changed, {time.strftime('%Y-%m-%d')}",
        f"2 cores, 24 GiB; {versions}",
        f"hypothesis seed {SEED}; {time.monotonic() - started:,.0f} s",
        f"{refused + read:,} tables: {refused:,} refused, {read:,} read; 0 failures",
    ]
    (RESULTS / "soak-shard-tables.txt").write_text("\n".join(lines) + "\n")
