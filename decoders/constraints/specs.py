"""What a user asks for with ``grammar=``: specifications, from which backends get a language."""

from __future__ import annotations

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..errors import GrammarError, UnknownNameError, shortened
from ..patterns.python import quoted, whole_text
from . import files
from .base import Language, Policy
from .python_types import schema_of

if TYPE_CHECKING:
    from .json_schema import JsonSchema

#: Characters of all choices together: automata of a million states are no longer built in seconds.
CHOICES_LIMIT = 5_000_000
#: What to write instead of a flag.
_INSTEAD = {
    re.IGNORECASE: "spell both cases, [Aa]",
    re.DOTALL: r"write (.|\n) for any character",
    re.ASCII: r"write [0-9] for \d, [A-Za-z0-9_] for \w",
    re.VERBOSE: "leave out the blanks and remarks",
    re.MULTILINE: "leave out ^ and $ within the text",
}
_NO_SCHEMA = (type(None), int, float, bytes, list, tuple, set)


@dataclass(frozen=True, kw_only=True)
class Spec(ABC):
    """A specification of the texts that a row may write.

    Attributes:
        backend: registry name of what compiles it; ``auto`` takes the table automaton where it can.
        policy: which tokens may spell a legal text, see :data:`~decoders.constraints.base.Policy`.
        label: what messages and reports call it; none of its meaning.
    """

    backend: str | None = field(default=None)
    policy: Policy = field(default="full")
    label: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise UnknownNameError("mask policy", str(self.policy), get_args(Policy))

    @property
    @abstractmethod
    def key(self) -> str:
        """A text that tells specifications apart, for caches in memory and on disk: class, content and options."""

    @abstractmethod
    def language(self) -> Language:
        """The language, in every notation that can express it.

        Raises:
            GrammarError: it cannot be expressed; names the keyword, its path and what would handle it.
        """

    def _keyed(self, content: str) -> str:
        """The :attr:`key` of a specification that `content` says all about."""
        options = f"{type(self).__name__}/{self.backend or '-'}/{self.policy}"
        return f"{options}/{hashlib.sha256(content.encode()).hexdigest()}"


@dataclass(frozen=True)
class Regex(Spec):
    """Texts that match a regular expression as a whole.

    Attributes:
        pattern: as it was given.
    """

    pattern: str

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.whole  # errors where the pattern is written, not where it is used

    @cached_property
    def whole(self) -> str:
        """The pattern in the syntax of :attr:`Language.regex`."""
        return whole_text(self.pattern)

    @property
    def key(self) -> str:
        return self._keyed(self.whole)

    def language(self) -> Language:
        return Language(self.label or f"regex {shortened(self.pattern)}", regex=self.whole)


@dataclass(frozen=True)
class Lark(Spec):
    """Texts of a context-free grammar.

    Attributes:
        text: llguidance's dialect of Lark; the first rule is ``start``.
    """

    text: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.search(r"^\s*[?!]?start\b[^:\n]*:(?!:)", self.text, re.MULTILINE):
            hint = " This looks like GBNF or BNF: write `name: …` for `name ::= …`." if "::=" in self.text else ""
            raise GrammarError(f"{self.name} has no rule `start: …`, where texts begin.{hint}", "start")
        if any("\ud800" <= character <= "\udfff" for character in self.text):
            raise GrammarError(f"half of a surrogate pair in {self.name!a}: it stands for no character", "surrogate")

    @property
    def name(self) -> str:
        """What messages and reports call it."""
        return self.label or f"grammar {shortened(self.text) or '(empty)'}"

    @property
    def key(self) -> str:
        return self._keyed(self.text)

    def language(self) -> Language:
        return Language(self.name, lark=self.text)


