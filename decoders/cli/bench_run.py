"""The measurements of ``decoders bench``: a :class:`Plan` is made from the checked options, and a :class:`Run` measures it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import bench
from ..bench import Method, Record, Sampling, machine
from ..bench.methods import PLAIN, baseline_named, configured_variants, synthetic_methods
from ..bench.records import comparable
from ..bench.shapes import SHAPES
from ..bench.tables import fitting, group_name, headings, speed_table, suite_table, tables
from ..bench.timed_call import vocabulary_size, written
from ..bench.variants import parse
from ..bench.verdict import Verdict, pooled, verdicts
from ..errors import SettingsError, UnknownNameError
from ..prompts.reading import Content, Texts, read_prompts
from ..prompts.suites import SUITES, Question, conversations
from ..registry import registry
from . import models
from .benches import interrupted_by_sigterm, pieces, progress_bar
from .console import waiting


@dataclass(frozen=True)
class Plan:
    """The measurements to make.

    Attributes:
        subjects: names of models, or of shapes (architectures with random weights).
        of_shapes: whether the subjects are shapes.
        draft, assistant_tokenizer, device: values of the options of the same names, for every subject.
        strategies, baselines: names of strategies and of transformers' methods; None: all.
        acceptances: acceptance rates of simulated drafters, the values of ``--acceptance``.
        strategy_settings: settings of strategies, by strategy.
        loop_settings: settings of the loop, by name.
        samplings: sampling settings (None: greedy decoding). All measurements are made with each entry.
        prompts: kinds of prompts, or a file; None: instructions if the tokenizer has a chat template, else ``all``.
        suite: name of a published benchmark; None without a benchmark.
        questions: the benchmark's questions.
        prompt_lengths: lengths of random prompts; None if prompts are texts.
        limit: greatest number of prompts of a kind.
        batches, dtypes, new_tokens, repeats: see the options.
        seconds: time limit without loading; None: no limit.
    """

    subjects: list[str]
    of_shapes: bool
    draft: str | None
    assistant_tokenizer: str | None
    device: str | None
    strategies: list[str] | None
    baselines: list[str] | None
    acceptances: list[str]
    strategy_settings: dict[str, dict[str, Any]]
    loop_settings: dict[str, Any]
    samplings: tuple[Sampling | None, ...]
    prompts: str | None
    suite: str | None
    questions: list[Question]
    prompt_lengths: list[int] | None
    limit: int | None
    batches: list[int]
    dtypes: list[str]
    new_tokens: int
    repeats: int
    seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The plan as an entry of the JSON file."""
        return {
            "model": None if self.of_shapes else self.subjects[0], "shapes": self.subjects if self.of_shapes else [],
            "draft": self.draft, "new_tokens": self.new_tokens, "repeats": self.repeats, "seconds": self.seconds,
            "prompts": self.prompts, "prompt_lengths": self.prompt_lengths, "loop": self.loop_settings,
            "sampling": self.samplings[-1] and asdict(self.samplings[-1]),
            "suite": self.suite, "questions": [question.name for question in self.questions],
        }  # fmt: skip


def checked_subjects(model: str | None, shapes: Sequence[str] | None) -> list[str]:
    """Names of the models or shapes to measure. Misspelt shapes are reported here, before minutes go into loading models.

    Raises:
        UnknownNameError: no such shape.
    """
    names = pieces(shapes) or [model or "demo"]
    for name in names if shapes is not None else ():
        if name not in SHAPES:
            raise UnknownNameError("shape", name, SHAPES)
    return names


def checked_strategies(
    strategies: Sequence[str] | None, of_shapes: bool, settings: Mapping[str, Mapping[str, Any]]
) -> list[str] | None:
    """Names of the strategies to measure; None: all.

    Args:
        settings: settings by strategy. They apply to all variants of a strategy, such as ``prompt_lookup[compile=false]``.

    Raises:
        UnknownNameError, PluginError, SettingsError: a name is misspelt, or its brackets or `settings` are wrong.
    """
    names = pieces(strategies)
    for name in names or ():
        models.known_strategy("+".join(parse(name).parts))
    if of_shapes:
        names = names or ["autoregressive", "prompt_lookup"]
    configured_variants(list(registry().strategies()) if names is None else names, settings)
    return names


def checked_baselines(baselines: Sequence[str] | None) -> list[str] | None:
    """The methods of transformers to measure; None: all. Raises UnknownNameError or SettingsError for wrong names or brackets."""
    names = pieces(baselines) or []
    if names == ["all"]:
        return None
    if "all" in names:
        raise SettingsError(f"--baseline {','.join(names)}: all stands for every baseline: leave the other names out")
    for name in names:
        baseline_named(name)
    return names


Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase | None, PreTrainedModel | None]


