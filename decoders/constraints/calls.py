"""The grammar of answers that call functions, with a JSON schema for each function's parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..errors import GrammarError
from .base import Language
from .patterns.limits import deadline, left
from .patterns.tree import quoted, slashed
from .schemas.document import document
from .schemas.nodes import Node
from .schemas.normaliser import Normaliser
from .specs import JsonSchema, Spec

_ANY = r"(?:.|\n)*"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_OBJECT = document('{"type": "object"}')


@dataclass(frozen=True)
class Called:
    """A function that may be called.

    Attributes:
        name: of the function.
        parameters: their schema, as JSON.
        strict: whether keywords that the language cannot honour are refused (True) or left to validation (False); None: left to
            validation only if there is no other way.
    """

    name: str
    parameters: str
    strict: bool | None

    @staticmethod
    def of(name: str, parameters: dict[str, Any] | None, strict: bool | None) -> Called:
        return Called(name, json.dumps(parameters or _NO_PARAMETERS), strict)

    def language(self) -> Language:
        """The language of the arguments.

        Raises:
            GrammarError: they cannot be expressed; names the function.
        """
        try:
            language = self._language()
        except GrammarError as error:
            raise GrammarError(f"tools: {self.name}: {error}", error.keyword, error.path) from error
        return replace(language, warnings=tuple(self._named(warning) for warning in language.warnings))

    def _language(self) -> Language:
        if self.strict is None:
            try:
                with deadline(left() / 2):
                    return _Arguments(self.parameters, closed=True).language()
            except GrammarError:
                pass  # an error of the schema itself is raised again below
        return _Arguments(self.parameters, closed=True, strict=self.strict is True).language()

    def _named(self, warning: str) -> str:
        return f"{self.name}: {warning}" if warning.startswith("$") else warning


class _Arguments(JsonSchema):
    """JSON objects that a schema allows, even if the schema has no ``type``.

    `closed`, since a function has no use for undeclared arguments, and a language without them is mostly regular.
    """

    def _read(self, dropped: Iterable[tuple[str, str]]) -> tuple[Normaliser, Node]:
        normaliser, root = super()._read(dropped)
        return normaliser, normaliser.nodes.intersection(root, normaliser.place(_OBJECT))


@dataclass(frozen=True)
class CallSpec(Spec):
    """Answers that are calls or, if `text`, text: of a format, or any that does not begin as a call.

    Attributes:
        functions: those that may be called.
        key_of_arguments: the key of the arguments in a call, which is an object with a name and arguments.
        prefix: before a call.
        suffix: after a call.
        text: whether an answer may be text.
        several: whether there may be more than one call.
        format: of the text; None: any that does not begin as a call.
    """

    functions: tuple[Called, ...]
    key_of_arguments: str
    prefix: str
    suffix: str
    text: bool
    several: bool
    format: Spec | None = None

    @property
    def key(self) -> str:
        functions = [[each.name, each.parameters, each.strict] for each in self.functions]
        options = [self.key_of_arguments, self.prefix, self.suffix, self.text, self.several]
        return self._keyed(json.dumps([functions, options, self.format.key if self.format is not None else None]))

    def language(self) -> Language:
        with deadline():
            inner = [function.language() for function in self.functions]
            text = self._text()
        warnings = dict.fromkeys(warning for each in [*inner, *([text] if text else [])] for warning in each.warnings)
        pattern = self._regex(inner, text)
        # llguidance's lexer never backtracks: it would take the first brace of a text for that of such a prefix.
        apart = text is None or self.format is None or not self.prefix.startswith(("{", "[", '"'))
        lark = self._lark(inner, text) if apart else None
        if pattern is None and lark is None:
            raise GrammarError(
                f"tools: texts of response_format may begin as calls do ({self.prefix}), and the two are no regular expression: say "
                'tool_choice="none" or "required", or leave response_format out'
            )
        return Language("calls of functions", pattern, lark, tuple(warnings), self._whole(inner, text))

    def _opening(self, function: Called) -> list[str]:
        """Expressions for the parts of a call before its arguments."""
        return [r"\{", '"name": ?', f'"{quoted(function.name)}"', ", ?", f'"{quoted(self.key_of_arguments)}": ?']

    def _regex(self, inner: list[Language], text: Language | None) -> str | None:
        """Calls or text as one expression; None if there is none."""
        if any(each.regex is None for each in inner) or (text is not None and text.regex is None):
            return None
        pairs = zip(self.functions, inner, strict=True)
        some = "|".join(rf"{''.join(self._opening(function))}(?:{each.regex})\}}" for function, each in pairs)
        call = f"{quoted(self.prefix)}(?:{some}){quoted(self.suffix)}"
        calls = rf"{call}(?:\n?{call})*" if self.several else call
        return calls if text is None else f"(?:{calls}|{text.regex})"

    def _text(self) -> Language | None:
        if not self.text:
            return None
        if self.format is not None:
            return self.format.language()
        # Bare JSON begins with a brace, and llguidance's lexer takes the longest match: text beginning with one counts as a call.
        return Language("text", not_beginning(self.prefix or "{"))

    def _whole(self, inner: list[Language], text: Language | None) -> Callable[[str], None] | None:
        """Judges arguments whose language is too wide, and text that does not begin as a call."""
        judges = {f.name: each.whole for f, each in zip(self.functions, inner, strict=True) if each.whole is not None}
        judge_text = None if text is None else text.whole
        if not judges and judge_text is None:
            return None
        names = frozenset(function.name for function in self.functions)
        return _Answers(names, judges, judge_text, self.text, self.key_of_arguments, self.several, self.prefix)

    def _lark(self, inner: list[Language], text: Language | None) -> str:
        around = [slashed(quoted(part)) if part else "" for part in (self.prefix, self.suffix)]
        openings = (" ".join(slashed(word) for word in self._opening(each)) for each in self.functions)
        some = " | ".join(rf"{opening} arguments{number} /\}}/" for number, opening in enumerate(openings))
        calls = r"calls: one (/\n?/ one)*" if self.several else "calls: one"
        rules = [
            "start: calls" + (" | text" if text is not None else ""),
            calls,
            f"one: {around[0]} ({some}) {around[1]}",
        ]
        rules += [_renamed(each.lark or "", f"arguments{number}", f"_{number}") for number, each in enumerate(inner)]
        if (
            text is not None and text.lark is not None
        ):  # preferred to its regex, a single word that a call could begin as
            rules.append(_renamed(text.lark, "text", "_"))
        elif text is not None and text.regex is not None:
            rules.append(f"text: {slashed(text.regex)}")
        return "\n".join(rules)


@dataclass(frozen=True)
class _Answers:
    """Judges answers, see :meth:`CallSpec._whole`."""

    names: frozenset[str]
    judges: dict[str, Callable[[str], None]]
    judge_text: Callable[[str], None] | None
    text: bool
    key_of_arguments: str
    several: bool
    prefix: str

    def __call__(self, answer: str) -> None:
        begins = quoted(self.prefix) + (r'\{"name": ?"' if not self.prefix else "")
        if self.text and not re.match(begins, answer):
            if self.judge_text is not None:
                self.judge_text(answer)
            return
        calls = written_calls(answer, 0, self.names, self.key_of_arguments, self.several, self.prefix)
        for name, arguments in calls:
            if name in self.judges:
                try:
                    self.judges[name](json.dumps(arguments))
                except GrammarError as error:
                    raise GrammarError(f"the arguments of {name}: {error}", error.keyword, error.path) from error


#: Regexes and strings in the Lark grammar of a schema, which are skipped, and the names of its rules.
_NAMES = re.compile(r'/(?:\\.|[^/\\])*/|"(?:\\.|[^"\\])*"|\b([rtT]\d+)\b')


def _renamed(grammar: str, start: str, suffix: str) -> str:
    """`grammar` with `start` in the place of ``start``, and `suffix` behind its other names."""
    renamed = _NAMES.sub(lambda name: f"{name[0]}{suffix}" if name[1] else name[0], grammar)
    return re.sub(r"^start:", f"{start}:", renamed, count=1, flags=re.MULTILINE)


def written_calls(
    text: str, begin: int, names: Collection[str], key_of_arguments: str, several: bool, opening: str = ""
) -> Iterator[tuple[str, Any]]:
    """The names and arguments of the complete calls in `text` from `begin` on, of functions among `names`.

    Args:
        several: whether there may be more than one.
        opening: the text in front of each call, which may contain braces.
    """
    place = begin
    while (place := _brace(text, place, opening)) >= 0:
        try:
            value, place = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):  # unconstrained text need not be JSON
            return
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in names:
            return
        yield name, value.get(key_of_arguments, {})
        if not several:
            return


def _brace(text: str, place: int, opening: str) -> int:
    """The index of the next call's first brace, behind `opening` if that comes first; -1 if there is none."""
    brace = text.find("{", place)
    if opening and 0 <= (before := text.find(opening, place)) <= brace:
        return text.find("{", before + len(opening))
    return brace


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
