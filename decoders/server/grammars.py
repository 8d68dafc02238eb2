"""Grammars of answers: ``response_format``, and calls of functions with the way back from text to calls.

Nothing here reads a file that a client names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..constraints import (
    Called,
    Calls,
    CallSpec,
    CompiledGrammar,
    JsonSchema,
    Kinds,
    Lark,
    Progress,
    Spec,
    Written,
    as_spec,
    choice,
    library,
    regex,
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
from .refusals import Refusal, refusal
from .templates import CallStyle


def spec_of(wanted: Part | None) -> Spec | CompiledGrammar | None:
    """What the text must follow; None for free text.

    Raises:
        Refusal: it cannot be read.
    """
    try:
        return _spec(wanted)
    except GrammarError as error:
        raise refusal(error) from error


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
        several = body.parallel_tool_calls is not False and mode != "named" and not style.one_call
        format = _format_beside_calls(body, style) if mode == "auto" else None
        return Calling(tools, style, mode != "auto", several, mode == "named", format)

    @cached_property
    def _functions(self) -> tuple[Called, ...]:
        asked = (tool.function for tool in self.tools)
        return tuple(Called.of(each.name, each.parameters, each.strict) for each in asked)

    @cached_property
    def _kinds(self) -> dict[str, Kinds]:
        return {each.name: each.kinds for each in self._functions}

    @property
    def spec(self) -> Spec:
        """The grammar of the answer."""
        format = self.style.format
        functions = self._functions
        several = self.several and format.between is not None
        if self.required or (format.trigger and self.format is None):
            return Calls(functions, format, self.required, several)
        text = spec_of(self.format) if isinstance(self.format, Part) else self.format
        assert not isinstance(text, CompiledGrammar)
        return CallSpec(functions, format, alone=False, several=several, text=text)

    def read(self, text: str, ended: bool, known: dict[int, Progress] | None = None) -> Written:
        """What is written of text and calls in an answer that grows until it has `ended`.

        Args:
            known: of earlier reads of the answer, so that complete arguments are not read again.
        """
        written = self.style.format.read(text, self._kinds, ended, known)
        # Beside a format, calls are the whole answer or none of it.
        if self.format is not None and written.text.strip() and written.calls:
            return Written(text)
        return written if self.several else Written(written.text, written.calls[:1])


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
