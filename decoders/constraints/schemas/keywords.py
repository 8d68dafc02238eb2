"""The sets of values that the keywords for numbers, strings, arrays and objects allow, and warnings about unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import GrammarError
from ..patterns import ecma
from . import formats, limits, numbers, strings
from .arrays import Arrays, Count, Items
from .document import Place, known
from .nodes import FALSE, TRUE, Node
from .numbers import Numbers
from .objects import Keys, Objects, Property
from .shapes import SchemaAlgebra, Shapes
from .strings import Strings

NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
STRINGS = ("minLength", "maxLength", "pattern", "format")
ARRAYS = (
    "prefixItems", "items", "additionalItems", "contains", "minContains", "maxContains", "minItems", "maxItems", "uniqueItems",
)  # fmt: skip
OBJECTS = (
    "properties", "patternProperties", "additionalProperties", "propertyNames", "required", "minProperties", "maxProperties",
)  # fmt: skip


def of_type(name: Any) -> Shapes:
    """The set of all values of the type `name`. Raises GrammarError: JSON Schema has no such type."""
    shapes = {
        "null": Shapes(frozenset(["null"])), "boolean": Shapes(frozenset(["true", "false"])),
        "number": Shapes(numbers=(Numbers(),)), "integer": Shapes(numbers=(Numbers(kind="integer"),)),
        "string": Shapes(strings=(Strings(),)), "array": Shapes(arrays=(Arrays(),)), "object": Shapes(objects=(Objects(),)),
    }  # fmt: skip
    if not isinstance(name, str) or name not in shapes:
        raise GrammarError(f"there is no type {name!r}; the types are {', '.join(shapes)}", "type")
    return shapes[name]


def of_value(value: Any, leaf: Callable[[Any], Node]) -> Shapes:
    """The set that contains only `value`. leaf: returns the node of an item or member of `value`."""
    if value is None or isinstance(value, bool):
        return Shapes(frozenset(["null" if value is None else "true" if value else "false"]))
    if isinstance(value, int | float):
        return Shapes(numbers=(numbers.point(value),))
    if isinstance(value, str):
        return Shapes(strings=(Strings(values=frozenset([value])),))
    if isinstance(value, list):
        size = len(value)
        return Shapes(arrays=(Arrays(tuple(map(leaf, value)), FALSE, size, size),))
    return Shapes(objects=(Objects(tuple(Property(name, leaf(part), True) for name, part in value.items()), ()),))


def of_numbers(schema: dict[str, Any]) -> Numbers | None:
    """The numbers that `schema` allows; None if there are none."""
    result: Numbers | None = Numbers()
    pieces = []
    for keyword, low in (("minimum", True), ("maximum", False)):
        exclusive = schema.get("exclusive" + keyword.capitalize())
        if keyword in schema:
            bound = numbers.fraction(_number(schema, keyword))
            pieces.append(
                Numbers(bound, exclusive is True) if low else Numbers(high=bound, open_high=exclusive is True)
            )
        if exclusive is not None and not isinstance(exclusive, bool):  # the keyword is a number since draft 6
            bound = numbers.fraction(_number(schema, "exclusive" + keyword.capitalize()))
            pieces.append(Numbers(bound, True) if low else Numbers(high=bound, open_high=True))
    if "multipleOf" in schema:
        step = numbers.fraction(_number(schema, "multipleOf"))
        if step <= 0:
            raise GrammarError(f"multipleOf {schema['multipleOf']!r} must be above zero", "multipleOf")
        pieces.append(Numbers(multiple=step))
    for piece in pieces:
        result = numbers.intersection(result, piece) if result is not None else None
    return result


def of_strings(schema: dict[str, Any]) -> Strings | None:
    """The strings that `schema` allows; None if there are none."""
    result = Strings(low=read_count(schema, "minLength") or 0, high=read_count(schema, "maxLength")).simplified()
    if result is not None and "pattern" in schema:
        result = strings.intersection(result, _pattern(schema["pattern"]))
    name = schema.get("format")
    if result is not None and isinstance(name, str) and name in formats.FORMATS:
        result = strings.intersection(result, Strings(formats=frozenset([name])))
    return result


def of_arrays(place: Place, schema: dict[str, Any], algebra: SchemaAlgebra) -> Arrays | None:
    """The arrays that `schema` allows; None if there are none.

    schema: the schema at `place`, without the keywords that are left out because no grammar expresses them.
    """
    prefix: tuple[Node, ...] = ()
    rest, evaluated = TRUE, Items()
    dropped = _dropped(place, schema)
    listed = next((k for k in ("prefixItems", "items") if isinstance(schema.get(k), list)), None)
    if listed is not None:
        prefix = tuple(algebra.node(place, listed, i) for i in range(len(schema[listed])))
        evaluated = Items(len(prefix))
    others_keyword = "additionalItems" if listed == "items" else "items"
    others_apply = listed is not None or (others_keyword == "items" and "prefixItems" not in dropped)
    if others_keyword in schema and others_apply:
        rest, evaluated = algebra.node(place, others_keyword), Items(None)
    counts: tuple[Count, ...] = ()
    if "contains" in schema:
        low, high = read_count(schema, "minContains"), read_count(schema, "maxContains")
        low = low if low is not None else int("minContains" not in dropped)
        kind, kind_at_most = algebra.node(place, "contains"), algebra.node(algebra.opposite(place), "contains")
        if high is None or kind == kind_at_most:
            counts = (Count(0, kind, low, high),)
        else:
            counts = (Count(0, kind, low, None), Count(0, kind_at_most, 0, high))
        if place.year >= 2020 and evaluated.first is not None:
            evaluated = Items(evaluated.first, (kind,))
    unique = schema.get("uniqueItems") is True
    low, high = read_count(schema, "minItems") or 0, read_count(schema, "maxItems")
    return Arrays(prefix, rest, low, high, counts, unique, evaluated).simplified(algebra)


def of_objects(place: Place, schema: dict[str, Any], algebra: SchemaAlgebra) -> Objects | None:
    """The objects that `schema` allows; None if there are none. schema: see :func:`of_arrays`."""
    nodes = algebra.nodes
    dropped = _dropped(place, schema)
    named: dict[str, Node] = {
        name: algebra.node(place, "properties", name) for name in read_object(schema, "properties")
    }
    if len(named) > limits.PROPERTIES:
        limits.exceeded("PROPERTIES", limits.PROPERTIES, f"an object of {len(named):,} properties", "properties")
    classes: list[tuple[Strings, tuple[Node, ...]]] = [(strings.ALL, ())]
    patterns = []
    for text in read_object(schema, "patternProperties"):
        pattern, node = _pattern_of_keys(place, text), algebra.node(place, "patternProperties", text)
        patterns.append(pattern)
        with _blaming("patternProperties"):
            classes = [
                (shared, result)
                for keys, old in classes
                for part, result in [(pattern, (*old, node)), *((other, old) for other in strings.complement(pattern))]
                if (shared := strings.intersection(keys, part)) is not None
            ]
            if len(classes) > limits.ALTERNATIVES:
                limits.exceeded("ALTERNATIVES", limits.ALTERNATIVES, "the number of classes of keys")
            named = {n: nodes.intersection(old, node) if pattern.contains(n) else old for n, old in named.items()}
    additional = algebra.node(place, "additionalProperties") if "additionalProperties" in schema else TRUE
    if "properties" in dropped:
        additional = TRUE
    unread = [algebra.node(place, "patternProperties", text) for text in read_object(place.schema, "patternProperties")
              if text not in schema.get("patternProperties", {})]  # fmt: skip
    # A key may match a pattern that is left out, and then has a value that the pattern's schema allows. So additional keys may have
    # such values, too. If `place` is subtracted, all keys may have only such values.
    if unread and place.subtracted:
        additional = nodes.intersection(additional, *unread)
        classes = [(keys, (*result, *unread) if result else ()) for keys, result in classes]
        named = {name: nodes.intersection(node, *unread) for name, node in named.items()}
    elif unread:
        additional = nodes.union(additional, *unread)
    rest = tuple((keys, nodes.intersection(*result) if result else additional) for keys, result in classes)
    if unread and not place.subtracted:
        patterns.append(strings.ALL)
    evaluated = Keys(frozenset(named), tuple(patterns), "additionalProperties" in schema)
    required = dict.fromkeys(read_names(schema, "required"))
    result = Objects(rest=rest)
    properties = [Property(n, node, n in required) for n, node in named.items()]
    properties += [Property(name, result.value(name), True) for name in required if name not in named]
    if "propertyNames" in schema:
        names = algebra.normalise(algebra.node(place, "propertyNames")).strings
        allowed = [prop if any(keys.contains(prop.name) for keys in names) else Property(prop.name, FALSE, prop.required)
                for prop in properties]  # fmt: skip
        properties = allowed
        with _blaming("propertyNames"):
            rest = tuple(
                (shared, node)
                for keys, node in rest
                for name in names
                if (shared := strings.intersection(keys, name)) is not None
            )
    low, high = read_count(schema, "minProperties") or 0, read_count(schema, "maxProperties")
    return Objects(tuple(properties), rest, low, high, evaluated=evaluated).simplified(algebra)


def _pattern(text: Any) -> Strings:
    if not isinstance(text, str):
        raise GrammarError(f"a pattern must be a string, not {text!r}", "pattern")
    return Strings(conditions=frozenset(ecma.strings(text)))


def _pattern_of_keys(place: Place, text: str) -> Strings:
    try:
        return _pattern(text)
    except GrammarError as problem:  # with this path, only this pattern is left out, not all patterns
        path = place.path_of("patternProperties", text)
        raise GrammarError(f"{path}: patternProperties: {problem}", "patternProperties", path) from problem


def _dropped(place: Place, schema: dict[str, Any]) -> frozenset[str]:
    """Keywords of `place` that are left out of `schema`."""
    return frozenset(keyword for keyword in place.schema if keyword not in schema and known(keyword, place.year))


@contextmanager
def _blaming(keyword: str) -> Iterator[None]:
    """Names `keyword` as the cause of a GrammarError in the block, unless the error has a path, which is more exact."""
    try:
        yield
    except GrammarError as problem:
        if problem.path is not None:
            raise
        raise GrammarError(str(problem), keyword) from problem


def _number(schema: dict[str, Any], keyword: str) -> int | float:
    value = schema[keyword]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GrammarError(f"{keyword} must be a number, not {value!r}", keyword)
    return value


def read_count(schema: dict[str, Any], keyword: str) -> int | None:
    """The value of a keyword such as ``minItems``; None if the keyword is absent, or is an upper bound that no text reaches."""
    if keyword not in schema:
        return None
    value = _number(schema, keyword)
    if value < 0 or (isinstance(value, float) and not value.is_integer()):  # infinity is not an integer either
        raise GrammarError(f"{keyword} must be a whole number from 0 up, not {value!r}", keyword)
    if value > limits.COUNT and keyword.startswith("max"):  # no text is that long
        return None
    if value > limits.COUNT:
        limits.exceeded("COUNT", limits.COUNT, keyword, keyword)
    return int(value)


def read_object(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    """The object that is the value of `keyword`; empty if the keyword is absent. Raises GrammarError: the value is not an object."""
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        raise GrammarError(f"{keyword} must be an object, not {value!r}", keyword)
    return value


def read_names(schema: dict[str, Any], keyword: str) -> list[str]:
    """The names that `keyword` lists; empty if the keyword is absent. Raises GrammarError: the value is not a list of names."""
    value = schema.get(keyword, [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise GrammarError(f"{keyword} must be a list of names, not {value!r}", keyword)
    return value


# Names without effect.

#: Keywords that restrict values.
_ASSERTIONS = (
    *NUMBERS, *STRINGS, *ARRAYS, *OBJECTS, "type", "const", "enum", "allOf", "anyOf",
    "oneOf", "not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems",
    "unevaluatedProperties", "$ref", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
#: Keywords that restrict nothing, including OpenAPI's.
_ANNOTATION_KEYWORDS = frozenset((
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary", "contentEncoding",
    "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description", "discriminator", "example",
    "examples", "externalDocs", "id", "nullable", "readOnly", "title", "writeOnly", "xml",
))  # fmt: skip
#: Formats of OpenAPI and Pydantic that describe the use of a string and restrict nothing.
_ANNOTATION_FORMATS = ("binary", "byte", "password", "path", "file-path", "directory-path")
#: Least similarity (:func:`difflib.get_close_matches`) to a keyword at which a name counts as misspelt.
_SIMILARITY = 0.8
#: The warning about a misspelt keyword.
MISSPELT = "is not a keyword and has no effect"
#: Greatest number of names compared with keywords; each takes 0.1 ms.
_MOST_COMPARED = 500


def ignored(places: Iterable[Place]) -> Iterator[str]:
    """Warnings about names without effect in the schemas at `places`, one sentence each."""
    compared = 0
    for place in places:
        for name in place.schema:
            if not known(name, place.year):
                yield f"{place.path}: {name!r} is a keyword of another draft and has no effect."
            if (
                name in _ANNOTATION_KEYWORDS
                or name in _ASSERTIONS
                or name.startswith("x-")
                or compared == _MOST_COMPARED
            ):
                continue
            compared += 1
            swapped = [keyword for keyword in _ASSERTIONS if sorted(keyword) == sorted(name)]  # "tpye": similarity 0.75
            for similar in swapped[:1] or difflib.get_close_matches(name, _ASSERTIONS, 1, _SIMILARITY):
                yield f"{place.path}: {name!r} {MISSPELT}: did you mean {similar!r}?"
        format_name, types = place.schema.get("format"), place.schema.get("type", "string")
        allows_strings = isinstance(types, str | list) and "string" in types
        if (
            allows_strings
            and isinstance(format_name, str)
            and format_name not in (*formats.FORMATS, *_ANNOTATION_FORMATS)
        ):
            yield f"{place.path}: the format {format_name!r} is unknown and has no effect."
