"""Where settings come from, which wins, and what a mistake in each place says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, model_validator

from decoders.errors import SettingsError
from decoders.settings import RuntimeSettings, Settings, _warn_of_packed, load_settings, unknown_variables


class LookupSettings(Settings):
    size: int = Field(1, ge=1, le=100, description="How many.")
    names: list[str] = Field([], description="A list.")
    label: str | None = Field(None, description="Text.")
    low: int = Field(0, description="At most size.")

    @model_validator(mode="after")
    def _ordered(self) -> LookupSettings:
        if self.low > self.size:
            raise ValueError(f"low {self.low} exceeds size {self.size}")
        return self


class PromptSettings(Settings):
    text: str = Field("", description="Text.")


@pytest.fixture(autouse=True)
def _empty_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("DECODERS_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def lookup(call: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **options: Any) -> LookupSettings:
    return load_settings(LookupSettings, "lookup", call or {}, config or {}, **options)


def runtime(call: dict[str, Any] | None = None, **options: Any) -> RuntimeSettings:
    return load_settings(RuntimeSettings, None, call or {}, {}, **options)


@pytest.mark.parametrize(
    ("sources", "winner"),
    [
        ("", 1),
        ("file", 2),
        ("file environment", 3),
        ("file environment config", 4),
        ("file environment config call", 5),
        ("file call", 5),
        ("environment config", 4),
        ("file config", 4),
    ],
)
def test_nearer_source_wins(monkeypatch: pytest.MonkeyPatch, sources: str, winner: int) -> None:
    if "file" in sources:
        Path("decoders.toml").write_text("[lookup]\nsize = 2\nlabel = 'kept'\n")
    if "environment" in sources:
        monkeypatch.setenv("DECODERS_LOOKUP_SIZE", "3")
    found = lookup({"size": 5} if "call" in sources else {}, {"size": 4} if "config" in sources else {})
    assert found.size == winner
    assert found.label == ("kept" if "file" in sources else None)


def test_environment_values_are_parsed_by_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERS_COMPILE", "0")
    monkeypatch.setenv("DECODERS_STRATEGY", "lookup")
    monkeypatch.setenv("DECODERS_SLOTS", "")  # set but empty is not set
    monkeypatch.setenv("DECODERS_LOOKUP_NAMES", '["a", "b"]')
    assert runtime() == RuntimeSettings(compile=False, strategy="lookup")
    assert lookup().names == ["a", "b"]


def test_pyproject_table_is_read_where_there_is_no_decoders_toml() -> None:
    Path("pyproject.toml").write_text("[tool.decoders]\ncompile = false\n[tool.decoders.lookup]\nsize = 7\n")
    assert (runtime().compile, lookup().size) == (False, 7)
    Path("decoders.toml").write_text("prefill-chunk = 64\n")
    assert (runtime().compile, runtime().prefill_chunk, lookup().size) == ("auto", 64, 1)


def test_named_file_replaces_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Path("decoders.toml").write_text("compile = false\n")
    other = tmp_path / "elsewhere.toml"
    other.write_text("[lookup]\nsize = 9\n")
    monkeypatch.setenv("DECODERS_CONFIG", str(other))
    assert (runtime().compile, lookup().size) == ("auto", 9)
    monkeypatch.setenv("DECODERS_CONFIG", "absent.toml")
    with pytest.raises(SettingsError, match=r"DECODERS_CONFIG names 'absent\.toml'"):
        runtime()


def test_edited_file_is_read_again() -> None:
    path = Path("decoders.toml")
    path.write_text("[lookup]\nsize = 2\n")
    assert lookup().size == 2
    path.write_text("[lookup]\nsize = 33\n")
    assert lookup().size == 33
    path.unlink()
    assert lookup().size == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[lookup]\nsiz = 2\n", r"unknown setting 'siz' in .*decoders.toml \[lookup\]. Did you mean 'size'"),
        ("[lookup]\nsize = 0\n", r"size: .*greater than or equal to 1 \(got 0\) \(in .*decoders.toml"),
        ("[lookup]\nlow = 8\n", r"low 8 exceeds size 1.*\(low in .*decoders.toml \[lookup\]\)"),
        ("lookup = 3\n", r"lookup in .*decoders.toml must be a table"),
        ("[lookup\n", r"decoders.toml cannot be read"),
    ],
)
def test_mistake_in_the_file_names_the_file(content: str, message: str) -> None:
    Path("decoders.toml").write_text(content)
    with pytest.raises(SettingsError, match=message):
        lookup()


def test_unknown_top_level_key_and_misspelt_table_are_errors() -> None:
    Path("decoders.toml").write_text("compil = false\n")
    with pytest.raises(SettingsError, match=r"unknown setting 'compil' in .*decoders.toml. Did you mean 'compile'"):
        runtime()
    Path("decoders.toml").write_text("[lokup]\nsize = 2\n[absent_plugin]\nx = 1\n")
    with pytest.raises(SettingsError, match=r"unknown table \[lokup\] in .*Did you mean \[lookup\]"):
        runtime(sections=["lookup"])


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DECODERS_LOOKUP_SIZE", "many", r"size: .*from environment variable DECODERS_LOOKUP_SIZE"),
        (
            "DECODERS_LOOKUP_SIZ",
            "3",
            r"unknown setting 'siz' from environment variable DECODERS_LOOKUP_SIZ. Did you mean 'size'",
        ),
        (
            "DECODERS_LOOKUP_NAMES",
            "a,b",
            r"names from environment variable DECODERS_LOOKUP_NAMES must be JSON, such as .*, not 'a,b'",
        ),
    ],
)
def test_mistake_in_the_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=message):
        lookup()


def test_the_types_of_a_union_are_one_problem() -> None:
    with pytest.raises(SettingsError) as error:
        RuntimeSettings.parse({"compile": "maybe"})
    assert str(error.value) == (
        "RuntimeSettings: compile: Input should be 'auto', or Input should be a valid boolean, unable to interpret input "
        "(got 'maybe')"
    )


def test_misspelt_runtime_variable_is_an_error_and_a_foreign_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERS_OF_MY_OWN", "1")
    monkeypatch.setenv("DECODERS_PLUGINS_BLOCK", "x")
    assert runtime() == RuntimeSettings()
    assert unknown_variables(["lookup"]) == ["DECODERS_OF_MY_OWN"]
    monkeypatch.setenv("DECODERS_COMPLE", "1")
    with pytest.raises(SettingsError, match=r"DECODERS_COMPLE\. Did you mean DECODERS_COMPILE"):
        runtime()


def test_variable_belongs_to_the_section_with_the_longest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERS_PROMPT_LOOKUP_SIZE", "4")
    sections = ["prompt", "prompt_lookup"]
    assert load_settings(PromptSettings, "prompt", {}, {}, sections=sections) == PromptSettings()
    assert load_settings(LookupSettings, "prompt-lookup", {}, {}, sections=sections).size == 4


def test_variable_of_the_loop_is_no_strategys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERS_PREFILL_CHUNK", "64")
    monkeypatch.setenv("DECODERS_PLUGINS_BLOCK", "x")
    assert runtime().prefill_chunk == 64
    for section in ("prefill", "plugins"):
        assert load_settings(PromptSettings, section, {}, {}, sections=[section]) == PromptSettings()


@pytest.mark.parametrize("content", ["[tool]\ndecoders = 3\n", "tool = 3\n"])
def test_pyproject_without_a_table_of_ours(content: str) -> None:
    Path("pyproject.toml").write_text(content)
    if "decoders" not in content:  # no business of ours
        assert runtime() == RuntimeSettings()
        return
    with pytest.raises(
        SettingsError, match=r"tool.decoders in .*pyproject.toml must be a table \[tool.decoders\], not 3"
    ):
        runtime()


def test_mistake_in_the_call_suggests_and_blames_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERS_LOOKUP_LABEL", "x")
    with pytest.raises(SettingsError, match=r"unknown setting 'sise'\. Did you mean 'size'"):
        lookup({"sise": 3})
    with pytest.raises(SettingsError, match=r"\(got 0\) \(in the generation config\)$"):
        lookup({}, {"size": 0})


def test_bad_value_that_is_overruled_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERS_LOOKUP_SIZE", "many")
    assert lookup({"size": 2}).size == 2


def test_nothing_is_parsed_again_when_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read in every call of generate."""
    Path("decoders.toml").write_text("[lookup]\nsize = 2\n")
    lookup(), runtime()
    monkeypatch.setattr("decoders.settings.tomllib.loads", lambda text: pytest.fail("the file was read again"))
    monkeypatch.setattr("pydantic_settings.EnvSettingsSource", lambda *_, **__: pytest.fail("the environment was"))
    assert (lookup().size, runtime().reuse) == (2, True)


