"""Validation of a finished text, for what a lenient language leaves out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ..errors import GrammarError


@dataclass(frozen=True)
class Validation:
    """Judges texts under a schema. Nothing is fetched."""

    schema: Any = field(repr=False)

    def __call__(self, text: str) -> None:
        """Nothing, if `text` is JSON that is valid.

        Raises:
            GrammarError: it is not; names the keyword that it breaks and the place in the text. Or nobody can tell.
        """
        from jsonschema.exceptions import best_match
        from jsonschema.validators import Draft202012Validator, validator_for
        from jsonschema_specifications import REGISTRY

        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise GrammarError(f"the text is not JSON: {problem}") from problem
        kind = validator_for(self.schema, default=Draft202012Validator)
        try:
            error = best_match(kind(self.schema, registry=REGISTRY).iter_errors(value))
        # A pattern that `re` does not read, a text nested deeper than the stack, an infinite float.
        except Exception as problem:
            raise GrammarError(
                f"jsonschema cannot judge the text: {type(problem).__name__}: {str(problem)[:200]}"
            ) from problem
        if error is not None:
            raise GrammarError(
                f"the text is JSON, but not valid: {error.message[:300]}", str(error.validator), str(error.json_path)
            )
