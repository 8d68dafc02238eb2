"""Where Python does not read the device, what is kept is found without sorting the vocabulary, and is the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList
from transformers.generation import logits_process as hf

from decoders.common.devices import as_recorded
from decoders.hf.preparation import plan_sampling
from decoders.sampling.choice import candidates
from decoders.sampling.processors import OPERATIONS, SamplingInputs, SamplingPlan, process, row_keys
from decoders.sampling.top import MOST_OF_TOP_K, counted, top_k_top_p

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


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["smooth", "ties", "bfloat16", "equal", "peaked", "nearly all masked"]),
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


def test_rows_have_values_of_their_own():
    k, value = torch.tensor([5.0, 700.0])[:, None, None], torch.tensor([0.5, 0.0])[:, None, None]
    for kind in ("smooth", "ties"):
        scores = logits_of(kind, 3)
        assert torch.equal(top_k_top_p(scores, k, value), of_stable_sort(scores, k, value)[0])


@pytest.mark.parametrize("seed", range(4))
def test_a_recorded_step_keeps_what_transformers_keeps(seed):
    logits = logits_of("smooth", seed)
    plan = SamplingPlan(("temperature", "top_k", "top_p", "min_p"), sample=True)
    inputs = SamplingInputs(torch.tensor([0.7, 50.0, 1 - 0.9, 0.02]), row_keys(5, 2, logits.device), torch.tensor([-1]))
    expected = logits.flatten(0, 1)
    for warper in (
        hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(50), hf.TopPLogitsWarper(0.9), hf.MinPLogitsWarper(0.02)
    ):  # fmt: skip
        expected = warper(None, expected)
    read = candidates(logits, plan, inputs, POSITIONS)
    with as_recorded():
        recorded = candidates(logits, plan, inputs, POSITIONS)
        chosen = recorded.choose(plan, inputs, POSITIONS)
    assert torch.equal(recorded.dense(), expected.view_as(logits))
    assert torch.equal(recorded.dense(), read.dense())
    assert torch.equal(chosen, read.choose(plan, inputs, POSITIONS))


def test_a_recorded_step_does_not_sort_the_vocabulary():
    sizes = []

    class Sorts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "sort" in str(function):
                sizes.append(args[0].shape[-1])
            return function(*args, **(kwargs or {}))

    inputs = SamplingInputs(torch.tensor([0.7, 50.0, 0.1]), row_keys(5, 2, POSITIONS.device), torch.tensor([-1]))
    with as_recorded(), Sorts():
        process(logits_of("smooth", 0), SamplingPlan(("temperature", "top_k", "top_p")), inputs, POSITIONS)
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
    plan, values, _ = plan_sampling(processors, 3, GenerationConfig(do_sample=True), ())
    assert plan.operations == (name,) and values == (k,)
