"""The grammar of answers that call functions, with a JSON schema for each function's parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..errors import GrammarError
from .base import Language
from .call_formats import CallFormat
from .patterns.limits import deadline, left
from .patterns.tree import quoted, slashed
from .schemas.document import document
from .schemas.kinds import Kinds, kinds_of
from .schemas.nodes import Node
from .schemas.normaliser import Normaliser
from .schemas.raw_text import Notation, writer
from .schemas.writing import Writer
from .specs import JsonSchema, Spec

_ANY = r"(?:.|\n)*"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_OBJECT = document('{"type": "object"}')


@dataclass(frozen=True)
class Called:
    """A function that may be called.

    Attributes:
        name: the function's name.
        parameters: the schema of its parameters, as JSON.
        strict: True: keywords that the language cannot express raise an error. False: such keywords are checked when the finished
            text is validated. None: True if all keywords can be expressed, else False.
    """

    name: str
    parameters: str
    strict: bool | None

    @staticmethod
    def of(name: str, parameters: dict[str, Any] | None, strict: bool | None) -> Called:
        return Called(name, json.dumps(parameters or _NO_PARAMETERS), strict)

    def language(self, notation: Notation | None = None) -> Language:
        """The arguments' language in `notation` (None: JSON). Raises GrammarError, naming the function, if it cannot be expressed."""
        try:
            language = self._language(notation)
        except GrammarError as error:
            raise GrammarError(f"tools: {self.name}: {error}", error.keyword, error.path) from error
        return replace(language, warnings=tuple(self._named(warning) for warning in language.warnings))

    def _language(self, notation: Notation | None) -> Language:
        if self.strict is None:
            try:
                with deadline(left() / 2):
                    return _Arguments(self.parameters, closed=True, notation=notation).language()
            except GrammarError:
                pass  # if the schema itself is wrong, its error is raised again below
        strict = self.strict is True
        return _Arguments(self.parameters, closed=True, strict=strict, notation=notation).language()

    @property
    def kinds(self) -> Kinds:
        """The types of the function's parameters."""
        return kinds_of(self.parameters)

    @property
    def key(self) -> list[Any]:
        """The part of a specification's key that identifies this function."""
        return [self.name, self.parameters, self.strict]

    def judge(self, whole: Callable[[str], None], arguments: str) -> None:
        """Validates `arguments` by calling `whole`; adds the function's name to the GrammarError that `whole` raises."""
        try:
            whole(arguments)
        except GrammarError as error:
            raise GrammarError(f"the arguments of {self.name}: {error}", error.keyword, error.path) from error

    def _named(self, warning: str) -> str:
        return f"{self.name}: {warning}" if warning.startswith("$") else warning


@dataclass(frozen=True)
class _Arguments(JsonSchema):
    """The objects that a schema allows, in JSON or another notation; other values are excluded even if the schema has no ``type``.

    `closed` is True, since functions have no use for undeclared arguments, and without undeclared arguments the language is usually
    regular.
    """

    notation: Notation | None = None

    def _read(self, dropped: Iterable[tuple[str, str]]) -> tuple[Normaliser, Node]:
        normaliser, root = super()._read(dropped)
        return normaliser, normaliser.nodes.intersection(root, normaliser.place(_OBJECT))

    def _writer(self, normaliser: Normaliser) -> Writer:
        if self.notation is None:
            return super()._writer(normaliser)
        return writer(self.notation, normaliser, self.closed, kinds_of(self.text))


@dataclass(frozen=True)
class Arguments(Spec):
    """The specification of a function's arguments, in JSON."""

    function: Called

    @property
    def key(self) -> str:
        return self._keyed(json.dumps(self.function.key))

    def language(self) -> Language:
        with deadline():
            language = self.function.language()
        whole = language.whole
        return language if whole is None else replace(language, whole=partial(self.function.judge, whole))


