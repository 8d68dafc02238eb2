"""Function arguments in notations with unescaped strings, each of which ends at a mark."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

from ...errors import GrammarError
from ..patterns import automata, ecma
from ..patterns.characters import LAST
from ..patterns.limits import left
from ..patterns.tree import (
    ANYTHING,
    CHARACTER,
    Chars,
    Pattern,
    cat,
    literal,
    quoted,
    slashed,
    times,
    unit,
    words,
    write,
)
from ..vocabulary import stand_in
from . import string_text, strings
from .document import Place, document
from .kinds import KINDS, UNDECLARED, Kinds
from .nodes import Node
from .normaliser import Normaliser
from .notation import EMPTY, Expr, Terminal, Word, alt, seq, text
from .notation import NOTHING as NO_TEXT
from .object_text import ObjectWriter
from .objects import Objects, Property
from .strings import Strings
from .whitespace import WHITESPACE, Whitespace
from .writing import Writer

_SEPARATE = "Strings do not contain the mark that ends them."
_OTHERS = "If a parameter may be a string or have other types, its strings are never one of these: {read}."
_READ = {
    "null": "null", "boolean": "true, false", "number": "a number", "array": "what begins with [",
    "object": "what begins with {",
}  # fmt: skip
#: For each type, the strings that readers would take for a value of the type. A parameter of several types cannot have these strings.
_ALIKE = {
    "null": "^null$", "boolean": "^(?:true|false)$", "array": r"^\[", "object": r"^\{",
    "number": r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+\-]?[0-9]+)?$",
}  # fmt: skip


@lru_cache(16)
def _tree(pattern: str) -> Pattern:
    return ecma.strings(pattern)[0][0]


#: Characters above this one stand for special tokens, see :meth:`~decoders.constraints.vocabulary.Vocabulary.spelling`.
_TEXT = ord(stand_in(0)) - 1
_STAND_INS = f"{chr(_TEXT + 1)}-{chr(LAST)}"
#: The white space of ECMA and of Python, for use inside of a class.
_SPACE = r"\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"


@lru_cache(16)
def _compiled(tree: Pattern) -> re.Pattern[str]:
    """`tree` compiled by Python's ``re``, which is faster than automata if many texts are matched and the tree backtracks little."""
    return re.compile(write(tree))


def write_raw(strings: Strings, never: Sequence[Pattern], begin: str = "", end: str = "") -> Expr:
    """An expression for the unescaped texts of `strings`, except strings that a tree of `never` matches. Each text stands between a
    match of the regular expression `begin` and a match of `end`.
    """
    written = strings.written
    if written is None:
        return NO_TEXT
    if written.values is not None:
        values = [v for v in sorted(written.values) if not any(_compiled(tree).fullmatch(v) for tree in never)]
        return text(f"{begin}(?:{'|'.join(map(quoted, values))}){end}") if values else NO_TEXT
    conditions = sorted(written.conditions | {(tree, False) for tree in never}, key=repr)
    if written.excluded:
        conditions.append((words(written.excluded), False))
    parts = [slashed(times(unit(CHARACTER), written.low, written.high))]
    parts += [("" if good else "~") + slashed(write(tree)) for tree, good in conditions]
    ends = [slashed(each) if each else "" for each in (begin, end)]
    lark = f"{ends[0]} ({' & '.join(parts)}) {ends[1]}".strip()
    return Word(Terminal(lark, partial(_between, tuple(conditions), written.low, written.high, begin, end)))


def _between(
    conditions: tuple[tuple[Pattern, bool], ...], low: int, high: int | None, begin: str, end: str
) -> str | None:
    inside = _inside(conditions, low, high)
    return None if inside is None else f"{begin}(?:{inside}){end}"


@lru_cache(256)
def _inside(conditions: tuple[tuple[Pattern, bool], ...], low: int, high: int | None) -> str | None:
    try:
        return string_text.expression(automata.automaton(conditions, low, high), string_text.raw_chars)
    except GrammarError:  # the automaton is too large; the Lark notation needs no expression
        if left() < 0:  # more time may give an expression, so this result must not be cached
            raise
        return None