@dataclass(frozen=True)
class Choice(Spec):
    """One of several texts.

    Attributes:
        texts: the choices, each once, in the order given.
    """

    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.texts:
            raise GrammarError("choice: there is nothing to choose from", "choice")
        if (size := sum(map(len, self.texts))) > CHOICES_LIMIT:
            raise GrammarError(f"choice: {size:,} characters of choices; the limit is {CHOICES_LIMIT:,}", "choice")
        for place, text in enumerate(self.texts):
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise GrammarError(f"choice: half of a surrogate pair in {text!r}", "choice", f"$[{place}]")

    @cached_property
    def whole(self) -> str:
        """The choices as a regular expression.

        What all have in front and behind is written once: one path of the automaton instead of one for each choice.
        The rest is a plain list: automaton builders fold literals themselves, faster than they read a nested pattern.
        """
        ordered = sorted(self.texts)
        front = _shared(ordered)
        rests = [text[front:] for text in ordered]
        behind = _shared(sorted(rest[::-1] for rest in rests))
        middles = (quoted(rest[: len(rest) - behind]) for rest in rests)
        begin, end = quoted(ordered[0][:front]), quoted(rests[0][len(rests[0]) - behind :])
        return f"{begin}(?:{'|'.join(middles)}){end}" if len(ordered) > 1 else quoted(ordered[0])

    @cached_property
    def key(self) -> str:
        return self._keyed(json.dumps(sorted(self.texts)))

    def language(self) -> Language:
        shown = ", ".join(map(repr, self.texts[:3])) + (", …" if len(self.texts) > 3 else "")
        return Language(self.label or f"choice of {shortened(shown)}", regex=self.whole)


def regex(pattern: str | re.Pattern[str], *, backend: str | None = None, policy: Policy = "full") -> Regex:
    """Texts that match `pattern` as a whole, for ``generate(grammar=…)``.

    Args:
        pattern: what Python's ``re`` and Rust's ``regex`` have in common. Look-around, back-references, word boundaries
            and flags are refused; ``^`` and ``$`` around the whole are allowed and idle. ``.`` is anything but a newline.
        backend: name of the grammar backend; automatic by default.
        policy: ``full``, or ``canonical``: forced text only in the tokenizer's own tokens.

    Raises:
        GrammarError: the pattern cannot be compiled; names the construct, its place and what to write instead.
    """
    if isinstance(pattern, re.Pattern):
        if flags := re.RegexFlag(pattern.flags) & ~re.RegexFlag.UNICODE:
            instead = (
                "; ".join(why for flag, why in _INSTEAD.items() if flag in flags) or "write the pattern without them"
            )
            raise GrammarError(f"regex {pattern.pattern!r}: flags ({flags}) are not read: {instead}", "flags")
        pattern = pattern.pattern
    if not isinstance(pattern, str):
        raise GrammarError(f"regex: the pattern is text, not {type(pattern).__name__}", "regex")
    return Regex(pattern, backend=backend, policy=policy)


def grammar(text: str | Path, *, backend: str | None = None, policy: Policy = "full") -> Lark:
    """Texts of a context-free grammar, for ``generate(grammar=…)``.

    Args:
        text: llguidance's dialect of Lark, or the path of a file that holds it; a text of one line that names an
            existing file is its path.
        backend: name of the grammar backend; automatic by default.
        policy: ``full``, or ``canonical``: forced text only in the tokenizer's own tokens.

    Raises:
        GrammarError: the file cannot be read, or there is no rule ``start``.
    """
    if not isinstance(text, (str, Path)):
        raise GrammarError(f"grammar: text or a path is needed, not {type(text).__name__}", "grammar")
    file = text if isinstance(text, Path) else files.named(text)
    if file is None:
        return Lark(str(text), backend=backend, policy=policy)
    if file.suffix == ".gbnf":
        raise GrammarError(
            f"{file.name}: GBNF is not read. llguidance.gbnf_to_lark turns it into Lark; check the result, since terminals "
            "of Lark take as much text as they can and those of GBNF do not",
            "gbnf",
        )
    return Lark(files.content(file), backend=backend, policy=policy, label=file.name)


