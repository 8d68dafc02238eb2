"""The command line: quick to start, JSON for machines, one red line for an expected error."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from decoders import bench, cli, demo
from decoders.cli import app, catalogue, doctor, models
from decoders.cli.console import FILE_WIDTH, plain_console, waiting
from decoders.cli.generate import show_report
from decoders.constraints import library
from decoders.engine.model.facts import Invariance
from decoders.engine.model.kernels import cpu
from decoders.errors import SettingsError, UnknownNameError, amount
from decoders.registry import PluginInfo, registry, reset_registry
from decoders.report import Report
from decoders.settings import RuntimeSettings, parse_assignments
from decoders.strategies.ngram_table import NgramTable


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("DECODERS_CONFIG", raising=False)


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, list(arguments), **options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a tokenizer of single bytes, saved as a user would have it."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    from decoders.testing import tiny_model

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:128]
    inner = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    path = tmp_path_factory.mktemp("checkpoint")
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(path)
    tiny_model("llama").save_pretrained(path)
    return str(path)


def run_without_torch(*commands: str) -> list[dict[str, Any]]:
    """Runs `commands` in one new process that cannot import torch, and gives exit code, output and errors of each."""
    code = """
import json, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numpy"):
            raise ImportError(f"{name} is not wanted here")
sys.meta_path.insert(0, Absent())
from typer.testing import CliRunner
from decoders.cli import app
done = [CliRunner().invoke(app, command.split()) for command in sys.argv[1:]]
print(json.dumps([{"code": r.exit_code, "stdout": r.stdout, "stderr": r.stderr, "error": repr(r.exception)} for r in done]))
"""
    arguments = [sys.executable, "-c", code, *commands]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=Path(demo.__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_listings_and_mistakes_need_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    listings = ("strategies", "plugins", "verifiers", "grammar-backends", "grammars")
    monkeypatch.setenv("DECODERS_PLUGINS_BLOCK", "")
    done = run_without_torch(
        *listings, *(f"{name} --json" for name in listings), "grammars uuid", "--help",
        "config lookahead", "generate demo hi -g nope.json", "gen", "generate demo hi --num-beams 2", "advise demo --assistant a",
        "generate demo hi -s lookahed", "serve demo --dtype float8", "train draft --model demo --dtype float8",
        "warmup demo -s suffix+lookahed", "bench laod", "serve ../nowhere", "generate . hi",
    )  # fmt: skip
    assert [command["code"] for command in done] == [0] * 13 + [2] * 11, [command["error"] for command in done]
    for name, table, listed in zip(listings, done[:5], done[5:10], strict=True):
        expected = json.loads(run(name, "--json").stdout)  # of the registry, not of a file
        assert json.loads(listed["stdout"]) == expected
        assert all(item["name"] in table["stdout"] for item in expected)
    assert done[10]["stdout"] == library.read("uuid") + "\n"
    no_file, no_command, no_option, no_assistant, *others = (command["stderr"] for command in done[13:])
    assert "there is no file 'nope.json'" in no_file and "geojson" not in no_file
    assert "Did you mean 'generate'?" in no_command
    assert "No strategy does beam search" in no_option and "--draft names the draft model here" in no_assistant
    meant = ("lookahead", "float32", "float32", "lookahead", "load")
    assert "there is no such folder here" in others.pop(-2) and "has no config.json" in others.pop()
    assert [near for near, said in zip(meant, others, strict=True) if f"Did you mean '{near}'?" not in said] == []


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file of a plugin that is installed, where nothing has been loaded yet."""
    package = tmp_path / "decoders_of_this_test"
    package.mkdir()
    file = package / "__init__.py"
    file.write_text(
        "import decoders\n@decoders.hookimpl\ndef decoders_grammars():\n    return {'mine': lambda: None}\n"
    )
    point = metadata.EntryPoint("mine", package.name, "decoders")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    monkeypatch.delitem(sys.modules, "decoders.registry.plugins")
    reset_registry()
    yield file
    sys.modules.pop(package.name, None)
    reset_registry()


