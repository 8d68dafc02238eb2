"""The texts of a request while they are generated.

Clients receive texts in pieces. No piece ends within a character, or within text that may become a stop string.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..constraints import Vocabulary
from ..errors import UnsupportedError
from ..report import GrammarUse, Report, mean_length
from ..scheduling import TextPieces, special_tokens, unfinished
from ..scheduling.generation import Generation
from .arguments import Stops
from .limits import Arrival


@dataclass
class Choice:
    """One text that is being generated.

    Attributes:
        index: the choice's index in the answer.
        seed: seed of the choice's sampling noise.
        generation: the choice's request in the scheduler.
        prompt: token ids of the prompt.
        needs_validation: whether the finished text has to be validated, because its grammar accepts more than the requested format.
        invalid: the rule that the finished text breaks; None if it is valid.
    """

    index: int
    seed: int
    generation: Generation
    prompt: list[int]
    needs_validation: bool = False
    invalid: str | None = None

    @property
    def use(self) -> GrammarUse | None:
        """The report on the choice's grammar; None before the text has ended, or without a grammar."""
        report = self.generation.report
        return report.grammars[0] if report is not None and report.grammars else None

    @property
    def stopped_by_length(self) -> bool:
        """Whether the text ended because it reached its greatest length."""
        request, tokens = self.generation.call.request, self.generation.tokens
        return len(tokens) >= request.new_tokens and (not tokens or tokens[-1] not in request.stopping.tokens)


@dataclass
class Job:
    """A client's request.

    Attributes:
        id: the answer's id.
        created: Unix time of the answer's creation.
        choices: the texts generated for the request.
        stops: the stop strings, which apply to every choice.
        arrival: the request's arrival.
        seconds: seconds that the request may take, counted from its arrival.
    """

    id: str
    choices: list[Choice]
    stops: Stops
    arrival: Arrival
    seconds: float
    created: int = field(default_factory=lambda: int(time.time()))

    def cancel(self) -> None:
        """Cancels the texts that have not ended."""
        self.arrival.gone = True
        for choice in self.choices:
            choice.generation.cancel()

    def tokens(self) -> tuple[int, int]:
        """The number of prompt tokens, and the number of new tokens so far."""
        prompts = {id(each.prompt): len(each.prompt) for each in self.choices}  # n texts share one prompt
        return sum(prompts.values()), sum(len(each.generation.tokens) for each in self.choices)

    def usage(self, thought: int = 0) -> dict[str, Any]:
        """The object in ``usage``: OpenAI's figures, and this package's under ``decoders``. thought: number of tokens in thoughts."""
        reports = self._reports
        prompt, new = self.tokens()
        histograms = (report.accepted_lengths for report in reports)
        lengths = [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]
        drafted, accepted = (sum(getattr(report, name) for report in reports) for name in ("drafted", "accepted"))
        steps = sum(lengths)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": min(sum(sum(report.reused) for report in reports), prompt)},
            "completion_tokens_details": {
                "reasoning_tokens": thought,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
            "decoders": {
                "strategy": self.choices[0].generation.call.request.strategy.name,
                "steps": steps,
                "drafted": drafted,
                "accepted": accepted,
                "accepted_lengths": lengths,
                "mean_accepted_length": round(mean_length(lengths), 4),
                "seeds": [each.seed for each in self.choices],
                "seconds_in_queue": max((each.generation.waited or 0.0 for each in self.choices), default=0.0),
                "seconds_to_first_token": max((report.time_to_first_token for report in reports), default=0.0),
            },
        }

    def metrics(self) -> dict[str, Any]:
        """``{"metrics": …}``: the acceptance of drafts in vLLM's form, which AIPerf reads. An empty dict without drafts, or for several
        choices.
        """
        reports = self._reports
        if len(self.choices) != 1 or not reports or not reports[0].drafted:
            return {}
        lengths, drafted, accepted = reports[0].accepted_lengths, reports[0].drafted, reports[0].accepted
        speculation = {
            "mean_acceptance_length": reports[0].mean_accepted_length,
            "draft_acceptance_rate": accepted / drafted,
            "acceptance_histogram": lengths,
            "num_spec_steps": sum(lengths),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": len(lengths) - 1,
        }
        return {"metrics": {"speculative_decoding": speculation}}

    @property
    def _reports(self) -> list[Report]:
        return [each.generation.report for each in self.choices if each.generation.report is not None]


@dataclass(frozen=True)
class Span:
    """A piece of text from one token, or from several tokens that share its characters.

    Attributes:
        text: the piece.
        drafted: whether the token was drafted; of several tokens, the last one counts.
    """

    text: str
    drafted: bool


