"""Grammars of answers: ``response_format``, and calls of functions with the way back from text to calls.

Nothing here reads a file that a client names.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from ..constraints import (
    Called,
    CallSpec,
    CompiledGrammar,
    JsonSchema,
    Lark,
    Spec,
    Tagged,
    as_spec,
    choice,
    library,
    regex,
    written_calls,
)
from ..errors import GrammarError
from .bodies import (
    Body,
    ChatBody,
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    Part,
    RegexFormat,
    TextFormat,
    Tool,
    ToolChoice,
)
from .prompts import CallStyle
from .refusals import Refusal


def spec_of(wanted: Part | None) -> Spec | CompiledGrammar | None:
    """What the text must follow; None for free text.

    Raises:
        Refusal: it cannot be read.
    """
    try:
        return _spec(wanted)
    except GrammarError as error:
        raise Refusal(400, str(error), param="response_format", code="invalid_grammar") from error


def _spec(wanted: Part | None) -> Spec | CompiledGrammar | None:
    if isinstance(wanted, JsonObjectFormat):
        return JsonSchema({"type": "object"}, label="JSON object")
    if isinstance(wanted, JsonSchemaFormat):
        named = wanted.json_schema
        schema = named.schema_ if named.schema_ is not None else {"type": "object"}
        return JsonSchema(schema, strict=named.strict is not False, label=f"JSON schema {named.name!r}")
    if isinstance(wanted, RegexFormat):
        return regex(wanted.regex)
    if isinstance(wanted, ChoiceFormat):
        return choice(wanted.choices)
    if isinstance(wanted, GrammarFormat):
        if (wanted.grammar is None) == (wanted.name is None):
            message = "response_format: give grammar, a text in Lark's notation, or name, one of the library, not both"
            raise Refusal(400, message, param="response_format", code="invalid_value")
        if wanted.grammar is not None:
            return Lark(wanted.grammar)
        assert wanted.name is not None
        return as_spec(library.find(wanted.name).name)
    return None


def wanted_of(body: Body, style: CallStyle) -> Calling | Part | None:
    """What the grammar of an answer is made of; None for free text.

    Raises:
        Refusal: as :meth:`Calling.of`.
    """
    calling = Calling.of(body, style) if isinstance(body, ChatBody) else None
    if calling is not None:
        return calling
    return None if isinstance(body.response_format, TextFormat) else body.response_format


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
    format: Spec | Part | None = None

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
    def spec(self) -> Spec:
        """The grammar of the answer."""
        special, style, asked = self.style.special, self.style, (tool.function for tool in self.tools)
        functions = tuple(Called.of(each.name, each.parameters, each.strict) for each in asked)
        if special and not self.required:  # text with calls in it
            call = CallSpec(
                functions=functions, key_of_arguments=style.arguments, prefix="", suffix="", text=False, several=False
            )
            return Tagged(((style.prefix, call, style.suffix or None),), several=self.several)
        prefix = "" if special else style.prefix
        format = spec_of(self.format) if isinstance(self.format, Part) else self.format
        assert not isinstance(format, CompiledGrammar)
        return CallSpec(
            functions=functions, key_of_arguments=style.arguments, prefix=prefix, suffix=style.suffix, text=not self.required,
            several=self.several and bool(prefix), format=format,
        )  # fmt: skip

    def free(self, text: str, begun: bool) -> int:
        """How many characters of a growing text are no part of calls, whatever comes. begun: whether some were before it."""
        if self.required:
            return 0
        prefix = self.style.prefix.strip()
        head, openings = text.lstrip(), {prefix or "{", self.style.shown or prefix or "{"}
        begins = not begun and any(head.startswith(each[: len(head)]) for each in openings)
        if not prefix or self.format is not None:  # calls are the whole answer or none of it
            return 0 if begins else len(text)
        if self.style.special and begins:
            return 0
        if (place := text.find(prefix)) >= 0:
            return place
        sizes = range(min(len(prefix) - 1, len(text)), 0, -1)
        return len(text) - next((size for size in sizes if prefix.startswith(text[-size:])), 0)

    def parse(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The text in front of the calls, and the calls as OpenAI has them; none where none is complete."""
        names = {tool.function.name for tool in self.tools}
        prefix, shown = self.style.prefix.strip(), self.style.shown
        begin = text.find(prefix) if prefix else -1
        if begin < 0 and (not prefix or self.style.special) and text.lstrip().startswith(("{", shown or "{")):
            prefix, begin = "", 0  # it was put in front, or special tokens are left out of texts
        opening = prefix or shown
        if begin < 0 or (self.format is not None and text[:begin].strip()):
            return text, []
        calls = []
        written = written_calls(
            text, begin, names, self.style.arguments, several=bool(opening) and self.several, opening=opening
        )
        for name, arguments in written:
            try:
                calls.append(_call(name, arguments))
            except (ValueError, RecursionError):  # whatever a model may write where nothing constrains it
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


def _format_beside_calls(body: ChatBody, style: CallStyle) -> Part | None:
    """What text must follow where there may be calls in its place.

    Raises:
        Refusal: there is no grammar of both.
    """
    wanted = body.response_format
    if wanted is None or isinstance(wanted, TextFormat):
        return None
    if style.special:
        reason = "the template marks calls with special tokens, which no grammar holds"
    elif isinstance(wanted, GrammarFormat) and isinstance(spec_of(wanted), Lark | CompiledGrammar):
        reason = "rules in Lark's notation are not joined with those of calls"
    else:
        return wanted
    message = f'response_format beside tools: {reason}. Say tool_choice="none" or "required", or leave one of them out'
    raise Refusal(400, message, param="response_format", code="invalid_value")


def _call(name: str, arguments: Any) -> dict[str, Any]:
    """A call in OpenAI's form. Raises ValueError for numbers that JSON does not have."""
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which can be sent escaped only
        written = json.dumps(arguments, allow_nan=False)
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": written}}
