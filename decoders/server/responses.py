"""``POST /v1/responses``: the next items of a conversation, which the server keeps."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .answers import Growing, TextToken, event
from .chat import Conversing, submitted
from .limits import Arrival
from .refusals import Refusal
from .response_bodies import ResponseBody, TurnBody
from .service import Service
from .texts import Choice
from .turns import Piece

#: Bytes of all responses that are kept, with their conversations.
KEPT_BYTES = 64 << 20


@dataclass(frozen=True)
class _Kept:
    """A response, and the items of its conversation, its own at the end, both as JSON.

    Attributes:
        owner: whose it is, of :meth:`Arrival.salt`.
    """

    owner: str
    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items)


class Kept:
    """Responses that can be asked for again, or gone on from; the least recently used go. For any number of threads.

    Args:
        most: bytes of them all.
    """

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self.most, self.size = most, 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def keep(self, owner: str, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keeps a response of `owner`, unless it is larger than all may be."""
        kept = _Kept(owner, json.dumps(response).encode(), json.dumps(items).encode())
        with self._lock:
            self._kept[response["id"]] = kept
            self.size += kept.size
            while self.size > self.most:
                self.size -= self._kept.popitem(last=False)[1].size

    def response(self, owner: str, id: str) -> dict[str, Any]:
        """The response of `owner` with that id.

        Raises:
            Refusal: there is none.
        """
        response: dict[str, Any] = json.loads(self._found(owner, id).response)
        return response

    def items(self, owner: str, id: str) -> list[dict[str, Any]]:
        """The items of its conversation, its own at the end.

        Raises:
            Refusal: there is none.
        """
        param = "previous_response_id"
        items: list[dict[str, Any]] = json.loads(self._found(owner, id, param, "previous_response_not_found").items)
        return items

    def delete(self, owner: str, id: str) -> None:
        """Forgets a response.

        Raises:
            Refusal: there is none.
        """
        kept = self._found(owner, id)
        with self._lock:
            if self._kept.pop(id, None) is not None:
                self.size -= kept.size

    def _found(self, owner: str, id: str, param: str | None = None, code: str = "response_not_found") -> _Kept:
        with self._lock:
            kept = self._kept.get(id)
            if kept is None or kept.owner != owner:
                message = (
                    f"Response with id {id!r} not found: it was not stored, is another client's, or had to make room"
                )
                raise Refusal(404, message, param=param, code=code)
            self._kept.move_to_end(id)
            return kept


def conversation(kept: Kept, body: ResponseBody, arrival: Arrival) -> TurnBody:
    """The request of a conversation that `body` stands for.

    Raises:
        Refusal: there is no such previous response, or an item is not supported.
    """
    previous = body.previous_response_id
    earlier = kept.items(arrival.salt(body.cache_salt), previous) if previous is not None else []
    return body.chat(earlier)


def start(kept: Kept, service: Service, body: TurnBody, arrival: Arrival) -> Response:
    """Submits what is asked for.

    Raises:
        Refusal, and what :meth:`decoders.Scheduler.submit` raises.
    """
    return Response(kept, service, body, *submitted(service, body, arrival, "resp_"))


