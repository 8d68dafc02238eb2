"""``decoders.warmup``: a model made ready ahead of its first call: weights packed, its forward pass and strategies compiled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..engine.model.layout import embeddings_of
from ..errors import SettingsError, UnsupportedError
from ..registry.registry import registry
from ..registry.resolve import resolve_strategy
from ..report import Report
from ..settings import RuntimeSettings, load_settings
from ..strategy import Strategy
from .wrapper import Generate

#: A prompt that repeats itself, so that drafts of every size are proposed and accepted; ids are cut to the vocabulary.
PROMPT = (3, 5, 7, 11) * 6


@dataclass(frozen=True)
class WarmupPart:
    """One strategy with one number of rows.

    Attributes:
        strategy: name.
        rows: of the batch.
        sampling: whether tokens were drawn.
        seconds: of the call, all in all.
        compile_seconds: that it waited for compiling.
        compilations: graphs compiled.
    """

    strategy: str
    rows: int
    sampling: bool
    seconds: float
    compile_seconds: float
    compilations: int


@dataclass(frozen=True)
class Warmup:
    """What making a model ready took.

    Attributes:
        pack_seconds: making the engine, its weights packed; 0.0 if it was there already.
        compile_seconds: compiling, the forward pass and what the strategies need.
        compilations: graphs compiled.
        parts: per number of rows and strategy, in the order in which they were asked for.
    """

    pack_seconds: float
    compile_seconds: float
    compilations: int
    parts: tuple[WarmupPart, ...]


def warm(
    generate: Generate,
    strategies: Sequence[str | Strategy],
    rows: Sequence[int],
    assistant_model: PreTrainedModel | None,
    sampling: bool | dict[str, Any],
    options: dict[str, Any],
) -> Warmup:
    """See :func:`decoders.warmup`."""
    if not strategies or not rows or min(rows) < 1:
        raise SettingsError("warmup() takes at least one strategy, and at least one number of rows, each 1 or more")
    resolved = [resolve_strategy(strategy, options.get("strategy_config"), None) for strategy in strategies]
    for strategy in resolved:
        if strategy.needs_assistant and assistant_model is None:
            raise UnsupportedError(f"strategy {strategy.name!r} needs assistant_model=")
    given = dict(options.get("decoders_config") or {})
    wanted = load_settings(RuntimeSettings, None, given, {}, sections=registry().strategies()).compile
    options["decoders_config"] = given | {"compile": wanted is not False}
    plans: list[dict[str, Any]] = [{"do_sample": False}]
    if sampling:
        plans.append({"do_sample": True, "seed": 0, **(sampling if isinstance(sampling, dict) else {})})
    parts: list[WarmupPart] = []
    packing = compiling = 0.0
    graphs = 0
    for count in rows:
        for name, strategy in zip(strategies, resolved, strict=True):
            for plan in plans:
                extra = {"assistant_model": assistant_model} if strategy.needs_assistant else {}
                report, seconds = _call(generate, name, count, {**options, **plan, **extra})
                packing += report.timings.pack
                compiling += report.timings.compile
                graphs += report.compilations
                parts.append(
                    WarmupPart(
                        strategy.name,
                        count,
                        bool(plan["do_sample"]),
                        seconds,
                        report.timings.compile,
                        report.compilations,
                    )
                )
    return Warmup(packing, compiling, graphs, tuple(parts))


def _call(generate: Generate, strategy: str | Strategy, rows: int, options: dict[str, Any]) -> tuple[Report, float]:
    model = generate.model
    vocabulary = embeddings_of(model)
    prompt = torch.tensor([PROMPT], device=model.device).remainder(vocabulary).expand(rows, -1)
    started = time.perf_counter()
    out = generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), strategy=strategy, max_new_tokens=16,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return out.report, time.perf_counter() - started
