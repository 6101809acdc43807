"""Lightning reads every epoch whole, also on other ranks and where epochs differ."""

import collections
import json

import pytest
from process_groups import connected, launched

from loaderkit.errors import LoaderError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("lightning"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def runs():
    import lightning_runs

    return lightning_runs


def on_ranks(runs, folder, ranks, **trainings):
    """Train on ranks of a group, and give what each training's ranks answered."""
    arguments = (folder, json.dumps(trainings))
    connected(lambda _: launched(runs.__file__, arguments, ranks, folder))
    return {
        name: [
            json.loads((folder / f"{name}.{rank}.json").read_text())
            for rank in range(ranks)
        ]
        for name in trainings
    }


def times_read(before, after, epoch=0):
    """Count how often the samples of an epoch were read, by a run and its rest."""
    counts = collections.Counter()
    for answer, part in ((before, "saved"), (after, "seen")):
        for rank in answer:
            counts.update(rank[part].get(str(epoch), []))
    return [counts[row] for row in range(100)]


def test_a_run_that_goes_on_with_other_ranks_reads_each_sample_once(runs, tmp_path):
    runs.pack_rows(tmp_path)
    one = on_ranks(runs, tmp_path, 1, one={"save": "one", "save_after": 5})
    two = on_ranks(
        runs,
        tmp_path,
        2,
        plain={"load": "one"},
        rest={"load": "one", "way": "loader"},
        two={"save": "two", "save_after": 15},  # in the second epoch
        stream={"kind": "stream", "save": "stream", "save_after": 2},
    )
    less = on_ranks(
        runs,
        tmp_path,
        1,
        module={"load": "two", "way": "module"},
        loader={"load": "two", "way": "loader", "reload": False},
        stream={"kind": "stream", "load": "stream", "way": "loader"},
    )

    # 25 batches are 13 on two ranks; with 5 done, Lightning reads 8 of the other 10.
    assert sum(times_read(one["one"], two["plain"])) == 20 + 2 * 8 * 4
    assert times_read(one["one"], two["rest"]) == [1] * 100
    for epoch in range(3):
        whole = times_read(two["two"], less["module"], epoch)
        assert whole == [1] * 100, epoch
    assert two["rest"][0]["validated"] == [0, 1, 2]
    assert less["module"][0]["validated"] == [1, 2]
    [refused] = less["loader"]
    assert "reload_dataloaders_every_n_epochs=1" in refused["error"]
    [refused] = less["stream"]
    assert "shared by 2 ranks" in refused["error"]


@pytest.mark.parametrize("way", ["loader", "module"])
def test_epochs_of_different_lengths_are_read_and_validated(way, runs, tmp_path):
    runs.pack_rows(tmp_path)

    module = runs.train(tmp_path, kind="size", way=way)

    lengths = [len(rows) for rows in module.seen.values()]
    assert lengths == [100] * 3
    assert module.validated == [0, 1, 2]


def test_epochs_of_different_lengths_are_not_begun_without_counting_anew(
    runs, tmp_path
):
    runs.pack_rows(tmp_path)

    plain = runs.train(tmp_path, kind="size")
    with pytest.raises(LoaderError, match="reload_dataloaders_every_n_epochs=1"):
        runs.train(tmp_path, kind="size", way="loader", reload=False)

    # What is refused: samples that nobody sees.
    assert min(len(rows) for rows in plain.seen.values()) < 100


@pytest.mark.parametrize("way", ["loader", "module"])
@pytest.mark.parametrize("save_after", ["epoch", 5, 30])
def test_a_run_that_goes_on_has_the_order_of_one_that_did_not_stop(
    save_after, way, runs, tmp_path
):
    runs.pack_rows(tmp_path)
    whole = runs.train(tmp_path, save="a", save_after=save_after)

    rest = runs.train(tmp_path, way=way, load="a")

    for epoch, rows in whole.seen.items():
        assert whole.saved.get(epoch, []) + rest.seen.get(epoch, []) == rows, epoch


def test_a_loader_that_goes_on_unknown_is_refused(runs, tmp_path):
    import lightning

    from loaderkit.integrations.lightning import WholeEpochs

    runs.pack_rows(tmp_path)
    runs.train(tmp_path, save="a", save_after=5)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[WholeEpochs()],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )

    loader, path = runs.build(tmp_path, "count"), tmp_path / "a.ckpt"

    with pytest.raises(LoaderError, match="was not given"):
        trainer.fit(runs.Module(), loader, ckpt_path=path)


def test_what_is_no_loader_of_ours_is_refused():
    from torch.utils.data import DataLoader

    from loaderkit.integrations.lightning import WholeEpochs

    for make in (WholeEpochs, WholeEpochs().resume):
        with pytest.raises(TypeError, match="takes loaders of build_loader"):
            make(DataLoader([1, 2]))
