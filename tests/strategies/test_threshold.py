"""The threshold's rule, by hand, against an independent reference, and on the path that looks at the device once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from decoders.drafters import Expansion
from decoders.errors import SettingsError
from decoders.strategies import Threshold
from decoders.strategies.threshold import _State, first_rejected
from decoders.strategy import Draft, Sequences, Step
from decoders.testing import Spy, assert_same_tokens, decode, prompts, reference
from decoders.tree import Topology

EAGER = {"compile": False, "prefill_chunk": 8}
SAMPLING = dict(do_sample=True, seed=5, temperature=0.8, top_k=40)


@dataclass
class Scripted:
    """A draft model that gives tokens 1, 2, 3, … with probabilities of the test's choice. `made`: passes so far."""

    probabilities: Tensor  # [B, K]
    made: int = 0
    passes: int = 0

    def begin(self, sequences: Sequences) -> None:
        self.made = 0

    def extend(self) -> Expansion:
        weights = self.probabilities[:, self.made].log()[:, None, None]
        self.made += 1
        self.passes += 1
        return Expansion(torch.full(weights.shape, self.made), weights, None)

    def drafted(self, count: int) -> Tensor:
        return torch.arange(1, count + 1).expand(len(self.probabilities), -1)

    def observe(self, step: Step, own_nodes: int, displaced: int = 0) -> None:
        pass


def scripted(*rows: list[float], threshold: float = 0.4, waits: bool = False, length: int = 16) -> _State:
    probabilities = torch.tensor(rows)
    drafter: Any = Scripted(probabilities)
    return _State(drafter, None, None, torch.full((len(rows),), threshold), length, waits)


def sequences(rows: int, finished: list[bool] | None = None) -> Sequences:
    length = torch.full((rows,), 4)
    ended = torch.tensor(finished or [False] * rows)
    return Sequences(torch.zeros(rows, 64, dtype=torch.int64), length, length, ended, length)


def outcome(draft: Draft, accepted: list[int]) -> Step:
    """A step over `draft` in which every row accepts so many of its draft tokens."""
    rows, n = draft.tokens.shape[0], draft.tokens.shape[1] + 1
    nodes = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), draft.tokens], dim=1)
    path = torch.arange(n).expand(rows, n)
    return Step(
        nodes, nodes, path, torch.tensor(accepted), torch.tensor(accepted) + 1, torch.zeros(rows, n, 8),
        torch.zeros(rows, n, 4), sequences(rows),
    )  # fmt: skip


def test_rows_that_have_ended_keep_no_one_drafting():
    state = scripted([1.0] * 16, [0.5, 0.5] + [1.0] * 14)
    draft = Threshold().propose(state, sequences(2, finished=[True, False]))
    assert state.drafter.made == 2 and draft.tokens[1].tolist() == [1, 2]


def test_a_draft_has_the_scores_that_its_tokens_were_drawn_from(monkeypatch):
    state, scores = scripted([0.9, 0.1, 1.0]), torch.randn(1, 1, 8)
    extend = state.drafter.extend
    monkeypatch.setattr(state.drafter, "extend", lambda: replace(extend(), scores=scores * state.drafter.made))
    draft = Threshold().propose(state, sequences(1))
    assert torch.equal(draft.scores, torch.cat([scores, scores * 2], dim=1))


@pytest.mark.parametrize("start, accepted, limit", [(0.1, 1, 0.05), (0.94, 0, 0.95)])
def test_the_threshold_stays_within_its_bounds(start, accepted, limit):
    strategy, state = Threshold(), scripted([1.0], threshold=start, length=1)
    for _ in range(3):
        strategy.observe(state, outcome(strategy.propose(state, sequences(1)), [accepted]))
    assert state.threshold.tolist() == pytest.approx([limit])


def test_the_first_rejected_node_of_a_tree_is_the_likeliest_continuation():
    """Root - a(0.5), b(0.3); a - c(0.4), d(0.1): after `a` the likeliest rejected one is c, after c there is none."""
    draft = Draft(torch.tensor([[5, 6, 7, 8]] * 4), Topology.from_parents([-1, 0, 0, 1, 1]))
    weights = torch.tensor([[0.5, 0.3, 0.4, 0.1]] * 4).log()
    path = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 3, 3, 4], [0, 2, 2, 3, 4]])
    step: Any = SimpleNamespace(path=path, accepted=torch.tensor([0, 1, 2, 1]))
    assert first_rejected(draft, weights, step).tolist() == pytest.approx([0.5, 0.4, -1, -1])


def test_a_draft_token_that_was_kept_back_was_not_rejected():
    draft, weights = Draft.chain(torch.tensor([[5, -1]])), torch.tensor([[0.3, 0.2]]).log()
    step: Any = SimpleNamespace(path=torch.tensor([[0, 1, 2]]), accepted=torch.tensor([1]))
    assert first_rejected(draft, weights, step).tolist() == [-1]


