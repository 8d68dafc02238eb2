"""A drafter with a smaller vocabulary: its tokens in the target's ids, drawn with the target's noise."""

from __future__ import annotations

import pytest
import torch

from decoders.drafters import DraftVocabulary
from decoders.errors import UnsupportedError
from decoders.sampling import SamplingInputs, SamplingPlan, gumbel_noise

IDS = torch.tensor([0, 3, 4, 9, 11])
D2T = IDS - torch.arange(5)
GREEDY = SamplingPlan()
POSITIONS = torch.tensor([[0, 3], [1, 2]])


def inputs(values: tuple[float, ...] = (0.0,)) -> SamplingInputs:
    return SamplingInputs(torch.tensor(values), torch.tensor([5, 6]), torch.tensor([9, -1]))


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(0))


def test_tables_say_the_same(logits) -> None:
    mask = torch.zeros(16, dtype=torch.bool)
    mask[IDS] = True
    for vocabulary in (
        DraftVocabulary.of(16, d2t=D2T),
        DraftVocabulary.of(16, t2d=mask),
        DraftVocabulary.of(16, D2T, mask),
    ):
        assert torch.equal(vocabulary.ids, IDS) and len(vocabulary) == 5
    assert DraftVocabulary.of(16).ids is None and len(DraftVocabulary.of(16)) == 16


def test_tables_that_disagree_or_name_other_tokens_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="different tokens"):
        DraftVocabulary.of(16, D2T, torch.ones(16, dtype=torch.bool))
    for size, d2t in ((10, D2T), (16, torch.tensor([1, 0]))):
        with pytest.raises(UnsupportedError, match=f"outside of 0 … {size - 1}"):
            DraftVocabulary.of(size, d2t)


@pytest.mark.parametrize(
    "plan, values",
    [
        (GREEDY, (0.0,)), (SamplingPlan(sample=True), (0.0,)), (SamplingPlan(("temperature",), sample=True), (0.5,)),
        (SamplingPlan(("temperature", "top_k"), sample=True), (0.7, 3.0)),
    ],
)  # fmt: skip
def test_tokens_are_those_of_the_whole_vocabulary_with_all_others_ruled_out(logits, plan, values) -> None:
    scores = torch.full((2, 2, 16), float("-inf")).index_copy(-1, IDS, logits)
    whole = DraftVocabulary(16).best(scores, 2, plan, inputs(values), POSITIONS, keep_scores=True)
    ours = DraftVocabulary.of(16, D2T).best(logits, 2, plan, inputs(values), POSITIONS, keep_scores=True)
    assert torch.equal(ours.tokens, whole.tokens) and torch.equal(ours.scores, whole.scores)
    torch.testing.assert_close(ours.weights, whole.weights)
    if plan == SamplingPlan(sample=True):
        noisy = scores + gumbel_noise(inputs().keys, POSITIONS, 16)
        assert torch.equal(ours.tokens[..., 0], noisy.argmax(-1))


def test_a_stop_token_keeps_the_targets_id(logits) -> None:
    plan = SamplingPlan(("min_new_tokens",))
    favoured = logits.index_fill(-1, torch.tensor([3]), 50.0)
    best = DraftVocabulary.of(16, D2T).best(favoured, 1, plan, inputs((2.0,)), POSITIONS)
    assert (best.tokens[..., 0] == 9).tolist() == [[False, True], [False, True]]


def test_a_context_made_by_hand_is_greedy(logits) -> None:
    assert torch.equal(
        DraftVocabulary.of(16, D2T).best(logits, 1, None, None, POSITIONS).tokens[..., 0], IDS[logits.argmax(-1)]
    )