def test_what_plugins_provide_is_known_until_a_file_changes(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [item["name"] for item in catalogue.catalogue("grammars")] == ["mine"]
    with monkeypatch.context() as patch:
        patch.setattr(catalogue, "taken", None)
        assert [item["name"] for item in catalogue.catalogue("grammars")] == ["mine"]
        assert [info["status"] for info in catalogue.catalogue("plugins")] == ["loaded", "loaded"]
    installed.write_text("1 / 0\n")
    del sys.modules[installed.parent.name]
    for _ in range(2):  # one that fails is looked at each time
        reset_registry()
        (failed,) = (info for info in catalogue.catalogue("plugins") if info["name"] == "mine")
        assert failed["status"] == "failed" and "division by zero" in failed["error"]
    installed.write_text("raise SystemExit")
    reset_registry()
    assert "SystemExit" in catalogue.catalogue("plugins")[-1]["error"]


def every_command() -> Iterator[tuple[list[str], Any]]:
    from typer.main import get_command

    def commands(command: Any, path: list[str]) -> Iterator[tuple[list[str], Any]]:
        yield path, command
        for name, inner in getattr(command, "commands", {}).items():
            yield from commands(inner, [*path, name])

    return commands(get_command(app), [])


def test_every_command_and_option_has_help() -> None:
    for path, command in every_command():
        assert command.help, f"{path} has no help"
        for parameter in command.params:
            assert getattr(parameter, "help", True), f"{path}: {parameter.name} has no help"


def test_every_command_that_loads_a_model_has_the_options_of_loading() -> None:
    loading = {" ".join(path): {o for p in command.params for o in p.opts} for path, command in every_command()}
    loading = {name: options for name, options in loading.items() if {"model", "--model", "--dtype"} & options}
    assert {"generate", "warmup", "serve", "doctor", "bench load", "train draft"} <= {*loading}
    for name, options in loading.items():
        assert {"--device", "--threads", "--dtype"} <= options, name


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("a.lark", 'start: numbr\nnumber: "1"', "Did you mean 'number'?"),
        ("a.regex", "[a", "it is never closed"),
        ("a.json", '{"type": "objct"}', "there is no type 'objct'"),
    ],
)
def test_an_invalid_grammar_is_refused_before_a_model_is_loaded(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, text: str, said: str
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(models, "load", lambda *given: loaded.append(given))
    (tmp_path / name).write_text(text)
    done = run("generate", checkpoint, "a", "--grammar", name)
    assert done.exit_code == 2 and said in done.output and not loaded


def test_device_and_threads_are_where_the_model_runs(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    loaded: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(models, "load_model", loaded.append)
        wrong = run("generate", checkpoint, "a", "--device", "cupid", "--threads", "3")
    assert wrong.exit_code == 2 and asked[0] == 3 and not loaded
    assert "--device cupid: there is no such kind of device. This machine has cpu" in wrong.output
    assert run("generate", checkpoint, "a", "-n", "2", "--device", "cpu", "--no-compile").exit_code == 0


def test_help_cuts_no_name_and_no_word_at_80_columns() -> None:
    def joined(text: str) -> str:
        return "".join(text.split())

    for path, command in every_command():
        shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}).output
        assert max(map(len, shown.splitlines())) <= 80, path
        for parameter in command.params:
            names = [name for name in parameter.opts if name.startswith("-")]
            words = joined(getattr(parameter, "help", None) or "")
            assert words in joined(shown) and all(name in shown for name in names), f"{path}: {parameter.name}"


def test_what_goes_to_a_file_is_as_wide_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert plain_console().width == FILE_WIDTH
    monkeypatch.setenv("COLUMNS", "70")
    assert plain_console().width == 70


def test_a_warning_is_one_line_in_the_commands_own_form_and_comes_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warning_app(**_: Any) -> None:
        for line in (1, 2):
            warnings.warn_explicit("threads wait\nfor others", UserWarning, "x.py", line)

    monkeypatch.setattr(cli, "app", warning_app)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.raises(SystemExit):
            cli.main()
    assert capsys.readouterr().err == "warning: threads wait for others\n"


def test_brackets_are_no_markup_on_a_console(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    console = plain_console()
    table = Table("method", title="my[model]")
    table.add_row("auto[weights=int8]")
    console.print("pip install 'hf-decoders[bench]'", table)
    with waiting(console, "loading my[model]") as status:
        console.print(status.status)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("hf-decoders[bench]", "auto[weights=int8]")) and shown.count("my[model]") >= 2


def test_strategies_as_json_lists_settings_with_their_defaults() -> None:
    result = run("strategies", "--json")
    assert result.exit_code == 0
    listed = {item["name"]: item for item in json.loads(result.stdout)}
    assert set(listed) == set(registry().strategies())
    lookup = listed["prompt_lookup"]
    assert (lookup["exact"], lookup["needs_assistant"], lookup["provider"]) == (True, False, "hf-decoders")
    assert {"name": "max_ngram", "default": 3, "required": False}.items() <= lookup["settings"][0].items()
    assert all(setting["description"] for item in listed.values() for setting in item["settings"])


