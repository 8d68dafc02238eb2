"""``decoders.warmup`` and ``decoders.calibrate``: prepare a model before its first call, and measure its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..costs.curve import CostCurve, default_folder, path_of
from ..engine.model.layout import embeddings_of
from ..engine.model.torch_compat import graphs_compiled as graphs_compiled
from ..errors import DecodersError, SettingsError, UnsupportedError
from ..registry.plugins import registry
from ..registry.resolve import resolve_strategy
from ..report import Report
from ..settings import RuntimeSettings, load_settings
from ..strategy import Strategy
from .assistants import draft_scheme
from .wrapper import Generate

#: A periodic prompt, so that drafts of every size are proposed and accepted; ids are taken modulo the vocabulary's size.
PROMPT = (3, 5, 7, 11) * 6
#: Number of new tokens of the call that times a strategy's own work.
TOKENS = 32


@dataclass(frozen=True)
class WarmupPart:
    """The costs of warming up one strategy with one number of rows, for greedy decoding or for sampling.

    Attributes:
        strategy: name.
        rows: number of rows of the batch.
        sampling: whether tokens were sampled.
        seconds: duration of the call.
        compile_seconds: seconds of waiting for compilation.
        compilations: number of compiled graphs.
    """

    strategy: str
    rows: int
    sampling: bool
    seconds: float
    compile_seconds: float
    compilations: int


@dataclass(frozen=True)
class Warmup:
    """The costs of a warm-up.

    Attributes:
        pack_seconds: seconds of preparing the model (packing and quantizing weights, compiling kernels, checks); 0.0 for a ready model.
        compile_seconds: seconds of compiling the forward pass and the strategies' functions.
        compilations: number of compiled graphs.
        parts: the costs for each number of rows, each strategy, and greedy decoding or sampling, nested in this order.
    """

    pack_seconds: float
    compile_seconds: float
    compilations: int
    parts: tuple[WarmupPart, ...]


def warm(
    generate: Generate, strategies: Sequence[str | Strategy], rows: Sequence[int], assistant_model: PreTrainedModel | None,
    sampling: bool | dict[str, Any], options: dict[str, Any],
) -> Warmup:  # fmt: skip
    """Makes a short call per strategy and number of rows, so that code is compiled; see :func:`decoders.warmup`."""
    resolved = [resolve_strategy(strategy, options.get("strategy_config"), None) for strategy in strategies]
    for strategy in resolved:
        if strategy.needs_assistant and assistant_model is None:
            raise UnsupportedError(f"strategy {strategy.name!r} needs assistant_model=")
    runtime, started = runtime_of(generate, options), time.perf_counter()
    engine = generate.engine(runtime)
    making = sum(engine.prepared_since(started))
    if runtime.compile == "auto":  # if passes are compiled at all, they are compiled at once, not in the background
        compile = engine.target.uncompiled is None
        options["decoders_config"] = {**(options.get("decoders_config") or {}), "compile": compile}
    plans: list[dict[str, Any]] = [{"do_sample": False}]
    if sampling:
        plans.append({"do_sample": True, "seed": 0, **(sampling if isinstance(sampling, dict) else {})})
    parts: list[WarmupPart] = []
    for count in rows:
        for name, strategy in zip(strategies, resolved, strict=True):
            for plan in plans:
                extra = {"assistant_model": assistant_model} if strategy.needs_assistant else {}
                started = time.perf_counter()
                report = _report(generate, name, count, {"max_new_tokens": 16} | options | plan | extra)
                seconds, timings = time.perf_counter() - started, report.timings
                making += timings.ready
                sampled = bool(plan["do_sample"])
                parts.append(WarmupPart(strategy.name, count, sampled, seconds, timings.compile, report.compilations))
    return Warmup(
        making, sum(part.compile_seconds for part in parts), sum(part.compilations for part in parts), tuple(parts)
    )


@dataclass(frozen=True)
class StrategyCost:
    """The time that a strategy's own work takes in a short call on a periodic text.

    Attributes:
        strategy: name.
        propose: seconds of ``propose`` per step, passes of a draft model included.
        observe: seconds of ``observe`` per step.
        step: seconds of a whole step.
    """

    strategy: str
    propose: float
    observe: float
    step: float


@dataclass(frozen=True)
class Calibration:
    """The results of a calibration.

    Attributes:
        curve: the model's cost curve, earlier measurements included.
        assistant: the draft model's cost curve; a step with one node is a pass that drafts a token. None without a draft model.
        strategies: costs of the strategies that run on the model without files such as draft heads.
        path: the curve's file.
    """

    curve: CostCurve
    assistant: CostCurve | None
    strategies: tuple[StrategyCost, ...]
    path: Path


def check_sizes(name: str, sizes: Any) -> None:
    """Raises SettingsError unless `sizes` is a sequence of one or more whole numbers, each at least 1."""
    if not isinstance(sizes, Sequence) or not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise SettingsError(f"{name} must be a list of whole numbers from 1 up, such as [1], not {sizes!r}")


def check_seconds(seconds: Any) -> None:
    """Raises SettingsError unless `seconds` is a number above 0."""
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise SettingsError(f"seconds must be a number above 0, not {seconds!r}")


def calibrate_model(
    generate: Generate, rows: Sequence[int], contexts: Sequence[int], assistant_model: PreTrainedModel | None,
    seconds: float, options: dict[str, Any],
) -> Calibration:  # fmt: skip
    """Measures cost curves of the model and the draft model, and the costs of strategies; see :func:`decoders.calibrate`."""
    check_sizes("contexts", contexts)
    check_seconds(seconds)
    runtime = runtime_of(generate, options)
    folder = runtime.cost_cache or default_folder()
    curve, assistant = measured_curve(generate, runtime, rows, contexts, seconds, anew=True), None
    if assistant_model is not None:
        formats = {"weights": draft_scheme(runtime) or "keep", "kv_cache": "keep"}
        draft, runtime = Generate(assistant_model, generate.tokenizer, None), runtime.model_copy(update=formats)
        assistant = measured_curve(draft, runtime, rows[:1], contexts[:1], seconds, anew=True)
    strategies = _strategy_costs(generate, assistant_model, options)
    return Calibration(curve, assistant, strategies, path_of(folder, curve.subject))


def measured_curve(
    generate: Generate, runtime: RuntimeSettings, rows: Sequence[int], contexts: Sequence[int], seconds: float, anew: bool = False,
) -> CostCurve:  # fmt: skip
    """The cost curve of a model, measured at these numbers of rows and context lengths. anew: whether to measure known points again."""
    engine = generate.engine(runtime)
    with engine.lock, engine.active():
        folder = runtime.cost_cache or default_folder()
        return engine.calibration.measured(folder, rows, contexts, runtime.compile, seconds, anew)


def _strategy_costs(
    generate: Generate, assistant_model: PreTrainedModel | None, options: dict[str, Any]
) -> tuple[StrategyCost, ...]:
    costs = []
    for name, entry in registry().strategies().items():
        strategy = resolve_strategy(name)
        if entry.cls.needs_grammar or (strategy.needs_assistant and assistant_model is None):
            continue
        if entry.cls.takes_assistant:  # such as 'auto', whose candidates do the work
            continue
        extra = {"assistant_model": assistant_model} if strategy.needs_assistant else {}
        call = {"do_sample": False, **options, "max_new_tokens": TOKENS, **extra}
        try:
            _report(generate, name, 1, call)  # not measured: this call compiles and fills caches
            report = _report(generate, name, 1, call)
        except DecodersError:
            if name == "autoregressive":  # every strategy would refuse these options
                raise
            continue  # this model lacks the strategy's heads, or has an unsuitable architecture
        timings, steps = report.timings, report.steps
        costs.append(StrategyCost(name, timings.propose / steps, timings.observe / steps, timings.steps / steps))
    return tuple(costs)


def runtime_of(generate: Generate, options: dict[str, Any]) -> RuntimeSettings:
    """The loop's settings in a call with `options`."""
    given = dict(options.get("decoders_config") or {})
    enabled, sections = generate.defaults.runtime, registry().strategies()
    return load_settings(RuntimeSettings, None, given, {}, enabled=enabled, sections=sections)


def _report(generate: Generate, strategy: str | Strategy, rows: int, call: dict[str, Any]) -> Report:
    """Decodes :data:`PROMPT` in `rows` equal rows and returns the report."""
    model = generate.model
    prompt = torch.tensor([PROMPT], device=model.device).remainder(embeddings_of(model)).expand(rows, -1)
    given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "return_dict_in_generate": True}
    report: Report = generate(**{**call, **given, "strategy": strategy}).report
    return report
