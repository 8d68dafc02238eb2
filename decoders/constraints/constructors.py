"""The four ways to write a specification: a pattern, a grammar, a choice, a JSON schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from ..common import library
from ..errors import GrammarError, keywords_named, shortened
from .base import Policy
from .python_types import schema_of
from .specs import Choice, JsonSchema, Lark, Regex
from .typed import OfType, asks_more

#: What to write instead of a flag of ``re``.
_INSTEAD = {
    re.IGNORECASE: "spell both cases, [Aa]",
    re.DOTALL: r"write (.|\n) for any character",
    re.ASCII: r"write [0-9] for \d, [A-Za-z0-9_] for \w",
    re.VERBOSE: "leave out the white space and comments",
    re.MULTILINE: "leave out ^ and $ within the text",
}
_NO_SCHEMA = (type(None), int, float, bytes, list, tuple, set)


@keywords_named
def regex(pattern: str | re.Pattern[str], *, backend: str | None = None, policy: Policy = "full") -> Regex:
    """The grammar of all texts that match `pattern` as a whole, for ``generate(grammar=…)``.

    Args:
        pattern: a pattern in the syntax that Python's ``re`` and Rust's ``regex`` share. Look-around, back-references, word
            boundaries and flags raise an error; ``^`` and ``$`` around the whole have no effect. ``.`` is any character but a newline.
        backend: name of the grammar backend; automatic by default.
        policy: ``full`` allows every tokenization of a text. ``canonical``: where the grammar forces the next characters, only the
            tokenizer's own tokens for these characters are legal.

    Raises:
        GrammarError: the pattern cannot be compiled; the error names the construct, its place and what to write instead.
    """
    if isinstance(pattern, re.Pattern):
        if flags := re.RegexFlag(pattern.flags) & ~re.RegexFlag.UNICODE:
            instead = (
                "; ".join(why for flag, why in _INSTEAD.items() if flag in flags) or "write the pattern without them"
            )
            raise GrammarError(f"regex {pattern.pattern!r}: flags ({flags}) are not supported: {instead}", "flags")
        pattern = pattern.pattern
    if not isinstance(pattern, str):
        raise GrammarError(f"regex: the pattern must be a string, not {type(pattern).__name__}", "regex")
    return Regex(pattern, backend=backend, policy=policy)


@keywords_named
def grammar(text: str | Path, *, backend: str | None = None, policy: Policy = "full") -> Lark:
    """A context-free grammar, for ``generate(grammar=…)``.

    Args:
        text: a grammar in llguidance's dialect of Lark, or the path of its file. A single line that names an existing file
            is taken for a path.
        backend, policy: as in :func:`regex`.

    Raises:
        GrammarError: the file cannot be read, or there is no rule ``start``.
    """
    if not isinstance(text, (str, Path)):
        raise GrammarError(f"grammar: the grammar must be a string or a path, not {type(text).__name__}", "grammar")
    file = text if isinstance(text, Path) else library.file_named(text)
    if file is None:
        return Lark(str(text), backend=backend, policy=policy)
    if file.suffix == ".gbnf":
        raise GrammarError(
            f"{file.name}: GBNF is not supported. llguidance.gbnf_to_lark.gbnf_to_lark(text) turns it into Lark; check the result, "
            "since a terminal of Lark takes as much text as it can, and a rule of GBNF may take less",
            "gbnf",
        )
    return Lark(library.file_content(file), backend=backend, policy=policy, label=file.name)


@keywords_named
def choice(
    options: Iterable[str | bool | int | float | None], *, backend: str | None = None, policy: Policy = "full"
) -> Choice:
    """One of several texts, for ``generate(grammar=…)``.

    Args:
        options: texts are used verbatim; numbers, booleans and None are written as in JSON; members of an Enum stand for
            their values. Repeated options are merged.
        backend, policy: as in :func:`regex`.

    Raises:
        GrammarError: there are no options, too many, or an option of another type.
    """
    if isinstance(options, (str, bytes)) or not isinstance(options, Iterable):
        raise GrammarError(f"choice: the options must be a list of texts, not {shortened(repr(options))}", "choice")
    texts = dict.fromkeys(_text_of(option, place) for place, option in enumerate(options))
    return Choice(tuple(texts), backend=backend, policy=policy)


@keywords_named
def json_schema(
    schema: Any, *, whitespace: str = "space", indent: int | None = None, strict: bool = True, closed: bool | None = None,
    backend: str | None = None, policy: Policy = "full",
) -> JsonSchema:  # fmt: skip
    """The grammar of the JSON texts that are valid under a schema, for ``generate(grammar=…)``.

    Args:
        schema: a JSON schema (a dict, its text, or the path of its file), or a type that Pydantic knows, such as a Pydantic
            model, TypedDict or dataclass.
        whitespace: ``space``: at most one blank after a comma or colon; ``compact``: none; ``flexible``: one blank, or a line
            break with its indent, wherever JSON allows white space inside brackets.
        indent: number of blanks per level, with every member on its own line, exactly as ``json.dumps(…, indent=…)`` writes;
            replaces `whitespace`. The schema must bound the depth of its values.
        strict: whether keywords that the grammar cannot express raise an error. If False, the finished text is validated instead.
        closed: whether undeclared properties are forbidden in objects whose schema declares properties and says nothing about others.
            The default is True for Python's types and False for schemas, as in the standard.
        backend, policy: as in :func:`regex`.

    Raises:
        GrammarError: `schema` is not a schema; or, at compilation, the grammar cannot express a keyword (the error names the keyword,
            its path and what would work).
    """
    is_schema = isinstance(schema, (Mapping, str, bool, Path))
    file = schema if isinstance(schema, Path) else library.file_named(schema) if isinstance(schema, str) else None
    if file is not None:
        schema = library.file_schema(file)
    if isinstance(schema, Mapping):
        schema = dict(schema)
    elif not isinstance(schema, bool) and (file is not None or isinstance(schema, _NO_SCHEMA)):
        where = f"{file}: " if file else ""
        raise GrammarError(
            f"json_schema: {where}{shortened(repr(schema))} is not a schema: give a dict, JSON text, a file's path, or a Python type",
            "schema",
        )
    options: dict[str, Any] = dict(
        whitespace=whitespace, indent=indent, strict=strict, closed=not is_schema if closed is None else closed, backend=backend,
        policy=policy, label=file.name if file else None,
    )  # fmt: skip
    if is_schema:
        return JsonSchema(schema, **options)
    json_schema = schema_of(schema)
    return OfType(json_schema, kind=schema, **options) if asks_more(schema) else JsonSchema(json_schema, **options)


def _text_of(option: Any, place: int) -> str:
    """The text of the option at index `place` of a choice."""
    if isinstance(option, Enum):
        option = option.value
    if isinstance(option, str):
        return str.__str__(option)  # a member of a StrEnum becomes its value
    if option is None or isinstance(option, (bool, int)) or (isinstance(option, float) and math.isfinite(option)):
        return json.dumps(option)
    raise GrammarError(
        f"choice: option {place} is {shortened(repr(option))}; give texts, finite numbers, booleans or None "
        "(decoders.json_schema({'enum': …}) chooses among JSON values)",
        "choice",
        f"$[{place}]",
    )
