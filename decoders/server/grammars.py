"""Makes the grammar of an answer from a request's ``response_format`` and tools, and parses function calls in the answer's text.

The server reads no files that a request names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..constraints import (
    CompiledGrammar,
    FunctionCalls,
    JsonSchema,
    Lark,
    ParsedAnswer,
    Spec,
    choice,
    library,
    regex,
    spec_of_library,
)
from ..errors import GrammarError
from ..prompts.templates import CallStyle
from .bodies import (
    Body,
    ChatBody,
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    Part,
    RegexFormat,
    TextFormat,
    Tool,
    ToolChoice,
)
from .refusals import Refusal, refusal, wrong


def spec_of(wanted: Part | None) -> Spec | CompiledGrammar | None:
    """The grammar of a ``response_format``; None for free text.

    Raises:
        Refusal: the schema, pattern or grammar in the format is invalid.
    """
    try:
        return _spec(wanted)
    except GrammarError as error:
        raise refusal(error) from error


def _spec(wanted: Part | None) -> Spec | CompiledGrammar | None:
    if isinstance(wanted, JsonObjectFormat):
        return JsonSchema({"type": "object"}, label="JSON object")
    if isinstance(wanted, JsonSchemaFormat):
        wanted = wanted.json_schema
    if isinstance(wanted, NamedSchema):
        schema = wanted.schema_ if wanted.schema_ is not None else {"type": "object"}
        return JsonSchema(schema, strict=wanted.strict is not False, label=f"JSON schema {wanted.name!r}")
    if isinstance(wanted, RegexFormat):
        return regex(wanted.regex)
    if isinstance(wanted, ChoiceFormat):
        return choice(wanted.choices)
    if isinstance(wanted, GrammarFormat):
        if (wanted.grammar is None) == (wanted.name is None):
            raise wrong(
                "response_format", "set one field: grammar (rules in Lark's notation) or name (a library grammar)"
            )
        if wanted.grammar is not None:
            return Lark(wanted.grammar)
        assert wanted.name is not None
        return spec_of_library(library.find(wanted.name).name)
    return None


def wanted_of(body: Body, style: CallStyle) -> Calling | Part | None:
    """The function calls or the response format from which an answer's grammar is compiled; None for free text.

    Raises:
        Refusal: see :meth:`Calling.of`.
    """
    calling = Calling.of(body, style) if isinstance(body, ChatBody) else None
    if calling is not None:
        return calling
    return None if isinstance(body.response_format, TextFormat) else body.response_format


@dataclass(frozen=True)
class Calling:
    """Which function calls an answer may contain.

    Attributes:
        tools: the tools that may be called.
        style: how the model writes calls.
        required: whether the answer must be a call; otherwise it may be text.
        several: whether the answer may contain more than one call.
        named: whether the request names one function, which must be called.
        format: the response format or the grammar of an answer without calls; None: free text.
    """

    tools: tuple[Tool, ...]
    style: CallStyle
    required: bool
    several: bool
    named: bool = False
    format: Spec | Part | None = None

    @staticmethod
    def of(body: ChatBody, style: CallStyle) -> Calling | None:
        """The calls that a body allows; None if it allows none.

        Raises:
            Refusal: `tools` or `tool_choice` is invalid, or no grammar can combine calls with the response format.
        """
        tools, choice = tuple(body.tools or ()), body.tool_choice
        if not tools:
            if choice in (None, "none", "auto"):
                return None
            raise Refusal(400, "tool_choice needs tools", param="tool_choice", code="invalid_value")
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            raise Refusal(400, f"tools must have different names, not {names}", param="tools", code="invalid_value")
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
    def _calls(self) -> FunctionCalls:
        asked = [(each.function.name, each.function.parameters, each.function.strict) for each in self.tools]
        return FunctionCalls.of(asked, self.style.format, required=self.required, several=self.several)

    @property
    def spec(self) -> Spec:
        """The grammar of the answer, which allows calls and, unless a call is required, text."""
        text = spec_of(self.format) if isinstance(self.format, Part) else self.format
        assert not isinstance(text, CompiledGrammar)
        return self._calls.spec(text)

    def read(self, text: str, ended: bool, known: dict[int, Any] | None = None) -> ParsedAnswer:
        """Parses an answer, which may be incomplete, and returns its text and its calls.

        Args:
            ended: whether the answer is complete.
            known: see :meth:`FunctionCalls.read`.
        """
        written = self._calls.read(text, ended, known)
        # An answer in a response format contains no calls, so what looks like a call beside other text belongs to the text.
        if self.format is not None and written.text.strip() and written.calls:
            return replace(written, text=text, calls=())
        return written


def _chosen(choice: ToolChoice, names: list[str]) -> tuple[str, list[str]]:
    """The mode of `choice` (``named``, ``auto`` or ``required``) and the names of the tools that it allows.

    Raises:
        Refusal: a name is not in `names`, or no name is given.
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
        raise wrong("tool_choice", f"no tool is called {unknown!r}. Choose from: {', '.join(names)}")
    return mode, chosen


def _format_beside_calls(body: ChatBody, style: CallStyle) -> Part | None:
    """The response format of an answer without calls, if the model may also answer with calls; None: free text.

    Raises:
        Refusal: no grammar can combine the format with calls.
    """
    wanted = body.response_format
    if wanted is None or isinstance(wanted, TextFormat):
        return None
    if style.special:
        reason = "the chat template marks calls with special tokens, which cannot be part of a grammar"
    elif isinstance(wanted, GrammarFormat) and isinstance(spec_of(wanted), Lark | CompiledGrammar):
        reason = "rules in Lark's notation cannot be combined with the rules of calls"
    else:
        return wanted
    message = f'response_format beside tools: {reason}. Set tool_choice="none" or "required", or leave one of them out'
    raise Refusal(400, message, param="response_format", code="invalid_value")
