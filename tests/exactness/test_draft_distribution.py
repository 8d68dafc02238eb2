"""Draft models under every verifier: what comes out follows the target's distribution, not the draft's.

The draft is a model of other weights, so that draft tokens are often wrong and a rule that lets the draft's taste through
shows. Chi-square on the first, the second and the third token, 1500 rows of a model with twelve tokens; in the slow run 6000.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, PreTrainedModel
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import decoders
from decoders import demo
from decoders.errors import UnsupportedError
from decoders.strategies import PromptLookup, Speculative, Staged, Threshold
from decoders.strategies.merged import Merged
from decoders.strategy import Strategy
from decoders.testing import decode, prompts, tiny_draft, tiny_model

from ..turns import slow_but

VOCAB = 12
ROWS, MANY = 1500, 6000
PROMPT = torch.tensor([[3, 5, 7, 3, 5]])
OPTIONS = dict(temperature=1.3, top_k=8, top_p=0.9)
EAGER = {"compile": False}

CHAINS: dict[str, Strategy] = {
    "chain": Speculative(length=3),
    "threshold": Threshold(max_length=3),
    "staged chain": Staged(stage="prompt_lookup", children=1, length=3, passes=2),
    "prompt_lookup": PromptLookup(length=3),
}
TREES: dict[str, Strategy] = {
    "static tree": Speculative(tree="static", length=3, nodes=7, children=3),
    "staged": Staged(stage="prompt_lookup", length=3, passes=2, children=2, nodes=9),
    "prompt_lookup tree": PromptLookup(length=2, branches=2),
    "merged": Merged([PromptLookup(length=3), Speculative(length=3)]),
    "merged the other way round": Merged([Speculative(length=2), PromptLookup(length=3)]),
}
CASES = [("rejection", k) for k in CHAINS] + [("block", k) for k in CHAINS]
CASES += [("tree_rejection", k) for k in (*CHAINS, *TREES)]
#: Of the quick run: a drafter with each verifier of chains, and trees with theirs.
QUICK = CASES[0:1] + CASES[5:6] + [("tree_rejection", k) for k in [*TREES][:-1]]


def small(seed: int, layers: int = 1) -> PreTrainedModel:
    """Twelve tokens and broad distributions, so that few draws tell much."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.4,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return decoders.enable(small(0))


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    return small(1)


@functools.cache
def joint_of_three() -> Tensor:
    """``[V, V, V]``: the target's distribution of three tokens after the prompt, by transformers' own warpers."""
    target, warpers = small(0), LogitsProcessorList(
        [
            TemperatureLogitsWarper(OPTIONS["temperature"]),
            TopKLogitsWarper(int(OPTIONS["top_k"])),
            TopPLogitsWarper(OPTIONS["top_p"]),
        ]
    )  # fmt: skip
    prefixes, joint = PROMPT, torch.ones(1, dtype=torch.float64)
    for _ in range(3):
        with torch.no_grad():
            logits = target(prefixes).logits[:, -1].float()
        joint = (joint[:, None] * warpers(prefixes, logits).softmax(-1).double()).flatten()
        every = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, 0), every], dim=1)
    return joint.view(VOCAB, VOCAB, VOCAB)


def assert_follows(events: Tensor, expected: Tensor, what: str) -> None:
    """Chi-square of `events` (indices) against `expected` (probabilities); rare events are put together."""
    counts = torch.bincount(events, minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0, f"{what}: something came out that top-k or top-p rules out"
    often = expected * len(events) >= 8
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    wanted = torch.cat([expected[often], expected[~often].sum()[None]]) * len(events)
    if wanted[-1] < 1:
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(wanted) > 2
    test = stats.chisquare(observed.numpy(), (wanted * observed.sum() / wanted.sum()).numpy())
    assert test.pvalue > 1e-3, f"{what}: p = {test.pvalue:.2g}, {observed.tolist()} for {wanted.round().tolist()}"


def draw(
    model: PreTrainedModel, strategy: Strategy, verifier: str, draft: PreTrainedModel | None, **options: Any
) -> Any:
    assistant = {"assistant_model": draft} if strategy.needs_assistant else {}
    options = dict(num_return_sequences=ROWS, seed=1, max_new_tokens=3) | OPTIONS | assistant | options
    return model.generate(
        input_ids=PROMPT, strategy=strategy, verifier=verifier, do_sample=True, decoders_config=EAGER,
        return_dict_in_generate=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("rows", slow_but([ROWS], [ROWS, MANY]))
@pytest.mark.parametrize("verifier, kind", slow_but(QUICK, CASES))
def test_three_tokens_follow_the_target(model, draft, verifier, kind, rows):
    out = draw(model, (CHAINS | TREES)[kind], verifier, draft, num_return_sequences=rows)
    first, second, third = out.sequences[:, PROMPT.shape[1] :].T
    joint = joint_of_three()
    assert_follows(first, joint.sum((1, 2)), "first token")
    assert_follows(second, joint.sum((0, 2)), "second token")
    assert_follows(third, joint.sum((0, 1)), "third token")
    assert_follows(first * VOCAB + second, joint.sum(2).flatten(), "first and second token")
    assert_follows(second * VOCAB + third, joint.sum(0).flatten(), "second and third token")
    report = out.report
    assert report.verifier == verifier and report.exact
    assert 0 < report.accepted < report.drafted


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("chain", "static tree") else pytest.mark.slow)
        for kind in (*CHAINS, *TREES)
        if not kind.startswith("prompt")
    ],
)
def test_the_tests_would_notice_the_drafts_own_distribution(draft, kind):
    """What the draft would draw is far from the target: the same test fails on it."""
    own = decoders.enable(small(1))
    out = draw(own, (CHAINS | TREES)[kind], "tree_rejection", draft)
    with pytest.raises(AssertionError):
        assert_follows(out.sequences[:, PROMPT.shape[1]], joint_of_three().sum((1, 2)), "first token")


