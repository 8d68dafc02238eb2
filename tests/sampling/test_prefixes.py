"""Operations that read the text give every node what transformers' processors give to its path alone."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from decoders.engine.decode.sampling import sampling_of
from decoders.hf.operations import PaddedPrompts, TokenPenalties, plan_sampling
from decoders.sampling.choice import candidates
from decoders.sampling.prefixes import READ_TEXT, Prefixes
from decoders.sampling.processors import Masks, SamplingInputs, SamplingPlan, process
from decoders.tree import TreeTensors

from ..versions import not_in_the_oldest

VOCAB, PADDED = 9, 6  # few tokens, so that texts repeat themselves
token, finite = st.integers(0, VOCAB - 1), st.floats(-9, 9, width=32)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Prefixes, Tensor, list[list[list[int]]]]:
    """A block of two rows, how many tokens are new at each node, and the text up to each node as transformers shows it."""
    nodes, width = draw(st.integers(1, 7)), draw(st.integers(0, 2))
    rows = [draw(st.lists(token, min_size=PADDED - left, max_size=14)) for left in (0, width)]
    padding = [[-1] * width, draw(st.lists(token, min_size=width, max_size=width))]
    drafted = torch.tensor([draw(st.lists(token, min_size=nodes, max_size=nodes)) for _ in rows])
    parents = [[-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))] for _ in rows]
    tree = TreeTensors.from_parents(torch.tensor(parents))
    tokens = torch.full((2, 16), 3)  # what earlier steps have left behind the texts
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
        drafted[row, 0] = text[-1]
    prompts, lengths = torch.tensor([PADDED, PADDED - width]), torch.tensor([len(text) for text in rows])
    prefixes = Prefixes(
        tokens, lengths, prompts, drafted, tree.offsets, tree.visible, torch.tensor(padding, dtype=torch.int64)
    )
    texts = [
        [
            [*(p for p in padding[row] if p >= 0), *text]
            + [int(drafted[row, k]) for k in range(1, nodes) if tree.visible[row, q, k]]
            for q in range(nodes)
        ]
        for row, text in enumerate(rows)
    ]
    return prefixes, (lengths - prompts)[:, None] + tree.offsets, texts


def inputs_of(
    each: Sequence[Sequence[LogitsProcessor]], prefixes: Prefixes, sample: bool = False
) -> tuple[SamplingPlan, SamplingInputs]:
    """The plan that the processors of each row have in common, and its tensors."""
    config, requests = GenerationConfig(do_sample=sample), []
    for row, processors in enumerate(each):
        left = prefixes.padding[row][prefixes.padding[row] >= 0]
        ids = torch.cat([left, prefixes.tokens[row, : prefixes.prompt_length[row]]])[None]
        mask = (torch.arange(ids.shape[1]) >= len(left))[None].long()
        padded = PaddedPrompts(ids, mask, VOCAB)
        plan, values, sequences, on_host = plan_sampling(LogitsProcessorList(processors), padded, config, ())
        assert on_host is None
        sampling = SimpleNamespace(values=values, seed=row, sequences=sequences)
        request = dict(plan=plan, sampling=sampling, stopping=SimpleNamespace(tokens=()), padding=[left])
        requests.append(SimpleNamespace(**request))
    assert len({request.plan for request in requests}) == 1
    several: Any = requests
    return requests[0].plan, sampling_of(several, len(requests), torch.device("cpu"))


def check(block: tuple[Prefixes, Tensor, list[list[list[int]]]], each: Sequence[Sequence[LogitsProcessor]]) -> None:
    prefixes, positions, texts = block
    generator = torch.Generator().manual_seed(int(positions.sum()))
    scores = 3 * torch.randn(*positions.shape, VOCAB, generator=generator)
    expected = scores.clone()
    for row, processors in enumerate(each):
        for node, text in enumerate(texts[row]):
            own = scores[row, node][None]
            for processor in processors:
                own = processor(torch.tensor([text]), own)
            expected[row, node] = own[0]
    plan, inputs = inputs_of(each, prefixes)
    assert torch.equal(process(scores, plan, inputs, positions, None, prefixes), expected)
    assert torch.equal(candidates(scores, plan, inputs, positions, None, prefixes=prefixes).dense(), expected)


@not_in_the_oldest
@given(blocks(), st.floats(0.3, 3), st.floats(0.3, 3), st.booleans())
def test_repetition_penalty(block, one, other, padding_counts):
    ends = block[0].padding[1][block[0].padding[1] >= 0]
    starts = [None, None] if padding_counts else [torch.tensor([0]), torch.tensor([len(ends)])]
    check(block, [[hf.RepetitionPenaltyLogitsProcessor(p, s)] for p, s in zip((one, other), starts, strict=True)])


@given(blocks(), st.floats(0.3, 3), st.floats(0.3, 3))
def test_penalty_of_the_prompts_tokens(block, one, other):
    prefixes = block[0]
    each = []
    for row, penalty in enumerate((one, other)):
        left = prefixes.padding[row][prefixes.padding[row] >= 0]
        ids = torch.cat([left, prefixes.tokens[row, : prefixes.prompt_length[row]]])
        each.append([hf.EncoderRepetitionPenaltyLogitsProcessor(penalty, ids[None])])
    check(block, each)


@given(blocks(), finite, finite)
def test_penalties_of_new_tokens(block, frequency, presence):
    check(block, [[TokenPenalties(PADDED, frequency, presence)], [TokenPenalties(PADDED, presence, frequency)]])


@given(blocks(), st.integers(1, 5), st.integers(1, 5))
def test_repeated_ngrams(block, one, other):
    check(block, [[hf.NoRepeatNGramLogitsProcessor(one)], [hf.NoRepeatNGramLogitsProcessor(other)]])


words = st.lists(st.lists(token, min_size=1, max_size=5), min_size=1, max_size=12)


@given(blocks(), words, words)
def test_bad_words(block, one, other):
    check(block, [[hf.NoBadWordsLogitsProcessor(one, [])], [hf.NoBadWordsLogitsProcessor(other, [])]])


@given(blocks(), words, st.lists(finite, min_size=12, max_size=12))
def test_biased_sequences(block, sequences, biases):
    biased: dict[tuple[int, ...], float] = {}
    for sequence, bias in zip(sequences, biases, strict=False):
        if sum(tuple(sequence)[-1] == other[-1] for other in biased) < 2:
            biased[tuple(sequence)] = bias
    check(block, [[hf.SequenceBiasLogitsProcessor(biased)], [hf.SequenceBiasLogitsProcessor({(2,): 1.5})]])


@given(blocks(), st.lists(st.integers(-2, VOCAB + 3), min_size=1), st.integers(0, 3))
def test_of_suppressed_tokens_those_that_the_model_lacks_change_nothing(block, tokens, place):
    check(block, [[hf.SuppressTokensLogitsProcessor(tokens)], [hf.SuppressTokensLogitsProcessor([2])]])
    at = [hf.SuppressTokensAtBeginLogitsProcessor(own, PADDED + place) for own in (tokens, [VOCAB])]
    check(block, [[own] for own in at])


@pytest.mark.parametrize("lacks", [-1, VOCAB, VOCAB + 5])
@pytest.mark.parametrize("place", ["alone", "in front", "last"])
def test_other_processors_of_tokens_that_the_model_lacks_stay_transformers_own(lacks: int, place: str) -> None:
    sequence = {"alone": [lacks], "in front": [lacks, 2], "last": [2, lacks]}[place]
    each: list[LogitsProcessor] = [hf.ForcedBOSTokenLogitsProcessor(lacks)]
    if lacks >= 0:  # they refuse those below 0 themselves
        each += [hf.ForcedEOSTokenLogitsProcessor(9, sequence), hf.NoBadWordsLogitsProcessor([sequence], [])]
        each.append(hf.SequenceBiasLogitsProcessor({tuple(sequence): 1.5}))
    prompts = PaddedPrompts(torch.tensor([[1, 2]]), None, VOCAB)
    for processor in each:
        given = LogitsProcessorList([processor])
        assert plan_sampling(given, prompts, GenerationConfig(), ())[3] is given, processor


@given(blocks(), st.lists(token, min_size=1), st.lists(token, min_size=1), st.integers(0, 3))
def test_tokens_that_are_suppressed_or_forced_at_one_place(block, one, other, place):
    for kind in (
        lambda tokens: hf.SuppressTokensLogitsProcessor(tokens),
        lambda tokens: hf.SuppressTokensAtBeginLogitsProcessor(tokens, PADDED + place),
        lambda tokens: hf.ForcedEOSTokenLogitsProcessor(PADDED + place + 1, tokens),
        lambda tokens: hf.ForcedBOSTokenLogitsProcessor(tokens[0]),
    ):
        check(block, [[kind(one)], [kind(other)]])


@given(blocks(), st.floats(0.3, 3), words)
def test_several_run_in_their_order(block, penalty, sequences):
    check(block, [[
        hf.RepetitionPenaltyLogitsProcessor(penalty), hf.NoRepeatNGramLogitsProcessor(2),
        hf.NoBadWordsLogitsProcessor(sequences, []), TokenPenalties(PADDED, 0.5, -0.25), hf.TemperatureLogitsWarper(0.7),
    ]] * 2)  # fmt: skip


@given(blocks(), st.floats(0.3, 3))
def test_the_few_tokens_left_by_filters_are_those_of_the_whole_vocabulary(block, penalty):
    prefixes, positions, _ = block
    processors = [hf.RepetitionPenaltyLogitsProcessor(penalty), hf.TopKLogitsWarper(4), hf.TopPLogitsWarper(0.8)]
    plan, inputs = inputs_of([processors] * 2, prefixes, sample=True)
    scores = torch.randn(*positions.shape, VOCAB, generator=torch.Generator().manual_seed(1))
    few = candidates(scores, plan, inputs, positions, prefixes=prefixes)
    assert few.tokens is not None
    assert torch.equal(few.dense(), process(scores, plan, inputs, positions, prefixes=prefixes))


@given(blocks(), st.lists(token, min_size=1), st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB))
def test_a_grammar_wins_over_what_is_forced(block, forced, allowed):
    prefixes, positions, _ = block
    here = [hf.ForcedEOSTokenLogitsProcessor(PADDED + int(positions[0, 0]) + 1, forced)]
    plan, inputs = inputs_of([here] * 2, prefixes)
    masks = Masks(torch.tensor(allowed).expand(*positions.shape, VOCAB))
    scores = torch.randn(*positions.shape, VOCAB)
    left = process(scores, plan, inputs, positions, masks, prefixes)
    assert torch.equal(left, candidates(scores, plan, inputs, positions, masks, prefixes=prefixes).dense())
    both = [t for t in range(VOCAB) if allowed[t] and t in forced]
    finite = left[0, 0].isfinite().nonzero().flatten().tolist()
    assert finite == (both or [t for t in range(VOCAB) if allowed[t]])


def test_without_texts_scores_stay_as_they_are():
    plan = SamplingPlan(tuple(READ_TEXT))
    inputs = SamplingInputs(torch.ones(len(READ_TEXT)), torch.tensor([5]), torch.tensor([-1]))
    scores = torch.randn(1, 3, VOCAB)
    assert torch.equal(process(scores, plan, inputs, torch.zeros(1, 3, dtype=torch.int64)), scores)


def test_tokens_outside_the_models_vocabulary_are_left_to_transformers():
    padded = PaddedPrompts(torch.tensor([[1, 2]]), None, VOCAB)
    for processor in (hf.NoBadWordsLogitsProcessor([[1, VOCAB]], []), hf.SequenceBiasLogitsProcessor({(VOCAB,): 1.0})):
        *_, on_host = plan_sampling(LogitsProcessorList([processor]), padded, GenerationConfig(), ())
        assert on_host is not None


@pytest.mark.parametrize("rows", [1, 2])
def test_repeated_prompts_are_known_again(rows):
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]][:rows])
    processor = hf.EncoderRepetitionPenaltyLogitsProcessor(1.5, prompts)
    for ids, known in ((prompts.repeat_interleave(3, 0), True), (prompts + 1, False)):
        padded = PaddedPrompts(ids, None, VOCAB)
        *_, on_host = plan_sampling(LogitsProcessorList([processor]), padded, GenerationConfig(), ())
        assert (on_host is None) == known
