"""Validates finished texts under schemas from which a language has left out keywords: by jsonschema, in bounded time.

Formats are annotations, as in the drafts since 2019.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from ...errors import GrammarError, shortened
from ..patterns import automata, ecma
from ..patterns.limits import check, deadline
from .document import members, step
from .numbers import fraction

if TYPE_CHECKING:
    from jsonschema import ValidationError

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
        from jsonschema.exceptions import best_match
        from jsonschema_specifications import REGISTRY

        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise GrammarError(f"the text is not JSON: {problem}") from problem
        try:
            with deadline(SECONDS, _LIMIT):
                validator = _validator(self.schema)(self.schema, registry=REGISTRY)
                failure = best_match(validator.iter_errors(value))
        # Causes are an invalid schema, a text nested too deeply, an infinite float.
        except Exception as problem:
            why = str(problem) if isinstance(problem, GrammarError) else f"{type(problem).__name__}: {problem}"
            raise GrammarError(f"the text cannot be judged: {why[:300]}") from problem
        if failure is not None:
            path = "$" + "".join(map(step, failure.absolute_path))
            keyword = failure.validator and str(failure.validator)
            raise GrammarError(f"the text is JSON, but not valid: {path}: {_reason(failure)}", keyword, path)


def _validator(schema: Any) -> Callable[..., Any]:
    """The class of validators for the draft of `schema`; lists under ``items`` are read in all drafts."""
    from jsonschema.validators import Draft201909Validator, Draft202012Validator, validator_for

    lists = any(key == "items" and isinstance(items, list) for key, items in members(schema))
    return _bounded(validator_for(schema, default=Draft201909Validator if lists else Draft202012Validator))


@lru_cache
def _bounded(base: Any) -> Any:
    """`base`, a class of validators, with bounded time, the patterns of ECMA-262, and exact multiples."""
    from jsonschema.validators import extend

    own = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "multipleOf": _multiple_of,
    }
    keywords = {**base.VALIDATORS, **own}
    return extend(base, {keyword: partial(_checked, function) for keyword, function in keywords.items()})


def _checked(function: Callable[..., Any], *arguments: Any) -> Iterator[ValidationError]:
    check("validation")
    yield from function(*arguments) or ()


def _found(pattern: str, text: str) -> bool:
    """Whether `pattern` is found in `text`, by the rules of ECMA-262, or of Python's ``re`` if `pattern` is not regular."""
    try:
        conditions = ecma.strings(pattern)
    except GrammarError:
        return re.search(pattern, text) is not None
    return all(automata.matches(tree, text) is good for tree, good in conditions)


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[ValidationError]:
    from jsonschema import ValidationError

    if isinstance(value, str) and not _found(pattern, value):
        yield ValidationError("")


def _pattern_properties(validator: Any, patterns: dict[str, Any], value: Any, _: Any) -> Iterator[ValidationError]:
    for name in value if isinstance(value, dict) else ():
        for pattern, schema in patterns.items():
            if _found(pattern, name):
                yield from validator.descend(value[name], schema, path=name, schema_path=pattern)


def _additional_properties(validator: Any, schema: Any, value: Any, parent: Any) -> Iterator[ValidationError]:
    for name in value if isinstance(value, dict) else ():
        patterns = parent.get("patternProperties", ())
        if name not in parent.get("properties", ()) and not any(_found(pattern, name) for pattern in patterns):
            yield from validator.descend(value[name], schema, path=name)


def _multiple_of(validator: Any, step: Any, value: Any, _: Any) -> Iterator[ValidationError]:
    from jsonschema import ValidationError

    if validator.is_type(value, "number") and (fraction(value) / fraction(step)).denominator != 1:
        yield ValidationError("")


def _reason(failure: ValidationError) -> str:
    value = shortened(json.dumps(failure.instance, ensure_ascii=False), 120)
    if failure.validator is None:
        return f"{value} is not allowed"
    return (
        f"{value} breaks {failure.validator}: {shortened(json.dumps(failure.validator_value, ensure_ascii=False), 120)}"
    )
