"""A fourth table, of trainers, PyG, metrics and mocks; written blind, and run once.

As in ``leak_cases``; nothing of the detector was changed between writing and running.
"""

import asyncio
import contextlib
import copy
import cProfile
import io
import itertools
import logging
import logging.handlers
import multiprocessing
import queue
import types
import unittest.mock
import uuid
from concurrent.futures import ProcessPoolExecutor

import h5py
import networkx
import numpy as np
import pyarrow
import torch
from leak_cases import CaseTable, mlp, scratch
from scipy import sparse
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader as GraphLoader

CASES = CaseTable()
leak, calm = CASES.leak, CASES.lookalike


def graph(nodes=30):
    edges = torch.randint(nodes, (2, 4 * nodes))
    return Data(x=torch.randn(nodes, 16), edge_index=edges)


def training(model, batch=16, width=64):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        loss = model(torch.randn(batch, width)).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


# ---- leaks


@leak("cycle", "batches")
def an_endless_cycle_over_a_stream():
    batches = itertools.cycle(torch.randn(32, 64) for _ in itertools.count())  # grows
    model = mlp()
    return lambda: model(next(batches)).mean().backward()


@leak("cycle", "batches")
def a_cycle_over_a_shuffled_loader():
    dataset = TensorDataset(torch.randn(40_000, 64))
    batches = itertools.cycle(DataLoader(dataset, batch_size=32, shuffle=True))  # grows
    return lambda: next(batches)[0].sum()


@leak("loss_function", "call_args", "mock_calls", "mock")
def a_mock_that_records_tensors():
    loss_function = unittest.mock.Mock(return_value=torch.zeros(()))
    return lambda: loss_function(torch.randn(40, 64))  # grows


@leak("validation_step_outputs")
def outputs_of_a_lightning_module():
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.validation_step_outputs = []

        def validation_step(self, batch):
            logits = self.net(batch).detach()
            self.validation_step_outputs.append((batch, logits))  # grows
            return logits

    model = Model()
    return lambda: model.validation_step(torch.randn(40, 64))


@leak("value", "metric", "CatMetric")
def a_metric_that_is_never_reset():
    import torchmetrics

    metric = torchmetrics.CatMetric()
    return lambda: metric.update(torch.randn(2000))  # grows


@leak("preds", "target", "metric", "Spearman")
def a_correlation_that_is_never_reset():
    import torchmetrics

    metric = torchmetrics.SpearmanCorrCoef()
    return lambda: metric.update(torch.randn(1200), torch.randn(1200))  # grows


@leak("_models", "_optimizers", "_dataloaders", "_schedulers", "accelerator")
def an_accelerator_that_prepares_every_step():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)

    def step():
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)  # grows
        accelerator.backward(model(torch.randn(8, 64)).mean())
        optimizer.step()

    return step


@leak("log_history", "state")
def logits_in_the_history_of_a_trainer():
    from transformers import TrainerState

    state = TrainerState()
    model = mlp()

    def step():
        x = torch.randn(40, 64)
        state.log_history.append({"loss": model(x).mean().item(), "inputs": x})  # grows

    return step


@leak("metrics", "logger", "experiment")
def a_csv_logger_that_is_never_saved():
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(scratch())
    names = [f"layer {number} gradient norm" for number in range(100)]

    def step():
        values = torch.rand(100).tolist()
        logger.experiment.log_metrics(dict(zip(names, values, strict=True)))  # grows

    return step


@leak("averaged", "snapshots")
def averaged_models_kept():
    snapshots = []
    model = mlp()
    train = training(model)

    def step():
        train()
        snapshots.append(torch.optim.swa_utils.AveragedModel(model))  # grows

    return step


@leak("dataset", "pool", "ConcatDataset")
def a_dataset_that_is_joined_with_new_ones():
    pool = {"dataset": TensorDataset(torch.randn(10, 64))}

    def step():
        new = TensorDataset(torch.randn(20, 64))
        pool["dataset"] = ConcatDataset([pool["dataset"], new])  # grows
        return len(pool["dataset"])

    return step


@leak("kept", "first_graphs", "features")
def one_graph_of_each_batch():
    graphs = [graph() for _ in range(64)]
    loader = GraphLoader(graphs, batch_size=16, shuffle=True)
    first_graphs = []

    def step():
        for batch in loader:
            first_graphs.append(batch[0])  # grows
            break

    return step


@leak("embeddings")
def embeddings_by_number_of_nodes():
    embeddings = {}
    count = itertools.count()
    net = nn.Linear(16, 16)

    def step():
        batch = Batch.from_data_list([graph() for _ in range(4)])
        for row in net(batch.x).detach():
            embeddings[next(count)] = row  # grows

    return step


@leak("data", "_node_store_dict", "_mapping", "HeteroData")
def types_added_to_one_graph():
    data = HeteroData()
    count = itertools.count()

    def step():
        data[f"shell {next(count)}"].x = torch.randn(60, 16)  # grows

    return step


