"""The picture of docs/explanation/scheduling.md is that of a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_picture_is_that_of_a_run() -> None:
    spec = importlib.util.spec_from_file_location("draw_scheduling", DOCS / "draw_scheduling.py")
    assert spec is not None and spec.loader is not None
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    text = drawing.PAGE.read_text(encoding="utf-8")
    assert drawing.page(text) == text, "run python docs/draw_scheduling.py"
