"""What is selected is what transformers' processors keep, and what is drawn from it is drawn from all of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from decoders.sampling import choice as module
from decoders.sampling.choice import Candidates, candidates
from decoders.sampling.largest import first_largest, largest
from decoders.sampling.processors import Masks, SamplingInputs, SamplingPlan, choose, gumbel_noise, process, row_keys

CPU = torch.device("cpu")
NEVER = float("-inf")
WARPERS = {
    "temperature": lambda value: hf.TemperatureLogitsWarper(value),
    "top_k": lambda value: hf.TopKLogitsWarper(int(value)),
    "top_p": lambda value: hf.TopPLogitsWarper(value),
    "min_p": lambda value: hf.MinPLogitsWarper(value),
    "typical_p": lambda value: hf.TypicalLogitsWarper(value),
}
VALUES = {
    "temperature": st.floats(0.1, 3.0),
    "top_k": st.sampled_from([1, 2, 5, 50, 64, 65, 200, 1000, 10_000]).map(float),
    "top_p": st.floats(0.01, 0.999) | st.sampled_from([0.1, 0.5, 0.75, 0.9, 0.95]),
    "min_p": st.floats(0.001, 1.0) | st.sampled_from([0.5, 0.25, 1.0]),
    "typical_p": st.floats(0.05, 0.99) | st.sampled_from([0.2, 0.5, 0.9, 0.95]),
}
KINDS = ("smooth", "ties", "bfloat16", "flat", "equal", "peaked", "masked", "nearly all masked")


def logits_of(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Finite or ``-inf``, at least one of them finite per row."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(shape, generator=generator)
    if kind == "ties":
        scores = scores.round()
    elif kind == "bfloat16":
        scores = (scores + 12).bfloat16().float()
    elif kind == "flat":
        scores = scores / 100
    elif kind == "equal":
        scores = torch.ones(shape)
    elif kind == "peaked":
        scores = 30 * scores
    elif "masked" in kind:
        out = torch.rand(shape, generator=generator) < (0.5 if kind == "masked" else 0.98)
        out[..., int(torch.randint(0, shape[-1], (), generator=generator))] = False
        scores = scores.masked_fill(out, NEVER)
    return scores


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[str, float]]:
    """Some of the operations, in transformers' order."""
    names = [name for name in WARPERS if draw(st.booleans())]
    return [(name, draw(VALUES[name])) for name in names]


def inputs_of(operations: list[tuple[str, float]], rows: int, stop: tuple[int, ...] = (1,)) -> SamplingInputs:
    values = [1 - value if name == "top_p" else value for name, value in operations]
    return SamplingInputs(torch.tensor(values or (0.0,)), row_keys(7, rows, CPU), torch.tensor(stop))


def plan_of(operations: list[tuple[str, float]], **options: bool) -> SamplingPlan:
    return SamplingPlan(tuple(name for name, _ in operations), sample=True, **options)


def warped(logits: Tensor, operations: list[tuple[str, float]]) -> Tensor:
    """Transformers' own processors, one after the other."""
    scores = logits.flatten(0, 1).clone()
    for name, value in operations:
        scores = WARPERS[name](value)(None, scores)
    return scores.view_as(logits)


vocabularies = st.integers(3, 200) | st.sampled_from([1000, 4097, 5000])


@given(plans(), st.sampled_from(KINDS), vocabularies, st.integers(0, 1 << 30))
@example([("top_k", 1.0), ("top_p", 0.5)], "ties", 5, 237)  # one of two equal scores is dropped
def test_kept_and_drawn_is_what_transformers_processors_keep(operations, kind, vocab, seed):
    logits = logits_of(kind, (2, 3, vocab), seed)
    positions = torch.tensor([[0, 1, 1], [5, 6, 7]])
    plan, inputs = plan_of(operations), inputs_of(operations, 2)
    expected = warped(logits, operations)
    left = candidates(logits, plan, inputs, positions)
    torch.testing.assert_close(left.dense(), expected, rtol=0, atol=0)
    drawn = left.choose(plan, inputs, positions)
    assert torch.equal(drawn, choose(expected, plan, inputs, positions))
    assert torch.equal(drawn, left.settled().choose(plan, inputs, positions))
    own = expected.log_softmax(-1).gather(-1, drawn[..., None])[..., 0]
    torch.testing.assert_close(left.log_probabilities(drawn), own)


