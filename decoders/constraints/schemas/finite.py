"""Nodes that stand for a few values."""

from __future__ import annotations

from fractions import Fraction

from .nodes import Node
from .normaliser import Normaliser
from .numbers import Numbers, fraction


def values(normaliser: Normaliser, node: Node, most: int) -> list[Node] | None:
    """The values of `node`, each a node; None if there are more than `most`, or they cannot be enumerated."""
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
    """All of `numbers`; None if there are more than `most`, or some that are no float."""
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
    """`point` as JSON writes it: whole numbers exactly, however large."""
    return int(point) if point.denominator == 1 else float(point)
