"""Strategies that read prompts share their steps in a scheduler: each request is drafted for as by itself, and starts nothing anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import decoders
from decoders.strategies import DFlash, Eagle3, Mtp, PromptLookup, TokenRecycling
from decoders.strategies.merged import Merged
from decoders.strategy import Context, Draft, PromptChunk, Sequences, Strategy
from decoders.testing.models import VOCAB

from ..scheduling.test_rows_that_stay import counting
from . import test_dflash, test_eagle3
from .conftest import needs_mtp

EAGER = {"compile": False, "prune": False}  # what is verified must not depend on the clock
#: Lengths of prompts and new tokens: rows come, go, and change their places; some prompts are read in several stretches.
RAGGED = [(5, 19), (17, 4), (140, 14), (1, 25), (9, 2), (23, 16), (131, 6)]


def an_eagle(**settings: Any) -> tuple[PreTrainedModel, Strategy]:
    return test_eagle3.target(), Eagle3(head=test_eagle3.written("authors"), **settings)


def a_merged() -> tuple[PreTrainedModel, Strategy]:
    model, eagle = an_eagle(tree="static", length=2, nodes=24, children=20)
    return model, Merged([PromptLookup(length=3), eagle])


def an_mtp(**settings: Any) -> tuple[PreTrainedModel, Strategy]:
    from . import test_mtp as module

    return module.with_layers("llama"), Mtp(**settings)


def a_dflash(**settings: Any) -> tuple[PreTrainedModel, Strategy]:
    return test_dflash.target(), DFlash(draft_model=test_dflash.written("authors"), **settings)


def text(seed: int, length: int) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def booked(model: PreTrainedModel, strategy: Strategy, rows: int, **options: Any) -> list[tuple]:
    """Steps, draft tokens, accepted ones and text of every request, with so many at a time."""
    with decoders.Scheduler(
        model, strategy=strategy, rows=rows, pad_token_id=0, decoders_config=EAGER, **options
    ) as scheduler:
        asked = [
            scheduler.submit(text(number, prompt), max_new_tokens=new, seed=number)
            for number, (prompt, new) in enumerate(RAGGED)
        ]
        for generation in asked:
            generation.result(120)
    return [(g.report.steps, g.report.drafted, g.report.accepted, tuple(g.tokens)) for g in asked]


@pytest.mark.parametrize(
    "make, sample",
    [
        pytest.param(
            lambda: an_eagle(tree="dynamic", length=3, nodes=40, children=32, beam=4), True, marks=pytest.mark.slow
        ),
        pytest.param(lambda: an_eagle(tree="none", length=3), False, marks=pytest.mark.slow),
        pytest.param(a_merged, False, marks=pytest.mark.slow),
        pytest.param(an_mtp, False, marks=[needs_mtp, pytest.mark.slow]),
        pytest.param(lambda: an_mtp(tree="dynamic", nodes=24), True, marks=needs_mtp),
        pytest.param(a_dflash, False, marks=pytest.mark.slow),
        (lambda: a_dflash(tree="static", nodes=40, children=24), True),
    ],
    ids=["eagle-tree", "eagle-chain", "eagle-merged", "mtp", "mtp-tree", "dflash", "dflash-tree"],
)
def test_drafts_are_those_of_a_request_by_itself(make: Any, sample: bool) -> None:
    model, strategy = make()
    starts: list[int] = []
    alone = booked(model, strategy, 1, do_sample=sample)
    assert booked(model, counting(strategy, starts), 3, do_sample=sample) == alone
    assert len(starts) == 1, "they did not share their steps, or it started anew when rows came or went"
    if strategy.name != "eagle3" or sample:  # the random head's chains are never right
        assert sum(accepted for _, _, accepted, _ in alone) > 0, "nothing was accepted, so nothing was tested"


def test_logits_of_prompts_are_learnt_from_in_a_batch() -> None:
    model, strategy = test_eagle3.target(), TokenRecycling(prompt_logits=True)
    alone = [each[3] for each in booked(model, "autoregressive", 1, do_sample=False)]
    starts: list[int] = []
    together = booked(model, counting(strategy, starts), 3, do_sample=False)
    assert [each[3] for each in together] == alone
    assert len(starts) == 1
    assert sum(accepted for _, _, accepted, _ in together) > 0


class Shown(Strategy):
    """Keeps what it is shown of every row's prompt, and drafts nothing."""

    name = "shown"
    summary = "Sees prompts."

    def start(self, context: Context) -> list[list[int]]:
        return [[] for _ in range(context.rows)]

    def rebatch(self, state: list[list[int]], rows: torch.Tensor, context: Context) -> list[list[int]]:
        return [state[row] if row >= 0 else [] for row in rows.tolist()]

    def prefill(self, state: list[list[int]], chunk: PromptChunk) -> None:
        assert (chunk.positions.diff(dim=1) == 1).all()
        for row, (tokens, valid) in enumerate(zip(chunk.tokens, chunk.valid, strict=True)):
            if not valid.any():  # a row that stays: behind all that it holds
                assert chunk.positions[row, 0] >= len(state[row])
            state[row] += tokens[valid].tolist()

    def propose(self, state: list[list[int]], sequences: Sequences) -> Draft:
        lengths, texts = sequences.prompt_length.tolist(), sequences.tokens.tolist()
        assert state == [row[: length - 1] for row, length in zip(texts, lengths, strict=True)]
        return Draft.nothing(len(state), sequences.length.device)


