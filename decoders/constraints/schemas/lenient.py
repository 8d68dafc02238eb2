"""Validation of a finished text, for what a lenient language leaves out."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ...errors import GrammarError, shortened
from ..patterns.deadline import deadline
from ..patterns.search import Search
from .document import document, step
from .judge import Failure, Judge

#: Most time on the processor that validating one text may take.
SECONDS = 0.5
_LIMIT = f"the limit SECONDS of {__name__}: simplify the schema"


@dataclass(frozen=True)
class Validation:
    """Judges texts under a schema. Nothing is fetched."""

    schema: Any = field(repr=False)

    def __call__(self, text: str) -> None:
        """Nothing, if `text` is JSON that is valid.

        Raises:
            GrammarError: it is not; names the keyword that it breaks and the place in the text. Or nobody can tell.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise GrammarError(f"the text is not JSON: {problem}") from problem
        try:
            with deadline(SECONDS, _LIMIT), Search() as search:
                failure = Judge(search).verdict(document(json.dumps(self.schema)), value).failure
        # A schema that makes no sense, a text nested deeper than the stack, an infinite float.
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
