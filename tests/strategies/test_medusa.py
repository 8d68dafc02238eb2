"""Medusa: the right hidden state, exact output on many designs, clear refusals, and the lossy verifier."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

import decoders
from decoders import demo
from decoders.errors import SettingsError, UnsupportedError
from decoders.heads.medusa import DEFAULT_TREE
from decoders.strategies import Medusa, PromptLookup
from decoders.strategies.medusa import budgeted, without_gaps
from decoders.strategies.merged import Merged
from decoders.testing import prompts, tiny_model
from decoders.testing.exactness import assert_same_tokens, decode, reference
from decoders.tree import Topology

from .conftest import WIDE, random_heads

EAGER = {"decoders_config": {"compile": False}}
DESIGNS = ("llama", "gemma2", "gpt2", "opt", "phi", "deepseek_v3")
SAMPLED = dict(do_sample=True, seed=5, temperature=0.8, top_k=40)


def medusa(**settings) -> Medusa:
    return Medusa(heads=random_heads(), **settings)


@pytest.mark.in_turns
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("design", DESIGNS)
def test_tokens_are_those_of_plain_decoding(design, rows):
    model, inputs = decoders.enable(tiny_model(design)), prompts(rows)
    greedy = decode(model, inputs, medusa(), max_new_tokens=24, **EAGER)
    assert_same_tokens(model, inputs, reference(model, inputs, max_new_tokens=24).sequences, greedy.sequences, design)
    assert greedy.report.accepted > 0 and greedy.report.exact, "nothing was accepted, so nothing was tested"
    options = dict(max_new_tokens=24, **SAMPLED, **EAGER)
    plain, drawn = reference(model, inputs, "autoregressive", **options), decode(model, inputs, medusa(), **options)
    assert_same_tokens(model, inputs, plain.sequences, drawn.sequences, f"{design}, sampling")
    assert drawn.report.accepted > 0


@pytest.mark.slow
def test_compiled_tokens_are_those_of_plain_decoding():
    model, inputs = decoders.enable(tiny_model("llama")), prompts(3)
    for sampling in ({}, SAMPLED):
        options = sampling | {"decoders_config": {"compile": True}}
        out = decode(model, inputs, medusa(), max_new_tokens=40, **options)
        plain = decode(model, inputs, "autoregressive", max_new_tokens=40, **options)
        assert_same_tokens(model, inputs, plain.sequences, out.sequences, f"compiled, {options}")
        assert out.report.compiled
        again = decode(model, inputs, medusa(), max_new_tokens=40, **options)
        assert again.report.compilations == 0


class Watched(Medusa):
    """Compares what the heads will read with a plain forward pass over the committed text."""

    def __init__(self, model, **settings):
        super().__init__(heads=random_heads(), **settings)
        self.model, self.seen = model, 0

    def observe(self, state, step):
        super().observe(state, step)
        read = []
        hook = self.model.get_output_embeddings().register_forward_pre_hook(lambda _, args: read.append(args[0]))
        for row, length in enumerate(step.sequences.length.tolist()):
            if not step.sequences.finished[row]:
                self.model(step.sequences.tokens[row : row + 1, : length - 1], use_cache=False)
                torch.testing.assert_close(state.hidden[row], read[-1][0, -1], atol=2e-4, rtol=1e-3)
                self.seen += 1
        hook.remove()


@pytest.mark.parametrize(
    "options", [SAMPLED, {"logits_processor": [lambda ids, scores: scores]}], ids=["sampled", "on the host"]
)
def test_heads_read_the_state_that_gave_the_last_token(options):
    model = tiny_model("llama")
    strategy = Watched(tiny_model("llama"))
    out = decode(decoders.enable(model), prompts(3), strategy, max_new_tokens=30, **options, **EAGER)
    assert strategy.seen > 20 and out.report.accepted > 0


@pytest.mark.parametrize("partner", [PromptLookup(length=3, branches=2)])
def test_heads_read_the_right_state_if_another_drafters_node_was_accepted(partner):
    model = tiny_model("llama")
    strategy = Watched(tiny_model("llama"), nodes=10)
    out = decode(decoders.enable(model), prompts(3), Merged([partner, strategy]), max_new_tokens=40, **EAGER)
    assert strategy.seen > 20 and out.report.accepted > 0


def test_first_step_draft_tokens_nothing():
    model = decoders.enable(tiny_model("llama"))
    assert decode(model, prompts(2), medusa(), max_new_tokens=1, **EAGER).report.drafted == 0


def test_noise_helps_the_heads_to_draft_token_what_is_drawn():
    """At a high temperature heads that draw alike accept far more than their likeliest tokens would."""
    model, inputs = decoders.enable(tiny_model("llama")), prompts(4)
    strategy = Medusa(heads=random_heads(), tree=tuple((i,) for i in range(10)))
    hot = dict(do_sample=True, temperature=20.0, top_k=0, seed=1, max_new_tokens=60, **EAGER)
    # Nearly every token is as likely as any other, so that a draft token without noise is right once in 128 times.
    assert decode(model, inputs, strategy, **hot).report.acceptance_rate > 5 / 128


# --- other verifiers


@pytest.mark.slow
def test_draws_under_tree_rejection_follow_the_target():
    """The third token of many rows, drawn with medusa's draft tokens accepted or rejected, against its exact distribution."""
    rows, model = 3000, decoders.enable(tiny_model("llama"))
    ids = prompts(1)["input_ids"].expand(rows, -1)
    options = dict(do_sample=True, temperature=0.7, top_k=3, max_new_tokens=3, seed=2, **EAGER)
    out = decode(model, {"input_ids": ids}, medusa(nodes=40), verifier="tree_rejection", **options)
    assert out.report.accepted > 0 and out.report.exact
    plain = decode(model, {"input_ids": ids}, "autoregressive", **options)
    drawn, expected = ((s.sequences[:, -2] * 128 + s.sequences[:, -1]) for s in (out, plain))
    kinds = torch.cat([drawn, expected]).unique()
    table = torch.stack([(sample[:, None] == kinds).sum(0) for sample in (drawn, expected)]).numpy()
    assert stats.chi2_contingency(table[:, table.sum(0) > 10]).pvalue > 1e-3


