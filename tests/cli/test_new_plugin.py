"""``decoders new-plugin`` writes a project whose tests pass."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoders.cli import app
from decoders.cli.new_plugin import renamed, template

ROOT = Path(__file__).parents[2]


def test_the_files_are_those_of_the_example_under_the_new_name(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["new-plugin", "my-idea", "--folder", str(tmp_path)])
    assert done.exit_code == 0 and "pip install -e" in done.output
    project = tmp_path / "decoders-my-idea"
    written = {file.relative_to(project).as_posix(): file.read_text() for file in project.rglob("*") if file.is_file()}
    assert {*written} == {
        "README.md", "pyproject.toml", "src/decoders_my_idea/__init__.py", "tests/conftest.py", "tests/test_my_idea.py",
    }  # fmt: skip
    assert not any(
        word in text.lower() for text in written.values() for word in ("bigram", "decoders_example", "decoders-example")
    )
    metadata = tomllib.loads(written["pyproject.toml"])["project"]
    assert metadata["name"] == "decoders-my-idea"
    assert metadata["entry-points"]["decoders"] == {"my_idea": "decoders_my_idea"}
    names = [node.name for node in ast.parse(written["src/decoders_my_idea/__init__.py"]).body if hasattr(node, "name")]
    assert names == ["MyIdeaSettings", "MyIdea", "decoders_strategies"]


@pytest.mark.parametrize("name", ["draft", "none", "true", "false"])
def test_a_class_never_stands_in_the_place_of_another_name(name: str) -> None:
    source = renamed(name)[f"src/decoders_{name}/__init__.py"]
    assert f"class {name.title()}Strategy(Strategy)" in source and ast.parse(source)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My Idea", "not a name of a strategy"),
        ("medusa", "already has a strategy 'medusa'"),
        ("there", "there already"),
    ],
)
def test_names_that_cannot_be_are_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "decoders-there").mkdir()
    done = CliRunner().invoke(app, ["new-plugin", name, "--folder", str(tmp_path)])
    assert done.exit_code == 2 and message in done.output
    assert [path.name for path in tmp_path.rglob("*")] == ["decoders-there"]


def test_the_first_strategy_of_the_documentation_is_that_of_the_template() -> None:
    source = template()["src/decoders_example/__init__.py"].partition('"""\n\n')[2].strip()
    assert f"```python\n{source}\n```" in (ROOT / "docs" / "plugins" / "writing-a-strategy.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.slow
def test_the_tests_of_a_new_project_pass(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["new-plugin", "my-idea", "--folder", str(tmp_path)]).exit_code == 0
    project, site = tmp_path / "decoders-my-idea", tmp_path / "site"
    install = ["pip", "install", "--quiet", "--no-deps", "--target", str(site), "."]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    for command in (install, ["decoders", "plugins", "--strict"], ["pytest", "-q"]):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=project, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
