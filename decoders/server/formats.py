"""``response_format`` as a grammar of ours. Nothing here reads a file that a client names."""

from __future__ import annotations

from ..constraints import CompiledGrammar, JsonSchema, Lark, Spec, as_spec, choice, library, regex
from ..errors import GrammarError
from .bodies import (
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    Part,
    RegexFormat,
)
from .refusals import Refusal


def spec_of(wanted: Part | None) -> Spec | CompiledGrammar | None:
    """What the text must follow; None for free text.

    Raises:
        Refusal: it cannot be read.
    """
    try:
        return _spec(wanted)
    except GrammarError as error:
        raise Refusal(400, str(error), param="response_format", code="invalid_grammar") from error


def _spec(wanted: Part | None) -> Spec | CompiledGrammar | None:
    if isinstance(wanted, JsonObjectFormat):
        return JsonSchema({"type": "object"}, label="JSON object")
    if isinstance(wanted, JsonSchemaFormat):
        named = wanted.json_schema
        schema = named.schema_ if named.schema_ is not None else {"type": "object"}
        return JsonSchema(schema, strict=named.strict is not False, label=f"JSON schema {named.name!r}")
    if isinstance(wanted, RegexFormat):
        return regex(wanted.regex)
    if isinstance(wanted, ChoiceFormat):
        return choice(wanted.choices)
    if isinstance(wanted, GrammarFormat):
        if (wanted.grammar is None) == (wanted.name is None):
            message = "response_format: give grammar, a text in Lark's notation, or name, one of the library, not both"
            raise Refusal(400, message, param="response_format", code="invalid_value")
        if wanted.grammar is not None:
            return Lark(wanted.grammar)
        assert wanted.name is not None
        return as_spec(library.find(wanted.name).name)
    return None
