"""Figures made up for the tables of commands that measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rich.console import Console

from decoders.bench.advice import Advice, Outlook
from decoders.bench.figures import Spread, StageFigures, StepTimes
from decoders.bench.load import LoadResult
from decoders.bench.measurement import Measurement
from decoders.bench.records import Record
from decoders.bench.tables import fitting, load_table
from decoders.bench.verdict import verdicts
from decoders.cli import bench_run, demo, doctor, prepare, train_drafters
from decoders.cli.generate import show_report
from decoders.cli.prepare import print_advice as print_of
from decoders.costs import CostCurve, CostPoint, Subject
from decoders.enabling import Calibration, StrategyCost, Warmup, WarmupPart
from decoders.engine.decode.calibration import NODES
from decoders.engine.model.facts import Invariance
from decoders.report import Report, Stage, Timings

#: Tokens per second of a round, and tokens per step.
SPEEDS = {
    "transformers": (30, 1.0),
    "transformers-prompt-lookup": (34, 1.9),
    "autoregressive": (41, 1.0),
    "auto": (63, 2.4),
}


def record(method: str, kind: str, batch: int, factor: float) -> Record:
    """Three rounds, of which each is a little slower than the one before; the baseline is always the same."""
    ours, plain = not method.startswith("transformers"), method == "transformers"
    speed, length = SPEEDS.get(method, (38.0, 1.7))
    speeds = [30.0] * 3 if plain else [speed * factor * share for share in (1.02, 1.0, 0.97)]
    samples = [
        Measurement(f"{kind}-01", repeat, 0, 64 / value, 0.0, 0, 64, 0.02) for repeat, value in enumerate(speeds)
    ]
    result = Record(
        method, "float32", batch, kind, ours=ours, samples=samples, identical=True, baseline="transformers",
        tokens_per_second=Spread.of(speeds), ratio=Spread.of([value / 30 for value in speeds]),
        first_token=Spread.of([0.0213]), accepted_length=length, prompt_tokens=212, looping=0.07, first_call=2.31,
        second_call=1.04, compile_seconds=12.4 if ours else 0.0, compilations=3, recompilations=0, compiled_share=1.0,
        peak_memory=1_300 << 20, memory_added=210 << 20, cache_bytes=24 << 20, cold_first_token=1.27,
        prefill=Spread.of([0.0187]), step_ms=StepTimes(24.4, 0.31, 0.0, 22.9, 0.4, 0.79) if ours else StepTimes(33.3),
        outside_core=0.061, overhead=0.048, bandwidth_fraction=0.71,
    )  # fmt: skip
    if method.startswith("speculative"):
        result.settings, result.draft_passes = {"speculative": {"length": 2, "tree": "static"}}, 2.0
        result.stages = [StageFigures("/models/draft", 0, "ngram", 2.0, 1.4, 0.31)]
    return result


def records(
    kinds: tuple[str, ...] = ("instruct:edit", "instruct:story"), batches: tuple[int, ...] = (1,)
) -> list[Record]:
    methods = (*SPEEDS, "speculative[length=2,tree=static,nodes=8,children=4]")
    made = [
        record(method, kind, batch, 1.6 if kind in ("copy", "instruct:edit") else 0.9)
        for batch in batches
        for kind in kinds
        for method in methods
    ]
    absent = [
        Record(name, "float32", batch, kind, "skipped", "there are no heads for this model", ours=True)
        for batch in batches
        for kind in kinds
        for name in ("medusa", "eagle3")
    ]
    made[-1].identical, made[-1].difference = False, "story-01, row 0, new token 41"
    made[-1].leading, made[-1].compared = 41, 64
    return made + absent


def print_bench(console: Console, details: bool = False, batches: tuple[int, ...] = (1,)) -> None:
    run = bench_run.Run(cast(Any, SimpleNamespace(suite=None)), console, measured=records(batches=batches))
    for part in run.tables(details, console.width):
        console.print(part)


def print_suite(console: Console) -> None:
    kinds = ("writing", "roleplay", "math_reasoning", "summarization", "translation", "qa", "rag")
    greedy = [replace(r, plain_ratio=r.ratio and Spread.of([r.ratio.median * 30 / 41])) for r in records(kinds)]
    drawn = [replace(r, temperature=1.0) for r in greedy]
    run = bench_run.Run(cast(Any, SimpleNamespace(suite="spec-bench")), console, measured=[*greedy, *drawn])
    for part in run.tables(False, console.width):
        console.print(part)


def print_advice(console: Console) -> None:
    measured = [r for r in records(("copy", "code")) if r.status == "ok"]
    compiled = [replace(r, compiled_share=1.0) for r in measured if r.method in ("transformers", "auto")]
    outlooks = (Outlook("A draft model", 2.6, "one of a 10th of the time that is right 70% of the time"),)
    (verdict,) = verdicts(compiled)
    uncompiled = [replace(r, compiled_share=0.0) for r in measured]
    machine = {"cpu": "Some CPU", "threads": 2, "device": "cpu"}
    every, weights = (*uncompiled, *compiled), {"int8": 1.4}
    print_of(Advice(verdict, 1.24, outlooks, 87.3, 64, 2, every, "", 3, machine, weights), console)


def print_calibration(console: Console) -> None:
    subject = Subject(
        model="llama", dtype="float32", quantization="", device="cpu", threads=2, attention="sdpa", torch="2"
    )
    points = [
        CostPoint(rows=rows, context=context, nodes=nodes, compiled=False, seconds=(20 + 1.37 * nodes * rows) / 1e3)
        for rows in (1, 8)
        for context in (64, 2048)
        for nodes in NODES
    ]
    costs = (
        StrategyCost("prompt_lookup", 0.000123, 0.000004, 0.0213),
        StrategyCost("token_recycling", 0.0007, 0.0002, 0.029),
    )
    done = Calibration(CostCurve(subject=subject, points=tuple(points)), None, costs, Path("costs.json"))
    console.print(prepare._curves(done))
    console.print(prepare._strategies(done))


def print_load(console: Console) -> None:
    firsts, latencies = [0.2, 0.4, 1.3], [0.9, 1.4, 12.5]
    results = [
        LoadResult("scheduler, prompt_lookup", 14.2, 1_900, firsts, latencies, [0.0123, 0.0171, 0.0234]),
        LoadResult("transformers, batches", 31.0, 1_900, [], [12.0, 22.0, 31.0]),
    ]
    for table in fitting(load_table(results, 10.0, "demo, 40 requests, at once, 8 rows"), console.width):
        console.print(table)


def print_report(console: Console) -> None:
    timings = Timings(prepare=0.68, pack=0.58, core=0.52, check=0.51, host=0.06, prefill=0.04, propose=0.03)
    report = Report(
        "prompt_lookup+speculative", same_bits=True, prompt_tokens=[7], new_tokens=[64], steps=29, compiled_steps=11, drafted=80,
        accepted=35, accepted_lengths=[21, 3, 0, 2, 0, 0, 0, 0, 3], timings=timings, time_to_first_token=1.84, compilations=2,
        stages=[Stage("/models/draft", passes=41, tokens=73, forward_seconds=0.02)],
    )  # fmt: skip
    show_report(report, console)


def print_warmup(console: Console) -> None:
    parts = (
        WarmupPart("autoregressive", 1, False, 12.3, 11.9, 2),
        WarmupPart("prompt_lookup+suffix", 8, True, 3.1, 0.0, 0),
    )
    for line in prepare.warmup_lines(Warmup(0.7, 11.9, 2, parts)):
        console.print(line)


def print_training(console: Console) -> None:
    reached = {"reached": [0.712, 0.514, 0.377, 0.271, 0.198, 0.141], "tokens_per_step": 2.87}
    heads = {"top1": [0.612, 0.402, 0.287, 0.214]}
    figures: list[dict[str, Any]] = [
        {
            "held": {"text": heads, "the model's own": heads},
            "trees": {"nodes": 63, "searched": 2.341, "default": 2.187},
        },
        {"parameters": 1_967_104, "held": {"text": reached}, "test": {"text": reached, "the model's own": reached}},
        {"parameters": 1_234_567, "target_parameters": 15_234_567, "greedy": reached, "sampled": reached},
    ]
    for each in figures:
        for line in train_drafters.lines_of(each):
            console.print(line)


def print_findings(console: Console) -> None:
    busy = "2 (torch.set_num_threads, OMP_NUM_THREADS); other processes take the cores: code waits 51% of its time"
    findings = [
        doctor.Finding("python", "ok", "3.11.7"),
        doctor.Finding("threads", "warning", busy),
        doctor.Finding("plugin", "problem", "my-plugin (my-distribution 1.2): it has no strategy"),
        *doctor.enabling(),
        doctor.promise(Invariance(True, ("the branch of a tree",)), "float32", low_precision=False),
        doctor.promise(Invariance(True, ("the branch of a tree",)), "bfloat16", low_precision=True),
    ]
    console.print(doctor.as_table(findings))


def print_demo(console: Console) -> None:
    console.print(demo.overview(records(("copy", "code"))))
