"""A run that Hugging Face's Trainer goes on with in the middle of an epoch."""

import itertools

import pytest
import torch

import loaderkit

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
        settings = transformers.TrainingArguments(
            output_dir=tmp_path,
            num_train_epochs=2,
            per_device_train_batch_size=4,
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="steps",
            save_steps=9,
            report_to=[],
            disable_tqdm=True,
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
        settings = transformers.TrainingArguments(
            output_dir=tmp_path,
            num_train_epochs=8,
            gradient_accumulation_steps=accumulated,
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="steps",
            save_steps=13,
            report_to=[],
            disable_tqdm=True,
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