class Response(Conversing):
    """An answer of this route: items, which events tell of while they grow.

    Args:
        kept: where it is kept.

    Attributes:
        output: the items so far.
    """

    body: TurnBody

    def __init__(self, kept: Kept, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept = kept
        self.output: list[dict[str, Any]] = []
        self._number = 0  # of the next event
        self._open: tuple[str, int] | None = None  # kind and number of the item that grows
        self._logprobs: list[dict[str, Any]] = []

    def first_events(self) -> bytes:
        return b"".join(
            self._event(kind, response=self._response("in_progress")) for kind in ("created", "in_progress")
        )

    def next_events(self, growing: Growing, ended: bool) -> bytes:
        turn = self.turn(growing)
        pieces, _, tokens = turn.read(ended)
        content = b"".join(self._grow(piece, growing, tokens) for piece in pieces)
        if ended:
            if not any(item["type"] != "reasoning" for item in self.output):
                content += self._grow(Piece("text", ""), growing, tokens)
            content += self._close("incomplete" if turn.finish_reason == "length" else "completed")
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

    def complete(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError("a response has items")

    opening = pieces = complete  # type: ignore[assignment]

    def _event(self, kind: str, **fields: Any) -> bytes:
        name, number = f"response.{kind}", self._number
        self._number += 1
        return event({"type": name, "sequence_number": number, **fields}, name)

    def _grow(self, piece: Piece, growing: Growing, tokens: Sequence[TextToken]) -> bytes:
        """Adds to the item that grows, or begins another."""
        content = b""
        if self._open != (piece.kind, piece.number):
            content = self._close("completed") + self._begin(piece, growing)
        item, place = self.output[-1], {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        match piece.kind:
            case "arguments":
                item["arguments"] += piece.text
                return content + (
                    self._event("function_call_arguments.delta", **place, delta=piece.text) if piece.text else b""
                )
            case "thought":
                item["content"][0]["text"] += piece.text
                return content + self._event("reasoning_text.delta", **place, content_index=0, delta=piece.text)
        entries = self.logprobs(tokens) if self.body.logprobs else []
        self._logprobs += entries
        item["content"][0]["text"] += piece.text
        if not piece.text:
            return content
        return content + self._event("output_text.delta", **place, content_index=0, delta=piece.text, logprobs=entries)

    def _begin(self, piece: Piece, growing: Growing) -> bytes:
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
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item = {
                    "id": f"msg_{own}",
                    "type": "message",
                    "status": "in_progress",
                    "role": "assistant",
                    "content": [],
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

    def _close(self, status: str) -> bytes:
        """Ends the item that grows."""
        if self._open is None:
            return b""
        kind, self._open = self._open[0], None
        item, index = self.output[-1], len(self.output) - 1
        item["status"] = status
        place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if kind == "arguments":
            content = self._event(
                "function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
            )
        else:
            part, place = item["content"][0], place | {"content_index": 0}
            if kind == "text":
                part["logprobs"] = self._logprobs
                content = self._event("output_text.done", **place, text=part["text"], logprobs=self._logprobs)
            else:
                content = self._event("reasoning_text.done", **place, text=part["text"])
            content += self._event("content_part.done", **place, part=part)
        return content + self._event("output_item.done", output_index=index, item=item)

    def _finished(self) -> dict[str, Any]:
        """The response once all is written. It is kept, unless the client does not want that."""
        (choice,) = self.job.choices
        incomplete = self._turns[choice.index].finish_reason == "length"
        response = self._response("incomplete" if incomplete else "completed") | {"usage": self._usage()}
        if incomplete:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = time.time()
        response |= self.job.metrics() | self.warnings(choice)
        if self.body.asked.store is not False:
            owner = self.job.arrival.salt(self.body.cache_salt)
            self._kept.keep(owner, response, [*self.body.items, *self.output])
        return response

    def _usage(self) -> dict[str, Any]:
        usage = self.usage()
        details = {"input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0}}
        details["output_tokens_details"] = usage["completion_tokens_details"]
        tokens = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        return {**tokens, "total_tokens": usage["total_tokens"], **details, "decoders": usage["decoders"]}

    def _response(self, status: str) -> dict[str, Any]:
        asked, job = self.body.asked, self.job
        same = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user", "metadata",
                "safety_identifier", "prompt_cache_key", "service_tier")  # fmt: skip
        given = asked.model_dump(by_alias=True)
        return {
            "id": job.id, "object": "response", "created_at": job.created, "status": status, "background": False, "error": None,
            "incomplete_details": None, "model": self.service.name, "output": self.output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False, "tool_choice": given["tool_choice"] or "auto",
            "tools": given["tools"] or [], "text": given["text"] or {"format": {"type": "text"}},
            "reasoning": given["reasoning"] or {"effort": None, "summary": None}, "store": asked.store is not False,
            "top_logprobs": asked.top_logprobs or 0, "truncation": "disabled", "usage": None, "completed_at": None,
            **{name: given[name] for name in same},
        }  # fmt: skip
