"""Real trainers take the loader as it is."""

import numpy as np
import pytest
import torch

from loaderkit import build_loader, pack
from loaderkit.errors import LoaderkitError
from loaderkit.testing import assert_same


@pytest.mark.slow
@pytest.mark.needs("accelerate")
@pytest.mark.filterwarnings("ignore")
def test_a_loader_that_accelerate_has_prepared_gives_the_same_batches(cache):
    from accelerate import Accelerator

    loader = build_loader(cache, batch_size=7, shuffle=True, seed=1, num_workers=0)
    wanted = [batch.y.tolist() for batch in loader]
    loader.set_epoch(0)

    prepared = Accelerator(cpu=True).prepare(loader)

    assert isinstance(prepared, torch.utils.data.DataLoader)
    assert [batch.y.tolist() for batch in prepared] == wanted


@pytest.mark.slow
@pytest.mark.needs("lightning")
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_on_it(cache, tmp_path):
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(3, 1), []

        def training_step(self, batch, _):
            self.seen += batch.y.tolist()
            return self.layer(batch.x).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    model = Model()
    loader = build_loader(cache, batch_size=7, shuffle=True, seed=1, num_workers=0)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )

    trainer.fit(model, loader)

    assert sorted(model.seen[:40]) == list(range(40))
    assert sorted(model.seen[40:]) == list(range(40))
    assert model.seen[:40] != model.seen[40:]


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.filterwarnings("ignore")
def test_the_hugging_face_trainer_trains_on_it(tmp_path):
    import transformers

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(3, 1), []

        def forward(self, x, row):
            self.seen += row.tolist()
            return {"loss": self.layer(x).mean()}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            batches = build_loader(
                self.train_dataset, batch_size=8, shuffle=True, seed=1, num_workers=0
            )
            return self.accelerator.prepare(batches)

    rows = [{"x": torch.full((3,), float(i)), "row": i} for i in range(40)]
    model = Model()
    settings = transformers.TrainingArguments(
        output_dir=tmp_path,
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )

    Trainer(model, settings, train_dataset=rows).train()

    assert sorted(model.seen[:40]) == list(range(40))
    assert sorted(model.seen[40:]) == list(range(40))
    assert model.seen[:40] != model.seen[40:]


class Regression(torch.nn.Module):
    """Takes what any of the collators below gives, and keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Embedding(50, 1), []

    def forward(self, input_ids, labels, **_):
        ids = input_ids if torch.is_tensor(input_ids) else input_ids.values
        self.seen.append((ids.clone(), labels.clone()))
        loss = (self.layer(ids).flatten(1).sum(1) - labels).pow(2).mean()
        return {"loss": loss}


def collators():
    """Give Hugging Face's own, and ours, for samples of one length or of several."""
    from tokenizers import Tokenizer, models
    from transformers import (
        DataCollatorWithPadding,
        DefaultDataCollator,
        PreTrainedTokenizerFast,
        default_data_collator,
    )

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1}, unk_token="[PAD]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    return {
        "none given": None,
        "default_data_collator": default_data_collator,
        "DefaultDataCollator": DefaultDataCollator(),
        "DataCollatorWithPadding": DataCollatorWithPadding(tokenizer),
    }


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["tensors", "arrays", "lists"])
def test_the_hugging_face_trainer_sees_a_packed_dataset_as_a_list(tmp_path, kind):
    import transformers

    make = {"tensors": torch.tensor, "arrays": np.array, "lists": list}[kind]
    for name, collator in collators().items():
        ragged = name == "DataCollatorWithPadding"
        rows = [
            {"input_ids": make([1 + i] * (2 + i % 3 * ragged)), "labels": float(i)}
            for i in range(12)
        ]
        packed = pack(rows, tmp_path / f"{name}.lk", workers=0)
        seen = []
        for data in (rows, packed):
            model = Regression()
            settings = transformers.TrainingArguments(
                output_dir=tmp_path,
                max_steps=3,
                per_device_train_batch_size=4,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_strategy="no",
                seed=3,
            )
            transformers.Trainer(
                model, settings, train_dataset=data, data_collator=collator
            ).train()
            seen.append(model.seen)
        assert_same(seen[1], seen[0], name)


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.filterwarnings("ignore")
def test_the_hugging_face_trainer_takes_padded_batches(tmp_path):
    import transformers

    rows = [{"input_ids": torch.arange(1 + i % 4), "labels": i / 2} for i in range(8)]
    packed = pack(rows, tmp_path / "c.lk", workers=0)
    model = Regression()
    settings = transformers.TrainingArguments(
        output_dir=tmp_path,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )

    transformers.Trainer(
        model, settings, train_dataset=packed, data_collator=packed.collate
    ).train()

    assert sorted(torch.cat([labels for _, labels in model.seen]).tolist()) == [
        i / 2 for i in range(8)
    ]


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("name", ["Bert", "Roberta", "Llama", "DistilBert", "GPT2"])
def test_a_model_that_is_given_a_padded_field_is_told_what_it_takes(tmp_path, name):
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "DistilBert":
        sizes = {"dim": 8, "n_layers": 1, "n_heads": 2}
    config = getattr(transformers, f"{name}Config")(vocab_size=20, **sizes)
    model = getattr(transformers, f"{name}Model")(config).eval()
    ids = [torch.arange(1, n + 2) for n in (2, 5, 3)]
    rows = pack([{"input_ids": row} for row in ids], tmp_path / "rows.lk")
    padded = rows.batch([0, 1, 2])["input_ids"]

    for call in (lambda: model(padded), lambda: model(input_ids=padded)):
        with pytest.raises(LoaderkitError) as caught:
            call()
        fix = caught.value.fix
        assert "padded.values, attention_mask=padded.mask)" in fix
    # Followed to the letter, it is what the model gives of each text alone.
    of_batch = model(input_ids=padded.values, attention_mask=padded.mask)
    if name not in {"Llama", "GPT2"}:  # their padding is after all words
        for row, values in enumerate(ids):
            alone = model(input_ids=values[None]).last_hidden_state[0]
            beside = of_batch.last_hidden_state[row, : len(values)]
            torch.testing.assert_close(beside, alone, rtol=1e-4, atol=1e-5)