class Spelling:
    """Looks up the bytes of tokens.

    Attributes:
        vocabulary: the bytes of all tokens; None if the tokenizer's bytes are unknown.
    """

    vocabulary: Vocabulary | None

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.vocabulary = tokenizer, None
        with suppress(UnsupportedError):  # the bytes of the tokenizer's tokens are unknown
            self.vocabulary = Vocabulary.of(tokenizer, len(tokenizer), ())
        self._tokens = self.vocabulary.tokens if self.vocabulary is not None else ()
        self._special = frozenset(special_tokens(tokenizer).values())

    def of(self, token: int) -> bytes:
        """The bytes of a token; for a special token, the bytes of its name."""
        data = self._tokens[token] if token < len(self._tokens) else None
        if data is None:
            name: str = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)  # type: ignore[assignment]
            return name.encode()
        return data

    def within(self, token: int, text: str) -> bytes:
        """The bytes of a token that produced the characters `text`, alone or together with other tokens.

        Bytes that the tokenizer's decoder drops are left out: a leading blank, the marker of a word's continuation, or a special
        token.
        """
        data = self.of(token)
        if token in self._special:  # `text` may be a character whose bytes are in the tokens before and after
            return data if data.decode(errors="replace") in text else b""
        try:
            same = data.decode() == text
        except UnicodeDecodeError:  # the token holds a part of a character, or invalid bytes
            same = data.decode(errors="ignore") in text
        return data if same else text.encode()


def named(data: bytes) -> str:
    """`data` as text; bytes outside of whole characters appear as ``\\xf0``, as in OpenAI's API."""
    return data.decode(errors="backslashreplace")


@dataclass(frozen=True)
class _Held:
    """A token whose text is held back. `text` will be shown, and `matched` is searched for stop strings. The two are equal, except that
    the name of a special token may be in only one of them.
    """

    text: str
    matched: str
    drafted: bool

    def at(self, place: int) -> tuple[_Held, _Held | None]:
        """Splits both texts at index `place` of `matched`. Returns the first part, and the rest (None if nothing is left)."""
        if place >= len(self.matched):
            return self, None
        return (
            _Held(self.text[:place], self.matched[:place], self.drafted),
            _Held(self.text[place:], self.matched[place:], self.drafted),
        )


class ChoiceText:
    """Converts the tokens of a choice to text, up to the first stop string.

    Args:
        prompt: token ids before the text.
        special: special tokens whose names are written into the text.

    Attributes:
        stopped: whether a stop string was found.
        shown: the text that :meth:`add` has returned so far.
        written: the text of all tokens, including text after a stop string.
        places: for each token whose text is known, its begin and end in `written`. Tokens that share a character have the
            character's begin and end.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Stops = Stops(), prompt: Sequence[int] = (),
        special: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.stops, self.special, self.stopped, self.shown = stops, special, False, ""
        self.written, self.places = "", list[tuple[int, int]]()
        self._pieces, self._tokens = TextPieces(tokenizer, prompt, special | stops.special), list[int]()
        # The last tokens, whose text may still change. An entry has the joint text of these tokens up to the entry's token, and whether
        # this token was drafted.
        self._unsettled: list[tuple[str, bool]] = []
        self._held: list[_Held] = []

    def add(self, tokens: Sequence[int], drafted: Sequence[bool], ended: bool = False) -> list[Span]:
        """Adds tokens, and returns the text that may be shown now, in spans.

        Args:
            drafted: whether each token was drafted.
            ended: whether these are the last tokens.
        """
        for token, flag in zip(tokens, drafted, strict=True):
            self._tokens.append(token)
            piece = self._pieces.next(self._tokens, False)
            self._unsettled.append((piece or self._pieces.held, flag))
            if piece:
                self._settle(piece, token)
        if ended:
            self._settle(self._pieces.next(self._tokens, True))
        return self._released(ended)

    def _settle(self, piece: str, token: int | None = None) -> None:
        """Divides `piece`, the text of all tokens in `_unsettled` together, among these tokens.

        Args:
            token: the last of these tokens. The name of a special token may be shown, or searched for stop strings. None once the
                text has ended.
        """
        name = self._pieces.name(token) if token is not None else ""
        piece = piece.removesuffix(name)
        written, matched = (name if token in tokens else "" for tokens in (self.special, self.stops.special))
        before, begin = len(self.written), 0
        self.written += piece + written
        for place, (text, flag) in enumerate(self._unsettled, 1):
            if place < len(self._unsettled):
                end = max(len(commonprefix((text, piece))), begin)  # noqa: RUF071 -- no files
                held = _Held(piece[begin:end], piece[begin:end], flag)
                self.places.append((before + begin, before + max(min(len(text), len(piece)), end)))
            else:
                end, held = len(piece), _Held(piece[begin:] + written, piece[begin:] + matched, flag)
                self.places.append((before + begin, len(self.written)))
            if (held.text or held.matched) and not self.stopped:
                self._held.append(held)
            begin = end
        self._unsettled = []

    def _released(self, ended: bool) -> list[Span]:
        text, stops = "".join(each.matched for each in self._held), self.stops.strings
        places = [place for stop in stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, count = True, min(places)
        else:
            count = len(text) if ended else len(text) - unfinished(text, stops)
        spans, left = list[Span](), list[_Held]()
        for each in self._held:
            now, later = each.at(count) if not left else (None, each)
            if now is not None:
                count -= len(now.matched)
                spans += [Span(now.text, now.drafted)] if now.text else []
            left += [later] if later is not None else []
        self._held = [] if self.stopped else left
        self.shown += "".join(span.text for span in spans)
        return spans
