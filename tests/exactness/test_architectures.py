"""Every design × every kind of draft: the tokens are transformers' own.

Designs and drafters take turns, alone and in a batch; the rest is in the slow run.
Texts are several windows (and chunks) long, prompts repeat themselves, and the prefill runs in small pieces.
"""

from __future__ import annotations

import pytest
import torch

import decoders
from decoders.errors import UnsupportedError
from decoders.strategies import Autoregressive, Lookahead, PromptLookup
from decoders.strategy import Strategy
from decoders.testing import ARCHITECTURES, UNSUPPORTED, Replay, assert_same_tokens, decode, prompts, tiny_model

from ..turns import slow_but
from .references import EAGER, NEW, SAMPLING, enabled, plain, sampled

COMPILED = {"compile": True, "prefill_chunk": 8}
DRAFTERS = ("autoregressive", "prompt_lookup", "prompt_lookup, 3 branches", "lookahead", "replay", "replay, 3 branches")
#: One of each kind: full attention, sliding window with soft caps, learnt positions, latent attention, sinks, chunks.
REPRESENTATIVE = ("llama", "gemma2", "gpt2", "deepseek_v3", "gpt_oss", "llama4")


def drafter(kind: str, expected: torch.Tensor) -> Strategy:
    branches = 3 if "3 branches" in kind else 1
    if kind == "autoregressive":
        return Autoregressive()
    if kind == "lookahead":
        return Lookahead(window=3, ngram=3, candidates=2)
    if kind.startswith("prompt_lookup"):
        return PromptLookup(length=5, branches=branches)
    start = [int(row.nonzero()[0]) for row in prompts(len(expected))["attention_mask"]]
    texts = tuple(tuple(row[s:].tolist()) for row, s in zip(expected, start, strict=True))
    return Replay(texts=texts, branches=branches)


@pytest.mark.in_turns
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(name, rows, kind):
    model, inputs, expected = enabled(name), prompts(rows), plain(name, rows)
    out = decode(model, inputs, drafter(kind, expected), max_new_tokens=NEW, decoders_config=EAGER)
    assert_same_tokens(model, inputs, expected, out.sequences, f"{name}, {kind}")
    if kind.startswith("replay"):
        assert out.report.accepted > NEW * rows // 2  # the drafts were put to the test
        assert 1 < out.report.mean_accepted_length < 7


# What is drawn depends on the design through its logits alone, which the greedy calls compare.
@pytest.mark.in_turns
@pytest.mark.parametrize("kind", ["prompt_lookup, 3 branches", "lookahead", "replay, 3 branches"])
@pytest.mark.parametrize("name", slow_but(REPRESENTATIVE, ARCHITECTURES))
def test_sampled_tokens_depend_on_the_seed_alone(name, kind):
    model, inputs, expected = enabled(name), prompts(4), sampled(name, 4)
    out = decode(model, inputs, drafter(kind, expected), max_new_tokens=NEW, decoders_config=EAGER, **SAMPLING)
    assert_same_tokens(model, inputs, expected, out.sequences, f"{name}, {kind}, sampled")


def test_sampling_is_not_greedy_and_follows_the_seed():
    model, inputs = enabled("llama"), prompts(4)
    assert not torch.equal(sampled("llama", 4), plain("llama", 4))
    other = decode(
        model, inputs, "autoregressive", max_new_tokens=NEW, decoders_config=EAGER, **SAMPLING | {"seed": 12}
    )
    assert not torch.equal(sampled("llama", 4), other.sequences)


@pytest.mark.parametrize("name", slow_but(["gemma3"], ["llama", "gpt2", "gemma3"]))
def test_prompt_lookup_is_accepted_on_these_texts(name):
    model, inputs = enabled(name), prompts(4)
    out = decode(model, inputs, PromptLookup(branches=3), max_new_tokens=120, decoders_config=EAGER)
    expected = decode(model, inputs, max_new_tokens=120)
    assert_same_tokens(model, inputs, expected.sequences, out.sequences, name)
    assert out.report.accepted > 0
    assert out.report.steps < 120


# The plainest design is traced in tests/engine, and one with layers of two kinds in .ci/run.
# The compiler itself warns about deprecated parts of torch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_compiled_loop_gives_the_same_tokens_and_compiles_once(name, rows, traced_or_compiled):
    model, inputs, expected = enabled(name), prompts(rows), plain(name, rows)
    decoders.release(model)  # what the other way has compiled
    compilations = []
    for kind in ("autoregressive", "replay, 3 branches", "replay"):
        out = decode(model, inputs, drafter(kind, expected), max_new_tokens=NEW, decoders_config=COMPILED)
        assert_same_tokens(model, inputs, expected, out.sequences, f"{name}, {kind}, compiled, batch {rows}")
        assert out.report.compiled
        compilations.append(out.report.compilations)
    assert compilations[1:] == [0, 0]  # strategies share the graph


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unfit_design_is_refused_and_keeps_its_own_generate(name):
    model = decoders.enable(tiny_model(name))
    ids = prompts(1, length=8)["input_ids"]
    with pytest.raises(UnsupportedError, match="without strategy="):
        model.generate(input_ids=ids, strategy="prompt_lookup", max_new_tokens=4)
    assert model.generate(input_ids=ids, max_new_tokens=4, do_sample=False).shape[0] == 1
