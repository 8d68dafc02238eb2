"""``POST /v1/chat/completions``: the next message of a conversation, which may contain function calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .answers import Answer, ChoicesAnswer, GrowingChoice, TextToken
from .arguments import named_tokens
from .bodies import ChatBody
from .grammars import Calling, wanted_of
from .histories import JOINT
from .limits import Arrival
from .reasoning import Reasoning
from .refusals import Refusal
from .service import Service
from .texts import Choice, Job, named
from .turns import Piece, Turn


def start(service: Service, body: ChatBody, arrival: Arrival) -> Chat:
    """Submits a request's choices and returns the answer. Raises Refusal, and the errors of :meth:`decoders.Scheduler.submit`."""
    return Chat(service, body, *submitted(service, body, arrival, "chatcmpl-"))


def submitted(
    service: Service, body: ChatBody, arrival: Arrival, kind: str
) -> tuple[Job, Calling | None, Reasoning | None]:
    """Submits a request's choices to the scheduler.

    Args:
        kind: prefix of the answer's id.

    Returns:
        The request with its choices, the functions that the model may call (None if there are none), and how thoughts (reasoning text)
        are separated from the answer (None if they are not separated).

    Raises:
        Refusal, and the errors of :meth:`decoders.Scheduler.submit`.
    """
    if body.top_logprobs and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    conversations = service.conversations
    calling = Calling.of(body, conversations.style)
    variables = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None:
        effort = {"reasoning_effort": body.reasoning_effort, "enable_thinking": body.reasoning_effort != "none"}
        variables = effort | variables
    seen = list[Any]()
    text = conversations.prompt(body.messages, body.tools or () if calling else (), variables, seen)
    service.check_length(text)
    wanted, (prompt, images) = wanted_of(body, conversations.style), conversations.inputs(text, seen)
    reasoning = Reasoning.of(body, conversations, prompt, service.spelling, service.new_tokens(body, prompt))
    bounded = reasoning is not None and (wanted is not None or reasoning.budget is not None)
    thinking = reasoning.argument if reasoning is not None and bounded else None
    return service.start(kind, body, [prompt], arrival, wanted, thinking=thinking, images=images), calling, reasoning


class Conversing(Answer):
    """An answer that is an assistant's turn.

    Attributes:
        calling: the functions that may be called; None if there are none.
        reasoning: how thoughts (reasoning text) are separated from the answer; None if they are not separated.
    """

    body: ChatBody

    def __init__(
        self, service: Service, body: ChatBody, job: Job, calling: Calling | None, reasoning: Reasoning | None = None
    ) -> None:
        super().__init__(service, body, job)
        self.calling, self.reasoning = calling, reasoning
        texts = [*calling.style.format.texts] if calling is not None else []
        if reasoning is not None:
            texts += map(str, (reasoning.markers.begin, reasoning.markers.end, reasoning.markers.closing or ""))
        self.special = named_tokens(service.conversations.special, texts)
        self._turns: dict[int, Turn] = {}

    def turn(self, growing: GrowingChoice) -> Turn:
        """The :class:`Turn` that parses the text of a choice. Every call for the choice returns the same object."""
        return self._turns.setdefault(growing.choice.index, Turn(growing, self.reasoning, self.calling))

    def usage(self) -> dict[str, Any]:
        return self.job.usage(sum(turn.thought_tokens for turn in self._turns.values()))

    def logprobs(self, tokens: Sequence[TextToken]) -> list[dict[str, Any]]:
        """The log probabilities of tokens in OpenAI's form: an object per token, with its likeliest alternatives."""
        entries = []
        for token in tokens:
            top = [_entry(self.service.spelling.of(each), value) for each, value in token.logprobs.top]
            entries.append({**_entry(token.data, token.logprobs.logprob), "top_logprobs": top})
        return entries


class Chat(Conversing, ChoicesAnswer):
    """The answer to a chat request."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def complete(self, choice: Choice) -> dict[str, Any]:
        turn = self.turn(self.growing(choice))
        _, spans, tokens = turn.read(ended=True)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": turn.text or None if turn.calls else turn.text,
            "refusal": None,
        }
        if turn.thought:
            message["reasoning_content"] = turn.thought
        if turn.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.calls
            ]
        shown, reason = self._logprobs(tokens), turn.finish_reason
        answer = {"index": choice.index, "message": message, "logprobs": shown, "finish_reason": reason}
        return answer | self.warnings(choice) | self.details(spans)

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        return [self._chunk(choice, {"role": "assistant", "content": ""})]

    def pieces(self, growing: GrowingChoice, ended: bool) -> list[dict[str, Any]]:
        choice, turn = growing.choice, self.turn(growing)
        pieces, spans, tokens = turn.read(ended)
        chunks = [self._chunk(choice, self._delta(turn, piece)) for piece in pieces]
        if (tokens or (spans and self.body.drafted)) and not chunks:  # the text of these tokens is held back
            chunks.append(self._chunk(choice, {"content": ""}))
        if chunks:
            chunks[-1] |= {"logprobs": self._logprobs(tokens) if tokens else None} | self.details(spans)
        if ended:
            chunks.append(self._chunk(choice, {}, turn.finish_reason) | self.warnings(choice))
        return chunks

    def _delta(self, turn: Turn, piece: Piece) -> dict[str, Any]:
        if piece.kind != "arguments":
            own = turn.texts if piece.kind == "text" else turn.thoughts
            joint = JOINT if piece.first and piece.number != next(iter(own)) else ""
            return {"content" if piece.kind == "text" else "reasoning_content": joint + piece.text}
        call, head = turn.calls[piece.number], dict[str, Any]()
        function = {"arguments": piece.text}
        if piece.first:
            head, function = {"id": call.id, "type": "function"}, {"name": call.name, "arguments": piece.text}
        return {"tool_calls": [{"index": piece.number, **head, "function": function}]}

    def _chunk(self, choice: Choice, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[TextToken]) -> dict[str, Any] | None:
        return {"content": self.logprobs(tokens), "refusal": None} if self.body.logprobs else None


def _entry(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": named(data), "logprob": logprob, "bytes": list(data)}
