"""The text of a value as the language has it: keys in the grammar's order, numbers without needless decimals."""

from __future__ import annotations

import json
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
        return quoted(value) if any(kept.holds(value) for kept in shapes.strings) else None
    if isinstance(value, list):
        ways = (_array(normal, shape, value) for shape in shapes.arrays)
    else:
        ways = (_object(normal, shape, value) for shape in shapes.objects)
    return next((way for way in ways if way is not None), None)


def _array(normal: Normal, shape: Arrays, value: list[Any]) -> str | None:
    if len(value) < shape.low or (shape.high is not None and len(value) > shape.high):
        return None
    for count in shape.counts:
        of_kind = sum(spell(normal, count.node, item) is not None for item in value[count.start :])
        if of_kind < count.low or (count.high is not None and of_kind > count.high):
            return None
    if shape.unique and len({_identity(item) for item in value}) < len(value):
        return None
    items = [spell(normal, shape.at(position), item) for position, item in enumerate(value)]
    return None if None in items else f"[{', '.join(item for item in items if item is not None)}]"


def _object(normal: Normal, shape: Objects, value: dict[str, Any]) -> str | None:
    if len(value) < shape.low or (shape.high is not None and len(value) > shape.high):
        return None
    names = shape.names
    if any(prop.required and prop.name not in value for prop in shape.properties):
        return None
    missing = list(shape.some)
    written = []
    for name in sorted(value, key=lambda name: list(names).index(name) if name in names else len(names)):
        node: Node = names[name].node if name in names else shape.value(name)
        if node == FALSE:
            return None
        for keys, kind in list(missing) if name not in names else []:
            if keys.holds(name) and spell(normal, kind, value[name]) is not None:
                node = normal.nodes.both(node, kind)
                missing.remove((keys, kind))
        text = spell(normal, node, value[name])
        if text is None:
            return None
        written.append(f"{quoted(name)}: {text}")
    return None if missing else "{" + ", ".join(written) + "}"


def _identity(value: Any) -> str:
    """Equal for values that are equal in JSON: 1 and 1.0, but not 1 and true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_identity, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{_identity(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value)
