"""Counts how large the package is and how far one token travels through it: ``python docs/count_package.py``.

A frame or file is counted where a call of ``generate`` enters it, on the demo's draft model under ``prompt_lookup``, uncompiled.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "decoders"


def lines_of(files: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every module of `package` by its full name."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, every: Mapping[str, Path]) -> set[str]:
    """The modules of `every` that module `name` imports anywhere: at its top, in functions, for type checking."""
    package = name if every[name].name == "__init__.py" else name.rpartition(".")[0]
    imported = set()
    for node in ast.walk(ast.parse(every[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            imported |= {full if (full := f"{source}.{alias.name}") in every else source for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    return (imported & every.keys()) - {name}


def circles(every: Mapping[str, Path]) -> list[set[str]]:
    """Sets of modules that import each other, in any number of steps."""
    reached = {name: imports(name, every) for name in every}
    for middle in every:  # Warshall's transitive closure
        for name in every:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    left, found = set(every), []
    while left:
        name = left.pop()
        circle = {name} | {other for other in reached[name] if name in reached[other]}
        left -= circle
        if len(circle) > 1:
            found.append(circle)
    return sorted(found, key=len)


def travelled() -> tuple[int, set[Path]]:
    """Frames of ours between ``generate`` and the model's own forward pass, and the files that a step enters."""
    import decoders

    model, tokenizer = decoders.demo.load("draft")
    decoders.enable(model, tokenizer)
    inputs = tokenizer("def total(values):\n    total = 0\n    for value in values:", return_tensors="pt")

    def call(tokens: int) -> None:
        settings = {"compile": False, "reuse": False}
        model.generate(**inputs, strategy="prompt_lookup", max_new_tokens=tokens, decoders_config=settings)

    deepest, files = 0, []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal deepest
        if event != "call":
            return
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            files.append(path)
        elif frame.f_code.co_name == "forward" and "modeling_llama" in path.name:
            ours = [f for f in _stack(frame) if PACKAGE in Path(f.f_code.co_filename).parents]
            deepest = max(deepest, len(ours))

    call(4)
    entered = []
    for tokens in (4, 12):  # what the longer call enters more often is what steps enter
        files.clear()
        sys.setprofile(profile)
        try:
            call(tokens)
        finally:
            sys.setprofile(None)
        entered.append({path: files.count(path) for path in files})
    return deepest, {path for path, count in entered[1].items() if count > entered[0].get(path, 0)}


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def main() -> None:
    files = list(PACKAGE.rglob("*.py"))
    engine = list((PACKAGE / "engine").rglob("*.py"))
    bench = [
        *(PACKAGE / "bench").rglob("*.py"),
        *(PACKAGE / "cli").glob("bench*.py"),
        *(PACKAGE / "cli" / "bench").rglob("*.py"),
    ]
    tests = list((ROOT / "tests").rglob("*.py"))
    frames, entered = travelled()
    found = circles(modules())
    for what, number in (
        ("package: lines, files", (lines_of(files), len(files))),
        ("modules at its root", (len(list(PACKAGE.glob("*.py"))),)),
        ("engine: lines, files", (lines_of(engine), len(engine))),
        ("bench and its commands: lines, files", (lines_of(bench), len(bench))),
        ("tests: lines", (lines_of(tests),)),
        ("circles of files; files in them", (len(found), sum(map(len, found)))),
        ("frames from generate to the forward pass", (frames,)),
        ("files that a step enters; their lines", (len(entered), lines_of(entered))),
    ):
        print(f"{what:45}{'  '.join(f'{value:>7,}' for value in number)}")  # noqa: T201


if __name__ == "__main__":
    main()