@pytest.mark.parametrize("kind", ["chain", pytest.param("staged chain", marks=pytest.mark.slow), "static tree"])
def test_a_draft_equal_to_the_target_is_accepted_whole(model, kind):
    for verifier in ("rejection", "block", "tree_rejection"):
        if verifier != "tree_rejection" and kind in TREES:
            continue
        report = draw(model, (CHAINS | TREES)[kind], verifier, model, num_return_sequences=400).report
        if kind == "chain":
            assert report.acceptance_rate == 1
        if kind != "staged chain":
            assert report.steps == 1


@pytest.mark.parametrize("verifier, kind", slow_but(QUICK[:1], CASES))
def test_the_same_seed_gives_the_same_tokens_and_another_does_not(model, draft, verifier, kind):
    strategy = (CHAINS | TREES)[kind]
    first, second, other = (
        draw(model, strategy, verifier, draft, seed=seed, num_return_sequences=20, max_new_tokens=8).sequences
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)


@pytest.mark.parametrize("rows", slow_but([4], [1, 4]))
@pytest.mark.parametrize("verifier", slow_but(["tree_rejection"], ["rejection", "block", "tree_rejection"]))
def test_greedy_tokens_are_the_same_under_every_verifier(verifier, rows):
    target, near = decoders.enable(tiny_model("llama")), tiny_draft("llama")
    expected = decode(target, prompts(rows), max_new_tokens=14).sequences
    for strategy in (*CHAINS.values(), *TREES.values(), Speculative(tree="dynamic")):
        assistant = {"assistant_model": near} if strategy.needs_assistant else {}
        out = decode(
            target, prompts(rows), strategy, verifier=verifier, max_new_tokens=14, decoders_config=EAGER, **assistant
        )
        assert torch.equal(out.sequences, expected), repr(strategy)
        assert out.report.verifier == verifier and out.report.exact


@pytest.mark.parametrize("verifier", ["rejection", "block", "tree_rejection"])
@pytest.mark.parametrize(
    "strategy", [Speculative(tree="dynamic"), Threshold(tree="dynamic")], ids=["speculative", "threshold"]
)
def test_a_dynamic_tree_is_refused_where_something_is_drawn(model, draft, verifier, strategy):
    with pytest.raises(UnsupportedError, match=f"{strategy.name}: the nodes of a dynamic tree.*coupled"):
        draw(model, strategy, verifier, draft, num_return_sequences=2)


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("kind", TREES)
def test_a_tree_is_refused_by_a_verifier_of_chains(model, draft, verifier, kind):
    with pytest.raises(UnsupportedError, match=f"'{verifier}' judges chains.*tree_rejection"):
        draw(model, TREES[kind], verifier, draft, num_return_sequences=2)


def test_two_draft_models_that_draw_with_the_same_noise_are_refused(model, draft):
    with pytest.raises(UnsupportedError, match="two of these strategies draw draft tokens with the same noise"):
        draw(model, Merged([Speculative(length=2), Threshold(max_length=2)]), "tree_rejection", draft)


@pytest.mark.parametrize("verifier", ["rejection", "block", "tree_rejection"])
def test_processors_of_the_callers_own_are_refused(model, draft, verifier):
    with pytest.raises(UnsupportedError, match=f"verifier='{verifier}' needs the distribution.*coupled"):
        draw(
            model,
            CHAINS["chain"],
            verifier,
            draft,
            num_return_sequences=2,
            logits_processor=[lambda ids, scores: scores],
        )


@pytest.mark.slow
@pytest.mark.skipif(not demo.available(), reason="the demo models are not there")
@pytest.mark.parametrize(
    "verifier, kind",
    [
        ("rejection", "chain"),
        ("block", "threshold"),
        ("tree_rejection", "static tree"),
    ],
)
def test_demo_models_at_temperature_one(verifier, kind):
    """First token and first two tokens over their likeliest values."""
    rows, target, near = 350, *demo_models()
    ids = demo_prompt()
    with torch.no_grad():
        one = target(ids).logits[0, -1].double().softmax(-1)
        firsts = one.topk(8).indices
        two = target(torch.cat([ids.expand(8, -1), firsts[:, None]], dim=1)).logits[:, -1].double().softmax(-1)
    out = target.generate(
        input_ids=ids, strategy=(CHAINS | TREES)[kind], verifier=verifier, assistant_model=near, do_sample=True,
        temperature=1.0, top_k=0, num_return_sequences=rows, seed=3, max_new_tokens=2, decoders_config=EAGER,
        eos_token_id=None,
    )[:, ids.shape[1] :]  # fmt: skip
    assert_follows(out[:, 0], one, "first token")
    pairs = (one[firsts][:, None] * two).flatten()
    place = torch.full((len(one),), -1)
    place[firsts] = torch.arange(8)
    inside = place[out[:, 0]] >= 0
    events = torch.where(inside, place[out[:, 0]] * len(one) + out[:, 1], len(pairs))
    assert_follows(events, torch.cat([pairs, (1 - pairs.sum()).clamp(min=0)[None]]), "first two tokens")


@functools.cache
def demo_models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return decoders.enable(demo.load()[0]), demo.load("draft")[0]


def demo_prompt() -> Tensor:
    tokenizer = demo.load()[1]
    return tokenizer("for i in range(", return_tensors="pt")["input_ids"]
