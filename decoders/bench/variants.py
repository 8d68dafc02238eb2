"""Methods as they are written: ``speculative[length=2]``, ``a[x=1]+b``, ``transformers-assisted[5]``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import SettingsError
from ..settings import parse_assignments

#: A key in the brackets that is not a setting of the strategy. It names the rule that accepts drafts.
VERIFIER = "verifier"
#: Another: a grammar of the library, or a file with one, that the text must follow.
GRAMMAR = "grammar"
#: And whether the core is compiled: one of true, false and auto.
COMPILE = "compile"
#: And whether strategies keep what they learn from call to call: true or false.
MEMORY = "memory"
_OPENING = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Variant:
    """One strategy, or several merged, with settings.

    Attributes:
        parts: names as written.
        brackets: the text in each part's brackets, "" without.
        settings: by part, nested as in ``strategy_config``.
        verifier: named in the brackets, if any.
        grammar: named in the brackets, if any.
        compile: given in the brackets, if at all.
        memory: given in the brackets, if at all.
    """

    parts: tuple[str, ...]
    brackets: tuple[str, ...]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    verifier: str | None = None
    grammar: str | None = None
    compile: bool | str | None = None
    memory: bool | None = None

    def shown(self, names: Sequence[str]) -> str:
        """What stands in tables and records; `names` are the registry names of the parts."""
        texts = zip(names, self.brackets, strict=True)
        return "+".join(name + (f"[{text}]" if text else "") for name, text in texts)


def split(text: str, separator: str = ",") -> list[str]:
    """`text` at every `separator` outside brackets and quotes; empty pieces are left out.

    Raises:
        SettingsError: brackets that do not match.
    """
    pieces: list[str] = []
    closing: list[str] = []
    quoted, start = False, 0
    for index, letter in enumerate(text):
        if letter == '"' and closing:  # JSON text; outside brackets a quote means nothing
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
        raise SettingsError(f"{text!r}: there is no {closing[-1]!r} at the end of what was opened")
    return [piece.strip() for piece in (*pieces, text[start:]) if piece.strip()]


def bracketed(text: str) -> tuple[str, str | None]:
    """Name and what stands in the brackets behind it; None without brackets.

    Raises:
        SettingsError: text behind the brackets, or no name before them.
    """
    name, opened, inside = text.partition("[")
    if not opened:
        return name.strip(), None
    if not name.strip() or not inside.rstrip().endswith("]"):
        raise SettingsError(f"{text!r}: settings stand in brackets right behind a name, as in speculative[length=2]")
    return name.strip(), inside.rstrip()[:-1].strip()


def parse(text: str) -> Variant:
    """``speculative[length=2,verifier=block]``, or parts merged with ``+``, each with brackets of its own.

    Values are parsed as in ``--set``: JSON, or else the text itself.

    Raises:
        SettingsError: malformed, or two verifiers, grammars or values of compile or memory.
    """
    parts, brackets = [], []
    whole_tree: dict[str, set[Any]] = {VERIFIER: set(), GRAMMAR: set(), COMPILE: set(), MEMORY: set()}
    settings: dict[str, Mapping[str, Any]] = {}
    for piece in split(text, "+"):
        name, inside = bracketed(piece)
        assignments = parse_assignments(split(inside or ""), f"{name}[…]")
        for key in assignments.keys() & whole_tree:
            value = assignments.pop(key)
            whole_tree[key].add(value if key in (COMPILE, MEMORY) and isinstance(value, bool) else str(value))
        if assignments:
            settings[name] = assignments
        parts.append(name)
        brackets.append(inside or "")
    if not parts:
        raise SettingsError("a strategy has a name: it is empty here")
    for key, values in whole_tree.items():
        if len(values) > 1:
            raise SettingsError(f"{text!r}: one {key} holds for the whole tree, {len(values)} are named")
    verifier, grammar, compiled, memory = (next(iter(values), None) for values in whole_tree.values())
    if isinstance(compiled, str) and compiled != "auto":
        raise SettingsError(f"{text!r}: {COMPILE} is true, false or auto, not {compiled!r}")
    if isinstance(memory, str):
        raise SettingsError(f"{text!r}: {MEMORY} is true or false, not {memory!r}")
    return Variant(tuple(parts), tuple(brackets), settings, verifier, grammar, compiled, memory)


def assistant_tokens(text: str) -> tuple[str, int | None]:
    """Name of one of transformers' methods, and the number in the brackets behind ``transformers-assisted[5]``.

    Raises:
        SettingsError: brackets without a positive number in them.
    """
    name, inside = bracketed(text)
    if inside is None:
        return name, None
    if not re.fullmatch("[1-9][0-9]*", inside):
        raise SettingsError(f"{text!r}: the brackets hold the draft tokens per step, as in transformers-assisted[5]")
    return name, int(inside)
