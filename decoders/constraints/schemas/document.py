"""A JSON Schema document: draft, identifiers, references. Nothing is fetched: ``jsonschema_specifications`` has the meta-schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...errors import GrammarError, shortened
from . import limits

if TYPE_CHECKING:
    from referencing import Registry
    from referencing._core import Resolver
    from referencing.jsonschema import Specification


#: The former name of the latest draft; the package genson writes it.
_LATEST = "http://json-schema.org/schema"
#: Years of drafts, by their names in `referencing`.
_YEARS = {"draft-04": 2013, "draft-06": 2017, "draft-07": 2018, "draft2019-09": 2019, "draft2020-12": 2020}
_BRACKETS = re.compile(r"[][{}]")


@dataclass(frozen=True, eq=False)
class Place:
    """A schema within the document.

    Attributes:
        schema: the schema, a JSON object.
        year: the year of its draft (2013, 2017, 2018, 2019, 2020).
        path: JSON path, for messages.
        resolver, specification: objects of the package ``referencing`` that resolve references and describe the draft.
        dynamic: whether the document has dynamic references, whose targets depend on the schemas through which they are reached.
        subtracted: whether the values of the schema are excluded, as under ``not``. Leaving out a keyword must let the document
            allow more values, so an excluded schema must then allow fewer.
    """

    schema: dict[str, Any]
    year: int
    path: str
    resolver: Resolver[Any]
    specification: Specification[Any]
    dynamic: bool = False
    subtracted: bool = False

    def child(self, *keys: str | int) -> Place | bool:
        """The schema under `keys`. Raises GrammarError: the value under `keys` is not a schema."""
        target: Any = self.schema
        for key in keys:
            target = target[key]
        return self._alike(place(target, self.path_of(*keys), self.resolver, self.specification, self.dynamic))

    def path_of(self, *keys: str | int) -> str:
        """The path of `keys` below this schema."""
        return self.path + "".join(map(step, keys))

    def _alike(self, target: Place | bool) -> Place | bool:
        return replace(target, subtracted=self.subtracted) if isinstance(target, Place) else target

    @property
    def scope(self) -> tuple[str, ...]:
        """The ``$id`` of each schema on the path to this schema, for dynamic references; empty in documents that have none."""
        if not self.dynamic:
            return ()
        return tuple(dict.fromkeys(reversed([uri for uri, _ in self.resolver.dynamic_scope()])))

    def follow(self, reference: str, keyword: str = "$ref") -> Place | bool:
        """The schema that `reference` refers to. Raises GrammarError: the document has no such schema."""
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import lookup_recursive_ref

        try:
            if keyword == "$recursiveRef":
                target = lookup_recursive_ref(self.resolver)
            else:
                target = self.resolver.lookup(reference)
        except (
            Unresolvable,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ) as problem:  # AttributeError: a pointer into a value that is not a schema
            raise GrammarError(
                f"{self.path}: {keyword} {reference!r} refers to nothing in the schema, and nothing is fetched: put the "
                "target under $defs, with its $id",
                keyword, self.path,
            ) from problem  # fmt: skip
        inside = reference.startswith("#/") or reference == "#"
        path = "$" + "".join(map(step, reference[2:].split("/"))) if inside and len(reference) > 1 else "$"
        path = path if inside else reference
        return self._alike(
            place(target.contents, path, target.resolver, self.specification, self.dynamic, entered=True)
        )


def step(key: str | int) -> str:
    """`key` as a step of a JSON path."""
    plain = isinstance(key, str) and key.replace("_", "a").isalnum()
    return f".{key}" if plain else f"[{json.dumps(key)}]"


def members(contents: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name and value of each member of the objects in `contents`, at any depth."""
    todo = [contents]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            yield from part.items()
        if isinstance(part, dict | list):
            todo += part.values() if isinstance(part, dict) else part


