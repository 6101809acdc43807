"""Law: what is made to run in a training loop changes no more than what it stands for.

torch's own loader, a step written by hand, a trainer without the callback and a test
without the mark are what everything is compared with, where all goes well and where
code of the caller's fails or is interrupted half way.
"""

import functools
import gc
import re
import threading

import pytest
import torch
from code_of_caller import (
    FAILURES,
    WIDTH,
    Code,
    Join,
    Keyed,
    OfTheCallerError,
    Samples,
    Stream,
    outcome_of,
)
from observed_state import changes, process_state, state_of
from quiet_trainer import quiet_lightning, quiet_settings
from torch import nn

import loaderkit

NOT_COMPARED = ("/version", "/gradient/identity", "/gradient/memory")
"""How often a tensor was written to, but what is in it; and whether a new gradient lies
where one was freed before, which is chance."""
FAILS_AT = 6
"""The sample, in the second batch, at which a dataset fails."""


def kinds_of_changes(call, own):
    """Make a call, and name the kinds of what it has changed."""
    wait_for_queues()
    before = process_state(), state_of(own)
    result = outcome_of(call)
    wait_for_queues()
    after = process_state(), state_of(own)
    del result
    found = [*changes(before[0], after[0]), *changes(before[1], after[1])]
    kinds = set(map(kind_of, found))
    return {kind for kind in kinds if not kind.endswith(NOT_COMPARED)}


def wait_for_queues():
    """Let queues end that were closed: a thread of theirs closes their pipes later."""
    threads = [
        thread for thread in threading.enumerate() if thread.name == "QueueFeederThread"
    ]
    if threads:
        # Where a worker has failed, torch's iterator is in a cycle with the error.
        gc.collect()
    for thread in threads:
        thread.join()


def kind_of(change):
    """Name which reading of the process has changed, or which part of an object.

    >>> kind_of("/process: files/pipe:[1]: 1 -> 2"), kind_of("/['a']/[3]/x is new")
    ('process: files', "['a']/[]/x")
    """
    path = change[1:]
    if not path.startswith("["):
        return ":".join(path.split("/")[0].split(":")[:2])
    return re.sub(r"\[\d+\]", "[]", re.split(r": | is ", path)[0])


DATASETS = {"map": Samples, "stream": Stream, "keyed": Keyed}
ENDINGS = [
    ("nowhere", "done"),
    ("loop", "left"),
    ("loop", "failed"),
    ("loop", "interrupted"),
    ("dataset", "failed"),
    ("dataset", "interrupted"),
    ("collate_fn", "failed"),
    ("collate_fn", "interrupted"),
]


def plain(loader, run):
    run(loader)


def in_a_block(loader, run):
    with loader:
        run(loader)


def prefetched(loader, run):
    run(loaderkit.DevicePrefetcher(loader, "cpu"))


def changes_of_an_epoch(build, way, kind, workers, place, ending):
    failure = FAILURES.get(ending)
    of_dataset = failure if place == "dataset" else None
    dataset = DATASETS[kind](of_dataset, FAILS_AT)
    join = Join(failure if place == "collate_fn" else None)
    options = {"batch_size": 4, "num_workers": workers, "collate_fn": join}
    options |= {"generator": torch.Generator().manual_seed(5)}
    if kind != "stream":
        options["shuffle"] = True
    if build is loaderkit.build_loader:
        # A probe reads samples too, and the law of calls is about it.
        options["probe"] = False
    loader = build(dataset, **options)

    def run(batches):
        for number, _batch in enumerate(batches):
            if place == "loop" and number == 1:
                if failure is None:
                    return
                raise failure

    # The first epoch with workers has their deaths told by a signal, in torch too.
    outcome_of(lambda: run(loader))
    own = {"dataset": dataset, "join": join, "options": options}
    return kinds_of_changes(lambda: way(loader, run), own)


@functools.cache
def changes_with_torch(*case):
    return changes_of_an_epoch(torch.utils.data.DataLoader, plain, *case)


