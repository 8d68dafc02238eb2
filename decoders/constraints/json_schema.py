"""JSON that follows a schema: ``grammar=JsonSchema({...})``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import GrammarError, suggest
from ..schemas import notation
from ..schemas.document import document
from ..schemas.ignored import ignored
from ..schemas.lenient import Validation
from ..schemas.nodes import Node
from ..schemas.normaliser import Normaliser
from ..schemas.notation import Expr
from ..schemas.spelling import spell
from ..schemas.writing import WHITESPACE, Writer
from .base import Language
from .python_types import schema_of
from .specs import Spec

_MOST_DROPPED = 100
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
        rules, dropped, written = self._grammar
        warnings = [*_WARNINGS, *([_FORMAT] if '"format"' in self.text else []), *([_CLOSED] if self.closed else [])]
        warnings += [_PATTERN] if '"pattern' in self.text else []
        warnings += written
        warnings += [f"{path}: {keyword} is left to the validation of the finished text." for path, keyword in dropped]
        whole = None if self.strict else Validation(json.loads(self.text))
        title = json.loads(self.text).get("title") if self.text.lstrip().startswith("{") else None
        name = self.label or (f"JSON schema {title!r}" if isinstance(title, str) else "JSON schema")
        return Language(name, notation.regex(rules), notation.lark(rules), tuple(warnings), whole)

    def spell(self, value: Any) -> str | None:
        """`value` as a text of the language (keys in its order), with blanks as ``json.dumps`` has them; None if it is none.

        Raises:
            GrammarError: there is no such language.
        """
        normaliser = Normaliser(frozenset(self._grammar[1]), evaluation="unevaluated" in self.text)
        return spell(normaliser, self._root(normaliser), value)

    @cached_property
    def _grammar(self) -> tuple[dict[str, Expr], list[tuple[str, str]], list[str]]:
        """The rules, what they leave out: (path, keyword), and warnings."""
        if self.whitespace not in WHITESPACE:
            raise GrammarError(f"no white space {self.whitespace!r}. {suggest(self.whitespace, WHITESPACE)}")
        dropped: list[tuple[str, str]] = []
        while True:
            normaliser = Normaliser(frozenset(dropped), evaluation="unevaluated" in self.text)
            try:
                writer = Writer(normaliser, WHITESPACE[self.whitespace], self.closed)
                rules = writer.write(self._root(normaliser))
                break
            except RecursionError as problem:
                raise GrammarError("schemas within schemas go too deep; fewer levels work", path="$") from problem
            except GrammarError as problem:
                cause = (problem.path or "", problem.keyword or "")
                if self.strict or not all(cause) or cause in dropped or len(dropped) >= _MOST_DROPPED:
                    raise
                if cause[1] in ("$ref", "$schema", "type"):  # no validation makes up for what is not there
                    raise
                dropped.append(cause)
        if not rules:
            raise GrammarError("no value that can be written is valid under this schema", path="$")
        places = (content for kind, content in normaliser.nodes.terms if kind == "schema")
        return rules, dropped, [*writer.warnings, *ignored(places)]

    def _root(self, normaliser: Normaliser) -> Node:
        return normaliser.place(document(self.text))
