"""How models write function calls: a description of each format, and parsing calls in a text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..common.pieces import unfinished
from . import call_arguments
from .call_arguments import Progress, loose
from .schemas.kinds import Kinds
from .schemas.raw_text import Notation, Parameters, Quoted


@dataclass(frozen=True)
class CallIds:
    """Ids of calls, which the model writes between a function's name and the arguments.

    Attributes:
        before: the text in front of an id.
        pattern: a regular expression for ids.
        plain: format string that makes an id from a call's number (its index in the answer, or in the conversation).
        whole: format string for the id in chat templates; its fields are the function's name and the id that the model wrote.
    """

    before: str
    pattern: str
    plain: str
    whole: str = "{id}"

    def of(self, name: str, id: str, number: int) -> str:
        """`id` if it has the form that chat templates expect, else an id in this form for the call with index `number`."""
        head, tail = self.whole.format(name=re.escape(name), id="\0").split("\0")
        return id if re.fullmatch(f"{head}(?:{self.pattern}){tail}", id) else self.fill(name, self.plain.format(number))

    def fill(self, name: str, written: str) -> str:
        """The id of a call to the function `name` in the form that chat templates expect. written: the id that the model wrote."""
        return self.whole.format(name=name, id=written)


@dataclass(frozen=True)
class CallFormat:
    """How a model writes function calls: ``begin``, the calls separated by ``between``, and ``end``. A call is
    ``opening NAME middle ARGUMENTS closing``.

    Attributes:
        name: the format's name for ``--tool-format``.
        opening: text in front of a function's name.
        middle: text between the name and the arguments.
        notation: notation of the arguments; None: a JSON object.
        sign: the beginning of `opening` by which a call is recognized in text; None: the part of `opening` in front of the JSON object
            with the function's name.
        closing: text after the arguments.
        begin: text in front of all calls.
        end: text after all calls.
        between: text between two calls; None: an answer contains at most one call.
        message: text that begins a message, in formats with separate messages for thoughts, calls and answers.
        message_end: text that ends a message.
        answer: text after `message` that begins an answer, in two parts: the part that distinguishes answers from calls, and the rest.
        also: other pairs of `opening` and `middle` that models use.
        ids: the ids written in front of `middle`; None: no ids are written.
        source: texts by which the format is recognized in the source of a chat template that cannot render calls: all occur there.
        shown: a text by which the format is recognized in calls that a chat template has rendered; None: `begin`, `opening`, the name
            and the text after the name.
    """

    name: str
    opening: str = '{"name": "'
    middle: str = '", "arguments": '
    closing: str = "}"
    begin: str = ""
    end: str = ""
    between: str | None = "\n"
    message: str = ""
    message_end: str = ""
    answer: tuple[str, str] = ("", "")
    also: tuple[tuple[str, str], ...] = ()
    shown: str | None = None
    source: tuple[str, ...] = ()
    notation: Notation | None = None
    sign: str | None = None
    ids: CallIds | None = None

    @property
    def mark(self) -> str:
        """The part of `opening` by which a call is recognized in text, without white space at its end."""
        return self.sign if self.sign is not None else self.opening.partition('{"name"')[0].rstrip()

    @property
    def before(self) -> str:
        """The text in front of an id; empty if calls have no ids."""
        return "" if self.ids is None else self.ids.before

    @property
    def trigger(self) -> str:
        """The text by which calls are recognized in other text; "" if calls are bare JSON."""
        return self.begin or self.mark

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the format that may contain names of special tokens."""
        also = [text for pair in self.also for text in pair]
        own = self.notation.texts if self.notation is not None else ()
        return (
            self.opening,
            self.middle,
            self.closing,
            self.begin,
            self.end,
            self.between or "",
            self.message,
            self.before,
            *also,
            *own,
        )

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """The text of calls in this format. calls: pairs of a function's name and its arguments as JSON."""
        each = (
            f"{self.opening}{name}{self.before}{self.ids.plain.format(number) if self.ids else ''}{self.middle}"
            f"{call_arguments.written(arguments, self.notation)}{self.closing}"
            for number, (name, arguments) in enumerate(calls)
        )
        return self.begin + (self.between or "").join(each) + self.end

    def shows(self, rendered: str, name: str) -> bool:
        """Whether `rendered`, a template's rendering of a call to the function `name`, has this format."""
        first = self.notation.opening if isinstance(self.notation, Parameters) else ""
        after_name = self.ids.before if self.ids is not None else f"{self.middle}{first}"
        shown = self.shown if self.shown is not None else f"{self.begin}{self.opening}{name}{after_name}"
        return shown in rendered

    @cached_property
    def _head(self) -> re.Pattern[str]:
        """A regular expression for a call up to its arguments, without :attr:`mark`; with the mark if `opening` is only the mark."""
        pairs = ((self.opening, self.middle), *self.also)
        first, space = r"\{", ""
        if isinstance(self.notation, Parameters):
            first, space = rf"{loose(self.notation.opening)}|{loose(self.closing)}", " "
        id = "" if self.ids is None else rf"{loose(self.before)}(?P<id>{self.ids.pattern})"
        # Leading white space, or two expressions of white space in a row, would make matching quadratic.
        heads = (rf"{loose((opening[len(self.mark) :] or opening).lstrip())}(?P<n{i}>[\w.-]+){id}{loose(middle + space)}(?={first})"
                 for i, (opening, middle) in enumerate(pairs))  # fmt: skip
        return re.compile("|".join(heads))

    def read(
        self, text: str, functions: Mapping[str, Kinds | None], ended: bool = True, known: dict[int, Progress] | None = None
    ) -> ParsedAnswer:  # fmt: skip
        """Parses a growing text into the text in front of the calls, and the calls.

        Args:
            functions: the known functions, with the types of their parameters (None: any). Parsing ends at a call to another function.
            ended: whether the text is complete.
            known: for each index at which arguments begin, how far they have been read; empty at first, this read updates it.
        """
        known = {} if known is None else known
        trigger, head = self.trigger, text.lstrip()
        place = self._begins(text)
        if place is None:
            if ended:
                return ParsedAnswer(text)
            if not trigger:
                return ParsedAnswer("" if head[:1] in ("", "{") else text)
            triggers = [trigger, *(opening.rstrip() for opening, _ in self.also)]
            return ParsedAnswer(text[: len(text) - unfinished(text, triggers)].rstrip())
        before, calls = text[:place].rstrip(), list[Call]()
        while (found := self._head.search(text, place)) is not None:
            groups = found.groupdict()
            id = groups.pop("id", None)
            name = next(name for name in groups.values() if name is not None)
            if name not in functions:
                break
            progress = known.setdefault(found.end(), Progress(found.end()))
            own = call_arguments.read(text, progress, self.notation, functions[name], self.closing)
            if not own.valid:
                break
            full_id = self.ids.fill(name, id) if self.ids is not None and id is not None else None
            calls.append(Call(name, own.json, own.end is not None, full_id))
            if own.end is None or self.between is None:
                break
            place = own.end
        return ParsedAnswer(text if ended and not calls else before, tuple(calls))

    def _begins(self, text: str) -> int | None:
        """The index where calls begin in `text`; None if there are none yet."""
        if not self.trigger:
            return 0 if re.match(rf"\s*{self._head.pattern}", text) else None
        triggers = [self.trigger, *(opening for opening, _ in self.also)]
        places = [place for trigger in triggers if (place := text.find(trigger)) >= 0]
        return min(places, default=None)


