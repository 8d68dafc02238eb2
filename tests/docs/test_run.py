"""The pictures of README and the docs are what the demo model writes, in the colours of who proposed it."""

from __future__ import annotations

import json
import re
import runpy
from importlib import util
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pictures_of_a_run_are_what_the_code_draws() -> None:
    script = runpy.run_path(str(DOCS / "draw_run.py"))
    assert script["tree"]() in (DOCS / "explanation" / "how-the-loop-works.md").read_text(encoding="utf-8")
    assert script["draw"](*script["run"]()) == (DOCS / "run.svg").read_text(encoding="utf-8")


def test_no_word_of_the_picture_is_cut_or_has_two_colours() -> None:
    lines = re.findall(r"<text .*?>(.*?)</text>", (DOCS / "run.svg").read_text(encoding="utf-8"))
    spans = [re.findall(r">(.*?)</tspan>", line) for line in lines]
    pairs = [pair for line in spans for pair in pairwise(line)]
    assert not [pair for pair in pairs if re.search(r"\w$", pair[0]) and re.match(r"\w", pair[1])]


@pytest.mark.parametrize("kind", ["wheel", "clone", "repository", "nothing"])
def test_the_notebooks_first_cell_installs_what_is_at_hand(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = json.loads((DOCS / "notebooks" / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    cell = "".join(next(cell for cell in cells if cell["cell_type"] == "code")["source"])
    names: dict[str, Any] = {"installed": []}
    code = re.sub(r'%pip install --quiet "\{source\}"', "installed.append(source)", cell)
    folder = tmp_path / "docs" / "notebooks"
    folder.mkdir(parents=True)
    if kind == "wheel":
        (folder / "hf_decoders-0.1.0-py3-none-any.whl").touch()
    elif kind == "clone":
        (tmp_path / "decoders" / "demo").mkdir(parents=True)
    elif kind == "repository":
        code = code.replace('REPOSITORY = ""', 'REPOSITORY = "https://host/project"')
    monkeypatch.chdir(folder)
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    if kind == "nothing":
        with pytest.raises(AssertionError, match="upload"):
            exec(code, names)
        return
    exec(code, names)
    expected = {
        "wheel": "hf_decoders-0.1.0-py3-none-any.whl",
        "clone": str(tmp_path),
        "repository": "git+https://host/project",
    }
    assert names["installed"] == [expected[kind]]