def test_tree_that_skips_a_rank_takes_the_first_draws_under_a_rejection_rule():
    topology, picks = Topology.from_paths(((1,), (4,), (1, 0), (1, 2), (4, 3)))
    assert without_gaps(topology, picks) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 0)]
    model = decoders.enable(tiny_model("llama"))
    for verifier in ("coupled", "tree_rejection"):
        decode(model, prompts(2), medusa(tree=((0,), (2,))), max_new_tokens=8, verifier=verifier, **SAMPLED, **EAGER)


def test_typical_acceptance_is_marked_lossy_and_accepts_more():
    model, inputs = decoders.enable(tiny_model("llama")), prompts(4)
    lossy = decode(model, inputs, medusa(), max_new_tokens=30, verifier="typical", **SAMPLED, **EAGER).report
    exact = decode(model, inputs, medusa(), max_new_tokens=30, verifier="tree_rejection", **SAMPLED, **EAGER).report
    assert (lossy.exact, lossy.verifier) == (False, "typical")
    assert exact.exact and exact.verifier == "tree_rejection"
    assert lossy.mean_accepted_length > exact.mean_accepted_length


def test_typical_acceptance_is_exact_where_nothing_is_drawn_but_still_called_lossy():
    model, inputs = decoders.enable(tiny_model("llama")), prompts(3)
    out = decode(model, inputs, medusa(), max_new_tokens=40, verifier="typical", **EAGER)
    assert_same_tokens(model, inputs, decode(model, inputs, max_new_tokens=40).sequences, out.sequences, "greedy")
    assert not out.report.exact


# --- settings and refusals


