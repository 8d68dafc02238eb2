"""Where Python does not read the device, what is kept is found without sorting the vocabulary, and is the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList
from transformers.generation import logits_process as hf

from decoders.common.host_reads import as_recorded
from decoders.hf.operations import PaddedPrompts, plan_sampling
from decoders.sampling import top
from decoders.sampling.choice import candidates
from decoders.sampling.processors import OPERATIONS, WITHOUT_SORT, SamplingInputs, SamplingPlan, process, row_keys
from decoders.sampling.top import MOST_OF_TOP_K, counted, rank_of, top_k_top_p, top_p_without_sort

NEVER = float("-inf")
VOCAB = 3001
POSITIONS = torch.tensor([[0, 1], [5, 6]])


def logits_of(kind: str, seed: int, vocab: int = VOCAB) -> Tensor:
    """``[2, 2, V]``, at least one finite score per node."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(2, 2, vocab, generator=generator)
    if kind == "ties":
        scores = scores.round()
    elif kind == "bfloat16":
        scores = (scores + 12).bfloat16().float()
    elif kind == "equal":
        scores = torch.ones_like(scores)
    elif kind == "peaked":
        scores = 30 * scores
    elif kind == "one token":
        scores[..., 11] = 1e4
    elif kind == "nearly all masked":
        scores = scores.masked_fill(torch.rand(scores.shape, generator=generator) < 0.998, NEVER)
        scores[..., 7] = 1.0
    return scores


def of_stable_sort(scores: Tensor, k: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What top_k and top_p keep, by float64 sums over the sorted vocabulary, and how near each node's border is to one of them."""
    kth = scores.sort(-1, descending=True).values.gather(-1, (k.long() - 1).expand(2, 2, 1))
    ordered, order = scores.masked_fill(scores < kth, NEVER).sort(dim=-1, stable=True)
    sums = ordered.double().softmax(-1).cumsum(-1)
    dropped = sums <= value.double()
    dropped[..., -1] = False
    near = (sums - value.double()).abs().amin(-1)
    dropped = torch.zeros_like(dropped).scatter(-1, order, dropped)
    return scores.masked_fill((scores < kth) | dropped, NEVER), near


KINDS = st.sampled_from(["smooth", "ties", "bfloat16", "equal", "peaked", "one token", "nearly all masked"])


@given(
    KINDS,
    st.sampled_from([1, 2, 5, 50, 64, 200, MOST_OF_TOP_K]),
    st.floats(0.01, 1.0) | st.sampled_from([0.1, 0.5, 0.9, 0.95, 1.0]),
    st.integers(0, 1 << 30),
)
def test_top_k_and_top_p_keep_what_a_stable_sort_keeps(kind, k, p, seed):
    scores, value = logits_of(kind, seed), torch.tensor(1 - p)
    kept = top_k_top_p(scores, torch.tensor(float(k)), value)
    expected, near = of_stable_sort(scores, torch.tensor([[[k]], [[k]]]), value)
    clear = near > 1e-12  # else a sum equals the border but for rounding
    assert torch.equal(kept[clear], expected[clear])


ALL = torch.full((2, 1, 1), VOCAB)


@given(
    KINDS, st.floats(1e-6, 1.0) | st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.95, 1 - 1e-6, 1.0]), st.integers(0, 1 << 30)
)
def test_top_p_alone_keeps_what_a_stable_sort_keeps(kind, p, seed):
    scores, value = logits_of(kind, seed), torch.tensor(1 - p)
    kept = top_p_without_sort(scores, value)
    expected, near = of_stable_sort(scores, ALL, value)
    clear = near > 1e-9  # else a sum equals the border but for rounding
    assert torch.equal(kept[clear], expected[clear])


@given(KINDS, st.sampled_from(sorted(WITHOUT_SORT)), st.floats(0.001, 0.999), st.integers(0, 1 << 30))
def test_what_is_found_without_a_sort_is_what_a_sort_finds(kind, name, share, seed):
    scores = logits_of(kind, seed)
    value = torch.tensor(share if name != "large_top_k" else float(round(share * 2 * VOCAB)))
    kept, expected = WITHOUT_SORT[name](scores, value) > NEVER, OPERATIONS[name](scores, value) > NEVER
    if name == "large_top_k":
        assert torch.equal(kept, expected)
    else:  # a sum of float32 numbers may end at the border's neighbour, and which of equal scores go is the sort's affair
        probabilities = scores.softmax(-1)
        mass = [(probabilities * tokens).sum(-1) for tokens in (kept, expected)]
        step = (probabilities * (kept != expected)).amax(-1)
        assert bool(((mass[0] - mass[1]).abs() <= step + 1e-5).all())
        assert name == "top_p" or bool(((kept != expected).sum(-1) <= 1 + VOCAB * (step < 1e-6)).all())


def test_ranks_have_the_order_of_scores():
    inf = float("inf")
    scores = torch.tensor([-inf, -3e38, -1.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.0000001, 3e38, inf])
    ranks = rank_of(scores)
    assert torch.equal(ranks[:, None] < ranks, scores[:, None] < scores)


def test_rows_have_values_of_their_own():
    k, value = torch.tensor([5.0, 700.0])[:, None, None], torch.tensor([0.5, 0.0])[:, None, None]
    for kind in ("smooth", "ties"):
        scores = logits_of(kind, 3)
        assert torch.equal(top_k_top_p(scores, k, value), of_stable_sort(scores, k, value)[0])
        assert torch.equal(top_p_without_sort(scores, value), of_stable_sort(scores, ALL, value)[0])


