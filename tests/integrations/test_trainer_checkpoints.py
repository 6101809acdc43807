"""A run that Hugging Face's Trainer goes on with in the middle of an epoch."""

import itertools
from collections import Counter

import pytest
import torch
from quiet_trainer import quiet_settings

import loaderkit
from loaderkit.errors import LoaderError

ROWS = [
    {"x": torch.tensor([float(row)]), "labels": torch.tensor(float(row))}
    for row in range(24)
]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def forward(self, x, labels):
        self.seen.append(labels.tolist())
        return {"loss": (self.layer(x).squeeze(1) - labels).pow(2).mean()}


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": "block"}, {}])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_it_goes_on_behind_the_last_batch_of_the_checkpoint(
    is_prepared, options, tmp_path
):
    import transformers

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            loader = loaderkit.build_loader(
                ROWS, batch_size=4, seed=3, num_workers=0, **options
            )
            return self.accelerator.prepare(loader) if is_prepared else loader

    def train(checkpoint=None):
        settings = quiet_settings(
            tmp_path,
            num_train_epochs=2,
            per_device_train_batch_size=4,
            save_strategy="steps",
            save_steps=9,
        )
        model = Model()
        trainer = Trainer(model, settings, train_dataset=ROWS)
        trainer.train(resume_from_checkpoint=checkpoint)
        return model.seen

    whole = train()
    rest = train(tmp_path / "checkpoint-9")  # in the second epoch

    for epoch in (whole[:6], whole[6:]):
        assert sorted(itertools.chain(*epoch)) == list(range(24))
    assert (whole[:6] == whole[6:]) == (not options)
    assert rest == whole[9:]


class Sized(list):
    """Rows of as many nodes as their numbers say."""

    def sizes(self):
        draw = torch.Generator().manual_seed(0)
        return {"nodes": torch.randint(1, 9, (len(self),), generator=draw).numpy()}


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shuffle", ["batches", True])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_epochs_in_batches_by_size_are_whole_where_their_batches_stay_the_same(
    shuffle, accumulated, tmp_path
):
    """The Trainer counts the batches of the first epoch, and trains on as many."""
    import transformers

    rows = Sized(ROWS)

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            loader = loaderkit.build_loader(
                rows, max_nodes=12, shuffle=shuffle, seed=3, num_workers=0
            )
            self.lengths = [len(batch) for batch in loader.batch_sampler]
            return self.accelerator.prepare(loader)

    def train(checkpoint=None):
        settings = quiet_settings(
            tmp_path,
            num_train_epochs=8,
            gradient_accumulation_steps=accumulated,
            save_strategy="steps",
            save_steps=13,
        )
        model = Model()
        trainer = Trainer(model, settings, train_dataset=rows)
        trainer.train(resume_from_checkpoint=checkpoint)
        return model.seen, len(trainer.lengths)

    seen, batches = train()
    epochs = [
        sorted(itertools.chain(*seen[start : start + batches]))
        for start in range(0, len(seen), batches)
    ]

    # Its twin: shuffled samples come in more batches in some epochs than in the first.
    assert (epochs == [list(range(24))] * 8) == (shuffle == "batches")
    if shuffle == "batches":
        steps = -(-batches // accumulated)
        left_in_epoch = 13 % steps * accumulated
        rest, _ = train(tmp_path / "checkpoint-13")
        assert rest == seen[13 // steps * batches + left_in_epoch :]


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("steps_saved", [3, 7])
@pytest.mark.parametrize(
    ("batch_size", "accumulated"), [(4, 1), (2, 1), (8, 1), (4, 2)]
)
def test_a_checkpoint_of_other_batches_is_refused_where_samples_would_be_lost(
    batch_size, accumulated, steps_saved, tmp_path
):
    """Other numbers of processes give other batches, too."""
    import transformers

    from loaderkit.integrations.transformers import WholeEpochs

    def train(batch_size, accumulated, *callbacks, checkpoint=None, **more):
        settings = quiet_settings(
            tmp_path,
            num_train_epochs=3,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulated,
            **more,
        )
        model = Model()
        trainer = transformers.Trainer(
            model, settings, train_dataset=ROWS, callbacks=list(callbacks)
        )
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except LoaderError:
            return None
        return list(itertools.chain(*model.seen))

    steps = {"save_strategy": "steps", "save_steps": steps_saved}
    seen = train(4, 1, WholeEpochs(), **steps)
    path = tmp_path / f"checkpoint-{steps_saved}"
    asked = {"checkpoint": path, "save_strategy": "no"}
    read_on = train(batch_size, accumulated, **asked)
    read_or_refused = train(batch_size, accumulated, WholeEpochs(), **asked)

    is_whole = Counter(seen[: 4 * steps_saved] + read_on) == Counter(seen)
    assert read_or_refused == (read_on if is_whole else None)


@pytest.mark.many_cases(quick=3)
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("shuffle", [False, True, "batches"])
@pytest.mark.parametrize("limits", [{"batch_size": 4}, {"max_nodes": 12}])
def test_a_loader_whose_epochs_are_unlike_is_refused(shuffle, limits):
    import transformers

    from loaderkit.integrations.transformers import WholeEpochs

    if shuffle == "batches" and "batch_size" in limits:
        pytest.skip("refused by build_loader")
    loader = loaderkit.build_loader(Sized(ROWS), shuffle=shuffle, **limits)
    settings = transformers.TrainingArguments("out", use_cpu=True, report_to=[])
    begin = WholeEpochs(loader).on_train_begin
    state, control = transformers.TrainerState(), transformers.TrainerControl()

    if shuffle is True and "max_nodes" in limits:
        with pytest.raises(LoaderError, match="unlike numbers of batches") as raised:
            begin(settings, state, control)
        assert raised.value.fix == 'shuffle="batches"'
    else:
        begin(settings, state, control)
