"""The text of a value as the language has it: keys in the grammar's order, numbers without needless decimals."""

from __future__ import annotations

import json
from itertools import permutations, product
from typing import Any

from .arrays import Arrays
from .json_text import quoted
from .nodes import FALSE, Node
from .normal import Normal
from .numbers import fraction
from .objects import Objects


def spell(normal: Normal, node: Node, value: Any) -> str | None:
    """`value` as a text of `node`, with one blank after commas and colons; None if it is not of `node`.

    Raises:
        GrammarError: the node cannot be expressed.
    """
    shapes = normal.shapes(node)
    if value is None or isinstance(value, bool):
        unit = json.dumps(value)
        return unit if unit in shapes.units else None
    if isinstance(value, int | float):
        exact = fraction(value)
        whole = exact.denominator == 1 and abs(exact) < 10**16
        return (
            (str(int(exact)) if whole else json.dumps(value)) if any(n.holds(exact) for n in shapes.numbers) else None
        )
    if isinstance(value, str):
        return quoted(value) if any(strings.holds(value) for strings in shapes.strings) else None
    if isinstance(value, list):
        spellings = (_array(normal, shape, value) for shape in shapes.arrays)
    else:
        spellings = (_object(normal, shape, value) for shape in shapes.objects)
    return next((way for way in spellings if way is not None), None)


def _array(normal: Normal, shape: Arrays, value: list[Any]) -> str | None:
    if len(value) < shape.low or (shape.high is not None and len(value) > shape.high):
        return None
    for count in shape.counts:
        of_kind = sum(spell(normal, count.node, item) is not None for item in value[count.start :])
        if of_kind < count.low or (count.high is not None and of_kind > count.high):
            return None
    if shape.unique and len({_identity(item) for item in value}) < len(value):
        return None
    items = [spell(normal, node, item) for node, item in zip(_counted(normal, shape, value), value, strict=True)]
    return None if None in items else f"[{', '.join(item for item in items if item is not None)}]"


def _counted(normal: Normal, shape: Arrays, value: list[Any]) -> list[Node]:
    """What stands at each position where the first items of a kind are those that count: keys have the order of that."""
    nodes = [shape.at(position) for position in range(len(value))]
    for count in shape.counts:
        had = 0
        for position in range(count.start, len(value)):
            of_kind = spell(normal, count.node, value[position]) is not None
            if of_kind and (count.high is not None or had < count.low):
                nodes[position] = normal.nodes.both(nodes[position], count.node)
                had += 1
            elif not of_kind and count.high is not None:
                nodes[position] = normal.nodes.both(nodes[position], normal.nodes.negate(count.node))
    return nodes


def _object(normal: Normal, shape: Objects, value: dict[str, Any]) -> str | None:
    if len(value) < shape.low or (shape.high is not None and len(value) > shape.high):
        return None
    names = shape.names
    if any(prop.required and prop.name not in value for prop in shape.properties):
        return None
    undeclared = [name for name in value if name not in names]
    if undeclared and shape.low - (len(value) - len(undeclared)) > 1:
        return None
    order = {name: place for place, name in enumerate(names)}
    behind = _meeting(normal, shape, {name: value[name] for name in undeclared})
    if behind is None:
        return None
    free = [name for name in undeclared if name not in behind]
    written = []
    for name in [*sorted(value.keys() - set(undeclared), key=order.__getitem__), *free, *behind]:
        node: Node = names[name].node if name in names else shape.value(name)
        text = None if node == FALSE else spell(normal, node, value[name])
        if text is None:
            return None
        written.append(f"{quoted(name)}: {text}")
    return "{" + ", ".join(written) + "}"


def _meeting(normal: Normal, shape: Objects, members: dict[str, Any]) -> list[str] | None:
    """The names that meet ``some``, in an order in which none has a key that one before it is for; None if there are none."""
    choices = [
        [name for name in members if keys.holds(name) and spell(normal, kind, members[name]) is not None]
        for keys, kind in shape.some
    ]
    for chosen in product(*choices):
        for order in permutations(dict.fromkeys(chosen)):
            met = {
                name: [keys for (keys, _), its in zip(shape.some, chosen, strict=True) if its == name] for name in order
            }
            if not any(
                keys.holds(later) for i, name in enumerate(order) for keys in met[name] for later in order[i + 1 :]
            ):
                return [*order]
    return None


def _identity(value: Any) -> str:
    """Equal for values that are equal in JSON: 1 and 1.0, but not 1 and true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_identity, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_identity(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value)
