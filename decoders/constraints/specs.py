"""What a user asks for with ``grammar=``: specifications, from which backends get a language."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import get_args

from ..errors import GrammarError, UnknownNameError, shortened
from .base import Language, Policy
from .patterns.python import whole_text
from .patterns.writer import quoted

#: Characters of all choices together: automata of a million states are no longer built in seconds.
CHOICES_LIMIT = 5_000_000


@dataclass(frozen=True, kw_only=True)
class Spec(ABC):
    """A specification of the texts that a row may write.

    Attributes:
        backend: registry name of what compiles it; ``auto`` takes the table automaton where it can.
        policy: which tokens may spell a legal text, see :data:`~decoders.constraints.base.Policy`.
        label: what messages and reports call it; none of its meaning.
    """

    backend: str | None = field(default=None)
    policy: Policy = field(default="full")
    label: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise UnknownNameError("mask policy", str(self.policy), get_args(Policy))

    @property
    @abstractmethod
    def key(self) -> str:
        """A text that tells specifications apart, for caches in memory and on disk: class, content and options."""

    @abstractmethod
    def language(self) -> Language:
        """The language, in every notation that can express it.

        Raises:
            GrammarError: it cannot be expressed; names the keyword, its path and what would handle it.
        """

    def _keyed(self, content: str) -> str:
        """The :attr:`key` of a specification that `content` says all about."""
        options = f"{type(self).__name__}/{self.backend or '-'}/{self.policy}"
        return f"{options}/{hashlib.sha256(content.encode()).hexdigest()}"


@dataclass(frozen=True)
class Regex(Spec):
    """Texts that match a regular expression as a whole.

    Attributes:
        pattern: as it was given.
    """

    pattern: str

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.whole  # errors where the pattern is written, not where it is used

    @cached_property
    def whole(self) -> str:
        """The pattern in the syntax of :attr:`Language.regex`."""
        return whole_text(self.pattern)

    @property
    def key(self) -> str:
        return self._keyed(self.whole)

    def language(self) -> Language:
        return Language(self.label or f"regex {shortened(self.pattern)}", regex=self.whole)


@dataclass(frozen=True)
class Lark(Spec):
    """Texts of a context-free grammar.

    Attributes:
        text: llguidance's dialect of Lark; the first rule is ``start``.
    """

    text: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.search(r"^\s*[?!]?start\b[^:\n]*:(?!:)", self.text, re.MULTILINE):
            hint = " This looks like GBNF or BNF: write `name: …` for `name ::= …`." if "::=" in self.text else ""
            raise GrammarError(f"{self.name} has no rule `start: …`, where texts begin.{hint}", "start")
        if any("\ud800" <= character <= "\udfff" for character in self.text):
            raise GrammarError(f"half of a surrogate pair in {self.name!a}: it stands for no character", "surrogate")

    @property
    def name(self) -> str:
        """What messages and reports call it."""
        return self.label or f"grammar {shortened(self.text) or '(empty)'}"

    @property
    def key(self) -> str:
        return self._keyed(self.text)

    def language(self) -> Language:
        return Language(self.name, lark=self.text)


@dataclass(frozen=True)
class Choice(Spec):
    """One of several texts.

    Attributes:
        texts: the choices, each once, in the order given.
    """

    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.texts:
            raise GrammarError("choice: there is nothing to choose from", "choice")
        if (size := sum(map(len, self.texts))) > CHOICES_LIMIT:
            raise GrammarError(f"choice: {size:,} characters of choices; the limit is {CHOICES_LIMIT:,}", "choice")
        for place, text in enumerate(self.texts):
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise GrammarError(f"choice: half of a surrogate pair in {text!r}", "choice", f"$[{place}]")

    @cached_property
    def whole(self) -> str:
        """The choices as a regular expression.

        What all have in front and behind is written once: one path of the automaton instead of one for each choice.
        The rest is a plain list: automaton builders fold literals themselves, faster than they read a nested pattern.
        """
        ordered = sorted(self.texts)
        front = _shared(ordered)
        rests = [text[front:] for text in ordered]
        behind = _shared(sorted(rest[::-1] for rest in rests))
        middles = (quoted(rest[: len(rest) - behind]) for rest in rests)
        begin, end = quoted(ordered[0][:front]), quoted(rests[0][len(rests[0]) - behind :])
        return f"{begin}(?:{'|'.join(middles)}){end}" if len(ordered) > 1 else quoted(ordered[0])

    @cached_property
    def key(self) -> str:
        return self._keyed(json.dumps(sorted(self.texts)))

    def language(self) -> Language:
        shown = ", ".join(map(repr, self.texts[:3])) + (", …" if len(self.texts) > 3 else "")
        return Language(self.label or f"choice of {shortened(shown)}", regex=self.whole)


def _shared(ordered: list[str]) -> int:
    """How many characters all of `ordered`, which is sorted, begin with: as many as the first and the last do."""
    first, last = ordered[0], ordered[-1]
    return next(
        (place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other),
        min(len(first), len(last)),
    )
