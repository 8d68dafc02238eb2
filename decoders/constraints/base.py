"""The interface of grammar backends. A backend compiles a language for a vocabulary; a matcher tracks one text and can roll back.

Letters: ``V`` size of the model's logits, ``W = ceil(V / 32)`` words of a packed mask. Bit ``v % 32`` of word ``v // 32`` says
whether token ``v`` may come next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import GrammarError
from .vocabulary import Policy, Vocabulary


@dataclass(frozen=True)
class Language:
    """A set of texts, given as a regular expression, a Lark grammar, or both. Free text that contains grammars has neither.

    Attributes:
        name: the language's name in messages and reports.
        regex: a pattern that the whole text must match, in the syntax of Rust's ``regex`` crate; no look-around, no back-references,
            no flags.
        lark: a grammar in llguidance's dialect of Lark, with the start rule ``start``.
        warnings: how the language differs from its specification (:class:`~decoders.constraints.specs.Spec`), one sentence each.
        whole: raises GrammarError if a finished text breaks the specification; None if every text of the language meets it.
        special: names of special tokens that texts may contain. In `regex` and `lark`, a private-use character stands for each
            name (:func:`~decoders.constraints.vocabulary.stand_in`).
    """

    name: str
    regex: str | None = None
    lark: str | None = None
    warnings: tuple[str, ...] = ()
    whole: Callable[[str], None] | None = None
    special: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tables:
    """A compiled language as tensors: a byte automaton with ``S`` states, and ``R`` distinct packed masks. States may share a mask.

    Attributes:
        next: ``[S, C]`` int32, the next state for each state and each class of bytes; 0 is the dead state.
        classes: ``[256]`` int64, the class of each byte, an index into the ``C`` columns of `next`.
        mask_of: ``[S]`` int64, the row in `masks` of each state's mask.
        masks: ``[R, W]`` int32. Masks of accepting states allow the stop tokens, too; the dead state's mask allows all tokens, so
            that a softmax over its masked logits is finite.
        start: the first state.
        stopped: the state after a stop token; its mask allows only stop tokens.
    """

    next: Tensor
    classes: Tensor
    mask_of: Tensor
    masks: Tensor
    start: int
    stopped: int

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.next, self.classes, self.mask_of, self.masks))


class CompiledGrammar(ABC):
    """A language compiled for a vocabulary. Immutable; shared by all calls of ``generate``.

    Attributes:
        language: the language that was compiled.
        vocabulary: the vocabulary that it was compiled for.
        policy: which tokenizations of a text are legal.
        backend: name of the backend that compiled it.
    """

    backend: str
    language: Language
    vocabulary: Vocabulary
    policy: Policy

    @abstractmethod
    def start(self) -> Matcher:
        """A matcher at the beginning of a text."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory of the compiled grammar, in bytes."""

    @property
    def parts(self) -> Sequence[CompiledGrammar]:
        """The grammars whose :meth:`judge` validates finished texts: this grammar or, for free text, the grammars inside it."""
        return (self,)

    def judge(self, tokens: Sequence[int]) -> None:
        """Validates a finished text, given as tokens; does nothing if every text of the language meets the specification.

        Raises:
            GrammarError: the text breaks the specification.
        """
        if self.language.whole is not None:
            self.language.whole(self.vocabulary.spell(tokens).decode())

    def dump(self) -> bytes | None:
        """The grammar serialized as plain data for :meth:`Backend.restore`; None if restoring is no faster than compiling."""
        return None


class Tabulated(CompiledGrammar):
    """A grammar as an automaton with a mask for each state: checking a token takes only table look-ups.

    Attributes:
        first: the start state.
        accepting: for every state, whether the text may end there, or has ended.
        mask_rows: for every state, the index of its mask in ``tables().masks``.
    """

    first: int
    accepting: Sequence[bool]
    mask_rows: Sequence[int]

    def start(self) -> Matcher:
        return StateMatcher(self)

    @abstractmethod
    def step(self, state: int, token: int) -> int:
        """The state after `token`; 0 if `token` is illegal. After a stop token, every token is illegal."""

    @abstractmethod
    def fill(self, state: int, out: Tensor) -> None:
        """Fills ``out``, ``[W]`` int32 on the CPU, with the mask of `state`."""

    @abstractmethod
    def forced_bytes(self, state: int) -> bytes:
        """The bytes that every continuation of `state` begins with, see :meth:`Matcher.forced_bytes`."""

    def forced_tokens(self, state: int, limit: int) -> list[int]:
        """The forced bytes as the tokenizer encodes them; at most `limit` tokens.

        The last tokens are left out if following bytes might join them into a longer token.
        """
        return self.vocabulary.written(self.forced_bytes(state), limit, self.policy)

    @abstractmethod
    def tables(self) -> Tables:
        """The automaton as tensors on the CPU. The masks may be a new copy in each call."""


