"""``POST /v1/chat/completions``: the next message of a conversation, which may be calls of functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .answers import Answer, Growing, TextToken, joined
from .bodies import ChatBody
from .grammars import Calling, wanted_of
from .limits import Arrival
from .reasoning import Reasoning, special_ids
from .refusals import Refusal
from .service import Service
from .texts import Choice, Job, named


def start(service: Service, body: ChatBody, arrival: Arrival) -> Chat:
    """Submits what is asked for.

    Raises:
        Refusal, and what :meth:`decoders.Scheduler.submit` raises.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    conversations = service.conversations
    calling = Calling.of(body, conversations.style)
    variables = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None:
        effort = {"reasoning_effort": body.reasoning_effort, "enable_thinking": body.reasoning_effort != "none"}
        variables = effort | variables
    text = conversations.prompt(body.messages, body.tools or () if calling else (), variables)
    put_in_front = calling is not None and calling.required and calling.style.special
    if put_in_front:
        text += conversations.style.prefix
    service.check_length(text)
    wanted, prompt = wanted_of(body, conversations.style), conversations.ids(text)
    reasoning = None
    if not put_in_front:
        most = service.new_tokens(body, prompt)
        reasoning = Reasoning.of(body, conversations, prompt, service.spelling, most)
    bounded = reasoning is not None and (wanted is not None or reasoning.budget is not None)
    thinking = reasoning.argument if reasoning is not None and bounded else None
    job = service.start("chatcmpl", body, [prompt], arrival, wanted, thinking=thinking)
    return Chat(service, body, job, calling, reasoning)


class Chat(Answer):
    """An answer of this route.

    Attributes:
        calling: what may be called, None if nothing.
        reasoning: how it begins with a thought, None if it does not.
    """

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    body: ChatBody

    def __init__(
        self, service: Service, body: ChatBody, job: Job, calling: Calling | None, reasoning: Reasoning | None = None
    ) -> None:
        super().__init__(service, body, job)
        self.calling, self.reasoning = calling, reasoning
        texts = [calling.style.prefix, calling.style.suffix] if calling is not None else []
        if reasoning is not None:
            texts += map(str, (reasoning.markers.begin, reasoning.markers.end, reasoning.markers.closing or ""))
        self.special = special_ids(service.spelling, *texts) if texts else frozenset()
        self._written: dict[
            int, tuple[str, int, int]
        ] = {}  # text so far; characters sent of the thought and the answer
        self._held: dict[int, str] = {}  # text that may be calls, by choice
        self._sent: dict[int, str] = {}

    def complete(self, choice: Choice) -> dict[str, Any]:
        growing = self.growing(choice)
        spans, tokens = growing.read(ended=True)
        thought, answer = self._split(joined(spans), ended=True)
        content, calls = self._parsed(answer or "")
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or None if calls else content,
            "refusal": None,
        }
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return (
            {
                "index": choice.index,
                "message": message,
                "logprobs": self._logprobs(tokens),
                "finish_reason": self._reason(growing, calls),
            }
            | self.warnings(choice)
            | self.details(spans)
        )

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        return [self._delta(choice, {"role": "assistant", "content": ""})]

    def pieces(self, growing: Growing, ended: bool) -> list[dict[str, Any]]:
        choice = growing.choice
        spans, tokens = growing.read(ended)
        chunks = []
        if self.reasoning is not None:
            written, thought_sent, answer_sent = self._written.get(choice.index, ("", 0, 0))
            written += joined(spans)
            thought, answer = self._split(written, ended)
            new, content = thought[thought_sent:], (answer or "")[answer_sent:]
            self._written[choice.index] = written, len(thought), len(answer or "")
            if new:
                chunks.append(self._delta(choice, {"reasoning_content": new}))
            if self.calling is not None:
                return chunks + self._called(growing, content, tokens, ended)
            if content or tokens:
                chunks.append(self._delta(choice, {"content": content}, tokens) | self.details(spans))
            return [*chunks, self._last(choice, growing.finish_reason)] if ended else chunks
        if self.calling is not None:
            return self._called(growing, joined(spans), tokens, ended)
        if spans or tokens:
            chunks.append(self._delta(choice, {"content": joined(spans)}, tokens) | self.details(spans))
        return [*chunks, self._last(choice, growing.finish_reason)] if ended else chunks

    def _called(
        self, growing: Growing, text: str, tokens: Sequence[TextToken], ended: bool
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Text that is no call is sent as it comes, calls when they are complete."""
        assert self.calling is not None
        choice, index = growing.choice, growing.choice.index
        held = self._held.get(index, "") + text
        count = 0 if ended else self.calling.free(held, bool(self._sent.get(index)))
        chunks: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        if ended:
            before, calls = self._parsed(self._sent.get(index, "") + held)
            count = max(len(before) - len(self._sent.get(index, "")), 0) if calls else len(held)
        if count or tokens:
            chunks.append(self._delta(choice, {"content": held[:count]}, tokens))
            self._sent[index] = self._sent.get(index, "") + held[:count]
        self._held[index] = held[count:]
        chunks += [self._delta(choice, {"tool_calls": [{"index": n, **call}]}) for n, call in enumerate(calls)]
        if ended:
            chunks.append(self._last(choice, self._reason(growing, calls)))
        return chunks

    def _split(self, text: str, ended: bool) -> tuple[str, str | None]:
        return self.reasoning.split(text, ended) if self.reasoning is not None else ("", text)

    def _parsed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        return self.calling.parse(text) if self.calling is not None else (text, [])

    def _reason(self, growing: Growing, calls: Sequence[Any]) -> str:
        """Why a message ended; a function that was named ends it as text does, as OpenAI has it."""
        if not calls or self.calling is None:
            return growing.finish_reason
        return "stop" if self.calling.named else "tool_calls"

    def _last(self, choice: Choice, reason: str) -> dict[str, Any]:
        return self._delta(choice, {}, reason=reason) | self.warnings(choice)

    def _delta(
        self, choice: Choice, delta: dict[str, Any], tokens: Sequence[TextToken] = (), reason: str | None = None
    ) -> dict[str, Any]:  # fmt: skip
        shown = self._logprobs(tokens) if tokens else None
        return {"index": choice.index, "delta": delta, "logprobs": shown, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[TextToken]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        entries = []
        for token in tokens:
            top = [_entry(self.service.spelling.of(each), value) for each, value in token.logprobs.top]
            entries.append({**_entry(token.data, token.logprobs.logprob), "top_logprobs": top})
        return {"content": entries, "refusal": None}


def _entry(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": named(data), "logprob": logprob, "bytes": list(data)}
