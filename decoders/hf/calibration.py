"""``decoders.calibrate``: what a model's decoding steps cost on this machine, and what each strategy's own work takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..costs.curve import CostCurve, default_folder, path_of
from ..engine.model.layout import embeddings_of
from ..errors import DecodersError, SettingsError
from ..registry.registry import registry
from ..registry.resolve import resolve_strategy
from ..settings import RuntimeSettings, load_settings
from .assistants import draft_scheme
from .warmup import PROMPT
from .wrapper import Generate

#: Tokens of the call in which a strategy's own work is timed.
TOKENS = 32


@dataclass(frozen=True)
class StrategyCost:
    """A strategy's own work in a short call on a text that repeats itself.

    Attributes:
        strategy: name.
        propose: seconds per step, the passes of a draft model included.
        observe: seconds per step.
        step: seconds of the whole step.
    """

    strategy: str
    propose: float
    observe: float
    step: float


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        curve: of the model, with all that is known of it.
        assistant: of the draft model, if one was given: a pass of it is a step of one node.
        strategies: that the model can use as it is.
        path: where the curve is kept.
    """

    curve: CostCurve
    assistant: CostCurve | None
    strategies: tuple[StrategyCost, ...]
    path: Path


def calibrate_model(
    generate: Generate, rows: Sequence[int], contexts: Sequence[int], assistant_model: PreTrainedModel | None,
    seconds: float, options: dict[str, Any],
) -> Calibration:  # fmt: skip
    """See :func:`decoders.calibrate`."""
    sizes = [*rows, *contexts]
    if not rows or not contexts or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise SettingsError(
            f"rows and contexts are whole numbers from 1 up, at least one each, not {rows} and {contexts}"
        )
    if not seconds > 0:
        raise SettingsError(f"seconds must be more than 0, not {seconds}")
    given = dict(options.get("decoders_config") or {})
    runtime = load_settings(RuntimeSettings, None, given, {}, sections=registry().strategies())
    folder = runtime.cost_cache or default_folder()
    engine = generate.engine(runtime.attention, runtime.weights, runtime.kv_cache, runtime.exact_products)
    with engine.lock, engine.active():
        curve = engine.calibration.measured(folder, rows, contexts, runtime.compile, seconds, anew=True)
    assistant = None
    if assistant_model is not None:
        draft = Generate(assistant_model, generate.tokenizer, None).engine(
            runtime.attention, draft_scheme(runtime) or "keep", exact_products=runtime.exact_products
        )
        with draft.lock, draft.active():
            assistant = draft.calibration.measured(folder, rows[:1], contexts[:1], runtime.compile, seconds, anew=True)
    strategies = _strategies(generate, assistant_model, options)
    return Calibration(curve, assistant, strategies, path_of(folder, curve.subject))


def _strategies(
    generate: Generate, assistant_model: PreTrainedModel | None, options: dict[str, Any]
) -> tuple[StrategyCost, ...]:
    model = generate.model
    prompt = torch.tensor([PROMPT], device=model.device).remainder(embeddings_of(model))
    call = dict(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, return_dict_in_generate=True
    )
    costs = []
    for name, entry in registry().strategies().items():
        strategy = resolve_strategy(name)
        if entry.cls.needs_grammar or (strategy.needs_assistant and assistant_model is None):
            continue
        if entry.cls.takes_assistant:  # its work is that of others
            continue
        extra = {"assistant_model": assistant_model} if strategy.needs_assistant else {}
        try:
            for _ in range(2):  # the first call prepares things
                out = generate(**{"do_sample": False, **options, **call, **extra, "strategy": name})
        except DecodersError:
            if name == "autoregressive":  # options that plain decoding refuses are wrong for all
                raise
            continue  # this model has no heads, or is not of the kind that the strategy wants
        timings, steps = out.report.timings, out.report.steps
        costs.append(StrategyCost(name, timings.propose / steps, timings.observe / steps, timings.steps / steps))
    return tuple(costs)
