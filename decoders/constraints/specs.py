"""Specifications of languages: values of ``grammar=`` are coerced to specifications, and backends compile their languages."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from os.path import commonprefix
from typing import Any, get_args

from ..errors import GrammarError, UnknownNameError, shortened, suggest
from ..report.figures import LEFT_OUT
from .base import CompiledGrammar, Language, Policy
from .patterns.limits import deadline, left
from .patterns.python import whole_text
from .patterns.tree import quoted
from .python_types import schema_of
from .schemas import limits, notation
from .schemas.document import document, members
from .schemas.judge import Validation
from .schemas.keywords import ignored
from .schemas.nodes import Node
from .schemas.normaliser import Normaliser
from .schemas.notation import Expr
from .schemas.whitespace import MOST_INDENT, WHITESPACE
from .schemas.writing import Writer
from .vocabulary import Vocabulary

#: Greatest number of characters of all choices together; the automaton of more characters would take too long to build.
CHOICES_LIMIT = 5_000_000


@dataclass(frozen=True, kw_only=True)
class Spec(ABC):
    """A specification of the texts that a row may write.

    Attributes:
        backend: registry name of the backend (``auto`` uses ``table`` where possible); None: the setting ``constraint_backend``.
        policy: which tokens may spell a legal text, see :data:`~decoders.constraints.base.Policy`.
        label: name in messages and reports; specifications that differ only in the label are equal.
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
        """A text that identifies class, content and options: a part of the key in the memory cache of compiled grammars."""

    @abstractmethod
    def language(self) -> Language:
        """The language, in every notation that can express it.

        Raises:
            GrammarError: the language cannot be expressed; the error names the keyword, its path and what would work.
        """

    def compiled(self, vocabulary: Vocabulary, compile: Callable[[Spec], CompiledGrammar]) -> CompiledGrammar:
        """The grammar for `vocabulary`. compile: the function that compiles this specification, or a specification inside it."""
        return compile(self)

    def _keyed(self, content: str) -> str:
        """The :attr:`key` of this specification, given its `content` as text."""
        options = f"{type(self).__name__}/{self.backend or '-'}/{self.policy}"
        return f"{options}/{hashlib.sha256(content.encode()).hexdigest()}"


@dataclass(frozen=True)
class Regex(Spec):
    """Texts that match a regular expression as a whole.

    Attributes:
        pattern: the regular expression as the user wrote it.
    """

    pattern: str

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.whole  # raises errors at construction

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
        text: a grammar in llguidance's dialect of Lark, with a rule ``start``.
    """

    text: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.search(r"^[^\S\n]*[?!]?start\b[^:\n]*:(?!:)", self.text, re.MULTILINE):
            hint = " This looks like GBNF or BNF: write `name: …` for `name ::= …`." if "::=" in self.text else ""
            raise GrammarError(f"{self.name} has no rule `start: …`, with which every text begins.{hint}", "start")
        if any("\ud800" <= character <= "\udfff" for character in self.text):
            raise GrammarError(f"{self.name!a} contains half of a surrogate pair: remove it", "surrogate")

    @property
    def name(self) -> str:
        """The grammar's name in messages and reports."""
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
            longest = max(range(len(self.texts)), key=lambda place: len(self.texts[place]))
            raise GrammarError(
                f"choice: {size:,} characters of {len(self.texts):,} choices, the longest is number {longest}, of "
                f"{len(self.texts[longest]):,}; the limit is {CHOICES_LIMIT:,}: give fewer, or decoders.regex with the pattern "
                "that they share",
                "choice",
            )
        for place, text in enumerate(self.texts):
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise GrammarError(f"choice: remove the lone surrogate from {text!r}", "choice", f"$[{place}]")

    @cached_property
    def whole(self) -> str:
        """The choices as a regular expression.

        Their common prefix and suffix are written once, so that the automaton has one path for them. The rest is a plain
        list: automaton builders merge literals themselves, faster than they read a nested pattern.
        """
        ordered = sorted(self.texts)
        front = len(commonprefix(ordered))  # noqa: RUF071 -- no files
        rests = [text[front:] for text in ordered]
        back = len(commonprefix([rest[::-1] for rest in rests]))  # noqa: RUF071 -- no files
        middles = (quoted(rest[: len(rest) - back]) for rest in rests)
        begin, end = quoted(ordered[0][:front]), quoted(rests[0][len(rests[0]) - back :])
        return f"{begin}(?:{'|'.join(middles)}){end}" if len(ordered) > 1 else quoted(ordered[0])

    @cached_property
    def key(self) -> str:
        return self._keyed(json.dumps(sorted(self.texts)))

    def language(self) -> Language:
        shown = ", ".join(map(repr, self.texts[:3])) + (", …" if len(self.texts) > 3 else "")
        return Language(self.label or f"choice of {shortened(shown)}", regex=self.whole)


