"""JSON that follows a schema: ``grammar=JsonSchema({...})``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import GrammarError, suggest
from .base import Language
from .patterns.deadline import deadline, left
from .python_types import schema_of
from .schemas import limits, notation
from .schemas.document import document, members
from .schemas.ignored import ignored
from .schemas.left_out import droppable
from .schemas.lenient import Validation
from .schemas.nodes import Node
from .schemas.normaliser import Normaliser
from .schemas.notation import Expr
from .schemas.spelling import spell
from .schemas.writing import WHITESPACE, Writer
from .specs import Spec

#: Keywords that are left out of one schema, and the work of finding them in units of what one attempt may do.
_MOST_DROPPED, _MOST_ATTEMPTS = 100, 4
#: No validation makes up for what is not there.
_NEEDED = ("$ref", "$dynamicRef", "$recursiveRef", "$schema", "type")
_UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
_WARNINGS = (
    "Keys stand in the order in which the schema declares them, then required ones that are not declared, then others.",
    "A declared key never occurs twice; other keys may, and what some property has to be is the last of them.",
    "Integers are written without a fraction, and numbers between bounds without an exponent; what must be no integer has up "
    "to 15 digits.",
    "Strings under a condition (length, pattern, format, enum) escape only what has to be escaped.",
)
_FORMAT = "A known format is a condition: dates look like dates. To the drafts since 2019 it is an annotation."
_PATTERN = (
    r"Patterns are those of ECMA-262: \d and \w are ASCII, $ is the very end. jsonschema reads them as Python's re does, and may "
    "judge strings of other characters otherwise."
)
#: What a warning says of a keyword that a lenient language leaves out.
LEFT_OUT = "is left to the validation of the finished text."
_CLOSED = "Objects that declare properties take no others, unless the schema says something of others."


@dataclass(frozen=True)
class JsonSchema(Spec):
    """Texts that are JSON and valid under a schema (drafts 4, 6, 7, 2019-09 and 2020-12, by its ``$schema``).

    Attributes:
        schema: a dict, a boolean, or JSON text; for types of Python see :meth:`of`.
        whitespace: "space": at most one blank after a comma or colon; "compact": none; "flexible": one blank or one line
            break with its indent wherever JSON lets white space stand inside brackets.
        strict: refuse what the language cannot honour. Otherwise such keywords are left out, and the finished text is
            validated.
        closed: objects that declare properties take no others where the schema says nothing of others.
    """

    schema: Any
    whitespace: str = "space"
    strict: bool = True
    closed: bool = False

    @staticmethod
    def of(value: Any, **options: Any) -> JsonSchema:
        """The specification of a schema, or of a type: a pydantic model, a TypedDict, a dataclass, ``list[int]``, ….

        Args:
            options: attributes of the specification. `closed` is true for types unless given: what is no field is not
                asked for.

        Raises:
            GrammarError: pydantic knows no schema of the type.
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
        options = [content, self.whitespace, self.strict, self.closed, self.backend, self.policy]
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

    def spell(self, value: Any) -> str | None:
        """`value` as a text of the language (keys in its order), with blanks as ``json.dumps`` has them; None if it is none.

        Raises:
            GrammarError: there is no such language.
        """
        return spell(*self._read(self._grammar[1]), value)

    @cached_property
    def _grammar(self) -> tuple[dict[str, Expr], list[tuple[str, str]], list[str]]:
        """The rules, what they leave out: (path, keyword), and warnings."""
        if self.whitespace not in WHITESPACE:
            raise GrammarError(f"no white space {self.whitespace!r}. {suggest(self.whitespace, WHITESPACE)}")
        dropped: list[tuple[str, str]] = []
        steps = 0
        while True:
            normaliser, root = self._read(dropped)
            # What takes too long is left out, too: an attempt has half of the time, and the next one half of the rest.
            seconds = left() if self.strict else left() / 2
            try:
                with deadline(seconds):
                    writer = Writer(normaliser, WHITESPACE[self.whitespace], self.closed)
                    rules = writer.write(root)
                break
            except RecursionError as problem:
                raise GrammarError("schemas within schemas go too deep; fewer levels work", path="$") from problem
            except GrammarError as problem:
                steps += normaliser.steps
                needed = problem.keyword in (None, *_NEEDED)  # None: no schema at all, or too large as a whole
                cause = None if self.strict or needed else droppable(normaliser, problem)
                if cause is None or len(dropped) == _MOST_DROPPED or steps > _MOST_ATTEMPTS * limits.STEPS:
                    raise
                dropped.append(cause)
        if not rules:
            raise GrammarError("no value that can be written is valid under this schema", path="$")
        places = (content for kind, content in normaliser.nodes.terms if kind == "schema")
        return rules, dropped, [*writer.warnings, *dict.fromkeys(ignored(places))]

    def _read(self, dropped: Iterable[tuple[str, str]]) -> tuple[Normaliser, Node]:
        """The schema without what is left out."""
        root = document(self.text)
        normaliser = Normaliser(frozenset(dropped), evaluation=any(key in _UNEVALUATED for key in self._keys))
        return normaliser, normaliser.place(root)

    @property
    def _keys(self) -> Iterator[str]:
        return (key for key, _ in members(json.loads(self.text)))


def _regex(rules: dict[str, Expr]) -> str | None:
    """`rules` as a regular expression; None if there is none, or it would take more than half of the time that is left."""
    try:
        with deadline(left() / 2):
            return notation.regex(rules)
    except GrammarError:
        return None
