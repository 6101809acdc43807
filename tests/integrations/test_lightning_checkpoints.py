"""A run that Lightning goes on with from a checkpoint in the middle of an epoch."""

import itertools

import pytest
import torch
from quiet_trainer import quiet_lightning

import loaderkit

SAMPLES = list(range(24))


class Stream(torch.utils.data.IterableDataset):
    """Numbers, shared out among workers, with a length."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(torch.tensor(SAMPLES[first::step]))

    def __len__(self):
        return len(SAMPLES)


class WithoutLength(Stream):
    """Of which Lightning fetches a batch ahead, to know which is the last."""

    def __len__(self):
        raise TypeError


DATASETS = {
    "rows": (SAMPLES, {}),
    "stream": (Stream(), {}),
    "stream without a length": (WithoutLength(), {"lookahead": True}),
}


@pytest.mark.slow
@pytest.mark.needs("lightning")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("dataset", "options"), DATASETS.values(), ids=DATASETS)
def test_it_goes_on_behind_the_last_batch_of_the_checkpoint(
    dataset, options, num_workers, tmp_path
):
    import lightning

    checkpoint = tmp_path / "middle.ckpt"

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen = []

        def training_step(self, batch, _):
            self.seen.append(batch.tolist())
            return self.layer(batch[:, None].float()).mean()

        def on_train_batch_end(self, *_):
            if len(self.seen) == 3 and not checkpoint.exists():
                self.trainer.save_checkpoint(checkpoint)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    def train(path=None):
        module = Module()
        trainer = quiet_lightning(
            tmp_path,
            max_epochs=1,
        )
        loader = loaderkit.build_loader(
            dataset, batch_size=4, num_workers=num_workers, seed=0, **options
        )
        trainer.fit(module, loader, ckpt_path=path)
        return module.seen

    whole = train()
    rest = train(checkpoint)

    assert sorted(itertools.chain(*whole)) == SAMPLES
    assert rest == whole[3:]
