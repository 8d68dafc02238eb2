"""The rules of a grammar as trees, and writing them in two notations: llguidance's Lark, and one regular expression.

Both notations of the rules denote the same texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..patterns.limits import check
from ..patterns.tree import slashed, times
from . import limits


@dataclass(frozen=True)
class Terminal:
    """A terminal of the grammar: a set of texts with its own definition.

    Attributes:
        lark: the definition in Lark's notation. Terminals with equal definitions are equal.
        regex: a regular expression for the texts, or a function that computes it; None if it does not exist or is too long.
        rule: whether `lark` can only define a rule, not a terminal.
    """

    lark: str
    regex: str | Callable[[], str | None] | None = field(compare=False)
    rule: bool = False


@dataclass(frozen=True)
class Word:
    """Any text of `terminal`."""

    terminal: Terminal


@dataclass(frozen=True)
class Seq:
    """Concatenation: the parts one after the other. Without parts, the empty string."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True)
class Alt:
    """Alternation: one of the parts. Without parts it derives no text, not even the empty string."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True)
class Rep:
    """Repetition: `part` from `low` to `high` times (None: any number of times)."""

    part: Expr
    low: int
    high: int | None


@dataclass(frozen=True)
class RuleReference:
    """Any text that the rule named `rule` derives."""

    rule: str


Expr: TypeAlias = Word | Seq | Alt | Rep | RuleReference

_COUNT = re.compile(r"\\.|\{([0-9]+),?([0-9]*)\}", re.DOTALL)
_UNIT = 40

EMPTY = Seq(())
NOTHING = Alt(())


def seq(*parts: Expr) -> Expr:
    flat: list[Expr] = []
    for part in parts:
        flat += part.parts if isinstance(part, Seq) else [part]
    if NOTHING in flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alt(*parts: Expr) -> Expr:
    flat: dict[Expr, None] = {}
    for part in parts:
        flat.update(dict.fromkeys(part.parts if isinstance(part, Alt) else [part]))
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def rep(part: Expr, low: int, high: int | None) -> Expr:
    if high is not None and high < low:
        return NOTHING
    if part == NOTHING:
        return EMPTY if low == 0 else NOTHING
    if high == 0 or part == EMPTY:
        return EMPTY
    return part if low == high == 1 else Rep(part, low, high)


def text(regex: str) -> Word:
    """The texts that `regex` matches, as a terminal."""
    return Word(Terminal(slashed(regex), regex))


def inline(schema: dict[str, Any]) -> Word:
    """The texts of `schema`, as a ``%json`` rule that llguidance compiles; there is no regular expression for them."""
    return Word(Terminal(f"%json {json.dumps(schema)}", None, rule=True))


def calls(expr: Expr) -> list[str]:
    """Names of the rules that `expr` refers to."""
    match expr:
        case RuleReference(rule):
            return [rule]
        case Seq(parts) | Alt(parts):
            return list(dict.fromkeys(rule for part in parts for rule in calls(part)))
        case Rep(part, _, _):
            return calls(part)
    return []


def _callers(rules: dict[str, Expr]) -> dict[str, list[str]]:
    """For every rule, the rules that use it."""
    callers: dict[str, list[str]] = {}
    for name, rule in rules.items():
        for callee in calls(rule):
            callers.setdefault(callee, []).append(name)
    return callers


def lark(rules: dict[str, Expr]) -> str:
    """`rules` in Lark's notation, with the start rule ``start``."""
    names = {rule: "start" if rule == "start" else f"r{index}" for index, rule in enumerate(rules)}
    terminals: dict[str, str] = {}
    size = 0

    def write(expr: Expr, tight: bool) -> str:
        nonlocal size
        size += isinstance(expr, Seq | Alt | Rep)
        if size + len(rules) + len(terminals) > limits.SYMBOLS:
            limits.exceeded("SYMBOLS", limits.SYMBOLS, "the grammar", path="$")
        match expr:
            case Word(terminal):
                return terminals.setdefault(terminal.lark, f"{'t' if terminal.rule else 'T'}{len(terminals)}")
            case RuleReference(rule):
                return names[rule]
            case Seq(parts):
                if not parts:
                    return '""'
                inside = " ".join(write(part, True) for part in parts)
                return f"({inside})" if tight and len(parts) > 1 else inside
            case Alt(parts):
                inside = " | ".join(write(part, False) for part in parts)
                return f"({inside})" if tight else inside
            case Rep(part, low, high):
                marks = {(0, None): "*", (1, None): "+", (0, 1): "?"}
                count = f"{{{low},{'' if high is None else high}}}"
                return f"({write(part, False)}){marks.get((low, high), count)}"

    lines = [f"{names[name]}: {write(rule, False)}" for name, rule in rules.items()]
    return "\n".join([*lines, *(f"{name}: {definition}" for definition, name in terminals.items()), ""])


