"""Schemas of Python types, by pydantic."""

from __future__ import annotations

import sys
import typing
from typing import Any

from ...errors import GrammarError


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a type: a pydantic model, a TypedDict, a dataclass, a Literal, ``list[int]``, ….

    Raises:
        GrammarError: pydantic knows none.
    """
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError

    try:
        return TypeAdapter(_modern(kind)).json_schema()
    except (PydanticUserError, PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, NameError) as problem:
        raise GrammarError(f"{kind!r} has no JSON Schema: {str(problem).splitlines()[0]}") from problem


def _modern(kind: Any) -> Any:
    """`kind` with ``typing.TypedDict`` replaced by that of typing_extensions, as pydantic demands before Python 3.12."""
    if sys.version_info >= (3, 12):
        return kind
    from typing import NotRequired, Required

    from typing_extensions import TypedDict

    if typing.is_typeddict(kind) and type(kind).__module__ == "typing":
        fields = {}
        for name, part in typing.get_type_hints(kind, include_extras=True).items():
            marked = typing.get_origin(part) in (Required, NotRequired)  # as strings, they have escaped `typing`
            needed = typing.get_origin(part) is Required if marked else name in kind.__required_keys__
            inner = typing.get_args(part)[0] if marked else part
            fields[name] = (Required if needed else NotRequired)[_modern(inner)]
        made: Any = TypedDict(kind.__name__, fields)  # type: ignore[misc]  # fields are known at run time only
        made.__doc__ = kind.__doc__
        return made
    arguments = typing.get_args(kind)
    if arguments and typing.get_origin(kind) in (list, tuple, set, dict, typing.Union):
        return typing.get_origin(kind)[tuple(map(_modern, arguments))]
    return kind