def choice(
    options: Iterable[str | bool | int | float | None], *, backend: str | None = None, policy: Policy = "full"
) -> Choice:
    """One of several texts, for ``generate(grammar=…)``.

    Args:
        options: texts, verbatim; numbers, booleans and None as JSON writes them; members of an Enum as their values.
            Repeated ones count once.
        backend: name of the grammar backend; automatic by default.
        policy: ``full``, or ``canonical``: forced text only in the tokenizer's own tokens.

    Raises:
        GrammarError: there is nothing to choose from, too much, or something that has no such text.
    """
    if isinstance(options, (str, bytes)) or not isinstance(options, Iterable):
        raise GrammarError(f"choice: a list of texts is needed, not {shortened(repr(options))}", "choice")
    texts = dict.fromkeys(_masks_of(option, place) for place, option in enumerate(options))
    return Choice(tuple(texts), backend=backend, policy=policy)


def json_schema(
    schema: Any,
    *,
    whitespace: str = "space",
    strict: bool = True,
    closed: bool | None = None,
    backend: str | None = None,
    policy: Policy = "full",
) -> JsonSchema:
    """JSON texts that a schema allows, for ``generate(grammar=…)``.

    Args:
        schema: a JSON schema as a dict, its text or the path of its file; a Pydantic model, TypedDict, dataclass or another
            type that Pydantic knows.
        whitespace: ``space``: at most one blank after a comma or colon; ``compact``: none; ``flexible``: one blank, or a line
            break with its indent, wherever JSON lets white space stand inside brackets.
        strict: refuse every keyword that cannot be honoured; else the finished text is validated instead.
        closed: objects that declare properties take no others where the schema says nothing of others. By default those of
            Python's types do, and those of schemas do not, as the standard has it.
        backend: name of the grammar backend; automatic by default.
        policy: ``full``, or ``canonical``: forced text only in the tokenizer's own tokens.

    Raises:
        GrammarError: there is no such schema; or, when it is compiled, a keyword that cannot be honoured: names it, its path
            and what would handle it.
    """
    from .json_schema import JsonSchema
    from .typed import OfType, asks_more

    is_schema = isinstance(schema, (Mapping, str, bool, Path))
    file = schema if isinstance(schema, Path) else files.named(schema) if isinstance(schema, str) else None
    if file is not None:
        schema = files.schema(file)
    if isinstance(schema, Mapping):
        schema = dict(schema)
    elif not isinstance(schema, bool) and (file is not None or isinstance(schema, _NO_SCHEMA)):
        where = f"{file}: " if file else ""
        raise GrammarError(
            f"json_schema: {where}{shortened(repr(schema))} is no schema: give a dict, its text or its file, or a type",
            "schema",
        )
    options: dict[str, Any] = dict(
        whitespace=whitespace, strict=strict, closed=not is_schema if closed is None else closed, backend=backend,
        policy=policy, label=file.name if file else None,
    )  # fmt: skip
    if is_schema:
        return JsonSchema(schema, **options)
    json_schema = schema_of(schema)
    return OfType(json_schema, kind=schema, **options) if asks_more(schema) else JsonSchema(json_schema, **options)


def _shared(ordered: list[str]) -> int:
    """How many characters all of `ordered`, which is sorted, begin with: as many as the first and the last do."""
    first, last = ordered[0], ordered[-1]
    return next(
        (place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other),
        min(len(first), len(last)),
    )


def _masks_of(option: Any, place: int) -> str:
    if isinstance(option, Enum):
        option = option.value
    if isinstance(option, str):
        return str.__str__(option)  # a member of a StrEnum is the text it stands for
    if option is None or isinstance(option, (bool, int)) or (isinstance(option, float) and math.isfinite(option)):
        return json.dumps(option)
    raise GrammarError(
        f"choice: option {place} is {shortened(repr(option))}; give texts, finite numbers, booleans or None "
        "(decoders.json_schema({'enum': …}) chooses among JSON values)",
        "choice",
        f"$[{place}]",
    )
