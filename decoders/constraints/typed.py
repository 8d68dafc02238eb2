"""Types whose values meet conditions that no schema tells: validators, keys that are no texts, addresses, durations."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import GrammarError, shortened
from .base import Language
from .json_schema import JsonSchema
from .typed_dicts import readable

_WARNING = "What the type asks for beyond its schema (validators, say) is left to the validation of the finished text."
#: Kinds of Pydantic's core schemas whose JSON schemas tell less than they ask for.
_MORE = frozenset({"json", "complex", "url", "multi-host-url", "timedelta"})


@dataclass(frozen=True)
class OfType(JsonSchema):
    """JSON of a Python type; the finished text is judged by the type itself.

    Attributes:
        kind: the type, as Pydantic knows it.
    """

    kind: Any = field(default=None, repr=False)

    @property
    def key(self) -> str:
        return f"{super().key} {_identity(self.kind)}"

    def language(self) -> Language:
        base = super().language()
        judge = _Checker(base, self.kind)
        return replace(base, warnings=(*base.warnings, _WARNING), whole=judge)


@dataclass(frozen=True)
class _Checker:
    """Refuses texts that the language has and the type has not. Keeps the type, whose identity is in keys, alive."""

    base: Language
    kind: Any

    def __call__(self, text: str) -> None:
        from pydantic import TypeAdapter, ValidationError

        if self.base.whole is not None:
            self.base.whole(text)
        try:
            TypeAdapter(readable(self.kind)).validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            path = "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
            why = f"{path}: {first['msg']}"
        except Exception as error:  # a validator may raise anything
            why, path = f"{type(error).__name__}: {error}", "$"
        else:
            return
        raise GrammarError(f"the text is no {_called(self.kind)}: {why}", path=path)


def asks_more(kind: Any) -> bool:
    """Whether values of a type meet conditions that its JSON schema does not tell."""
    from pydantic import TypeAdapter

    return any(map(_more, _nodes(TypeAdapter(readable(kind)).core_schema)))


def _more(node: dict[str, Any]) -> bool:
    kind = node.get("type")
    if kind == "dict":
        return node.get("keys_schema", {}).get("type", "str") not in ("str", "any")
    conditional = node.get("now_op") is not None or (kind == "dataclass" and node.get("post_init"))
    return bool(conditional) or (isinstance(kind, str) and (kind.startswith("function-") or kind in _MORE))


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += [part for name, part in node.items() if name not in ("metadata", "serialization", "default")]
        elif isinstance(node, (list, tuple)):
            waiting += node


def _called(kind: Any) -> str:
    return shortened(kind.__name__ if isinstance(kind, type) else str(kind))


def _identity(kind: Any) -> str:
    """Tells types apart that have one name; the same for equal ones such as two of ``list[int]``."""
    if arguments := typing.get_args(kind):
        return f"{typing.get_origin(kind)}[{', '.join(map(_identity, arguments))}]"
    return f"{kind!r}@{id(kind)}" if isinstance(kind, type) else repr(kind)