#: Greatest number of keywords left out of one schema. The search for them ends after ``_MOST_ATTEMPTS * limits.STEPS`` steps.
_MOST_DROPPED, _MOST_ATTEMPTS = 100, 4
#: Keywords that are never left out, because validating the finished text needs them, too.
_NEEDED = ("$ref", "$dynamicRef", "$recursiveRef", "$schema", "type")
_UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
_WARNINGS = (
    "Keys stand in the order in which the schema declares them, then required ones that are not declared, then others.",
    "A declared key never occurs twice. Other keys may; the last of them meets a condition that some property has to meet.",
    "Integers are written without a fraction, and numbers between bounds without an exponent; numbers that must not be integers "
    "have up to 15 digits.",
    "Strings under a condition (length, pattern, format, enum) escape only what has to be escaped.",
)
_FORMAT = "A known format is a condition: dates look like dates. To the drafts since 2019 it is an annotation."
_PATTERN = (
    r"Patterns are read as in ECMA-262: \d and \w are ASCII, $ is the very end. jsonschema reads them as Python's re does, and may "
    "judge strings with other characters differently."
)
_CLOSED = "Objects that declare properties take no other properties, unless the schema mentions other properties."


@dataclass(frozen=True)
class JsonSchema(Spec):
    """JSON texts that are valid under a schema. Its ``$schema`` selects the draft: 4, 6, 7, 2019-09 or 2020-12.

    Attributes:
        schema: a dict, a boolean, or JSON text; for Python types see :meth:`of`.
        whitespace: "space": at most one blank after a comma or colon; "compact": none; "flexible": one blank or one line
            break with its indent wherever JSON allows white space inside brackets.
        indent: number of blanks per level, with every member on its own line, exactly as ``json.dumps(…, indent=…)`` writes;
            replaces `whitespace`.
        strict: whether keywords that the language cannot express raise an error. If False, the language ignores them, and the
            finished text is validated.
        closed: whether undeclared properties are forbidden in objects whose schema declares properties and says nothing about others.
    """

    schema: Any
    whitespace: str = "space"
    indent: int | None = None
    strict: bool = True
    closed: bool = False

    @staticmethod
    def of(value: Any, **options: Any) -> JsonSchema:
        """The specification of a schema, or of a type: a pydantic model, a TypedDict, a dataclass, ``list[int]``, ….

        Args:
            options: attributes of the specification. `closed` is True for types unless given.

        Raises:
            GrammarError: pydantic has no schema of the type.
        """
        if value is None or isinstance(value, dict | str | bool):
            return JsonSchema(value, **options)
        return JsonSchema(schema_of(value), **{"closed": True, **options})

    @cached_property
    def text(self) -> str:
        """The schema as JSON."""
        if isinstance(self.schema, str):
            return self.schema
        try:
            return json.dumps(self.schema)
        except (TypeError, ValueError, RecursionError) as problem:
            raise GrammarError(f"the schema is not JSON: {problem}", path="$") from problem

    @property
    def key(self) -> str:
        try:
            content = json.loads(self.text)
        except (ValueError, RecursionError):
            content = self.text
        options = [content, self.whitespace, self.indent, self.strict, self.closed, self.backend, self.policy]
        return "JsonSchema " + json.dumps(options, separators=(",", ":"))

    def language(self) -> Language:
        with deadline():
            return self._language()

    def _language(self) -> Language:
        rules, dropped, written = self._grammar
        keys = frozenset(self._keys)
        warnings = [*_WARNINGS, *([_FORMAT] if "format" in keys else []), *([_CLOSED] if self.closed else [])]
        warnings += [_PATTERN] if not keys.isdisjoint(("pattern", "patternProperties")) else []
        warnings += written
        warnings += [f"{path}: {keyword} {LEFT_OUT}" for path, keyword in dropped]
        whole = None if self.strict else Validation(json.loads(self.text))
        title = json.loads(self.text).get("title") if self.text.lstrip().startswith("{") else None
        name = self.label or (f"JSON schema {title!r}" if isinstance(title, str) else "JSON schema")
        return Language(name, _regex(rules), notation.lark(rules), tuple(warnings), whole)

    @cached_property
    def _grammar(self) -> tuple[dict[str, Expr], list[tuple[str, str]], list[str]]:
        """The rules, the (path, keyword) of each keyword that was left out, and warnings."""
        if self.whitespace not in WHITESPACE:
            raise GrammarError(f"unknown whitespace {self.whitespace!r}. {suggest(self.whitespace, WHITESPACE)}")
        if self.indent is not None and (type(self.indent) is not int or not 0 <= self.indent <= MOST_INDENT):
            raise GrammarError(
                f"indent={self.indent!r}: give a number of blanks from 0 to {MOST_INDENT}, or leave it out", "indent"
            )
        dropped: list[tuple[str, str]] = []
        steps = 0
        while True:
            normaliser, root = self._read(dropped)
            # A keyword whose rules take too long is left out, too. So each attempt may take only half of the remaining time.
            seconds = left() if self.strict else left() / 2
            try:
                with deadline(seconds):
                    writer = self._writer(normaliser)
                    rules = writer.write(root)
                break
            except RecursionError as problem:
                raise GrammarError("the schema is nested too deeply: take fewer levels", path="$") from problem
            except GrammarError as problem:
                steps += normaliser.steps
                needed = problem.keyword in (None, *_NEEDED)  # None: the schema is invalid, or too large as a whole
                cause = None if self.strict or needed else normaliser.droppable(problem)
                if cause is None or len(dropped) == _MOST_DROPPED or steps > _MOST_ATTEMPTS * limits.STEPS:
                    raise
                dropped.append(cause)
        if not rules:
            raise GrammarError("no value that a grammar can express is valid under this schema", path="$")
        return rules, dropped, [*writer.warnings, *dict.fromkeys(ignored(normaliser.places))]

    def _read(self, dropped: Iterable[tuple[str, str]]) -> tuple[Normaliser, Node]:
        """A normaliser that leaves out the keywords `dropped`, and the root node of the schema."""
        root = document(self.text)
        normaliser = Normaliser(frozenset(dropped), evaluation=any(key in _UNEVALUATED for key in self._keys))
        return normaliser, normaliser.place(root)

    def _writer(self, normaliser: Normaliser) -> Writer:
        white_space = WHITESPACE[self.whitespace] if self.indent is None else self.indent
        return Writer(normaliser, white_space, self.closed)

    @property
    def _keys(self) -> Iterator[str]:
        return (key for key, _ in members(json.loads(self.text)))


def _regex(rules: dict[str, Expr]) -> str | None:
    """`rules` as a regular expression; None if they are not regular, or the conversion takes more than half of the time left."""
    try:
        with deadline(left() / 2):
            return notation.regex(rules)
    except GrammarError:
        return None
