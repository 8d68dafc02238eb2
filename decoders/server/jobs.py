"""A request of a client, and the texts that it asks for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ..serving.generation import Generation


@dataclass
class Choice:
    """One text that is being written.

    Attributes:
        index: in the answer.
        seed: of its noise.
        generation: the request.
        prompt: token ids.
    """

    index: int
    seed: int
    generation: Generation
    prompt: list[int]

    @property
    def stopped_by_length(self) -> bool:
        """Whether it ended since it was as long as it may be."""
        request, tokens = self.generation.call.request, self.generation.tokens
        return len(tokens) >= request.new_tokens and (not tokens or tokens[-1] not in request.stop_tokens)


@dataclass
class Job:
    """A request of a client.

    Attributes:
        id: of the answer.
        created: seconds since 1970.
        choices: its texts.
        stops: stop strings.
        strategy: the name of what decodes it.
    """

    id: str
    choices: list[Choice]
    stops: tuple[str, ...]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def strategy(self) -> str:
        return self.choices[0].generation.call.request.strategy.name

    def cancel(self) -> None:
        """Ends what has not ended."""
        for choice in self.choices:
            choice.generation.cancel()

    def usage(self) -> dict[str, Any]:
        """What it took: OpenAI's figures, and ours under ``decoders``."""
        reports = [each.generation.report for each in self.choices if each.generation.report is not None]
        prompts = {id(each.prompt): len(each.prompt) for each in self.choices}  # n texts share one
        prompt, new = sum(prompts.values()), sum(len(each.generation.tokens) for each in self.choices)
        lengths = [0] * max((len(report.accepted_lengths) for report in reports), default=0)
        for report in reports:
            for place, count in enumerate(report.accepted_lengths):
                lengths[place] += count
        steps = sum(lengths)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": min(sum(sum(report.reused) for report in reports), prompt)},
            "decoders": {
                "strategy": self.strategy,
                "steps": steps,
                "drafted": sum(report.drafted for report in reports),
                "accepted": sum(report.accepted for report in reports),
                "accepted_lengths": lengths,
                "mean_accepted_length": round(sum((n + 1) * count for n, count in enumerate(lengths)) / steps, 4) if steps else 0.0,
                "seeds": [each.seed for each in self.choices],
                "seconds_in_queue": max((each.generation.waited or 0.0 for each in self.choices), default=0.0),
                "seconds_to_first_token": max((report.time_to_first_token for report in reports), default=0.0),
            },
        }  # fmt: skip
