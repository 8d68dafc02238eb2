"""The pictures of docs/explanation/architecture.md are those of the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_architecture", DOCS / "draw_architecture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_those_of_the_code(drawing: ModuleType) -> None:
    text = drawing.PAGE.read_text(encoding="utf-8")
    assert drawing.page(text) == text, "run python docs/draw_architecture.py"


def test_every_file_that_the_page_names_is_there(drawing: ModuleType) -> None:
    import re

    text = drawing.PAGE.read_text(encoding="utf-8")
    named = re.findall(r"`((?:decoders|hf|engine|strategies|grammars|tests|plugins)/[\w./-]*)`", text)
    assert len(named) > 15
    for name in named:
        assert any((root / name).exists() for root in (drawing.ROOT, drawing.PACKAGE)), name
