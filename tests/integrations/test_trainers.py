"""The callbacks in real trainers, on the CPU, each with a leak planted and without."""

import pytest
import torch
from quiet_trainer import quiet_settings

import loaderkit


@pytest.fixture
def rows():
    x = torch.randn(40, 8)
    return [{"x": row, "labels": row.sum()} for row in x]


class Model(torch.nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.keep = keep
        self.retained = []

    def forward(self, x, labels):
        loss = (self.layer(x).squeeze(1) - labels).pow(2).mean()
        if self.keep:
            self.retained.append(torch.randn(5000) + loss.detach())
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.needs("lightning")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keep", [False, True])
def test_the_lightning_callback_finds_the_planted_leak_and_no_other(
    keep, rows, tmp_path
):
    import lightning

    from loaderkit.integrations.lightning import LeakCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model(keep)

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    reports = []
    callback = LeakCallback(loaderkit.LeakDetector("cpu", on_leak=reports.append))
    trainer = lightning.Trainer(
        max_epochs=12,
        accelerator="cpu",
        callbacks=[callback],
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )

    trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=8))

    assert [report.leaking for report in reports] == [True] * keep, callback.report
    assert callback.report.epochs == 12
    assert ("retained" in str(callback.report)) == keep


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keep", [False, True])
def test_the_hugging_face_callback_finds_the_planted_leak_and_no_other(
    keep, rows, tmp_path
):
    import transformers

    from loaderkit.integrations.transformers import LeakCallback

    reports = []
    detector = loaderkit.LeakDetector("cpu", on_leak=reports.append, every=5)
    callback = LeakCallback(detector)
    settings = quiet_settings(tmp_path, num_train_epochs=12)
    trainer = transformers.Trainer(
        Model(keep), settings, train_dataset=rows, callbacks=[callback]
    )

    trainer.train()

    assert [report.leaking for report in reports] == [True] * keep, callback.report
    assert callback.report.epochs == 12
    assert ("retained" in str(callback.report)) == keep
