"""Law: a plan over a stream of events takes what batches of PyG's loader take."""

import pytest
import torch
import torch_geometric
from torch_geometric.data import TemporalData
from torch_geometric.loader import TemporalDataLoader

from loaderkit import MicroBatcher, plan_batch
from loaderkit.budget.batch.samples import read_samples
from loaderkit.budget.step.measure import measure_step
from loaderkit.budget.step.train_step import Step
from loaderkit.errors import LoaderkitError

NODES = 50


def stream(count, width=8):
    return TemporalData(
        src=torch.arange(count) % NODES,
        dst=(7 * torch.arange(count)) % NODES,
        t=torch.arange(count),
        msg=torch.ones(count, width),
    )


class Memory(torch.nn.Module):
    """Scores events by what it keeps of their nodes, as temporal networks do."""

    def __init__(self, width, by_number):
        super().__init__()
        self.by_number = by_number
        self.nodes = torch.nn.Embedding(NODES, 16)
        self.score = torch.nn.Linear(32 + width, 1)

    def forward(self, batch):
        kept = self.nodes.weight
        places = torch.arange(NODES)
        if self.by_number:
            places = torch.zeros(NODES, dtype=torch.long)
            places[batch.n_id] = torch.arange(len(batch.n_id))
            kept = self.nodes(batch.n_id).relu()
        ends = [kept[places[batch.src]], kept[places[batch.dst]]]
        return self.score(torch.cat([*ends, batch.msg], -1))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 64])
@pytest.mark.parametrize("by_number", [False, True])
def test_a_stream_of_events_is_planned_by_its_events(width, by_number):
    events, model = stream(400, width), Memory(width, by_number)

    plan = plan_batch(model, events, "cpu", limit="1 MiB", batch_size=200)

    predicted = plan.predict_peaks([[200]])[0]
    for batch in TemporalDataLoader(events, batch_size=200):
        truth = max(measure_step(model, batch, Step()).values())
        assert predicted == pytest.approx(truth, rel=0.02 if not by_number else 0.25)
        assert truth <= plan.configurations[0].peak


def test_the_worst_batch_of_a_stream_is_the_window_with_the_most_nodes():
    generator = torch.Generator().manual_seed(5)
    for length in (1, 2, 7, 40):
        ends = torch.randint(0, 9, (2, length), generator=generator)
        events = TemporalData(src=ends[0], dst=ends[1], t=torch.arange(length))
        samples = read_samples(events)
        for size in range(1, length + 1):
            rows = samples.worst_rows(None, size)

            counts = [
                len(ends[:, start : start + size].unique())
                for start in range(length - size + 1)
            ]
            assert len(samples.join(rows).n_id) == max(counts)
            assert rows == list(range(rows[0], rows[0] + size))


@pytest.mark.slow
def test_parts_of_a_stream_and_its_loader_are_answered_with_the_stream():
    events, model = stream(200), Memory(8, by_number=False)
    loader = TemporalDataLoader(events, batch_size=50)
    for given in (loader, list(loader), [events[row] for row in range(20)]):
        with pytest.raises(LoaderkitError) as raised:
            plan_batch(model, given, "cpu")

        names = {"model": model, "dataset": given, "loader": loader, "device": "cpu"}
        names |= {"torch": torch, "torch_geometric": torch_geometric}
        assert eval(raised.value.fix, {"plan_batch": plan_batch, **names}).ok


def test_a_step_over_events_in_pieces_is_the_whole():
    events, model = stream(NODES), Memory(8, by_number=True)
    events = next(iter(TemporalDataLoader(events, batch_size=NODES)))
    assert len(events.n_id) == len(events)  # which is not to be cut
    whole = model(events).mean().detach()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)

    result = MicroBatcher(model, sgd, micro_batch=15).step(events)

    assert result.pieces == 4
    assert float(result.loss) == pytest.approx(float(whole), rel=1e-5)
