"""What ``decoders bench`` does once its options are read: a plan that is checked, and a run that measures it."""

from __future__ import annotations

import faulthandler
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from .. import bench
from ..bench import Method, Record, Sampling, bandwidth, machine
from ..bench.beside import Request, check_installed, requests
from ..bench.call import vocabulary_size
from ..bench.capacity import SLOTS, CapacityCost, check_capacity
from ..bench.prompts import Content
from ..bench.scaled_shapes import shape_named
from ..bench.shapes import SHAPES
from ..bench.tables import capacity_table, tables
from ..errors import SettingsError, UnknownNameError
from .bench_models import load, other_engines, tokenizers_of
from .bench_options import in_both_tiers, pieces
from .bench_output import dtypes_order, interrupted_by_sigterm, progress_bar
from .console import waiting
from .prompts import read_prompts

#: Prompts as they are read: name, kind, text or messages.
Texts = list[tuple[str, str, Content]]


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        subjects: models, or shapes.
        of_shapes: whether they are shapes.
        draft, assistant_tokenizer, scale, device: of every subject; see the options.
        engines: others with the same weights.
        strategies, baselines: names; None for all.
        strategy_settings: by strategy.
        loop_settings: what was set of the loop.
        compile, capacity: of the loop as well.
        sampling: None is greedy.
        prompts: names of sets or a file; None for those that suit the tokenizer.
        prompt_lengths: of random prompts; None if they are texts.
        limit: most prompts of a kind.
        batches, dtypes, new_tokens, repeats: see the options.
        capacity_only: whether only step times of a small and a large cache are compared.
    """

    subjects: list[str]
    of_shapes: bool
    draft: str | None
    assistant_tokenizer: str | None
    scale: str | None
    device: str | None
    engines: list[Request]
    strategies: list[str] | None
    baselines: list[str] | None
    strategy_settings: dict[str, dict[str, Any]]
    loop_settings: dict[str, Any]
    compile: bool
    capacity: int | None
    sampling: Sampling | None
    prompts: str | None
    prompt_lengths: list[int] | None
    limit: int | None
    batches: list[int]
    dtypes: list[str]
    new_tokens: int
    repeats: int
    capacity_only: bool

    @property
    def config(self) -> dict[str, Any]:
        """Settings of the loop."""
        slots = {"slots": self.capacity} if self.capacity else {}
        return {"compile": self.compile} | slots | self.loop_settings

    def as_dict(self) -> dict[str, Any]:
        """What the JSON file says of it."""
        return {
            "model": None if self.of_shapes else self.subjects[0], "shapes": self.subjects if self.of_shapes else [],
            "draft": self.draft, "scale": self.scale, "beside": [request.name for request in self.engines],
            "new_tokens": self.new_tokens, "repeats": self.repeats, "compile": self.config["compile"],
            "slots": self.capacity, "prompts": self.prompts, "prompt_lengths": self.prompt_lengths,
            "loop": self.loop_settings, "sampling": self.sampling and asdict(self.sampling),
        }  # fmt: skip


def checked_subjects(model: str | None, shapes: Sequence[str] | None, scale: str | None) -> list[str]:
    """The models or shapes to measure: a misspelt name shows before the minutes of loading.

    Raises:
        UnknownNameError: no such shape or size.
    """
    names = pieces(shapes) or [model or "demo"]
    for name in names if shapes is not None else ():
        if name not in SHAPES:
            raise UnknownNameError("shape", name, SHAPES)
    if scale is not None:
        shape_named(scale)
    return names


def checked_engines(beside: Sequence[str] | None, has_draft: bool, sampling: Sampling | None) -> list[Request]:
    """The other engines that are asked for.

    Raises:
        SettingsError: they would draw other tokens. DecodersError: one is unknown or not installed.
    """
    engines = [request for text in pieces(beside) or () for request in requests(text, has_draft)]
    for request in engines:
        check_installed(request.engine)
    if engines and sampling is not None:
        raise SettingsError("--beside compares greedy decoding: other engines draw other tokens")
    if engines and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # an engine that crashes takes the run along: then it is said where
    return engines


def checked_strategies(
    strategies: Sequence[str] | None, of_shapes: bool, tiers: bool, capacity_only: bool
) -> list[str] | None:
    """Names of strategies; None for all. tiers: every one uncompiled, too."""
    if capacity_only:
        return ["autoregressive"]
    names = pieces(strategies)
    if of_shapes:
        names = names or ["autoregressive", "prompt_lookup"]
    return in_both_tiers(names) if tiers else names


@dataclass
class Run:
    """A plan on its way.

    Attributes:
        plan: what is measured.
        console: for progress.
        facts: of the machine.
        records: what was measured.
        capacity_costs: likewise, where only capacities are compared.
        interrupted: whether it was stopped: then the records hold the prompts that every method has decoded.
    """

    plan: Plan
    console: Console
    facts: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    capacity_costs: list[CapacityCost] = field(default_factory=list)
    interrupted: bool = False

    def measure(self) -> None:
        """Measures one subject after the other: nothing of the one before is left in memory."""
        plan = self.plan
        texts = [] if plan.capacity_only or plan.prompts is None else read_prompts(plan.prompts, plan.limit)
        with tempfile.TemporaryDirectory(prefix="decoders-") as folder:
            for name in plan.subjects:
                self._measure_subject(name, texts, Path(folder))
                if self.interrupted:
                    break

    def tables(self) -> list[Table]:
        """What was measured, for people."""
        return [capacity_table(self.capacity_costs)] if self.plan.capacity_only else tables(self.records)

    def as_dict(self) -> dict[str, Any]:
        """What was measured, for programs."""
        result: dict[str, Any] = {"machine": self.facts, "run": self.plan.as_dict()}
        if self.plan.capacity_only:
            return result | {"capacity": [cost.as_dict() for cost in self.capacity_costs]}
        return result | {"records": [record.as_dict() for record in self.records]}

    def _measure_subject(self, name: str, texts: Texts, folder: Path) -> None:
        """folder: where models are written for other engines."""
        methods, tokenizer = self._methods(name, folder)
        self._look_at_machine(methods)
        if self.plan.capacity_only:
            self._compare_capacities(methods)
        else:
            self._take_turns(name, methods, self._groups(methods, tokenizer, texts))
        for method in methods:
            if method.engine is not None:
                method.engine.close()

    def _methods(self, name: str, folder: Path) -> tuple[list[Method], PreTrainedTokenizerBase | None]:
        """What decodes with the subject `name`, in every dtype: they take turns, so all are in memory."""
        plan, methods = self.plan, list[Method]()
        tokenizer: PreTrainedTokenizerBase | None = None
        for dtype in plan.dtypes:
            size = f" at the size of {plan.scale}" if plan.scale else ""
            with waiting(self.console, f"loading {name}{size} in {dtype}"):
                target, tokenizer, assistant = load(name, plan.draft, dtype, plan.device, plan.scale)
                tokenizers = tokenizers_of(tokenizer, plan.assistant_tokenizer)
            label = str(target.dtype).removeprefix("torch.")
            if not plan.capacity_only:
                methods += bench.transformers_methods(
                    target, assistant, plan.baselines, label, plan.sampling, tokenizers
                )
            methods += bench.strategy_methods(
                target, plan.strategies, assistant, plan.strategy_settings, plan.config, tokenizer, label, plan.sampling,
                tokenizers.get("assistant_tokenizer"),
            )  # fmt: skip
        if plan.engines and not plan.capacity_only:
            with waiting(self.console, "writing models for other engines") as status:
                exact = load(
                    name, plan.draft, "float32", "cpu", plan.scale
                )  # every engine rounds the same numbers itself
                order = dtypes_order(methods)
                methods += other_engines(plan.engines, methods[0].model, folder, exact, order, status.update)
        return methods, tokenizer

    def _look_at_machine(self, methods: Sequence[Method]) -> None:
        if self.facts:
            return
        device = methods[0].model.device
        with waiting(self.console, "measuring the memory's bandwidth"):
            speed = bandwidth.copy_bandwidth(device)
        self.facts = machine.facts(device) | {"copy_bandwidth": speed}

    def _compare_capacities(self, methods: list[Method]) -> None:
        plan = self.plan
        calls = len(methods) * len(plan.batches) * len(SLOTS) * (plan.repeats + 1)
        with progress_bar(self.console, calls) as advance:
            for rows in plan.batches:
                self.capacity_costs += check_capacity(
                    methods, rows, slots=SLOTS, repeats=plan.repeats, progress=advance
                )

    def _groups(
        self, methods: Sequence[Method], tokenizer: PreTrainedTokenizerBase | None, texts: Texts
    ) -> list[list[bench.Workload]]:
        """The workloads of each batch size."""
        plan = self.plan
        if plan.prompt_lengths is not None:
            vocabulary, most = vocabulary_size(methods[0].model), min(plan.limit or 1, 2)
            return [bench.random_workloads(vocabulary, plan.prompt_lengths, rows, most) for rows in plan.batches]
        assert tokenizer is not None
        if plan.prompts is None:
            texts = read_prompts("instruct" if tokenizer.chat_template else "all", plan.limit)
        return [bench.workloads(tokenizer, texts, rows) for rows in plan.batches]

    def _take_turns(self, name: str, methods: list[Method], groups: list[list[bench.Workload]]) -> None:
        plan, records = self.plan, list[Record]()
        total = sum(bench.calls(len(methods), len(group), plan.repeats) for group in groups)
        with progress_bar(self.console, total) as advance, interrupted_by_sigterm():
            for group in groups:
                try:
                    entries = bench.measure(
                        methods, group, new_tokens=plan.new_tokens, repeats=plan.repeats, progress=advance
                    )
                except bench.Interrupted as stopped:
                    entries, self.interrupted = stopped.entries, True
                speed = self.facts["copy_bandwidth"]
                records += bench.summarise(entries, speed, "" if name == "demo" else name, name in SHAPES)
                if self.interrupted:
                    break
        order = dtypes_order(methods)
        self.records += sorted(records, key=lambda r: (order.index(r.dtype), r.batch))
