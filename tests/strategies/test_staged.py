"""Staged drafts: the path that the draft model writes with help, and the leaves beside it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from decoders.errors import DecodersError, UnsupportedError
from decoders.strategies import Speculative, Staged
from decoders.strategies.merged import Merged
from decoders.strategies.staged import collect, path_with_leaves
from decoders.testing import Replay, assert_same_tokens, decode, prompts, reference, tiny_draft, tiny_model

EAGER = {"compile": False, "prefill_chunk": 8}
SAMPLING = dict(do_sample=True, seed=5, temperature=0.8, top_k=40)
INF = float("inf")


def test_what_a_pass_found_along_its_accepted_path_is_laid_behind_what_was_laid():
    # Row 0 has written 1 token and accepts node 2; row 1 has written none and accepts nothing.
    path, emitted, written = torch.tensor([[0, 2, 2], [0, 1, 2]]), torch.tensor([2, 1]), torch.tensor([1, 0])
    tokens = torch.tensor([[[10, 11], [20, 21], [30, 31]], [[40, 41], [50, 51], [60, 61]]])
    weights = -tokens.float()
    collected, collected_weights, _ = collect(
        path, emitted, written, tokens, weights, None, torch.full((2, 5, 2), -1), torch.full((2, 5, 2), -INF), None
    )
    assert collected[0, :-1].tolist() == [[-1, -1], [10, 11], [30, 31], [-1, -1]]
    assert collected[1, :-1].tolist() == [[40, 41], [-1, -1], [-1, -1], [-1, -1]]
    assert collected_weights[0, 1].tolist() == [-10, -11] and collected_weights[1, 1].tolist() == [-INF, -INF]


def test_what_does_not_fit_is_laid_to_waste():
    path, tokens = torch.tensor([[0, 1, 2]]), torch.tensor([[[10], [20], [30]]])
    collected, _, scores = collect(
        path, torch.tensor([3]), torch.tensor([2]), tokens, -tokens.float(), tokens.float().expand(1, 3, 4),
        torch.full((1, 4, 1), -1), torch.full((1, 4, 1), -INF), torch.zeros(1, 4, 4),
    )  # fmt: skip
    assert collected[0, :3, 0].tolist() == [-1, -1, 10]
    assert scores is not None and scores[0, :3, 0].tolist() == [0, 0, 10]


def test_the_likeliest_leaves_stand_beside_the_path():
    """A path a, b with alternatives x (beside a) and y (beside b): y is too unlikely for a tree of three nodes."""
    log = [math.log(p) for p in (0.6, 0.3, 0.9, 0.1)]
    tokens = torch.tensor([[[1, 7], [2, 8], [-1, -1]]])
    weights = torch.tensor([[[log[0], log[1]], [log[2], log[3]], [-INF, -INF]]])
    chosen, reached, parents, offsets, _, ancestors = path_with_leaves(torch.tensor([[1, 2]]), tokens, weights, 3, 2)
    assert chosen.tolist() == [[1, 7, 2]]
    assert parents[0].tolist() == [0, 0, 0, 1] and offsets[0].tolist() == [0, 1, 1, 2]
    assert reached[0].exp().tolist() == pytest.approx([0.6, 0.3, 0.54])
    assert ancestors[0, 3].tolist() == [True, True, False, True]


def test_a_path_that_ends_early_has_nothing_behind_its_end():
    tokens = torch.tensor([[[1, 7], [2, 8], [-1, -1]]])
    weights = torch.tensor([[[-0.1, -2.0], [-0.1, -2.0], [-INF, -INF]]])
    chosen, reached, *_ = path_with_leaves(torch.tensor([[1, -1]]), tokens, weights, 4, 2)
    assert sorted(chosen[0].tolist()) == [-1, -1, 1, 7]
    assert (reached[chosen == -1] == -INF).all()


def nested(inner: Any, **options: Any) -> Staged:
    return Staged(stage="staged", stage_config={"draft_model": inner, "stage": "prompt_lookup"}, **options)


def assert_exact(model, strategy, assistant, rows=3, new=30, draws=(SAMPLING, {})) -> Any:
    for draw in draws:
        options = dict(max_new_tokens=new, decoders_config=EAGER, **draw)
        expected = reference(model, prompts(rows), "autoregressive", **options).sequences
        out = decode(model, prompts(rows), strategy, assistant_model=assistant, **options)
        assert_same_tokens(model, prompts(rows), expected, out.sequences, f"{strategy.name}, {draw}")
    return out.report


@pytest.mark.parametrize(
    "children, draw",
    [pytest.param(1, SAMPLING, marks=pytest.mark.slow), (3, {})],
    ids=["path, sampled", "tree, greedy"],
)
def test_a_draft_of_a_draft(target, near, children, draw):
    smaller = tiny_draft("llama", noise=0.1)
    report = assert_exact(target, nested(smaller, children=children), near, new=20, draws=[draw])
    outer = report.stages[0]
    assert outer.drafter == "staged" and outer.stages[0].drafter == "prompt_lookup" and not outer.stages[0].stages
    assert report.settings["stage_config"] == {"draft_model": "LlamaForCausalLM", "stage": "prompt_lookup"}, (
        "a report is ready for JSON"
    )


@pytest.mark.slow
def test_a_draft_of_a_draft_of_a_draft(target, near):
    third = {"draft_model": tiny_model("gpt2", seed=4), "stage": "prompt_lookup", "passes": 2}
    second = {"draft_model": tiny_draft("llama", noise=0.1), "stage": "staged", "stage_config": third}
    assert_exact(target, Staged(stage="staged", stage_config=second), near, rows=2, new=16, draws=[SAMPLING])


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["speculative", pytest.param("threshold", marks=pytest.mark.slow)])
def test_stages_with_a_model_of_their_own(target, near, stage):
    report = assert_exact(
        target, Staged(stage=stage, stage_config={"draft_model": tiny_draft("llama", noise=0.1)}), near, new=20
    )
    assert report.stages[0].accepted > 0


@pytest.mark.parametrize("tree", ["none", "static", "dynamic"])
def test_a_stage_that_is_always_right_stays_right(target, tree):
    """The target three times: every pass of the draft confirms the stage's four draft tokens and adds one token."""
    stage = {"draft_model": target, "length": 4, "tree": tree}
    strategy = Staged(stage="speculative", stage_config=stage, passes=2, length=10, children=1)
    out = decode(target, prompts(3), strategy, assistant_model=target, max_new_tokens=22, decoders_config=EAGER)
    assert out.report.accepted_lengths == [0] * 10 + [6]
    lengths = out.report.stages[0].accepted_lengths
    if tree != "dynamic":  # which leaves the likeliest path out now and then
        assert lengths == [0, 0, 0, 0, 12]


