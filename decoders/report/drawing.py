"""Draws the labelled bars of ``report.plot()``."""

from __future__ import annotations

from typing import Any

from ..errors import amount

#: The labels of the parts of :class:`~decoders.report.figures.Timings`.
PARTS = {
    "prepare": "reading the arguments",
    "wait": "waiting for the model",
    "pack": "making the weights ready, once",
    "kernels": "compiling kernels for CUDA, once",
    "check": "checking the model, once",
    "start": "starting the strategy",
    "prefill": "reading the prompt",
    "propose": "drafting",
    "mask": "grammars",
    "core": "the model: steps that verify",
    "observe": "learning from steps",
    "host": "the rest of the steps",
    "compile": "waiting for compilation",
    "finish": "making the result",
    "background": "compiling in the background",
}


def draw(report: Any, lengths: Any, drafts: Any, seconds: Any) -> None:
    """Draws a :class:`~decoders.report.Report` into three axes of matplotlib: tokens per step, draft tokens, seconds."""
    tokens, steps = sum(report.new_tokens), report.steps
    _numbered(lengths, lengths.bar(range(1, len(report.accepted_lengths) + 1), report.accepted_lengths), "{:.0f}")
    lengths.set(
        title=f"{report.strategy}: {amount(tokens, 'token')} in {amount(steps, 'step')}",
        xlabel="tokens that a step wrote:\none of the model's own, the others drafted", ylabel="steps (of every row)",
    )  # fmt: skip
    _numbered(drafts, drafts.bar(["drafted", "accepted"], [report.drafted, report.accepted]), "{:.0f}")
    drafts.set(title=f"{report.acceptance_rate:.0%} accepted", xlabel="draft tokens: checked by the model,\nand right")
    parts = {name: value for name, value in vars(report.timings).items() if value}
    _numbered(seconds, seconds.barh([PARTS[name] for name in parts], list(parts.values())), "{:.2g}")
    seconds.invert_yaxis()
    seconds.set(title=f"{report.tokens_per_second:.0f} tokens/s", xlabel="seconds of the call")


def _numbered(axes: Any, bars: Any, form: str) -> None:
    axes.bar_label(bars, fmt=form.format, fontsize="small", padding=2)
    axes.margins(0.15)
