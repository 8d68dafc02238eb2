"""``decoders.advise``: measures which strategy is fastest for a model on this machine, and with which number format of the weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..costs import CostCurve
from ..enabling import check_seconds, cost_curve, enable, tokenizer_of
from ..errors import SettingsError, amount, keywords_named
from ..prompts.reading import Content, read_prompts
from . import machine
from .measurement import Competitor, complete, take_turns
from .methods import PLAIN, Method, strategy_methods, transformers_methods
from .records import Record, comparable, summarise
from .shapes import SHAPES, random_workloads
from .timed_call import decode, vocabulary_size
from .variants import with_setting
from .verdict import AUTO, GAIN, Verdict, pooled, times, verdicts
from .workloads import Workload, workloads

#: Strategies that are tried. The strategies in `DRAFTED` are tried only if there is a draft model.
STRATEGIES = (AUTO, PLAIN, "prompt_lookup", "suffix", "token_recycling")
DRAFTED = ("speculative", "threshold")
#: Settings of the winning strategy that are tried: shorter and longer drafts. ``auto`` is not listed, because it adapts by itself.
TUNED = {
    "prompt_lookup": ("length=4", "length=16"),
    "suffix": ("nodes=12", "alpha=8"),
    "token_recycling": ("nodes=8", "nodes=48"),
    "speculative": ("length=3", "length=8"),
    "threshold": ("threshold=0.2", "threshold=0.6"),
}
#: Number formats of weights that are tried with the winning strategy. `NARROW` is tried only if a float32 matrix can be converted to
#: 16 bits without loss. The formats in `WEIGHTS` change the text: the advice gives their speeds, but does not recommend them.
WEIGHTS, NARROW = ("int8", "int4"), "16bit"
#: New tokens of a text: at most MOST, at least FEWEST (on a slow machine or with many prompts), and FEW in warm-up calls.
MOST, FEWEST, FEW = 96, 16, 2
#: Methods above this share of the fastest method's speed count as equally fast, because only few texts are measured.
ABOUT = 0.9
#: Deadlines, as shares of the given seconds, of the four parts: comparing strategies, their settings, number formats, compiled steps.
#: If steps are compiled, :data:`COMPILING` is subtracted from the given seconds for the first three deadlines.
COMPARISON, SETTINGS, PACKED, COMPILED = 0.5, 0.6, 0.7, 0.95
#: Seconds reserved for compiling (one to three minutes on two cores). If `seconds` is below twice this value, nothing is compiled.
COMPILING = 60.0
#: A hypothetical draft model: its size and time relative to the target's, and its acceptance rate.
DRAFT_SIZE, DRAFT_RIGHT = 0.1, 0.7
#: Hypothetical heads: nodes of their tree, tokens per step, and their time relative to a step of the target.
HEADS_NODES, HEADS_TOKENS, HEADS_TIME = 24, 2.5, 0.1


@dataclass(frozen=True)
class Outlook:
    """An estimate of the speed with a draft model or with draft heads.

    Attributes:
        what: the drafter: "A draft model" or "Heads (medusa, eagle3)".
        ratio: estimated ratio to transformers' tokens/s, from the measured costs of steps and the assumptions.
        supposed: the assumptions, as a text.
    """

    what: str
    ratio: float
    supposed: str


@dataclass(frozen=True)
class Advice:
    """The recommendation of :func:`advise`.

    Attributes:
        verdict: the recommended method, its speed, and the recommendation in a sentence.
        compiling: tokens/s of compiled steps divided by tokens/s of uncompiled steps. None if only uncompiled steps were measured;
            the verdict is then about uncompiled steps.
        outlooks: estimates for a draft model and heads.
        seconds: duration of the measurement.
        new_tokens, prompts: number of new tokens of each text, and number of measured prompts.
        records: the measurements, uncompiled and compiled.
        given: number of given prompts; more than `prompts` if time was too short for all.
        machine: processor, threads, device and versions, as :func:`decoders.bench.machine.facts` returns them.
        weights: for each number format, tokens/s with this format divided by tokens/s without it, with the best strategy, uncompiled.
        busy: a warning if other processes used the cores during the measurement, else "".
    """

    verdict: Verdict
    compiling: float | None
    outlooks: tuple[Outlook, ...]
    seconds: float
    new_tokens: int
    prompts: int
    records: tuple[Record, ...] = field(repr=False)
    busy: str = ""
    given: int = 0
    machine: dict[str, Any] = field(default_factory=dict, repr=False)
    weights: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        code = [f"    {self.code}"] if self.code else []
        return "\n".join([*filter(None, [self.busy]), self.headline, *code, *self.lines, self.measured])

    @property
    def headline(self) -> str:
        """The verdict's sentence, with a proviso before it if the machine was busy."""
        return f"If that holds on a quiet machine: {self.verdict.text}" if self.busy else self.verdict.text

    @property
    def measured(self) -> str:
        """The conditions of the measurement: prompts, number format, machine."""
        some = f"{self.prompts} of {self.given} prompts (more with more seconds)"
        of = some if self.prompts < self.given else amount(self.prompts, "prompt")
        texts = f"{of}, {self.new_tokens} new tokens each, weights in {self.verdict.dtype}"
        texts += "" if any(record.compiled_share for record in self.records) else ", uncompiled"
        where = [machine.line(self.machine)] if self.machine else []
        return "; ".join([texts, *where, f"{self.seconds:.0f} s"])

    @property
    def code(self) -> str:
        """The recommended call as code; "" if no strategy is recommended."""
        return self.verdict.code if self.verdict.arguments else ""

    @property
    def lines(self) -> list[str]:
        """One sentence for each further possibility: compiling, number formats, a draft model, heads."""
        now = self.verdict.ratio.median if self.verdict.ratio is not None else 1.0
        result = []
        if self.compiling is not None:
            result.append(
                f"Compiled, as it will be after some use; that has {times(self.compiling)} times the uncompiled speed."
            )
        for outlook in self.outlooks:
            less = "less than this has" if outlook.ratio < ABOUT * now else "about what this has"
            worth = "worth a try" if outlook.ratio > 1.1 * now else less
            speed = f"{times(outlook.ratio)} times transformers' tokens/s"
            result.append(f"{outlook.what} would have {speed}, {worth} (estimated for {outlook.supposed}).")
        for name, gain in self.weights.items():
            text = "and the same text" if name == NARROW else "and other texts: compare them"
            worth = text if gain > GAIN else "so nothing is gained"
            result.append(
                f'With decoders_config={{"weights": "{name}"}} it had {times(gain)} times that speed, {worth}.'
            )
        return result

    def as_dict(self) -> dict[str, Any]:
        """The advice as JSON-safe data."""
        return {
            "verdict": self.verdict.as_dict(), "code": self.code, "compiling": self.compiling,
            "outlooks": [asdict(outlook) for outlook in self.outlooks], "seconds": self.seconds,
            "new_tokens": self.new_tokens, "prompts": self.prompts, "given": self.given, "busy": self.busy,
            "machine": self.machine, "weights": self.weights,
            "records": [record.as_dict() for record in self.records],
        }  # fmt: skip


