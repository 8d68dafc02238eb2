"""No class of the engine has more attributes than a reader can hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "decoders"
MOST = 20
#: What is over it, and may only become smaller.
OVER = {"engine/decode/drafters/drafter.py ModelDrafter": 21}


def attributes(cls: ast.ClassDef) -> set[str]:
    """What an object of the class holds: annotated fields, and what its methods assign on ``self``.

    Class variables, properties and methods do not count, nor what a base class assigns.
    """
    fields = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    }
    assigned = {
        node.attr
        for method in cls.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    setters = {
        method.name
        for method in cls.body
        if isinstance(method, ast.FunctionDef) and any("setter" in ast.unparse(d) for d in method.decorator_list)
    }
    return (fields | assigned) - setters


def classes() -> Iterator[tuple[str, set[str]]]:
    for path in sorted((ROOT / "engine").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield f"{path.relative_to(ROOT)} {node.name}", attributes(node)


def test_fields_and_assignments_on_self_are_counted() -> None:
    code = """
class Example:
    kind: ClassVar[str] = "none"
    size: int = 0

    def __init__(self):
        self.first, (self.second, self.third) = 1, (2, 3)
        self.counter: int = 0
        other.foreign = 1

    @property
    def seen(self): ...

    @seen.setter
    def seen(self, value): self.counter += 1

    def reset(self):
        self.seen = 0
        self.later[0] = 1
"""
    (cls,) = ast.parse(code).body
    assert isinstance(cls, ast.ClassDef)
    assert attributes(cls) == {"size", "first", "second", "third", "counter"}


def test_no_class_of_the_engine_has_too_many_attributes() -> None:
    counted = dict(classes())
    assert len(counted) > 100
    too_many = {name: (len(held), sorted(held)) for name, held in counted.items() if len(held) > OVER.get(name, MOST)}
    assert too_many == {}
