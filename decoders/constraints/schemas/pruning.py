"""A grammar without what has no text."""

from __future__ import annotations

from .notation import NOTHING, Alt, Expr, Rep, RuleReference, Seq, alt, calls, rep, seq


def prune(rules: dict[str, Expr]) -> dict[str, Expr]:
    """`rules` without alternatives that have no text, which would be dead ends, and without rules that ``start`` does not use."""
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
    """The rules that have a text.

    Every expression counts the parts that it still needs, and tells the one around it when there are none, so that the work is
    in proportion to the grammar.
    """

    def __init__(self, rules: dict[str, Expr]) -> None:
        self.alive: set[str] = set()
        self.needs: list[int] = []
        self.around: list[int | str] = []  # an expression, or the rule that it is
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
        """Counts what `expr`, a part of `outer`, needs."""
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