class ShownAnew(Shown):
    """The same where no row can be kept: it is shown all texts again, as far as they have come."""

    name = "shown_anew"

    def keeps_rows(self, state: list[list[int]]) -> bool:
        return False

    def propose(self, state: list[list[int]], sequences: Sequences) -> Draft:
        for read, text, length in zip(state, sequences.tokens.tolist(), sequences.prompt_length.tolist(), strict=True):
            assert len(read) >= length - 1 and read == text[: len(read)]
        return Draft.nothing(len(state), sequences.length.device)


class ShownLogits(Shown):
    """Looks at the logits of prompts: greedily they say what the model would write."""

    name = "shown_logits"
    prompt_logits = True

    def prefill(self, state: list[list[int]], chunk: PromptChunk) -> None:
        super().prefill(state, chunk)
        row = int(chunk.valid.any(1).nonzero()[0])
        read = state[row]
        with torch.no_grad():
            expected = test_eagle3.target()(torch.tensor([read])).logits[0]
        assert chunk.logits is not None
        valid = chunk.valid[row]
        torch.testing.assert_close(
            chunk.logits[row][valid], expected[chunk.positions[row][valid]], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    "strategy", [pytest.param(ShownAnew(), marks=pytest.mark.slow), ShownLogits()], ids=lambda strategy: strategy.name
)
def test_what_is_shown_is_what_the_target_computes(strategy: Strategy) -> None:
    plain = [each[3] for each in booked(test_eagle3.target(), "autoregressive", 1, do_sample=False)]
    assert [each[3] for each in booked(test_eagle3.target(), strategy, 3, do_sample=False)] == plain


def test_every_prompt_is_shown_whole_and_once() -> None:
    model, strategy = test_eagle3.target(), Shown()
    plain = [each[3] for each in booked(model, "autoregressive", 1, do_sample=False)]
    together = booked(model, strategy, 3, do_sample=False)
    assert [each[3] for each in together] == plain


def test_a_strategy_that_keeps_no_rows_is_given_one_request_at_a_time() -> None:
    class Forgets(Shown):
        rebatch = Strategy.rebatch

    starts: list[int] = []

    class Counts(Forgets):
        def start(self, context: Context) -> list[list[int]]:
            starts.append(context.rows)
            return super().start(context)

    assert not Forgets().rebatches and Shown().rebatches
    assert not Merged([PromptLookup(), Forgets()]).rebatches and Merged([PromptLookup(), Shown()]).rebatches
    plain = [each[3] for each in booked(test_eagle3.target(), "autoregressive", 1, do_sample=False)]
    assert [each[3] for each in booked(test_eagle3.target(), Counts(), 3, do_sample=False)] == plain
    assert starts == [1] * len(RAGGED)
