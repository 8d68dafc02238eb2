"""What a client is told when a request is refused or fails: OpenAI's error form, with a status that says whose fault it is.

A body that cannot be read is explained here, too: field, value and what comes nearest.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import (
    CacheMemoryError,
    CancelledError,
    ContextLengthError,
    DeadlineError,
    DecodersError,
    GrammarError,
    QueueFull,
    UnknownNameError,
    shortened,
)
from .bodies import SHAPES, Asked

log = logging.getLogger("decoders.server")

#: ``type`` of an error by its status; 4xx otherwise is a request that cannot be answered as it stands.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """A request that gets an error for an answer.

    Attributes:
        status: of the response.
        message: what was wrong, what is allowed, what comes nearest.
        param: the field that is to blame, as a path with dots.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The answer, as OpenAI has it."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def renamed(self, names: Mapping[str, str]) -> Refusal:
        """The same in the words of a route that calls fields otherwise; what a client has named itself stays so."""
        new = names.get((self.param or "").partition(".")[0])
        if self.param is None or new is None or self.code in ("unsupported_parameter", "unknown_parameter"):
            return self
        message = self.message.replace(f"{self.param}:", f"{new}:")
        return Refusal(self.status, message, param=new, code=self.code, headers=self.headers)

    @property
    def outcome(self) -> str:
        """How the request is counted."""
        named = {429: "queue_full", 504: "deadline", 503: "unavailable", 499: "cancelled"}
        return named.get(self.status, "failed" if self.status >= 500 else "refused")


def client_gone() -> Refusal:
    """The end of a request whose client has gone: nobody reads it, but it is counted."""
    return Refusal(499, "the client closed the connection", code="client_gone")


#: What Python's callers are told, and what a request says in its place.
_WORDS = {
    r" of decoders\.constraints[\w.]*": "",
    r"decoders\.json_schema(?!\w)": 'a response_format of type "json_schema"',
    r"decoders\.(grammar|regex|choice)(?!\w)": r'a response_format of type "\1"',
    r"(?<!\w)strict=False": '"strict": false',
    r"(?<!\w)grammar=": "response_format",
    r"(?<!\w)thinking=": "thinking_budget",
    r"(?<!\w)assistant_model=": "a draft model (--assistant)",
    r"(?<!\w)max_new_tokens=?(?!\w)": "max_tokens",
    r"raise the setting or": "or",
    r", or free what decoders\.release.*": "",
}


def in_words_of_requests(text: str) -> str:
    """A message for callers of Python in the words of requests."""
    for pattern, words in _WORDS.items():
        text = re.sub(pattern, words, text)
    return text


def refusal(error: BaseException, retry_after: int = 1) -> Refusal:
    """The refusal for `error`. Of an unexpected one the client learns only that it happened; the log has the rest.

    Args:
        retry_after: seconds after which a request that found the queue full may come again.
    """
    if isinstance(error, Refusal):
        return error
    text = in_words_of_requests(str(error))
    if isinstance(error, QueueFull):
        return Refusal(429, text, code="queue_full", headers={"Retry-After": str(retry_after)})
    if isinstance(error, DeadlineError):
        return Refusal(504, text, param="deadline", code="deadline_exceeded")
    if isinstance(error, CancelledError):
        return Refusal(503, f"{text}: the server is shutting down", code="cancelled", headers={"Retry-After": "5"})
    if isinstance(error, CacheMemoryError):
        return Refusal(503, text, code="out_of_memory", headers={"Retry-After": "5"})
    if isinstance(error, ContextLengthError):
        return Refusal(400, text, code="context_length_exceeded")
    if isinstance(error, GrammarError):
        param = "tools" if text.startswith(("tools:", "calls of functions:")) else "response_format"
        return Refusal(400, text, param=param, code="invalid_grammar")
    if isinstance(error, UnknownNameError):
        named = "strategy" if error.kind == "strategy" else None
        return Refusal(400, text, param=named, code=f"unknown_{error.kind.replace(' ', '_')}")
    if isinstance(error, DecodersError) and isinstance(error, ValueError):
        return Refusal(400, text, code="invalid_value")
    log.error("a request failed", exc_info=error)
    return Refusal(500, "the request failed on the server; its log says why", code="internal_error")