def test_a_row_without_a_token_is_left_as_it_is():
    scores = torch.full((1, 2, VOCAB), NEVER)
    scores[0, 0, 5] = 1.0
    for name, function in WITHOUT_SORT.items():
        assert torch.equal(function(scores, torch.tensor(0.5)), scores), name


@pytest.mark.parametrize(
    "name, values", [("large_top_k", [5.0, 700.0]), ("top_p", [0.5, 0.1]), ("typical_p", [0.3, 0.9])]
)
@pytest.mark.parametrize("by_row", [True, False])
def test_large_batches_are_looked_through_a_few_nodes_at_a_time(monkeypatch, name, values, by_row):
    scores = torch.cat([logits_of("smooth", 4), logits_of("ties", 5)[:, :1]], 1)
    value = torch.tensor(values)[:, None, None] if by_row else torch.tensor(values[0])
    whole, sizes = WITHOUT_SORT[name](scores, value), []

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "scatter_add" in str(function):
                sizes.append(args[2].numel() // VOCAB)
            return function(*args, **(kwargs or {}))

    for most, passes in ((4 * VOCAB + 1, 6), (1, 18)):
        monkeypatch.setattr(top, "MOST_AT_ONCE", most)
        sizes.clear()
        with Sums():
            assert torch.equal(WITHOUT_SORT[name](scores, value), whole)
        assert len(sizes) == passes and max(sizes) == max(most // VOCAB, 1)


#: Operations with their values and transformers' own.
WARPERS = {
    "temperature": (0.7, hf.TemperatureLogitsWarper(0.7)),
    "top_k": (50.0, hf.TopKLogitsWarper(50)),
    "large_top_k": (2000.0, hf.TopKLogitsWarper(2000)),
    "top_p": (1 - 0.9, hf.TopPLogitsWarper(0.9)),
    "min_p": (0.02, hf.MinPLogitsWarper(0.02)),
    "typical_p": (0.8, hf.TypicalLogitsWarper(0.8)),
}
PLANS = [
    ("temperature", "top_k", "top_p", "min_p"),
    ("temperature", "top_p"),
    ("large_top_k", "top_p"),
    ("typical_p",),
]


def inputs_of(names: tuple[str, ...]) -> SamplingInputs:
    return SamplingInputs(
        torch.tensor([WARPERS[name][0] for name in names]), row_keys(5, 2, POSITIONS.device), torch.tensor([-1])
    )


@pytest.mark.parametrize("names", PLANS, ids="-".join)
@pytest.mark.parametrize("seed", range(2))
def test_a_recorded_step_keeps_what_transformers_keeps(seed, names):
    logits, plan, inputs = logits_of("smooth", seed), SamplingPlan(names, sample=True), inputs_of(names)
    expected = logits.flatten(0, 1)
    for name in names:
        expected = WARPERS[name][1](None, expected)
    read = candidates(logits, plan, inputs, POSITIONS)
    with as_recorded():
        recorded = candidates(logits, plan, inputs, POSITIONS)
        chosen = recorded.choose(plan, inputs, POSITIONS)
    assert torch.equal(recorded.dense(), expected.view_as(logits))
    assert torch.equal(recorded.dense(), read.dense())
    assert torch.equal(chosen, read.choose(plan, inputs, POSITIONS))


@pytest.mark.parametrize("names", PLANS, ids="-".join)
def test_a_recorded_step_does_not_sort_the_vocabulary(names):
    sizes = []

    class Sorts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "sort" in str(function):
                sizes.append(args[0].shape[-1])
            return function(*args, **(kwargs or {}))

    with as_recorded(), Sorts():
        process(logits_of("smooth", 0), SamplingPlan(names), inputs_of(names), POSITIONS)
    assert not sizes


@pytest.mark.parametrize("k", [MOST_OF_TOP_K, MOST_OF_TOP_K + 1, 10 * VOCAB])
def test_both_names_of_top_k_keep_the_same(k):
    scores = logits_of("ties", 1)
    large = OPERATIONS["large_top_k"](scores, torch.tensor(float(k)))
    assert torch.equal(large, hf.TopKLogitsWarper(k)(None, scores))
    if k <= MOST_OF_TOP_K:
        assert torch.equal(OPERATIONS["top_k"](scores, torch.tensor(float(k))), large)


@pytest.mark.parametrize("vocab", [1, 1023, 1024, 1025, 5000])
def test_tokens_are_counted_over_blocks(vocab):
    marked = torch.rand(2, 3, vocab, generator=torch.Generator().manual_seed(0)) < 0.3
    assert torch.equal(counted(marked).long(), marked.long().cumsum(-1))


@pytest.mark.parametrize("k, name", [(1, "top_k"), (MOST_OF_TOP_K, "top_k"), (MOST_OF_TOP_K + 1, "large_top_k")])
def test_the_value_of_top_k_says_which_operation_it_is(k, name):
    processors = LogitsProcessorList([hf.TopKLogitsWarper(k)])
    prompts = PaddedPrompts(torch.ones(1, 3, dtype=torch.int64), None, 50)
    plan, values, *_ = plan_sampling(processors, prompts, GenerationConfig(do_sample=True), ())
    assert plan.operations == (name,) and values == (k,)
