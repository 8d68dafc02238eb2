"""The report for people: where a call's seconds went, who drafted what, and the tree of a step."""

from __future__ import annotations

import itertools
import json
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import decoders
from decoders import Draft, Report, Strategy
from decoders.engine.model import self_check, target
from decoders.errors import SettingsError
from decoders.hf import prepared_call as hf_call
from decoders.report.drawing import PARTS
from decoders.report.figures import Timings
from decoders.strategies import Auto
from decoders.strategy import no_costs
from decoders.testing import prompts, tiny_model

#: Seconds that each part of a call takes by a clock that nothing else moves.
SECONDS = {
    "prepare": 300.0, "pack": 20.0, "check": 10.0, "start": 5.0, "prefill": 0.0, "propose": 3.0, "mask": 0.0, "core": 2.0,
    "observe": 1.0, "host": 7.0, "compile": 0.0, "finish": 40.0, "wait": 0.0, "background": 0.0, "kernels": 0.0,
}  # fmt: skip


class Clock:
    """A clock that stands still but for what is told, and a microsecond whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def spend(self, part: str) -> None:
        self.now += SECONDS[part]

    def before(self, part: str, function: Callable) -> Callable:
        """`function`, which takes the seconds of `part` longer."""

        def slow(*args: Any, **kwargs: Any) -> Any:
            self.spend(part)
            return function(*args, **kwargs)

        return slow


def test_every_second_of_a_call_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    class Slow(Strategy):
        name = "slow"

        def start(self, context: Any) -> None:
            clock.spend("start")

        def propose(self, state: Any, sequences: Any) -> Draft:
            clock.spend("propose")
            return Draft.nothing(len(sequences.length), sequences.length.device)

        def observe(self, state: Any, step: Any) -> None:
            clock.spend("observe")

        def details(self, state: Any) -> dict[str, Any]:
            clock.spend("finish")
            return {}

    class SlowProcessor(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            clock.spend("core")
            return scores

    def criterion(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        clock.spend("host")
        return torch.zeros(len(ids), dtype=torch.bool)

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(hf_call, "prepared_by_transformers", clock.before("prepare", hf_call.prepared_by_transformers))
    monkeypatch.setattr(target, "multiply_few_rows", clock.before("pack", target.multiply_few_rows))
    monkeypatch.setattr(self_check, "check_tree_logits", clock.before("check", self_check.check_tree_logits))
    model, steps = decoders.enable(tiny_model("llama")), 4
    begun = clock.now
    out = model.generate(
        **prompts(1), strategy=Slow(), max_new_tokens=steps, return_dict_in_generate=True, do_sample=False,
        logits_processor=LogitsProcessorList([SlowProcessor()]), stopping_criteria=[criterion],
        decoders_config={"compile": False},
    )  # fmt: skip
    report, whole = out.report, clock.now - begun
    assert report.steps == steps
    for part, seconds in vars(report.timings).items():
        times = steps if part in ("propose", "core", "observe", "host") else 1
        if part == "core" or (part == "prefill" and report.prefill_steps):
            continue  # the first step's core is part of reading the prompt
        assert seconds == pytest.approx(times * SECONDS[part], abs=0.01), part
    assert report.timings.core + report.timings.prefill == pytest.approx(steps * SECONDS["core"], abs=0.01)
    assert report.seconds == pytest.approx(whole, abs=0.001)
    first = sum(SECONDS[part] for part in ("prepare", "pack", "check", "start", "propose", "core"))
    assert report.time_to_first_token == pytest.approx(first, abs=0.01)
    again = model.generate(**prompts(1), strategy=Slow(), max_new_tokens=1, return_dict_in_generate=True).report
    assert again.timings.pack == again.timings.check == 0


@pytest.fixture(scope="module")
def traced() -> tuple[Any, dict[str, Any]]:
    """A batch of two rows by each of several drafters, traced, with what was generated for it."""
    model, tokenizer = decoders.demo.load()
    decoders.enable(model, tokenizer)
    tokenizer.pad_token_id = tokenizer.pad_token_id or 0
    texts = ["def add(a, b):\n    return a + b\n\ndef add(a, b):", "x = 1\nx = 1\nx ="]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    with pytest.MonkeyPatch.context() as patch:
        start, ticks = Auto.start, itertools.count()
        steady = dict(clock=lambda: next(ticks) * 1e-6, costs=no_costs)  # on a busy machine no draft may seem to pay
        patch.setattr(Auto, "start", lambda self, context: start(self, replace(context, **steady)))
        outs = {
            strategy: model.generate(
                **inputs, strategy=strategy, max_new_tokens=12, do_sample=False, return_dict_in_generate=True,
                decoders_config={"trace": True, "compile": False, "prune": False},
            )
            for strategy in ("prompt_lookup", "prompt_lookup+ngram", "auto")
        }  # fmt: skip
    return tokenizer, {
        name: (out.report, out.sequences[:, inputs["input_ids"].shape[1] :]) for name, out in outs.items()
    }


@pytest.mark.parametrize("strategy", ["prompt_lookup", "prompt_lookup+ngram", "auto"])
def test_the_trees_of_a_call_spell_its_tokens(traced: Any, strategy: str) -> None:
    tokenizer, outs = traced
    report, sequences = outs[strategy]
    assert report.accepted > 0
    for row, steps in enumerate(report.written.steps):
        spelt: list[int] = []
        drafters: list[str] = []
        for step in steps:
            assert all(step.parents[child] == parent for parent, child in zip(step.path, step.path[1:], strict=False))
            spelt += [*(step.tokens[node] for node in step.path[1:]), *([step.own] if step.own is not None else [])]
            drafters += [*(step.drafters[node] for node in step.path[1:]), *([""] if step.own is not None else [])]
        assert spelt == sequences[row].tolist() == report.written.tokens[row]
        assert drafters == report.written.drafters[row]
        assert "".join(text for text, _ in report.written.pieces(row)) == tokenizer.decode(spelt)
    named = [who for row in report.written.drafters for who in row if who]
    assert len(named) == report.accepted
    parts = {"suffix", "ngram", "speculative", "medusa"} if strategy == "auto" else set(strategy.split("+"))
    assert set(named) <= parts


def test_a_tree_is_drawn_as_text(traced: Any) -> None:
    report = traced[1]["prompt_lookup+ngram"][0]
    longest = max(range(len(report.written.steps[0])), key=lambda step: len(report.written.steps[0][step].path))
    tree = report.tree(longest)
    lines = str(tree).splitlines()
    assert lines[0].startswith("[") and "+ [" in lines[1] and "(prompt_lookup)" in str(tree)
    assert sum("(the model's own)" in line for line in lines) == 1
    assert repr(tree) == str(tree)
    for wanted in ("step 99 of row 0", "row 7"):
        step, row = (99, 0) if "99" in wanted else (0, 7)
        with pytest.raises(SettingsError, match=wanted):
            report.tree(step, row)
    with pytest.raises(SettingsError, match="trace"):
        Report("auto").tree(0)


def test_a_report_reads_as_a_table_and_shows_itself_in_a_notebook(traced: Any) -> None:
    report = traced[1]["prompt_lookup+ngram"][0]
    lines = str(report).splitlines()
    assert 9 <= len(lines) <= 11 and max(map(len, lines)) < 120
    assert (
        lines[1] == f"same tokens yes, in float32 (checked on {report.checked})"
        and f"{report.accepted} of {report.drafted} tokens accepted" in str(report)
    )
    html = report._repr_html_()
    assert all(f"color:{colour}" in html for colour in report.written.colours().values()) and "<svg" in html
    kept = pickle.loads(pickle.dumps(report))
    assert kept.written.tokenizer is None and kept.written.tokens == report.written.tokens
    assert f"[{report.written.steps[0][0].tokens[0]}]" in str(kept.tree(0)), "a token's text is its id then"
    figures = json.loads(json.dumps(report.as_dict()))
    assert figures["seconds"] == pytest.approx(report.seconds) and "written" not in figures


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({}, "yes, in float32"),
        ({"same_bits": True}, "near-ties may differ on branches of trees"),
        ({"same_bits": False}, "near-ties may differ"),
        ({"exact": False, "verifier": "typical"}, "no: verifier typical is lossy"),
        ({"exact": False}, "no: auto is lossy"),
    ],
)
def test_a_report_says_what_is_promised_of_its_tokens(known: dict[str, Any], said: str) -> None:
    report = Report("auto", **known)
    assert report.same_tokens == report.as_dict()["same_tokens"] == said and said in str(report)


def test_plot_draws_lengths_drafts_and_seconds_and_says_what_they_are(
    traced: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = traced[1]["prompt_lookup"][0]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"hf-decoders\[bench\]"):
            report.plot()
    pytest.importorskip("matplotlib")
    figure = report.plot(tmp_path / "call.png")
    lengths, drafts, seconds = figure.axes
    assert [bar.get_height() for bar in lengths.patches] == report.accepted_lengths
    assert f"{report.steps} steps" in lengths.get_title() and "drafted" in lengths.get_xlabel()
    assert [bar.get_height() for bar in drafts.patches] == [report.drafted, report.accepted]
    assert [label.get_text() for label in drafts.get_xticklabels()] == ["drafted", "accepted"]
    assert {text.get_text() for text in drafts.texts} == {str(report.drafted), str(report.accepted)}
    assert "the model: steps that verify" in [label.get_text() for label in seconds.get_yticklabels()]
    assert set(PARTS) == {field.name for field in fields(Timings)}
    assert (tmp_path / "call.png").stat().st_size > 1000
