"""Designs with recurrent layers: the tokens are transformers' own under every kind of draft, and states are never shared or stale.

Three designs of different kinds meet the drafters in the quick run: a delta rule with experts, a state space whose layers continue
a text one token by token, a short convolution. Prefill runs in small pieces.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

import decoders
from decoders.engine.model.recurrent import levels_of
from decoders.errors import UnsupportedError
from decoders.strategies import Autoregressive, Lookahead, PromptLookup
from decoders.strategy import Strategy
from decoders.testing import RECURRENT, Replay, assert_same_tokens, decode, prompts, tiny_draft, tiny_model
from decoders.tree import Topology

from ..turns import slow_but
from ..versions import not_in_the_oldest
from .references import EAGER, NEW, SAMPLING, enabled, plain, sampled

QUICK = ("qwen3_next", "jamba", "lfm2")
KINDS = ("autoregressive", "prompt_lookup, 3 branches", "lookahead", "replay", "replay, 3 branches")


def replay(expected: torch.Tensor, branches: int = 1) -> Replay:
    start = [int(row.nonzero()[0]) for row in prompts(len(expected))["attention_mask"]]
    texts = tuple(tuple(row[s:].tolist()) for row, s in zip(expected, start, strict=True))
    return Replay(texts=texts, branches=branches)


def drafter(kind: str, expected: torch.Tensor) -> Strategy:
    if kind == "autoregressive":
        return Autoregressive()
    if kind == "lookahead":
        return Lookahead(window=3, ngram=3, candidates=2)
    if kind.startswith("prompt_lookup"):
        return PromptLookup(length=5, branches=3)
    return replay(expected, 3 if "3 branches" in kind else 1)


def every_kind(test: Any) -> Any:
    """Few designs take turns with the kinds of drafts; the other designs are slow."""
    for name, values in (("kind", KINDS), ("rows", (1, 4)), ("name", slow_but(QUICK, RECURRENT))):
        test = pytest.mark.parametrize(name, values)(test)
    return pytest.mark.in_turns(test)


@every_kind
def test_greedy_tokens_are_those_of_transformers(name, rows, kind):
    model, inputs, expected = enabled(name), prompts(rows), plain(name, rows)
    out = decode(model, inputs, drafter(kind, expected), max_new_tokens=NEW, decoders_config=EAGER)
    assert_same_tokens(model, inputs, expected, out.sequences, f"{name}, {kind}")
    if kind.startswith("replay"):
        assert out.report.accepted > NEW * rows // 2  # the drafts were put to the test


@every_kind
def test_sampled_tokens_depend_on_the_seed_alone(name, rows, kind):
    model, inputs, expected = enabled(name), prompts(rows), sampled(name, rows)
    out = decode(model, inputs, drafter(kind, expected), max_new_tokens=NEW, decoders_config=EAGER, **SAMPLING)
    assert_same_tokens(model, inputs, expected, out.sequences, f"{name}, {kind}, sampled")


@pytest.mark.parametrize("tree", [pytest.param("none", marks=pytest.mark.slow), "dynamic"])
def test_a_draft_model_with_attention_only_drafts_for_a_recurrent_target(tree):
    model, inputs = enabled("qwen3_next"), prompts(2)
    strategy = decoders.strategies.Speculative(length=3, tree=tree)
    out = decode(
        model, inputs, strategy, assistant_model=tiny_model("llama"), max_new_tokens=NEW, decoders_config=EAGER
    )
    assert_same_tokens(model, inputs, plain("qwen3_next", 2), out.sequences, f"speculative, {tree}")


def test_a_recurrent_draft_model_is_refused_with_the_reason():
    with pytest.raises(UnsupportedError, match="take back"):
        decode(enabled("lfm2"), prompts(), "speculative", assistant_model=tiny_draft("lfm2"), max_new_tokens=4)


def test_compiling_is_refused_and_auto_runs_uncompiled():
    with pytest.raises(UnsupportedError, match="level by level"):
        decode(enabled("lfm2"), prompts(), "prompt_lookup", max_new_tokens=4, decoders_config={"compile": True})
    out = decode(enabled("lfm2"), prompts(), "prompt_lookup", max_new_tokens=4, decoders_config={"compile": "auto"})
    assert not out.report.compiled


@pytest.mark.parametrize("name", QUICK)
def test_a_kept_text_is_continued_at_its_very_end_only(name):
    model = decoders.enable(tiny_model(name))
    ids = prompts(1)["input_ids"]
    options = dict(max_new_tokens=8, decoders_config=EAGER)

    def run(prompt):
        expected = decode(model, {"input_ids": prompt}, max_new_tokens=8).sequences
        out = decode(model, {"input_ids": prompt}, replay_of(expected), **options)
        assert_same_tokens(model, {"input_ids": prompt}, expected, out.sequences, name)
        return out

    def replay_of(expected):
        return Replay(texts=(tuple(expected[0].tolist()),), branches=2)

    first = run(ids)
    longer = torch.cat([first.sequences, ids[:, :5]], dim=1)
    assert run(longer).report.reused == [first.sequences.shape[1] - 1]
    shorter = ids[:, : ids.shape[1] - 3]
    assert run(shorter).report.reused == [0]  # the state has seen more
    assert run(ids).report.reused == [0]


def test_a_stop_token_inside_of_a_draft_leaves_no_state_that_has_seen_more():
    model = decoders.enable(tiny_model("bamba"))
    inputs, expected = prompts(1), plain("bamba", 1)
    stop = int(expected[0, 24 + 6])
    out = decode(model, inputs, replay(expected), max_new_tokens=NEW, eos_token_id=stop, decoders_config=EAGER)
    again = decode(model, inputs, eos_token_id=stop, max_new_tokens=NEW).sequences
    assert torch.equal(out.sequences, again)
    continued = torch.cat([out.sequences, inputs["input_ids"][:, :4]], dim=1)
    want = decode(model, {"input_ids": continued}, max_new_tokens=6).sequences
    got = decode(model, {"input_ids": continued}, "autoregressive", max_new_tokens=6, decoders_config=EAGER).sequences
    assert_same_tokens(model, {"input_ids": continued}, want, got, "continued")


@pytest.mark.parametrize("name", slow_but([QUICK[1]], RECURRENT))
def test_rows_that_wait_for_others_have_states_no_further_than_their_text(name):
    class Never(StoppingCriteria):
        """Sees whole batches, so that all rows go as far as the slowest."""

        def __call__(self, input_ids, scores, **kwargs):
            return torch.zeros(len(input_ids), dtype=torch.bool)

    model, inputs, expected = enabled(name), prompts(4), plain(name, 4)
    criteria = dict(stopping_criteria=[Never()], max_new_tokens=NEW)
    out = decode(model, inputs, replay(expected), decoders_config=EAGER, **criteria)
    assert_same_tokens(model, inputs, expected, out.sequences, name)
    assert out.report.accepted > 0


@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_designs_with_two_sets_of_equations_run_whatever_their_weights(name):
    inputs = {"input_ids": torch.tensor([[3, 4, 5, 6]])}
    for seed in range(3):
        model = decoders.enable(tiny_model(name, seed, vocab_size=24))
        expected = decode(model, inputs, max_new_tokens=8).sequences
        out = decode(
            model, inputs, Replay(texts=(tuple(expected[0].tolist()),)), max_new_tokens=8, decoders_config=EAGER
        )
        assert_same_tokens(model, inputs, expected, out.sequences, f"{name}, seed {seed}")


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("jamba", marks=pytest.mark.slow)])
def test_requests_that_come_and_go_have_the_tokens_of_calls_of_their_own(name):
    model, texts = enabled(name), [prompts(1, length, seed=length)["input_ids"] for length in (5, 17, 9, 24, 12)]
    want = [decode(model, {"input_ids": text}, max_new_tokens=4 + i).sequences for i, text in enumerate(texts)]
    with decoders.Scheduler(
        model, strategy="prompt_lookup", rows=2, pad_token_id=0, decoders_config=EAGER
    ) as scheduler:
        asked = [
            scheduler.submit(text[0].tolist(), max_new_tokens=4 + i, do_sample=False) for i, text in enumerate(texts)
        ]
        got = [generation.result(60) for generation in asked]
    for expected, tokens in zip(want, got, strict=True):
        assert tokens.tolist() == expected.tolist()


def test_strategies_that_read_prompts_see_every_row_to_its_own_end():
    model, inputs = enabled("qwen3_next"), prompts(3)
    out = decode(model, inputs, "token_recycling", max_new_tokens=NEW, decoders_config=EAGER)
    assert_same_tokens(model, inputs, plain("qwen3_next", 3), out.sequences, "token_recycling")
    assert out.report.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "threshold", "staged", "suffix", "ngram", "prompt_lookup+lookahead"])
def test_every_other_drafter_is_exact(strategy):
    model, inputs = enabled("bamba"), prompts(3)
    draft = {"assistant_model": tiny_model("llama")} if strategy in ("threshold", "staged") else {}
    out = decode(model, inputs, strategy, max_new_tokens=NEW, decoders_config={"prefill_chunk": 8}, **draft)
    assert_same_tokens(model, inputs, plain("bamba", 3), out.sequences, strategy)


@pytest.mark.slow
def test_processors_penalties_and_scores_go_on_working():
    model, inputs = enabled("lfm2"), prompts(2)
    options = dict(max_new_tokens=12, repetition_penalty=1.3, no_repeat_ngram_size=3, output_scores=True)
    expected = decode(model, inputs, **options)
    out = decode(model, inputs, PromptLookup(length=4), decoders_config=EAGER, **options)
    assert_same_tokens(model, inputs, expected.sequences, out.sequences, "processors")
    for own, other in zip(out.scores, expected.scores, strict=True):
        assert torch.allclose(own, other, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_5", dict(num_hidden_layers=2, layer_types=["full_attention"] * 2)),
        ("granitemoehybrid", dict(num_hidden_layers=2, layer_types=["full_attention"] * 2)),
        ("nemotron_h", dict(num_hidden_layers=2, layers_block_type=["attention"] * 2)),
        # transformers 5.17 keeps its states outside of the cache, so the design is refused there.
        pytest.param("recurrent_gemma", dict(num_hidden_layers=2, block_types=["attention"]), marks=not_in_the_oldest),
    ],
)
def test_models_without_recurrent_layers_of_designs_that_have_them_are_decoded(name, options):
    model, inputs = decoders.enable(tiny_model(name, **options)), prompts(2)
    expected = decode(model, inputs, max_new_tokens=NEW).sequences
    out = decode(model, inputs, PromptLookup(length=5, branches=3), max_new_tokens=NEW, decoders_config=EAGER)
    assert_same_tokens(model, inputs, expected, out.sequences, name)


class Watching(Autoregressive):
    """Reads hidden layers, which needs a module tree of its own."""

    name = "watching"
    hidden_layers = (0, -1)

    def observe(self, state, step):
        assert step.layers.shape[2] == 2
        assert torch.isfinite(step.layers).all()


def test_hidden_layers_are_handed_out():
    model, inputs = enabled("qwen3_next"), prompts(2)
    out = decode(model, inputs, Watching(), max_new_tokens=6, decoders_config=EAGER)
    assert torch.equal(out.sequences, plain("qwen3_next", 2)[:, : out.sequences.shape[1]])


def test_nodes_continue_their_parents_and_what_is_no_draft_token_is_left_out():
    tree = Topology.branches(2, 2).tensors(2, torch.device("cpu"))
    nodes = torch.tensor([[7, 1, 2, 3, 4], [7, 1, 2, -1, -1]])
    levels = [
        (level.nodes.tolist(), level.parents.tolist(), level.places.tolist())
        for level in levels_of(tree.visible, nodes)
    ]
    assert levels == [
        ([0, 5], [5, 11], [0, 6]),  # the roots continue what stands behind the last node
        ([1, 3, 6], [0, 0, 6], [1, 3, 7]),
        ([2, 4, 7], [1, 3, 7], [2, 4, 8]),
    ]
