"""Real trainers take the loader as it is."""

import pytest
import torch

from loaderkit import build_loader


@pytest.mark.needs("accelerate")
@pytest.mark.filterwarnings("ignore")
def test_accelerate_prepares_it(cache):
    from accelerate import Accelerator

    loader = build_loader(cache, batch_size=7, shuffle=True, seed=1, num_workers=0)
    wanted = [batch.y.tolist() for batch in loader]
    loader.set_epoch(0)

    prepared = Accelerator(cpu=True).prepare(loader)

    assert isinstance(prepared, torch.utils.data.DataLoader)
    assert [batch.y.tolist() for batch in prepared] == wanted


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
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip

    trainer.fit(model, loader)

    assert sorted(model.seen[:40]) == list(range(40))
    assert sorted(model.seen[40:]) == list(range(40))
    assert model.seen[:40] != model.seen[40:]


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
        output_dir=tmp_path, num_train_epochs=2, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip

    Trainer(model, settings, train_dataset=rows).train()

    assert sorted(model.seen[:40]) == list(range(40))
    assert sorted(model.seen[40:]) == list(range(40))
    assert model.seen[:40] != model.seen[40:]
