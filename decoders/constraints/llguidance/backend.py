"""The ``llguidance`` backend: languages compiled by llguidance, and matchers that use it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...errors import GrammarError
from ..base import Backend, CompiledGrammar, Language, Matcher, Policy, mask_words
from ..vocabulary import Vocabulary
from .source import compile_matcher, reason, source, tokenizer_for

#: Bytes that occur in UTF-8 only for control characters (other than tabs and newlines) and characters of planes 4 to 16, which are
#: unassigned or private. Tokenizers trained on little text, such as SmolLM2's, lack tokens for some of these bytes.
_SELDOM = {*range(0x20), 0x7F, *range(0xF1, 0xF5)} - set(b"\t\n\r")
#: All other bytes of UTF-8.
_NEEDED = sorted({*range(0xC0), *range(0xC2, 0xF5)} - _SELDOM)


class LLGuidance(Backend):
    """Compiles Lark grammars, also recursive ones, and regular languages too large for a table. Computes masks on the host."""

    name = "llguidance"
    summary = "Earley parser: context-free grammars and recursion, compiles in a millisecond; masks on the host"

    def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> LLGuidanceGrammar:
        """Compiles `language` for `vocabulary`, without texts that contain a byte of :data:`_SELDOM` that is no token by itself.

        Raises:
            GrammarError: llguidance cannot read `language`, hits a limit immediately, or may reach dead ends because another byte of
                UTF-8 lacks its own token.
        """
        text = source(language)
        missing = [byte for byte in _NEEDED if bytes([byte]) not in vocabulary.ids]
        if missing:
            shown = ", ".join(f"0x{byte:02X}" for byte in missing[:8]) + (" …" if len(missing) > 8 else "")
            raise GrammarError(
                f"{language.name}: no token of this vocabulary stands for just byte {shown}, so llguidance could lead "
                'into a text that cannot be finished. For a regular language, backend="table" leaves such texts out'
            )
        return LLGuidanceGrammar(language, vocabulary, policy, text)


class LLGuidanceGrammar(CompiledGrammar):
    """A language compiled by llguidance. Its matchers share one lexer, which caches its states."""

    backend = LLGuidance.name

    def __init__(self, language: Language, vocabulary: Vocabulary, policy: Policy, text: str) -> None:
        self.language, self.vocabulary, self.policy = language, vocabulary, policy
        self.ends = torch.zeros(mask_words(len(vocabulary)), dtype=torch.int32, device="cpu")
        words, _ = writable(self.ends)
        for stop in vocabulary.stops:
            words[stop >> 5] |= 1 << (stop & 31)
        self._text = text
        self._lock = threading.Lock()
        self._generation = 0
        self._first = compile_matcher(tokenizer_for(vocabulary), language, text)
        self.start().fill_mask(torch.empty_like(self.ends))  # warms the lexer; a language without texts fails here

    def __reduce__(self) -> tuple[Any, ...]:
        return LLGuidanceGrammar, (self.language, self.vocabulary, self.policy, self._text)

    def start(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self)

    @property
    def nbytes(self) -> int:
        """A high estimate, since llguidance does not report its memory: it takes 10 to 80 bytes per character of the grammar, and up to
        1.5 MB besides.
        """
        return self.ends.nbytes + 80 * len(self._text) + (3 << 19)

    def fresh(self, broken: int | None = None) -> tuple[Any, int]:
        """A new ``LLMatcher`` at the beginning of a text, and the number of its lexer. broken: number of a lexer that must be replaced.

        Once a lexer has hit its limit of states, it refuses every token, for all matchers that share it.
        """
        with self._lock:
            if broken == self._generation:
                self._first = compile_matcher(tokenizer_for(self.vocabulary), self.language, self._text)
                self._generation += 1
            return self._first.deep_copy(), self._generation


T = TypeVar("T")

#: CPU seconds that a query may take. All queries of a text together may exceed their time by at most OVERTIME seconds, because all
#: rows of a batch wait for a query. llguidance's own limits bound a mask to 0.1 to 0.7 seconds for the most ambiguous grammars.
#: With other grammars, even with counted patterns and Unicode classes, 400 tokens (vocabulary 49,152) had 0.05 seconds of overtime.
QUESTION_SECONDS, OVERTIME = 0.005, 0.3


class _Broken(Exception):
    """A query of an ``LLMatcher`` ended in an error."""


class LLGuidanceMatcher(Matcher):
    """A position in a text, tracked by an ``LLMatcher``.

    Only text tokens are passed to the ``LLMatcher``; whether the text has ended is stored here.

    An ``LLMatcher`` must not be rolled back after it has computed a mask. Its parser keeps what it read ahead, so if other tokens
    follow, the next mask may be wrong (llguidance 1.9.1). So there is a second matcher that is only advanced and rolled back, never
    queried. A rollback after a query continues with a copy of the second matcher. Copying takes longer for longer texts (50 µs at
    4 kB), so a copy is made per rollback, not per query.
    """

    def __init__(self, grammar: LLGuidanceGrammar) -> None:
        self.grammar: LLGuidanceGrammar = grammar
        self._inner, self._generation = grammar.fresh()
        self._taken: list[int] = []  # all tokens of the text so far, without a stop token
        self._ended = False
        self._asked = False  # whether `_inner` was queried since it was created or copied
        self._unasked: Any = None  # the second matcher, which has consumed `_behind` tokens
        self._behind = 0
        self._overtime = 0.0  # seconds beyond QUESTION_SECONDS, summed over all queries

    @property
    def accepting(self) -> bool:
        return self._ended or self._ask(lambda inner: bool(inner.is_accepting()))

    def advance(self, tokens: Sequence[int]) -> int:
        """Appends `tokens` up to the first illegal token; returns how many were appended.

        Raises:
            GrammarError: llguidance hits a limit. The matcher's position is unchanged.
        """
        if self._ended:
            return 0
        known = self.grammar.vocabulary.tokens
        text: list[int] = []
        for token in tokens:
            if not 0 <= token < len(known) or known[token] is None:
                break
            text.append(token)
        taken = self._take(text) if self.grammar.policy == "full" else self._take_canonical(text)
        if taken == len(text) < len(tokens) and tokens[taken] in self.grammar.vocabulary.stops and self.accepting:
            self._ended = True
            taken += 1
        return taken

    def _take(self, text: list[int]) -> int:
        def consume(inner: Any) -> int:
            taken: int = inner.try_consume_tokens(text)
            if taken < len(text):  # a limit that was hit here shows only with the next mask
                probe = inner.deep_copy()
                probe.compute_bitmask()
                if probe.is_error():
                    raise _Broken(probe.get_error())
            return taken

        taken = self._ask(consume, moves=True) if text else 0
        self._taken += text[:taken]
        return taken

    def _take_canonical(self, text: list[int]) -> int:
        for count, token in enumerate(text):
            if self._forced_token() not in (None, token) or not self._take([token]):
                return count
        return len(text)

    def rollback(self, count: int) -> None:
        held = len(self._taken) + self._ended
        if not 0 <= count <= held:
            raise ValueError(f"cannot roll back {count} tokens: only {held} were appended")
        if count and self._ended:
            self._ended = False
            count -= 1
        if not count:
            return
        del self._taken[-count:]
        surplus = max(self._behind - len(self._taken), 0) if self._unasked is not None else 0
        whole = not surplus or self._unasked.rollback(surplus)
        self._behind -= surplus
        if whole and self._asked:
            self._restore()
        elif not (whole and self._inner.rollback(count)):
            self._renew()

    def fill_mask(self, out: Tensor) -> None:
        """Fills ``out``, ``[W]`` int32 on the CPU, with the mask of the tokens that may come next.

        Raises:
            GrammarError: llguidance hits a limit, the text takes too much time, or the grammar has a dead end here.
        """
        if self._ended:
            out.copy_(self.grammar.ends)
            return
        if self._overtime > OVERTIME:
            raise self._failure(
                f"this text has taken {self._overtime:.1f} s more than {QUESTION_SECONDS} s per mask and token. The grammar is too "
                "ambiguous: write `list: item | list item`, which has one parse per text, instead of `list: item | list list`"
            )
        row, address = writable(out)
        size = row.nbytes
        self._ask(lambda inner: inner.unsafe_compute_mask_ptr(address, size))
        if self.grammar.policy == "canonical" and (only := self._forced_token()) is not None:
            row[:] = 0
            row[only >> 5] = 1 << (only & 31)

    def _forced_token(self) -> int | None:
        """The first token by which the tokenizer encodes the forced bytes; None if no token is forced."""
        vocabulary, policy = self.grammar.vocabulary, self.grammar.policy
        return next(iter(vocabulary.written(self.forced_bytes(), 1, policy)), None)

    def forced_bytes(self) -> bytes:
        if self._ended:
            return b""

        def forced(inner: Any) -> bytes:
            text = bytes(inner.compute_ff_bytes())
            if not text and self.grammar.policy == "canonical":
                inner.compute_bitmask()  # raises if a limit was hit, in which case the bytes would be wrong
            return text

        return self._ask(forced, copy=True)

    def _ask(self, question: Callable[[Any], T], moves: bool = False, copy: bool = False) -> T:
        """Queries the ``LLMatcher``, and returns its answer.

        An ``LLMatcher`` never recovers from an error. So a failed query is repeated with a new lexer, because the old one may have hit
        its limit of states.

        Args:
            question: the query.
            moves: whether the query only consumes tokens, so that the ``LLMatcher`` can be rolled back afterwards.
            copy: whether a copy is queried, because a query for forced bytes moves an ``LLMatcher`` past these bytes.

        Raises:
            GrammarError: the query fails again.
        """
        begin, message = time.thread_time(), ""
        for attempt in (1, 2):
            if not moves and not copy and not self._asked:
                if self._unasked is None:
                    self._unasked, self._behind = self._inner.deep_copy(), len(self._taken)
                self._asked = True
            inner = self._inner.deep_copy() if copy else self._inner
            try:
                answer = question(inner)
                if not inner.is_error():
                    self._overtime += max(time.thread_time() - begin - QUESTION_SECONDS, 0)
                    return answer
                message = inner.get_error()
            except _Broken as error:
                message = str(error)
            if attempt == 1:
                self._renew()
        raise self._failure(message)

    def _renew(self) -> None:
        """Replaces the ``LLMatcher`` by a new matcher at this position; if the new matcher refuses the tokens, the next query fails."""
        self._inner, self._generation = self.grammar.fresh(self._generation)
        self._inner.consume_tokens(self._taken)
        self._asked, self._unasked = False, None

    def _restore(self) -> None:
        """Replaces the ``LLMatcher`` by a copy of the second matcher (never queried), which is first advanced to this position."""
        ahead = self._taken[self._behind :]
        if not ahead or self._unasked.try_consume_tokens(ahead) == len(ahead):
            self._behind = len(self._taken)
            self._inner, self._asked = self._unasked.deep_copy(), False
        else:
            self._renew()

    def _failure(self, message: str) -> GrammarError:
        text = self.grammar.vocabulary.spell(self._taken).decode(errors="replace")
        where = f"{self.grammar.language.name}, after {text[-60:]!r}"
        if "NoExtension" in message:
            return GrammarError(f"{where}: the grammar has a dead end: no text of the language begins like this")
        return GrammarError(f"{where}: llguidance gave up: {reason(message)}")


def writable(out: Tensor) -> tuple[Any, int]:
    """`out` as a numpy array of uint32, and its address, for writing masks directly.

    Raises:
        ValueError: `out` has another dtype or layout.
    """
    if out.dtype != torch.int32 or out.device.type != "cpu" or not out.is_contiguous():
        raise ValueError(f"masks are written to contiguous int32 on the CPU, not to {out.dtype} on {out.device}")
    return out.numpy().view("uint32"), out.data_ptr()
