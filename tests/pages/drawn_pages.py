"""Results drawn by a seed, of every kind that has a page: short and long, few and many.

Names are long, right to left, of other scripts, or look like markup; amounts reach from
none to terabytes, runs from a few epochs to hundreds.
"""

import random
from dataclasses import dataclass

import numpy as np
from reported_messages import RAN_OUT

from loaderkit import diagnose_oom
from loaderkit.budget import remedies
from loaderkit.budget.batch.cost_model import BatchBudget, Chance
from loaderkit.budget.batch.plan import BatchConfiguration, BatchPlan
from loaderkit.budget.batch.savings import RemedySaving
from loaderkit.budget.environment.allocator_settings import (
    EnvironmentFacts,
    judge_environment,
)
from loaderkit.budget.environment.settings import Environment
from loaderkit.budget.step.estimate import StepEstimate
from loaderkit.budget.step.history import Moment
from loaderkit.budget.step.peaks import PARTS, PHASES
from loaderkit.budget.step.train_step import device_spec
from loaderkit.cli.examination import Examination
from loaderkit.datasets.inspect import CacheSummary, Field
from loaderkit.datasets.inspect import Histogram as SizeHistogram
from loaderkit.datasets.page import histogram_of
from loaderkit.datasets.sizes import GraphSizes, SampleSizes
from loaderkit.leaks.growth import Growth
from loaderkit.leaks.report import LeakReport
from loaderkit.leaks.trace import Site
from loaderkit.leaks.verdict import judge_counters
from loaderkit.loader.facts import Facts, ReadCost
from loaderkit.loader.options import SettingOverrides
from loaderkit.loader.plan import decide
from loaderkit.memory.counters import WorkerName
from loaderkit.memory.holder import Holder
from loaderkit.memory.machine import Capability, Host
from loaderkit.memory.meter import Mark, Timeline
from loaderkit.memory.reading import MemorySample

KIB, MIB, GIB, TIB = (1 << power for power in (10, 20, 30, 40))
NAMES = (
    "x",
    "loss",
    "model.encoder.layers.11.attention.self.query_key_value",
    "a_name_without_any_blank_in_it_as_generated_code_has_them_" * 3,
    "تدريب النموذج على البيانات",
    "שכבה ראשונה",
    "エンコーダ層の重み",
    "模型.编码器.第十一层.注意力.查询键值权重矩阵的梯度缓存与优化器状态的分配记录",
    "학습 단계의 최대 메모리",
    "Größe der Teilmenge Ω → ∞",
    "<b>bold</b> & \"quoted\" 'twice'",
    "`in backticks`",
    "read the next shard of the training set and join its samples, then send them on",
)
LONG_PATH = "/home/someone/projects/molecules/experiments/2026-11/run_17/train_model.py"
PHASE_LENGTHS = ((100, 3, 120, 2), (1, 1, 1, 1), (2, 90, 2, 90), (300, 0, 300, 60))
"""Moments of forward, loss, backward and step: short ones beside long ones."""


@dataclass
class Draw:
    """A seed's choices."""

    rng: random.Random

    @classmethod
    def of(cls, seed):
        return cls(random.Random(seed))

    def name(self):
        return self.rng.choice(NAMES)

    def amount(self, low=1, high=2 * TIB):
        """Draw bytes, of any order of magnitude."""
        return round(low * (high / low) ** self.rng.random())

    def count(self, *choices):
        return self.rng.choice(choices)


def drawn_results(seed):
    """Make a result of each kind, by the names that pages are known by."""
    draw = Draw.of(seed)
    return {kind: make(draw) for kind, make in MAKERS.items()}