def test_without_heads_it_says_how_to_get_some():
    with pytest.raises(UnsupportedError, match="decoders train medusa"):
        decode(decoders.enable(tiny_model("llama")), prompts(1), "medusa", max_new_tokens=4, **EAGER)


def test_heads_of_another_model_are_refused_and_both_sizes_named():
    model = decoders.enable(tiny_model("llama"))
    for heads, both in (
        (random_heads(hidden=16), "hidden size 16 and a vocabulary of 128.*hidden size 32 and a vocabulary of 128"),
        (random_heads(vocab=200), "hidden size 32 and a vocabulary of 200.*hidden size 32 and a vocabulary of 128"),
    ):
        with pytest.raises(SettingsError, match=both):
            decode(model, prompts(1), Medusa(heads=heads), max_new_tokens=4, **EAGER)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)), "4 levels deep, deeper than 3 heads can draft"),
        (((128,),), "ranks in the tree must be"),
    ],
)
def test_trees_that_the_heads_cannot_fill_are_refused(tree, reason):
    with pytest.raises(SettingsError, match=reason):
        decode(decoders.enable(tiny_model("llama")), prompts(1), medusa(tree=tree), max_new_tokens=4, **EAGER)


def test_budget_takes_the_first_paths_and_keeps_a_tree():
    assert budgeted(DEFAULT_TREE, 5) == DEFAULT_TREE[:5]
    assert budgeted(((0, 0), (1,), (0,), (0, 1)), 3) == ((1,), (0,), (0, 1))
    assert budgeted(WIDE, len(WIDE)) == WIDE
    model = decoders.enable(tiny_model("llama"))
    assert decode(model, prompts(1), medusa(nodes=7), max_new_tokens=8, **EAGER).report.nodes == 8


def test_default_tree_is_cut_to_the_heads_there_are():
    model, heads = decoders.enable(tiny_model("llama")), random_heads(tree=None)
    three_levels = sum(len(path) <= 3 for path in DEFAULT_TREE)
    assert decode(model, prompts(1), Medusa(heads=heads), max_new_tokens=8, **EAGER).report.nodes == three_levels + 1


def test_settings_go_through_json():
    strategy = Medusa(heads="x", tree=[[0], [0, 1]], nodes=2)
    assert Medusa(**strategy.settings.model_dump(mode="json")).settings == strategy.settings


# --- the demo model's own heads


@pytest.fixture(scope="module")
def target():
    model, tokenizer = demo.load()
    return decoders.enable(model, tokenizer), tokenizer


@pytest.mark.slow
def test_demo_heads_are_found_beside_the_model_and_pay(target):
    model, tokenizer = target
    lengths = []
    for prompt in demo.prompts("code")[:2]:
        inputs = dict(tokenizer(prompt.text, return_tensors="pt"))
        out = decode(model, inputs, "medusa", max_new_tokens=40, **EAGER)
        plain = decode(model, inputs, "autoregressive", max_new_tokens=40, **EAGER)
        assert_same_tokens(model, inputs, plain.sequences, out.sequences, prompt.id)
        lengths.append(out.report.mean_accepted_length)
    assert sum(lengths) / len(lengths) >= 1.8
    again = decode(model, inputs, Medusa(heads="demo"), max_new_tokens=40, **EAGER)
    assert again.report.mean_accepted_length == lengths[-1]


@pytest.mark.slow
def test_searched_tree_beats_the_default_on_held_out_code(target):
    model, tokenizer = target
    lengths = {}
    for name, tree in (("searched", None), ("default", DEFAULT_TREE)):
        tokens = steps = 0
        for prompt in demo.prompts("code"):
            inputs = dict(tokenizer(prompt.text, return_tensors="pt"))
            report = decode(model, inputs, Medusa(tree=tree), max_new_tokens=128, **EAGER).report
            assert report.nodes == 64
            tokens, steps = tokens + report.new_tokens[0], steps + report.steps
        lengths[name] = tokens / steps
    assert lengths["searched"] >= 1.8
    assert lengths["searched"] > lengths["default"]
