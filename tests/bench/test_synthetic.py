"""A drafter that is right as often as it is told, and writes what plain decoding writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import decoders
from decoders.bench.synthetic import Synthetic
from decoders.errors import SettingsError
from decoders.strategies import PromptLookup
from decoders.strategies.merged import Merged
from decoders.testing import checks_for, decode, prompts, tiny_model
from decoders.testing.conditions import Conditions
from decoders.testing.kit import Check, check_alone
from decoders.testing.models import VOCAB
from decoders.testing.toy_grammar import TokenAutomaton

EAGER: dict[str, Any] = {"decoders_config": {"compile": False}, "return_dict_in_generate": True}


def test_one_number_is_that_of_every_token_and_several_are_shares_by_position() -> None:
    assert Synthetic.of("0.5").settings.acceptance == (0.5, 0.25, 0.125, 0.0625, 0.03125)
    assert (
        Synthetic.of("0.9,0.8").settings.acceptance == (0.9, 0.8)
        and str(Synthetic.of("0.9,0.8")) == "synthetic[0.9,0.8]"
    )
    assert str(Synthetic.of("0.8")) == "synthetic[0.8]"  # as the user has typed it
    for text, said in [
        ("0.8,0.9", "none may be larger than the share before it"),
        ("1.2", "between 0 and 1"),
        ("high", "not 'high'"),
    ]:
        with pytest.raises(SettingsError, match=said):
            Synthetic.of(text)


DRAWN = {"do_sample": True, "temperature": 1.0, "seed": 4}


@pytest.mark.parametrize(
    ("text", "length", "options"),
    [
        ("0.9,0.7,0.4", 3.0, {}),
        ("0.8", 1 + sum(0.8**n for n in range(1, 6)), DRAWN),
        ("0", 1.0, DRAWN),
    ],
)
def test_drafts_are_accepted_as_often_as_told_and_the_text_is_plain_decodings(
    text: str, length: float, options: dict[str, Any]
) -> None:
    model, ids = decoders.enable(tiny_model("llama")), torch.tensor([[5, 6, 7], [0, 8, 9]])
    given = {
        "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
        "max_new_tokens": 90,
        "pad_token_id": 0,
        **EAGER,
        **options,
    }
    plain = model.generate(ids, strategy="autoregressive", **given).sequences
    drafter = Synthetic.of(text)
    drafter.learn([5, 6, 7], plain[0, 3:].tolist())
    drafter.learn([8, 9], plain[1, 3:].tolist())
    out = model.generate(ids, strategy=drafter, **given)
    assert torch.equal(out.sequences, plain)
    assert out.report.mean_accepted_length == pytest.approx(length, rel=0.12)


@pytest.mark.parametrize("merged", [False, True], ids=["alone", "merged"])
def test_under_a_grammar_drafts_are_accepted_as_often_as_told(merged: bool) -> None:
    model, inputs = decoders.enable(tiny_model("llama")), prompts(2)
    grammar = TokenAutomaton.random(3, VOCAB, ())
    options: dict[str, Any] = {**EAGER, **DRAWN, "max_new_tokens": 60, "grammar": grammar}
    plain = decode(model, inputs, "autoregressive", **options).sequences
    drafter = Synthetic.of("0.9,0.7,0.4")
    for mask, prompt, row in zip(inputs["attention_mask"], inputs["input_ids"], plain, strict=True):
        drafter.learn(prompt[mask.bool()].tolist(), row[len(prompt) :].tolist())
    out = decode(model, inputs, Merged([drafter, PromptLookup()]) if merged else drafter, **options)
    assert torch.equal(out.sequences, plain)
    assert out.report.mean_accepted_length == pytest.approx(3.0, rel=0.15)


#: Of the checks: those of a drafter that knows what comes.
QUICK = ("check_settings", "check_finished_rows_idle", "check_draft_tokens_are_accepted")


@pytest.fixture(scope="module")
def known() -> Synthetic:
    """One that knows what the kit's prompts are continued with greedily."""
    model, drafter = decoders.enable(tiny_model("llama")), Synthetic.of("1,0.8,0.8,0.5")
    for rows in (1, 4):
        inputs = prompts(rows)
        plain = decode(model, inputs, "autoregressive", max_new_tokens=16).sequences
        for mask, prompt, row in zip(inputs["attention_mask"], inputs["input_ids"], plain, strict=True):
            drafter.learn(prompt[mask.bool()].tolist(), row[len(prompt) :].tolist())
    return drafter


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if check.__name__ in QUICK else pytest.mark.slow, id=check.__name__)
        for check in checks_for(Synthetic.of("1"))
    ],
)
def test_strategy_conforms(check: Check, known: Synthetic) -> None:
    check_alone(check, Conditions(models=("llama",)), known)


def test_without_a_known_text_nothing_is_drafted() -> None:
    model, ids = decoders.enable(tiny_model("llama")), torch.tensor([[5, 6, 7]])
    out = model.generate(ids, strategy=Synthetic.of("1"), max_new_tokens=9, **EAGER)
    assert out.report.drafted == 0 and out.report.steps == 9


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_a_scheduler_that_come_and_go_find_their_texts(rows: int) -> None:
    from decoders.bench.load import arrivals, rehearse_load, scheduled

    model = decoders.enable(tiny_model("llama"))
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"decoders_config": {"compile": False}, "pad_token_id": 0}
    load = arrivals([[3, 4, 5], [6, 7]], 5, median=12, longest=20)
    drafter, steps = Synthetic.of("1,1"), []
    rehearse_load(model, [drafter], load, options)
    asked = drafter.propose
    drafter.propose = lambda state, sequences: steps.append(1) or asked(state, sequences)  # type: ignore[method-assign,func-returns-value]
    scheduled(model, drafter, load, rows, options)
    assert len(steps) < 0.6 * sum(request.new_tokens for request in load)