@leak("transform", "transforms", "layers")
def a_transform_wrapped_every_step():
    class Shift:
        def __init__(self, before):
            self.before = before
            self.offset = torch.randn(1500)

        def __call__(self, x):
            return x + self.offset

    layers = types.SimpleNamespace(transform=None)

    def step():
        layers.transform = Shift(layers.transform)  # grows
        layers.transform(torch.zeros(1500))

    return step


@leak("records", "queue", "QueueHandler")
def records_for_a_listener_that_never_runs():
    records = queue.SimpleQueue()
    logger = logging.getLogger(f"training {uuid.uuid4()}")
    logger.propagate = False
    logger.addHandler(logging.handlers.QueueHandler(records))
    text = "x" * 8000
    return lambda: logger.warning("%s %s", text, uuid.uuid4())  # grows


@leak("Manager", "manager", "process", "rows")
def rows_of_a_manager():
    manager = multiprocessing.Manager()
    rows = manager.list()

    def step():
        rows.append(np.random.rand(2000))  # grows

    step.manager = manager
    return step


SEEN_BY_POOL = []


def remember(row):
    SEEN_BY_POOL.append(row * 2)  # grows
    return len(SEEN_BY_POOL)


@leak("SEEN_BY_POOL", "process", "worker")
def a_pool_whose_worker_remembers():
    pool = ProcessPoolExecutor(1)
    return lambda: pool.submit(remember, np.random.rand(2000)).result()


@leak("_scheduled", "loop", "TimerHandle", "Timer")
def timers_of_an_event_loop():
    loop = asyncio.new_event_loop()

    async def turn():
        await asyncio.sleep(0)

    def step():
        batch = torch.randn(20, 64)
        loop.call_later(3600, batch.sum)  # grows
        loop.run_until_complete(turn())

    return step


@leak("memo", "Memo")
def a_dict_that_fills_what_is_missing():
    class Memo(dict):
        def __missing__(self, key):
            self[key] = np.random.rand(800)  # grows
            return self[key]

    memo = Memo()
    count = itertools.count()
    return lambda: memo[next(count)].sum()


@leak("packed")
def tensors_that_hooks_saved():
    packed = {}
    count = itertools.count()
    model = mlp()

    def pack(tensor):
        number = next(count)
        packed[number] = tensor.detach().clone()  # grows
        return number

    def step():
        with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
            loss = model(torch.randn(16, 64)).mean()
        loss.backward()

    return step


@leak("_optimizer_step_post_hooks", "optimizer", "hook")
def hooks_of_an_optimizer():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        optimizer.register_step_post_hook(  # grows
            lambda *_: before.sum()
        )
        model(torch.randn(4, 64)).mean().backward()
        optimizer.step()

    return step


@leak("network", "_adj", "_node", "Graph", "adj")
def a_network_that_grows():
    network = networkx.Graph()
    count = itertools.count()

    def step():
        for _ in range(15):
            number = next(count)
            network.add_edge(number, number + 1, weight=0.5, kind="bond")  # grows

    return step


@leak("File", "h5", "core")
def a_file_in_memory():
    file = h5py.File("memory.h5", "w", driver="core", backing_store=False)
    rows = file.create_dataset(
        "rows", (0, 1000), maxshape=(None, 1000), chunks=(1, 1000)
    )

    def step():
        rows.resize(len(rows) + 1, axis=0)
        rows[-1] = np.random.rand(1000)  # grows

    return step


@leak("tables", "pyarrow", "arrow")
def arrow_tables_kept():
    tables = []
    return lambda: tables.append(pyarrow.table({"x": np.random.rand(1500)}))  # grows


@leak("matrices")
def sparse_matrices_of_scipy():
    matrices = {}
    count = itertools.count()

    def step():
        matrices[next(count)] = sparse.random(100, 100, 0.1, format="csr")  # grows

    return step


@leak("settings", "SimpleNamespace")
def attributes_of_a_namespace():
    settings = types.SimpleNamespace()
    count = itertools.count()

    def step():
        setattr(settings, f"batch_{next(count)}", torch.randn(30, 64))  # grows

    return step


@leak("profile", "profiler")
def a_profiler_that_is_never_stopped():
    profiler = torch.autograd.profiler.profile(use_kineto=True, record_shapes=True)
    profiler.__enter__()
    train = training(mlp())

    def step():
        for _ in range(5):
            train()

    step.profiler = profiler
    return step


@leak("replay", "episodes")
def episodes_with_values_and_their_graph():
    episodes = []
    model = mlp()

    def step():
        states = torch.randn(16, 64)
        values = model(states)
        episodes.append(
            {"states": states.numpy(), "values": values, "reward": 1.0}
        )  # grows

    return step


@leak("best", "history")
def the_best_models_by_score():
    history = []
    model = mlp()
    train = training(model)

    def step():
        score = train().item()
        history.append((score, copy.deepcopy(model.state_dict())))  # grows
        history.sort(key=lambda pair: pair[0])

    return step


# ---- look-alikes


@calm
def a_cycle_over_a_list():
    batches = itertools.cycle([torch.randn(32, 64) for _ in range(20)])
    return lambda: next(batches).sum()


