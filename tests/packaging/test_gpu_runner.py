"""``tests/gpu/run.py`` runs the tests of a GPU side by side and says what is known, whatever becomes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).parents[1] / "gpu" / "run.py"
#: Stands for a file of tests: its parameters are those of the test of whole texts.
FILE = """
import os, time
import pytest

@pytest.mark.parametrize("rows", ["one row", "ragged rows"])
@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
@pytest.mark.parametrize("strategy", ["suffix", "auto"])
def test_tokens_are_those_of_plain_decoding(strategy, dtype, rows):
    assert (strategy, dtype) != ("auto", "torch.bfloat16"), "texts differ"

def test_another(): pass
"""
#: Their conftest, in processes that import neither torch nor decoders.
CONFTEST = (RUNNER.parent / "conftest.py").read_text()
for heavy, light in {
    "import torch\n": "from types import SimpleNamespace\n",
    "from decoders.bench import machine\n": "machine = SimpleNamespace(facts=lambda on: {'device': 'none'})\n"
    "torch = SimpleNamespace(device=str, cuda=SimpleNamespace(is_available=lambda: False))\n",
}.items():
    assert heavy in CONFTEST
    CONFTEST = CONFTEST.replace(heavy, light)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    files = map(str, sorted(folder.glob("test_*.py")))
    return subprocess.run(
        [sys.executable, str(RUNNER), "--out", str(folder / "out"), "--jobs", "4", *arguments, *files],
        env=environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_strategies.py").write_text(FILE)
    return tmp_path


def test_it_says_by_strategy_and_dtype_whether_texts_are_right(folder: Path) -> None:
    (folder / "test_broken.py").write_text("raise RuntimeError('cannot be imported')\n")
    done = run(folder)
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    assert any(line.endswith("[auto-torch.bfloat16-one row]: AssertionError: texts differ") for line in lines)
    assert "strategy  bfloat16, one row  bfloat16, ragged rows  float32, one row  float32, ragged rows" in lines
    assert any(line.split() == ["auto", "WRONG", "WRONG", "right", "right"] for line in lines)
    assert any(line.split() == ["suffix", "right", "right", "right", "right"] for line in lines)
    assert any(line.startswith("test_broken: pytest ended with 2") for line in lines)  # the others ran all the same
    assert lines[-1].startswith("7 passed, 2 failed")
    kept = [
        json.loads(line) for file in sorted((folder / "out").rglob("*.jsonl")) for line in file.read_text().splitlines()
    ]
    assert sum("test" in line for line in kept) == 9 and any("device" in line for line in kept)


def test_what_does_not_end_is_ended_and_what_is_known_is_said(folder: Path) -> None:
    (folder / "test_slow.py").write_text("import time\ndef test_hangs(): time.sleep(60)\n")
    done = run(folder, "--seconds", "6")
    assert done.returncode == 1 and "test_slow: not over" in done.stdout
    assert "everything is in" in done.stdout
