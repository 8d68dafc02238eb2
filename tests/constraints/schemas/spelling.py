"""The text of a value as the language of a schema has it: keys in the grammar's order, numbers without needless decimals."""

from __future__ import annotations

import json
from itertools import permutations, product
from typing import Any

from decoders.constraints.schemas.arrays import Arrays
from decoders.constraints.schemas.nodes import FALSE, Node
from decoders.constraints.schemas.normaliser import Normaliser
from decoders.constraints.schemas.numbers import canonical, fraction
from decoders.constraints.schemas.objects import Objects
from decoders.constraints.schemas.string_text import quoted
from decoders.constraints.specs import JsonSchema


def spell(spec: JsonSchema, value: Any) -> str | None:
    """`value` as a text of the language of `spec`, with one blank after commas and colons; None if it is not of it.

    Raises:
        GrammarError: there is no such language.
    """
    return _spelled(*spec._read(spec._grammar[1]), value)


def _spelled(normaliser: Normaliser, node: Node, value: Any) -> str | None:
    """`value` as a text of `node`, with one blank after commas and colons; None if it is not of `node`.

    Raises:
        GrammarError: the node cannot be expressed.
    """
    shapes = normaliser.shapes(node)
    if value is None or isinstance(value, bool):
        unit = json.dumps(value)
        return unit if unit in shapes.units else None
    if isinstance(value, int | float):
        fraction_of_value = fraction(value)
        is_integer = fraction_of_value.denominator == 1 and abs(fraction_of_value) < 10**16
        return (
            (str(int(fraction_of_value)) if is_integer else json.dumps(value))
            if any(n.contains(fraction_of_value) for n in shapes.numbers)
            else None
        )
    if isinstance(value, str):
        return quoted(value) if any(strings.contains(value) for strings in shapes.strings) else None
    if isinstance(value, list):
        spellings = (_array(normaliser, shape, value) for shape in shapes.arrays)
    else:
        spellings = (_object(normaliser, shape, value) for shape in shapes.objects)
    return next((text for text in spellings if text is not None), None)


def _array(normaliser: Normaliser, shape: Arrays, value: list[Any]) -> str | None:
    if len(value) < shape.low or (shape.high is not None and len(value) > shape.high):
        return None
    for count in shape.counts:
        of_kind = sum(_spelled(normaliser, count.node, item) is not None for item in value[count.start :])
        if of_kind < count.low or (count.high is not None and of_kind > count.high):
            return None
    if shape.unique and len({canonical(item) for item in value}) < len(value):
        return None
    items = [
        _spelled(normaliser, node, item) for node, item in zip(_counted(normaliser, shape, value), value, strict=True)
    ]
    return None if None in items else f"[{', '.join(item for item in items if item is not None)}]"


def _counted(normaliser: Normaliser, shape: Arrays, value: list[Any]) -> list[Node]:
    """The node of each position of `value`, where the first items of a kind are those that are counted."""
    nodes = [shape.item_at(position) for position in range(len(value))]
    for count in shape.counts:
        so_far = 0
        for position in range(count.start, len(value)):
            is_of_kind = _spelled(normaliser, count.node, value[position]) is not None
            if is_of_kind and (count.high is not None or so_far < count.low):
                nodes[position] = normaliser.nodes.intersection(nodes[position], count.node)
                so_far += 1
            elif not is_of_kind and count.high is not None:
                nodes[position] = normaliser.nodes.intersection(
                    nodes[position], normaliser.nodes.complement(count.node)
                )
    return nodes


def _object(normaliser: Normaliser, shape: Objects, value: dict[str, Any]) -> str | None:
    if len(value) < shape.low or (shape.high is not None and len(value) > shape.high):
        return None
    names = shape.names
    if any(prop.required and prop.name not in value for prop in shape.properties):
        return None
    undeclared = [name for name in value if name not in names]
    if undeclared and shape.low - (len(value) - len(undeclared)) > 1:
        return None
    order = {name: place for place, name in enumerate(names)}
    last_names = _fulfilling(normaliser, shape, {name: value[name] for name in undeclared})
    if last_names is None:
        return None
    others = [name for name in undeclared if name not in last_names]
    written = []
    for name in [*sorted(value.keys() - set(undeclared), key=order.__getitem__), *others, *last_names]:
        node: Node = names[name].node if name in names else shape.value(name)
        text = None if node == FALSE else _spelled(normaliser, node, value[name])
        if text is None:
            return None
        written.append(f"{quoted(name)}: {text}")
    return "{" + ", ".join(written) + "}"


def _fulfilling(normaliser: Normaliser, shape: Objects, members: dict[str, Any]) -> list[str] | None:
    """Names of members that fulfil ``exists``, ordered so that no key fulfils an earlier one's condition; None if there are none."""
    choices = [
        [name for name in members if keys.contains(name) and _spelled(normaliser, kind, members[name]) is not None]
        for keys, kind in shape.exists
    ]
    for chosen in product(*choices):
        for order in permutations(dict.fromkeys(chosen)):
            keys_of = {
                name: [keys for (keys, _), fulfilling in zip(shape.exists, chosen, strict=True) if fulfilling == name]
                for name in order
            }
            if not any(
                keys.contains(later)
                for i, name in enumerate(order)
                for keys in keys_of[name]
                for later in order[i + 1 :]
            ):
                return [*order]
    return None
