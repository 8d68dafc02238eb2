"""``POST /v1/responses``: the next items of a conversation. The server stores conversations."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

from ..errors import shortened
from .answers import GrowingChoice, TextToken, event
from .chat import Conversing, submitted
from .limits import Arrival
from .refusals import Refusal, wrong
from .response_bodies import ResponseBody, TurnBody
from .service import LARGE, Service
from .texts import Span
from .turns import Piece, Turn

#: Greatest total size in bytes of the kept responses, with their conversations.
KEPT_BYTES = 64 << 20
#: Who may read a response: the digest of the client's API key, and the request's cache salt (:meth:`Arrival.salt`).
Owner = tuple[str, str]


def owner_of(arrival: Arrival, cache_salt: str | None) -> Owner:
    """The owner of the response to a request."""
    return arrival.client, arrival.salt(cache_salt)


@dataclass(frozen=True)
class KeptResponse:
    """A response, and all items of its conversation including the response's output, both as JSON."""

    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items)


class Kept:
    """Stores responses, which clients can retrieve or continue. Thread-safe.

    If space runs out, the client with the most bytes loses its least recently used responses.

    Args:
        most: greatest total size in bytes.
    """

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._kept: defaultdict[str, OrderedDict[tuple[str, str], KeptResponse]] = defaultdict(OrderedDict)  # by client
        self._sizes = Counter[str]()

    @property
    def size(self) -> int:
        """The total size in bytes."""
        return sum(self._sizes.values())

    def keep(self, owner: Owner, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Stores a response of `owner` and the items of its conversation, unless they alone exceed the greatest total size."""
        kept = KeptResponse(json.dumps(response).encode(), json.dumps(items).encode())
        if kept.size > self.most:
            return
        client, salt = owner
        with self._lock:
            self._kept[client][salt, response["id"]] = kept
            self._sizes[client] += kept.size
            while self.size > self.most:
                ((largest, _),) = self._sizes.most_common(1)
                self._sizes[largest] -= self._kept[largest].popitem(last=False)[1].size

    def delete(self, owner: Owner, id: str) -> None:
        """Deletes a response; raises the error of :meth:`find`."""
        self.find(owner, id)
        client, salt = owner
        with self._lock:
            if (kept := self._kept[client].pop((salt, id), None)) is not None:
                self._sizes[client] -= kept.size

    def find(self, owner: Owner, id: str, param: str | None = None, code: str = "response_not_found") -> KeptResponse:
        """The response of `owner` with this id. Raises Refusal, with `param` and `code`, if it was not found."""
        client, salt = owner
        with self._lock:
            kept = self._kept[client].get((salt, id))
            if kept is None:
                shown = shortened(repr(id))
                message = (
                    f"Response with id {shown} not found: it was not stored, belongs to another client, "
                    "or was removed to make room"
                )
                raise Refusal(404, message, param=param, code=code)
            self._kept[client].move_to_end((salt, id))
            return kept


def conversation(kept: Kept, service: Service, body: ResponseBody, arrival: Arrival) -> TurnBody:
    """Converts `body` to a chat request, with the items of the conversation that it continues.

    Raises:
        Refusal: the previous response does not exist, its conversation is larger than a body may be, or an item is not supported.
    """
    previous = body.previous_response_id
    if previous is None:
        return body.chat([])
    owner = owner_of(arrival, body.cache_salt)
    content = kept.find(owner, previous, "previous_response_id", "previous_response_not_found").items
    if len(content) > service.limits.body:
        message = (
            f"its conversation is larger than the body of a request may be ({len(content):,} bytes; the limit is "
            f"{service.limits.body:,}): send the items that matter as input"
        )
        raise wrong("previous_response_id", message, "context_length_exceeded")
    return body.chat(json.loads(content), large=len(content) > LARGE)


def start(kept: Kept, service: Service, body: TurnBody, arrival: Arrival) -> Response:
    """Submits `body` to the scheduler and returns the response to be written. Raises Refusal, and errors of ``Scheduler.submit``."""
    return Response(kept, service, body, *submitted(service, body, arrival, "resp_"))


class Response(Conversing):
    """The answer to ``POST /v1/responses``: items (thoughts, messages, function calls), streamed as events while they grow.

    Args:
        kept: the store in which the response is kept.

    Attributes:
        output: the answer's items so far.
    """

    body: TurnBody

    def __init__(self, kept: Kept, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept = kept
        self.output: list[dict[str, Any]] = []
        self._number = 0  # sequence number of the next event
        self._open: tuple[str, int] | None = None  # `kind` and `number` of the growing item's pieces
        self._tokens: list[TextToken] = []  # tokens whose log probabilities were not sent yet
        self._logprobs: list[dict[str, Any]] = []
        self._spans: list[Span] = []

    def first_events(self) -> bytes:
        return b"".join(
            self._event(kind, response=self._response("in_progress")) for kind in ("created", "in_progress")
        )

    def next_events(self, growing: GrowingChoice, ended: bool) -> bytes:
        turn = self.turn(growing)
        pieces, spans, tokens = turn.read(ended)
        self._spans += spans if self.body.drafted else ()
        self._tokens += tokens
        content = b"".join(self._grow(piece, growing, ended) for piece in pieces)
        if ended:
            if not any(item["type"] != "reasoning" for item in self.output):
                content += self._grow(Piece("text", ""), growing, ended)
            content += self._close("incomplete" if turn.finish_reason == "length" else "completed", turn, ended)
        return content

    def last_events(self) -> bytes:
        response = self._finished()
        return self._event(response["status"], response=response)

    def error_event(self, refusal: Refusal) -> bytes:
        error = {"code": "server_error", "message": refusal.message}
        return self._event("failed", response=self._response("failed") | {"error": error})

    def whole(self) -> dict[str, Any]:
        (choice,) = self.job.choices
        self.next_events(self.growing(choice), True)
        return self._finished()

    def _event(self, kind: str, **fields: Any) -> bytes:
        name, number = f"response.{kind}", self._number
        self._number += 1
        return event({"type": name, "sequence_number": number, **fields}, name)

    def _new_logprobs(self, turn: Turn, number: int, ended: bool) -> list[dict[str, Any]]:
        """Removes the tokens of one text from `_tokens`, and returns their log probabilities. number: the text's index in the turn."""
        if not self.body.logprobs:
            return []
        own = [turn.part_of(token, ended) == number for token in self._tokens]
        entries = self.logprobs([*compress(self._tokens, own)])
        later = (token for token, removed in zip(self._tokens, own, strict=True) if not removed)
        begin, _ = turn.places.get(number, (0, 0))
        self._tokens = [token for token in later if token.begin >= begin]
        self._logprobs += entries
        return entries

    def _grow(self, piece: Piece, growing: GrowingChoice, ended: bool) -> bytes:
        """Adds a piece to the growing item or to a new item, and returns the encoded events for the change."""
        content = b""
        if self._open != (piece.kind, piece.number):
            content = self._close("completed", self.turn(growing), ended) + self._begin(piece, growing)
        item, place = self.output[-1], {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        more: dict[str, Any] = {}
        if piece.kind == "arguments":
            name = "function_call_arguments"
            item["arguments"] += piece.text
        else:
            part = item["content"][0]
            part["text"] += piece.text
            name, more["content_index"] = part["type"], 0
        if piece.kind == "text":
            more["logprobs"] = self._new_logprobs(self.turn(growing), piece.number, ended)
        if not piece.text and not more.get("logprobs"):
            return content
        return content + self._event(f"{name}.delta", **place, delta=piece.text, **more)

    def _begin(self, piece: Piece, growing: GrowingChoice) -> bytes:
        self._open, part, own = (piece.kind, piece.number), dict[str, Any](), secrets.token_hex(12)
        match piece.kind:
            case "arguments":
                call = self.turn(growing).calls[piece.number]
                item: dict[str, Any] = {
                    "id": f"fc_{own}", "type": "function_call", "status": "in_progress", "arguments": "", "call_id": call.id,
                    "name": call.name,
                }  # fmt: skip
            case "thought":
                part = {"type": "reasoning_text", "text": ""}
                item = {"id": f"rs_{own}", "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
            case _:
                self._logprobs = []
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item = {
                    "id": f"msg_{own}",
                    "type": "message",
                    "role": "assistant",
                    "content": [],
                    "status": "in_progress",
                }
        index = len(self.output)
        content = self._event("output_item.added", output_index=index, item=item)
        self.output.append(item)
        if part:
            content += self._event(
                "content_part.added", item_id=item["id"], output_index=index, content_index=0, part=part
            )
            item["content"] = [part]
        return content

    def _close(self, status: str, turn: Turn, ended: bool) -> bytes:
        """Ends the growing item and returns the encoded events for its end; empty if no item is growing."""
        if self._open is None:
            return b""
        (kind, number), self._open = self._open, None
        item, index, content = self.output[-1], len(self.output) - 1, b""
        item["status"] = status
        place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if kind == "text" and (entries := self._new_logprobs(turn, number, ended)):  # entries of tokens without text
            content = self._event("output_text.delta", **place, content_index=0, delta="", logprobs=entries)
        if kind == "arguments":
            content += self._event(
                "function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
            )
        else:
            part, place = item["content"][0], place | {"content_index": 0}
            if kind == "text":
                part["logprobs"] = self._logprobs
            own = {name: part[name] for name in ("text", "logprobs") if name in part}
            content += self._event(f"{part['type']}.done", **place, **own)
            content += self._event("content_part.done", **place, part=part)
        return content + self._event("output_item.done", output_index=index, item=item)

    def _finished(self) -> dict[str, Any]:
        """Returns the complete response, and keeps it unless the request has ``store: false``."""
        (choice,) = self.job.choices
        incomplete = self._turns[choice.index].finish_reason == "length"
        response = self._response("incomplete" if incomplete else "completed") | {"usage": self._usage()}
        if incomplete:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = time.time()
        response |= self.job.metrics() | self.warnings(choice) | self.details(self._spans)
        if self.body.asked.store is not False:
            owner = owner_of(self.job.arrival, self.body.cache_salt)
            self._kept.keep(owner, response, [*self.body.items, *self.output])
        return response

    def _usage(self) -> dict[str, Any]:
        usage = self.usage()
        details = {"input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0}}
        details["output_tokens_details"] = usage["completion_tokens_details"]
        tokens = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        return {**tokens, "total_tokens": usage["total_tokens"], **details, "decoders": usage["decoders"]}

    @cached_property
    def _given(self) -> dict[str, Any]:
        """The request's fields that a response repeats, without the input."""
        return self.body.asked.model_dump(by_alias=True, exclude={"input"})

    def _response(self, status: str) -> dict[str, Any]:
        asked, job, given = self.body.asked, self.job, self._given
        same = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user", "metadata",
                "safety_identifier", "prompt_cache_key", "service_tier")  # fmt: skip
        return {
            "id": job.id, "object": "response", "created_at": job.created, "status": status, "background": False, "error": None,
            "incomplete_details": None, "model": self.service.name, "output": self.output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False, "tool_choice": given["tool_choice"] or "auto",
            "tools": given["tools"] or [], "text": given["text"] or {"format": {"type": "text"}},
            "reasoning": given["reasoning"] or {"effort": None, "summary": None}, "store": asked.store is not False,
            "top_logprobs": asked.top_logprobs or 0, "truncation": "disabled", "usage": None, "completed_at": None,
            **{name: given[name] for name in same},
        }  # fmt: skip