def test_what_none_means_is_said_of_every_setting_and_listed() -> None:
    classes = [RuntimeSettings, *(entry.cls.settings_class for entry in registry().strategies().values())]
    for name, field in (item for cls in classes for item in cls.model_fields.items()):
        if not field.is_required() and field.get_default(call_default_factory=True) is None:
            assert "None: " in (field.description or ""), name
    assert "None (the call's assistant_model)" in run("strategies").stdout
    loop, own = run("config").stdout, run("config", "speculative").stdout
    assert "None (512)" in loop and "None: the call's assistant_model." in " ".join(own.split())


def test_grammars_are_listed_and_printed() -> None:
    table = run("grammars").stdout
    listed = json.loads(run("grammars", "--json").stdout)
    assert {"name", "file", "kind", "description"} == set(listed[0])
    assert [item["file"] for item in listed] == library.names()
    assert all(item["name"] in table for item in listed)
    assert run("grammars", "iso-date").stdout == library.read("iso_date") + "\n"
    assert json.loads(run("grammars", "json", "--json").stdout)["text"] == library.read("json")
    unknown = run("grammars", "jsn")
    assert unknown.exit_code == 2 and "Did you mean 'json'?" in unknown.stderr


def test_plugins_as_json_and_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = (
        PluginInfo("good", "1", "dist-good"),
        PluginInfo("bad", "2", "dist-bad", status="failed", error="why [x]"),
    )
    monkeypatch.setattr("decoders.registry.registry", lambda: SimpleNamespace(plugins=lambda: [good, bad]))
    result = run("plugins", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)[1] == {
        "name": "bad", "version": "2", "provider": "dist-bad", "hooks": [], "strategies": [], "verifiers": [],
        "grammar_backends": [], "grammars": [], "grammar_types": [],
        "observers": [], "commands": [], "status": "failed", "error": "why [x]",
    }  # fmt: skip
    assert "bad: why [x]" in run("plugins").stdout
    assert run("plugins", "--strict").exit_code == 1
    monkeypatch.setattr("decoders.registry.registry", lambda: SimpleNamespace(plugins=lambda: [good]))
    assert run("plugins", "--strict").exit_code == 0


def test_a_narrow_window_shows_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = (
        "Strategy 'x' is claimed by 'a' (d 1) and 'b' (e 2). Block one, for instance with DECODERS_PLUGINS_BLOCK=b."
    )
    clash = PluginInfo("a", "1", "d", strategies=("x",), status="conflict", error=remedy)
    monkeypatch.setattr("decoders.registry.registry", lambda: SimpleNamespace(plugins=lambda: [clash]))
    monkeypatch.setenv("COLUMNS", "80")
    assert remedy in " ".join(run("plugins").stdout.split())


def test_expected_error_is_one_line_and_exit_code_2() -> None:
    result = run("generate", "demo", "hello", "--strategy", "promt_lookup")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "Did you mean 'prompt_lookup'?" in result.stderr
    assert "Traceback" not in result.output
    debugged = run("--debug", "generate", "demo", "hello", "--strategy", "promt_lookup")
    assert type(debugged.exception).__name__ == "UnknownNameError"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/model", "hello"], "there is no such folder here, and names on the hub are like owner/name"),
        (["/nowhere", "hello"], "Model '/nowhere' cannot be loaded: there is no such folder here"),
        (["./nowhere.gguf", "hello"], "there is no such file here"),
        (
            ["demo", "hello", "--assistant-tokenizer", "../nowhere"],
            "Tokenizer '../nowhere' cannot be loaded: there is no",
        ),
        # Typer says it in other words since 0.29.
        (["demo", "hello", "-n", "0"], "equal to 1, not '0'|0 is not in the range x>=1"),
        (["demo", "hello", "-n", "x"], "not 'x'|'x' is not a valid integer"),
        (["demo", "hello", "--temperature", "nan"], "equal to 0, not 'nan'|a number above 0, not nan"),
        (["demo", "hello", "--top-p", "1.5"], "equal to 1, not '1.5'|1.5 is not in the range 0<=x<=1"),
        (["demo", "hello", "--dtype", "float31"], "Did you mean 'float32'?"),
        (["demo", ""], "the prompt is empty"),
        (["demo", "a\udcff"], "the prompt is not UTF-8 text"),
        (["demo", "hello", "--temperature", "0", "--top-k", "5"], "temperature 0 is greedy"),
    ],
)
def test_bad_argument_of_generate_is_explained(arguments: list[str], message: str) -> None:
    result = run("generate", *arguments)
    assert result.exit_code == 2
    said = " ".join(result.stderr.replace("│", " ").split())
    assert any(words in said for words in message.split("|")), said


