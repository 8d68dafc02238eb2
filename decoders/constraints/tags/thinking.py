"""How models mark thoughts before an answer: known markers, whether a prompt has begun a thought, and ``thinking=``."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...errors import SettingsError, UnsupportedError, shortened, suggest
from ..base import CompiledGrammar
from ..specs import Spec
from ..vocabulary import Vocabulary
from .calls import Calls
from .markers import TOKEN, symbols_of
from .specs import After, Marker
from .tagged import TaggedGrammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ThinkingMarkers:
    """How a thought begins and ends.

    Attributes:
        begin: the marker in front of a thought.
        end: the marker after the thought, before the answer.
        closing: the text that is forced when the budget of a thought is used up; its last part is `end`; None: only `end`.
    """

    begin: Marker
    end: Marker
    closing: str | None = None

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase | None, template: str | None = None) -> ThinkingMarkers | None:
        """The known markers that `tokenizer` has as tokens, else those whose end marker is in `template`, else None.

        template: a chat template; by default the tokenizer's.
        """
        if tokenizer is None:
            return None
        names, text = tokenizer.get_vocab(), str(template or tokenizer.chat_template or "")
        for each in KNOWN:
            # Harmony's markers consist of several tokens. Gemma's begin marker is a token and then text.
            tokens = ("<|channel|>", "<|message|>", "<|end|>") if each.closing else (each.begin, each.end)
            if all(name in names or str(name).split("thought")[0] in names for name in tokens):
                return each
        return next((each for each in KNOWN if str(each.end) in text), None)

    def begun(self, prompt: Sequence[int], vocabulary: Vocabulary) -> bool | None:
        """Whether `prompt` (token ids) ends within a thought; False if it ends after a thought, None if its last turn has no thought.

        The last turn begins at the last special token that is not in a marker.
        """
        begin, end = symbols_of(self.begin, vocabulary), symbols_of(self.end, vocabulary)
        own = {symbol for symbol in (*begin, *end) if symbol >= TOKEN}
        symbols: list[int] = []
        for token in reversed(prompt[-LOOKED_AT:]):
            text = vocabulary.tokens[token] if 0 <= token < len(vocabulary) else None
            if TOKEN + token in own or text is None:
                if TOKEN + token not in own:
                    break
                symbols.append(TOKEN + token)
            else:
                symbols.extend(reversed(text))
        symbols.reverse()
        last_begin, last_end = _last(symbols, begin), _last(symbols, end)
        if last_begin == last_end:  # neither marker was found
            return None
        return last_begin > last_end


#: Tried in this order: gpt-oss (harmony), Qwen and DeepSeek and most others, Magistral, Gemma 4, Seed, Kimi, Command A.
KNOWN = (
    ThinkingMarkers(
        "<|channel|>analysis<|message|>", "<|channel|>final<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    ThinkingMarkers("<think>", "</think>"),
    ThinkingMarkers("[THINK]", "[/THINK]"),
    ThinkingMarkers("<|channel>thought\n", "<channel|>"),
    ThinkingMarkers("<seed:think>", "</seed:think>"),
    ThinkingMarkers("◁think▷", "◁/think▷"),
    ThinkingMarkers("<|START_THINKING|>", "<|END_THINKING|>"),
)  # fmt: skip
#: Number of tokens at a prompt's end that are searched for the beginning of a thought.
LOOKED_AT = 4096


@dataclass(frozen=True)
class Thinking:
    """The value of ``thinking=``.

    Attributes:
        tokens: greatest number of tokens of a thought; None for any number.
        begin, end: the markers of a thought; None: the known markers of the tokenizer.
    """

    tokens: int | None
    begin: Marker | None = None
    end: Marker | None = None

    @staticmethod
    def of(value: Any) -> Thinking:
        """Reads `value`: a number of tokens, or a dict with ``tokens``, ``begin`` and ``end``.

        Raises:
            SettingsError: `value` is something else.
        """
        given = dict(value) if isinstance(value, Mapping) else {"tokens": value}
        names = ("tokens", "begin", "end")
        for name in given:
            if name not in names:
                raise SettingsError(f"thinking has no {name!r}. {suggest(str(name), names)}")
        tokens = given.get("tokens")
        if tokens is None and isinstance(value, Mapping):
            return Thinking(None, given.get("begin"), given.get("end"))
        try:
            count = -1 if isinstance(tokens, bool) else operator.index(tokens)  # type: ignore[arg-type]
        except TypeError:
            count = -1
        if count < 0:
            raise SettingsError(
                f"thinking={shortened(repr(value))}: give the thinking budget, a number of tokens, or "
                '{"tokens": 512, "begin": "<think>", "end": "</think>"}'
            )
        return Thinking(count, given.get("begin"), given.get("end"))

    def markers(self, tokenizer: PreTrainedTokenizerBase | None) -> ThinkingMarkers:
        """The markers of a thought: the given markers, or the known markers of `tokenizer`.

        Raises:
            UnsupportedError: no markers are given, and the tokenizer's markers are not known.
        """
        known = ThinkingMarkers.of(tokenizer)
        if self.end is not None:
            own = next((each for each in KNOWN if each.end == self.end), ThinkingMarkers("", self.end))
            begin = self.begin if self.begin is not None else own.begin
            if begin == "":
                raise UnsupportedError(
                    f'thinking: the begin marker for the end marker {self.end!r} is unknown: give "begin", too'
                )
            return replace(own, begin=begin)
        if known is None:
            ends = ", ".join(str(each.end) for each in KNOWN)
            why = f"{type(tokenizer).__name__} has none of the known ones ({ends}) among its tokens or in its chat template"
            if tokenizer is None:
                why = "there is no tokenizer to find them in"
            raise UnsupportedError(
                f"thinking= needs the markers of a thought, and {why}: "
                f'give {{"tokens": {self.tokens}, "begin": …, "end": …}}'
            )
        return known if self.begin is None else replace(known, begin=self.begin)

    def around(
        self, grammar: Spec | CompiledGrammar | None, prompt: Sequence[int], vocabulary: Vocabulary,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> Spec | CompiledGrammar | None:  # fmt: skip
        """The grammar of a text that may begin with a thought, or continues a thought of the prompt; `grammar` itself if the
        prompt ends after a thought. If `grammar` has a thought of its own, only the thought's budget is set.

        Args:
            grammar: grammar of the answer. The marker of an :class:`After` ends the thought, unless :attr:`end` is given.
        """
        if isinstance(grammar, After) and self.end is None:
            return replace(grammar, budget=self.tokens)
        if isinstance(grammar, Calls) and grammar.format.message:
            return replace(grammar, budget=self.tokens)
        if isinstance(grammar, TaggedGrammar) and (bounded := grammar.bounded(self.tokens)) is not None:
            return bounded
        markers = self.markers(tokenizer)
        open = markers.begun(prompt, vocabulary)
        if open is False:
            return grammar
        begin = None if open else markers.begin
        return After(markers.end, grammar, budget=self.tokens, closing=markers.closing, begin=begin)


def _last(symbols: list[int], marker: tuple[int, ...]) -> int:
    """The index after the last `marker` in `symbols`; -1 if there is none."""
    size = len(marker)
    places = range(len(symbols) - size, -1, -1)
    return next((place + size for place in places if tuple(symbols[place : place + size]) == marker), -1)