class Subjects:
    """Loads the subjects of a :class:`Plan`, and may add methods. Other packages can derive from this class to measure other models.

    Attributes:
        loaded_as: text that is shown after a subject's name while the subject is loaded.
        facts: entries to add to the plan in the JSON file.
    """

    loaded_as: str = ""
    facts: Mapping[str, Any] = {}

    def load(self, model: str, draft: str | None, dtype: str, device: str | None) -> Loaded:
        """Loads the target called `model`, its tokenizer (None for a shape) and its draft model, in `dtype` on `device`.

        Args:
            draft: name of a model or shape. None: the demo model gets the demo's draft model, other models get none.
        """
        tokenizer: PreTrainedTokenizerBase | None = None
        if model in SHAPES:
            target = models.load_shape(model, dtype, device)
        else:
            target, tokenizer = models.load(model, dtype, device)
        if draft in SHAPES:
            assistant: PreTrainedModel | None = models.load_shape(draft, dtype, device)
        else:
            assistant = models.load_assistant(draft, model, dtype, True, device)
        torch.manual_seed(0)
        return target, tokenizer, assistant

    def methods(self, plan: Plan, name: str, measured: Sequence[Method], console: Console) -> list[Method]:
        """Further methods to measure for the subject `name`, in addition to `measured`. By default an empty list."""
        return []


def tokenizers_of(tokenizer: PreTrainedTokenizerBase | None, name: str | None) -> dict[str, PreTrainedTokenizerBase]:
    """The tokenizer arguments of ``generate`` for a draft model with the tokenizer called `name`. Empty if `name` is None.

    Raises:
        ModelLoadError: no such tokenizer.
        SettingsError: the target has no tokenizer.
    """
    if name is None:
        return {}
    if tokenizer is None:
        raise SettingsError("--assistant-tokenizer goes with a model that has a tokenizer, not with --shape")
    return {"tokenizer": tokenizer, "assistant_tokenizer": models.load_other_tokenizer(name)}


