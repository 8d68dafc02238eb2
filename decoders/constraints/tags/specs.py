"""Specifications of grammars that begin after a marker (`after`), and of tags (marker, grammar, end marker) in free text (`tagged`)."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...errors import GrammarError, keywords_named, shortened
from ..base import CompiledGrammar, Language
from ..coerce import as_spec
from ..patterns.tree import quoted, slashed
from ..specs import Spec
from ..vocabulary import Vocabulary
from .markers import TOKEN, Symbols, symbols_of
from .phases import Free, Inside, Phase
from .tagged import TaggedGrammar, assembled

#: A text, however it is split into tokens, or a token's id.
Marker = str | int
Inner = Spec | CompiledGrammar


class Phases:
    """The phases of a grammar under construction.

    Args:
        compile: compiles a specification that is no :class:`Structure`.
    """

    def __init__(self, vocabulary: Vocabulary, compile: Callable[[Spec], CompiledGrammar]) -> None:
        self.vocabulary, self.compile = vocabulary, compile
        self.phases: list[Phase] = []

    def add(self, phase: Phase) -> int:
        """Adds a phase; returns its number."""
        self.phases.append(phase)
        return len(self.phases) - 1

    def symbols(self, marker: Marker) -> Symbols:
        return symbols_of(marker, self.vocabulary)

    def of(self, grammar: Inner | None) -> int:
        """Adds phases for `grammar` (None: free text), after which the text ends; returns the number of the first phase."""
        if grammar is None:
            return self.add(Free())
        if isinstance(grammar, Structure):
            return grammar.add_to(self)
        return self.add(Inside(self.compiled(grammar)))

    def compiled(self, grammar: Inner) -> CompiledGrammar:
        return self.compile(grammar) if isinstance(grammar, Spec) else grammar

    def tag(self, grammar: Inner, end: Marker | None, then: int) -> int:
        """Adds a phase for `grammar` up to the marker `end`, followed by the phase number `then`; returns the new phase's number.

        Without an end marker, the text ends with the grammar.

        Raises:
            GrammarError: the marker is text, and `grammar` is compiled already.
        """
        if end is None:
            return self.of(grammar)
        symbols = self.symbols(end)
        first = next((place for place, symbol in enumerate(symbols) if symbol >= TOKEN), None)
        text, token = (symbols, None) if first is None else (symbols[:first], symbols[first] - TOKEN)
        if first is not None and symbols[first + 1 :]:
            then = self.add(Free(((symbols[first + 1 :], then),), ends=False, exact=True))
        if text:
            if isinstance(grammar, CompiledGrammar):
                raise GrammarError(
                    f"tagged: the text {bytes(text).decode()!r} cannot end a compiled grammar: give the grammar's specification, "
                    "or end it with a token",
                    "tagged",
                )
            grammar = Ended(grammar, bytes(text).decode(), backend=grammar.backend, policy=grammar.policy)
        return self.add(Inside(self.compiled(grammar), then, token))


@dataclass(frozen=True)
class Structure(Spec):
    """Free text with grammars in it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The structure's name in reports."""

    @abstractmethod
    def add_to(self, phases: Phases) -> int:
        """Adds the structure's phases to `phases`; returns the number of the first phase."""

    def compiled(self, vocabulary: Vocabulary, compile: Callable[[Spec], CompiledGrammar]) -> TaggedGrammar:
        phases = Phases(vocabulary, compile)
        first = self.add_to(phases)
        return assembled(tuple(phases.phases), first, self.label or self.name, vocabulary)

    def language(self) -> Language:
        raise GrammarError(f"{self.name} is free text that contains grammars: only generate(grammar=…) compiles it")


@dataclass(frozen=True)
class After(Structure):
    """Free text up to a marker, then a grammar.

    Attributes:
        marker: the marker that ends the free text.
        grammar: grammar of the text after the marker; None for free text.
        budget: number of tokens of free text after which the marker is forced; None: it is never forced.
        closing: the text that is forced; its last part is the marker; None: only the marker.
        begin: the marker that begins the free text; None: the prompt contains it. Without this marker the grammar begins at once.
    """

    marker: Marker
    grammar: Inner | None
    budget: int | None = field(default=None, kw_only=True)
    closing: str | None = field(default=None, kw_only=True)
    begin: Marker | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_marker(self.marker, "after")

    @property
    def name(self) -> str:
        inner = "" if self.grammar is None else f", {_name(self.grammar)}"
        return f"after {shortened(repr(self.marker))}{inner}"

    @property
    def key(self) -> str:
        return self._keyed(repr((self.marker, _key(self.grammar), self.budget, self.closing, self.begin)))

    def add_to(self, phases: Phases) -> int:
        marker = phases.symbols(self.marker)
        begin = phases.symbols(self.begin) if self.begin is not None else None
        opening = self._token(begin, phases.vocabulary) if begin is not None else None
        again: int | None = None
        if begin is not None and self.grammar is None:  # another thought may follow
            again = following = phases.add(Free())
        else:
            following = phases.of(self.grammar)
        closing = [(phases.symbols(self.closing), following)] if self.closing is not None else []
        thought = phases.add(
            Free(((marker, following), *closing), ends=self.grammar is None, budget=self.budget, closing=len(closing))
        )
        answer = phases.phases[following]
        if begin is None:
            return thought
        if isinstance(answer, Free):
            opens = replace(answer, markers=(*answer.markers, (begin, thought)))
            if again is None:
                return phases.add(opens)
            phases.phases[again] = opens
            return again
        if opening is None:  # the text begins with the thought
            return thought
        return phases.add(replace(answer, opens=(opening, thought)))

    @staticmethod
    def _token(symbols: Symbols, vocabulary: Vocabulary) -> int | None:
        """The token that is the whole marker; None if there is no such token."""
        if symbols[0] >= TOKEN:
            return symbols[0] - TOKEN if len(symbols) == 1 else None
        return vocabulary.ids.get(bytes(symbols)) if max(symbols) < TOKEN else None


