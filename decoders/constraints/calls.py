"""The grammar of answers that are calls of functions, each function with the document of its own parameters."""

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
    """A function as the grammar of its calls knows it.

    Attributes:
        name: of the function.
        parameters: their schema, as JSON.
        strict: whether what the language cannot honour is refused, or left to the validation of the call; None: to the validation,
            but only where it has to be.
    """

    name: str
    parameters: str
    strict: bool | None

    @staticmethod
    def of(name: str, parameters: dict[str, Any] | None, strict: bool | None) -> Called:
        return Called(name, json.dumps(parameters or _NO_PARAMETERS), strict)

    def language(self) -> Language:
        """The arguments.

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
                pass  # what is wrong with the schema itself is said again
        return _Arguments(self.parameters, closed=True, strict=self.strict is True).language()

    def _named(self, warning: str) -> str:
        return f"{self.name}: {warning}" if warning.startswith("$") else warning


class _Arguments(JsonSchema):
    """JSON objects that a schema allows, which need not say that it is about objects.

    Arguments that are not declared are of no use to a function, and a language without them is mostly regular: `closed`.
    """

    def _read(self, dropped: Iterable[tuple[str, str]]) -> tuple[Normaliser, Node]:
        normaliser, root = super()._read(dropped)
        return normaliser, normaliser.nodes.intersection(root, normaliser.place(_OBJECT))


@dataclass(frozen=True)
class CallSpec(Spec):
    """Answers that are calls, or text: of a format, or any that is no call.

    Attributes:
        functions: those that may be called.
        key_of_arguments: of a call, which is an object of a name and arguments.
        prefix: before a call.
        suffix: after a call.
        text: whether text is an answer, too.
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
        # llguidance's lexer never goes back: it takes the first brace of a text for that of such a prefix.
        apart = text is None or self.format is None or not self.prefix.startswith(("{", "[", '"'))
        lark = self._lark(inner, text) if apart else None
        if pattern is None and lark is None:
            raise GrammarError(
                f"tools: texts of response_format may begin as calls do ({self.prefix}), and the two are no regular expression: say "
                'tool_choice="none" or "required", or leave response_format out'
            )
        return Language("calls of functions", pattern, lark, tuple(warnings), self._whole(inner, text))

    def _opening(self, function: Called) -> list[str]:
        """Expressions of the words of a call before its arguments."""
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
        # Bare JSON begins with a brace, and llguidance's lexer takes the longest text: what begins so is a call.
        return Language("text", not_beginning(self.prefix or "{"))

    def _whole(self, inner: list[Language], text: Language | None) -> Callable[[str], None] | None:
        """Judges arguments that a language is too wide for, and text that does not begin as calls."""
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
        if text is not None and text.lark is not None:  # rather than its expression, one word that a call may begin as
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


#: What stands between slashes or quotes in a grammar of a schema, and the names of its rules.
_NAMES = re.compile(r'/(?:\\.|[^/\\])*/|"(?:\\.|[^"\\])*"|\b([rtT]\d+)\b')


def _renamed(grammar: str, start: str, suffix: str) -> str:
    """`grammar` with `start` in the place of ``start``, and `suffix` behind its other names."""
    renamed = _NAMES.sub(lambda name: f"{name[0]}{suffix}" if name[1] else name[0], grammar)
    return re.sub(r"^start:", f"{start}:", renamed, count=1, flags=re.MULTILINE)


def written_calls(
    text: str, begin: int, names: Collection[str], key_of_arguments: str, several: bool, opening: str = ""
) -> Iterator[tuple[str, Any]]:
    """The names and arguments of the calls in `text` from `begin` on, as far as they are complete and of functions that there are.

    Args:
        several: whether there may be more than one.
        opening: what stands in front of each; it may have braces of its own.
    """
    place = begin
    while (place := _brace(text, place, opening)) >= 0:
        try:
            value, place = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):  # whatever a model may write where nothing constrains it
            return
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in names:
            return
        yield name, value.get(key_of_arguments, {})
        if not several:
            return


def _brace(text: str, place: int, opening: str) -> int:
    """The place of the next call's own brace, after `opening` if that comes first; -1 if there is none."""
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
