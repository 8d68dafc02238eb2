"""Every design with draft models: good ones, strangers, and the target itself. The tokens are those of plain decoding.

Not the full product, which would take ten minutes: every design meets every strategy with a draft that is often right
(the draft's cache is rolled back at every depth), greedy in a batch and sampled alone or the other way round, in turns (in the quick
run six designs meet every third strategy, with one of these calls, and the others one);
every design drafts for itself, where a single wrong slot would cost acceptance. In the quick run a design that is not a
representative has either a draft that is often right or itself as its draft, in turns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MappingProxyType

import pytest
import torch
from transformers import PreTrainedModel

from decoders.strategies import Speculative, Staged, Threshold
from decoders.strategy import Strategy
from decoders.testing import ARCHITECTURES, assert_same_tokens, decode, prompts, tiny_draft, tiny_model
from decoders.testing.models import Architecture

from ..turns import slow_but
from .references import EAGER, SAMPLING, enabled

NEW = 15
STRATEGIES: dict[str, Strategy] = {
    "chain": Speculative(length=4),
    "static tree": Speculative(tree="static", length=4, nodes=12),
    "dynamic tree": Speculative(tree="dynamic", length=4, nodes=12, beam=3),
    "threshold": Threshold(max_length=6),
    "threshold tree": Threshold(tree="dynamic", max_length=6),
    "staged": Staged(stage="prompt_lookup"),
}
NAMES = list(ARCHITECTURES)
#: One of each kind: full attention, sliding window with soft caps, learnt positions, latent attention, sinks, chunks.
REPRESENTATIVE = ("llama", "gemma2", "gpt2", "deepseek_v3", "gpt_oss", "llama4")


def calls(name: str, kind: str, *every: tuple[int, bool]) -> Sequence[tuple[int, bool]]:
    """Rows and whether to sample: one of the calls, in turns from design to design and from strategy to strategy."""
    turn = NAMES.index(name) + list(STRATEGIES).index(kind) // 2
    return every[turn % len(every) :][:1]


@functools.cache
def near(name: str) -> PreTrainedModel:
    return tiny_draft(name)


def stranger(name: str) -> PreTrainedModel:
    """A model that has nothing to do with `name` but the vocabulary: one layer, other weights, mostly another design."""
    return _stranger(name == "llama")


@functools.cache
def _stranger(of_llama: bool) -> PreTrainedModel:
    if of_llama:
        return tiny_model("gpt2", seed=9)
    return Architecture("llama", MappingProxyType(dict(ARCHITECTURES["llama"].options) | {"num_hidden_layers": 1}))(9)


@functools.cache
def plain(name: str, rows: int, sample: bool) -> torch.Tensor:
    """transformers' own greedy loop, or plain sampling."""
    options = dict(strategy="autoregressive", decoders_config=EAGER, **SAMPLING) if sample else {}
    return decode(enabled(name), prompts(rows), max_new_tokens=NEW, **options).sequences


def assert_exact(name: str, kind: str, draft: PreTrainedModel, rows: int, sample: bool):
    model, inputs = enabled(name), prompts(rows)
    options = SAMPLING if sample else {}
    out = decode(
        model, inputs, STRATEGIES[kind], assistant_model=draft, max_new_tokens=NEW, decoders_config=EAGER, **options
    )
    what = f"{name}, {kind}, {'sampled' if sample else 'greedy'}, batch {rows}"
    assert_same_tokens(model, inputs, plain(name, rows, sample), out.sequences, what)
    return out.report


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, NAMES))
def test_a_draft_that_is_often_right(name, kind):
    turn = (NAMES.index(name) + list(STRATEGIES).index(kind)) % 2 == 0
    for rows, sample in calls(name, kind, (4, turn), (1, not turn)):
        report = assert_exact(name, kind, near(name), rows, sample)
        assert report.accepted > 0 and report.exact and report.verifier == "coupled"
        assert report.steps < NEW


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", ["chain", "static tree"])
@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, NAMES))
def test_the_target_as_its_own_draft_is_always_right(name, kind):
    for rows, sample in calls(name, kind, (4, False), (4, True)):
        report = assert_exact(name, kind, enabled(name), rows, sample)
        assert report.accepted_lengths == [0, 0, 0, 0, rows * NEW // 5], "four draft tokens and one more in every step"
        if kind == "chain":
            assert report.acceptance_rate == 1


@pytest.mark.parametrize("name", slow_but(["llama"], NAMES))
def test_the_target_as_its_own_staged_draft_is_always_right_when_greedy(name):
    strategy = Staged(stage="prompt_lookup", children=1, length=4, passes=4)
    out = decode(
        enabled(name), prompts(4), strategy, assistant_model=enabled(name), max_new_tokens=NEW, decoders_config=EAGER
    )
    assert_same_tokens(enabled(name), prompts(4), plain(name, 4, False), out.sequences, f"{name}, staged, greedy")
    assert out.report.accepted_lengths == [0, 0, 0, 0, 4 * NEW // 5]


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_a_stranger_as_draft_changes_no_token_of_any_strategy(name, kind):
    assert_exact(name, kind, stranger(name), 4, False)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_call_of_every_design(name):
    for rows, sample in ((4, False), (4, True), (1, False), (1, True)):
        for kind in STRATEGIES:
            assert assert_exact(name, kind, near(name), rows, sample).accepted > 0
            assert_exact(name, kind, stranger(name), rows, sample)
        for kind in ("chain", "static tree"):
            report = assert_exact(name, kind, enabled(name), rows, sample)
            assert report.accepted_lengths == [0, 0, 0, 0, rows * NEW // 5]
