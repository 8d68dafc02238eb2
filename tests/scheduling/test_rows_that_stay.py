"""When requests come and go, strategies keep what they know of the rows that stay: drafts are those of a request by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import decoders
from decoders.engine.decode import calibration
from decoders.engine.decode.sessions import Sessions
from decoders.engine.model.compiled.forward_pass import ForwardPass
from decoders.heads.medusa import HeadsConfig, MedusaHeads, save_heads
from decoders.strategies import Auto, Lookahead, Medusa, PromptLookup, Speculative, Staged, Suffix, Threshold
from decoders.strategies.merged import Merged, MergedState
from decoders.strategy import Context, Strategy, no_costs

from .conftest import DESIGN, EAGER, SIZE, scheduler_of, text_of

#: Lengths of prompts and new tokens.
RAGGED = [(5, 19), (17, 4), (40, 14), (2, 25), (9, 2), (23, 16)]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, llama: PreTrainedModel) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("heads")
    tree = tuple((i,) for i in range(40)) + tuple((i, j) for i in range(4) for j in range(12))
    save_heads(MedusaHeads(HeadsConfig(heads=2, layers=1, hidden_size=32, vocab_size=SIZE, tree=tree)), folder)
    return str(folder)


def counting(strategy: Strategy, starts: list[int]) -> Strategy:
    """The same, noting how many rows there were whenever it started. It knows no costs: sizes of drafts would follow the clock."""

    class Counting(type(strategy)):  # type: ignore[misc]
        def start(self, context: Context) -> Any:
            starts.append(context.rows)
            return super().start(replace(context, costs=no_costs))

        def rebatch(self, state: Any, rows: Tensor, context: Context) -> Any:
            return super().rebatch(state, rows, replace(context, costs=no_costs))

    return Counting(strategy.parts) if isinstance(strategy, Merged) else Counting(strategy.settings)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda heads: Lookahead(window=2, ngram=3), marks=pytest.mark.slow),  # as "staged-lookahead"
        pytest.param(lambda heads: Medusa(heads=heads), marks=pytest.mark.slow),  # as "with-medusa"
        pytest.param(lambda heads: Threshold(threshold=0.2), marks=pytest.mark.slow),  # as "tree"
        lambda heads: Threshold(tree="dynamic", max_length=4),
        pytest.param(lambda heads: Staged(passes=2, length=6), marks=pytest.mark.slow),
        lambda heads: Staged(passes=2, length=6, stage="lookahead", stage_config={"window": 2, "ngram": 3}),
        pytest.param(lambda heads: Staged(passes=2, length=6, stage="prompt_lookup+suffix"), marks=pytest.mark.slow),
        lambda heads: Merged([PromptLookup(length=3), Medusa(heads=heads)]),
        pytest.param(lambda heads: Merged([Suffix(remember=0), Speculative(length=3)]), marks=pytest.mark.slow),
    ],
    ids=["lookahead", "medusa", "threshold", "tree", "staged", "staged-lookahead", "staged-merged", "with-medusa", "with-model"],
)  # fmt: skip
def test_drafts_are_those_of_a_request_by_itself(
    llama: PreTrainedModel, draft: PreTrainedModel, heads: str, make: Callable
) -> None:
    strategy, starts = make(heads), []
    # What is worth verifying depends on the clock.
    settings = {"compile": False, "prune": False}
    options: dict[str, Any] = {"strategy": counting(strategy, starts), "decoders_config": settings}
    if strategy.needs_assistant:
        options["assistant_model"] = draft

    def booked(rows: int) -> list[tuple]:
        with scheduler_of(llama, rows=rows, **options) as scheduler:
            asked = [scheduler.submit(text_of(n, p), max_new_tokens=new) for n, (p, new) in enumerate(RAGGED)]
            for generation in asked:
                generation.result(120)
        reports = [generation.report for generation in asked]
        return [
            (report.steps, report.drafted, report.accepted, tuple(g.tokens))
            for report, g in zip(reports, asked, strict=True)
        ]

    alone = booked(1)
    del starts[:]
    assert booked(3) == alone
    assert len(starts) == 1, "it started anew when rows came or went"
    assert sum(accepted for _, _, accepted, _ in alone) > 0, "nothing was accepted, so nothing was tested"


def test_auto_keeps_the_rates_of_rows_that_stay(llama: PreTrainedModel) -> None:
    starts: list[int] = []
    with scheduler_of(
        llama, rows=3, strategy=counting(Auto(candidates=("suffix", "prompt_lookup")), starts)
    ) as scheduler:
        asked = [scheduler.submit(text_of(n, p), max_new_tokens=new) for n, (p, new) in enumerate(RAGGED)]
        for generation in asked:
            generation.result(120)
    assert len(starts) == 1


def test_auto_measures_no_more_numbers_of_rows_than_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows wait while it measures."""
    measured: list[int] = []
    plain = calibration.measure

    def noted(forward_pass: ForwardPass, sessions: Sessions, rows: int, *args: Any) -> Any:
        measured.append(rows)
        return plain(forward_pass, sessions, rows, *args)

    monkeypatch.setattr(calibration, "measure", noted)
    model = decoders.enable(DESIGN(1))
    with scheduler_of(model, rows=4, strategy="auto", decoders_config={"compile": False}) as scheduler:
        asked = [scheduler.submit(text_of(n, p), max_new_tokens=new) for n, (p, new) in enumerate(RAGGED)]
        for generation in asked:
            generation.result(120)
    assert measured == [1, 4]


def test_auto_knows_its_rate_however_many_requests_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where steps take a thousandth of the measured seconds."""
    plain, states = calibration.measure, []

    def slow(*args: Any, **options: Any) -> Any:
        return [point.model_copy(update={"seconds": 1000 * point.seconds}) for point in plain(*args, **options)]

    class Watched(Auto):
        def observe(self, state: Any, step: Any) -> None:
            super().observe(state, step)
            states.append((state.seconds, state.costs.step(1)))

    monkeypatch.setattr(calibration, "measure", slow)
    model = decoders.enable(DESIGN(1))
    with scheduler_of(model, strategy=Watched(), decoders_config=EAGER) as scheduler:
        for number in range(40):
            scheduler.submit(text_of(number, 5), max_new_tokens=3).result(120)
    seconds, expected = states[-1]
    assert seconds < 100 * expected


def test_strategies_say_whether_they_keep_rows() -> None:
    class Forgets(PromptLookup):
        rebatch = Strategy.rebatch

    state = MergedState([None, None], [], 8)
    assert PromptLookup().keeps_rows(None) and not Forgets().keeps_rows(None)
    assert Merged([Suffix(), PromptLookup()]).keeps_rows(state)
    assert not Merged([Suffix(), Forgets()]).keeps_rows(state)