@dataclass
class Run:
    """A run of the measurements of a plan, with the results so far.

    Attributes:
        plan: the measurements to make.
        console: shows progress.
        subjects: loads the subjects.
        facts: facts about the machine. Empty before the first measurement.
        measured: the results so far, a record for each method and kind of prompt.
        interrupted: whether the run was interrupted. If so, the records cover only the prompts that every method has decoded.
        save: called with the result of :meth:`as_dict` at the beginning, each time all methods have decoded a prompt, and at the end.
        complete: whether the run is complete.
    """

    plan: Plan
    console: Console
    subjects: Subjects = field(default_factory=Subjects)
    facts: dict[str, Any] = field(default_factory=dict)
    measured: list[Record] = field(default_factory=list)
    interrupted: bool = False
    save: Callable[[dict[str, Any]], None] = lambda result: None
    complete: bool = False

    def measure(self) -> None:
        """Measures one subject after the other. Each is freed before the next is loaded."""
        plan = self.plan
        texts = [] if plan.prompts is None else read_prompts(plan.prompts, plan.limit)
        for name in plan.subjects:
            self._measure_subject(name, texts)
            if self.interrupted:
                break
        self.complete = not self.interrupted
        self.save(self.as_dict())

    @property
    def records(self) -> list[Record]:
        """The results, without ratios if the machine was too busy to compare."""
        return comparable(self.measured)[0]

    @property
    def busy(self) -> str:
        """A warning if other processes kept the CPU's cores busy, otherwise an empty string."""
        return comparable(self.measured)[1]

    def verdicts(self) -> list[Verdict]:
        """The recommended method of each group (model, dtype, batch size and temperature)."""
        return verdicts(self.records)

    def tables(self, details: bool, width: int) -> list[Table | Text]:
        """The summary table, a recommendation for each group (see :meth:`verdicts`), and the tables of a suite (published benchmark).

        Args:
            details: whether to add all other tables.
            width: number of columns of the console.
        """
        groups = pooled(self.records)
        shown: list[Table | Text] = [*fitting(speed_table(headings(groups)), width)]
        for verdict in self.verdicts():
            records = groups[verdict.group]
            about = f"{group_name(records[0])}: " if len(groups) > 1 else ""
            shown.append(Text.assemble(about, (verdict.text, "bold")))
            if verdict.arguments:
                shown.append(Text(f"    {verdict.code}"))
        of_suites = [
            suite_table(together, [r for r in self.records if r.group == group])
            for group, together in (groups.items() if self.plan.suite else ())
        ]
        for table in [*of_suites, *(tables(self.records) if details else [])]:
            shown += fitting(table, width)
        return shown

    def as_dict(self) -> dict[str, Any]:
        """The results as JSON-safe data: facts about the machine, the plan, recommendations and records."""
        run = self.plan.as_dict() | dict(self.subjects.facts)
        return {
            "machine": self.facts | {"busy": self.busy}, "run": run, "complete": self.complete,
            "verdicts": [verdict.as_dict() for verdict in self.verdicts()],
            "records": [record.as_dict() for record in self.records],
        }  # fmt: skip

    def _measure_subject(self, name: str, texts: Texts) -> None:
        methods, tokenizer = self._methods(name)
        self._look_at_machine(methods)
        self.save(self.as_dict())
        self._take_turns(name, methods, self._groups(methods, tokenizer, texts))
        for method in methods:
            if method.engine is not None:
                method.engine.close()

    def _methods(self, name: str) -> tuple[list[Method], PreTrainedTokenizerBase | None]:
        """The methods for the subject `name` in every dtype, and its tokenizer. All are in memory together, because they take turns."""
        plan, methods = self.plan, list[Method]()
        tokenizer: PreTrainedTokenizerBase | None = None
        for dtype in plan.dtypes:
            with waiting(self.console, f"loading {name}{self.subjects.loaded_as} in {dtype}"):
                target, tokenizer, assistant = self.subjects.load(name, plan.draft, dtype, plan.device)
                tokenizers = tokenizers_of(tokenizer, plan.assistant_tokenizer)
            label = str(target.dtype).removeprefix("torch.")
            sampling = plan.samplings[-1]
            methods += bench.transformers_methods(target, assistant, plan.baselines, label, sampling, tokenizers)
            methods += bench.strategy_methods(
                target, plan.strategies, assistant, plan.strategy_settings, plan.loop_settings, tokenizer, label, sampling,
                tokenizers.get("assistant_tokenizer"),
            )  # fmt: skip
            methods += synthetic_methods(
                target,
                plan.acceptances,
                decoders_config=plan.loop_settings,
                tokenizer=tokenizer,
                dtype=label,
                sampling=sampling,
            )
        methods += self.subjects.methods(plan, name, methods, self.console)
        return methods, tokenizer

    def _look_at_machine(self, methods: Sequence[Method]) -> None:
        if self.facts:
            return
        device = methods[0].model.device
        with waiting(self.console, "measuring the memory's bandwidth"):
            bandwidth = machine.copy_bandwidth(device)
        self.facts = machine.facts(device) | {"copy_bandwidth": bandwidth}

    def _groups(
        self, methods: Sequence[Method], tokenizer: PreTrainedTokenizerBase | None, texts: Texts
    ) -> list[list[bench.Workload]]:
        """For each batch size, a list of workloads. A workload is a batch of prompts that are decoded together."""
        plan = self.plan
        if plan.prompt_lengths is not None:
            vocabulary, most = vocabulary_size(methods[0].model), min(plan.limit or 1, 2)
            return [bench.random_workloads(vocabulary, plan.prompt_lengths, rows, most) for rows in plan.batches]
        assert tokenizer is not None
        if plan.suite is not None:
            texts = self._conversations(methods, tokenizer, plan.suite)
        elif plan.prompts is None:
            texts = read_prompts("instruct" if tokenizer.chat_template else "all", plan.limit)
        return [bench.workloads(tokenizer, texts, rows) for rows in plan.batches]

    def _conversations(self, methods: Sequence[Method], tokenizer: PreTrainedTokenizerBase, suite: str) -> Texts:
        """The turns of a suite's chats as prompts. All methods get the same answers to earlier turns, from plain greedy decoding."""
        plain = replace(next(method for method in methods if method.name == PLAIN), sampling=None)
        questions = self.plan.questions

        def answer(content: Content) -> str:
            advance("answering earlier turns")
            (work,) = bench.workloads(tokenizer, [("", "", content)])
            call = bench.decode(plain, work, self.plan.new_tokens)
            return str(tokenizer.decode(written(plain, work, call.sequences)[0], skip_special_tokens=True))

        with progress_bar(self.console, sum(len(question.turns) - 1 for question in questions)) as advance:
            return conversations(SUITES[suite], questions, answer, bool(tokenizer.chat_template))

    def _take_turns(self, name: str, methods: list[Method], groups: list[list[bench.Workload]]) -> None:
        plan, before = self.plan, self.measured
        bandwidth, label = self.facts["copy_bandwidth"], "" if name == "demo" else name
        finished = list[Record]()

        def show(entries: Sequence[bench.Competitor]) -> None:
            order = list(dict.fromkeys(method.dtype for method in methods))
            records = finished + bench.summarise(entries, bandwidth, label, name in SHAPES)
            self.measured = before + sorted(records, key=lambda r: (r.temperature, order.index(r.dtype), r.batch))

        def show_and_save(entries: Sequence[bench.Competitor]) -> None:
            show(entries)
            self.save(self.as_dict())

        began, runs = time.monotonic(), len(plan.samplings) * len(groups)
        with interrupted_by_sigterm():
            for number, (sampling, group) in enumerate(itertools.product(plan.samplings, groups)):
                seconds = None
                if plan.seconds is not None:  # each run gets an equal part of the remaining time
                    share = plan.seconds / len(plan.subjects)
                    seconds = max(share - (time.monotonic() - began), 0.0) / (runs - number)
                sampled = [replace(method, sampling=sampling) for method in methods]
                checks = plan.suite is None and seconds is None
                total = len(methods) * (1 + len(group) * (plan.repeats + checks))
                try:
                    with progress_bar(self.console, total) as advance:
                        entries = bench.measure(
                            sampled, group, new_tokens=plan.new_tokens, repeats=plan.repeats, progress=advance,
                            first_tokens=plan.suite is None, checks=checks, seconds=seconds, measured=show_and_save,
                        )  # fmt: skip
                except bench.Interrupted as stopped:
                    entries, self.interrupted = stopped.entries, True
                show(entries)
                finished = self.measured[len(before) :]
                if self.interrupted:
                    break