@dataclass(frozen=True)
class Tagged(Structure):
    """Free text in which markers begin grammars, any number of times.

    Attributes:
        tags: begin marker, grammar, and end marker of each kind of tag; without an end marker the text ends with the grammar.
        required: whether the text must contain a tag.
        several: whether there may be several tags; else the text ends after the first tag.
        budget: number of tokens of free text after which the first tag of `tags` is forced; None: no tag is forced.
    """

    tags: tuple[tuple[Marker, Inner, Marker | None], ...]
    required: bool = field(default=False, kw_only=True)
    several: bool = field(default=True, kw_only=True)
    budget: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tags:
            raise GrammarError("tagged: there are no tags: give {begin: (grammar, end)}", "tagged")
        for begin, grammar, end in self.tags:
            _check_marker(begin, "tagged")
            if isinstance(grammar, Structure):
                raise GrammarError(
                    f"tagged: the grammar after {begin!r} is free text that contains grammars ({grammar.name}): give one grammar",
                    "tagged",
                )
            if end is not None:
                _check_marker(end, "tagged")

    @property
    def name(self) -> str:
        return "tags " + shortened(", ".join(repr(begin) for begin, _, _ in self.tags))

    @property
    def key(self) -> str:
        tags = [(begin, _key(grammar), end) for begin, grammar, end in self.tags]
        return self._keyed(repr((tags, self.required, self.several, self.budget)))

    def add_to(self, phases: Phases) -> int:
        first = phases.add(Free())
        then = first
        if self.required or not self.several or self.budget is not None:
            then = phases.add(Free(over=not self.several))
        markers = tuple((phases.symbols(begin), phases.tag(grammar, end, then)) for begin, grammar, end in self.tags)
        phases.phases[first] = Free(markers, ends=not self.required, budget=self.budget)
        if then != first and self.several:
            phases.phases[then] = Free(markers)
        return first


@dataclass(frozen=True)
class Ended(Spec):
    """Texts of a specification followed by a fixed text."""

    inner: Spec
    end: str

    @property
    def key(self) -> str:
        return self._keyed(json.dumps([self.inner.key, self.end]))

    def language(self) -> Language:
        inner = self.inner.language()
        regex = None if inner.regex is None else f"(?:{inner.regex}){quoted(self.end)}"
        lark = None if inner.lark is None else f"start: tagged {slashed(quoted(self.end))}\n{_as_rule(inner.lark)}"
        whole = partial(_judge_before, self.end, inner.whole) if inner.whole is not None else None
        return Language(inner.name, regex, lark, inner.warnings, whole, inner.special)


def _judge_before(end: str, whole: Callable[[str], None], text: str) -> None:
    whole(text.removesuffix(end))


#: Matches strings, comments and expressions of Lark, which stay, and the name ``start``, which is replaced.
_START = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(?<![\w-])(start)(?![\w-])')


def _as_rule(lark: str) -> str:
    """`lark` with its rule ``start`` renamed to ``tagged``."""
    return _START.sub(lambda match: "tagged" if match[1] else match[0], lark)


def _check_marker(marker: Any, where: str) -> None:
    if isinstance(marker, bool) or not isinstance(marker, str | int) or marker == "":
        raise GrammarError(
            f"{where}: {shortened(repr(marker))} is not a marker: give a nonempty text, or the id of a token", "marker"
        )


def _name(grammar: Inner) -> str:
    if isinstance(grammar, Structure):
        return grammar.name
    return grammar.language.name if isinstance(grammar, CompiledGrammar) else grammar.label or type(grammar).__name__


def _key(grammar: Inner | None) -> str:
    return grammar.key if isinstance(grammar, Spec) else str(id(grammar))


@keywords_named
def after(marker: Marker, grammar: Any) -> After:
    """Free text up to `marker`, then a grammar to the end of the text, for ``generate(grammar=…)``.

    Where the model would end its text without the marker, the marker is written instead.

    Args:
        marker: a text (``"</think>"``), however it is split into tokens, or a token's id.
        grammar: any value of ``generate(grammar=…)`` for one row, also from `tagged`; None for free text.

    Raises:
        GrammarError: an invalid marker or grammar.
    """
    return After(marker, as_spec(grammar))


@keywords_named
def tagged(tags: Mapping[Marker, Any], *, required: bool = False, several: bool = True) -> Tagged:
    """Free text in which markers begin grammars (tool calls, for example), for ``generate(grammar=…)``.

    Args:
        tags: ``{begin: (grammar, end)}``, or ``{begin: grammar}`` if the text ends with the grammar. Markers are texts or ids of
            tokens.
        required: whether the text must contain a tag.
        several: whether there may be several tags; else the text ends after the first tag.

    Raises:
        GrammarError: no tags, or an invalid marker or grammar.
    """
    if not isinstance(tags, Mapping):
        raise GrammarError(
            f"tagged: {shortened(repr(tags))} is not a dict of tags: give {{begin: (grammar, end)}}", "tagged"
        )
    entries = []
    for begin, value in tags.items():
        grammar, end = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        spec = as_spec(grammar)
        if spec is None:
            raise GrammarError(f"tagged: there is no grammar after {begin!r}: give {{begin: (grammar, end)}}", "tagged")
        entries.append((begin, spec, end))
    return Tagged(tuple(entries), required=required, several=several)