@keywords_named
def advise(
    model: PreTrainedModel,
    prompts: Sequence[Content] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_model: PreTrainedModel | None = None,
    seconds: float = 150.0,
    compile: bool = True,
    progress: Callable[[str, float], None] = lambda what, left: None,
) -> Advice:
    """Measures the strategies that need only the model (and `assistant_model`, if given) on `prompts`, and recommends one.

    Args:
        model: a model, which is enabled if it is not yet.
        prompts: texts or messages that resemble your use, since speed depends on them. None: built-in prompts, which are
            instructions if the tokenizer has a chat template.
        tokenizer: as in :func:`decoders.enable`.
        assistant_model: a draft model to try as well.
        seconds: wall time for the measurement. On a slow machine, first the generated texts get shorter, then prompts are left out. A
            part that would probably exceed this time is skipped. The time is exceeded only if it is too short for a single text per
            strategy, or if compiling or converting weights takes longer than expected.
        compile: whether to measure compiled steps, too, if `seconds` is at least 120. Compiled steps tell the speed in long use,
            because the default settings compile the model in the background.
        progress: called at the start of each part, with its description and the remaining seconds.

    Raises:
        SettingsError: there is no prompt or no tokenizer, or `seconds` is not above 0. UnsupportedError: the model cannot be decoded.
    """
    check_seconds(seconds)
    begin = time.monotonic()
    tokenizer = tokenizer_of(enable(model, tokenizer))
    random = str(getattr(model.config, "name_or_path", "")) in SHAPES
    every = _workloads(model, tokenizer, prompts, random)
    names = [*STRATEGIES, *(DRAFTED if assistant_model is not None else ())]
    methods = transformers_methods(model, assistant_model, [])
    methods += strategy_methods(model, names, assistant_model, None, {"compile": False}, tokenizer)
    progress("one short text", seconds)
    compile = compile and seconds >= 2 * COMPILING
    first_parts = seconds - COMPILING * compile
    new_tokens, chosen = _affordable(methods, every, COMPARISON * first_parts)
    #: Estimates for the next parts: seconds in which a method writes all texts once, and seconds for converting the weights.
    each, packing = 0.0, time.monotonic() - begin

    def told(what: str, _: float = 0.0) -> None:
        progress(what, max(begin + seconds - time.monotonic(), 0.0))

    def fits(methods: int, deadline: float, more: float = 0.0) -> bool:
        return time.monotonic() + 2 * methods * each + more <= deadline

    def compared(methods: Sequence[Method], deadline: float) -> list[Record]:
        nonlocal each, chosen
        entries = [Competitor(method, 1, kind_of={work.name: work.kind for work in chosen}) for method in methods]
        for entry in entries:
            entry.reason = entry.method.skip_reason(1)
            entry.status = "skipped" if entry.reason else "ok"
        began = time.monotonic()
        rounds = take_turns(
            entries, chosen, new_tokens=new_tokens, repeats=3, progress=told, decode=decode, first_tokens=False,
            deadline=deadline, by_prompt=True,
        )  # fmt: skip
        entries = complete(entries) or entries
        chosen = [work for work in chosen if work.name in entries[0].kind_of]
        each = (time.monotonic() - began) / (1 + rounds) / len(entries)
        return summarise(entries, random_weights=random)

    uncompiled = compared(methods, begin + COMPARISON * first_parts)
    (verdict,) = verdicts(uncompiled, ABOUT) or [_failed(uncompiled)]
    tuned = TUNED.get(verdict.method, ())
    if tuned and fits(3 + len(tuned), begin + SETTINGS * first_parts):
        variants = [f"{verdict.method}[{setting}]" for setting in tuned]
        ours = strategy_methods(model, variants, assistant_model, None, {"compile": False}, tokenizer)
        again = [method for method in methods if not method.ours or method.name in (PLAIN, verdict.method)]
        tried = compared([*again, *ours], begin + SETTINGS * first_parts)
        fastest = max(variants, key=lambda name: _speed(tried, name))
        if ABOUT * _speed(tried, fastest) > _speed(tried, verdict.method):  # clearly faster
            others = {verdict.method, *variants} - {fastest}
            (verdict,) = verdicts([r for r in tried if r.method not in others], ABOUT)
            methods += ours
        uncompiled += [r for r in tried if r.method in variants]
    weights = dict[str, float]()
    theirs = next(method for method in methods if not method.ours)
    for name in (*([NARROW] if _has_narrow_weights(model) else []), *WEIGHTS):
        if not fits(3, begin + PACKED * first_parts, packing):
            break
        winner = verdict.method or AUTO
        packed = strategy_methods(
            model, [with_setting(winner, f"weights={name}")], assistant_model, None, {"compile": False}, tokenizer
        )
        told(f"weights in {name}: packing them")
        unpacked = [method for method in methods if method.name == winner]
        began = time.monotonic()
        with suppress(Exception):  # the comparison below reports the error
            decode(packed[0], chosen[0], FEW)
        packing = time.monotonic() - began
        if not fits(3, begin + PACKED * first_parts):
            break
        tried = compared([theirs, *unpacked, *packed], begin + PACKED * first_parts)
        speeds = [_speed(tried, method.name) for method in (*packed, *unpacked)]
        if all(speeds):
            weights[name] = speeds[0] / speeds[1]
        uncompiled += [r for r in tried if r.method == packed[0].name]
    records, outlooks, gain = list(uncompiled), list[Outlook](), None
    context = int(median(workload.input_ids.shape[1] for workload in chosen)) + new_tokens
    compiled = list[Record]()
    compiling = compile and fits(0, begin + seconds, COMPILING)
    if compiling:
        best = {verdict.method or AUTO, AUTO, PLAIN}
        again = [method for method in methods if not method.ours or method.name in best]
        again = [replace(m, arguments=_compiled(m.arguments)) if m.ours else m for m in again]
        compiled = [replace(r, compiled_share=1.0) for r in compared(again, begin + COMPILED * seconds)]
        records += compiled
        if of_compiled := verdicts(compiled, ABOUT):
            (verdict,) = of_compiled
            speeds = [_speed(of_tier, verdict.method or PLAIN) for of_tier in (uncompiled, compiled)]
            gain = speeds[1] / speeds[0] if all(speeds) else None
    if assistant_model is None and fits(0, begin + seconds):
        told("what steps of several nodes cost")
        curve = cost_curve(model, [1], [context], 0.05 * seconds, decoders_config={"compile": compiling})
        if plain := _speed(compiled if compiling else uncompiled, PLAIN):
            outlooks += _outlooks(curve, context, compiling, plain)
    records, busy = comparable(records)
    if busy and all(r.ratio is None for r in records):  # too busy: the order of methods may be right, ratios are not
        name = verdict.method or "transformers' own generate"
        text = f"{name} was the fastest, but no speed is compared here. {busy}"
        verdict, gain, outlooks, busy = replace(verdict, text=text, ratio=None, by_kind={}), None, [], ""
    return Advice(
        verdict,
        gain,
        tuple(outlooks),
        time.monotonic() - begin,
        new_tokens,
        len(chosen),
        tuple(records),
        busy,
        len(every),
        machine.facts(model.device),
        weights,
    )