def drawn_report(draw, *, epochs=None, growths=None):
    epochs = epochs or draw.count(6, 12, 30, 120, 500)
    base, rate = draw.amount(MIB, 100 * GIB), draw.amount(100, GIB)
    noise = draw.amount(1, GIB)
    numbers = list(range(epochs + 1))

    def jitter(size):
        return draw.rng.gauss(0, size)

    series = {
        "malloc": (numbers, [base + rate * n for n in numbers]),
        "anonymous": (numbers, [base * 2 + jitter(noise) for _ in numbers]),
        "python_blocks": (numbers, [10**6 + 300.0 * n for n in numbers]),
        "files": (numbers, [7.0] * len(numbers)),
        "threads": (numbers, [float(4 + (n % 7 == 3)) for n in numbers]),
        "mappings": (numbers, [60_000.0 + n for n in numbers]),
        "allocated": (numbers, [0.0] * len(numbers)),
        WorkerName.of(123_456): (numbers, [base + jitter(base / 100) for _ in numbers]),
    }
    chosen = {
        name: readings
        for name, readings in series.items()
        if name == "malloc" or draw.rng.random() < 0.7
    }
    counters = judge_counters(chosen)
    many = growths if growths is not None else draw.count(0, 1, 12)
    return LeakReport(
        verdict=draw.count("leaking", "leaking", "steady", "needs more epochs"),
        epochs=epochs,
        seconds=draw.rng.uniform(0.1, 90_000),
        device=draw.count("cpu", "cuda:0"),
        counters=counters,
        growths=tuple(drawn_growth(draw) for _ in range(many)),
        sites=tuple(drawn_site(draw) for _ in range(draw.count(0, 3))),
        notes=tuple(draw.name() for _ in range(draw.count(0, 2))),
        more_epochs=12,
        limit_bytes=draw.count(None, round(base * 1.2), 900 * TIB),
        limit_from=draw.count("cgroup", "the machine"),
        epochs_left=draw.count(None, 1, 123_456),
        period=draw.count("epoch", "window of 500 ms"),
    )


def drawn_growth(draw):
    holder = Holder(
        "a global variable",
        f'{draw.name()}["{draw.name()}"][3]',
        draw.count("", f"{LONG_PATH}:1234 in {draw.name()}"),
        draw.count("", f"{LONG_PATH}:1234"),
    )
    return Growth(
        draw.count("graph", "longer", "exceptions", "unknown holder"),
        draw.count("list", "dict", "open files"),
        f"Tensor [128, 19] {draw.name()}",
        draw.rng.uniform(0.1, 10_000),
        draw.amount(1, GIB),
        draw.count(None, holder),
    )


def drawn_site(draw):
    lines = tuple(f"{LONG_PATH}:{n} in {draw.name()}" for n in range(draw.count(1, 4)))
    return Site(lines, draw.rng.uniform(1, 5000), draw.amount(1, GIB))


def drawn_history(draw):
    unit = draw.amount(1, GIB)
    held = {part: draw.count(0, 1, 3, 20) for part in PARTS}
    moments = []
    for phase, moments_of_phase in zip(
        PHASES, draw.rng.choice(PHASE_LENGTHS), strict=True
    ):
        for _ in range(moments_of_phase):
            held["activations"] += 1 if phase == "forward" else -1
            held["activations"] = max(held["activations"], 0)
            sizes = tuple(held[part] * unit for part in PARTS)
            forward = draw.count("", f"{LONG_PATH}:321")
            name = draw.count("", f"{draw.name()} (Linear)")
            event = len(moments)
            moments.append(Moment(event, phase, name, forward, sum(sizes), sizes))
    return tuple(moments)


def drawn_estimate(draw, *, modules=None):
    history = drawn_history(draw)
    highest = max(history, key=lambda moment: moment.total)
    parts = dict(zip(PARTS, highest.parts, strict=True))
    count = draw.count(0, 1, 200) if modules is None else modules
    names = [
        f"{draw.name()}.{number} (TransformerEncoderLayer)" for number in range(count)
    ]
    sizes = sorted((draw.amount(1, GIB) for _ in names), reverse=True)
    assumed = [f"{draw.name()} chooses all elements" for _ in range(draw.count(0, 2))]
    return StepEstimate(
        peak=highest.total,
        low=highest.total,
        high=round(highest.total * draw.count(1, 1.5)),
        phase=highest.phase,
        parts=parts,
        phases=dict.fromkeys(PHASES, highest.total),
        modules=dict(zip(names, sizes, strict=True)),
        target=device_spec(draw.count("cpu", "cuda")),
        method="tracked",
        assumptions=assumed,
        reserved=draw.count(None, highest.total),
        seconds=draw.rng.uniform(0.001, 100),
        history=history,
    )


