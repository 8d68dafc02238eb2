"""A typical schema, in both notations."""

from __future__ import annotations

import re

import llguidance

from decoders.constraints.json_schema import JsonSchema

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


def test_typical_schema_in_both_notations() -> None:
    language = JsonSchema(SCHEMA).language()
    assert language.lark is not None
    assert language.regex is not None
    tokenizer = llguidance.LLTokenizer("byte")
    for text, good in [('{"name": "abc", "age": 5}', True), ('{"name": "abcd"}', False), ('{"age": 5}', False)]:
        matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("lark", language.lark), log_level=0)
        tokens = tokenizer.tokenize_str(text)
        taken = matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)
        assert (taken and matcher.is_accepting()) is good
        assert bool(re.fullmatch(language.regex, text)) is good