def _workloads(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, prompts: Sequence[Content] | None, random: bool
) -> list[Workload]:
    if tokenizer is None and random and prompts is None:
        return random_workloads(vocabulary_size(model), [64], count=2)
    if tokenizer is None:
        raise SettingsError("advise needs the model's tokenizer to read prompts: pass tokenizer=")
    if isinstance(prompts, str):
        raise SettingsError("prompts is one text: put it into a list, [text]")
    if prompts is None:
        kinds = "instruct" if tokenizer.chat_template else "all"
        return workloads(tokenizer, read_prompts(kinds, 1))
    texts = [(f"prompt-{number:02}", "prompts", content) for number, content in enumerate(prompts, 1)]
    if not all(content for _, _, content in texts) or not texts:
        raise SettingsError(
            "prompts: there is no text in them" if texts else "prompts is empty: leave it out for ready ones"
        )
    return workloads(tokenizer, texts)


def _affordable(methods: Sequence[Method], every: list[Workload], seconds: float) -> tuple[int, list[Workload]]:
    """The number of new tokens per text, and the prompts, with which all methods can write each text twice within `seconds`. If time
    is short, texts get shorter before prompts are left out.
    """
    rates = []
    for method in (methods[0], next(method for method in methods if method.name == PLAIN)):
        decode(method, every[0], FEW)  # makes the model ready
        rates.append(decode(method, every[0], FEWEST).seconds / FEWEST)
    tokens = seconds / 2 / (rates[0] + (len(methods) - 1) * rates[1])
    count = max(min(len(every), int(tokens / FEWEST)), 1)
    new_tokens = min(MOST, max(FEWEST, int(tokens / count)))
    return new_tokens, [every[len(every) * number // count] for number in range(count)]


def _has_narrow_weights(model: PreTrainedModel) -> bool:
    """Whether at least one float32 matrix of `model` can be converted to bfloat16 or float16 without loss."""
    wide = (own.detach() for own in model.parameters() if own.dim() == 2 and own.dtype == torch.float32)
    return any(torch.equal(own.to(dtype).float(), own) for own in wide for dtype in (torch.bfloat16, torch.float16))


def _compiled(arguments: Any) -> dict[str, Any]:
    return {**arguments, "decoders_config": {**arguments["decoders_config"], "compile": True}}


def _speed(records: Sequence[Record], method: str) -> float:
    """The method's tokens/s divided by transformers', over all prompts; 0 if it was not measured."""
    (together,) = pooled(records).values()
    return next((r.ratio.median for r in together if r.method == method and r.ratio is not None), 0.0)


def _failed(records: Sequence[Record]) -> Verdict:
    reasons = "; ".join(dict.fromkeys(r.reason for r in records if r.reason))
    return Verdict("", records[0].dtype, records[0].batch, "", f"No strategy decodes this model: {reasons}")


def _outlooks(curve: CostCurve, context: int, compiled: bool, plain: float) -> list[Outlook]:
    """Estimates for a draft model and for heads, from the costs of steps. plain: plain decoding's speed relative to transformers'."""

    def step(nodes: int) -> float:
        return curve.seconds(nodes, 1, context, compiled) / curve.seconds(1, 1, context, compiled)

    def drafted(length: int) -> float:
        tokens = (1 - DRAFT_RIGHT ** (length + 1)) / (1 - DRAFT_RIGHT)
        return tokens / (step(length + 1) + length * DRAFT_SIZE)

    return [
        Outlook(
            "A draft model", plain * max(map(drafted, range(1, 9))),
            f"one of a {round(1 / DRAFT_SIZE)}th of the time that is right {DRAFT_RIGHT:.0%} of the time",
        ),
        Outlook(
            "Heads (medusa, eagle3)", plain * HEADS_TOKENS / (step(HEADS_NODES + 1) + HEADS_TIME),
            f"{HEADS_TOKENS} tokens a step of {HEADS_NODES} draft tokens",
        ),
    ]  # fmt: skip
