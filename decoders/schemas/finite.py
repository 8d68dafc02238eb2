"""Nodes that stand for a few values."""

from __future__ import annotations

from .nodes import Node
from .normaliser import Normaliser


def values(normaliser: Normaliser, node: Node, most: int) -> list[Node] | None:
    """The values of `node`, each a node; None if there are more than `most`, or they cannot be enumerated."""
    shapes = normaliser.shapes(node)
    known_values: list[object] = [{"null": None, "true": True, "false": False}[unit] for unit in sorted(shapes.units)]
    for numbers in shapes.numbers:
        if numbers.step is None and numbers.low == numbers.high and numbers.low is not None:
            known_values.append(float(numbers.low))
            continue
        if numbers.step is None or numbers.low is None or numbers.high is None:
            return None
        count = (numbers.high - numbers.low) / numbers.step + 1
        if count > most:
            return None
        points = [numbers.low + numbers.step * i for i in range(int(count))]
        known_values += [int(p) if p.denominator == 1 else float(p) for p in points if numbers.contains(p)]
    for strings in shapes.strings:
        if strings.values is None:
            return None
        known_values += sorted(strings.values)
    if len(known_values) > most or any(shape.high != 0 for shape in shapes.arrays):
        return None
    if shapes.arrays:
        known_values.append([])
    if shapes.objects:
        return None
    return list(dict.fromkeys(normaliser.value(value) for value in known_values))
