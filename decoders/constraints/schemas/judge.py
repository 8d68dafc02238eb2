"""Validates values and finished texts against a schema: every keyword of every draft, in bounded time.

Each pair of a schema and a value is evaluated once, which bounds the cost of references that fan out. Automata match regular patterns.
Formats are annotations, as in the drafts since 2019.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ...errors import GrammarError, shortened
from ..patterns.ecma import Search
from ..patterns.limits import check, deadline
from . import keywords
from .document import Place, document, known, step
from .kinds import kind_of
from .numbers import canonical, fraction


@dataclass(frozen=True)
class Failure:
    """Why a value is invalid.

    Attributes:
        keyword: the broken keyword; None if a schema ``false`` forbids the part.
        wanted: the keyword's value.
        value: the part of the value that breaks the keyword.
        path: keys and indices that lead to this part.
    """

    keyword: str | None
    wanted: Any
    value: Any
    path: tuple[str | int, ...] = ()

    def within(self, key: str | int) -> Failure:
        """This failure with a path that begins at the enclosing object or array, which contains the validated value under `key`."""
        return replace(self, path=(key, *self.path))


@dataclass(frozen=True)
class Judgement:
    """The result of validating a value against a schema.

    Attributes:
        failure: None if the value is valid.
        evaluated: keys or indices that a keyword has evaluated, for ``unevaluatedProperties`` and ``unevaluatedItems``.
    """

    failure: Failure | None = None
    evaluated: frozenset[str | int] = frozenset()


_VALID = Judgement()


class Judge:
    """Validates the values of one text. The caller must keep the values alive, because verdicts are cached by the ids of values."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self._verdicts: dict[tuple[object, ...], Judgement | None] = {}
        self._texts: dict[int, str] = {}
        self._enumerations: dict[int, frozenset[str]] = {}

    def verdict(self, place: Place | bool, value: Any) -> Judgement:
        """The result of validating `value` against the schema at `place`.

        Raises:
            GrammarError: the value cannot be judged: the schema is invalid, a reference leads to itself, or time is up.
        """
        if isinstance(place, bool):
            return _VALID if place else Judgement(Failure(None, False, value))
        key = (id(place.schema), place.scope, id(value))
        if key not in self._verdicts:
            check("validation")
            self._verdicts[key] = None
            self._verdicts[key] = self._judged(place, value)
        verdict = self._verdicts[key]
        if verdict is None:
            raise GrammarError(f"{place.path}: a reference leads to itself: put a property or item between", "$ref")
        return verdict

    def _judged(self, place: Place, value: Any) -> Judgement:
        schema = place.schema
        read = {keyword: content for keyword, content in schema.items() if known(keyword, place.year)}
        if "$ref" in read and place.year <= 2018:  # siblings of $ref are ignored
            return self.verdict(place.follow(read["$ref"]), value)
        for keyword in self._broken(read, value):
            return Judgement(Failure(keyword, read[keyword], value))
        evaluated: set[str | int] = set()
        inside = self._inside(place, read, value) if isinstance(value, list | dict) else ()
        for verdict in chain(self._applied(place, read, value), inside):
            if verdict.failure is not None:
                return verdict
            evaluated |= verdict.evaluated
        if isinstance(value, list | dict):
            keyword = "unevaluatedProperties" if isinstance(value, dict) else "unevaluatedItems"
            if keyword in read:
                rest = [key for key in _keys(value) if key not in evaluated]
                failed = self._each(place.child(keyword), value, rest)
                return failed if failed.failure is not None else Judgement(evaluated=frozenset(_keys(value)))
        return Judgement(evaluated=frozenset(evaluated))

    def _each(self, place: Place | bool, value: Any, keys: list[Any]) -> Judgement:
        """The verdict of the schema at `place` on the parts of `value` under `keys`. If all are valid, `keys` count as evaluated."""
        for key in keys:
            if (failure := self.verdict(place, value[key]).failure) is not None:
                return Judgement(failure.within(key))
        return Judgement(evaluated=frozenset(keys))

    # Keywords with conditions on the value itself.

    def _broken(self, read: dict[str, Any], value: Any) -> Iterator[str]:
        """The keywords that `value` breaks, apart from keywords that apply schemas."""
        if "type" in read:
            names = read["type"] if isinstance(read["type"], list) else [read["type"]]
            if not any(_is_of(name, value) for name in names):
                yield "type"
        if "const" in read and self._text(read["const"]) != self._text(value):
            yield "const"
        if "enum" in read and self._text(value) not in self._enumeration(read["enum"]):
            yield "enum"
        if isinstance(value, str):
            yield from _out_of_bounds(read, "minLength", "maxLength", len(value))
            if "pattern" in read and not self.search.found(read["pattern"], value):
                yield "pattern"
        elif isinstance(value, list):
            yield from _out_of_bounds(read, "minItems", "maxItems", len(value))
            if read.get("uniqueItems") is True and len({self._text(item) for item in value}) < len(value):
                yield "uniqueItems"
        elif isinstance(value, dict):
            yield from _out_of_bounds(read, "minProperties", "maxProperties", len(value))
            if any(name not in value for name in keywords.read_names(read, "required")):
                yield "required"
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = fraction(value)
            for keyword in keywords.NUMBERS:
                if keyword in read and not isinstance(read[keyword], bool):
                    # In draft 4, a boolean makes the bound exclusive.
                    exclusive = "exclusive" + keyword.capitalize()
                    strict = {exclusive: True} if read.get(exclusive) is True else {}
                    numbers = keywords.of_numbers({keyword: read[keyword], **strict})
                    if numbers is None or not numbers.contains(number):
                        yield keyword

    def _text(self, value: Any) -> str:
        if id(value) not in self._texts:
            check("validation")
            self._texts[id(value)] = canonical(value)
        return self._texts[id(value)]

    def _enumeration(self, values: list[Any]) -> frozenset[str]:
        if id(values) not in self._enumerations:
            self._enumerations[id(values)] = frozenset(map(self._text, values))
        return self._enumerations[id(values)]

    # Keywords that apply schemas to the value itself.

    def _applied(self, place: Place, read: dict[str, Any], value: Any) -> Iterator[Judgement]:
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword in read:
                yield self.verdict(place.follow(read[keyword], keyword), value)
        if "allOf" in read:
            yield from (self.verdict(place.child("allOf", i), value) for i in range(len(read["allOf"])))
        if "anyOf" in read:
            every = [self.verdict(place.child("anyOf", i), value) for i in range(len(read["anyOf"]))]
            valid = [verdict for verdict in every if verdict.failure is None]
            yield from valid or [_deepest("anyOf", read, value, every)]
        if "oneOf" in read:
            every = [self.verdict(place.child("oneOf", i), value) for i in range(len(read["oneOf"]))]
            valid = [verdict for verdict in every if verdict.failure is None]
            if not valid:
                yield _deepest("oneOf", read, value, every)
            yield valid[0] if len(valid) == 1 else Judgement(Failure("oneOf", read["oneOf"], value))
        if "not" in read and self.verdict(place.child("not"), value).failure is None:
            yield Judgement(Failure("not", read["not"], value))
        if "if" in read:
            condition = self.verdict(place.child("if"), value)
            if condition.failure is None:
                yield condition
            branch = "then" if condition.failure is None else "else"
            if branch in read:
                yield self.verdict(place.child(branch), value)
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, needs in keywords.read_object(read, keyword).items() if isinstance(value, dict) else ():
                if name in value and isinstance(needs, list):
                    if any(need not in value for need in needs):
                        yield Judgement(Failure(keyword, read[keyword], value))
                elif name in value:
                    yield self.verdict(place.child(keyword, name), value)

    # Keywords that apply schemas to parts of the value.

    def _inside(self, place: Place, read: dict[str, Any], value: Any) -> Iterator[Judgement]:
        return self._in_object(place, read, value) if isinstance(value, dict) else self._in_array(place, read, value)

    def _in_object(self, place: Place, read: dict[str, Any], value: dict[str, Any]) -> Iterator[Judgement]:
        others = dict.fromkeys(value)
        for name in keywords.read_object(read, "properties"):
            if name in value:
                others.pop(name, None)
                yield self._each(place.child("properties", name), value, [name])
        for pattern in keywords.read_object(read, "patternProperties"):
            names = [name for name in value if self.search.found(pattern, name)]
            others = {name: None for name in others if name not in names}
            yield self._each(place.child("patternProperties", pattern), value, names)
        if "additionalProperties" in read:
            yield self._each(place.child("additionalProperties"), value, [*others])
        if "propertyNames" in read:
            for name in value:
                if (failure := self.verdict(place.child("propertyNames"), name).failure) is not None:
                    yield Judgement(failure)

    def _in_array(self, place: Place, read: dict[str, Any], value: list[Any]) -> Iterator[Judgement]:
        listed = next((key for key in ("prefixItems", "items") if isinstance(read.get(key), list)), None)
        first = 0 if listed is None else len(read[listed])
        for index in range(min(first, len(value))):  # empty if `listed` is None
            yield self._each(place.child(listed, index), value, [index])  # type: ignore[arg-type]
        rest = "additionalItems" if listed == "items" else "items"
        if rest in read and (listed is not None or rest == "items"):
            yield self._each(place.child(rest), value, [*range(first, len(value))])
        if "contains" in read:
            kind = place.child("contains")
            indices = [index for index, item in enumerate(value) if self.verdict(kind, item).failure is None]
            low, high = keywords.read_count(read, "minContains"), keywords.read_count(read, "maxContains")
            if len(indices) < (1 if low is None else low):
                yield Judgement(Failure("contains", read["contains"], value))
            if high is not None and len(indices) > high:
                yield Judgement(Failure("maxContains", read["maxContains"], value))
            yield Judgement(evaluated=frozenset(indices if place.year >= 2020 else ()))


