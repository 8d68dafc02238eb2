"""Arrays as rules: items by position, and automata that count items of a kind or remember the values used."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from ..errors import GrammarError
from . import limits
from .arrays import Arrays
from .finite import values
from .nodes import Node
from .notation import EMPTY, Expr, alt, rep, seq, text

if TYPE_CHECKING:
    from .writing import Writer

_MOST_DIFFERENT = 9


def write_array(writer: Writer, name: str, array: Arrays) -> Expr:
    """The texts of `array`; `name` begins the names of its rules."""
    blanks = writer.blanks
    opened, closed = text(rf"\[{blanks.opened}"), text(rf"{blanks.closing}\]")
    empty = [text(rf"\[{blanks.opened}\]")] if array.low == 0 else []
    if array.unique:
        inside = _different(writer, name, array)
    elif array.counts:
        inside = _counted(writer, name, array)
    else:
        inside = _plain(writer, array)
    if array.counts and any(count.low for count in array.counts):
        empty = []
    return alt(*empty, seq(opened, inside, closed))


def _plain(writer: Writer, array: Arrays) -> Expr:
    """At least one item, and no conditions but on positions."""
    comma = text(writer.blanks.comma)
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
    return seq(writer.place(array.at(0)), more)


def _counted(writer: Writer, name: str, array: Arrays) -> Expr:
    """States: the position, and how many items of each kind there were, as far as it matters."""
    nodes, counts = writer.normal.nodes, array.counts
    last = max(len(array.prefix), array.low, array.high or 0, *(count.start for count in counts), 1)
    loops = array.high is None
    start = (0, *(0 for _ in counts))
    known = {start}
    todo = [start]
    while todo:
        state = todo.pop()
        position, had = state[0], state[1:]
        alternatives: list[Expr] = []
        again: list[Expr] = []
        if position >= max(array.low, 1) and all(n >= count.low for n, count in zip(had, counts, strict=True)):
            alternatives.append(EMPTY)
        choices = []
        for n, count in zip(had, counts, strict=True):
            open_here = position >= count.start
            if count.high is not None:
                choices.append([False, True] if open_here and n < count.high else [False])
            else:
                choices.append([False, True] if open_here and n < count.low else [False])
        for taken in product(*choices) if array.high is None or position < array.high else ():
            item = array.at(position)
            for one, count in zip(taken, counts, strict=True):
                if one:
                    item = nodes.both(item, count.node)
                elif count.high is not None and position >= count.start:
                    item = nodes.both(item, nodes.negate(count.node))
            after = (
                min(position + 1, last) if loops else position + 1,
                *(n + one for n, one in zip(had, taken, strict=True)),
            )
            written = seq(*([text(writer.blanks.comma)] if position else []), writer.place(item))
            if after == state:
                again.append(written)
                continue
            if after not in known:
                known.add(after)
                todo.append(after)
                if len(known) > limits.ALTERNATIVES * 4:
                    limits.exceeded("ALTERNATIVES", limits.ALTERNATIVES * 4, "counting items", "contains")
            alternatives.append(seq(written, writer.call(_state(name, after))))
        writer.rule(_state(name, state), seq(rep(alt(*again), 0, None) if again else EMPTY, alt(*alternatives)))
    return writer.call(_state(name, start))


def _different(writer: Writer, name: str, array: Arrays) -> Expr:
    """States: the position, and which of the few possible values have occurred.

    Raises:
        GrammarError: there are too many possible values.
    """
    kinds = [*array.prefix, array.rest] if array.high is None or array.high > len(array.prefix) else [*array.prefix]
    few: list[Node] = []
    for kind in kinds:
        kind_values = values(writer.normal, kind, _MOST_DIFFERENT)
        few += kind_values or []
        few = list(dict.fromkeys(few))
        if kind_values is None or len(few) > _MOST_DIFFERENT or array.counts:
            raise GrammarError(
                f"uniqueItems is for items of at most {_MOST_DIFFERENT} possible values (an enum, say), without contains; "
                "strict=False validates it afterwards",
                "uniqueItems",
            )
    nodes, last = writer.normal.nodes, max(len(array.prefix), array.low)
    start: tuple[int, frozenset[Node]] = (0, frozenset())
    known, todo = {start}, [start]
    while todo:
        position, used = todo.pop()
        alternatives: list[Expr] = [EMPTY] if max(array.low, 1) <= len(used) else []
        for value in few:
            item = nodes.both(array.at(position), value)
            if value in used or writer.normal.empty(item) or (array.high is not None and len(used) >= array.high):
                continue
            after = (min(position + 1, last), used | {value})
            if after not in known:
                known.add(after)
                todo.append(after)
            comma = [text(writer.blanks.comma)] if used else []
            alternatives.append(seq(*comma, writer.place(item), writer.call(_used(name, after))))
        writer.rule(_used(name, (position, used)), alt(*alternatives))
    return writer.call(_used(name, start))


def _state(name: str, state: tuple[int, ...]) -> str:
    return name + "c" + "_".join(map(str, state))


def _used(name: str, state: tuple[int, frozenset[Node]]) -> str:
    return f"{name}u{state[0]}_" + "_".join(map(str, sorted(state[1])))
