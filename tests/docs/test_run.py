"""The pictures of README and the docs are what the demo model writes, in the colours of who proposed it."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pictures_of_a_run_are_what_the_code_draws() -> None:
    script = runpy.run_path(str(DOCS / "draw_run.py"))
    assert script["tree"]() == (DOCS / "tree.svg").read_text(encoding="utf-8")
    assert script["draw"](*script["run"]()) == (DOCS / "run.svg").read_text(encoding="utf-8")
