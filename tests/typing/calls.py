"""Calls that a type checker must accept, and such that it must refuse.

Nothing here runs: tox gives the file to mypy, and ``tox -e pyright`` to pyright.  A
wrong call carries the error that it must have; a checker that accepts it calls the
comment unused.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from typing_extensions import assert_type

import loaderkit
from loaderkit.budget.batch.plan import BatchPlan
from loaderkit.budget.step.estimate import StepEstimate
from loaderkit.dataset_protocol import CachedSamples
from loaderkit.leaks.report import LeakReport
from loaderkit.loader.plan import LoaderPlan
from loaderkit.loader.planned import PlannedLoader


class GraphLike:
    """With the methods of PyG's ``Data``, which mypy does not see."""

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any: ...
    def __cat_dim__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any: ...


dataset = [torch.zeros(3), torch.ones(3)]
model = torch.nn.Linear(3, 1)


def right_options_of_a_loader() -> None:
    loader = loaderkit.build_loader(
        dataset,
        "cuda",
        batch_size=32,
        shuffle="block",
        seed=0,
        num_workers="auto",
        drop_last=True,
    )
    assert_type(loader.plan, LoaderPlan)
    assert loader.plan.num_workers + 1 > 2 * loader.plan.num_workers % 7
    loaderkit.build_loader(dataset, torch.device("cpu"), max_nodes=10_000)
    loaderkit.build_loader(dataset, sampler=torch.utils.data.SequentialSampler(dataset))
    loaderkit.build_loader(dataset, batch_sampler=[[0, 1]], collate_fn=list)
    loaderkit.build_loader(dataset, collate_fn=lambda samples: len(samples))
    loaderkit.build_loader(dataset, batch_transform=lambda batch: batch)


def the_dataset_of_a_loader(clips: "Clips", loader: PlannedLoader) -> None:
    of_list = loaderkit.build_loader(dataset)
    assert_type(len(of_list.dataset), int)
    assert_type(of_list.dataset[0], torch.Tensor)
    of_clips = loaderkit.build_loader(clips, batch_size=2)
    assert_type(of_clips.dataset, Clips)
    assert_type(of_clips.dataset[0]["x"], torch.Tensor)
    assert of_clips.dataset.nothing  # type: ignore[attr-defined]
    len(loader.dataset)
    as_torch: torch.utils.data.DataLoader[Any] = of_clips
    assert as_torch is not None


def one_variable_for_loaders_of_several_kinds(clips: "Clips") -> None:
    loader: PlannedLoader = loaderkit.build_loader(clips, batch_size=2)
    loader = loaderkit.build_loader(dataset)
    loader = loaderkit.build_loader(loaderkit.open_cache("molecules.lk"))
    len(loader.dataset)
    # Without the annotation its kind is that of the first.
    of_clips = loaderkit.build_loader(clips)
    of_clips = loaderkit.build_loader(dataset)  # type: ignore[arg-type]
    assert of_clips is not None


def graphs_of_a_cache() -> None:
    graphs = loaderkit.SafeGraphDataset(cache="molecules.lk")
    assert_type(graphs.num_classes, int)
    torch.nn.Linear(graphs.num_features, graphs.num_classes)
    opened = loaderkit.open_cache("molecules.lk")
    # Of any samples: that they are graphs is known when the cache is there.
    assert opened.num_classes  # type: ignore[attr-defined]
    if isinstance(opened, loaderkit.SafeGraphDataset):
        torch.nn.Linear(opened.num_features, opened.num_classes)


def losses_as_lambdas(batch: torch.Tensor) -> None:
    loaderkit.estimate_step(model, batch, loss=lambda output: output.sum())
    loaderkit.estimate_step(model, batch, loss=lambda output, x: (output - x).sum())
    loaderkit.estimate_step(model, batch, loss=torch.nn.functional.mse_loss)
    loaderkit.estimate_step(model, batch, loss=torch.nn.MSELoss())
    loaderkit.assert_fits(model, batch, "1 GiB", loss=lambda output: output.sum())
    loaderkit.plan_batch(model, dataset, "cpu", loss=lambda output, x: output.sum())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loaderkit.MicroBatcher(model, sgd, lambda output, x: (output - x).sum())
    loaderkit.MicroBatcher(model, sgd, loss=lambda output: output.sum())
    loaderkit.estimate_step(model, batch, loss="mse")  # type: ignore[arg-type]


def wrong_options_of_a_loader() -> None:
    loaderkit.build_loader(dataset, batchsize=32)  # type: ignore[call-arg]
    loaderkit.build_loader(dataset, batch_size="32")  # type: ignore[arg-type]
    loaderkit.build_loader(dataset, shuffle="blocks")  # type: ignore[arg-type]
    loaderkit.build_loader(dataset, oversized="drop")  # type: ignore[arg-type]
    loaderkit.build_loader(dataset, seed="0")  # type: ignore[arg-type]
    loaderkit.build_loader(dataset, 32)  # type: ignore[arg-type]
    loaderkit.build_loader()  # type: ignore[call-arg]


def packed_samples_keep_their_type(folder: str, words: list[dict[str, int]]) -> None:
    packed = loaderkit.pack(dataset, "cache", workers=0, compression="gzip")
    assert_type(packed, loaderkit.SafeDataset[torch.Tensor])
    assert_type(packed[0], torch.Tensor)
    assert_type(packed[:3], loaderkit.SafeDataset[torch.Tensor])
    assert_type(packed[[0, 2]], loaderkit.SafeDataset[torch.Tensor])
    assert_type(packed[np.arange(3)], loaderkit.SafeDataset[torch.Tensor])
    dicts = loaderkit.pack(words, "cache")
    assert_type(dicts[0], dict[str, int])
    assert_type(loaderkit.pack(folder, "cache"), loaderkit.SafeDataset[Any])
    assert_type(loaderkit.open_cache(folder), loaderkit.SafeDataset[Any])


