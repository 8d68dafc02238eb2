"""The conclusion of a run: each method's figures over all prompts, which method to use, and the code for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .figures import Spread, per_repeat, ratio
from .measurement import Measurement
from .methods import BASELINE, PLAIN
from .records import Record
from .variants import parse

#: The strategy that is recommended if it is about as fast as the fastest.
AUTO = "auto"
#: Methods above this share of the fastest method's speed count as equally fast.
NEAR = 0.97
#: Smallest speed-up that counts as a gain.
GAIN = 1.05


@dataclass(frozen=True)
class Verdict:
    """What to use for one model, dtype, number of rows and temperature.

    Attributes:
        model, dtype, batch, temperature: the conditions of the measurement.
        method: the recommended method in the bench's notation; "" if a method of transformers or another engine is clearly faster, the
            ratio is below :data:`GAIN`, or the weights are random.
        tokens_per_second, ratio: speed of the strategy from :func:`chosen`, and its ratio to transformers', over all prompts.
        by_kind: the median ratio for each kind of prompt.
        arguments: arguments of ``generate``.
        text: the recommendation, in a sentence.
    """

    model: str
    dtype: str
    batch: int
    method: str
    text: str
    tokens_per_second: Spread | None = None
    ratio: Spread | None = None
    by_kind: dict[str, float] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    temperature: float = 0.0

    @property
    def group(self) -> tuple[str, str, int, float]:
        """Model, dtype, number of rows and temperature, as in :attr:`~decoders.bench.Record.group`."""
        return self.model, self.dtype, self.batch, self.temperature

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON-safe data."""
        return asdict(self)

    @property
    def code(self) -> str:
        """The recommended call of ``generate``, as code."""
        return "".join(
            ["model.generate(**inputs", *(f", {key}={_shown(value)}" for key, value in self.arguments.items()), ")"]
        )


def _shown(value: Any) -> str:
    """`value` as Python code; a draft model appears by name."""
    return value if value == "draft" else '"' + value + '"' if isinstance(value, str) else repr(value)


def pooled(records: Sequence[Record]) -> dict[tuple[str, str, int, float], list[Record]]:
    """For each :attr:`Record.group`, one record per method over the prompts of all kinds."""
    groups: dict[tuple[str, str, int, float], list[Record]] = {}
    for group in dict.fromkeys(r.group for r in records):
        members = [r for r in records if r.group == group]
        methods = {r.method: [own for own in members if own.method == r.method] for r in members}
        samples = {name: [sample for r in own for sample in r.samples] for name, own in methods.items()}
        groups[group] = [_together(own, samples) for own in methods.values()]
    return groups


def _together(records: list[Record], every: Mapping[str, list[Measurement]]) -> Record:
    """One record over all kinds of prompt, from a method's `records` by kind. every: the samples of each method."""
    first, samples = records[0], every[records[0].method]
    if len(records) == 1 or not samples:
        return first
    compared = [r.identical for r in records if r.identical is not None]
    steps = [(r.accepted_length, len(r.samples)) for r in records if r.accepted_length is not None]
    theirs, plain = every.get(BASELINE, []), every.get(PLAIN, [])
    return replace(
        first, kind="all", samples=samples, tokens_per_second=Spread.of(list(per_repeat(samples).values())),
        ratio=None if all(r.ratio is None for r in records) else ratio(samples, theirs),  # no ratio on a busy machine
        plain_ratio=None if all(r.plain_ratio is None for r in records) else ratio(samples, plain),
        identical=all(compared) if compared else None, difference=next((r.difference for r in records if r.difference), ""),
        accepted_length=sum(length * n for length, n in steps) / sum(n for _, n in steps) if steps else None,
    )  # fmt: skip


