"""The notation of methods: ``speculative[length=2]``, ``a[x=1]+b``, ``transformers-assisted[5]``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import SettingsError
from ..settings import parse_assignments

#: The key in brackets that names the verifier. It is not a setting of the strategy.
VERIFIER = "verifier"
#: The key in brackets that names the grammar: a name that ``decoders grammars`` lists, or a file. It is not a setting of the strategy.
GRAMMAR = "grammar"
COMPILE = "compile"
#: Settings of the loop that brackets may hold, and their values: compiling, memory of strategies between calls, number formats of
#: the target's matrices and cache, and of the draft model's matrices.
LOOP: dict[str, tuple[bool | str, ...]] = {
    COMPILE: (True, False, "auto"),
    "memory": (True, False),
    "weights": ("keep", "16bit", "int8", "int4"),
    "kv_cache": ("keep", "int8"),
    "draft_weights": ("auto", "keep", "16bit", "int8", "int4"),
}
_OPENING = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Variant:
    """One strategy, or several merged, with settings.

    Attributes:
        parts: names of the strategies as written.
        brackets: the text in each part's brackets; "" without brackets.
        settings: settings by part, nested as in ``strategy_config``.
        verifier: the verifier named in the brackets; None if there is none.
        grammar: the grammar named in the brackets; None if there is none.
        loop: settings of the decoding loop in the brackets, by name (the keys of :data:`LOOP`).
    """

    parts: tuple[str, ...]
    brackets: tuple[str, ...]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    verifier: str | None = None
    grammar: str | None = None
    loop: Mapping[str, bool | str] = field(default_factory=dict)

    def shown(self, names: Sequence[str]) -> str:
        """The variant's text in tables and records. names: registry names of the parts."""
        texts = zip(names, self.brackets, strict=True)
        return "+".join(name + (f"[{text}]" if text else "") for name, text in texts)


def split(text: str, separator: str = ",") -> list[str]:
    """Splits `text` at every `separator` outside brackets and quotes. Empty pieces are left out.

    Raises:
        SettingsError: the brackets do not match.
    """
    pieces: list[str] = []
    closing: list[str] = []
    quoted, start = False, 0
    for index, letter in enumerate(text):
        if letter == '"' and closing:  # quotes belong to JSON text, and have no meaning outside of brackets
            quoted = not quoted
        elif quoted:
            continue
        elif letter in _OPENING:
            closing.append(_OPENING[letter])
        elif letter in _OPENING.values():
            if not closing or closing.pop() != letter:
                raise SettingsError(f"{text!r}: {letter!r} closes nothing")
        elif letter == separator and not closing:
            pieces.append(text[start:index])
            start = index + 1
    if closing or quoted:
        raise SettingsError(f"{text!r}: a closing {closing[-1]!r} is missing")
    return [piece.strip() for piece in (*pieces, text[start:]) if piece.strip()]


def bracketed(text: str) -> tuple[str, str | None]:
    """Splits `text` into a name and the text in its brackets, which is None if there are no brackets.

    Raises:
        SettingsError: there is text after the brackets, or no name before them.
    """
    name, opened, inside = text.partition("[")
    if not opened:
        return name.strip(), None
    if not name.strip() or not inside.rstrip().endswith("]"):
        raise SettingsError(f"{text!r}: settings stand in brackets right after a name, as in speculative[length=2]")
    return name.strip(), inside.rstrip()[:-1].strip()


def parse(text: str) -> Variant:
    """Parses ``speculative[length=2,verifier=block]``, or several such parts that are merged with ``+``.

    Values are parsed as in ``--set``: JSON, or else the text itself.

    Raises:
        SettingsError: `text` is malformed, or has two verifiers, two grammars, or two values of a setting of the loop.
    """
    parts, brackets = [], []
    whole_tree: dict[str, list[Any]] = {key: [] for key in (VERIFIER, GRAMMAR, *LOOP)}
    settings: dict[str, Mapping[str, Any]] = {}
    for piece in split(text, "+"):
        name, inside = bracketed(piece)
        assignments = parse_assignments(split(inside or ""), f"{name}[…]")
        for key in assignments.keys() & whole_tree:
            value = assignments.pop(key)
            value = value if key in LOOP else str(value)
            if value not in whole_tree[key]:
                whole_tree[key].append(value)
        if assignments:
            settings[name] = assignments
        parts.append(name)
        brackets.append(inside or "")
    if not parts:
        raise SettingsError("the name of a strategy is empty")
    for key, values in whole_tree.items():
        if len(values) > 1:
            raise SettingsError(
                f"{text!r}: only one {key} is possible, since it holds for the whole draft tree; {len(values)} are given"
            )
    given = {key: values[0] for key, values in whole_tree.items() if values}
    loop = {key: given[key] for key in LOOP if key in given}
    for key, value in loop.items():
        if not any(value is allowed or (isinstance(value, str) and value == allowed) for allowed in LOOP[key]):
            words = [str(allowed).lower() for allowed in LOOP[key]]
            raise SettingsError(f"{text!r}: {key} must be {', '.join(words[:-1])} or {words[-1]}, not {value!r}")
    return Variant(tuple(parts), tuple(brackets), settings, given.get(VERIFIER), given.get(GRAMMAR), loop)


def with_setting(name: str, setting: str) -> str:
    """Adds `setting` (``KEY=VALUE``) to the brackets of the first strategy in `name`: ``a[x=1]+b`` becomes ``a[x=1,KEY=VALUE]+b``."""
    first, plus, rest = name.partition("+")
    return (f"{first[:-1]},{setting}]" if first.endswith("]") else f"{first}[{setting}]") + plus + rest


def assistant_tokens(text: str) -> tuple[str, int | None]:
    """The name of one of transformers' methods, and the number in its brackets, as in ``transformers-assisted[5]``.

    Raises:
        SettingsError: the brackets do not hold a positive number.
    """
    name, inside = bracketed(text)
    if inside is None:
        return name, None
    if not re.fullmatch("[1-9][0-9]*", inside):
        raise SettingsError(
            f"{text!r}: the brackets must hold the number of draft tokens per step, as in transformers-assisted[5]"
        )
    return name, int(inside)