def _size(regex: str) -> int:
    """The length of `regex` with repetitions expanded, estimated at ``_UNIT`` characters (a regex for a JSON character) per copy."""
    counts = [int(high or low or 0) for low, high in _COUNT.findall(regex)]
    return len(regex) + _UNIT * sum(counts)


def _recursive(rules: dict[str, Expr]) -> bool:
    """Whether any rule is recursive. A rule is done once all rules that it uses are done; recursive rules are never done."""
    open_calls = {name: set(calls(rule)) for name, rule in rules.items()}
    callers = _callers(rules)
    done = [name for name, called in open_calls.items() if not called]
    for name in done:
        for caller in callers.get(name, ()):
            open_calls[caller].discard(name)
            if not open_calls[caller]:
                done.append(caller)
    return len(done) < len(rules)


def regex(rules: dict[str, Expr]) -> str | None:
    """`rules` as one regular expression; None if they are recursive or too deep, or have no expression of limited length."""
    if _recursive(rules):
        return None
    known: dict[str, tuple[str, int] | None] = {}

    def write(expr: Expr) -> tuple[str, int] | None:
        """The regular expression, in brackets if needed, and its size with repetitions expanded; None if it would be too long."""
        check("writing the grammar")
        match expr:
            case Word(terminal):
                whole = terminal.regex() if callable(terminal.regex) else terminal.regex
                return None if whole is None else (f"(?:{whole})" if "|" in whole else whole, _size(whole))
            case RuleReference(rule):
                if rule not in known:
                    known[rule] = write(rules[rule])
                return known[rule]
            case Seq(parts) | Alt(parts):
                written, size, length = [], 0, 0
                for part in parts:
                    one = write(part)
                    if one is None:
                        return None
                    written.append(one[0])
                    length, size = length + len(one[0]), size + one[1]
                    if length > limits.REGEX_CHARACTERS or size > limits.REGEX_COPIES:
                        return None
                if isinstance(expr, Seq):
                    return "".join(written), size
                return f"(?:{'|'.join(written)})", size
            case Rep(part, low, high):
                one = write(part)
                size = 0 if one is None else one[1] * max(1, low, high or 0)
                if one is None or size > limits.REGEX_COPIES:
                    return None
                return times(f"(?:{one[0]})", low, high), size

    try:
        whole = write(rules["start"])
    except RecursionError:  # thousands of levels of rules
        return None
    return None if whole is None else whole[0]


def prune(rules: dict[str, Expr]) -> dict[str, Expr]:
    """`rules` without dead ends (alternatives without a text) and without rules that ``start`` does not use."""
    alive = _Productive(rules).alive
    pruned: dict[str, Expr] = {}
    todo = ["start"]
    while todo:
        name = todo.pop()
        if name not in pruned and name in alive:
            pruned[name] = _without_dead(rules[name], alive)
            todo += reversed(calls(pruned[name]))
    return pruned


class _Productive:
    """Finds the rules that derive at least one text.

    It counts, for every expression, the parts that must still derive a text. When a count becomes zero, the count of the enclosing
    expression decreases by one. So the work is linear in the size of the grammar.
    """

    def __init__(self, rules: dict[str, Expr]) -> None:
        self.alive: set[str] = set()
        self.needs: list[int] = []
        self.around: list[int | str] = []  # the enclosing expression, or the rule's name
        self.references: dict[str, list[int]] = {}
        self.done: list[int] = []
        for name, rule in rules.items():
            self.add(rule, name)
        while self.done:
            outer = self.around[self.done.pop()]
            if isinstance(outer, str):
                if outer not in self.alive:
                    self.alive.add(outer)
                    self.done += self.references.get(outer, ())
                continue
            self.needs[outer] -= 1
            if self.needs[outer] == 0:
                self.done.append(outer)

    def add(self, expr: Expr, outer: int | str) -> None:
        """Adds `expr`, a part of `outer`, and the number of parts of `expr` that must derive a text first."""
        number = len(self.needs)
        self.around.append(outer)
        needs, parts = 0, tuple[Expr, ...]()
        match expr:
            case RuleReference(rule):
                needs = 1
                self.references.setdefault(rule, []).append(number)
            case Seq(parts):
                needs = len(parts)
            case Alt(parts):
                needs = 1
            case Rep(part, low, _) if low:
                needs, parts = 1, (part,)
        self.needs.append(needs)
        if needs == 0:
            self.done.append(number)
        for part in parts:
            self.add(part, number)


def _without_dead(expr: Expr, alive: set[str]) -> Expr:
    match expr:
        case RuleReference(rule):
            return expr if rule in alive else NOTHING
        case Seq(parts):
            return seq(*(_without_dead(part, alive) for part in parts))
        case Alt(parts):
            return alt(*(written_rule for part in parts if (written_rule := _without_dead(part, alive)) != NOTHING))
        case Rep(part, low, high):
            return rep(_without_dead(part, alive), low, high)
    return expr