def test_a_stage_with_a_model_reads_what_others_got_accepted(target):
    """Another drafter's tokens are new to the draft and to the draft's draft."""
    plain = decode(target, prompts(2), max_new_tokens=60).sequences
    texts = tuple(tuple(r[s:].tolist()) for r, s in zip(plain, prompts(2)["attention_mask"].argmax(1), strict=True))
    staged = Staged(
        stage="speculative", stage_config={"draft_model": target, "length": 4}, passes=1, length=5, children=1
    )
    strategy = Merged([staged, Replay(texts=texts, length=9, wrong_every=8)])
    out = decode(target, prompts(2), strategy, assistant_model=target, max_new_tokens=60, decoders_config=EAGER)
    assert torch.equal(out.sequences, plain)
    lengths = out.report.stages[0].accepted_lengths
    assert lengths[4] == sum(lengths), f"one pass, five tokens, whatever was accepted before: {lengths}"
    assert sum(out.report.accepted_lengths[6:]) > 2, "the other drafter was often right for longer"


@pytest.mark.in_turns
@pytest.mark.parametrize("children", [1, 4])
@pytest.mark.parametrize("sample", [False, True])
def test_figures_of_a_stage_add_up(looping, children, sample):
    strategy = Staged(stage="prompt_lookup", passes=3, length=12, children=children)
    out = decode(
        looping, prompts(3), strategy, assistant_model=looping, max_new_tokens=40, decoders_config=EAGER,
        **(SAMPLING if sample else {}),
    )  # fmt: skip
    (stage,) = out.report.stages
    assert stage.passes == 3 * out.report.steps
    assert sum(n * count for n, count in enumerate(stage.accepted_lengths, start=1)) == stage.tokens
    assert sum(stage.accepted_lengths) <= 3 * stage.passes
    assert 0 < stage.accepted <= stage.drafted and stage.accepted < stage.tokens
    assert stage.tokens <= stage.accepted + sum(stage.accepted_lengths)
    assert stage.tokens <= 12 * sum(out.report.accepted_lengths)
    assert stage.forward_seconds > 0 and stage.drafter_seconds > 0
    assert stage.forward_seconds + stage.drafter_seconds <= out.report.timings.propose + 1e-3


