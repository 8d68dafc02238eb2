"""Coercing values of ``grammar=`` to specifications: names of library grammars, types, outlines' terms, lists (one per prompt)."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from ..common import library
from ..errors import GrammarError, UnknownNameError, amount, shortened
from .base import CompiledGrammar
from .constructors import grammar, json_schema, regex
from .python_types import listed, pattern_of
from .specs import Choice, Lark, Regex, Spec

if TYPE_CHECKING:
    from outlines.types.dsl import Term

_ALLOWED = (
    "a name of the library (`decoders grammars` lists them), decoders.json_schema, regex, grammar or choice, a JSON schema as a "
    "dict, a Pydantic model, TypedDict, dataclass, Enum or other type, a term of outlines, or a list with one for each prompt"
)
#: Types with a grammar in the library (which ``decoders grammars`` lists).
_READY = {dict: "json_object", list: "json_array", UUID: "uuid", IPv4Address: "ipv4", IPv6Address: "ipv6"}


def as_spec(value: Any) -> Spec | CompiledGrammar | None:
    """The specification of one row's text; None for free text. A compiled grammar is returned as it is.

    Values of plain types (``int``, ``float``, ``bool``, ``str``, ``date``, ``time``, ``datetime``, ``Literal``, ``Enum``, unions) are
    written as in outlines, in Python's notation: ``True``, ``None``, ``"text"``. Values of structured types are written as JSON.

    Raises:
        UnknownNameError: the value is a string, but not the name of a grammar that ``decoders grammars`` lists.
        GrammarError: the value is not a grammar; the error lists what can be given.
    """
    if value is None or isinstance(value, (Spec, CompiledGrammar)):
        return value
    if isinstance(value, str):
        return spec_of_library(value)
    if (read := next((TYPES[name] for name in type_names(value) if name in TYPES), None)) is not None:
        return read(value)
    if isinstance(value, Mapping):
        return json_schema(dict(value))
    if isinstance(value, (bool, int, float, bytes, list, tuple)):
        raise GrammarError(f"grammar={shortened(repr(value))} is not a grammar. What can be given: {_ALLOWED}")
    return _of_type(value)


def full_name(cls: type | str) -> str:
    """The name of a type with its module, without private parts: ``pathlib.Path``, although Python 3.13 has it in ``pathlib._local``.

    cls: a type, or its name with its module.
    """
    *places, name = (cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}").split(".")
    return ".".join([*(place for place in places if not place.startswith("_") or place.startswith("__")), name])


def type_names(value: object) -> Iterator[str]:
    """The full names of an object's types, the most specific first; for a class, the names of its metaclasses."""
    return map(full_name, type(value).__mro__)


def spec_of_file(path: Path) -> Spec:
    """The grammar in a file: ``.json`` holds a JSON schema, ``.regex`` a regular expression, ``.lark`` a Lark grammar.

    Raises:
        GrammarError: a file of another kind, an unreadable file, or a file without a valid grammar.
    """
    if path.suffix == ".json":
        return json_schema(path)
    if path.suffix == ".regex":
        return dataclasses.replace(regex(library.joined(library.file_content(path))), label=path.name)
    return grammar(path)


def as_specs(
    value: Any, prompts: int, per_prompt: int = 1, read: Callable[[Any], Spec | CompiledGrammar | None] = as_spec
) -> list[Spec | CompiledGrammar | None]:
    """The specifications of all rows.

    Args:
        value: one value for all rows, or a list or tuple with a value for each prompt; None is free text.
        prompts: number of prompts.
        per_prompt: ``num_return_sequences``.
        read: coerces a value to the specification of one row.

    Returns:
        ``prompts * per_prompt`` entries in transformers' order: all entries of a prompt are adjacent.

    Raises:
        GrammarError: `value` is a list whose length is not `prompts`. Errors that `read` raises are passed on.
    """
    if not isinstance(value, (list, tuple)):
        return [read(value)] * (prompts * per_prompt)
    if len(value) != prompts:
        raise GrammarError(
            f"grammar= is a list of {len(value)} for {amount(prompts, 'prompt')}: give a grammar (or None) for each prompt, or "
            "one grammar without a list for all prompts. decoders.choice([…]) chooses among texts"
        )
    specs = {id(entry): read(entry) for entry in value}
    return [specs[id(entry)] for entry in value for _ in range(per_prompt)]


def spec_of_library(name: str) -> Spec:
    """The packaged grammar `name` (with or without its file's suffix). Raises UnknownNameError: no packaged grammar has this name."""
    try:
        ready = library.find(name)
    except UnknownNameError as error:
        raise unknown_grammar(name, error.choices) from None
    if ready.kind == "json_schema":
        return dataclasses.replace(json_schema(json.loads(ready.text)), label=ready.name)
    kind = Regex if ready.kind == "regex" else Lark
    return kind(ready.text, label=ready.name)


