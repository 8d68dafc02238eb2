"""Two hundred answers under each of twelve schemas, each behind a thought: all are valid, and no grammar has touched a thought."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import pytest

import decoders
from decoders import demo
from decoders.strategies import Speculative

from .test_grammar_outputs import SCHEMAS

NAMES = (
    "person", "optional", "array", "objects", "tuple", "enum", "const", "union", "referenced", "pattern", "date", "contains",
)  # fmt: skip
STRATEGIES = ("autoregressive", "prompt_lookup", "grammar+prompt_lookup", "token_recycling", Speculative(length=4))
#: Rows of a call; calls of each kind of draw; tokens of a thought at most, and of a text.
ROWS, CALLS, BUDGET, NEW = 25, 4, 16, 240
MARKER = ":\n"


@functools.cache
def models() -> Any:
    model, tokenizer = demo.load()
    tokenizer.padding_side = "left"
    return decoders.enable(model, tokenizer=tokenizer), tokenizer, demo.load("draft")[0]


def written(call: int, strategy: Any, sampled: bool, new: int, **options: Any) -> list[list[int]]:
    model, tokenizer, draft = models()
    prompts = [f"def function_{call * ROWS + row}(argument" for row in range(ROWS)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    needs = {"assistant_model": draft} if getattr(strategy, "needs_assistant", False) else {}
    draws = dict(do_sample=True, temperature=1.0, top_k=0, seed=call) if sampled else dict(do_sample=False)
    out = model.generate(
        **inputs, strategy=strategy, max_new_tokens=new, decoders_config={"compile": False}, **draws, **needs, **options
    )
    return out[:, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


@functools.cache
def free(call: int, sampled: bool) -> list[list[int]]:
    return written(call, "autoregressive", sampled, BUDGET + 1)


@functools.cache
def plain(name: str, call: int, sampled: bool) -> list[list[int]]:
    grammar = decoders.after(MARKER, dict(SCHEMAS[name]))
    return written(call, "autoregressive", sampled, NEW, grammar=grammar, thinking=BUDGET)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: getattr(s, "name", s))
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_valid_and_thoughts_untouched(name: str, strategy: Any) -> None:
    _, tokenizer, _ = models()
    judge = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.FormatChecker())
    ways = set()
    for sampled in (False, True):
        for call in range(CALLS):
            texts = plain(name, call, sampled)
            if strategy != "autoregressive":
                options = dict(grammar=decoders.after(MARKER, dict(SCHEMAS[name])), thinking=BUDGET)
                assert written(call, strategy, sampled, NEW, **options) == texts
            for tokens, unconstrained in zip(texts, free(call, sampled), strict=True):
                thought, answer = tokenizer.decode(tokens, skip_special_tokens=True).split(MARKER, 1)
                judge.validate(json.loads(answer))
                whole = tokenizer.decode(unconstrained)
                forced = tokenizer.decode(unconstrained[:BUDGET], skip_special_tokens=True)
                ways.add(whole.startswith(thought + MARKER))
                assert whole.startswith(thought + MARKER) or (thought + MARKER).startswith(forced)
    assert ways == {True, False}
