"""Processing equals transformers' own, and the noise is what it claims to be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats
from transformers.generation import logits_process as hf

from decoders.sampling.choice import candidates
from decoders.sampling.prefixes import READ_TEXT
from decoders.sampling.processors import (
    LEAST_TEMPERATURE,
    OPERATIONS,
    SamplingInputs,
    SamplingPlan,
    choose,
    gumbel_noise,
    mix64,
    process,
    row_keys,
)

CPU = torch.device("cpu")
VOCAB = 50
MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def inputs(*values: float, rows: int = 2, stop: tuple[int, ...] = (3, 7, -1)) -> SamplingInputs:
    return SamplingInputs(torch.tensor(values or (0.0,)), row_keys(0, rows, CPU), torch.tensor(stop))


def random_scores(kind: str, seed: int) -> torch.Tensor:
    """``[2, 3, V]`` scores: smooth, full of ties, or with tokens that are ruled out already."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(2, 3, VOCAB, generator=generator)
    if kind == "ties":
        scores = scores.round()
    if kind in ("masked", "nearly all masked"):
        share = 0.5 if kind == "masked" else 0.95
        out = torch.rand(2, 3, VOCAB, generator=generator) < share
        out[..., 0] = False
        scores = scores.masked_fill(out, float("-inf"))
    return scores


WARPERS = [
    *[("temperature", t, hf.TemperatureLogitsWarper(t)) for t in (0.3, 1.7)],
    *[("top_k", float(k), hf.TopKLogitsWarper(k)) for k in (1, 5, VOCAB, 1000)],
    *[("large_top_k", float(k), hf.TopKLogitsWarper(k)) for k in (5, 2000)],
    *[("top_p", 1 - p, hf.TopPLogitsWarper(p)) for p in (0.1, 0.5, 0.9, 0.95, 1.0)],
    *[("min_p", p, hf.MinPLogitsWarper(p)) for p in (0.02, 0.3, 1.0)],
    *[("typical_p", p, hf.TypicalLogitsWarper(p)) for p in (0.2, 0.9)],
]


@pytest.mark.parametrize("kind", ["smooth", "ties", "masked", "nearly all masked"])
@pytest.mark.parametrize(("name", "value", "warper"), WARPERS, ids=[f"{n}={v:.3g}" for n, v, _ in WARPERS])
def test_operation_equals_transformers(name, value, warper, kind):
    for seed in range(20):
        scores = random_scores(kind, seed)
        expected = warper(torch.zeros(6, 1, dtype=torch.int64), scores.flatten(0, 1).clone()).view_as(scores)
        plan = SamplingPlan((name,), sample=True)
        torch.testing.assert_close(
            process(scores, plan, inputs(value), torch.zeros(2, 3, dtype=torch.int64)), expected, rtol=0, atol=0
        )


