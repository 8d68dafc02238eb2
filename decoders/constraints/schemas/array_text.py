"""Rules for the JSON texts of arrays: items by position, and automata that count items (``contains``) or remember used values."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

from ...errors import GrammarError
from . import limits
from .arrays import Arrays
from .nodes import Node
from .normaliser import Normaliser
from .notation import EMPTY, Expr, RuleReference, alt, rep, seq, text
from .numbers import Numbers, fraction
from .whitespace import Rules

_MOST_VALUES = 9


def write_array(rules: Rules, name: str, array: Arrays) -> Expr:
    """An expression for the JSON texts of the arrays in `array`. The names of the rules that are added to `rules` begin with `name`."""
    whitespace = rules.whitespace
    opened, closed = text(rf"\[{whitespace.opened}"), text(rf"{whitespace.closing}\]")
    empty = [text(rf"\[{whitespace.empty}\]")] if array.low == 0 else []
    if array.unique:
        inside = _unique(rules, name, array)
    elif array.counts:
        inside = _counted(rules, name, array)
    else:
        inside = _plain(rules, array)
    if array.counts and any(count.low for count in array.counts):
        empty = []
    return alt(*empty, seq(opened, inside, closed))


def _plain(rules: Rules, array: Arrays) -> Expr:
    """An expression for the items of arrays of at least one item, if an item's conditions depend only on its position."""
    comma = text(rules.whitespace.comma)
    first = len(array.prefix)
    if array.high == 0:
        return alt()
    more = rep(
        seq(comma, rules.place(array.rest)),
        max(0, array.low - max(first, 1)),
        None if array.high is None else array.high - max(first, 1),
    )
    for position in reversed(range(1, first)):
        if array.high is None or position < array.high:
            more = rep(seq(comma, rules.place(array.prefix[position]), more), int(position < array.low), 1)
    return seq(rules.place(array.item_at(0)), more)


def _counted(rules: Rules, name: str, array: Arrays) -> Expr:
    """An expression for the items of arrays with bounds on how many items satisfy a node, a set of values (:class:`.arrays.Count`).

    Each rule stands for a state of an automaton: the position and, for each bound, how many items have satisfied its node.
    """
    nodes, counts = rules.normaliser.nodes, array.counts
    last = max(len(array.prefix), array.low, array.high or 0, *(count.start for count in counts), 1)
    loops = array.high is None
    start = (0, *(0 for _ in counts))
    known = {start}
    todo = [start]
    while todo:
        state = todo.pop()
        position, so_far = state[0], state[1:]
        alternatives: list[Expr] = []
        repeated: list[Expr] = []
        if position >= max(array.low, 1) and all(n >= count.low for n, count in zip(so_far, counts, strict=True)):
            alternatives.append(EMPTY)
        choices = []
        for n, count in zip(so_far, counts, strict=True):
            counts_here = position >= count.start
            if count.high is not None:
                choices.append([False, True] if counts_here and n < count.high else [False])
            else:
                choices.append([False, True] if counts_here and n < count.low else [False])
        for taken in product(*choices) if array.high is None or position < array.high else ():
            item = array.item_at(position)
            for counted, count in zip(taken, counts, strict=True):
                if counted:
                    item = nodes.intersection(item, count.node)
                elif count.high is not None and position >= count.start:
                    item = nodes.intersection(item, nodes.complement(count.node))
            after = (
                min(position + 1, last) if loops else position + 1,
                *(n + counted for n, counted in zip(so_far, taken, strict=True)),
            )
            element = seq(*([text(rules.whitespace.comma)] if position else []), rules.place(item))
            if after == state:
                repeated.append(element)
                continue
            if after not in known:
                known.add(after)
                todo.append(after)
                if len(known) > limits.ALTERNATIVES * 4:
                    limits.exceeded("ALTERNATIVES", limits.ALTERNATIVES * 4, "counting items", "contains")
            alternatives.append(seq(element, RuleReference(_count_state(name, after))))
        rules.rule(
            _count_state(name, state), seq(rep(alt(*repeated), 0, None) if repeated else EMPTY, alt(*alternatives))
        )
    return RuleReference(_count_state(name, start))


