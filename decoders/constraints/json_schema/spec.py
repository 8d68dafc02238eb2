"""JSON that follows a schema: ``grammar=JsonSchema({...})``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...errors import GrammarError
from ..base import Language
from ..specs import Spec
from . import notation
from .document import document
from .normal import Normal
from .writing import BLANKS, Writer


@dataclass(frozen=True)
class JsonSchema(Spec):
    """Texts that are JSON and valid under a schema (drafts 4, 6, 7, 2019-09 and 2020-12, by its ``$schema``).

    Attributes:
        schema: a dict, a boolean, or JSON text.
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
        except ValueError:
            content = self.text
        options = [content, self.whitespace, self.strict, self.closed, self.backend, self.policy]
        return "JsonSchema " + json.dumps(options, separators=(",", ":"))

    def language(self) -> Language:
        if self.whitespace not in BLANKS:
            raise GrammarError(f"whitespace is one of {', '.join(BLANKS)}, not {self.whitespace!r}")
        normal = Normal(evaluation="unevaluated" in self.text)
        root = normal.place(document(self.text))
        rules = Writer(normal, BLANKS[self.whitespace], self.closed).write(root)
        if not rules:
            raise GrammarError("nothing is valid under this schema", path="$")
        return Language("JSON schema", notation.regex(rules), notation.lark(rules))
