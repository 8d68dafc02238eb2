"""Whether a text is of a language, in each of its notations."""

from __future__ import annotations

import re
from collections.abc import Callable

import llguidance
import pytest

from decoders.constraints.base import Language
from decoders.constraints.specs import JsonSchema

Accepts = Callable[[Language, str], bool]


class Reader:
    """Reads texts of languages by llguidance and, where there is an expression, by `re`: both must agree."""

    def __init__(self) -> None:
        self.tokenizer = llguidance.LLTokenizer("byte")
        self.matchers: dict[str, llguidance.LLMatcher] = {}

    def __call__(self, language: Language, text: str) -> bool:
        assert language.lark is not None
        accepted = self.by_lark(language.lark, text)
        if language.regex is not None:
            assert bool(re.fullmatch(language.regex, text)) is accepted, (text, language.regex)
        return accepted

    def by_lark(self, lark: str, text: str) -> bool:
        if lark not in self.matchers:
            self.matchers[lark] = llguidance.LLMatcher(
                self.tokenizer,
                llguidance.grammar_from("lark", '%llguidance {"no_forcing": true}\n' + lark),
                log_level=0,
            )
            assert not self.matchers[lark].is_error(), self.matchers[lark].get_error()
        matcher = self.matchers[lark].deep_copy()
        tokens = self.tokenizer.tokenize_str(text)
        taken = matcher.validate_tokens(tokens) == len(tokens) and (not tokens or matcher.consume_tokens(tokens))
        return bool(taken and matcher.is_accepting())


@pytest.fixture(scope="session")
def accepts() -> Accepts:
    return Reader()


@pytest.fixture(scope="session")
def judged(accepts: Accepts) -> Callable[..., bool]:
    """Whether a schema's language has a text."""
    languages: dict[str, Language] = {}

    def judge(schema: object, text: str, **options: object) -> bool:
        spec = JsonSchema(schema, **options)  # type: ignore[arg-type]
        if spec.key not in languages:
            languages[spec.key] = spec.language()
        return accepts(languages[spec.key], text)

    return judge