B = TypeVar("B", bound=Asked)


def parsed(kind: type[B], content: bytes, checks: Mapping[str, Callable[[list[Any]], None]] | None = None) -> B:
    """The body of a request.

    Args:
        checks: what refuses lists that are too long, by the names of their fields, before their items are looked at.

    Raises:
        Refusal: it is no JSON, or a field is unknown, missing or has a value out of range.
    """
    try:
        return kind.model_validate_json(content, context=checks)
    except ValidationError as error:
        every = error.errors(include_url=False, include_context=False)
        raise _explained(kind, _most_telling([dict(each) for each in every]), error.error_count()) from error
    except OverflowError as error:  # pydantic before 2.12, of a whole number that no float comes near
        raise Refusal(400, "a number in the body is out of range", code="invalid_value") from error


def _most_telling(every: list[dict[str, Any]]) -> dict[str, Any]:
    """The error to explain: of a union's branches, that of the one that validated furthest."""
    unknown = next((each for each in every if each["type"] == "extra_forbidden"), None)
    if unknown is not None:  # a field that is missing may be there under a wrong name: that is what helps
        return unknown
    first = every[0]["loc"]
    branch = next((place for place, step in enumerate(first) if _is_label(step)), len(first))
    alike = [each for each in every if each["loc"][:branch] == first[:branch]]

    def progress(error: dict[str, Any]) -> tuple[bool, int, list[int]]:
        return not _is_mismatch(error), len(error["loc"]), [step for step in error["loc"] if isinstance(step, int)]

    return max(alike, key=progress)


def _is_mismatch(error: dict[str, Any]) -> bool:
    """Whether a value has not the shape of a branch of a union."""
    loc, kind = error["loc"], error["type"]
    return bool(loc) and _is_label(loc[-1]) and (kind.endswith("_type") or kind == "literal_error")


def _explained(kind: type[Asked], error: dict[str, Any], count: int) -> Refusal:
    place = [shortened(str(step), 100) for step in error["loc"] if not _is_label(step)]
    for nested in (["response_format"], ["text", "format"]):
        if place[: len(nested)] == nested:
            del place[len(nested) : len(nested) + 1]  # pydantic says which kind of format it is
    param, name = ".".join(place) or None, place[-1] if place else ""
    more = f" ({count - 1} more)" if count > 1 and error["type"] == "extra_forbidden" else ""
    if error["type"] == "json_invalid":
        return Refusal(400, f"the body is no JSON: {error['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    if error["type"] == "extra_forbidden":
        if len(place) == 1 and name in kind.instead:
            return Refusal(
                400, f"{name} is not supported: {kind.instead[name]}", param=param, code="unsupported_parameter"
            )
        known = _fields(kind, place[:-1])
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        listed = f"Known: {', '.join(sorted(known))}." if known else ""
        return Refusal(
            400, f"unknown field {param!r}{more}. {hint}{listed}".rstrip(), param=param, code="unknown_parameter"
        )
    if error["type"] == "missing":
        return Refusal(400, f"{param} is missing", param=param, code="missing_parameter")
    message = error["msg"].replace("a valid dictionary", "an object")
    value = shortened(json.dumps(error["input"], ensure_ascii=False)) if param else ""
    if _is_mismatch(error) and name in SHAPES:
        message = f"{SHAPES[name]} is needed, not {value}"
    elif param and error["type"].endswith("_type"):
        message = f"{message}, not {value}"
    return Refusal(400, f"{param or 'the body'}: {message}", param=param, code="invalid_value")


#: Names that pydantic puts into a path for the branch of a union.
_LABELS = {"str", "bool", "constrained-str", "FlatChoice", "ToolChoice"}


def _is_label(step: Any) -> bool:
    return isinstance(step, str) and ("[" in step or "(" in step or step in _LABELS)


def _fields(kind: type[BaseModel], place: list[str]) -> list[str]:
    models = [kind]
    for step in place:
        inner: list[type[BaseModel]] = []
        for model in models:
            if step in model.model_fields:
                inner += _models(model.model_fields[step].annotation)
        models = inner or models
    return sorted({field.alias or name for model in models for name, field in model.model_fields.items()})


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for inner in typing.get_args(annotation) for model in _models(inner)]