@dataclass(frozen=True)
class Call:
    """A call in a text.

    Attributes:
        name: the function's name.
        arguments: the arguments so far, as JSON.
        complete: whether the arguments are complete.
        id: the id that the model has written, in the form that chat templates expect; None if the format has no ids.
    """

    name: str
    arguments: str
    complete: bool = True
    id: str | None = None


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer that may contain calls, parsed.

    Attributes:
        text: the text in front of the calls. In a growing answer, the last characters are left out if a call may begin with them.
        calls: the calls after this text.
    """

    text: str
    calls: tuple[Call, ...] = ()


#: All formats, in the order in which they are compared with a template's rendering.
FORMATS = (
    CallFormat("hermes", '<tool_call>\n{"name": "', closing="}\n</tool_call>"),
    CallFormat(
        "qwen3-coder", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", sign="<tool_call>",
        notation=Parameters("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    CallFormat(
        "seed-oss", "<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>", sign="<seed:tool_call>",
        notation=Parameters("<parameter=", ">", "</parameter>\n"),
    ),
    CallFormat(
        "glm-4.5", "<tool_call>", "\n", "</tool_call>",
        notation=Parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    CallFormat(
        "glm-4.7", "<tool_call>", "", "</tool_call>", between="",
        notation=Parameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    ),
    CallFormat(
        "minimax-m2", '\n<invoke name="', '">\n', "</invoke>", "<minimax:tool_call>", "\n</minimax:tool_call>", "",
        notation=Parameters('<parameter name="', '">', "</parameter>\n"), sign='\n<invoke name="',
    ),
    CallFormat("gemma4", "<|tool_call>call:", "", "<tool_call|>", between="", notation=Quoted('<|"|>')),
    CallFormat("mistral", begin="[TOOL_CALLS] [", between=", ", end="]"),
    CallFormat("mistral-tekken", begin="[TOOL_CALLS][", between=", ", end="]"),
    CallFormat("mistral-ids", "[TOOL_CALLS]", "[ARGS]", "", between="", ids=CallIds("[CALL_ID]", "[a-zA-Z0-9]{9}", "{:09}")),
    CallFormat("mistral-args", "[TOOL_CALLS]", "[ARGS]", "", between=""),
    CallFormat(
        "deepseek-v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        source=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    CallFormat(
        "deepseek-v3.1", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "",
        source=("<｜tool▁calls▁begin｜>",),
    ),
    CallFormat(
        "kimi-k2", "<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "",
        shown="<|tool_calls_section_begin|><|tool_call_begin|>", source=("<|tool_calls_section_begin|>",),
        ids=CallIds(":", "[0-9]{1,4}", "{}", "functions.{name}:{id}"),
    ),
    CallFormat(
        "harmony", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>", between=None,
        message="<|start|>assistant", message_end="<|end|>", answer=("<|channel|>final", "<|message|>"), shown="<|channel|>commentary",
        also=(
            ("<|channel|>commentary to=functions.", "<|message|>"),
            ("<|start|>assistant to=functions.", "<|channel|>commentary json<|message|>"),
        ),
    ),
    CallFormat("llama3", middle='", "parameters": ', between=None),
    CallFormat("json", between=None),
)  # fmt: skip