def test_a_hub_that_cannot_be_reached_is_not_asked_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: False)
    models._hub_answers.cache_clear()
    for load, kind in ((models.load, "Model"), (models.load_other_tokenizer, "Tokenizer")):
        with pytest.raises(
            models.ModelLoadError, match=f"^{kind} 'no-such/model' .* http://127.0.0.1:9 cannot be reached"
        ):
            load("no-such/model")


def test_a_hub_that_is_not_to_be_asked_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    asked = list[object]()
    monkeypatch.setattr("urllib.request.urlopen", asked.append)
    models._hub_answers.cache_clear()
    assert not models._hub_answers() and not asked


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    from decoders.testing import tiny_model

    tiny_model("llama").save_pretrained(tmp_path / "bare")
    with pytest.raises(models.ModelLoadError, match="the folder has no tokenizer"):
        models.load(str(tmp_path / "bare"))
    with pytest.raises(models.ModelLoadError, match="the folder has no config.json$"):
        models.load(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    with pytest.raises(models.ModelLoadError, match=r"name one of its GGUF files, as in .*a\.gguf"):
        models.load(str(tmp_path))


def test_a_terminal_that_knows_few_letters_shows_help_and_reports() -> None:
    surroundings = os.environ | {"PYTHONIOENCODING": "latin-1"}
    arguments, folder = [sys.executable, "-m", "decoders", "--help"], Path(demo.__file__).parents[2]
    done = subprocess.run(arguments, capture_output=True, env=surroundings, cwd=folder)
    assert done.returncode == 0 and b"\\u2026" in done.stdout
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    show_report(Report("none", accepted_lengths=[0, 300, 1]), Console(file=file))
    file.seek(0)
    assert [line.split()[1] for line in file.read().splitlines()[-2:]] == ["#" * 40, "."]


class Full(io.FileIO):
    """A file on a disk without room, as long as its descriptor is not given to another file."""

    def write(self, content: Any) -> int:
        if os.path.samestat(os.fstat(self.fileno()), os.stat(os.devnull)):
            return super().write(content)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("buffered", [True, False])
def test_output_that_cannot_be_written_is_an_error_of_one_line(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], buffered: bool
) -> None:
    for arguments in (["strategies", "--json"], ["generate", checkpoint, "ab", "-n", "3", "--no-compile"]):
        file: Any = Full(tmp_path / "out", "w")
        stream = io.TextIOWrapper(io.BufferedWriter(file) if buffered else file, write_through=not buffered)
        with stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            with pytest.raises(SystemExit, match="1"):
                app(arguments)
        assert (
            capsys.readouterr().err.splitlines()[-1]
            == "error: [Errno 28] No space left on device (--debug shows where)"
        )


def test_generate_streams_text_and_reports_on_standard_error(checkpoint: str) -> None:
    quiet = run("generate", checkpoint, "abcabc", "-n", "12", "--no-compile", "--json")
    assert quiet.exit_code == 0, quiet.output
    answer = json.loads(quiet.stdout)
    assert answer["report"]["new_tokens"] == [12]
    assert answer["report"]["compiled"] is False
    assert answer["report"]["strategy"] == "auto"
    streamed = run(
        "generate", checkpoint, "-n", "12", "--no-compile", "--report", "-s", "prompt_lookup", input="abcabc"
    )
    assert streamed.exit_code == 0, streamed.output
    assert streamed.stdout.rstrip("\n") == answer["text"].rstrip("\n")
    assert "tokens each" in streamed.stderr
    assert "propose 0." in streamed.stderr
    assert "1: " in streamed.stderr and "  1 █" in streamed.stderr, "the histogram of accepted lengths"
    assert "drafted by prompt_lookup" in streamed.stderr


def test_what_writes_texts_has_one_default() -> None:
    from inspect import signature

    from decoders.cli.generate import generate
    from decoders.cli.serve import serve

    for command in (generate, serve):
        defaults = {name: signature(command).parameters[name].default for name in ("strategy", "dtype")}
        assert defaults == {"strategy": "auto", "dtype": "auto"}, command
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert 'strategy="auto"' in readme.partition("## Use")[2].partition("```python")[2].partition("```")[0]


