"""Texts of a batch are those that were packed, whatever is in them."""

import random

import pytest
import torch
from torch_geometric.data import Batch, Data

from loaderkit import pack

ALPHABETS = {
    "ASCII": "abc XYZ 019",
    "any letters": "aß中あ🙂\u202e\n\r\t",
    "zero bytes": "a\0b",
    "only zero bytes": "\0",
    "lone surrogates": "a\ud800é",
}
LENGTHS = {"empty": 0, "empty or one letter": 1, "short": 30, "long": 900}


def drawn_texts(alphabet, longest, seed):
    rng = random.Random(seed)
    return [
        "".join(rng.choices(alphabet, k=rng.randint(0, longest))) for _ in range(40)
    ]


@pytest.mark.many_cases(quick=2)
@pytest.mark.parametrize("alphabet", ALPHABETS.values(), ids=ALPHABETS)
def test_a_batch_has_the_texts_that_were_packed(tmp_path, alphabet):
    texts = {
        name: drawn_texts(alphabet, longest, seed=longest)
        for name, longest in LENGTHS.items()
    }
    samples = [
        dict(zip(texts, fields, strict=True))
        | {"raw": fields[-1].encode("utf-8", "surrogatepass")}
        for fields in zip(*texts.values(), strict=True)
    ]
    in_files = pack(samples, tmp_path / "files", workers=0, shard_bytes=10_000)
    compressed = pack(samples, tmp_path / "gzip", workers=0, compression="gzip")

    for dataset in (in_files, compressed):
        for rows in (range(40), [39], [7, 7, 0], [*range(39, -1, -3)] * 3):
            batch = dataset.batch(list(rows))

            for name in samples[0]:
                assert batch[name] == [samples[row][name] for row in rows]


@pytest.mark.parametrize("alphabet", ALPHABETS.values(), ids=ALPHABETS)
def test_texts_of_graphs_are_those_of_pyg(tmp_path, alphabet):
    texts = drawn_texts(alphabet, 80, seed=0)
    graphs = [Data(x=torch.ones(2, 1), name=text) for text in texts]
    dataset = pack(graphs, tmp_path / "cache", workers=0)

    names = dataset.batch(range(40)).name

    assert names == Batch.from_data_list(graphs).name