@given(plans(), st.sampled_from(KINDS), vocabularies, st.integers(1, 9), st.booleans(), st.integers(0, 1 << 30))
def test_best_continuations_are_the_best_of_the_noisy_scores(operations, kind, vocab, count, sample, seed):
    logits = logits_of(kind, (1, 4, vocab), seed)
    positions, count = torch.tensor([[0, 1, 2, 2]]), min(count, vocab)
    operations = operations if sample else []
    plan, inputs = plan_of(operations), inputs_of(operations, 1)
    plan = plan if sample else SamplingPlan()
    expected = warped(logits, operations)
    noisy = (expected + gumbel_noise(inputs.keys, positions, vocab) if sample else expected).log_softmax(-1)
    tokens, weights = candidates(logits, plan, inputs, positions, at_least=count).best(count, plan, inputs, positions)
    torch.testing.assert_close(weights, noisy.topk(count).values)
    torch.testing.assert_close(noisy.gather(-1, tokens), weights)
    assert all(len(set(node)) == count and min(node) >= 0 for node in tokens[0].tolist()), "each token once"


@pytest.mark.parametrize("name", list(WARPERS))
def test_order_of_the_plan_is_the_order_of_the_operations(name):
    for seed, kind in enumerate(KINDS):
        logits = logits_of(kind, (1, 5, 700), seed)
        for other in WARPERS:
            operations = [(n, {"top_k": 30.0, "temperature": 0.7}.get(n, 0.6)) for n in (other, name, "temperature")]
            plan, inputs = plan_of(operations), inputs_of(operations, 1)
            left = candidates(logits, plan, inputs, torch.zeros(1, 5, dtype=torch.int64))
            assert torch.equal(left.dense(), warped(logits, operations))


@pytest.mark.parametrize("operations", [[], [("top_k", 20.0), ("top_p", 0.8)], [("temperature", 0.5), ("min_p", 0.1)]])
@pytest.mark.parametrize("vocab", [40, 9000])
def test_grammars_and_a_minimum_of_new_tokens_rule_out_what_the_step_rules_out(operations, vocab):
    logits = logits_of("smooth", (2, 3, vocab), 3)
    positions = torch.tensor([[0, 1, 2], [2, 3, 4]])
    allowed = torch.rand(2, 3, vocab + 5, generator=torch.Generator().manual_seed(0)) < 0.1
    allowed[..., 7] = True
    allowed[0, 0] = False
    allowed[0, 0, 3] = True  # only an end, which is too early: the grammar wins
    operations = [("min_new_tokens", 2.0), ("min_new_tokens", 3.0), *operations]
    inputs = inputs_of(operations, 2, stop=(3, 7, -1))
    for masks, dead in (
        (Masks(allowed), True),
        (Masks(allowed.index_fill(2, torch.tensor(9), True)), False),
        (None, False),
    ):
        plan = plan_of(operations, masked=masks is not None)
        expected = process(logits, plan, inputs, positions, masks)
        left = candidates(logits, plan, inputs, positions, masks)
        assert torch.equal(left.dense(), expected)
        assert torch.equal(left.choose(plan, inputs, positions), choose(expected, plan, inputs, positions))
        assert torch.isfinite(expected[0, 0, 3]) == dead


@pytest.mark.parametrize("vocab", [40, 9000])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("operations", [[], [("top_k", 20.0), ("top_p", 0.8)], [("temperature", 0.5)]], ids=str)
@pytest.mark.parametrize("own", ["minimum", "stop tokens", "both", "all"])
def test_every_row_has_its_own_minimum_and_its_own_stop_tokens(operations, own, masked, vocab):
    logits = logits_of("smooth", (3, 3, vocab), 3)
    logits[..., [0, 3, 7, 9]] += 5  # what a minimum rules out would be chosen
    positions = torch.tensor([[0, 1, 2], [2, 3, 4], [4, 5, 6]])
    plan = plan_of([("min_new_tokens", 3.0), *operations], masked=masked)
    inputs = inputs_of([("min_new_tokens", 3.0), *operations], 3, stop=(3, 7, -1))
    values, stops = inputs.values, inputs.stop_tokens
    if own != "stop tokens":
        values = values.repeat(3, 1)
        values[:, 0] = torch.tensor([2.0, 5.0, 3.0])
        values[2] *= 0.9 if own == "all" else 1.0
    if own != "minimum":
        stops = torch.tensor([[3, 7, -1], [9, -1, -1], [0, 3, 9]])
    inputs = SamplingInputs(values, inputs.keys, stops)
    masks = None
    if masked:
        allowed = torch.rand(3, 3, vocab, generator=torch.Generator().manual_seed(0)) < 0.5
        allowed[..., 5] = True
        masks = Masks(allowed)
    expected = process(logits, plan, inputs, positions, masks)
    left = candidates(logits, plan, inputs, positions, masks)
    assert torch.equal(left.dense(), expected)
    assert torch.equal(left.choose(plan, inputs, positions), choose(expected, plan, inputs, positions))