def unknown_grammar(name: str, choices: Iterable[str]) -> UnknownNameError:
    """The error for a `name` that no packaged grammar has. Raises GrammarError: `name` ends like the name of a grammar's file."""
    if name.endswith(library.SUFFIXES) and len(name) < 256 and "\n" not in name:
        library.check_file(name)
        message = f"grammar={name!r}: a string names a grammar of the library, and this is a file: give pathlib.Path({name!r})"
        raise GrammarError(message, "path")
    hint = (
        "Other texts: decoders.regex(pattern), decoders.grammar(lark), decoders.json_schema(schema), decoders.choice(list), "
        "and pathlib.Path(name) for a file."
    )
    return UnknownNameError("grammar", shortened(name), choices, hint)


def _of_type(value: Any) -> Spec:
    while (inner := getattr(value, "__supertype__", None) or _aliased(value)) is not None:
        value = inner
    if isinstance(value, type) and value in _READY:
        return spec_of_library(_READY[value])
    if (texts := listed(value)) is not None:
        return Choice(tuple(dict.fromkeys(texts)))
    if (pattern := pattern_of(value)) is not None:
        return Regex(pattern, label=f"type {shortened(value.__name__ if isinstance(value, type) else str(value))}")
    if isinstance(value, type) or typing.get_origin(value) is not None or inspect.isroutine(value):
        return json_schema(value)
    raise GrammarError(f"grammar={shortened(repr(value))} is not a grammar. What can be given: {_ALLOWED}")


def _aliased(value: Any) -> Any:
    """The type X stands for, if `value` is X defined by ``type X = …``; else None."""
    return value.__value__ if type(value).__name__ == "TypeAliasType" else None


def _of_term(term: Term) -> Spec:
    """The specification of an outlines term. This package compiles the term's JSON schemas, as outlines ignores some keywords."""
    from outlines.types import dsl

    if isinstance(term, dsl.JsonSchema):
        return _of_schema(term)
    if isinstance(term, dsl.CFG):
        return Lark(term.definition)
    if isinstance(term, dsl.Choice):
        term = dsl.Alternatives([dsl.python_types_to_terms(item) for item in term.items])
    if isinstance(term, dsl.Alternatives):
        texts = [str.__str__(each.value) for each in term.terms if isinstance(each, dsl.String)]
        if texts and len(texts) == len(term.terms):
            return Choice(tuple(dict.fromkeys(texts)))
    return Regex(dsl.to_regex(_as_patterns(term)), label=f"outlines {shortened(repr(term))}")


def _of_schema(term: Any) -> Spec:
    if term.whitespace_pattern is not None:
        raise GrammarError(
            "whitespace_pattern of outlines is not supported: use decoders.json_schema(schema, whitespace=…)",
            "whitespace_pattern",
        )
    # Objects take no undeclared properties, as in outlines, whose schemas come from types and functions.
    return json_schema(json.loads(term.schema), closed=True)


def _as_patterns(term: Any) -> Any:
    """`term` with its schemas, choices and outlines' own patterns replaced by the patterns of this package."""
    from outlines.types import dsl

    if isinstance(term, dsl.CFG):
        raise GrammarError(
            "a CFG within another term is not a regular expression: write the whole term as decoders.grammar", "CFG"
        )
    if isinstance(term, dsl.JsonSchema):
        language = _of_schema(term).language()
        if language.regex is None:
            raise GrammarError(
                "a JsonSchema within another term must be regular, and this schema is not: write the whole term as decoders.grammar",
                "JsonSchema",
            )
        return dsl.Regex(language.regex)
    if isinstance(term, dsl.Choice):
        return dsl.Alternatives([_as_patterns(dsl.python_types_to_terms(item)) for item in term.items])
    if isinstance(term, dsl.Regex):
        return dsl.Regex(_pattern(term.pattern))
    if hasattr(term, "terms"):
        return dataclasses.replace(term, terms=[_as_patterns(each) for each in term.terms])
    return dataclasses.replace(term, term=_as_patterns(term.term)) if hasattr(term, "term") else term


def _pattern(pattern: str) -> str:
    """`pattern`, or this package's pattern for the type whose pattern in outlines it is, so that Python can read the texts back."""
    from outlines import types as named

    kinds = {named.date.pattern: date, named.datetime.pattern: datetime, named.string.pattern: str}
    return pattern_of(kinds.get(pattern)) or pattern


def _of_samples(builder: Any) -> Spec:
    return json_schema(json.loads(builder.to_json()), closed=True)


#: Functions that make the specification of an object, by the full name of the object's type. Names are used because importing some
#: types takes seconds.
TYPES: dict[str, Callable[[Any], Spec]] = {
    full_name(Path): spec_of_file,
    full_name(re.Pattern): regex,
    "outlines.types.dsl.Term": _of_term,
    "genson.schema.builder.SchemaBuilder": _of_samples,
}