def test_settings_of_weights_and_sessions_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (runtime().weights, runtime().reuse) == ("keep", True)
    monkeypatch.setenv("DECODERS_WEIGHTS", "int8")
    monkeypatch.setenv("DECODERS_REUSE", "0")
    assert (runtime().weights, runtime().reuse) == ("int8", False)
    assert runtime({"weights": "keep"}).weights == "keep"
    with pytest.raises(SettingsError, match="weights"):
        runtime({"weights": "dense"})


def test_packed_weights_are_those_of_the_model_and_one_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _warn_of_packed.cache_clear()
    monkeypatch.setenv("DECODERS_WEIGHTS", "packed")
    with pytest.warns(UserWarning, match="weights='packed' no longer exists and counts as 'keep'") as warned:
        assert runtime().weights == runtime({"weights": "packed"}).weights == "keep"
    assert len(warned) == 1


@pytest.mark.parametrize("given", ["prompt_lookup", "prompt-lookup"])
def test_a_strategy_among_the_loops_settings_gets_the_arguments_to_write(given: str) -> None:
    with pytest.raises(
        SettingsError, match=f"unknown setting '{given}'. It is a strategy, .*: strategy='{given}', strategy_config="
    ):
        load_settings(RuntimeSettings, None, {given: {"length": 4}}, {}, sections=["prompt_lookup"])
