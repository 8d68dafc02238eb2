"""Function calls as structural tags: free text up to the mark that begins a call (text or a special token), then constrained calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ..call_formats import CallFormat
from ..calls import Arguments, Called, CallSpec
from ..schemas.raw_text import Notation
from ..specs import Regex, Spec
from ..vocabulary import Vocabulary, stand_in
from .markers import TOKEN
from .phases import Free, Inside
from .specs import Phases, Structure


@dataclass(frozen=True)
class Calls(Structure):
    """Free text, then calls; the text ends after the calls.

    Attributes:
        functions: the functions that may be called.
        format: how calls are written. Needs a `trigger`, by which calls are recognized in free text, unless calls are `required`.
        required: whether there must be a call, with at most a thought in front.
        several: whether there may be more than one call, if the format allows several.
        budget: number of tokens after which the call or the answer must begin, in formats with separate messages; None: unlimited.
    """

    functions: tuple[Called, ...]
    format: CallFormat
    required: bool
    several: bool
    budget: int | None = None

    @property
    def name(self) -> str:
        return "calls of functions"

    @property
    def key(self) -> str:
        return self._keyed(repr((self.functions, self.format, self.required, self.several, self.budget)))

    def add_to(self, phases: Phases) -> int:
        format, then = self.format, self._after_call(phases)
        if not format.trigger:
            return self._call(format.opening, phases, then)
        openings = [format.opening, *dict.fromkeys(opening for opening, _ in format.also if opening != format.opening)]
        calls = [(format.begin or self._mark(opening), self._begun(opening, phases, then)) for opening in openings]
        if not format.message:
            triggers = tuple((phases.symbols(marker), phase) for marker, phase in calls)
            return phases.add(Free(triggers, ends=not self.required, exact=self.required))
        markers: list[tuple[str, int | None]] = [*calls]
        next_message, (head, rest) = f"{format.message_end}{format.message}", format.answer
        if self.required:
            markers += [(head, None), (f"{next_message}{calls[0][0]}", calls[0][1])]
        else:
            text = phases.add(Free())
            markers += [(f"{head}{rest}", text), (f"{next_message}{head}{rest}", text)]
        symbols = tuple((phases.symbols(marker), phase) for marker, phase in markers)
        free = Free(symbols, ends=not self.required, budget=self.budget, closing=len(symbols) - 1, thinks=True)
        return phases.add(free)

    def _mark(self, opening: str) -> str:
        return self.format.mark if opening == self.format.opening else opening

    def _begun(self, opening: str, phases: Phases, then: int) -> int:
        """The number of the phase after ``format.begin`` or, in formats without this text, after the mark of the first call."""
        call, mark = self._call(opening, phases, then), self._mark(opening)
        if not self.format.begin or not mark:
            return call
        return phases.add(Free(((phases.symbols(mark), call),), ends=False, exact=True))

    def _after_call(self, phases: Phases) -> int:
        """The number of the phase after a call, in which further calls may follow."""
        format, over = self.format, phases.add(Free(over=True))
        end = [(format.end, over)] if format.end else []
        if not self.several or format.between is None:
            return (
                phases.add(Free(tuple((phases.symbols(text), phase) for text, phase in end), ends=False, exact=True))
                if end
                else over
            )
        then = phases.add(Free(over=True))  # a placeholder, replaced when its markers are known
        again = [(f"{format.between}{format.mark}", self._call(format.opening, phases, then)), *end]
        markers = tuple((phases.symbols(text), phase) for text, phase in again)
        phases.phases[then] = Free(markers, ends=not end, exact=True)
        return then

    def _call(self, opening: str, phases: Phases, then: int) -> int:
        """The number of the phase that begins after the mark of a call."""
        format = self.format
        if format.notation is not None:
            return self._closed(self._in_notation(format.notation, phases.vocabulary), phases, then)
        middles = [middle for first, middle in ((format.opening, format.middle), *format.also) if first == opening]
        if not any(symbol >= TOKEN for text in (*middles, format.before) for symbol in phases.symbols(text)):
            return self._closed(CallSpec(self.functions, format), phases, then)
        rest = opening[len(self._mark(opening)) :]
        arguments = [(each.name, self._closed(Arguments(each), phases, then)) for each in self.functions]
        if format.ids is not None:
            ids = Regex(format.ids.pattern)
            heads = [
                (f"{rest}{name}{format.before}", phases.tag(ids, format.middle, phase)) for name, phase in arguments
            ]
        else:
            heads = [(f"{rest}{name}{middle}", phase) for name, phase in arguments for middle in middles]
        return phases.add(Free(tuple((phases.symbols(text), phase) for text, phase in heads), ends=False, exact=True))

    def _in_notation(self, notation: Notation, vocabulary: Vocabulary) -> CallSpec:
        """The grammar of a call after its mark, with stand-ins for special tokens in its arguments."""
        texts = "".join(notation.texts)
        names = tuple(sorted((name for name in vocabulary.special if name in texts), key=len, reverse=True))
        own = {each.name: _with_stand_ins(getattr(notation, each.name), names) for each in fields(notation)}
        format = replace(self.format, notation=type(notation)(**own))
        return CallSpec(self.functions, format, special=names)

    def _closed(self, spec: Spec, phases: Phases, then: int) -> int:
        if self.format.closing:
            return phases.tag(spec, self.format.closing, then)
        return phases.add(Inside(phases.compiled(spec), then))


def _with_stand_ins(text: str, names: Sequence[str]) -> str:
    for place, name in enumerate(names):
        text = text.replace(name, stand_in(place))
    return text