@pytest.mark.parametrize("temperature", [1e-20, 1e-30, 1e-33, 1e-37, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("kind", ["smooth", "ties", "masked"])
def test_a_temperature_that_overflows_where_transformers_divides_leaves_the_best_token(kind, temperature):
    scores = random_scores(kind, 3)
    positions, plan = torch.zeros(2, 3, dtype=torch.int64), SamplingPlan(("temperature",), sample=True)
    processed = process(scores, plan, inputs(temperature), positions)
    divided = hf.TemperatureLogitsWarper(temperature)(None, scores)
    probabilities = divided.softmax(-1)
    if temperature >= LEAST_TEMPERATURE:
        torch.testing.assert_close(processed, divided, rtol=0, atol=0)
    torch.testing.assert_close(
        processed.softmax(-1), torch.where(probabilities.isnan(), processed.softmax(-1), probabilities), rtol=0, atol=0
    )
    assert torch.equal(choose(processed, plan, inputs(temperature), positions), scores.argmax(-1))
    left = candidates(scores, plan, inputs(temperature), positions)
    assert torch.equal(left.choose(plan, inputs(temperature), positions), scores.argmax(-1))


def test_minimum_of_new_tokens_forbids_every_end_token_before_it():
    positions = torch.tensor([[0, 1, 2], [2, 3, 4]])
    scores = process(torch.zeros(2, 3, VOCAB), SamplingPlan(("min_new_tokens",)), inputs(2.0), positions)
    forbidden = torch.isinf(scores)
    assert forbidden.any(-1).tolist() == [[True, True, False], [False, False, False]]
    assert forbidden[0, 0].nonzero().flatten().tolist() == [3, 7]


def test_every_operation_is_compared_here():
    assert {name for name, _, _ in WARPERS} | {"min_new_tokens"} == set(OPERATIONS) - set(READ_TEXT)  # test_prefixes.py


def test_operations_run_in_the_order_of_the_plan():
    scores = random_scores("smooth", 0)
    there = process(scores, SamplingPlan(("temperature", "top_p")), inputs(2.0, 0.5), torch.zeros(2, 3))
    back = process(scores, SamplingPlan(("top_p", "temperature")), inputs(0.5, 2.0), torch.zeros(2, 3))
    expected = hf.TopPLogitsWarper(0.5)(None, hf.TemperatureLogitsWarper(2.0)(None, scores.flatten(0, 1)))
    assert torch.equal(there.flatten(0, 1), expected)
    assert not torch.equal(there, back)


def reference_mix(z: int) -> int:
    """splitmix64's finaliser in Python integers."""
    z &= MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_hash_is_splitmix64(z):
    assert int(mix64(torch.tensor(z))) & MASK64 == reference_mix(z)


@example(2486, 2486, 0)  # u within 5e-6 of 1
@given(st.integers(0, (1 << 63) - 1), st.integers(0, 100_000), st.integers(0, 500))
def test_noise_is_a_pure_function_of_seed_row_position_and_token(seed, position, token):
    row = 2
    key = reference_mix(reference_mix(seed) + (row + 1) * GOLDEN)
    bits = reference_mix(reference_mix(key + position * GOLDEN) + (token + 1) * GOLDEN)
    u = min(((bits >> 32) + 0.5) / 2**32, 1 - 2**-24)
    noise = gumbel_noise(row_keys(seed, row + 1, CPU), torch.full((row + 1, 1), position), token + 1)
    exponential = -math.log1p(-u)
    rounding = 2**-24 / ((1 - u) * exponential)  # u has 24 bits, and near 1 each of them counts
    assert float(noise[row, 0, token]) == pytest.approx(-math.log(exponential), rel=1e-4, abs=1e-4 + rounding)


def test_noise_does_not_depend_on_the_other_rows_and_nodes():
    keys, positions = row_keys(11, 4, CPU), torch.arange(12).view(4, 3)
    whole = gumbel_noise(keys, positions, VOCAB)
    for row in range(4):
        for node in range(3):
            alone = gumbel_noise(keys[row : row + 1], positions[row : row + 1, node : node + 1], VOCAB)
            assert torch.equal(alone[0, 0], whole[row, node])
    assert torch.equal(row_keys(11, 2, CPU), keys[:2])
    assert torch.equal(gumbel_noise(keys, positions, 2 * VOCAB)[..., :VOCAB], whole)


def test_noise_differs_between_rows_positions_and_seeds():
    noise = torch.cat(
        [gumbel_noise(row_keys(seed, 3, CPU), torch.arange(3).expand(3, 3), 4).flatten() for seed in (0, 1)]
    )
    assert len(noise.unique()) == len(noise)


def test_noise_has_the_moments_and_the_shape_of_gumbels_law():
    noise = gumbel_noise(row_keys(3, 10, CPU), torch.arange(20).expand(10, 20), 5000).double().flatten()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.005)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert stats.kstest(noise[::10].numpy(), "gumbel_r").pvalue > 1e-3
    assert torch.isfinite(noise).all()


def test_neighbouring_tokens_and_positions_are_uncorrelated():
    noise = gumbel_noise(row_keys(5, 4, CPU), torch.arange(50).expand(4, 50), 1000).double()
    for left, right in ((noise[..., 1:], noise[..., :-1]), (noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1])) < 0.01


def test_sampling_from_the_best_token_alone_is_greedy():
    scores, positions = random_scores("smooth", 4), torch.zeros(2, 3, dtype=torch.int64)
    plan = SamplingPlan(("top_k",), sample=True)
    kept = process(scores, plan, inputs(1.0), positions)
    assert torch.equal(choose(kept, plan, inputs(), positions), scores.argmax(-1))


def test_greedy_adds_no_noise():
    scores, positions = random_scores("smooth", 5), torch.zeros(2, 3, dtype=torch.int64)
    assert torch.equal(choose(scores, SamplingPlan(), inputs(), positions), scores.argmax(-1))


def test_choice_is_the_same_whatever_else_is_in_the_block():
    scores, positions = random_scores("smooth", 6), torch.tensor([[0, 1, 1], [4, 5, 6]])
    plan = SamplingPlan(sample=True)
    whole = choose(scores, plan, inputs(), positions)
    assert torch.equal(choose(scores[:, 1:2], plan, inputs(), positions[:, 1:2]), whole[:, 1:2])


def test_forbidden_token_is_never_drawn():
    scores = random_scores("nearly all masked", 8).expand(2, 3, VOCAB)
    plan = SamplingPlan(sample=True)
    for position in range(200):
        drawn = choose(scores, plan, inputs(), torch.full((2, 3), position))
        assert torch.isfinite(scores.gather(-1, drawn[..., None])).all()


def test_draws_follow_the_softmax():
    scores = 2 * torch.randn(8, generator=torch.Generator().manual_seed(0))
    draws, rows = 40, 1000
    chosen = choose(
        scores.expand(rows, draws, 8),
        SamplingPlan(sample=True),
        inputs(rows=rows),
        torch.arange(draws).expand(rows, draws),
    )
    counts = torch.bincount(chosen.flatten(), minlength=8)
    expected = scores.double().softmax(-1) * draws * rows
    assert stats.chisquare(counts.numpy(), expected.numpy(), sum_check=False).pvalue > 1e-3
