"""`strategy="auto"` in calls: the same tokens, whatever it chooses among, and a report of what it chose."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import decoders
from decoders import Context, Draft, Sequences, Step, Strategy
from decoders.engine.decode.session import Session
from decoders.errors import DecodersError, SettingsError, UnknownNameError, UnsupportedError
from decoders.registry import registry
from decoders.strategies import Auto, Speculative
from decoders.strategies.auto_candidates import Candidate
from decoders.strategy import no_costs, no_memory
from decoders.testing import assert_same_tokens, decode, prompts, reference, tiny_draft, tiny_model
from decoders.testing.company import check_rests
from decoders.testing.conditions import Conditions
from decoders.testing.kit import CHECKS
from decoders.testing.models import VOCAB
from decoders.testing.toy_grammar import TokenAutomaton

from .conftest import needs_mtp
from .test_feature_rows import RAGGED, a_dflash, an_eagle, an_mtp, text

EAGER = {"compile": False}
SAMPLED = dict(do_sample=True, seed=4, temperature=0.9, top_k=30)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `auto` does depends on the call alone: a look takes a microsecond on a clock of its own, steps cost what they cost
    where nothing was measured, and nothing is remembered of calls that another process may have slowed down.
    """
    start = Auto.start

    def in_its_own_time(self: Auto, context: Context) -> Any:
        ticks = itertools.count()
        own = replace(context, clock=lambda: next(ticks) * 1e-6, costs=no_costs, memory=no_memory)
        return start(self, own)

    rebatch = Auto.rebatch

    def without_measuring(self: Auto, state: Any, rows: torch.Tensor, context: Context) -> Any:
        return rebatch(self, state, rows, replace(context, costs=no_costs))

    monkeypatch.setattr(Auto, "start", in_its_own_time)
    monkeypatch.setattr(Auto, "rebatch", without_measuring)


@functools.cache
def enabled(name: str = "llama") -> PreTrainedModel:
    return decoders.enable(tiny_model(name))


def auto_call(rows: int, name: str = "llama", **options: Any) -> Any:
    return decode(enabled(name), prompts(rows), "auto", max_new_tokens=40, decoders_config=EAGER, **options)