def verdicts(records: Sequence[Record], near: float = NEAR) -> list[Verdict]:
    """A verdict for each group with an exact strategy that wrote the right tokens, without a grammar. near: see :data:`NEAR`."""
    result = []
    for group, methods in pooled(records).items():
        usable = [
            r for r in methods if r.ours and r.exact and r.ratio is not None and not _wrong(r) and not _made_up(r)
            and not parse(r.method).grammar  # with a grammar, a method writes other texts than the baseline
        ]  # fmt: skip
        if not usable:
            continue
        best = chosen(usable, near)
        of_method = [r for r in records if r.group == group and r.method == best.method]
        by_kind = {r.kind: r.ratio.median for r in of_method if r.ratio is not None}
        fastest = max((r for r in methods if r.ratio is not None), key=_median)
        method, call = "", dict[str, Any]()
        if best.random_weights:
            text = f"{best.method}: {_times(best)}. With random weights nobody knows whether drafts pay."
        elif not fastest.ours and fastest.method != BASELINE and near * _median(fastest) > _median(best):
            whose = "" if fastest.engine else "transformers' own "
            text = f"Fastest is {whose}{fastest.method}: {_times(fastest)}. Of ours {best.method}: {_times(best)}."
        elif _median(best) < GAIN:
            text = f"Nothing is gained: the fastest is {best.method}, with {_times(best)}. Leave strategy= out."
        else:
            method, call = best.method, arguments(best)
            text = f"Use {method}: {_times(best)}{_range(by_kind)}{_drafts(best, usable)}{_tokens(best)}."
        result.append(Verdict(*group[:3], method, text, best.tokens_per_second, best.ratio, by_kind, call, group[3]))
    return result


def chosen(records: Sequence[Record], near: float = NEAR) -> Record:
    """The recommended record: ``auto`` if it is about as fast as the fastest method, because it adapts to other prompts; else plain
    decoding if it is about as fast; else the fastest method. near: see :data:`NEAR`.
    """
    best = max(records, key=_median)
    fast = [r for r in records if _median(r) >= near * _median(best)]
    return next((r for name in (AUTO, PLAIN) for r in fast if r.method == name), best)


def arguments(record: Record) -> dict[str, Any]:
    """The arguments of ``generate`` for the measured strategy. A draft model is called ``draft``."""
    variant = parse(record.method)
    call: dict[str, Any] = {"strategy": "+".join(variant.parts)}
    settings = record.settings if len(variant.parts) > 1 else next(iter(record.settings.values()), {})
    if settings:
        call["strategy_config"] = dict(settings)
    if variant.verifier:
        call["verifier"] = variant.verifier
    if variant.loop:
        call["decoders_config"] = dict(variant.loop)
    if record.draft_passes and not any("draft_model" in own for own in record.settings.values()):
        call["assistant_model"] = "draft"
    return call


def _wrong(record: Record) -> bool:
    """Whether the method wrote other float32 tokens than the baseline. In other dtypes, near-ties may change tokens."""
    return record.identical is False and record.dtype == "float32"


def _made_up(record: Record) -> bool:
    """Whether the drafter is synthetic: it knew the text in advance, so no user can reach this speed."""
    return record.method.startswith("synthetic[")


def _median(record: Record) -> float:
    return record.ratio.median if record.ratio is not None else 0.0


def _times(record: Record) -> str:
    return f"{times(_median(record))} times transformers' tokens/s"


def times(ratio: float) -> str:
    """`ratio` as a text such as ``1.3`` or ``17``."""
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


def _range(by_kind: dict[str, float]) -> str:
    """The ratios for the slowest and the fastest kind of prompt, as a text; "" for a single kind."""
    if len(by_kind) < 2:
        return ""
    low, high = min(by_kind, key=by_kind.__getitem__), max(by_kind, key=by_kind.__getitem__)
    return f", from {times(by_kind[low])} ({low}) to {times(by_kind[high])} ({high})"


def _drafts(best: Record, records: Sequence[Record]) -> str:
    plain = next((r for r in records if r.method == PLAIN), None)
    if plain is None or best is plain:
        return "; no draft pays here" if best is plain and len(records) > 1 else ""
    share = _median(best) / _median(plain)
    return f", {times(share)} times plain decoding's" if share >= GAIN else "; plain decoding is as fast here"


def _tokens(record: Record) -> str:
    if record.identical:
        return "; the tokens are the same"
    return "" if record.identical is None else f"; near-ties in {record.dtype} may differ"