class Matcher(ABC):
    """The position of one text in a grammar, after the tokens so far. A matcher stays usable after illegal tokens, too.

    The decoding loop creates a matcher per row. To compute the mask of another node of a draft tree, the loop rolls the matcher back to
    where the paths of the two nodes diverge, then advances it.
    """

    grammar: CompiledGrammar

    @property
    @abstractmethod
    def accepting(self) -> bool:
        """Whether the text may end here, or has ended."""

    @abstractmethod
    def advance(self, tokens: Sequence[int]) -> int:
        """Appends `tokens` up to the first illegal token; returns how many were appended. After a stop token every token is illegal."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Removes the last `count` tokens, which may include a stop token.

        Raises:
            ValueError: fewer than `count` tokens have been appended.
        """

    @abstractmethod
    def fill_mask(self, out: Tensor) -> None:
        """Fills ``out``, ``[W]`` int32 on the CPU, with the mask of the tokens that may come next.

        The mask is never empty: in every reachable state some token is legal. After a stop token the mask allows all stop tokens.
        """

    @abstractmethod
    def forced_bytes(self) -> bytes:
        """The bytes that every continuation begins with; empty if several bytes are possible, or the text may end."""

    def forced_tokens(self, limit: int) -> list[int] | None:
        """The tokens that must come next, at most `limit`; None if the caller must use :meth:`forced_bytes` instead."""
        return None

    def replacements(self) -> Mapping[int, int] | None:
        """For each illegal token, the token that replaces it if the model samples it in free text, which is sampled without a mask.

        None outside of free text: there the mask of :meth:`fill_mask` excludes illegal tokens from sampling.
        """
        return None


class StateMatcher(Matcher):
    """A stack of states: the first state, then the state after each token. Rolling back pops states."""

    def __init__(self, grammar: Tabulated) -> None:
        self.grammar: Tabulated = grammar
        self._states = [grammar.first]

    @property
    def accepting(self) -> bool:
        return self.grammar.accepting[self._states[-1]]

    def advance(self, tokens: Sequence[int]) -> int:
        states, step = self._states, self.grammar.step
        for count, token in enumerate(tokens):
            after = step(states[-1], token)
            if not after:
                return count
            states.append(after)
        return len(tokens)

    def rollback(self, count: int) -> None:
        if not 0 <= count < len(self._states):
            raise ValueError(f"cannot roll back {count} tokens: only {len(self._states) - 1} were appended")
        del self._states[len(self._states) - count :]

    def fill_mask(self, out: Tensor) -> None:
        self.grammar.fill(self._states[-1], out)

    def forced_bytes(self) -> bytes:
        return self.grammar.forced_bytes(self._states[-1])


class Backend(ABC):
    """Compiles languages. Constructed without arguments; instances have no state.

    Class attributes:
        name: registry name, ``snake_case``.
        summary: one line for listings.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""

    @abstractmethod
    def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> CompiledGrammar:
        """Compiles `language` for `vocabulary`, in bounded time and memory.

        Raises:
            GrammarError: the backend cannot read `language`, or `language` exceeds the backend's limits; the error says which
                backend would work.
        """

    def restore(
        self, content: bytes, language: Language, vocabulary: Vocabulary, policy: Policy = "full"
    ) -> CompiledGrammar:
        """The grammar that :meth:`CompiledGrammar.dump` serialized as `content`, for the same language, vocabulary and policy.

        Raises:
            GrammarError: `content` is not a dump of a grammar for these arguments.
        """
        raise GrammarError(f"backend {self.name!r} does not save grammars, so it cannot restore one")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def mask_words(vocabulary: int) -> int:
    """Returns ``W``, the number of words of a packed mask over `vocabulary` tokens."""
    return -(-vocabulary // 32)


def pack(allowed: Tensor) -> Tensor:
    """Packs masks ``[…, V]`` bool into words ``[…, W]`` int32."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[-1] % 32)).unflatten(-1, (-1, 32))
    bits = padded.to(torch.int64) << torch.arange(32, device=allowed.device)
    return bits.sum(-1).to(torch.int32)


def unpack(masks: Tensor, vocabulary: int) -> Tensor:
    """Unpacks masks ``[…, W]`` int32 to ``[…, V]`` bool. vocabulary: ``V``."""
    eighths = masks.contiguous().view(torch.uint8)  # little-endian, as on every platform of PyTorch
    bits = (eighths[..., None] >> torch.arange(8, dtype=torch.uint8, device=masks.device)) & 1
    return bits.view(torch.bool).flatten(-2)[..., :vocabulary]