def document(text: str) -> Place | bool:
    """The schema in `text`. Raises GrammarError: `text` is not JSON, too large, or of an unknown draft."""
    from jsonschema_specifications import REGISTRY

    if len(text) > limits.SCHEMA_CHARACTERS:
        limits.exceeded("SCHEMA_CHARACTERS", limits.SCHEMA_CHARACTERS, "the schema", path="$")
    nesting = 0
    for bracket in _BRACKETS.findall(text):  # brackets in strings are counted as well: an upper bound is enough
        nesting += 1 if bracket in "[{" else -1
        if nesting > limits.NESTING:
            limits.exceeded("NESTING", limits.NESTING, "schemas within schemas", path="$")
    try:
        contents = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise GrammarError(f"the schema {shortened(repr(text))} is not JSON: {problem}", path="$") from problem
    from referencing.jsonschema import DRAFT202012

    specification = _specification(contents, DRAFT202012, "$")
    place(contents, "$", REGISTRY.resolver(), specification, entered=True)  # checks that the text is a schema
    resource = specification.create_resource(contents)
    base = (isinstance(contents, dict) and resource.id()) or "urn:schema"
    registry: Registry[Any] = REGISTRY.with_resource(base, resource)
    dynamic = any(  # a reference to a meta-schema counts, because meta-schemas contain dynamic references
        key in ("$dynamicRef", "$recursiveRef")
        or (key in ("$ref", "$id", "id") and isinstance(value, str) and "json-schema.org" in value)
        for key, value in members(contents)
    )
    return place(contents, "$", registry.resolver(base), specification, dynamic, entered=True)


def place(
    contents: Any, path: str, resolver: Resolver[Any], specification: Specification[Any], dynamic: bool = False, *,
    entered: bool = False,
) -> Place | bool:  # fmt: skip
    """`contents` as a schema: a :class:`Place`, or the boolean itself.

    Args:
        entered: whether `resolver` already resolves references relative to the ``$id`` of `contents`.

    Raises:
        GrammarError: `contents` are not a schema, or of an unknown draft.
    """
    if isinstance(contents, bool):
        return contents
    if not isinstance(contents, dict):
        raise GrammarError(f"{path}: a schema must be an object or boolean, not {json.dumps(contents)[:60]}", path=path)
    for keyword in ("$id", "$ref", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor"):
        if not isinstance(contents.get(keyword, ""), str):
            raise GrammarError(f"{path}: {keyword} must be a string, not {contents[keyword]!r}", keyword, path)
    specification = _specification(contents, specification, path)
    if not entered:
        resolver = resolver.in_subresource(specification.create_resource(contents))
    return Place(contents, _YEARS[specification.name], path, resolver, specification, dynamic)


def _specification(contents: Any, default: Specification[Any], path: str) -> Specification[Any]:
    from referencing.exceptions import CannotDetermineSpecification
    from referencing.jsonschema import UnknownDialect, specification_with

    declared = contents.get("$schema") if isinstance(contents, dict) else None
    if not isinstance(declared, str) or declared.rstrip("#") == _LATEST:
        return default
    try:
        target = specification_with(declared)
    except (UnknownDialect, CannotDetermineSpecification) as problem:
        raise GrammarError(
            f"{path}: $schema {declared!r} is unknown: take draft 4, 6, 7, 2019-09 or 2020-12",
            "$schema",
            path,
        ) from problem
    if target.name not in _YEARS:
        raise GrammarError(f"{path}: {target.name} is older than draft 4: update $schema", "$schema", path)
    return target


#: The year of the draft that introduced a keyword, if it is not the first one.
_SINCE = {
    "const": 2017, "contains": 2017, "propertyNames": 2017, "if": 2018, "then": 2018, "else": 2018, "minContains": 2019,
    "maxContains": 2019, "dependentRequired": 2019, "dependentSchemas": 2019, "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019, "$recursiveRef": 2019, "prefixItems": 2020, "$dynamicRef": 2020,
}  # fmt: skip
#: The year of the last draft in which a keyword has an effect. Lists under ``items``, and ``additionalItems``, are read in all drafts.
_UNTIL = {"dependencies": 2018, "$recursiveRef": 2019}


def known(keyword: str, year: int) -> bool:
    """Whether the draft of JSON Schema from `year` defines `keyword`; True for names that no draft defines."""
    return _SINCE.get(keyword, 0) <= year <= _UNTIL.get(keyword, year)