def _unique(rules: Rules, name: str, array: Arrays) -> Expr:
    """An expression for the items of arrays with ``uniqueItems``. Each rule is for a position and the set of values used so far.

    Raises:
        GrammarError: the items have too many possible values, or the array has `counts`, too.
    """
    items = [*array.prefix, array.rest] if array.high is None or array.high > len(array.prefix) else [*array.prefix]
    possible: list[Node] = []
    for item in items:
        kind_values = values(rules.normaliser, item, _MOST_VALUES)
        possible += kind_values or []
        possible = list(dict.fromkeys(possible))
        if kind_values is None or len(possible) > _MOST_VALUES or array.counts:
            raise GrammarError(
                f"uniqueItems needs items of at most {_MOST_VALUES} possible values, such as an enum, and no contains; "
                "strict=False validates it afterwards",
                "uniqueItems",
            )
    nodes, last = rules.normaliser.nodes, max(len(array.prefix), array.low)
    start: tuple[int, frozenset[Node]] = (0, frozenset())
    known, todo = {start}, [start]
    while todo:
        position, used = todo.pop()
        alternatives: list[Expr] = [EMPTY] if max(array.low, 1) <= len(used) else []
        for value in possible:
            item = nodes.intersection(array.item_at(position), value)
            if value in used or rules.normaliser.empty(item) or (array.high is not None and len(used) >= array.high):
                continue
            after = (min(position + 1, last), used | {value})
            if after not in known:
                known.add(after)
                todo.append(after)
            comma = [text(rules.whitespace.comma)] if used else []
            alternatives.append(seq(*comma, rules.place(item), RuleReference(_unique_state(name, after))))
        rules.rule(_unique_state(name, (position, used)), alt(*alternatives))
    return RuleReference(_unique_state(name, start))


def _count_state(name: str, state: tuple[int, ...]) -> str:
    return name + "c" + "_".join(map(str, state))


def _unique_state(name: str, state: tuple[int, frozenset[Node]]) -> str:
    return f"{name}u{state[0]}_" + "_".join(map(str, sorted(state[1])))


def values(normaliser: Normaliser, node: Node, most: int) -> list[Node] | None:
    """The values that `node` allows, each as a node; None if there are more than `most`, or they cannot be enumerated."""
    shapes = normaliser.shapes(node)
    known_values: list[object] = [{"null": None, "true": True, "false": False}[unit] for unit in sorted(shapes.units)]
    for numbers in shapes.numbers:
        points = _points(numbers, most)
        if points is None:
            return None
        known_values += points
    for strings in shapes.strings:
        if strings.values is None:
            return None
        known_values += sorted(strings.values)
    if shapes.objects or any(shape.high != 0 for shape in shapes.arrays):
        return None
    if shapes.arrays:
        known_values.append([])
    nodes = list(dict.fromkeys(normaliser.value(value) for value in known_values))
    return nodes if len(nodes) <= most else None


def _points(numbers: Numbers, most: int) -> list[int | float] | None:
    """All numbers of the set `numbers`; None if there are more than `most`, or a number is neither an integer nor a float."""
    low, high, step = numbers.low, numbers.high, numbers.step
    if low is None or high is None or (step is None and low != high):
        return None
    if step is not None and (high - low) / step + 1 > most:
        return None
    count = 1 if step is None else int((high - low) / step) + 1
    points = [point for i in range(count) if numbers.contains(point := low + i * (step or 0))]
    written = [_written(point) for point in points]
    return written if [fraction(value) for value in written] == points else None


def _written(point: Fraction) -> int | float:
    """`point` as a number of JSON: integers exactly, however large."""
    return int(point) if point.denominator == 1 else float(point)