def test_a_draft_model_in_the_settings_needs_no_other(checkpoint: str) -> None:
    common = ["generate", checkpoint, "abcabc", "-n", "8", "--no-compile", "-s"]
    lone = run(*common, "speculative", "--set", f"draft_model={checkpoint}", "--set", "length=3", "--report")
    assert lone.exit_code == 0, lone.output
    assert "tokens accepted (" in lone.stderr
    assert "6 passes in" in lone.stderr, "two steps of three"
    both = run(*common, "speculative", "--set", f"draft_model={checkpoint}", "--assistant", checkpoint)
    assert both.exit_code == 2
    assert "uses no --assistant; leave one of them out" in both.stderr
    neither = run(*common, "speculative")
    assert neither.exit_code == 2
    assert "strategy 'speculative' needs a draft model: name one with --assistant" in neither.stderr
    staged = run(
        *common, "staged", "--assistant", checkpoint, "--report", "--set", "stage=speculative", "--set", "passes=2",
        "--set", f"stage_config.draft_model={checkpoint}", "--set", "stage_config.length=2",
    )  # fmt: skip
    assert staged.exit_code == 0, staged.output
    assert "tokens each with speculative" in staged.stderr


def test_ngram_table_is_trained_and_used(checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcabc and so on " * 8)
    train = ["train", "ngram", "t.safetensors", "--model", checkpoint]
    train += ["--tokens", "500", "--length", "40", "--no-compile"]
    result = run(*train, "--prompts", "a.txt", "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["tokens"] == 500 and figures["vocab_size"] == 128
    assert figures["source"].endswith("at temperature 1, seed 0, after a.txt")
    assert figures["contexts"][0] == 1 and figures["bytes"] == (tmp_path / "t.safetensors").stat().st_size
    plain = run("generate", checkpoint, "abcabc", "-n", "8", "--no-compile", "--json")
    use = ("-s", "ngram", "--set", "table=t.safetensors")
    drafted = run("generate", checkpoint, "abcabc", *use, "-n", "8", "--no-compile", "--json")
    assert drafted.exit_code == 0, drafted.output
    assert json.loads(drafted.stdout)["text"] == json.loads(plain.stdout)["text"]
    first = NgramTable.load(tmp_path / "t.safetensors").orders[2]
    (tmp_path / "t.safetensors").rename(tmp_path / "table")
    (tmp_path / "t.safetensors").symlink_to(tmp_path / "table")
    again = run(*train, "--prompts", "a.txt")
    assert (tmp_path / "t.safetensors").is_symlink()
    assert "contexts: 1 of 0" in again.stdout and "Written to t.safetensors" in again.stdout
    assert torch.equal(NgramTable.load(tmp_path / "t.safetensors").orders[2].keys, first.keys)
    run(*train, "--prompts", "a.txt", "--seed", "1")
    assert not torch.equal(NgramTable.load(tmp_path / "t.safetensors").orders[2].keys, first.keys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/t.safetensors", "--prompts", "a.txt"], "there is no folder"),
        (["t.safetensors"], "has no BOS token: give files with --prompts"),
        (["t.safetensors", "--prompts", "empty.txt"], "empty.txt is empty"),
        (["t.safetensors", "--prompts", "none.txt"], "none.txt cannot be read: No such file"),
        (["t.safetensors", "--prompts", "a.txt", "--temperature", "0"], "must be above 0 and finite, not 0"),
        (["t.safetensors", "--prompts", "a.txt", "--temperature", "nan"], "must be above 0 and finite, not nan"),
        (["t.safetensors", "--prompts", "a.txt", "--seed", str(2**63)], "Invalid value for '--seed'"),
        (["pipe", "--prompts", "a.txt"], "pipe cannot be read: it is not a regular file"),
        (
            ["a.txt", "--prompts", "a.txt"],
            "OUT a.txt exists, and only an n-gram table is overwritten: a.txt is not an n-gram table",
        ),
    ],
)
def test_ngram_table_that_cannot_be_trained_is_explained(
    checkpoint: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "empty.txt").write_text("")
    os.mkfifo(tmp_path / "pipe")
    result = run("train", "ngram", *arguments, "--model", checkpoint)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.skipif(not demo.available(), reason="the demo models are not in this checkout")
def test_both_demo_models_can_be_named() -> None:
    sizes = [models.load(name)[0].num_parameters() for name in ("demo", "demo:target", "demo:draft")]
    assert sizes[0] == sizes[1] > sizes[2]
    with pytest.raises(UnknownNameError, match="Did you mean 'draft'"):
        models.load("demo:drft")


def test_strategy_settings_and_sampling_reach_the_call(checkpoint: str, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("abcabc")
    common = ["generate", checkpoint, "--prompt-file", str(prompt), "-n", "12", "--no-compile", "--json"]
    common += ["--temperature", "0.9", "--seed", "7"]
    lookup = [*common, "--strategy", "prompt-lookup"]
    drafted = run(*lookup, "--set", "max-ngram=2", "--set", "length=3")
    assert drafted.exit_code == 0, drafted.output
    plain = run(*common, "--strategy", "autoregressive")
    assert json.loads(drafted.stdout)["report"]["settings"]["max_ngram"] == 2
    assert json.loads(drafted.stdout)["text"] == json.loads(plain.stdout)["text"]
    wrong = run(*lookup, "--set", "max_ngrm=2")
    assert wrong.exit_code == 2
    assert "Did you mean 'max_ngram'?" in wrong.stderr


def test_warmup_reports_each_strategy(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECODERS_COMPILE", "0")
    options = ["--strategy", "autoregressive", "--strategy", "prompt-lookup", "--rows", "1", "--rows", "2"]
    result = run("warmup", checkpoint, *options, "--json")
    assert result.exit_code == 0, result.output
    done = json.loads(result.stdout)
    assert done["pack_seconds"] > 0 and done["compilations"] == 0
    assert [(part["strategy"], part["rows"]) for part in done["parts"]] == [
        (strategy, rows) for rows in (1, 2) for strategy in ("autoregressive", "prompt_lookup")
    ]
    told = run("warmup", checkpoint, "--strategy", "autoregressive", "--sampling").stdout
    assert "autoregressive, 1 row: " in told and "autoregressive, 1 row, sampled: " in told


@pytest.mark.parametrize(
    ("items", "settings"),
    [
        (["a=1", "b-c=text", "d=[1, 2]", "e=true", "f="], {"a": 1, "b_c": "text", "d": [1, 2], "e": True, "f": ""}),
        (["prompt-lookup.length=4", "medusa.x=a=b"], {"prompt_lookup": {"length": 4}, "medusa": {"x": "a=b"}}),
    ],
)
def test_assignments_are_json_or_text(items: list[str], settings: dict[str, Any]) -> None:
    assert parse_assignments(items) == settings


@pytest.mark.parametrize("items", [["a"], ["=1"], ["a=1", "a.b=2"]])
def test_malformed_assignment_is_refused(items: list[str]) -> None:
    with pytest.raises(SettingsError, match="--set"):
        parse_assignments(items)


def test_what_an_argument_too_many_was_meant_for_is_said() -> None:
    assert "`decoders config STRATEGY` explains" in run("strategies", "auto").stderr
    assert "Maximum length of the suffix" in run("config", "prompt_lookup").stdout
    assert "Put a prompt of several words in quotes" in run("generate", "demo", "once", "upon").stderr


def test_config_says_where_each_setting_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "file: none" in run("config").stdout
    (tmp_path / "decoders.toml").write_text("reuse = false\n[prompt_lookup]\nmax_ngram = 4\n")
    monkeypatch.setenv("DECODERS_COMPILE", "0")
    monkeypatch.setenv("DECODERS_PROMPT_LOOKUP_LENGTH", "9")
    found = json.loads(run("config", "--json").stdout)
    file = str(tmp_path / "decoders.toml")
    assert found["file"] == file and set(found) == {"file", "loop", "prompt_lookup"}
    loop = {item["setting"]: (item["value"], item["from"]) for item in found["loop"]}
    assert loop["compile"] == (False, "environment variable DECODERS_COMPILE")
    assert loop["reuse"] == (False, file) and loop["weights"] == ("keep", "default")
    own = {item["setting"]: (item["value"], item["from"]) for item in found["prompt_lookup"]}
    assert own == {
        "max_ngram": (4, f"{file} [prompt_lookup]"),
        "length": (9, "environment variable DECODERS_PROMPT_LOOKUP_LENGTH"),
    }
    assert all(
        name in run("config", "prompt-lookup").stdout for name in ("max_ngram", "min_ngram", "DECODERS_PROMPT_LOOKUP")
    )
    assert any(file in finding["detail"] for finding in json.loads(run("doctor", "--json").stdout))
    monkeypatch.setenv("DECODERS_COMPILE", "maybe")
    assert run("config").exit_code == 2 and run("config", "prompt_lokup").exit_code == 2


def test_the_joint_trees_settings_are_listed_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Most nodes of the joint tree" in run("config", "merged").stdout
    monkeypatch.setenv("DECODERS_MERGED_NODES", "9")
    assert json.loads(run("config", "--json").stdout)["merged"][0]["value"] == 9
    assert "DECODERS_MERGED_NODES" not in run("doctor", "--json").stdout
    monkeypatch.setenv("DECODERS_MERGED_NODES", "1")
    assert "DECODERS_MERGED_NODES" in run("doctor", "--json").stdout


def test_doctor_lists_findings_as_json() -> None:
    result = run("doctor", "--json")
    found = {item["name"]: item for item in json.loads(result.stdout)}
    assert {"python", "torch", "transformers", "device", "threads", "cache", "plugins"} <= set(found)
    assert result.exit_code == any(item["status"] == "problem" for item in found.values())


def test_doctor_reports_the_namesake_broken_plugins_and_unread_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(version="0.9"))
    monkeypatch.setenv("DECODERS_NOBODY_READS_ME", "1")
    bad = PluginInfo("bad", "2", "dist-bad", status="failed", error="ImportError: x")
    real = registry()
    fake = SimpleNamespace(plugins=lambda: [bad], strategies=real.strategies)
    monkeypatch.setattr("decoders.registry.registry", lambda: fake)
    result = run("doctor", "--json")
    assert result.exit_code == 1
    found = [(item["name"], item["status"], item["detail"]) for item in json.loads(result.stdout)]
    assert any(n == "decoders" and s == "problem" and "another project" in d for n, s, d in found)
    assert any(n == "plugin" and "dist-bad 2): ImportError" in d for n, s, d in found)
    assert ("settings", "warning", "DECODERS_NOBODY_READS_ME is set but nothing reads it") in found


@pytest.mark.parametrize(("share", "threads", "status"), [(0.0, 4, "ok"), (0.5, 4, "warning"), (0.5, 1, "warning")])
def test_doctor_says_that_other_processes_take_the_cores(
    share: float, threads: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoders.report.surroundings.busy_share", lambda seconds: share)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    finding = next(one for one in doctor.device() if one.name == "threads")
    assert ("fewer threads" in finding.detail) == (status == "warning" and threads > 1)
    assert finding.status == status and ("waits 50%" in finding.detail) == (status == "warning")


@pytest.mark.parametrize("refused", [{}, {"avx512": "a wrong product of float32"}])
def test_doctor_says_which_kernels_the_cpu_has_and_why_not_others(
    refused: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = cpu.Kernels("avx2", Path("kernels.so"), *[torch.add] * (len(fields(cpu.Kernels)) - 2))
    monkeypatch.setattr(cpu, "chosen", lambda: cpu.ChosenKernels(kernels, refused))
    (finding,) = doctor.cpu_kernels()
    assert finding.detail.startswith("avx2 (kernels.so)") and finding.status == ("warning" if refused else "ok")
    monkeypatch.setattr(cpu, "chosen", lambda: cpu.ChosenKernels(None, {"avx2": "no C++ compiler"}))
    (finding,) = doctor.cpu_kernels()
    assert (finding.status, finding.detail) == ("warning", "none: torch multiplies; avx2: no C++ compiler")


@pytest.mark.parametrize(
    ("differs", "dtype", "said"),
    [
        ((), "bfloat16", "yes, in bfloat16"),
        (("the branch of a tree",), "float32", "yes, in float32"),
        (("the branch of a tree",), "bfloat16", "near-ties may differ (bfloat16 trees)"),
        (("the branch of a tree", "the number of rows"), "bfloat16", "near-ties may differ (bfloat16):"),
    ],
)
def test_doctor_says_what_is_promised_of_the_tokens(differs: tuple[str, ...], dtype: str, said: str) -> None:
    finding = doctor.promise(Invariance(len(differs) < 2, differs), dtype, low_precision=dtype != "float32")
    assert finding.detail.startswith(said) and (finding.status == "ok") == said.startswith("yes")


def test_doctor_survives_a_check_that_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "CHECKS", (crash, doctor.versions))
    result = run("doctor")
    assert result.exit_code == 1
    assert "RuntimeError: boom" in result.stdout
    assert "python" in result.stdout


def test_train_medusa_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import decoders.cli.models as cli_models
    import decoders.training.medusa as training

    calls: list[Any] = []

    def train_medusa(model: Any, tokenizer: Any, job: Any, **options: Any) -> dict[str, Any]:
        calls.append((model, job, options))
        facts = {"tokens_per_step": 1.75, "reached": [0.5, 0.25]}
        return {"held": {"text": facts}, "trees": {"nodes": 9, "searched": 2.5, "default": 2.25}}

    monkeypatch.setattr(training, "train_medusa", train_medusa)
    monkeypatch.setattr(cli_models, "load", lambda name, dtype, device: (name, dtype))
    (tmp_path / "a.txt").write_text("some text")
    options = ["--data", str(tmp_path), "--held", str(tmp_path / "a.txt"), "--out", "there", "--heads", "3"]
    options += ["--nodes", "9", "--tree", "--no-bf16"]
    result = run("train", "medusa", "--model", "mine", *options)
    ((model, job, given),) = calls
    assert (model, job.texts, job.out) == ("mine", ["some text"], Path("there"))
    assert job.held == ["some text"] and not job.test
    assert (given["run"].heads, given["run"].bf16, given["nodes"], given["tree"]) == (3, False, 9, True)
    assert "held, text: 1.75 tokens per step; accepted up to token 1, 2, …: 50.0%, 25.0%" in result.stdout
    assert "tree of 9 nodes: 2.500 tokens a step; the default's first 9: 2.250" in result.stdout
    assert json.loads(run("train", "medusa", "--model", "mine", *options, "--json").stdout)["trees"]["nodes"] == 9


@pytest.mark.parametrize("said", ["interrupted after step 3: the same command goes on from there", ""])
def test_an_interrupted_training_says_so_in_one_line(
    said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import decoders.training.medusa as training

    def train_medusa(*given: Any, **options: Any) -> None:
        raise (
            KeyboardInterrupt(said) if said else KeyboardInterrupt
        )  # while texts are prepared, nothing has more to say

    monkeypatch.setattr(training, "train_medusa", train_medusa)
    monkeypatch.setattr(models, "load", lambda name, dtype, device: (name, dtype))
    (tmp_path / "a.txt").write_text("some text")
    result = run("train", "medusa", "--model", "mine", "--data", "a.txt")
    assert result.exit_code and result.stderr.splitlines() == [said or "interrupted"]


def test_one_of_a_kind_is_no_plural() -> None:
    assert [amount(number, "pass", "passes") for number in (0, 1, 2)] == ["0 passes", "1 pass", "2 passes"]
    nouns = "completions|graphs|heads|layers|nodes|prompts|requests|rounds|rows|steps|threads|tokens"
    bare = re.compile(
        r"\{(?!shown|dtype)[^{}]*(?<!f)\} (?:" + nouns + r")\b(?!/)"
    )  # without texts, and amounts with a fraction
    files = [
        *Path(cli.__file__).parent.glob("*.py"),
        *(Path(bench.__file__).parent / f"{n}.py" for n in ("tables", "plot")),
    ]
    found = [(file.name, match) for file in files for match in bare.findall(file.read_text(encoding="utf-8"))]
    assert not found, "write amount(number, noun)"


@pytest.mark.parametrize("imported", ["decoders.cli", "typer", "decoders.cli.listing"])
def test_ctrl_c_ends_the_command_line_quietly_while_it_is_imported(imported: str) -> None:
    interrupting = (
        "import importlib.abc, sys\n"
        "class Interrupt(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, *given):\n"
        f"        if name == {imported!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from decoders.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", interrupting, "strategies"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["decoders"] == "decoders.__main__:main"


@pytest.mark.parametrize("command", ["draft", "medusa", "eagle3", "dflash"])
def test_training_replaces_no_files_of_others(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "load", None)
    (tmp_path / "README.md").write_text("mine")
    result = run("train", command, "--model", "demo", "--output", str(tmp_path))
    assert result.exit_code == 2
    assert "has other files (README.md), which training might replace" in result.stderr


def test_train_medusa_without_text_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import decoders.cli.models as cli_models

    monkeypatch.setattr(cli_models, "load", lambda name, dtype, device: (name, dtype))
    result = run("train", "medusa", "--model", "mine", "--data", str(tmp_path / "nowhere"))
    assert result.exit_code == 2
    assert "no file or folder" in result.stderr


@pytest.mark.skipif(not demo.available(), reason="the demo models are not in this checkout")
@pytest.mark.parametrize(
    ("arguments", "compiles"),
    [(["--seconds", "5"], False), (["--seconds", "5", "--compile"], True), ([], True), (["--no-compile"], False)],
    ids=str,
)  # fmt: skip
def test_the_demo_compiles_only_within_its_time(
    arguments: list[str], compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def strategy_methods(
        model: Any, names: Any, assistant: Any, settings: Any, config: Any, tokenizer: Any
    ) -> list[Any]:
        seen.update(config)
        return []

    def warm_up(methods: Any, workloads: Any, *, deadline: float, **rest: Any) -> list[Any]:
        seen["left"] = deadline - time.monotonic()
        raise SettingsError("enough")

    monkeypatch.setattr("decoders.bench.strategy_methods", strategy_methods)
    monkeypatch.setattr("decoders.bench.warm_up", warm_up)
    run("demo", "--no-live", *arguments)
    assert seen["compile"] is compiles
    assert seen["left"] < (5 if "5" in arguments else 240)
