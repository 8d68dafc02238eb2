"""What random weights cannot show, on pretrained models: folders under the one that DECODERS_REAL_MODELS names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoders.cli import app
from decoders.prompts.reading import INSTRUCTIONS

pytestmark = pytest.mark.real


@pytest.fixture(params=["smollm2-135m", "gemma3-270m"])
def folder(request: pytest.FixtureRequest) -> str:
    path = Path(os.environ["DECODERS_REAL_MODELS"]) / request.param
    assert path.is_dir(), f"there is no {request.param} in DECODERS_REAL_MODELS"
    return str(path)


def test_instructions_are_answered_with_the_same_tokens(folder: str) -> None:
    done = CliRunner().invoke(
        app,
        ["bench", "--model", folder, "--prompts", "instruct", "--limit", "1", "-n", "24", "--repeats", "1", "--no-compile",
         "--baseline", "transformers", "-s", "autoregressive,prompt_lookup", "--json", "-"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    records = json.loads(done.stdout)["records"]
    assert len(records) == 3 * len(INSTRUCTIONS)
    assert [(r["method"], r["kind"], r["difference"]) for r in records if r["identical"] is not True] == []


def test_the_demo_shows_a_pretrained_model(folder: str) -> None:
    arguments = ["demo", folder, "--no-compile", "-n", "16", "--repeats", "1", "--seconds", "1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "first text" in done.output and "identical" in done.output