@dataclass(frozen=True)
class Quoted:
    """A notation of arguments: objects are written as ``{key:value,…}``, and every string stands between two `quote` marks.

    Attributes:
        quote: the mark around strings.
        name: a regular expression for names, in the common syntax of ECMA and Python.
    """

    quote: str
    name: ClassVar[str] = rf"""[^{_SPACE}<>"{{}}\[\]:,|{_STAND_INS}]+"""

    @property
    def mark(self) -> str:
        """The mark that ends a string."""
        return self.quote

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the notation that may contain names of special tokens."""
        return (self.quote,)


@dataclass(frozen=True)
class Parameters:
    """A notation of arguments: each parameter is `opening`, name, `middle`, value, `closing`. Strings are unescaped, other values JSON.

    Attributes:
        between: the text between two parameters.
        name: a regular expression for names, in the common syntax of ECMA and Python.
    """

    opening: str
    middle: str
    closing: str
    between: str = ""
    name: ClassVar[str] = rf"""[^\r\n<>"{_STAND_INS}]+"""

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the notation that may contain names of special tokens."""
        return (self.opening, self.middle, self.closing, self.between)

    @property
    def mark(self) -> str:
        """The mark that ends a value."""
        return self.closing.strip()


Notation = Quoted | Parameters


def writer(notation: Notation, normaliser: Normaliser, closed: bool, kinds: Kinds) -> Writer:
    """A writer of arguments in `notation`."""
    if isinstance(notation, Quoted):
        return _QuotedWriter(normaliser, closed, notation)
    return _ParameterWriter(normaliser, closed, notation, kinds)


class _RawWriter(Writer):
    """Writes objects with unquoted names."""

    def __init__(self, normaliser: Normaliser, closed: bool, notation: Notation, whitespace: Whitespace) -> None:
        super().__init__(normaliser, whitespace, closed)
        self.special = any(ord(character) > _TEXT for each in notation.texts for character in each)
        mark = Chars(((_TEXT + 1, LAST),)) if self.special else literal(notation.mark)
        self.never, self.keys = [cat(ANYTHING, mark, ANYTHING)], _tree(f"^{notation.name}$")
        self.warning(_SEPARATE)

    def raw_key(self, name: str) -> str:
        if not automata.matches(self.keys, name):
            raise GrammarError(f"calls cannot contain the name {name!r}: use letters, digits and _", "properties")
        return quoted(name)

    def raw_keys(self, keys: Strings, begin: str, end: str) -> Expr:
        allowed = strings.intersection(keys, Strings(conditions=frozenset([(self.keys, True)])))
        return NO_TEXT if allowed is None else write_raw(allowed, (), begin, end)


class _QuotedWriter(_RawWriter):
    def __init__(self, normaliser: Normaliser, closed: bool, notation: Quoted) -> None:
        super().__init__(normaliser, closed, notation, WHITESPACE["compact"])
        self.quote = quoted(notation.quote)

    def key(self, name: str) -> str:
        return self.raw_key(name)

    def string(self, strings: Strings, suffix: str = "") -> Expr:
        return self.raw_keys(strings, "", suffix) if suffix else write_raw(strings, self.never, self.quote, self.quote)


class _ParameterWriter(_RawWriter):
    def __init__(self, normaliser: Normaliser, closed: bool, notation: Parameters, kinds: Kinds) -> None:
        super().__init__(normaliser, closed, notation, WHITESPACE["space"])
        self.notation, self.kinds = notation, kinds

    def root(self, root: Node) -> Expr:
        try:
            shapes = self.normaliser.shapes(root).objects
            return alt(*(_ParametersWriter(self, f"parameters{i}_", shape).write() for i, shape in enumerate(shapes)))
        except GrammarError as problem:
            raise problem if problem.path is not None else self.normaliser.with_location(root, problem) from problem

    def string(self, strings: Strings, suffix: str = "") -> Expr:
        """A string in JSON, without special tokens, because the parsed value would contain their names."""
        within = _tree(f"^[^{_STAND_INS}]*$") if self.special else None
        return string_text.write_string(strings, suffix, within)

    def value(self, node: Node, kinds: frozenset[str]) -> Expr:
        """An expression for a parameter's values, restricted to the types `kinds`, each followed by the end mark."""
        nodes, place = self.normaliser.nodes, self.normaliser.place
        if kinds != KINDS:
            node = nodes.intersection(node, place(_of_types(kinds)))
        closing = quoted(self.notation.closing)
        if "string" not in kinds:
            return seq(self.place(node), text(closing))
        others = sorted(kinds - {"string"})
        never = [*self.never, *(_tree(_ALIKE[kind]) for kind in others)]
        shapes = self.normaliser.shapes(node)
        written = [write_raw(one, never, "", closing) for one in shapes.strings]
        if others:
            self.warning(_OTHERS.format(read=", ".join(_READ[kind] for kind in others)))
            # The lexer matches strings and values of other types in parallel, and a string may go on where another value ends. So
            # the terminals of these values include the end mark.
            written += self.scalars(shapes, closing)
            if inside := kinds & {"array", "object"}:
                nested = nodes.intersection(node, place(_of_types(frozenset(inside))))
                written.append(seq(self.place(nested), text(closing)))
        return alt(*written)


class _ParametersWriter(ObjectWriter):
    """Writes each object of one set, `shape`, as a sequence of parameters."""

    rules: _ParameterWriter

    def __init__(self, rules: _ParameterWriter, name: str, shape: Objects) -> None:
        super().__init__(rules, name, shape)
        self.comma = text(quoted(rules.notation.between)) if rules.notation.between else EMPTY

    def write(self) -> Expr:
        return alt(*([EMPTY] if self.may_be_empty else []), self.inside())

    def member(self, prop: Property) -> Expr:
        notation, kinds = self.rules.notation, self.rules.kinds[prop.name]
        head = quoted(notation.opening) + self.rules.raw_key(prop.name) + quoted(notation.middle)
        return seq(text(head), self.rules.value(prop.node, kinds))

    def undeclared_member(self, keys: Strings, value: Node) -> Expr:
        """An undeclared member. If its name is declared elsewhere in the schema, its value has a type from there (:class:`Kinds`)."""
        notation, kinds = self.rules.notation, self.rules.kinds
        names: dict[frozenset[str], set[str]] = {}
        for name in kinds.names:
            names.setdefault(kinds[name], set()).add(name)
        names.pop(kinds[UNDECLARED], None)
        groups = [(own, Strings(values=frozenset(group))) for own, group in names.items()]
        others = Strings(excluded=frozenset[str]().union(*names.values()))
        members = []
        for own, group in [*groups, (kinds[UNDECLARED], others)]:
            if (allowed := strings.intersection(keys, group)) is not None:
                head = self.rules.raw_keys(allowed, quoted(notation.opening), quoted(notation.middle))
                members.append(NO_TEXT if head == NO_TEXT else seq(head, self.rules.value(value, own)))
        return alt(*members)


@lru_cache(32)
def _of_types(kinds: frozenset[str]) -> Place | bool:
    return document(json.dumps({"type": sorted(kinds)}))
