"""``POST /v1/completions``: text that continues a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.request_output import TokenLogprobs
from .answers import Answer, Growing, joined
from .bodies import CompletionBody
from .formats import spec_of
from .jobs import Choice, Job
from .refusals import Refusal
from .service import Service

#: New tokens where a body does not say, as OpenAI has it.
DEFAULT_TOKENS = 16


def start(service: Service, body: CompletionBody) -> Completion:
    """Submits what is asked for.

    Raises:
        Refusal, and what :meth:`decoders.Scheduler.submit` raises.
    """
    if body.echo and body.logprobs is not None:
        raise Refusal(
            400, "echo beside logprobs is not supported: prompts have none", param="echo", code="invalid_value"
        )
    prompts = [_ids(service, prompt) for prompt in _prompts(body)]
    job = service.start("cmpl", body, prompts, spec_of(body.response_format), body.logprobs, DEFAULT_TOKENS)
    return Completion(service, body, job)


def _prompts(body: CompletionBody) -> list[str] | list[list[int]]:
    given: Any = body.prompt
    if not given:
        raise Refusal(400, "the prompt is empty", param="prompt", code="invalid_value")
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def _ids(service: Service, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        tokens: list[int] = service.tokenizer(prompt).input_ids
        return tokens
    size = len(service.tokenizer)
    wrong = next((token for token in prompt if not 0 <= token < size), None)
    if wrong is not None:
        raise Refusal(400, f"prompt: {wrong} is no token id from 0 to {size - 1}", param="prompt", code="invalid_value")
    return prompt


class Completion(Answer):
    """An answer of this route."""

    kind = chunk_kind = "text_completion"
    body: CompletionBody

    def __init__(self, service: Service, body: CompletionBody, job: Job) -> None:
        super().__init__(service, body, job)
        self._offsets: dict[int, int] = {}

    def complete(self, choice: Choice) -> dict[str, Any]:
        growing = self.growing(choice)
        spans, logprobs = growing.read(ended=True)
        text = self._echoed(choice) + joined(spans)
        return self._choice(growing, text, logprobs, growing.finish_reason) | self.details(spans)

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        echo = self._echoed(choice)
        return [{"index": choice.index, "text": echo, "logprobs": None, "finish_reason": None}] if echo else []

    def pieces(self, growing: Growing, ended: bool) -> list[dict[str, Any]]:
        spans, logprobs = growing.read(ended)
        if not spans and not ended:
            return []
        reason = growing.finish_reason if ended else None
        return [self._choice(growing, joined(spans), logprobs, reason) | self.details(spans)]

    def _choice(
        self, growing: Growing, text: str, logprobs: Sequence[TokenLogprobs], reason: str | None
    ) -> dict[str, Any]:  # fmt: skip
        index = growing.choice.index
        shown = self._logprobs(index, logprobs) if self.body.logprobs is not None else None
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}

    def _echoed(self, choice: Choice) -> str:
        if not self.body.echo:
            return ""
        text: str = self.tokenizer.decode(choice.prompt, skip_special_tokens=True)  # type: ignore[assignment]
        return text

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        texts = [self.token_text(each.token) for each in logprobs]
        offset, offsets = self._offsets.get(index, 0), []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [{self.token_text(token): value for token, value in each.top} for each in logprobs],
            "text_offset": offsets,
        }
