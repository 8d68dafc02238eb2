"""Arrays as rules: items by position, and automata that count items of a kind or remember the values used."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from ...errors import GrammarError
from . import limits
from .arrays import Arrays
from .finite import values
from .nodes import Node
from .notation import EMPTY, Expr, alt, rep, seq, text

if TYPE_CHECKING:
    from .writing import Writer

_MOST_VALUES = 9


def write_array(writer: Writer, name: str, array: Arrays) -> Expr:
    """The texts of `array`; `name` begins the names of its rules."""
    whitespace = writer.whitespace
    opened, closed = text(rf"\[{whitespace.opened}"), text(rf"{whitespace.closing}\]")
    empty = [text(rf"\[{whitespace.opened}\]")] if array.low == 0 else []
    if array.unique:
        inside = _unique(writer, name, array)
    elif array.counts:
        inside = _counted(writer, name, array)
    else:
        inside = _plain(writer, array)
    if array.counts and any(count.low for count in array.counts):
        empty = []
    return alt(*empty, seq(opened, inside, closed))


def _plain(writer: Writer, array: Arrays) -> Expr:
    """At least one item, and no conditions but on positions."""
    comma = text(writer.whitespace.comma)
    first = len(array.prefix)
    if array.high == 0:
        return alt()
    more = rep(
        seq(comma, writer.place(array.rest)),
        max(0, array.low - max(first, 1)),
        None if array.high is None else array.high - max(first, 1),
    )
    for position in reversed(range(1, first)):
        if array.high is None or position < array.high:
            more = rep(seq(comma, writer.place(array.prefix[position]), more), int(position < array.low), 1)
    return seq(writer.place(array.item_at(0)), more)


def _counted(writer: Writer, name: str, array: Arrays) -> Expr:
    """States: the position, and how many items of each kind there were, as far as it matters."""
    nodes, counts = writer.normaliser.nodes, array.counts
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
            element = seq(*([text(writer.whitespace.comma)] if position else []), writer.place(item))
            if after == state:
                repeated.append(element)
                continue
            if after not in known:
                known.add(after)
                todo.append(after)
                if len(known) > limits.ALTERNATIVES * 4:
                    limits.exceeded("ALTERNATIVES", limits.ALTERNATIVES * 4, "counting items", "contains")
            alternatives.append(seq(element, writer.reference(_count_state(name, after))))
        writer.rule(
            _count_state(name, state), seq(rep(alt(*repeated), 0, None) if repeated else EMPTY, alt(*alternatives))
        )
    return writer.reference(_count_state(name, start))


def _unique(writer: Writer, name: str, array: Arrays) -> Expr:
    """States: the position, and which of the few possible values have occurred.

    Raises:
        GrammarError: there are too many possible values.
    """
    items = [*array.prefix, array.rest] if array.high is None or array.high > len(array.prefix) else [*array.prefix]
    possible: list[Node] = []
    for item in items:
        kind_values = values(writer.normaliser, item, _MOST_VALUES)
        possible += kind_values or []
        possible = list(dict.fromkeys(possible))
        if kind_values is None or len(possible) > _MOST_VALUES or array.counts:
            raise GrammarError(
                f"uniqueItems is for items of at most {_MOST_VALUES} possible values (an enum, say), without contains; "
                "strict=False validates it afterwards",
                "uniqueItems",
            )
    nodes, last = writer.normaliser.nodes, max(len(array.prefix), array.low)
    start: tuple[int, frozenset[Node]] = (0, frozenset())
    known, todo = {start}, [start]
    while todo:
        position, used = todo.pop()
        alternatives: list[Expr] = [EMPTY] if max(array.low, 1) <= len(used) else []
        for value in possible:
            item = nodes.intersection(array.item_at(position), value)
            if value in used or writer.normaliser.empty(item) or (array.high is not None and len(used) >= array.high):
                continue
            after = (min(position + 1, last), used | {value})
            if after not in known:
                known.add(after)
                todo.append(after)
            comma = [text(writer.whitespace.comma)] if used else []
            alternatives.append(seq(*comma, writer.place(item), writer.reference(_unique_state(name, after))))
        writer.rule(_unique_state(name, (position, used)), alt(*alternatives))
    return writer.reference(_unique_state(name, start))


def _count_state(name: str, state: tuple[int, ...]) -> str:
    return name + "c" + "_".join(map(str, state))


def _unique_state(name: str, state: tuple[int, frozenset[Node]]) -> str:
    return f"{name}u{state[0]}_" + "_".join(map(str, sorted(state[1])))