@pytest.mark.many_cases(quick=4)
@pytest.mark.long_cases
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", [plain, in_a_block, prefetched])
@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize(("place", "ending"), ENDINGS)
@pytest.mark.usefixtures("own_folder_of_temporary_files")
def test_an_epoch_changes_no_more_than_with_torch(way, kind, workers, place, ending):
    if workers and place != "loop" and ending == "interrupted":
        pytest.skip("Ctrl-C in a worker is the death of that worker in torch")
    ours = changes_of_an_epoch(
        loaderkit.build_loader, way, kind, workers, place, ending
    )

    # Of a worker that fails, this process sees no more than of a loop that does; torch
    # then takes 5 s to end each of them.
    place = "loop" if workers and ending == "failed" else place
    assert ours <= changes_with_torch(kind, workers, place, ending)


@pytest.mark.usefixtures("own_folder_of_temporary_files")
def test_its_twin_a_loader_that_changes_more_is_seen():
    class ChangesMore(torch.utils.data.DataLoader):
        def __iter__(self):
            self.dataset.rows.add_(1)
            return super().__iter__()

    case = "map", 0, "loop", "failed"
    changed = changes_of_an_epoch(ChangesMore, plain, *case)

    assert changed - changes_with_torch(*case) == {"['dataset']/rows/values"}


class Regression(nn.Module):
    """A model of which pieces are allowed: no layer mixes samples."""

    def __init__(self, failure):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.drop = nn.Dropout()
        self.register_buffer("calls", torch.zeros(1))
        self.code, self.kept = Code(failure), []
        self.first.register_forward_hook(lambda *seen: self.kept.append(seen[2]))

    def forward(self, rows):
        self.calls += 1
        self.code.run(len(rows))
        return self.last(self.drop(self.first(rows)))


class Momentum(torch.optim.SGD):
    """An optimizer whose update fails if it shall."""

    def __init__(self, parameters, failure):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.failure = failure

    def step(self, closure=None):
        if self.failure is not None:
            raise self.failure
        return super().step(closure)


def by_hand(model, optimizer, loss, batch):
    optimizer.zero_grad(set_to_none=True)
    loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


def by_micro_batcher(model, optimizer, loss, batch):
    loaderkit.MicroBatcher(model, optimizer, loss).step(batch)


def by_pieces(model, optimizer, loss, batch):
    loaderkit.MicroBatcher(model, optimizer, loss, micro_batch=3).step(batch)


def by_windows(model, optimizer, loss, batch):
    halves = [[part[:4] for part in batch], [part[4:] for part in batch]]
    batcher = loaderkit.MicroBatcher(model, optimizer, loss)
    list(batcher.windows(map(tuple, halves), 2))


def by_transactional_step(model, optimizer, loss, batch):
    optimizer.zero_grad(set_to_none=True)

    def backward(piece, share):
        value = loss(model(piece[0]), piece[1]) * share
        value.backward()
        return value.detach()

    loaderkit.transactional_step(model, batch, backward, micro_batch=3)
    optimizer.step()


class OutOfMemory(torch.OutOfMemoryError):
    def __init__(self):
        super().__init__("CUDA out of memory. Tried to allocate 2.00 GiB")


FAILURES_OF_STEPS = [OfTheCallerError, KeyboardInterrupt, OutOfMemory]


def changes_of_a_step(way, place, failure):
    def failure_in(name):
        return failure if place == name else None

    model = Regression(failure_in("forward"))
    optimizer = Momentum(model.parameters(), failure_in("optimizer"))
    code = Code(failure_in("loss"))
    batch = torch.rand(8, WIDTH), torch.rand(8, 1)
    # A step before, so that there are gradients and momenta.
    torch.optim.SGD.zero_grad(optimizer)
    model.last(model.first(batch[0])).sum().backward()
    torch.optim.SGD.step(optimizer)

    def loss(output, target):
        code.run()
        return nn.functional.mse_loss(output, target)

    own = {"model": model, "optimizer": optimizer, "batch": batch, "loss": loss}
    return kinds_of_changes(lambda: way(model, optimizer, loss, batch), own)


@functools.cache
def changes_by_hand(place, failure):
    return changes_of_a_step(by_hand, place, failure)


