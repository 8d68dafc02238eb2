"""Counts how large the package is and how far one token travels through it: ``python docs/count_package.py``.

A frame or file is counted where a call of ``generate`` enters it, on the demo's draft model under ``prompt_lookup``, uncompiled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "decoders"


def lines_of(files: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


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
    for what, number in (
        ("package: lines, files", (lines_of(files), len(files))),
        ("modules at its root", (len(list(PACKAGE.glob("*.py"))),)),
        ("engine: lines, files", (lines_of(engine), len(engine))),
        ("bench and its commands: lines, files", (lines_of(bench), len(bench))),
        ("tests: lines", (lines_of(tests),)),
        ("frames from generate to the forward pass", (frames,)),
        ("files that a step enters; their lines", (len(entered), lines_of(entered))),
    ):
        print(f"{what:45}{'  '.join(f'{value:>7,}' for value in number)}")  # noqa: T201


if __name__ == "__main__":
    main()