def packed_streams_keep_their_type(numbers: Iterator[int]) -> None:
    def words(span: int, spans: int) -> Iterator[str]:
        yield str(span * spans)

    def parts(span: int) -> Iterator[str]:
        yield str(span)

    assert_type(loaderkit.pack(numbers, "cache"), loaderkit.SafeDataset[int])
    assert_type(loaderkit.pack(words, "cache", spans=3), loaderkit.SafeDataset[str])
    loaderkit.pack(words, "cache", spans="3")  # type: ignore[call-overload]
    loaderkit.extend("cache", words, spans=3, workers=2)
    # Whatever else is given has samples of any type.
    assert_type(loaderkit.pack(parts, "cache", spans=3), loaderkit.SafeDataset[Any])


def packed_graphs_have_the_attributes_of_pygs_datasets(graphs: list[GraphLike]) -> None:
    packed = loaderkit.pack(graphs, "cache")
    assert_type(packed, loaderkit.SafeGraphDataset[GraphLike])
    assert_type(packed.num_classes, int)
    _ = loaderkit.pack(dataset, "cache").num_classes  # type: ignore[attr-defined]


def our_datasets_answer_the_whole_protocol(
    samples: loaderkit.SafeDataset[Any], graphs: loaderkit.SafeGraphDataset[Any]
) -> list[CachedSamples]:
    return [samples, graphs]


def right_plans() -> None:
    plan = loaderkit.plan_batch(model, dataset, "cuda", limit="8 GiB", epochs=10)
    assert_type(plan, BatchPlan)
    estimate = loaderkit.estimate_step(model, dataset[0], optimizer=torch.optim.SGD)
    assert_type(estimate, StepEstimate)
    loaderkit.assert_fits(model, dataset[0], "1 GiB", rise=0.02, name="linear")


def wrong_plans() -> None:
    loaderkit.plan_batch(model, dataset)  # type: ignore[call-arg]
    loaderkit.plan_batch(model, dataset, "cuda", limits="8 GiB")  # type: ignore[call-arg]
    loaderkit.plan_batch(model, dataset, "cuda", epochs="10")  # type: ignore[arg-type]
    loaderkit.plan_batch(dataset, model, "cuda")  # type: ignore[arg-type]
    loaderkit.estimate_step(model, dataset[0], optimiser="adam")  # type: ignore[call-arg]
    loaderkit.assert_fits(model, dataset[0], 1.5)  # type: ignore[arg-type]


def caches() -> None:
    packed = loaderkit.pack(dataset, "cache", workers=2, compression="gzip")
    loaderkit.build_loader(packed)
    loaderkit.pack(dataset, "cache", track_files="hash", shard_bytes=1 << 20)
    loaderkit.pack(dataset, "cache", track_files="size")  # type: ignore[call-overload]
    loaderkit.pack(dataset, "cache", worker=2)  # type: ignore[call-overload]
    loaderkit.open_cache("cache", ragged="packed", mirror="mirror")
    loaderkit.open_cache("cache", pad_value={"tokens": -1}, follow_batch=["x"])
    loaderkit.open_cache("cache", checksums="sometimes")  # type: ignore[arg-type]
    loaderkit.open_cache("cache", raged="packed")  # type: ignore[call-arg]
    loaderkit.open_cache("cache", ragged="pack")  # type: ignore[arg-type]
    loaderkit.open_cache("cache", pad_value="0")  # type: ignore[arg-type]


def detectors() -> None:
    def epoch() -> None:
        pass

    detector = loaderkit.LeakDetector("cpu", on_leak="warn")
    assert_type(detector.run(epoch, epochs=30), LeakReport)

    @loaderkit.LeakDetector("cpu")
    def train(steps: int) -> float:
        return float(steps)

    assert_type(train(3), float)
    train("3")  # type: ignore[arg-type]
    loaderkit.LeakDetector("cpu", on_leak="shout")  # type: ignore[arg-type]


def counters() -> None:
    sample = loaderkit.read_memory("cpu")
    assert_type(sample.get("malloc"), int | None)
    assert_type(sample.values["anonymous"], int)
    sample.get("maloc")  # type: ignore[arg-type]
    sample.values["free"]  # type: ignore[index]


class Clips(loaderkit.SafeDataset[dict[str, torch.Tensor]]):
    """Clips of sound."""


def right_choices_of_rows(clips: Clips) -> None:
    assert_type(clips.shuffle(seed=0), Clips)
    assert_type(clips.shuffle(True), tuple[Clips, torch.Tensor])
    assert_type(clips.filter(lambda clip: clip["x"].sum() > 0), Clips)
    assert_type(clips.filter(lambda clip, row: row > 2, with_indices=True), Clips)
    louder = clips.map(lambda clip: {"x": clip["x"] * 2}, cache="louder.lk")
    assert_type(louder, loaderkit.SafeDataset[Any])
    clips.map(lambda clip, row: {"row": row}, True, workers=2, overwrite=True)
    clips.batch([0, 2])
    clips.batch(range(3))
    clips.batch(slice(0, 3))
    clips.batch(np.array([True, False]))
    clips.batch(torch.tensor([0, 2]))


def wrong_choices_of_rows(clips: Clips) -> None:
    clips.shuffle(sed=0)  # type: ignore[call-overload]
    clips.filter(lambda clip: clip["x"], with_index=True)  # type: ignore[call-overload]
    clips.map(len, num_proc=2)  # type: ignore[call-overload]
    clips.batch(3)  # type: ignore[arg-type]
