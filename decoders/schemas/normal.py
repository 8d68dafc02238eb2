"""From schemas to shapes: every keyword is a set of values, and a schema is what they have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..errors import GrammarError
from . import arrays, keywords, limits, objects, shapes
from .document import Place
from .nodes import FALSE, TRUE, Node, Nodes
from .objects import Objects, Property
from .reach import Emptiness
from .shapes import ALL, NONE, Shapes
from .strings import Strings

_LOOK_AHEAD = 3


class _CycleError(Exception):
    """What a node is depends on what it is."""


class Normal(Emptiness):
    """Finds the shapes of nodes, each once.

    Args:
        dropped: (path, keyword) of keywords that are not read, oneOf as if it were anyOf.
        evaluation: whether a keyword asks what others have evaluated.
    """

    def __init__(self, dropped: frozenset[tuple[str, str]] = frozenset(), evaluation: bool = True) -> None:
        self.nodes = Nodes()
        self.dropped, self.evaluation = dropped, evaluation
        self.steps = self.depth = 0
        self.known: dict[Node, Shapes] = {}
        self.active: list[Node] = []
        self.within: dict[Node, set[Node]] = {}

    def step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > limits.STEPS:
            limits.exceeded("STEPS", limits.STEPS, "the work of multiplying out allOf, anyOf, oneOf, not, …")

    def place(self, content: Place | bool) -> Node:
        """The node of a schema."""
        if isinstance(content, bool):
            return TRUE if content else FALSE
        if not content.schema:
            return TRUE
        return self.nodes.leaf("schema", (id(content.schema), content.scope), content)

    def value(self, value: Any) -> Node:
        """The node of a value."""
        return self.nodes.leaf("value", json.dumps(value), value)

    def empty(self, node: Node) -> bool:
        if node in (TRUE, FALSE):
            return node == FALSE
        if node in self.known:
            return self.known[node].empty
        if self.depth >= _LOOK_AHEAD:
            return False
        self.depth += 1
        try:
            return self.normal(node).empty
        except _CycleError:
            return False
        finally:
            self.depth -= 1

    def shapes(self, node: Node) -> Shapes:
        """What is of `node`.

        Raises:
            GrammarError: it cannot be expressed.
        """
        try:
            return self.normal(node)
        except (_CycleError, RecursionError) as problem:
            term = self.nodes.terms[node][1]
            path = term.path if isinstance(term, Place) else "$"
            raise GrammarError(f"{path}: $ref refers to itself without anything in between", "$ref", path) from problem

    def blamed(self, node: Node, problem: GrammarError) -> GrammarError:
        """`problem` of writing `node`, with the place of its keyword; that of the node if it has none."""
        seen, walk, nearest = {node}, [node], None
        for visited in walk:
            term = self.nodes.terms[visited]
            if term[0] == "schema":
                path = term[1].path
                if problem.keyword in term[1].schema:
                    return GrammarError(f"{path}: {problem.keyword}: {problem}", problem.keyword, path)
                nearest = nearest or path
            parts = {*self.within.get(visited, ()), *(term[1] if term[0] in ("all", "any") else [])}
            walk += sorted(parts - seen)
            seen |= parts
        return problem if nearest is None else GrammarError(f"{nearest}: {problem}", problem.keyword, nearest)

    def normal(self, node: Node) -> Shapes:
        if self.active:
            self.within.setdefault(self.active[-1], set()).add(node)
        if node in self.known:
            return self.known[node]
        if node in self.active:
            raise _CycleError
        self.active.append(node)
        try:
            current = self._find(node)
        finally:
            self.active.pop()
        self.known[node] = current
        return current

    def _find(self, node: Node) -> Shapes:
        kind, content = self.nodes.terms[node]
        match kind:
            case "false":
                return NONE
            case "true":
                return ALL
            case "schema":
                return self.schema(content)
            case "value":
                return keywords.of_value(content, self.value)
            case "not":
                return shapes.minus(ALL, self.normal(content), self)
            case "any":
                return shapes.either(*map(self.normal, content))
        current = ALL
        for part in sorted(content, key=lambda part: self.nodes.terms[part][0] == "not"):
            if self.nodes.terms[part][0] == "not":
                current = shapes.minus(current, self.normal(self.nodes.terms[part][1]), self)
            else:
                current = shapes.both(current, self.normal(part), self)
        return current

    def schema(self, place: Place) -> Shapes:
        """What is of the schema at `place`."""
        schema = place.schema

        def read(keyword: str) -> bool:
            return keyword in schema and (place.path, keyword) not in self.dropped

        if read("$ref") and place.year <= 2018:  # nothing stands beside it
            with self.blame(place, "$ref"):
                return self.normal(self.place(place.follow(schema["$ref"])))
        current = self.types(place, read)
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if read(keyword):
                with self.blame(place, keyword):
                    current = self.both(current, self.place(place.follow(schema[keyword], keyword)))
        for keyword, combine in _COMBINATIONS.items():
            if read(keyword) or (keyword == "oneOf" and "oneOf" in schema):
                with self.blame(place, keyword):
                    current = combine(self, place, current)
        return current

    @contextmanager
    def blame(self, place: Place, keyword: str) -> Iterator[None]:
        """Says where it happened, in errors that do not know."""
        try:
            yield
        except GrammarError as problem:
            if problem.path is not None:
                raise
            raise GrammarError(f"{place.path}: {keyword}: {problem}", keyword, place.path) from problem

    def inside(self, place: Place) -> keywords.Inside:
        """Makes nodes of the schemas under keys of `place`."""

        def node(*keys: str | int) -> Node:
            return self.place(place.child(*keys))

        return node

    def both(self, current: Shapes, node: Node) -> Shapes:
        return current if current.empty else shapes.both(current, self.normal(node), self)

    def types(self, place: Place, read: Callable[[str], bool]) -> Shapes:
        """What the keywords leave that are about values themselves."""
        schema, current = place.schema, ALL
        if read("type"):
            with self.blame(place, "type"):
                names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
                current = shapes.either(*map(keywords.of_type, names))
        for keyword in ("const", "enum"):
            if read(keyword) and (keyword == "enum" or place.year >= 2017):
                with self.blame(place, keyword):
                    values = schema[keyword] if keyword == "enum" else [schema[keyword]]
                    current = shapes.both(current, self.values(values), self)
        inside = self.inside(place)

        def some(names: tuple[str, ...]) -> str:
            return next((name for name in names if read(name)), "")

        plain = {key: value for key, value in schema.items() if read(key)}
        if current.numbers and (keyword := some(keywords.NUMBERS)):
            with self.blame(place, keyword):
                points = keywords.of_numbers(plain)
                current = shapes.both(current, replace(ALL, numbers=() if points is None else (points,)), self)
        if current.strings and (keyword := some(keywords.STRINGS)):
            with self.blame(place, keyword):
                texts = keywords.of_strings(plain)
                current = shapes.both(current, replace(ALL, strings=() if texts is None else (texts,)), self)
        if current.arrays and (keyword := some(keywords.ARRAYS)):
            with self.blame(place, keyword):
                lists = keywords.of_arrays(place, plain, inside, self)
                current = shapes.both(current, replace(ALL, arrays=() if lists is None else (self.plain(lists),)), self)
        if current.objects and (keyword := some(keywords.OBJECTS)):
            with self.blame(place, keyword):
                dicts = keywords.of_objects(place, plain, inside, self, self.normal)
                current = shapes.both(
                    current, replace(ALL, objects=() if dicts is None else (self.plain(dicts),)), self
                )
        return current

    def plain(self, shape: Any) -> Any:
        """`shape` without what has been evaluated, where nobody asks."""
        return shape if self.evaluation else replace(shape, seen=type(shape)().seen)

    def values(self, values: Any) -> Shapes:
        """Enumerated values."""
        if not isinstance(values, list):
            raise GrammarError(f"an enumeration is a list, not {values!r}", "enum")
        if len(values) > limits.VALUES:
            limits.exceeded("VALUES", limits.VALUES, f"an enumeration of {len(values):,} values", "enum")
        texts = [value for value in values if isinstance(value, str)]
        current = Shapes(strings=(Strings(values=frozenset(texts)),) if texts else ())
        rest = (keywords.of_value(value, self.value) for value in values if not isinstance(value, str))
        return shapes.either(current, *rest)


def _parts(self: Normal, place: Place, keyword: str) -> list[Node]:
    """The schemas in a list.

    Raises:
        GrammarError: there is no list.
    """
    if not isinstance(place.schema[keyword], list):
        raise GrammarError(f"{keyword} is a list of schemas, not {place.schema[keyword]!r}", keyword)
    return [self.place(place.child(keyword, index)) for index in range(len(place.schema[keyword]))]


def _all_of(self: Normal, place: Place, current: Shapes) -> Shapes:
    for part in _parts(self, place, "allOf"):
        current = self.both(current, part)
    return current


def _any_of(self: Normal, place: Place, current: Shapes, keyword: str = "anyOf") -> Shapes:
    union = NONE
    for node in _parts(self, place, keyword):
        part = self.both(current, node)
        # Whatever holds has evaluated: alternatives that hold together are alternatives of their own.
        together = shapes.both(union, part, self) if self.evaluation else NONE
        union = shapes.either(shapes.either(union, part), together)
    return union


def _one_of(self: Normal, place: Place, current: Shapes) -> Shapes:
    if (place.path, "oneOf") in self.dropped:
        return _any_of(self, place, current, "oneOf")
    parts = [self.both(current, node) for node in _parts(self, place, "oneOf")]
    union = NONE
    for index, part in enumerate(parts):
        for other in parts[:index] + parts[index + 1 :]:
            part = shapes.minus(part, other, self)
        union = shapes.either(union, part)
    return union


def _not(self: Normal, place: Place, current: Shapes) -> Shapes:
    return shapes.minus(current, self.normal(self.place(place.child("not"))), self)


def _if(self: Normal, place: Place, current: Shapes) -> Shapes:
    schema = place.schema
    if place.year < 2018 or ("then" not in schema and "else" not in schema and not self.evaluation):
        return current
    condition = self.place(place.child("if"))
    then = self.both(current, condition)
    if "then" in schema:
        then = self.both(then, self.place(place.child("then")))
    otherwise = shapes.minus(current, self.normal(condition), self)
    if "else" in schema:
        otherwise = self.both(otherwise, self.place(place.child("else")))
    return shapes.either(then, otherwise)


def _dependent(keyword: str) -> Callable[[Normal, Place, Shapes], Shapes]:
    def combine(self: Normal, place: Place, current: Shapes) -> Shapes:
        if not isinstance(place.schema[keyword], dict):
            raise GrammarError(f"{keyword} is an object, not {place.schema[keyword]!r}", keyword)
        for name, needs in place.schema[keyword].items():
            absent = replace(ALL, objects=(Objects((Property(name, FALSE),)),))
            present = Shapes(objects=(Objects((Property(name, TRUE, True),)),))
            with_it = shapes.both(current, present, self)
            if isinstance(needs, list):
                required = Objects(tuple(Property(need, TRUE, True) for need in needs))
                with_it = shapes.both(with_it, Shapes(objects=(required,)), self)
            else:
                with_it = self.both(with_it, self.place(place.child(keyword, name)))
            current = shapes.either(shapes.both(current, absent, self), with_it)
        return current

    return combine


def _unevaluated(keyword: str) -> Callable[[Normal, Place, Shapes], Shapes]:
    def combine(self: Normal, place: Place, current: Shapes) -> Shapes:
        if place.year < 2019:
            return current
        node = self.place(place.child(keyword))
        if keyword == "unevaluatedItems":
            lists = [arrays.evaluate(shape, node, self) for shape in current.arrays]
            return replace(current, arrays=tuple(dict.fromkeys(shape for shape in lists if shape is not None)))
        dicts = [objects.evaluate(shape, node, self) for shape in current.objects]
        return replace(current, objects=tuple(dict.fromkeys(shape for shape in dicts if shape is not None)))

    return combine


_COMBINATIONS: dict[str, Callable[[Normal, Place, Shapes], Shapes]] = {
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "dependencies": _dependent("dependencies"),
    "dependentRequired": _dependent("dependentRequired"),
    "dependentSchemas": _dependent("dependentSchemas"),
    "unevaluatedItems": _unevaluated("unevaluatedItems"),
    "unevaluatedProperties": _unevaluated("unevaluatedProperties"),
}