def _keys(value: Any) -> list[Any]:
    return [*value] if isinstance(value, dict) else [*range(len(value))]


def _deepest(keyword: str, read: dict[str, Any], value: Any, every: list[Judgement]) -> Judgement:
    """The verdict if all alternatives fail: the deepest failure in a part of `value`, or else a failure of `keyword`."""
    deepest = max((v for v in every if v.failure), key=lambda v: len(v.failure.path) if v.failure else 0, default=None)
    if deepest is not None and deepest.failure is not None and deepest.failure.path:
        return deepest
    return Judgement(Failure(keyword, read[keyword], value))


def _is_of(name: Any, value: Any) -> bool:
    if name == "integer":
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return whole and not isinstance(value, bool)
    keywords.of_type(name)  # raises for an unknown type
    return kind_of(value) == name


def _out_of_bounds(read: dict[str, Any], least: str, most: str, size: int) -> Iterator[str]:
    low, high = keywords.read_count(read, least), keywords.read_count(read, most)
    if low is not None and size < low:
        yield least
    if high is not None and size > high:
        yield most


#: Greatest number of CPU seconds for validating one text.
SECONDS = 0.5
_LIMIT = f"the limit SECONDS of {__name__}: simplify the schema"


@dataclass(frozen=True)
class Validation:
    """Validates texts against a schema. Nothing is fetched."""

    schema: Any = field(repr=False)

    def __call__(self, text: str) -> None:
        """Returns without an error if `text` is valid JSON under the schema.

        Raises:
            GrammarError: `text` is not valid (the error names the broken keyword and the place in the text), or cannot be judged.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise GrammarError(f"the text is not JSON: {problem}") from problem
        try:
            with deadline(SECONDS, _LIMIT), Search() as search:
                failure = Judge(search).verdict(document(json.dumps(self.schema)), value).failure
        # Causes are an invalid schema, a text nested too deeply, an infinite float.
        except Exception as problem:
            why = str(problem) if isinstance(problem, GrammarError) else f"{type(problem).__name__}: {problem}"
            raise GrammarError(f"the text cannot be judged: {why[:300]}") from problem
        if failure is not None:
            path = "$" + "".join(map(step, failure.path))
            raise GrammarError(f"the text is JSON, but not valid: {path}: {_reason(failure)}", failure.keyword, path)


def _reason(failure: Failure) -> str:
    value = shortened(json.dumps(failure.value, ensure_ascii=False), 120)
    if failure.keyword is None:
        return f"nothing is allowed here, not even {value}"
    return f"{value} breaks {failure.keyword}: {shortened(json.dumps(failure.wanted, ensure_ascii=False), 120)}"