def test_equal_passes_bring_more_tokens_than_without_the_stage(looping):
    """On text that repeats itself the stage's draft tokens are free."""
    options = dict(assistant_model=looping, max_new_tokens=80, decoders_config=EAGER)
    staged = decode(looping, prompts(2), Staged(stage="prompt_lookup", passes=4, children=1), **options).report
    alone = decode(looping, prompts(2), Speculative(length=4), **options).report
    assert staged.mean_accepted_length > 2 * alone.mean_accepted_length
    assert staged.stages[0].passes / staged.steps == alone.stages[0].passes / alone.steps == 4


@pytest.mark.parametrize("stage", ["speculative", "threshold", "staged"])
def test_a_stage_without_a_model_of_its_own_is_refused(target, near, stage):
    config = {"stage": "prompt_lookup"} if stage == "staged" else {}
    strategy = Staged(stage=stage, stage_config=config)
    with pytest.raises(UnsupportedError, match=f"'{stage}' as a stage needs its own model: set draft_model of {stage}"):
        decode(target, prompts(), strategy, assistant_model=near, max_new_tokens=4, decoders_config=EAGER)


def test_an_unknown_stage_and_unknown_settings_of_a_stage_are_named(target, near):
    for strategy, name in (
        (Staged(stage="prompt_lokup"), "prompt_lookup"),
        (Staged(stage="prompt_lookup", stage_config={"lenght": 3}), "lenght"),
    ):
        with pytest.raises(DecodersError, match=name):
            decode(target, prompts(), strategy, assistant_model=near, max_new_tokens=4, decoders_config=EAGER)


def test_the_tree_of_a_path_is_the_same_as_by_enumeration():
    """All (path prefix, leaf) nodes with their products, the likeliest of them by plain Python."""
    generator = torch.Generator().manual_seed(1)
    for length, children, nodes in itertools.product((1, 3, 5), (2, 3), (2, 4, 9)):
        weights = torch.rand(1, length + 1, children, generator=generator).log().sort(-1, descending=True).values
        tokens = torch.arange((length + 1) * children).view(1, length + 1, children)
        path = tokens[:, :length, 0]
        chosen, reached, *_ = path_with_leaves(path, tokens, weights, nodes, length)
        spine = [float(weights[0, :d, 0].sum()) for d in range(length)]
        every = {
            int(tokens[0, d, c]): spine[d] + float(weights[0, d, c]) for d in range(length) for c in range(children)
        }
        best = sorted(every, key=lambda token: -every[token])[:nodes]
        assert chosen[0].tolist() == sorted(best)
        assert reached[0].tolist() == pytest.approx([every[token] for token in sorted(best)], abs=1e-5)