@calm
def a_cycle_that_saves_one_pass():
    dataset = TensorDataset(torch.randn(1_000, 64))
    batches = itertools.cycle(DataLoader(dataset, batch_size=32, shuffle=True))
    return lambda: next(batches)[0].sum()


@calm
def a_mock_that_is_reset():
    loss_function = unittest.mock.Mock(return_value=torch.zeros(()))
    count = itertools.count()

    def step():
        loss_function(torch.randn(40, 64))
        if next(count) % 10 == 9:
            loss_function.reset_mock()

    return step


@calm
def a_profile_of_the_same_functions():
    profile = cProfile.Profile()
    train = training(mlp())

    def step():
        profile.enable()
        train()
        profile.disable()

    return step


@calm
def a_profiler_with_a_schedule():
    train = training(mlp())

    def step():
        with torch.profiler.profile(record_shapes=True) as profiler:
            train()
        return len(profiler.key_averages())

    return step


@calm
def a_metric_reset_each_epoch():
    import torchmetrics

    metric = torchmetrics.CatMetric()
    count = itertools.count()

    def step():
        metric.update(torch.randn(2000))
        if next(count) % 10 == 9:
            metric.compute()
            metric.reset()

    return step


@calm
def an_accelerator_that_prepared_once():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)

    def step():
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(8, 64)).mean())
        optimizer.step()

    return step


@calm
def losses_in_the_history_of_a_trainer():
    from transformers import TrainerState

    state = TrainerState()
    train = training(mlp())
    count = itertools.count()

    def step():
        loss = train().item()
        if next(count) % 10 == 9:
            state.log_history.append({"loss": loss, "epoch": 1.0})

    return step


@calm
def a_csv_logger_saved_each_epoch():
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(scratch())
    count = itertools.count()

    def step():
        logger.log_metrics({"loss": float(torch.rand(()))}, step=next(count))
        if next(count) % 10 == 9:
            logger.save()
            logger.experiment.metrics.clear()

    return step


@calm
def one_averaged_model():
    model = mlp()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    train = training(model)

    def step():
        train()
        averaged.update_parameters(model)

    return step


@calm
def graphs_of_changing_size_batched():
    sizes = np.random.default_rng(0)
    net = nn.Linear(16, 16)

    def step():
        graphs = [graph(int(size)) for size in sizes.integers(5, 60, 16)]
        batch = Batch.from_data_list(graphs)
        net(batch.x).sum().backward()
        return batch.to_data_list()[0]

    return step


@calm
def rows_of_a_manager_cleared():
    manager = multiprocessing.Manager()
    rows = manager.list()

    def step():
        rows.append(np.random.rand(2000))
        if len(rows) == 10:
            rows[:] = []

    step.manager = manager
    return step


@calm
def a_pool_that_remembers_nothing():
    pool = ProcessPoolExecutor(1)
    return lambda: pool.submit(np.sum, np.random.rand(2000)).result()


@calm
def timers_that_ran():
    loop = asyncio.new_event_loop()

    async def turn():
        await asyncio.sleep(0.001)

    def step():
        batch = torch.randn(20, 64)
        loop.call_later(0.0005, batch.sum)
        loop.run_until_complete(turn())

    return step


@calm
def a_memo_of_sixty_keys():
    class Memo(dict):
        def __missing__(self, key):
            self[key] = np.random.rand(800)
            return self[key]

    memo = Memo()
    draw = np.random.default_rng(0)
    return lambda: memo[int(draw.integers(60))].sum()


@calm
def saved_tensors_popped():
    packed = {}
    count = itertools.count()
    model = mlp()

    def pack(tensor):
        number = next(count)
        packed[number] = tensor.detach().clone()
        return number

    def step():
        with torch.autograd.graph.saved_tensors_hooks(pack, packed.pop):
            loss = model(torch.randn(16, 64)).mean()
        loss.backward()

    return step


@calm
def anomaly_detection():
    train = training(mlp())

    def step():
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            train()

    return step


@calm
def a_network_built_anew():
    def step():
        network = networkx.gnm_random_graph(50, 120)
        return networkx.number_connected_components(network)

    return step


@calm
def a_file_in_memory_closed():
    def step():
        options = {"driver": "core", "backing_store": False}
        with h5py.File("memory.h5", "w", **options) as file:
            file["rows"] = np.random.rand(1000)
            return file["rows"][:].sum()

    return step


@calm
def arrow_tables_dropped():
    return lambda: pyarrow.table({"x": np.random.rand(1500)}).num_rows


@calm
def output_redirected():
    def step():
        with contextlib.redirect_stdout(io.StringIO()) as text:
            print(torch.randn(100, 10))
        return text.getvalue()

    return step


@calm
def weights_with_a_norm():
    net = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
    return training(net)


@calm
def a_model_moved_between_types():
    model = mlp()

    def step():
        model.double()
        model(torch.randn(4, 64, dtype=torch.float64)).mean().backward()
        model.float()
        model.zero_grad()

    return step