@pytest.mark.in_turns
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("assistant", [False, True], ids=["alone", "with a draft model"])
def test_tokens_are_those_of_plain_decoding(rows: int, sampling: dict[str, Any], assistant: bool) -> None:
    extra = {"assistant_model": tiny_draft("llama")} if assistant else {}
    model, inputs = enabled(), prompts(rows)
    expected = reference(model, inputs, "autoregressive" if sampling else None, max_new_tokens=40, **sampling)
    out = auto_call(rows, **sampling, **extra)
    assert_same_tokens(model, inputs, expected.sequences, out.sequences, "auto")
    assert out.report.exact and "suffix" in out.report.details["candidates"]
    assert ("speculative" in out.report.details["candidates"]) == assistant


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers the models have whose sessions have read their prompts, in order."""
    models: list[int] = []
    prefill = Session.prefill

    def noted(self: Session, *args: Any, **options: Any) -> Any:
        models.append(self.target.model.config.num_hidden_layers)
        return prefill(self, *args, **options)

    monkeypatch.setattr(Session, "prefill", noted)
    return models


@pytest.mark.usefixtures("steady")
def test_a_draft_model_that_is_never_asked_reads_no_prompt(read: list[int]) -> None:
    """Reading a long prompt takes longer than many steps: a call that is too short for a look at the draft model is spared it."""
    draft = tiny_draft("llama", num_hidden_layers=1)
    model = decoders.enable(tiny_model("llama", seed=1))
    out = decode(model, prompts(1), "auto", max_new_tokens=16, decoders_config=EAGER, assistant_model=draft)
    assert out.report.details["candidates"]["speculative"]["runs"] == 0
    assert read == [2]


@pytest.mark.in_turns
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.usefixtures("steady")
def test_a_draft_model_that_is_asked_late_reads_all_that_there_is(
    read: list[int], monkeypatch: pytest.MonkeyPatch, rows: int, sampling: dict[str, Any]
) -> None:
    looks: list[int] = []

    def seventh(self: Candidate, rate: float, seconds: float) -> bool:
        looks.append(len(read))
        return len(looks) > 6

    monkeypatch.setattr(Candidate, "due", seventh)
    model, inputs, draft = enabled(), prompts(rows), tiny_draft("llama", num_hidden_layers=1)
    expected = reference(model, inputs, "autoregressive" if sampling else None, max_new_tokens=40, **sampling)
    read.clear()
    out = auto_call(rows, strategy_config={"candidates": ["speculative"]}, assistant_model=draft, **sampling)
    assert_same_tokens(model, inputs, expected.sequences, out.sequences, "auto")
    assert 0 < out.report.details["candidates"]["speculative"]["runs"] < out.report.steps
    assert read == [2, 1]
    assert looks[:7] == [1] * 7, "it was read at once"


@pytest.mark.usefixtures("steady")
def test_with_a_grammar_it_drafts_what_the_grammar_forces() -> None:
    tokenizer = decoders.demo.load("target")[1]
    model = decoders.enable(decoders.demo.load("target")[0])
    inputs = tokenizer("# A record:\n", return_tensors="pt")
    schema = {
        "type": "object", "properties": {"identification": {"type": "boolean"}, "description": {"type": "boolean"}},
        "required": ["identification", "description"], "additionalProperties": False,
    }  # fmt: skip
    options: dict[str, Any] = dict(
        max_new_tokens=60, grammar=decoders.json_schema(schema), tokenizer=tokenizer, decoders_config=EAGER,
        assistant_model=decoders.demo.load("draft")[0],
    )  # fmt: skip
    out = decode(model, inputs, "auto", **options)
    options.pop("assistant_model")
    plain = decode(model, inputs, "autoregressive", **options)
    assert torch.equal(out.sequences, plain.sequences)
    assert json.loads(tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    assert out.report.details["candidates"]["grammar"]["right"] > 0
    assert out.report.steps < plain.report.steps


@pytest.mark.usefixtures("steady")
def test_the_report_says_what_was_chosen_when_and_what_was_left_out_why() -> None:
    out = auto_call(1)
    details = out.report.details
    assert json.loads(json.dumps(out.report.as_dict()))["details"] == details
    choices = details["choices"]
    assert sum(choice["steps"] for choice in choices) == out.report.steps
    assert [choice["step"] for choice in choices] == [sum(c["steps"] for c in choices[:i]) for i in range(len(choices))]
    assert sum(choice["tokens"] * choice["steps"] for choice in choices) == pytest.approx(
        40, abs=0.01 * len(choices) * 40
    )
    assert details["left_out"]["speculative"] == "the call has no assistant_model"
    assert details["left_out"]["grammar"] == "the call has no grammar"
    assert "medusa" in details["left_out"]
    for candidate in details["candidates"].values():
        assert candidate["right"] <= out.report.steps
    assert sum(candidate["runs"] for candidate in details["candidates"].values()) > 0


def test_costs_are_measured_once_and_kept(tmp_path: Path) -> None:
    config = {"compile": False, "cost_cache": str(tmp_path)}
    for _ in range(2):
        decode(enabled(), prompts(1), "auto", max_new_tokens=4, decoders_config=config)
        [file] = tmp_path.iterdir()
    first = file.stat().st_mtime_ns
    decode(enabled(), prompts(1, seed=5), "auto", max_new_tokens=4, decoders_config=config)
    assert file.stat().st_mtime_ns == first


@pytest.mark.usefixtures("steady")
def test_candidates_and_their_settings_are_the_users() -> None:
    out = auto_call(1, strategy_config={"candidates": ["prompt-lookup"], "config": {"prompt_lookup": {"length": 2}}})
    assert list(out.report.details["candidates"]) == ["prompt_lookup"]
    assert len(out.report.accepted_lengths) <= 3


@pytest.mark.in_turns
@pytest.mark.parametrize("merged", ["prompt_lookup+ngram", "prompt_lookup+suffix", "token_recycling+ngram"])
@pytest.mark.parametrize("rows", [1, 3])
def test_merged_drafters_that_can_rest_are_candidates(merged: str, rows: int) -> None:
    out = auto_call(rows, strategy_config={"candidates": [merged]})
    expected = reference(enabled(), prompts(rows), max_new_tokens=40)
    assert list(out.report.details["candidates"]) == [merged]
    assert_same_tokens(enabled(), prompts(rows), expected.sequences, out.sequences, merged)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {"candidates": ["lookahead"]},
            SettingsError,
            r"'lookahead' has to see every step.*strategy='lookahead\+prompt_lookup'",
        ),
        ({"candidates": ["threshold"]}, SettingsError, "'threshold' has to see every step"),
        ({"candidates": ["suffix+lookahead"]}, SettingsError, r"'suffix\+lookahead' has to see every step"),
        ({"candidates": ["prompt_lokup"]}, UnknownNameError, "prompt_lookup"),
        ({"candidates": ["auto"]}, SettingsError, "do not name auto"),
        ({"candidates": []}, SettingsError, "candidates"),
        ({"config": {"lookahead": {}}}, SettingsError, "'lookahead', which is not a candidate"),
        ({"config": {"suffix": {"node": 3}}}, SettingsError, "nodes"),
    ],
)
def test_candidates_that_cannot_be_are_refused(config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        auto_call(1, strategy_config=config)


@pytest.mark.parametrize("candidates", [["lookahead"], ["suffix", "prompt_lokup"]])
def test_an_object_with_candidates_that_cannot_be_is_refused_in_every_call(candidates: list[str]) -> None:
    strategy = Auto(candidates=candidates)
    for _ in range(2):
        with pytest.raises(DecodersError, match="has to see every step|prompt_lookup"):
            decode(enabled(), prompts(1), strategy, max_new_tokens=8, decoders_config=EAGER)


def test_other_verifiers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="coupled"):
        auto_call(1, verifier="rejection", **SAMPLED)


class Windowed(Strategy):
    """Runs a node that is no draft token."""

    name = "windowed"

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        topology = decoders.Topology((-1, 0, -1), (0, 1, 1))
        return Draft(torch.zeros(len(sequences.length), 2, dtype=torch.int64), topology)


class Tree(Strategy):
    """Drafts trees of its own shape in every row, sometimes right."""

    name = "rows_tree"

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        rows = len(sequences.length)
        parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, 0, 0, 0]])[:rows]
        tokens = torch.stack([sequences.tokens[:, 3 + i] for i in range(3)], 1)
        return Draft(tokens, decoders.TreeTensors.from_parents(parents))


def test_a_candidate_with_nodes_of_its_own_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Auto, "start", _among(Windowed()))
    with pytest.raises(UnsupportedError, match="'windowed': this strategy runs other nodes"):
        auto_call(1)


@pytest.mark.usefixtures("steady")
def test_trees_of_every_row_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Auto, "start", _among(Tree()))
    out = auto_call(3)
    expected = reference(enabled(), prompts(3), max_new_tokens=40)
    assert_same_tokens(enabled(), prompts(3), expected.sequences, out.sequences, "trees")
    assert out.report.details["candidates"]["rows_tree"]["runs"] > 0


def _among(strategy: Strategy) -> Any:
    """`Auto.start` with `strategy` in the place of every candidate that it makes by name."""
    start = Auto.start

    def changed(self: Auto, context: Context) -> Any:
        one = Auto(candidates=(strategy.name,))
        return start(one, replace(context, strategy=lambda name, settings: strategy))

    return changed


def test_a_draft_model_that_was_left_out_knows_the_text_when_it_is_asked_again() -> None:
    """As its own draft the target is always right, so also after a rest of any length."""

    class Rested(Strategy):
        name = "rested"
        takes_assistant = True

        def start(self, context: Context) -> dict[str, Any]:
            inner = Speculative(length=3)
            return {"inner": inner, "state": inner.start(context), "step": 0}

        def propose(self, state: dict[str, Any], sequences: Sequences) -> Draft:
            state["step"] += 1
            if state["step"] % 4:
                return Draft.nothing(len(sequences.length), sequences.length.device)
            return state["inner"].propose(state["state"], sequences)

        def observe(self, state: dict[str, Any], step: Step) -> None:
            state["inner"].observe(state["state"], step)

    out = decode(
        enabled(), prompts(2), Rested(), max_new_tokens=35, decoders_config=EAGER, assistant_model=tiny_model("llama"),
    )  # fmt: skip
    assert out.report.steps == 20  # three steps of one token, then one of four
    assert out.report.acceptance_rate == 1.0


class ForgetsWhatItIsNot(Strategy):
    """Says that it rests, and takes every block for its own."""

    name = "forgets"
    rests = True

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        return Draft.chain(sequences.last.expand(-1, 2).contiguous())

    def observe(self, state: Any, step: Step) -> None:
        assert step.nodes.shape[1] >= 3 and torch.equal(step.nodes[:, 1], step.nodes[:, 0]), "not my block"


def test_the_kit_checks_the_promise_to_rest() -> None:
    assert check_rests in CHECKS
    with pytest.raises(AssertionError, match="not my block"):
        check_rests(ForgetsWhatItIsNot(), Conditions())
    check_rests(Speculative(), Conditions())


def test_it_is_listed_first() -> None:
    assert next(iter(registry().strategies())) == "auto"


#: Two heads at a time, which read different layers, and one with a drafter that reads none.
AMONG = [
    pytest.param((a_dflash, an_eagle), (), id="dflash, eagle3"),
    pytest.param((an_mtp,), ("suffix",), id="mtp, suffix", marks=needs_mtp),
]


def among(makers: Any, others: tuple[str, ...]) -> tuple[Any, Auto]:
    made = [make(length=3) for make in makers]
    config = {own.name: own.settings.model_dump(exclude_defaults=True) for _, own in made}
    return made[0][0], Auto(candidates=(*config, *others), config=config)


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("makers, others", AMONG)
@pytest.mark.parametrize("how", ["greedy", "sampled", "grammar"])
def test_auto_with_heads_writes_what_plain_decoding_writes(makers: Any, others: tuple[str, ...], how: str) -> None:
    model, auto = among(makers, others)
    options: dict[str, Any] = dict(max_new_tokens=24, decoders_config=EAGER)
    if how == "sampled":
        options |= dict(do_sample=True, temperature=0.8, seed=3)
    if how == "grammar":
        stops = [5, 9]
        options |= dict(grammar=[TokenAutomaton.random(3, VOCAB, stops), None, None], eos_token_id=stops)
    out = decode(model, prompts(3), auto, **options)
    assert torch.equal(out.sequences, decode(model, prompts(3), "autoregressive", **options).sequences)
    asked = out.report.details["candidates"]
    assert all(asked[make(length=3)[1].name]["proposed"] > 0 for make in makers) and not out.report.details["left_out"]


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("makers, others", AMONG)
def test_rows_come_and_go_beside_a_head_in_auto(makers: Any, others: tuple[str, ...]) -> None:
    model, auto = among(makers, others)
    found = []
    for strategy in ("autoregressive", auto):
        with decoders.Scheduler(model, strategy=strategy, rows=3, pad_token_id=0, decoders_config=EAGER) as scheduler:
            asked = [
                scheduler.submit(text(number, prompt), max_new_tokens=new)
                for number, (prompt, new) in enumerate(RAGGED)
            ]
            for generation in asked:
                generation.result(120)
            found.append([tuple(generation.tokens) for generation in asked])
    assert found[0] == found[1]


@pytest.mark.usefixtures("steady")
def test_a_head_without_its_files_is_left_out_unless_it_was_set() -> None:
    out = auto_call(1, strategy_config={"candidates": ["suffix", "eagle3"]})
    assert list(out.report.details["candidates"]) == ["suffix"] and "eagle3" in out.report.details["left_out"]
    with pytest.raises(SettingsError, match="no/such"):
        auto_call(1, strategy_config={"candidates": ["eagle3"], "config": {"eagle3": {"head": "no/such"}}})
