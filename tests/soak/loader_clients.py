"""The table of clients, long: ``pytest -s -o python_files=tests/soak/*.py tests/soak``.

Prints what ``benchmarks/results/soak-loader-clients.txt`` keeps.
"""

import multiprocessing
from collections import Counter

import clients
import pytest

from loaderkit import pack
from loaderkit.testing import assert_same

ROWS = [  # workers, start method, seed, rows drawn
    *((0, None, seed, 1500) for seed in range(11, 17)),
    (2, "fork", 21, 200),
    (1, "spawn", 31, 8),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("workers", "method", "seed", "count"), ROWS)
def test_rows_of_the_table(tmp_path, workers, method, seed, count):
    packed = {
        kind: pack(clients.samples_of(kind), tmp_path / kind, workers=0)
        for kind in clients.SAMPLES
    }
    options = {"num_workers": workers}
    if method is not None:
        options["multiprocessing_context"] = multiprocessing.get_context(method)
    outcome, differing = Counter(), []

    for row in clients.rows(count, seed):
        batches = clients.wanted(row)
        if batches is None:
            outcome["refused over the list"] += 1
            continue
        outcome["compared"] += 1
        try:
            assert_same(row.epoch(packed[row.samples], **options), batches, str(row))
        except Exception as error:  # noqa: BLE001 -- all are listed, none ends the run
            differing.append(f"{row}: {type(error).__name__}: {error}")

    text = f"{workers} workers, {method or 'none'}, seed {seed}: {dict(outcome)}"
    print(f"\n{text}, differing: {len(differing)}")
    assert not differing, "\n".join(differing)