@dataclass
class Priced:
    """What a plan asks of its cost model to draw it."""

    samples: range
    sample_bytes: int

    def worst_peak(self, batch_size):
        return self.sample_bytes * (batch_size + 3)


def drawn_plan(draw, *, batch_size=None):
    batch_size = batch_size or draw.count(1, 2, 64, 1_000_000)
    estimate = drawn_estimate(draw)
    limit = round(max(estimate.peak, 1) * draw.count(0.1, 0.98, 1.01, 30))
    fitting = draw.count(0, max(1, batch_size // 3), batch_size)
    configurations = [
        BatchConfiguration(
            name,
            fitting,
            -(-batch_size // max(fitting, 1)),
            round(limit * 0.9),
            limit,
            device,
            "float32",
            True,
            "default",
            BatchBudget(batch_size=fitting, max_nodes=1_234_567),
        )
        for name, device in (("A (balanced)", "cuda"), ("C (CPU)", "cpu"))
    ]
    savings = [
        RemedySaving(
            remedy,
            round(estimate.peak * share),
            round(estimate.peak * (1 - share)),
            "backward",
        )
        for remedy in remedies.REMEDIES[: draw.count(0, 1, len(remedies.REMEDIES))]
        for share in [draw.rng.uniform(-0.2, 0.9)]
    ]
    chances = {1: Chance(0, 0.001, 0.2), 1000: Chance(0.1, 0.5, 1.0)}
    samples = range(draw.count(1, batch_size, 10 * batch_size))
    return BatchPlan(
        batch_size=batch_size,
        configurations=configurations,
        estimate=estimate,
        cause=f"activations of {draw.name()} are 60 % of the peak",
        savings=savings,
        limit=limit,
        epochs=100,
        chances=chances,
        notes=[draw.name()],
        cost_model=draw.count(None, Priced(samples, max(limit // batch_size, 1))),
    )


def drawn_host(draw):
    return Host(
        cpus=draw.count(1, 128),
        cpus_from=draw.count("the machine", "cgroup quota"),
        available_bytes=draw.amount(MIB),
        available_from=draw.count("cgroup", "the machine"),
        limit_bytes=draw.count(None, draw.amount(MIB)),
        used_bytes=draw.count(None, draw.amount(MIB)),
        oom_kills=draw.count(None, 0, 12_345),
        pressure=draw.count(None, 0.0, 99.5),
        shm_bytes=draw.count(None, draw.amount(MIB)),
        shm_free_bytes=draw.count(None, draw.amount(1)),
        files=draw.count(None, 1024),
        files_open=draw.count(20, 1_000_000),
        mappings=draw.count(None, 65_530),
        local_ranks=1,
    )


def drawn_loader_plan(draw):
    batch_bytes = draw.amount(1, GIB)
    measured = ReadCost(
        samples=32,
        sample_bytes=max(batch_bytes // 8, 1),
        batch_bytes=batch_bytes,
        fetch_s=10 ** draw.rng.uniform(-5, 1),
        sample_s=0.01,
        send_s=10 ** draw.rng.uniform(-5, -1),
        receive_s=10 ** draw.rng.uniform(-5, -1),
        probe_s=draw.count(0.0, 3.0),
    )
    roomy = Host(
        8,
        "affinity",
        900 * TIB,
        "cgroup",
        *(None,) * 4,
        900 * TIB,
        900 * TIB,
        draw.count(None, 1024),
        20,
        65_530,
        1,
    )
    cuda = Capability(
        "cuda", pins=True, asynchronous=True, unified=False, started=False
    )
    facts = Facts(
        roomy,
        cuda,
        samples=draw.count(1, 10**6),
        measured=draw.count(None, measured),
        unmeasured="probe=False",
        gathering=draw.count(True, False),
        largest_bytes=draw.count(None, batch_bytes),
    )
    batching = f"{draw.count(1, 10**6):,} samples, {draw.name()}, 26 batches an epoch"
    return decide(
        facts, SettingOverrides(), batching=batching, batches=draw.count(1, 26)
    )


def drawn_timeline(draw, *, readings=None, stages=None):
    readings = readings or draw.count(2, 40, 3000)
    stages = draw.count(0, 3, 30) if stages is None else stages
    base, seconds = draw.amount(MIB, TIB), 10 ** draw.rng.uniform(-3, 6)
    marks = []
    for index in range(readings):
        label = ""
        if stages:
            stage, position = divmod(index * 2 * stages // readings, 2)
            label = f"{'after' if position else 'before'} {NAMES[stage % len(NAMES)]}"
            label = label if index * 2 * stages % readings < 2 * stages else ""
        values = {
            "anonymous": base + round(draw.rng.gauss(0, base / 10)),
            "resident": 2 * base,
            "threads": 4 + index % 3,
        }
        at_s = seconds * index / readings
        marks.append(Mark(label, at_s, MemorySample(at_s, "cpu", values)))
    return Timeline(tuple(marks))


def drawn_lengths(draw):
    rng = np.random.default_rng(draw.rng.randrange(1000))
    spread = draw.count(0.0, 0.6, 2.5)
    count = draw.count(0, 1, 5000)
    return rng.lognormal(draw.count(0, 3, 12), spread, count).astype(np.int64) + 1


def drawn_graph_sizes(draw):
    nodes = drawn_lengths(draw)
    sizes = GraphSizes(nodes=nodes, edges=3 * nodes, bytes=100 * nodes)
    limits = {
        "max_nodes": draw.count(None, 1, 1_000_000),
        "max_edges": draw.count(None, 200),
    }
    return sizes.page(**limits)


def drawn_sample_sizes(draw):
    tokens = draw.count(None, drawn_lengths(draw))
    nbytes = drawn_lengths(draw) if tokens is None else 8 * tokens
    return SampleSizes(tokens=tokens, bytes=nbytes).page(
        max_tokens=None if tokens is None else draw.count(None, 512)
    )


def drawn_summary(draw):
    lengths = drawn_lengths(draw)
    histograms = ()
    if len(lengths):
        counts, edges = histogram_of(lengths)
        histograms = (SizeHistogram("nodes", counts, edges, float(lengths.mean())),)
    fields = tuple(
        Field(
            f"{draw.name()}.{n}",
            draw.count("tensor", "str", "array"),
            draw.count("float32", "", "int64"),
            draw.count("", "[?, 16, 224, 224]", "[]"),
            draw.amount(),
            draw.count(1, 10**9),
        )
        for n in range(draw.count(0, 1, 60))
    )
    return CacheSummary(
        path=f"/data/{draw.name()}/cache.lk",
        samples=draw.count(0, 1, 10**9),
        kind="Data",
        variants=draw.count(1, 12),
        shards=draw.count(1, 20_000),
        bytes=draw.amount(),
        compression=draw.count(None, "gzip"),
        fields=fields,
        histograms=histograms,
        made_with={"loaderkit": "0.2.0", "torch": "2.13.0"},
    )


def drawn_examination(draw):
    environ = {
        "PYTORCH_CUDA_ALLOC_CONF": draw.count(
            "expandable_segments:true,max_split_size_mb:1",
            "garbage_collection_treshold:2",
        ),
        "OMP_NUM_THREADS": draw.count("0", "999", "many"),
        "MALLOC_ARENA_MAX": "x",
    }
    setting = EnvironmentFacts(environ, (2, 13), "cuda", "linux", cpus=8)
    findings = draw.count([], judge_environment(setting))
    readings = {
        name: draw.amount()
        for name in ("allocated", "reserved", "device_free", "device_limit")
    }
    devices = draw.count(
        {}, {"cuda:0": {**readings, "driver": "NVML is not installed"}}
    )
    versions = {"python": "3.11.2", "torch": "2.13.0", "torch-geometric": "absent"}
    return Examination(
        drawn_host(draw),
        versions,
        devices,
        Environment(setting, findings),
        drawn_loader_plan(draw),
    )


def drawn_diagnosis(draw):
    return diagnose_oom(draw.rng.choice(RAN_OUT).text)


MAKERS = {
    "leak": drawn_report,
    "step": drawn_estimate,
    "plan": drawn_plan,
    "loader": drawn_loader_plan,
    "meter": drawn_timeline,
    "graphs": drawn_graph_sizes,
    "samples": drawn_sample_sizes,
    "cache": drawn_summary,
    "doctor": drawn_examination,
    "diagnosis": drawn_diagnosis,
}
