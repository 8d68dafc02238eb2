"""``POST /v1/completions``: text that continues a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .answers import ChoicesAnswer, GrowingChoice, TextToken, joined
from .bodies import CompletionBody
from .grammars import wanted_of
from .limits import Arrival
from .refusals import Refusal, wrong
from .service import Service
from .texts import Choice, named

#: Number of new tokens if the body sets none, as in OpenAI's API.
DEFAULT_TOKENS = 16


def start(service: Service, body: CompletionBody, arrival: Arrival) -> Completion:
    """Submits a request's choices and returns the answer. Raises Refusal, and the errors of :meth:`decoders.Scheduler.submit`."""
    if body.echo and body.logprobs is not None:
        message = "echo with logprobs is not supported: there are no log probabilities of prompts"
        raise Refusal(400, message, param="echo", code="invalid_value")
    service.check_count(body, len(body.prompts))  # checked before any prompt is prepared
    prompts = [_ids(service, prompt) for prompt in body.prompts]
    job = service.start("cmpl-", body, prompts, arrival, wanted_of(body, service.conversations.style), DEFAULT_TOKENS)
    return Completion(service, body, job)


def _ids(service: Service, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        service.check_length(prompt)
        tokens: list[int] = service.tokenizer(prompt).input_ids
        return tokens
    size = len(service.tokenizer)
    unknown = next((token for token in prompt if not 0 <= token < size), None)
    if unknown is not None:
        raise wrong("prompt", f"{unknown} is not a token id from 0 to {size - 1}")
    return prompt


class Completion(ChoicesAnswer):
    """The answer to a request for completions."""

    kind = chunk_kind = "text_completion"
    body: CompletionBody

    def complete(self, choice: Choice) -> dict[str, Any]:
        growing = self.growing(choice)
        spans, tokens = growing.read(ended=True)
        text = self._echoed(choice) + joined(spans)
        return self._choice(growing, text, tokens, growing.finish_reason) | self.warnings(choice) | self.details(spans)

    def opening(self, choice: Choice) -> list[dict[str, Any]]:
        echo = self._echoed(choice)
        return [{"index": choice.index, "text": echo, "logprobs": None, "finish_reason": None}] if echo else []

    def pieces(self, growing: GrowingChoice, ended: bool) -> list[dict[str, Any]]:
        spans, tokens = growing.read(ended)
        if not spans and not tokens and not ended:
            return []
        reason = growing.finish_reason if ended else None
        warnings = self.warnings(growing.choice) if ended else {}
        return [self._choice(growing, joined(spans), tokens, reason) | warnings | self.details(spans)]

    def _choice(
        self, growing: GrowingChoice, text: str, tokens: Sequence[TextToken], reason: str | None
    ) -> dict[str, Any]:  # fmt: skip
        shown = self._logprobs(tokens) if self.body.logprobs is not None else None
        return {"index": growing.choice.index, "text": text, "logprobs": shown, "finish_reason": reason}

    def _echoed(self, choice: Choice) -> str:
        if not self.body.echo:
            return ""
        prompt = self.body.prompts[choice.index // (self.body.n or 1)]
        if isinstance(prompt, str):
            return prompt
        text: str = self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)  # type: ignore[assignment]
        return text

    def _logprobs(self, tokens: Sequence[TextToken]) -> dict[str, Any]:
        return {
            "tokens": [_key(token.data) for token in tokens],
            "token_logprobs": [token.logprobs.logprob for token in tokens],
            "top_logprobs": [self._likeliest(token) for token in tokens],
            "text_offset": [token.begin for token in tokens],
        }

    def _likeliest(self, chosen: TextToken) -> dict[str, float]:
        """The log probabilities of the likeliest tokens and of the chosen token, by the tokens' names, likeliest first."""
        values = {_key(chosen.data): chosen.logprobs.logprob}
        for token, value in chosen.logprobs.top:
            if token != chosen.logprobs.token:
                values.setdefault(_key(self.service.spelling.of(token)), value)
        return dict(sorted(values.items(), key=lambda pair: -pair[1]))


def _key(data: bytes) -> str:
    """The name of a token in OpenAI's API: the token's text, or ``bytes:`` and its bytes if it holds a part of a character."""
    name = named(data)
    return name if name.encode() == data else f"bytes:{name}"