@dataclass(frozen=True)
class CallSpec(Spec):
    """Answers that are calls or other text; with `alone`, a single call.

    Attributes:
        functions: the functions that may be called.
        format: how calls are written.
        alone: whether the text is a single call without its mark (:attr:`CallFormat.mark`) and without the text after its
            arguments.
        several: whether there may be more than one call.
        text: the specification of an answer without calls; None: any text that does not begin like a call.
        special: names of special tokens for which `format` has stand-ins (:func:`~decoders.constraints.vocabulary.stand_in`).
    """

    functions: tuple[Called, ...]
    format: CallFormat
    alone: bool = True
    several: bool = False
    text: Spec | None = None
    special: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        functions = [each.key for each in self.functions]
        options = [repr(self.format), self.alone, self.several, self.special]
        return self._keyed(json.dumps([functions, options, self.text.key if self.text is not None else None]))

    def language(self) -> Language:
        with deadline():
            inner = [function.language(self.format.notation) for function in self.functions]
            text = self._text()
        warnings = dict.fromkeys(warning for each in [*inner, *([text] if text else [])] for warning in each.warnings)
        pattern = self._regex(inner, text)
        # llguidance's lexer never backtracks: it would read a brace at the beginning of a text as the brace of a call.
        trigger = self.format.trigger
        apart = text is None or self.text is None or not trigger.startswith(("{", "[", '"'))
        lark = self._lark(inner, text) if apart else None
        if pattern is None and lark is None:
            raise GrammarError(
                f"tools: a text of response_format may begin like a call ({trigger}), and together they are not regular: say "
                'tool_choice="none" or "required", or leave response_format out'
            )
        whole = self._whole(inner, text)
        return Language("calls of functions", pattern, lark, tuple(warnings), whole, self.special)

    def _opening(self, function: Called) -> list[str]:
        """The text in front of the arguments as regular expressions, one for each token of a lexer."""
        opening = self.format.opening[len(self.format.mark) :] if self.alone else self.format.opening
        ids, middle = self.format.ids, self.format.middle
        if ids is not None:
            return [quoted(f"{opening}{function.name}{ids.before}"), ids.pattern, quoted(middle)]
        words = re.split(r'(?<=\{)(?=")|(?<=[:,] )', f"{opening}{function.name}{middle}")
        return [re.sub("(?<=[:,]) $", " ?", quoted(word)) for word in words if word]

    @property
    def _around(self) -> tuple[str, str, str, str]:
        """Regular expressions for the text after a call, between two calls, in front of all calls, and after all calls."""
        format = self.format
        if self.alone:
            return "", "", "", ""
        between = format.between or ""
        return (
            quoted(format.closing),
            quoted(between) + "?" * (between == "\n"),
            quoted(format.begin),
            quoted(format.end),
        )

    def _regex(self, inner: list[Language], text: Language | None) -> str | None:
        """Calls or text as one regular expression; None if the language is not regular."""
        if any(each.regex is None for each in inner) or (text is not None and text.regex is None):
            return None
        closing, between, begin, end = self._around
        pairs = zip(self.functions, inner, strict=True)
        some = "|".join(f"{''.join(self._opening(each))}(?:{language.regex})" for each, language in pairs)
        call = f"(?:{some}){closing}"
        calls = f"{begin}{call}{f'(?:{between}{call})*' if self.several else ''}{end}"
        return calls if text is None else f"(?:{calls}|{text.regex})"

    def _text(self) -> Language | None:
        if self.alone:
            return None
        if self.text is not None:
            return self.text.language()
        # Bare JSON begins with a brace, and llguidance's lexer takes the longest match, so a text that begins with a brace is a
        # call.
        return Language("text", not_beginning(self.format.trigger or "{"))

    def _whole(self, inner: list[Language], text: Language | None) -> Callable[[str], None] | None:
        """The function that validates finished answers; None if there is nothing to validate.

        It validates a call's arguments, or an answer without calls, if the grammar accepts texts that their schema forbids.
        """
        pairs = zip(self.functions, inner, strict=True)
        judges = {
            function.name: partial(function.judge, each.whole) for function, each in pairs if each.whole is not None
        }
        judge_text = None if text is None else text.whole
        if not judges and judge_text is None:
            return None
        kinds = {each.name: each.kinds for each in self.functions}
        return partial(_judge, kinds, judges, judge_text, self.format, self.alone)

    def _lark(self, inner: list[Language], text: Language | None) -> str:
        closing, between, begin, end = (slashed(part) if part else "" for part in self._around)
        openings = (" ".join(slashed(word) for word in self._opening(each)) for each in self.functions)
        some = " | ".join(f"{opening} arguments{number}" for number, opening in enumerate(openings))
        rules = [
            "start: calls" + (" | text" if text is not None else ""),
            f"calls: {begin} one {f'({between} one)*' if self.several else ''} {end}",
            f"one: ({some}) {closing}",
        ]
        rules += [_renamed(each.lark or "", f"arguments{number}", f"_{number}") for number, each in enumerate(inner)]
        # Lark's rules are preferred: the regex would be a single terminal, which could match the beginning of a call.
        if text is not None and text.lark is not None:
            rules.append(_renamed(text.lark, "text", "_"))
        elif text is not None and text.regex is not None:
            rules.append(f"text: {slashed(text.regex)}")
        return "\n".join(rules)


def _judge(
    functions: Mapping[str, Kinds], judges: Mapping[str, Callable[[str], None]], judge_text: Callable[[str], None] | None,
    format: CallFormat, alone: bool, answer: str,
) -> None:  # fmt: skip
    """Validates a finished answer, see :meth:`CallSpec._whole`."""
    written = format.read(f"{format.begin}{format.mark}{answer}{format.closing}" if alone else answer, functions)
    if not written.calls and judge_text is not None:
        judge_text(answer)
    for call in written.calls:
        if call.name in judges:
            judges[call.name](call.arguments)


#: In the Lark grammar of a schema, matches regexes and strings, which stay, and the names of rules, which are replaced.
_NAMES = re.compile(r'/(?:\\.|[^/\\])*/|"(?:\\.|[^"\\])*"|\b([rtT]\d+)\b')


def _renamed(grammar: str, start: str, suffix: str) -> str:
    """`grammar` with `start` as the new name of the rule ``start``, and with `suffix` appended to all other names of rules."""
    renamed = _NAMES.sub(lambda name: f"{name[0]}{suffix}" if name[1] else name[0], grammar)
    return re.sub(r"^start:", f"{start}:", renamed, count=1, flags=re.MULTILINE)


def not_beginning(prefix: str) -> str:
    """A regular expression for all texts that do not begin with `prefix`."""
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
