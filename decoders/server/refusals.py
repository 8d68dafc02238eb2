"""Errors in OpenAI's form, for requests that are refused or fail. The HTTP status says whether the client or the server is at fault.

Errors in a body are explained here, too: the field, its value and the nearest valid value.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

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
from .bodies import SHAPES, BaseBody

if TYPE_CHECKING:
    from starlette.responses import JSONResponse

log = logging.getLogger("decoders.server")

#: Maps an HTTP status to the ``type`` of the error. All other 4xx have the type ``invalid_request_error``.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """Raised for a request that is answered with an error.

    Attributes:
        status: HTTP status of the response.
        message: what was wrong, what is allowed, and the nearest valid value.
        param: the wrong field, as a path with dots.
        code: error code for programs.
        headers: headers of the response.
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
        """The error in OpenAI's form."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The HTTP response."""
        from starlette.responses import JSONResponse

        return JSONResponse(self.body, self.status, headers=self.headers)

    def renamed(self, names: Mapping[str, str]) -> Refusal:
        """This refusal with field names translated by `names`. Names of unknown fields stay as the client wrote them."""
        new = names.get((self.param or "").partition(".")[0])
        if self.param is None or new is None or self.code in ("unsupported_parameter", "unknown_parameter"):
            return self
        message = self.message.replace(f"{self.param}:", f"{new}:")
        return Refusal(self.status, message, param=new, code=self.code, headers=self.headers)

    @property
    def outcome(self) -> str:
        """The value of the metrics' label ``outcome`` for this refusal."""
        named = {429: "queue_full", 504: "deadline", 503: "unavailable", 499: "cancelled"}
        return named.get(self.status, "failed" if self.status >= 500 else "refused")


def wrong(param: str, message: str, code: str = "invalid_value") -> Refusal:
    """The refusal of a wrong field. `message` is put after the field's name."""
    return Refusal(400, f"{param}: {message}", param=param, code=code)


def client_gone() -> Refusal:
    """The refusal of a request whose client has disconnected: nobody reads it, but metrics count it."""
    return Refusal(499, "the client closed the connection", code="client_gone")


#: Phrases of messages for callers in Python, and their replacements for HTTP clients.
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
    """A message for callers in Python, reworded for HTTP clients."""
    for pattern, words in _WORDS.items():
        text = re.sub(pattern, words, text)
    return text


def refusal(error: BaseException) -> Refusal:
    """The refusal for `error`. An unexpected error is logged, and the client learns only that an error occurred."""
    if isinstance(error, Refusal):
        return error
    text = in_words_of_requests(str(error))
    if isinstance(error, QueueFull):
        return Refusal(429, text, code="queue_full", headers={"Retry-After": "2"})
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
        named = {"strategy": "strategy", "grammar": "response_format"}.get(error.kind)
        return Refusal(400, text, param=named, code=f"unknown_{error.kind.replace(' ', '_')}")
    if isinstance(error, DecodersError) and isinstance(error, ValueError):
        return Refusal(400, text, code="invalid_value")
    log.error("a request failed", exc_info=error)
    return Refusal(500, "the request failed on the server; its log says why", code="internal_error")


B = TypeVar("B", bound=BaseBody)


def parsed(kind: type[B], content: bytes) -> B:
    """Parses the body of a request. Raises Refusal: the body is not JSON, or a field is unknown, missing or out of range."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        every = error.errors(include_url=False, include_context=False)
        raise _explained(kind, _most_telling([dict(each) for each in every]), error.error_count()) from error
    except OverflowError as error:  # pydantic before 2.12 raises this for an integer that exceeds a float
        raise Refusal(400, "the body has an integer that is too large", code="invalid_value") from error


def _most_telling(every: list[dict[str, Any]]) -> dict[str, Any]:
    """The error of pydantic that the refusal explains: an unknown field, or else the error of the union branch that got furthest."""
    unknown = next((each for each in every if each["type"] == "extra_forbidden"), None)
    # A missing field may have been sent under a wrong name, and the error about this name explains more.
    if unknown is not None:
        return unknown

    def progress(error: dict[str, Any]) -> tuple[bool, int, list[int]]:
        return not _is_mismatch(error), len(error["loc"]), [step for step in error["loc"] if isinstance(step, int)]

    return max(every, key=progress)


def _is_mismatch(error: dict[str, Any]) -> bool:
    """Whether the error says that a value does not have the shape of a union's branch."""
    loc, kind = error["loc"], error["type"]
    return bool(loc) and _is_label(loc[-1]) and (kind.endswith("_type") or kind == "literal_error")


def _explained(kind: type[BaseBody], error: dict[str, Any], count: int) -> Refusal:
    place = [shortened(str(step), 100) for step in error["loc"] if not _is_label(step)]
    for nested in (["response_format"], ["text", "format"]):
        if place[: len(nested)] == nested:
            del place[len(nested) : len(nested) + 1]  # after these names, pydantic's path has the format's type
    param, name = ".".join(place) or None, place[-1] if place else ""
    more = f" ({count - 1} more)" if count > 1 and error["type"] == "extra_forbidden" else ""
    if error["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {error['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
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
        message = f"must be {SHAPES[name]}, not {value}"
    elif param and message.startswith(("Input should", "String should")):
        message = f"{message}, not {value}"
    return Refusal(400, f"{param or 'the body'}: {message}", param=param, code="invalid_value")


#: Names of union branches that pydantic adds to the path of an error.
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
