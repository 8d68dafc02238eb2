"""Calls of functions: a grammar that lets the model write them as its template does, and the way back from text to calls."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..constraints.base import CompiledGrammar, Language
from ..constraints.json_schema import JsonSchema
from ..constraints.specs import Lark, Spec
from ..errors import GrammarError
from ..patterns.writer import quoted, slashed
from .bodies import ChatBody, Tool, ToolChoice
from .formats import spec_of
from .refusals import Refusal
from .templates import CallStyle

_ANY = r"(?:.|\n)*"


@dataclass(frozen=True)
class Calling:
    """What a request says about calls.

    Attributes:
        tools: those that may be called.
        style: how calls are written.
        required: whether the answer has to be a call; else it may be text.
        several: whether it may be more than one.
        named: whether one function was named, which has to be called.
        format: what text must follow where the answer is no call; None: nothing.
    """

    tools: tuple[Tool, ...]
    style: CallStyle
    required: bool
    several: bool
    named: bool = False
    format: Spec | None = None

    @staticmethod
    def of(body: ChatBody, style: CallStyle) -> Calling | None:
        """None where nothing may be called.

        Raises:
            Refusal: `tool_choice` names what is not there, or calls and the format of texts cannot be told apart.
        """
        tools, choice = tuple(body.tools or ()), body.tool_choice
        if not tools:
            if choice in (None, "none"):
                return None
            raise Refusal(400, "tool_choice needs tools", param="tool_choice", code="invalid_value")
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            raise Refusal(400, "two tools have one name", param="tools", code="invalid_value")
        if choice == "none":
            return None
        mode: str = "auto"
        if isinstance(choice, ToolChoice):
            mode, chosen = _chosen(choice, names)
            tools = tuple(tool for tool in tools if tool.function.name in chosen)
        elif choice is not None:
            mode = choice
        several = body.parallel_tool_calls is not False and mode != "named"
        format = _format_beside_calls(body, style) if mode == "auto" else None
        return Calling(tools, style, mode != "auto", several, mode == "named", format)

    @property
    def spec(self) -> Spec | None:
        """The grammar of the answer; None where text is allowed and the calls' beginning is no text."""
        if self.style.special and not self.required:
            return None
        schemas = []
        for number, tool in enumerate(self.tools):
            parameters = tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
            place = "#" if len(self.tools) == 1 else f"#/anyOf/{number}"
            schemas.append(_call_schema(tool.function.name, self.style.arguments, parameters, place))
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        prefix = "" if self.style.special else self.style.prefix
        return CallSpec(
            schema=json.dumps(schema), prefix=prefix, suffix=self.style.suffix, text=not self.required,
            several=self.several and bool(prefix), format=self.format,
        )  # fmt: skip

    def free(self, text: str, begun: bool) -> int:
        """How many characters of a growing text are no part of calls, whatever comes. begun: whether some were before it."""
        if self.required:
            return 0
        prefix = "" if self.style.special else self.style.prefix.strip()
        if not prefix or self.format is not None:  # calls are the whole answer or none of it
            head, openings = text.lstrip(), {prefix or "{", self.style.shown or prefix or "{"}
            return len(text) if begun or not any(head.startswith(each[: len(head)]) for each in openings) else 0
        if (place := text.find(prefix)) >= 0:
            return place
        sizes = range(min(len(prefix) - 1, len(text)), 0, -1)
        return len(text) - next((size for size in sizes if prefix.startswith(text[-size:])), 0)

    def parse(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The text in front of the calls, and the calls as OpenAI has them; none where none is complete."""
        names = {tool.function.name for tool in self.tools}
        prefix = "" if self.style.special else self.style.prefix.strip()
        opening = prefix or self.style.shown
        begin = text.find(prefix) if prefix else (0 if text.lstrip().startswith(("{", opening or "{")) else -1)
        if begin < 0 or (self.format is not None and text[:begin].strip()):
            return text, []
        calls, place = [], begin
        while True:
            brace = text.find("{", place)
            if opening and 0 <= (before := text.find(opening, place)) <= brace:  # which may have braces of its own
                brace = text.find("{", before + len(opening))
            if (place := brace) < 0:
                break
            try:
                value, place = json.JSONDecoder().raw_decode(text, place)
                name = value.get("name") if isinstance(value, dict) else None
                if not isinstance(name, str) or name not in names:
                    break
                calls.append(_call(name, value.get(self.style.arguments, {})))
            except (ValueError, RecursionError):  # whatever a model may write where nothing constrains it
                break
            if not (opening and self.several):
                break
        return (text[:begin].rstrip(), calls) if calls else (text, [])


def _chosen(choice: ToolChoice, names: list[str]) -> tuple[str, list[str]]:
    """What `choice` asks for, ``named``, ``auto`` or ``required``, and the names that it allows.

    Raises:
        Refusal: one is none of `names`, or there is none.
    """
    param = f"tool_choice.{choice.type}"
    if choice.type == "function" and choice.function is not None:
        mode, chosen = "named", [choice.function.name]
    elif choice.type == "allowed_tools" and choice.allowed_tools is not None:
        mode, chosen = choice.allowed_tools.mode, [tool.function.name for tool in choice.allowed_tools.tools]
    else:
        raise Refusal(400, f"{param} is missing", param=param, code="missing_parameter")
    unknown = next((name for name in chosen if name not in names), None)
    if unknown is not None:
        message = f"tool_choice: no tool is called {unknown!r}. Choose from: {', '.join(names)}"
        raise Refusal(400, message, param="tool_choice", code="invalid_value")
    return mode, chosen


def _format_beside_calls(body: ChatBody, style: CallStyle) -> Spec | None:
    """What text must follow where there may be calls in its place.

    Raises:
        Refusal: there is no grammar of both.
    """
    wanted = spec_of(body.response_format)
    if wanted is None:
        return None
    if style.special:
        reason = "the template marks calls with special tokens, which no grammar holds"
    elif isinstance(wanted, Lark | CompiledGrammar):
        reason = "rules in Lark's notation are not joined with those of calls"
    else:
        return wanted
    message = f'response_format beside tools: {reason}. Say tool_choice="none" or "required", or leave one of them out'
    raise Refusal(400, message, param="response_format", code="invalid_value")


def _call_schema(name: str, key: str, parameters: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema of a call that stands at `place`. References of the parameters are written from their own root."""
    inner = {word: value for word, value in parameters.items() if word != "$schema"}
    inner = _moved(inner, f"{place}/properties/{key}")
    return {
        "type": "object", "properties": {"name": {"const": name}, key: inner}, "required": ["name", key],
        "additionalProperties": False,
    }  # fmt: skip


def _moved(value: Any, root: str) -> Any:
    """`value` with its references to places within it, now that it stands at `root`."""
    if isinstance(value, dict):
        return {
            key: root + part[1:]
            if key == "$ref" and isinstance(part, str) and part.startswith("#")
            else _moved(part, root)
            for key, part in value.items()
        }
    return [_moved(part, root) for part in value] if isinstance(value, list) else value


def _call(name: str, arguments: Any) -> dict[str, Any]:
    """Raises ValueError for numbers that are none of JSON's."""
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which can be sent escaped only
        written = json.dumps(arguments, allow_nan=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }


@dataclass(frozen=True)
class CallSpec(Spec):
    """Answers that are calls, or text: of a format, or any that is no call.

    Attributes:
        schema: of a call, as JSON.
        prefix: before a call.
        suffix: after a call.
        text: whether text is an answer, too.
        several: whether there may be more than one call.
        format: of the text; None: any that does not begin as a call.
    """

    schema: str
    prefix: str
    suffix: str
    text: bool
    several: bool
    format: Spec | None = None

    @property
    def key(self) -> str:
        format = self.format.key if self.format is not None else None
        return self._keyed(json.dumps([self.schema, self.prefix, self.suffix, self.text, self.several, format]))

    def language(self) -> Language:
        try:
            # Arguments that are not declared are of no use to a function, and a language without them is mostly regular.
            inner = JsonSchema(self.schema, closed=True).language()
        except GrammarError as error:
            raise GrammarError(f"tools: {error}", error.keyword, error.path) from error
        text = self._text()
        pattern = None
        if inner.regex is not None and (text is None or text.regex is not None):
            call = f"{quoted(self.prefix)}(?:{inner.regex}){quoted(self.suffix)}"
            calls = rf"{call}(?:\n?{call})*" if self.several else call
            pattern = calls if text is None else f"(?:{calls}|{text.regex})"
        # llguidance's lexer never goes back: it takes the first brace of a text for that of such a prefix.
        apart = text is None or self.format is None or not self.prefix.startswith(("{", "[", '"'))
        lark = self._lark(inner.lark, text) if inner.lark is not None and apart else None
        if pattern is None and not apart:
            raise GrammarError(
                f"tools: texts of response_format may begin as calls do ({self.prefix}), and the two are no regular expression: say "
                'tool_choice="none" or "required", or leave response_format out'
            )
        if text is None:
            return Language("calls of functions", pattern, lark, inner.warnings)
        return Language("calls of functions", pattern, lark, (*inner.warnings, *text.warnings), self._whole(text))

    def _text(self) -> Language | None:
        """Answers that are no calls; None: there are none."""
        if not self.text:
            return None
        if self.format is not None:
            return self.format.language()
        # Bare JSON begins with a brace, and llguidance's lexer takes the longest text: what begins so is a call.
        return Language("text", not_beginning(self.prefix or "{"))

    def _whole(self, text: Language) -> Callable[[str], None] | None:
        """Judges answers that do not begin as calls."""
        judge = text.whole
        if judge is None:
            return None
        opening = self.prefix or '{"name": "'
        return lambda answer: None if answer.startswith(opening) else judge(answer)

    def _lark(self, inner: str, text: Language | None) -> str:
        around = [slashed(quoted(part)) if part else "" for part in (self.prefix, self.suffix)]
        one = f"one: {around[0]} call {around[1]}"
        calls = r"calls: one (/\n?/ one)*" if self.several else "calls: one"
        rules = ["start: calls" + (" | text" if text is not None else ""), calls, one, _with_start(inner, "call")]
        if text is not None and text.lark is not None:  # rather than its expression, one word that a call may begin as
            rules.append(_with_start(_NAMES.sub(lambda name: f"{name[0]}_" if name[1] else name[0], text.lark), "text"))
        elif text is not None and text.regex is not None:
            rules.append(f"text: {slashed(text.regex)}")
        return "\n".join(rules)


#: What stands between slashes or quotes in a grammar of a schema, and the names of its rules.
_NAMES = re.compile(r'/(?:\\.|[^/\\])*/|"(?:\\.|[^"\\])*"|\b([rtT]\d+)\b')


def _with_start(grammar: str, name: str) -> str:
    """`grammar` with `name` in the place of ``start``."""
    return re.sub(r"^start:", f"{name}:", grammar, count=1, flags=re.MULTILINE)


def not_beginning(prefix: str) -> str:
    """A regular expression of all texts that do not begin with `prefix`."""
    alternatives = [""]  # the empty text
    for place, character in enumerate(prefix):
        before = quoted(prefix[:place])
        other = f"[^{_in_class(character)}]"
        alternatives.append(f"{before}{other}{_ANY}")
        if place:
            alternatives.append(before)
    return f"(?:{'|'.join(alternatives)})"


def _in_class(character: str) -> str:
    if character == "\n":
        return r"\n"
    return "\\" + character if character in r"\]^[-&~" else character