@pytest.mark.many_cases(quick=8)
@pytest.mark.parametrize(
    "way", [by_micro_batcher, by_pieces, by_windows, by_transactional_step]
)
@pytest.mark.parametrize("place", ["forward", "loss", "optimizer"])
@pytest.mark.parametrize("failure", [None, *FAILURES_OF_STEPS], ids=str)
@pytest.mark.usefixtures("own_folder_of_temporary_files")
def test_a_step_changes_no_more_than_one_by_hand(way, place, failure):
    ours = changes_of_a_step(way, place, failure)

    assert ours <= changes_by_hand(place, failure)


def test_its_twin_a_step_that_changes_more_is_seen():
    def with_a_fault(model, optimizer, loss, batch):
        try:
            by_hand(model, optimizer, loss, batch)
        finally:
            batch[1].add_(1)
            model.eval()

    case = "forward", KeyboardInterrupt
    more = changes_of_a_step(with_a_fault, *case) - changes_by_hand(*case)

    assert {"['model']/training", "['batch']/[]/values"} <= more


TEST_OF_THE_CALLER = """
import pytest, torch

{mark}
def test_of_the_caller():
    torch.rand(1)
    torch.ones(3).sum()
    {last}
"""
LAST_LINES = {
    "done": "pass",
    "failed": "raise ValueError('no')",
    "skipped": "pytest.skip('no')",
    "interrupted": "raise KeyboardInterrupt",
}


@pytest.mark.slow
@pytest.mark.long_cases
@pytest.mark.parametrize("ending", LAST_LINES)
@pytest.mark.usefixtures("own_folder_of_temporary_files")
def test_a_test_that_is_watched_changes_no_more_than_another(ending, pytester):
    def changes_of_a_test(mark):
        last = LAST_LINES[ending]
        text = TEST_OF_THE_CALLER.format(mark=mark, last=last)
        pytester.makepyfile(test_it=text)
        run = pytester.runpytest_inprocess
        run("-q", "-p", "no:cacheprovider", no_reraise_ctrlc=True)
        return kinds_of_changes(
            lambda: run("-q", "-p", "no:cacheprovider", no_reraise_ctrlc=True), []
        )

    ours = changes_of_a_test("@pytest.mark.leak_free(epochs=6)")
    theirs = changes_of_a_test("")

    assert ours <= theirs


@pytest.fixture
def rows():
    x = torch.randn(16, WIDTH)
    return [{"x": row, "labels": row.sum()} for row in x]


class Labelled(nn.Module):
    """A model of a trainer's."""

    def __init__(self, failure):
        super().__init__()
        self.layer, self.code = nn.Linear(WIDTH, 1), Code(failure, 4)
        self.steps = 0

    def forward(self, x, labels):
        self.steps += 1
        self.code.run(self.steps)
        return {"loss": (self.layer(x).squeeze(1) - labels).pow(2).mean()}


def callback_of(module):
    return module.LeakCallback(loaderkit.LeakDetector("cpu", on_leak="warn"))


def fit_with_lightning(model, rows, folder, *, is_watched):
    import lightning

    from loaderkit.integrations import lightning as ours

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = quiet_lightning(
        folder,
        max_epochs=3,
        callbacks=[callback_of(ours)] if is_watched else [],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=8))


def fit_with_transformers(model, rows, folder, *, is_watched):
    import transformers

    from loaderkit.integrations import transformers as ours

    settings = quiet_settings(folder, num_train_epochs=3)
    callbacks = [callback_of(ours)] if is_watched else []
    transformers.Trainer(
        model, settings, train_dataset=rows, callbacks=callbacks
    ).train()


@pytest.mark.slow
@pytest.mark.long_cases
@pytest.mark.needs("lightning")
@pytest.mark.needs("transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ending", FAILURES)
@pytest.mark.parametrize("fit", [fit_with_lightning, fit_with_transformers])
@pytest.mark.usefixtures("own_folder_of_temporary_files")
def test_a_training_that_is_watched_changes_no_more(fit, ending, rows, tmp_path):
    def changes_of_a_training(*, is_watched):
        model = Labelled(FAILURES[ending])
        own = {"model": model, "rows": rows}
        return kinds_of_changes(
            lambda: fit(model, rows, tmp_path, is_watched=is_watched), own
        )

    # What the first training of a process imports stays.
    changes_of_a_training(is_watched=True)
    ours = changes_of_a_training(is_watched=True)
    theirs = changes_of_a_training(is_watched=False)

    assert ours <= theirs
