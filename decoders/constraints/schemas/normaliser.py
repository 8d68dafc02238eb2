"""Computes the shapes (:mod:`.shapes`) of schemas. A keyword stands for the set of values that it allows, a schema for the
intersection of the sets of its keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from os.path import commonprefix
from typing import Any

from ...errors import GrammarError
from ..patterns.limits import check
from . import keywords, limits, shapes
from .applicators import APPLICATORS, one_of_as_any_of
from .document import Place, known
from .nodes import FALSE, TRUE, Node, Nodes
from .numbers import canonical
from .shapes import ALL, NONE, SchemaAlgebra, Shapes
from .strings import Strings

_LOOK_AHEAD = 3
_WORK = "the work of multiplying out allOf, anyOf, oneOf, not, …"
_OF_OBJECTS = ("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties")
#: Keywords that evaluate items or properties, in the sense of ``unevaluatedItems`` and ``unevaluatedProperties``.
_EVALUATING = frozenset((
    "prefixItems", "items", "additionalItems", "contains", "properties", "patternProperties", "additionalProperties", "allOf",
    "anyOf", "oneOf", "if", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
))  # fmt: skip
#: For a reported keyword, the other keywords that may have caused its problem; the most dispensable come first.
_CAUSES = {
    "minProperties": ("maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    "contains": ("maxContains", "items", "additionalItems", "unevaluatedItems"),
    "not": ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "oneOf", "if"),
    "maxProperties": ("minProperties",),
    "minimum": ("maximum", "exclusiveMinimum", "exclusiveMaximum", "const", "enum"),
}
#: Keywords to leave out if the cause of a problem is unknown; the most dispensable come first.
_COARSE = (
    "not", "if", "oneOf", "contains", "unevaluatedItems", "unevaluatedProperties", "dependentSchemas", "dependentRequired",
    "dependencies", "anyOf", "allOf", "patternProperties", "propertyNames", "const", "enum",
)  # fmt: skip


class _CycleError(Exception):
    """A node is defined by itself without an array or object in between."""


class Normaliser(SchemaAlgebra):
    """Computes the shapes (sets of values) of nodes, each once.

    Args:
        dropped: (path, keyword) of the keywords that are left out. A left-out keyword allows everything (under ``not``: nothing), so
            the schema as a whole only allows more. A left-out ``oneOf`` is read as ``anyOf``.
        evaluation: whether the schema has a keyword that depends on what other keywords have evaluated (``unevaluatedItems``).
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
        check(_WORK)
        if self.steps > limits.STEPS:
            limits.exceeded("STEPS", limits.STEPS, _WORK)

    def place(self, content: Place | bool) -> Node:
        if isinstance(content, bool):
            return TRUE if content else FALSE
        if not content.schema:
            return TRUE
        return self.nodes.leaf("schema", (id(content.schema), content.scope, content.subtracted), content)

    def reads(self, place: Place, keyword: str) -> bool:
        """Whether the schema at `place` contains `keyword`, its draft defines `keyword`, and it is not left out."""
        return keyword in place.schema and known(keyword, place.year) and (place.path, keyword) not in self.dropped

    def opposite(self, place: Place) -> Place:
        return replace(place, subtracted=not place.subtracted) if self.dropped else place

    def value(self, value: Any) -> Node:
        """The node of a value; equal values give the same node."""
        return self.nodes.leaf("value", canonical(value), value)

    def empty(self, node: Node) -> bool:
        if node in (TRUE, FALSE):
            return node == FALSE
        if node in self.known:
            return self.known[node].empty
        if self.depth >= _LOOK_AHEAD:
            return False
        self.depth += 1
        try:
            return self.normalise(node).empty
        except _CycleError:
            return False
        finally:
            self.depth -= 1

    def shapes(self, node: Node) -> Shapes:
        """The set of the values that `node` allows. Raises GrammarError: the set cannot be expressed."""
        try:
            return self.normalise(node)
        except (_CycleError, RecursionError) as problem:
            term = self.nodes.terms[node][1]
            path = term.path if isinstance(term, Place) else "$"
            raise GrammarError(
                f"{path}: $ref leads to itself: put a property or item between", "$ref", path
            ) from problem

    def with_location(self, node: Node, problem: GrammarError) -> GrammarError:
        """`problem`, which was raised for `node`, plus the path of its keyword, or of a keyword that may be the cause."""
        seen, queue = {node}, [node]
        places: list[Place] = []
        for queued in queue:
            term = self.nodes.terms[queued]
            if term[0] == "schema":
                places.append(term[1])
            parts = {*self.within.get(queued, ()), *(term[1] if term[0] in ("all", "any") else [])}
            queue += sorted(parts - seen)
            seen |= parts
        for keyword in (problem.keyword or "", *_CAUSES.get(problem.keyword or "", ()), *_COARSE):
            for place in places:
                if self.reads(place, keyword):
                    return GrammarError(f"{place.path}: {keyword}: {problem}", keyword, place.path)
        if not places:
            return problem
        return GrammarError(f"{places[0].path}: {problem}", problem.keyword, places[0].path)

    def droppable(self, problem: GrammarError) -> tuple[str, str] | None:
        """Returns (path, keyword) of a keyword to leave out because of `problem`: the keyword that caused it, or else a keyword of
        :data:`_COARSE` near the path of `problem`. None if no keyword can be left out.
        """
        path, keyword = problem.path or "", problem.keyword or ""
        places = self.places
        for place in places:
            if (path, keyword) not in self.dropped and self.reads(place, keyword):
                paths = [place.path]
                if keyword == "patternProperties" and isinstance(place.schema[keyword], dict):
                    paths += [place.path_of(keyword, text) for text in place.schema[keyword]]
                if path in paths:
                    return path, keyword
        places.sort(key=lambda place: len(commonprefix([place.path, path])), reverse=True)  # noqa: RUF071 -- no files
        coarse = ((place.path, name) for place in places for name in _COARSE if self.reads(place, name))
        return next(coarse, None)

    @property
    def places(self) -> list[Place]:
        """All schemas with a node."""
        return [content for kind, content in self.nodes.terms if kind == "schema"]

    def normalise(self, node: Node) -> Shapes:
        if self.active:
            self.within.setdefault(self.active[-1], set()).add(node)
        if node in self.known:
            return self.known[node]
        if node in self.active:
            raise _CycleError
        check(_WORK)
        self.active.append(node)
        try:
            current = self._compute(node)
        finally:
            self.active.pop()
        self.known[node] = current
        return current

    def _compute(self, node: Node) -> Shapes:
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
                return shapes.difference(ALL, self.normalise(content), self)
            case "any":
                return shapes.union(*map(self.normalise, content))
        current = ALL
        for part in sorted(content, key=lambda part: self.nodes.terms[part][0] == "not"):
            if self.nodes.terms[part][0] == "not":
                current = shapes.difference(current, self.normalise(self.nodes.terms[part][1]), self)
            else:
                current = shapes.intersection(current, self.normalise(part), self)
        return current

    def schema(self, place: Place) -> Shapes:
        """The set of the values that the schema at `place` allows."""
        schema, read = place.schema, partial(self.reads, place)
        if read("$ref") and place.year <= 2018:  # siblings of $ref are ignored
            with self.locating_errors(place, "$ref"):
                return self.normalise(self.place(place.follow(schema["$ref"])))
        current = self.types(place)
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if read(keyword):
                with self.locating_errors(place, keyword):
                    current = self.intersect(current, self.place(place.follow(schema[keyword], keyword)))
        current = self._without_dropped(place, current)
        for keyword, combine in APPLICATORS.items():
            if read(keyword):
                with self.locating_errors(place, keyword):
                    current = combine(self, place, current)
        return current

    def _without_dropped(self, place: Place, current: Shapes) -> Shapes:
        """Applies the left-out keywords of `place`: they evaluate all parts of a value or, if `place` is subtracted, allow nothing."""
        dropped = [keyword for keyword in place.schema if (place.path, keyword) in self.dropped]
        if place.subtracted:
            return _without(current, dropped)
        if "oneOf" in dropped:
            try:
                return one_of_as_any_of(self, place, current)
            except GrammarError as problem:  # still too many alternatives
                if problem.path is not None:
                    raise
        evaluated = self.evaluation and not _EVALUATING.isdisjoint(dropped)
        return shapes.all_evaluated(current) if evaluated else current

    @contextmanager
    def locating_errors(self, place: Place, keyword: str, group: tuple[str, ...] = ()) -> Iterator[None]:
        """Adds `keyword` and the path of `place` to a GrammarError without a path; keeps a keyword of `group` that the error has."""
        try:
            yield
        except GrammarError as problem:
            if problem.path is not None:
                raise
            if problem.keyword in group and problem.keyword in place.schema:
                keyword = problem.keyword
            raise GrammarError(f"{place.path}: {keyword}: {problem}", keyword, place.path) from problem

    def types(self, place: Place) -> Shapes:
        """The set of the values that ``type``, ``const``, ``enum`` and the keywords for single types (``minLength``) allow."""
        schema, read, current = place.schema, partial(self.reads, place), ALL
        if read("type"):
            with self.locating_errors(place, "type"):
                names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
                current = shapes.union(*map(keywords.of_type, names))
        for keyword in ("const", "enum"):
            if read(keyword):
                with self.locating_errors(place, keyword):
                    values = schema[keyword] if keyword == "enum" else [schema[keyword]]
                    current = shapes.intersection(current, self.values(values), self)
        read_keywords = {key: value for key, value in schema.items() if read(key)}
        if isinstance(patterns := read_keywords.get("patternProperties"), dict):
            read_keywords["patternProperties"] = {
                text: value
                for text, value in patterns.items()
                if (place.path_of("patternProperties", text), "patternProperties") not in self.dropped
            }

        def narrowed(type_name: str, names: tuple[str, ...], allowed: Callable[[], Any]) -> Shapes:
            """`current`, with the values of one type restricted to the values that the type's keywords `names` allow."""
            keyword = next((name for name in names if read(name)), None)
            if not getattr(current, type_name) or keyword is None:
                return current
            with self.locating_errors(place, keyword, names):
                shape = allowed()
                of_type: Any = () if shape is None else (self.without_evaluated(shape),)
                return shapes.intersection(current, replace(ALL, **{type_name: of_type}), self)

        current = narrowed("numbers", keywords.NUMBERS, lambda: keywords.of_numbers(read_keywords))
        current = narrowed("strings", keywords.STRINGS, lambda: keywords.of_strings(read_keywords))
        current = narrowed("arrays", keywords.ARRAYS, lambda: keywords.of_arrays(place, read_keywords, self))
        return narrowed("objects", keywords.OBJECTS, lambda: keywords.of_objects(place, read_keywords, self))

    def without_evaluated(self, shape: Any) -> Any:
        """`shape` without its evaluated items or properties, unless the schema has a keyword that depends on them."""
        keeps = self.evaluation or not hasattr(shape, "evaluated")
        return shape if keeps else replace(shape, evaluated=type(shape)().evaluated)

    def values(self, values: Any) -> Shapes:
        """The set of the enumerated `values`."""
        if not isinstance(values, list):
            raise GrammarError(f"an enumeration must be a list, not {values!r}", "enum")
        if len(values) > limits.VALUES:
            limits.exceeded("VALUES", limits.VALUES, f"an enumeration of {len(values):,} values", "enum")
        texts = [value for value in values if isinstance(value, str)]
        current = Shapes(strings=(Strings(values=frozenset(texts)),) if texts else ())
        rest = (keywords.of_value(value, self.value) for value in values if not isinstance(value, str))
        return shapes.union(current, *rest)


def _without(shapes: Shapes, left_out: Iterable[str]) -> Shapes:
    """`shapes` without the types that the keywords `left_out` restrict."""
    for keyword in left_out:
        if keyword in keywords.NUMBERS:
            shapes = replace(shapes, numbers=())
        elif keyword in keywords.STRINGS:
            shapes = replace(shapes, strings=())
        elif keyword in keywords.ARRAYS or keyword == "unevaluatedItems":
            shapes = replace(shapes, arrays=())
        elif keyword in keywords.OBJECTS or keyword in _OF_OBJECTS:
            shapes = replace(shapes, objects=())
        else:
            return NONE
    return shapes