def test_logits_are_left_as_they_are():
    logits = logits_of("smooth", (1, 3, 500), 0)
    before = logits.clone()
    operations = [("min_new_tokens", 2.0), ("temperature", 0.5), ("top_p", 0.9)]
    plan, inputs, positions = plan_of(operations), inputs_of(operations, 1), torch.zeros(1, 3, dtype=torch.int64)
    masks = Masks(torch.ones(1, 3, 500, dtype=torch.bool))
    candidates(logits, plan, inputs, positions, masks).choose(plan, inputs, positions)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("operations", [[], [("top_k", 20.0)], [("temperature", 0.7), ("top_p", 0.9)]])
def test_bfloat16_logits_are_processed_as_their_float32_values(operations):
    logits = logits_of("smooth", (1, 3, 9000), 0).bfloat16()
    plan, inputs, positions = plan_of(operations), inputs_of(operations, 1), torch.zeros(1, 3, dtype=torch.int64)
    there, here = (candidates(x, plan, inputs, positions) for x in (logits, logits.float()))
    assert torch.equal(there.choose(plan, inputs, positions), here.choose(plan, inputs, positions))
    assert torch.equal(there.dense(), here.dense())
    assert torch.equal(there.choose(SamplingPlan(), inputs, positions), here.choose(SamplingPlan(), inputs, positions))


def test_a_large_vocabulary_is_not_sorted(monkeypatch):
    """Where top_k is set or the distribution has a few likely tokens, sorts are of candidates."""
    widest = []
    for name in ("sort", "argsort", "topk"):
        monkeypatch.setattr(Tensor, name, _noting(getattr(Tensor, name), widest))
    logits = logits_of("smooth", (1, 9, 100_000), 1) * 2
    positions = torch.zeros(1, 9, dtype=torch.int64)
    for operations in (
        [("temperature", 0.7), ("top_k", 50.0), ("top_p", 0.9), ("min_p", 0.05), ("typical_p", 0.9)],
        [("top_p", 0.9)],
        [("min_p", 0.1)],
        [("typical_p", 0.8)],
    ):
        plan, inputs = plan_of(operations), inputs_of(operations, 1)
        candidates(logits, plan, inputs, positions).choose(plan, inputs, positions)
    assert max(widest) < 20_000


def _noting(function, widest):
    def noted(self, *args, **options):
        widest.append(self.shape[-1])
        return function(self, *args, **options)

    return noted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_a_draw_from_all_tokens_is_that_of_all_their_noise(monkeypatch, kind, scale):
    monkeypatch.setattr(module, "_CHUNK", 6000)
    keys, vocab = row_keys(3, 2, CPU), 9001
    for seed in range(5):
        scores = logits_of(kind, (2, 4, vocab), seed) * scale
        positions = torch.arange(8).view(2, 4) + seed
        expected = (scores + gumbel_noise(keys, positions, vocab)).argmax(-1)
        plan = SamplingPlan(sample=True)
        inputs = SamplingInputs(torch.zeros(1), keys, torch.tensor([0]))
        assert torch.equal(Candidates.whole(scores).choose(plan, inputs, positions), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 63, 64, 4096, 4097, 9000, 20_001])
def test_largest_of_blocks_are_the_largest(kind, vocab):
    scores = logits_of(kind, (3, vocab), vocab)
    assert torch.equal(first_largest(scores), scores.argmax(-1))
    for count in (1, 5, 64):
        values, tokens = largest(scores, count)
        assert torch.equal(values, scores.topk(min(count, vocab)).values)
        assert torch.equal(scores.gather(1, tokens), values)
        assert all(len(set(row)) == len(row) for row in tokens.tolist())


def test_nodes_that_are_not_contiguous_in_memory_are_processed_alike():
    logits = logits_of("smooth", (2, 7, 9100), 0)
    operations = [("top_k", 30.0), ("top_p", 0.8)]
    inputs, positions = inputs_of(operations, 2), torch.zeros(2, 4, dtype=torch.int64)
    cut = logits[:, 3:, :9000]
    for plan in (plan_of(operations), SamplingPlan(sample=True), SamplingPlan()):
        chosen = (
            candidates(x, plan, inputs, positions).choose(plan, inputs, positions) for x in (cut, cut.contiguous())
        )
        assert torch.equal(*chosen)


def test_traced_code_takes_the_definitions():
    """A compiled step has no Python that reads values: one graph, the same tokens."""
    operations = [("temperature", 0.7), ("top_k", 20.0), ("top_p", 0.8)]
    plan, inputs, positions = plan_of(operations), inputs_of(operations, 1), torch.zeros(1, 3, dtype=torch.int64)

    def drawn(logits: Tensor) -> Tensor:
        return candidates(logits, plan, inputs, positions).choose(plan, inputs, positions)

    logits = logits_of("smooth", (1, 3, 300), 2)
    assert torch.equal(torch.compile(drawn, fullgraph=True, backend="eager")(logits), drawn(logits))
