"""The reference is what the code says now; whatever is public and undocumented fails."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import Field

import decoders
from decoders import errors, hookspecs, strategies, testing, verifiers
from decoders.settings import RuntimeSettings, Settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs" / "generate_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(generator: ModuleType) -> dict[str, str]:
    return generator.pages()


def test_the_reference_is_current(pages: dict[str, str]) -> None:
    # Made by docs/generate_schema_report.py, from data that are not part of the project, and by docs/generate_models.py, which is slow.
    measured = {"json-schema.md", "models.md"}
    assert {path.name for path in FOLDER.iterdir()} == set(pages) | measured, "run python docs/generate_reference.py"
    old = [name for name, text in pages.items() if (FOLDER / name).read_text(encoding="utf-8") != text]
    assert not old, f"out of date: {', '.join(old)}. Run python docs/generate_reference.py"


def test_what_the_command_line_lists_is_current(generator: ModuleType) -> None:
    from decoders.cli.catalogue import BUILTIN_FILE

    assert BUILTIN_FILE.read_text(encoding="utf-8") == generator.builtin_listing(), "run docs/generate_reference.py"


def test_it_is_written_to_the_folder_asked_for(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["generate_reference.py", str(tmp_path / "new")])
    generator.main()
    assert (tmp_path / "new" / "api.md").exists()


def test_every_public_name_is_there(pages: dict[str, str]) -> None:
    for name in decoders.__all__:
        wanted = f"`decoders.{name}`" if inspect.ismodule(getattr(decoders, name)) else f"### decoders.{name}\n"
        assert wanted in pages["api.md"], name
    for name in testing.__all__:
        assert f"decoders.testing.{name}" in pages["testing.md"], name
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, decoders.DecodersError):
            assert f"| `{name}` |" in pages["errors.md"], name


def test_every_hook_is_there(pages: dict[str, str]) -> None:
    hooks = [name for name, value in vars(hookspecs).items() if hasattr(value, "decoders_spec")]
    assert hooks
    assert all(f"## {name}\n" in pages["hooks.md"] for name in hooks)


def test_every_strategy_and_setting_is_there(pages: dict[str, str]) -> None:
    for cls in strategies.BUILT_IN:
        assert f"## {cls.name}\n" in pages["strategies.md"]
        for field in cls.settings_class.model_fields:
            assert f"DECODERS_{cls.name}_{field}".upper() in pages["settings.md"]
    for field in RuntimeSettings.model_fields:
        assert f"`DECODERS_{field.upper()}`" in pages["settings.md"]


def test_every_verifier_is_there(pages: dict[str, str]) -> None:
    for cls in verifiers.BUILT_IN:
        assert f"[`{cls.name}`]" in pages["verifiers.md"]
        assert f"## {cls.name}\n" in pages["verifiers.md"]


def test_every_command_and_option_is_there(pages: dict[str, str]) -> None:
    from typer.main import get_command

    from decoders.cli import app

    def check(command: Any, path: str) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            check(inner, f"{path} {name}")
        if not hasattr(command, "commands") or getattr(command, "invoke_without_command", False):
            own = pages["cli.md"].split(f"## {path}\n")[1].split("\n## ")[0]
            for parameter in command.params:
                for option in (
                    o for o in (*parameter.opts, *parameter.secondary_opts) if o.startswith("--") and o != "--help"
                ):
                    assert option in own, f"{path} {option}"

    check(get_command(app), "decoders")


def test_what_is_undocumented_is_an_error(generator: ModuleType) -> None:
    class Bare(Settings):
        width: int = Field(3)

    def silent() -> None: ...

    for make in (lambda: list(generator.fields(Bare, "bare")), lambda: generator.paragraph(silent, "silent")):
        with pytest.raises(generator.UndocumentedError):
            make()
