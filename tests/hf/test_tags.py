"""``grammar=after(…)``, ``tagged(…)`` and ``thinking=``: the same texts under every strategy, and what is free stays as it was."""

from __future__ import annotations

import functools
import json
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders.errors import UnsupportedError
from decoders.sampling.processors import Masks, Replacements
from decoders.strategies import Lookahead, PromptLookup, Speculative, Staged
from decoders.testing import decode, prompts
from decoders.testing.models import ARCHITECTURES, Architecture

from ..turns import slow_but

END, SIZE, NEW = 1, 144, 44
SAMPLED = dict(do_sample=True, seed=5, temperature=0.9, top_k=0)
FIELD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yes"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
STRATEGIES: dict[str, Any] = {
    "grammar": "grammar",
    "prompt_lookup": PromptLookup(branches=2),
    "lookahead": Lookahead(),
    "token_recycling": "token_recycling",
    "chain": Speculative(length=4),
    "tree": Speculative(tree="dynamic", nodes=8),
    "staged": Staged(stage="grammar"),
    "merged": "grammar+prompt_lookup",
}


def llama(layers: int) -> PreTrainedModel:
    options = dict(ARCHITECTURES["llama"].options) | {"vocab_size": SIZE, "num_hidden_layers": layers}
    return Architecture("llama", MappingProxyType(options))(0)


draft = functools.cache(lambda: llama(1))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Three special tokens, what ASCII can show, and pairs."""
    single, pairs = ["Ġ", *map(chr, range(33, 127))], [(a, b) for a in "ab!{}" for b in 'xyz"']
    names = ["<pad>", "<end>", "<call>", *single, *(a + b for a, b in pairs)]
    backend = Tokenizer(models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = token_decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", clean_up_tokenization_spaces=False
    )
    made.add_special_tokens({"extra_special_tokens": ["<call>"]})
    return made


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return decoders.enable(llama(2), tokenizer=tokenizer)


def run(model: PreTrainedModel, strategy: Any = "autoregressive", rows: int = 1, **options: Any) -> Any:
    needs = {"assistant_model": draft()} if getattr(strategy, "needs_assistant", False) else {}
    options = dict(max_new_tokens=NEW, eos_token_id=END, decoders_config={"compile": False}) | options
    return decode(model, prompts(rows), strategy, **options, **needs)


def written(out: Any) -> list[list[int]]:
    return out.sequences[:, prompts()["input_ids"].shape[1] :].tolist()


def marker_in(tokenizer: PreTrainedTokenizerFast, tokens: list[int], begin: int) -> tuple[str, int]:
    """What two of `tokens` spell for the first time, not before `begin`, and how many tokens there are up to its end."""
    for end in range(begin + 2, NEW - 16):
        text = tokenizer.decode(tokens[end - 2 : end])
        if tokenizer.decode(tokens[:end]).find(text) == len(tokenizer.decode(tokens[: end - 2])) and len(text) < 5:
            return text, end
    raise AssertionError("there is no such text: take another seed")


@functools.cache
def case(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, sampled: bool
) -> tuple[Any, Any, list[Any], list[int]]:
    """What is written without grammars and with them by plain decoding, the grammars of the rows, and where the first two begin."""
    draws = SAMPLED if sampled else {}
    free = written(run(model, rows=4, **draws))
    text, end = marker_in(tokenizer, free[0], 5)
    token = next(place for place in range(8, NEW) if free[1][place] not in free[1][:place])
    tag, _ = marker_in(tokenizer, free[2], 4)
    grammars = [
        decoders.after(text, FIELD),
        decoders.after(free[1][token], decoders.regex("[a-c]{2,6}")),
        decoders.tagged({tag: (decoders.choice(["yes", "no"]), "!"), "<call>": (decoders.choice(["a"]), "<call>")}),
        None,
    ]
    plain = run(model, rows=4, grammar=grammars, **draws)
    return free, plain, grammars, [end, token + 1]


@pytest.mark.in_turns
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", slow_but(STRATEGIES.keys() - {"lookahead", "token_recycling", "merged"}, STRATEGIES))
def test_every_strategy_writes_the_same_texts_in_rows_of_different_phases(model, tokenizer, name, sampled):
    """Rows begin their grammars at different steps, and drafts cross the borders."""
    strategy = STRATEGIES[name]
    free, plain, grammars, begins = case(model, tokenizer, sampled)
    out = run(model, strategy, rows=4, grammar=grammars, **(SAMPLED if sampled else {}))
    assert torch.equal(plain.sequences, out.sequences)
    texts = written(out)
    assert texts[3] == free[3]
    for row, begin in enumerate(begins):
        assert texts[row][:begin] == free[row][:begin]
    answer = tokenizer.decode(texts[0][begins[0] :], skip_special_tokens=True)
    assert json.loads(answer)["b"] in ("x", "yes") and out.report.grammars[0].complete
    letters = tokenizer.decode(texts[1][begins[1] :], skip_special_tokens=True)
    assert 2 <= len(letters) <= 6 and {*letters} <= {*"abc"}
    assert out.report.grammars[2].backend == "tags"


def test_a_grammar_begins_in_a_scheduler_as_it_does_in_a_call(model, tokenizer):
    _, plain, grammars, _ = case(model, tokenizer, False)
    ids, mask = prompts(4).values()
    with decoders.Scheduler(model, tokenizer=tokenizer, strategy="prompt_lookup", rows=3, slots=256) as scheduler:
        handles = [
            scheduler.submit(
                ids[row][mask[row].bool()], grammar=grammars[row], max_new_tokens=NEW, eos_token_id=END, do_sample=False
            )
            for row in range(4)
        ]
        texts = [handle.result(60) for handle in handles]
    for row, text in enumerate(texts):
        new = text[0, int(mask[row].sum()) :].tolist()
        assert new == written(plain)[row][: len(new)]


@pytest.mark.parametrize("verifier", ["rejection", "tree_rejection"])
def test_other_verifiers_begin_grammars_too(model, tokenizer, verifier):
    """They draw from distributions, and what is replaced has a part of it."""
    options = dict(grammar=decoders.after("</t>", FIELD), verifier=verifier, **SAMPLED)
    texts = written(run(model, Speculative(length=3), rows=3, thinking=9, **options))
    for text in (tokenizer.decode(row, skip_special_tokens=True) for row in texts):
        assert json.loads(text.split("</t>", 1)[1])["b"] in ("x", "yes")


def test_probabilities_go_where_the_tokens_go():
    drawn = torch.tensor([[[0.5, 0.25, 0.125, 0.125], [0.5, 0.25, 0.125, 0.125]]])
    replacements = Replacements(torch.tensor([4, 6]), torch.tensor([3, 1]), torch.tensor([[4, 0]]))
    assert replacements.moved(drawn).tolist() == [[[0.0, 0.375, 0.0, 0.625], [0.5, 0.25, 0.125, 0.125]]]
    masks = Masks(None, replacements)
    assert masks.written(torch.tensor([[0, 0]])).tolist() == [[3, 0]]
    assert masks.of_rows(0, 1).written(torch.tensor([[2, 2]])).tolist() == [[1, 2]]


class Loves(LogitsProcessor):
    """Wants one token above all others."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([self.token]), 1e4)