@pytest.mark.parametrize("bounds", [dict(threshold=0.01), dict(threshold=0.99), dict(lowest=0.5)], ids=str)
def test_a_threshold_outside_its_bounds_is_refused(bounds):
    with pytest.raises((SettingsError, ValidationError), match="must lie between"):
        Threshold(**bounds)


class Reference:
    """vgel's loop for one row and greedy decoding, on plain forward passes."""

    def __init__(self, target: Any, draft: Any) -> None:
        self.target, self.draft = target, draft

    @torch.no_grad()
    def run(self, text: list[int], new: int, most: int = 16) -> tuple[list[int], list[int]]:
        """The tokens, and the length of every draft."""
        threshold, lengths, end = 0.4, [], len(text) + new
        while len(text) < end:
            product, draft_tokens, products = 1.0, [], []
            while len(draft_tokens) < most:
                p = self.draft(torch.tensor([text + draft_tokens])).logits[0, -1].double().softmax(-1)
                draft_tokens.append(int(p.argmax()))
                product *= float(p.max())
                products.append(product)
                if product < threshold:
                    break
            lengths.append(len(draft_tokens))
            choices = self.target(torch.tensor([text + draft_tokens])).logits[0, len(text) - 1 :].argmax(-1).tolist()
            right = next(
                (i for i, draft_token in enumerate(draft_tokens) if draft_token != choices[i]), len(draft_tokens)
            )
            threshold = threshold - 0.1 if right == len(draft_tokens) else (threshold + products[right]) / 2
            threshold = min(max(threshold, 0.05), 0.95)
            text = (text + choices[: right + 1])[:end]
        return text, lengths


def test_drafts_of_every_row_are_as_long_as_those_of_the_plain_loop(target, near):
    spy = Spy(Threshold())
    out = decode(target, prompts(3), spy, assistant_model=near, max_new_tokens=50, decoders_config=EAGER)
    for row in range(3):
        ids = prompts(3)["input_ids"][row].tolist()[5 * row :]
        text, lengths = Reference(target, near).run(ids, 50)
        assert out.sequences[row, 5 * row :].tolist() == text
        assert [int((seen.draft.tokens[row] >= 0).sum()) for seen in spy.seen if not seen.finished[row]] == lengths
        assert len(set(lengths)) > 2, "the rule was put to the test"


class Waiting(Threshold):
    """As on a device that must be waited for; `looks` counts the steps' looks."""

    looks: list[int]

    def start(self, context: Any) -> _State:
        state, self.looks = super().start(context), []
        state.waits = True
        return state

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        self.looks.append(0)
        return super().propose(state, sequences)

    def _kept(self, products: Tensor, floor: Tensor) -> Tensor:  # type: ignore[override]
        self.looks[-1] += 1
        return Threshold._kept(products, floor)


@pytest.mark.in_turns
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("draw", [{}, SAMPLING], ids=["greedy", "sampled"])
def test_looking_once_gives_the_same_tokens(target, near, rows, draw):
    strategy = Waiting()
    options = dict(max_new_tokens=50, decoders_config=EAGER, **draw)
    expected = reference(target, prompts(rows), "autoregressive", **options).sequences
    out = decode(target, prompts(rows), strategy, assistant_model=near, **options)
    assert_same_tokens(target, prompts(rows), expected, out.sequences, "look once")
    # One call for the look, if there was one, and one for the draft.
    assert set(strategy.looks) <= {1, 2} and max(strategy.looks) == 2


def test_a_draft_that_stays_sure_reaches_its_full_length_over_several_steps():
    strategy, state = Threshold(), scripted([1.0] * 16, waits=True)
    lengths = [strategy.propose(state, sequences(1)).tokens.shape[1] for _ in range(5)]
    assert lengths == [4, 8, 16, 16, 16]


def test_a_draft_that_turns_unsure_is_looked_at_early_again():
    strategy, state = Threshold(), scripted([1.0] * 16, waits=True)
    for _ in range(3):
        strategy.propose(state, sequences(1))
    state.drafter.probabilities = torch.full((1, 16), 0.5)
    passes = []
    for _ in range(2):
        draft = strategy.propose(state, sequences(1))
        passes.append(state.drafter.made)
        assert draft.tokens[0, :2].tolist() == [1, 2] and (draft.tokens[0, 2:] == -1).all()
    assert passes[1] == 2, "two tokens were of use the last time"


@pytest.mark.parametrize("most", [1, 2, 3, 5, 32])
def test_looking_once_never_exceeds_the_longest_draft(most):
    strategy, state = Threshold(), scripted([1.0] * 40, waits=True, length=most)
    for _ in range(6):
        assert strategy.propose(state, sequences(1)).tokens.shape[1] <= most
    assert state.drafter.made == most
