"""Sampled tokens follow the distribution that transformers would draw from."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import decoders
from decoders.testing import Replay

VOCAB = 12
ROWS = 3000
PROMPT = torch.tensor([[3, 5, 7, 3, 5]])
OPTIONS = dict(temperature=1.3, top_k=8, top_p=0.9)


@pytest.fixture(scope="module")
def model():
    """Twelve tokens and broad distributions, so that few draws tell much."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.4,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return decoders.enable(model)


def probabilities(model, prefix: torch.Tensor) -> torch.Tensor:
    """``[V]``: what transformers' warpers make of the logits after `prefix`."""
    warpers = LogitsProcessorList(
        [
            TemperatureLogitsWarper(OPTIONS["temperature"]),
            TopKLogitsWarper(OPTIONS["top_k"]),
            TopPLogitsWarper(OPTIONS["top_p"]),
        ]
    )
    with torch.no_grad():
        logits = model(prefix).logits[:, -1].float()
    return warpers(prefix, logits).softmax(-1)[0].double()


def draw(model, strategy, seed: int = 0, **options) -> torch.Tensor:
    out = model.generate(
        input_ids=PROMPT, strategy=strategy, do_sample=True, seed=seed, num_return_sequences=ROWS,
        decoders_config={"compile": False}, **OPTIONS | options,
    )  # fmt: skip
    return out[:, PROMPT.shape[1] :]


def assert_follows(tokens: torch.Tensor, expected: torch.Tensor) -> None:
    counts = torch.bincount(tokens, minlength=VOCAB)
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a token was drawn that top-k or top-p rules out"
    assert possible.sum() > 2
    test = stats.chisquare(counts[possible].numpy(), (expected[possible] * counts.sum()).numpy(), sum_check=False)
    assert test.pvalue > 1e-3, f"counts {counts.tolist()}, expected {(expected * counts.sum()).round().tolist()}"


@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup"])
def test_first_and_second_token_follow_the_processed_probabilities(model, strategy):
    tokens = draw(model, strategy, max_new_tokens=2)
    assert_follows(tokens[:, 0], probabilities(model, PROMPT))
    for first in tokens[:, 0].mode().values.tolist(), int(tokens[0, 0]):
        given = tokens[:, 0] == first
        prefix = torch.cat([PROMPT, torch.tensor([[first]])], dim=1)
        assert_follows(tokens[given, 1], probabilities(model, prefix))


def test_drafts_do_not_shift_the_distribution(model):
    """Every row is offered the same continuation; only those whose own draw it is may take it."""
    favoured = tuple(PROMPT[0].tolist()) + (4, 6, 8, 9)
    strategy = Replay(texts=(favoured,) * ROWS, wrong_every=0)
    tokens = draw(model, strategy, max_new_tokens=3)
    assert torch.equal(tokens, draw(model, "autoregressive", max_new_tokens=3))
    assert_follows(tokens[:, 0], probabilities(model, PROMPT))


def test_seeds_are_independent(model):
    first, second = (draw(model, "autoregressive", seed=seed, max_new_tokens=1)[:, 0] for seed in (1, 2))
    expected = probabilities(model, PROMPT)
    joint = torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)
    kept = expected > 0.02
    assert stats.chi2_contingency(joint[kept][:, kept].numpy()).pvalue > 1e-3


def test_rows_are_independent(model):
    tokens = draw(model, "autoregressive", seed=3, max_new_tokens=1)[:, 0]
    expected = probabilities(model, PROMPT)
    joint = torch.bincount(tokens[:-1:2] * VOCAB + tokens[1::2], minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)
    kept = expected > 0.02
    assert stats.chi2_contingency(joint[kept][:, kept].numpy()).pvalue > 1e-3