@pytest.mark.parametrize("strategy", ["autoregressive", PromptLookup()], ids=["plain", "drafted"])
def test_a_text_that_would_end_in_its_thought_writes_the_marker(model, tokenizer, strategy):
    processors = LogitsProcessorList([Loves(END)])
    out = run(model, strategy, rows=2, grammar=decoders.after("</t>", FIELD), logits_processor=processors)
    for row in written(out):
        assert tokenizer.decode(row, skip_special_tokens=True).startswith("</t>{")
    biased = run(model, strategy, rows=2, grammar=decoders.after("</t>", FIELD), sequence_bias={(END,): 1e4})
    assert written(biased)[0][:4] == tokenizer("</t>")["input_ids"]
    free = written(run(model))[0]
    place = next(place for place in range(4, NEW) if free[place] not in free[:place])
    (row,) = written(run(model, strategy, grammar=decoders.after("<call>", FIELD), eos_token_id=free[place]))
    assert row[:place] == free[:place] and tokenizer.decode(row[place:]).startswith("<call>{")


@pytest.mark.in_turns
@pytest.mark.parametrize(
    "strategy", ["autoregressive", "grammar", Speculative(length=4)], ids=["plain", "grammar", "drafted"]
)
@pytest.mark.parametrize("budget", [0, 7])
def test_a_thought_has_as_many_tokens_as_it_may_have(model, tokenizer, strategy, budget):
    """In rows whose prompts have begun one, ended one, and neither."""
    inputs = [[40, 41, *tokenizer("<t>")["input_ids"]], tokenizer("<t></t>")["input_ids"], [40, 41, 42]]
    batch = tokenizer.pad({"input_ids": inputs}, padding_side="left", return_tensors="pt")
    options = dict(max_new_tokens=NEW, eos_token_id=END, decoders_config={"compile": False})
    needs = {"assistant_model": draft()} if getattr(strategy, "needs_assistant", False) else {}
    thinking = {"tokens": budget, "begin": "<t>", "end": "</t>"}
    free = decode(model, batch, "autoregressive", **options)
    out, answers = (
        decode(model, batch, strategy, thinking=thinking, grammar=grammar, **options, **needs)
        for grammar in (None, FIELD)
    )
    size = batch["input_ids"].shape[1]
    closing = tokenizer("</t>")["input_ids"]
    texts, plain = out.sequences[:, size:].tolist(), free.sequences[:, size:].tolist()
    assert texts[0][: budget + len(closing)] == plain[0][:budget] + closing
    assert texts[1:] == plain[1:]
    answered = answers.sequences[:, size:].tolist()
    assert answered[0][: budget + len(closing)] == plain[0][:budget] + closing
    begins = (budget + len(closing), 0)
    for row, begin in zip(answered, begins, strict=False):
        assert json.loads(tokenizer.decode(row[begin:], skip_special_tokens=True))["b"] in ("x", "yes")


def test_a_budget_needs_markers_and_a_tokenizer(model, tokenizer):
    with pytest.raises(UnsupportedError, match="needs the markers of a thought"):
        run(model, thinking=5)
    with pytest.raises(UnsupportedError, match="thinking= need"):
        run(decoders.enable(llama(1)), thinking={"tokens": 5, "begin": "<t>", "end": "</t>"})


def test_free_text_makes_no_masks(model, monkeypatch):
    seen = []
    allow = Masks.__init__

    def noted(self: Masks, allowed: Any, replacements: Any = None) -> None:
        seen.append(allowed is not None)
        allow(self, allowed, replacements)

    monkeypatch.setattr(Masks, "__init__", noted)
    run(model, "prompt_lookup", grammar=decoders.after("no such text", FIELD), max_new_tokens=12)
    assert seen and not any(seen)
