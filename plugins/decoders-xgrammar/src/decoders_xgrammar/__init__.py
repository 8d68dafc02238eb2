"""xgrammar as a grammar backend of hf-decoders: regular expressions, with masks computed on the host."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import xgrammar
from torch import Tensor

from decoders import hookimpl
from decoders.constraints import Backend, CompiledGrammar, Language, Matcher, Policy, Vocabulary
from decoders.errors import GrammarError

__all__ = ["XGrammar", "XGrammarGrammar", "XGrammarMatcher"]


class XGrammar(Backend):
    """Compiles the regular expression of a language; supports only the policy ``full``."""

    name = "xgrammar"
    summary = "pushdown automaton with masks prepared per rule; regular expressions only, masks on the host"

    def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> XGrammarGrammar:
        """Compiles `language` for `vocabulary`.

        Raises:
            GrammarError: the language has no regular expression, xgrammar cannot compile it or reads it otherwise, or the policy is not
                ``full``.
        """
        if language.regex is None:
            raise GrammarError(
                f'{language.name}: backend="xgrammar" reads regular expressions only; take backend="llguidance"'
            )
        if policy != "full":
            raise GrammarError(f'{language.name}: backend="xgrammar" has no policy {policy!r}')
        unread = [part for part in _UNREAD.findall(language.regex) if part[0] == "[" or part[1] in "dDpPsSwW"]
        unread += [part for part in _PART.findall(language.regex) if part[0] == "[" and _NESTED.search(part, 1)]
        if unread:
            raise GrammarError(
                f'{language.name}: backend="xgrammar" reads {unread[0]} otherwise than Rust: write the characters ([0-9], say), or '
                'take backend="llguidance"'
            )
        try:
            compiled = self.compiled(_compiler(vocabulary), _translated(language.regex))
        except RuntimeError as error:
            raise GrammarError(
                f"{language.name}: xgrammar does not read its expression: {str(error).strip().splitlines()[-1]}"
            ) from error
        return XGrammarGrammar(language, vocabulary, compiled)

    def compiled(self, compiler: Any, regex: str) -> Any:
        """The ``CompiledGrammar`` of xgrammar for the regular expression `regex`."""
        return compiler.compile_regex(regex)


#: An escape, or the beginning of a class that xgrammar would negate.
_UNREAD = re.compile(r"\[\\\^|\\.", re.DOTALL)
#: A class within a class, or an operation on classes.
_NESTED = re.compile(r"(?<!\\)\[|&&|--|~~")
_ESCAPE = re.compile(r"\\(?:x\{?|.)", re.DOTALL)
#: An escape, a class in brackets, or a dot.
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|\.", re.DOTALL)
_CODES = {r"\x": r"\u00", r"\x{": r"\u{"}


def _translated(regex: str) -> str:
    r"""`regex` as xgrammar reads it: its dot is any character, its ``\x`` takes all hexadecimal digits after it."""
    regex = _PART.sub(lambda part: r"[^\n]" if part[0] == "." else part[0], regex)
    return _ESCAPE.sub(lambda escape: _CODES.get(escape[0], escape[0]), regex)


@lru_cache(maxsize=4)
def _compiler(vocabulary: Vocabulary) -> Any:
    """xgrammar's compiler for a vocabulary. Its cache is off, so that repeated compilation can be measured."""
    tokens = [token or b"" for token in vocabulary.tokens]  # an empty token never occurs in a text
    info = xgrammar.TokenizerInfo(tokens, vocab_size=len(tokens), stop_token_ids=list(vocabulary.stops))
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


class XGrammarGrammar(CompiledGrammar):
    """A language that xgrammar has compiled.

    Attributes:
        compiled: the ``CompiledGrammar`` of xgrammar.
    """

    backend = XGrammar.name

    def __init__(self, language: Language, vocabulary: Vocabulary, compiled: Any) -> None:
        self.language, self.vocabulary, self.policy = language, vocabulary, "full"
        self.compiled = compiled

    def start(self) -> XGrammarMatcher:
        return XGrammarMatcher(self)

    @property
    def nbytes(self) -> int:
        return int(self.compiled.memory_size_bytes)


class XGrammarMatcher(Matcher):
    """A position in a text. xgrammar's matcher follows the tokens; this class tracks whether a stop token has ended the text."""

    def __init__(self, grammar: XGrammarGrammar) -> None:
        self.grammar: XGrammarGrammar = grammar
        self._inner = xgrammar.GrammarMatcher(grammar.compiled)
        self._count = 0
        self._ended = False

    @property
    def accepting(self) -> bool:
        return self._ended or bool(self._inner.is_completed())

    def advance(self, tokens: Sequence[int]) -> int:
        vocabulary = self.grammar.vocabulary
        for taken, token in enumerate(tokens):
            if self._ended or not 0 <= token < len(vocabulary):
                return taken
            if token in vocabulary.stops:
                if not self._inner.is_completed():
                    return taken
                self._ended = True
            elif vocabulary.tokens[token] is None or not self._inner.accept_token(token):
                return taken
            else:
                self._count += 1
        return len(tokens)

    def rollback(self, count: int) -> None:
        held = self._count + self._ended
        if not 0 <= count <= held:
            raise ValueError(f"{held} tokens have been taken, so {count} cannot be rolled back")
        if count and self._ended:
            self._ended = False
            count -= 1
        if count:
            self._inner.rollback(count)
            self._count -= count

    def fill_mask(self, out: Tensor) -> None:
        if not self._ended:
            self._inner.fill_next_token_bitmask(out[None])
            return
        out.zero_()
        for stop in self.grammar.vocabulary.stops:
            bit = torch.tensor(1 << (stop % 32)).to(torch.int32)  # wraps for bit 31, which is the sign
            out[stop // 32] |= bit

    def forced_bytes(self) -> bytes:
        if self._ended:
            return b""
        try:
            return str(self._inner.find_jump_forward_string()).encode()
        except UnicodeDecodeError:  # xgrammar returns text, and part of a character is not text
            return b""


@hookimpl
def decoders_grammar_backends() -> Iterable[type[Backend]]:
    return [XGrammar]
