"""The contract of a grammar backend: a language compiled for a vocabulary, and matchers that walk it and come back.

Letters: ``V`` size of the model's logits, ``W = ceil(V / 32)`` words of a packed mask, ``N`` nodes of a block. Bit ``v % 32`` of
word ``v // 32`` says whether token ``v`` may come next.
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
    """A set of texts, in the notations that backends read; at least one is given.

    Attributes:
        name: what it is called in messages and reports.
        regex: the whole text must match; syntax of Rust's ``regex`` crate, no look-around, no back-references, no flags.
        lark: llguidance's dialect of Lark, the first rule is ``start``.
        warnings: what the language leaves out that the specification would allow, or the reverse; one sentence each.
        whole: judges a finished text where the language is wider than the specification: raises GrammarError.
    """

    name: str
    regex: str | None = None
    lark: str | None = None
    warnings: tuple[str, ...] = ()
    whole: Callable[[str], None] | None = None


@dataclass(frozen=True)
class Tables:
    """A compiled language as tensors: a byte automaton, and one packed mask per class of states.

    Attributes:
        next: ``[S, C]`` int32, state after a byte of each of ``C`` classes; 0 is the dead state.
        classes: ``[256]`` int64, class of each byte.
        mask_of: ``[S]`` int64, row of `masks` of each state.
        masks: ``[R, W]`` int32. Stop tokens are among the bits of accepting states; the dead state's mask is ones, so that
            no softmax over nothing arises.
        start: the first state.
        stopped: the state after a stop token, where only stop tokens are legal.
    """

    next: Tensor
    classes: Tensor
    mask_of: Tensor
    masks: Tensor
    start: int
    stopped: int

    @property
    def nbytes(self) -> int:
        """Memory of all tensors."""
        return sum(t.numel() * t.element_size() for t in (self.next, self.classes, self.mask_of, self.masks))


class CompiledGrammar(ABC):
    """A language compiled for a vocabulary. Immutable; shared by all calls.

    Attributes:
        language: what it was compiled from.
        vocabulary: what it was compiled for.
        policy: which spellings of a text are legal.
        backend: name of what compiled it.
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
        """Memory of what was compiled."""

    def judge(self, tokens: Sequence[int]) -> None:
        """Judges the tokens of a finished text where the language is wider than the specification.

        Raises:
            GrammarError: they break it.
        """
        if self.language.whole is not None:
            self.language.whole(self.vocabulary.spell(tokens).decode())

    def dump(self) -> bytes | None:
        """What :meth:`Backend.restore` reads it from: data, no code. None if restoring would save no time over compiling."""
        return None


class Tabulated(CompiledGrammar):
    """A grammar whose positions are states of an automaton, with a mask for each: walking it is looking up numbers.

    Attributes:
        first: the state of the empty text.
        mask_rows: for every state the row of its mask in ``tables().masks``.
    """

    first: int
    mask_rows: Sequence[int]

    @abstractmethod
    def step(self, state: int, token: int) -> int:
        """The state after `token`; 0 if it is illegal. A stop token leads to a state of its own, which allows nothing more."""

    @abstractmethod
    def forced_bytes(self, state: int) -> bytes:
        """The bytes that every continuation begins with, as a matcher in `state` says them."""

    def forced_tokens(self, state: int, limit: int) -> list[int]:
        """The tokens that the tokenizer itself would write the forced bytes with, at most `limit`.

        The last ones are left out where what follows might join them into a longer token.
        """
        return self.vocabulary.written(self.forced_bytes(state), limit, self.policy)

    @abstractmethod
    def tables(self) -> Tables:
        """The automaton as tensors on the CPU. The masks may be a fresh copy in each call, which the caller may keep."""


class Matcher(ABC):
    """A position in a text. No call, whether its tokens are legal or not, leaves it in a state from which it cannot go on.

    The loop makes one per row and moves it from node to node of a block: it rolls back to where two paths part and advances from there.
    """

    grammar: CompiledGrammar

    @property
    @abstractmethod
    def accepting(self) -> bool:
        """Whether the text may end here. Also true once it has ended."""

    @abstractmethod
    def advance(self, tokens: Sequence[int]) -> int:
        """Takes `tokens` up to the first illegal one; returns how many it took. After a stop token all are illegal."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Gives back the last `count` tokens, a stop token among them or not.

        Raises:
            ValueError: fewer tokens have been taken.
        """

    @abstractmethod
    def fill_mask(self, out: Tensor) -> None:
        """Writes the mask of the tokens that may come next to ``out``, ``[W]`` int32 on the CPU.

        Never empty: from every position that can be reached some token is legal. After a stop token, all stop tokens.
        """

    @abstractmethod
    def forced_bytes(self) -> bytes:
        """The bytes that every continuation begins with; empty where there is a choice, the end among them."""

    def forced_tokens(self, limit: int) -> list[int] | None:
        """The tokens that must come next, at most `limit`; None where :meth:`forced_bytes` says all."""
        return None

    def replacements(self) -> Mapping[int, int] | None:
        """Where any token may be drawn, as if there were no grammar: the illegal ones, and what is written instead of each.

        None: what may be drawn is what :meth:`fill_mask` says.
        """
        return None


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
        """`language` for `vocabulary`, in bounded time and memory.

        Raises:
            GrammarError: it has no form that this backend reads, or exceeds its limits; names what would handle it.
        """

    def restore(
        self, content: bytes, language: Language, vocabulary: Vocabulary, policy: Policy = "full"
    ) -> CompiledGrammar:
        """The grammar that was dumped as `content`, once compiled from the same.

        Raises:
            GrammarError: `content` is not that.
        """
        raise GrammarError(f"backend {self.name!r} keeps nothing on disk")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def mask_words(vocabulary: int) -> int:
    """``W``, words of a packed mask over `vocabulary` tokens."""
    return -(-vocabulary // 32)


def pack(allowed: Tensor) -> Tensor:
    """``[…, V]`` bool as packed masks ``[…, W]`` int32."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[-1] % 32)).unflatten(-1, (-1, 32))
    bits = padded.to(torch.int64) << torch.arange(32, device=allowed.device)
    return bits.sum(-1).to(torch.int32)


def unpack(masks: Tensor, vocabulary: int) -> Tensor:
    """Packed masks ``[…, W]`` int32 as ``[…, V]`` bool."""
    eighths = masks.contiguous().view(torch.uint8)  # little-endian, as is whatever PyTorch runs on
    bits = (eighths[..., None] >> torch.arange(8, dtype=torch.uint8, device=masks.device)) & 1
    return bits.view(torch.bool).flatten(-2)[..., :vocabulary]
