"""The code in README and docs runs: Python blocks in order, commands parse, settings files load, outputs are as shown."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from decoders import demo, settings
from decoders.heads.dflash_files import save_draft_model
from decoders.heads.eagle3_files import save_head
from decoders.heads.medusa import HeadsConfig, MedusaHeads, save_heads
from decoders.registry import registry, reset_registry
from decoders.registry.builtin import MERGED
from decoders.settings import RuntimeSettings, load_settings
from decoders.testing import ARCHITECTURES, kit
from decoders.training.dflash import block_config, new_draft_model
from decoders.training.eagle3 import head_config, new_head
from decoders.training.feature_heads import layer_config
from decoders.training.recipes import BlockTraining, HeadTraining, default_layers

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    p.relative_to(ROOT).as_posix()
    for p in [
        ROOT / "README.md",
        ROOT / "grammars" / "README.md",
        ROOT / "plugins" / "decoders-lab" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
)


@dataclass(frozen=True)
class Block:
    """A fenced block: `line` is the fence's, `comment` the HTML comment right before it."""

    language: str
    text: str
    line: int
    comment: str


def blocks(page: str) -> list[Block]:
    found, text = [], (ROOT / page).read_text(encoding="utf-8")
    for match in re.finditer(r"(?:^<!-- ([^\n]*?) -->\n)?^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        line = text[: match.start(2)].count("\n") + 1
        found.append(Block(match[2], match[3], line, match[1] or ""))
    return found


def pages_with(language: str) -> list[str]:
    return [page for page in PAGES if any(block.language == language for block in blocks(page))]


#: Tokens of the models that stand for a reader's: an end, every byte, and room.
TOKENS = 260


def reader_model() -> PreTrainedModel:
    """A tiny random model that knows a token for the end of a text, as trained ones do."""
    tiny = ARCHITECTURES["llama"]
    model = replace(tiny, options={**tiny.options, "vocab_size": TOKENS, "eos_token_id": 0})()
    model.generation_config.eos_token_id = 0
    return model


TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


def reader_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, so that the examples can be written and grammars can be told in bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(["<end>", *alphabet])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = token_decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>", chat_template=TEMPLATE)


def tiny_demo(
    name: str = "target", dtype: torch.dtype | None = None, directory: Any = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """What ``decoders.demo.load`` gives, without the trained weights; it finds the heads of ``my-model``."""
    model = reader_model()
    model.config.name_or_path = "my-model"
    return model, reader_tokenizer()


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A reader's working directory: a checkpoint called my-model, the files that pages name, no compilation."""
    for name in ("CONFIG", "PLUGINS_BLOCK", "PLUGINS_ALLOW", "PLUGINS_STRICT", "STRATEGY"):
        monkeypatch.delenv(f"DECODERS_{name}", raising=False)
    monkeypatch.setenv("DECODERS_COMPILE", "0")
    monkeypatch.chdir(tmp_path)
    reset_registry()
    yield tmp_path
    reset_registry()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer and heads, to be copied to where a page looks for it."""
    folder = tmp_path_factory.mktemp("pages") / "my-model"
    model = reader_model()
    model.save_pretrained(folder)
    reader_tokenizer().save_pretrained(folder)
    vocab, hidden = model.get_output_embeddings().weight.shape
    config = HeadsConfig(heads=4, layers=1, hidden_size=hidden, vocab_size=vocab, projection="tied")
    save_heads(MedusaHeads(config), folder / "medusa")
    eagle = head_config(model, HeadTraining(), default_layers(model.config.num_hidden_layers))
    save_head(new_head(eagle, model, torch.arange(vocab), 0), None, folder / "eagle3", model, 5)
    blocks = BlockTraining(rank=0)
    shape = block_config(blocks, layer_config(model, None), (0,), vocab, mask=1)
    draft = new_draft_model(model, blocks, shape)
    save_draft_model(shape, draft.network, None, folder / "dflash", model)
    return folder


#: Where pages have their server.
SERVER = "http://127.0.0.1:8000"


@contextlib.contextmanager
def server_of(page: str, folder: Path) -> Iterator[str]:
    """The address of the server that `page` starts with ``decoders serve MODEL``; whatever model that is, ours stands for it."""
    text = "".join(block.text for block in blocks(page) if block.language == "sh")
    started = re.search(r"^decoders serve (\S+)(.*)$", text, re.M)
    if started is None or not any(SERVER in b.text for b in blocks(page) if b.language == "python"):
        yield SERVER
        return
    own = ["--name", started[1].rpartition("/")[2], "--port", "0", "--no-compile", "--slots", "512"]
    command = [sys.executable, "-m", "decoders", "serve", "my-model", *shlex.split(started[2]), *own]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            said = next((line for line in iter(server.stderr.readline, "") if "a page to try it" in line), "")
            yield re.findall(r"http://[\d.:]+", said)[0]
        finally:
            server.terminate()
            server.communicate()


def needed(page: str) -> list[str]:
    """The libraries of a page, named in comments before its blocks."""
    comments = [block.comment for block in blocks(page) if block.comment.startswith("needs: ")]
    return [library for comment in comments for library in comment.removeprefix("needs: ").split(", ")]


def run_page(page: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Runs the Python blocks of a page one after the other in one namespace, as a reader would."""
    for library in needed(page):
        pytest.importorskip(library, reason=f"{library}, of the extra guides, is not installed")
    with server_of(page, folder) as address:
        run_blocks(page, monkeypatch, address)


def run_blocks(page: str, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    module = types.ModuleType("page_of_the_docs")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # classes of a page can be pickled, as those of a script
    written = ""
    for block in blocks(page):
        where = f"{page}:{block.line}"
        if block.comment == "output":
            assert written.strip() == block.text.strip(), f"{where} shows another output than the block before it gives"
        elif block.language == "python" and not block.comment.startswith("no-test"):
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream), warnings.catch_warnings():
                # transformers warns about random models' generation flags; what readers see is no matter of a test.
                warnings.simplefilter("ignore")
                if not needed(page):  # other libraries warn of transformers' names in their own code
                    warnings.simplefilter("error", FutureWarning)  # examples use no name that is going away
                torch.manual_seed(0)
                # Blank lines in front make line numbers in a traceback those of the page.
                code = compile(
                    "\n" * block.line + block.text.replace(SERVER, address), where, "exec", dont_inherit=True
                )
                exec(code, vars(module))
            written = stream.getvalue()
    if needed(page):  # clients of other libraries that nobody closes, as in a reader's script
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            vars(module).clear()
            gc.collect()


#: Pages that check several strategies: the first checks of the kit, all of them in the slow run.
WHOLE_KIT = {"docs/plugins/writing-a-strategy.md"}


#: Pages about the demo model, which run with it where it is, and with a tiny one.
DEMO = (
    "docs/tutorial.md",
    "docs/how-to/grammars.md",
    "docs/how-to/sampling.md",
    "docs/how-to/train-medusa-heads.md",
    "docs/how-to/train-eagle3-heads.md",
)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run(page: str, checkpoint: Path, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in WHOLE_KIT:
        monkeypatch.setattr(kit, "CHECKS", kit.CHECKS[:6])
    shutil.copytree(checkpoint, reader / "my-model")
    monkeypatch.setattr(demo, "load", tiny_demo)
    run_page(page, monkeypatch, reader)


@pytest.mark.slow
@pytest.mark.parametrize("page", WHOLE_KIT)
def test_python_blocks_run_with_the_whole_kit(
    page: str, checkpoint: Path, reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoint, reader / "my-model")
    monkeypatch.setattr(demo, "load", tiny_demo)
    run_page(page, monkeypatch, reader)


@pytest.mark.slow
@pytest.mark.skipif(not demo.available(), reason="the demo models are not in this checkout")
@pytest.mark.parametrize("page", DEMO)
def test_pages_about_the_demo_model_run_with_it(
    page: str, checkpoint: Path, reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoint, reader / "my-model")
    run_page(page, monkeypatch, reader)


def test_skipped_blocks_say_why() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.comment.startswith("no-test"):
                assert re.fullmatch("no-test: .{10,}", block.comment), f"{page}:{block.line}"


def commands() -> list[Any]:
    found = []
    for page in pages_with("sh"):
        for block in blocks(page):
            if block.language == "sh":
                lines = block.text.replace("\\\n", " ").splitlines()
                found += [pytest.param(line, id=f"{page}: {line}") for line in lines if line.startswith("decoders ")]
    return found


@pytest.fixture(scope="module")
def command_line() -> Iterator[Any]:
    """The parser, with the commands of the distribution that the figures are made with, from the checkout."""
    from typer.main import get_command

    from decoders.cli import app

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "plugins" / "decoders-lab" / "src"))
        lab = importlib.import_module("decoders_lab")
    reset_registry()
    if "lab" not in {info.name for info in registry().plugins()}:  # it may be installed
        registry().register(lab, "lab")
    yield get_command(app)
    reset_registry()


@pytest.mark.parametrize("line", commands())
def test_commands_are_understood(line: str, command_line: Any) -> None:
    """Parsed by the command line's own parser, not run."""
    command = command_line
    words = shlex.split(line, comments=True)[1:]
    while hasattr(command, "commands"):
        if command.invoke_without_command and (not words or words[0].startswith("-")):
            break
        inner = command.get_command(None, words[0]) if words else None
        if inner is None and command.name == "bench" and words[0] == "my-model":
            break
        assert inner is not None, f"there is no such command: {line}"
        command = inner
        words.pop(0)
    command.make_context(line, words)


@pytest.mark.parametrize("page", pages_with("toml"))
def test_settings_files_load(page: str, reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in blocks(page):
        name = re.match(r"# (decoders|pyproject)\.toml\n", block.text)
        if block.language == "toml" and name:
            file = reader / f"{name[1]}.toml"
            file.write_text(block.text)
            monkeypatch.setenv("DECODERS_CONFIG", str(file))
            entries = registry().strategies()
            loop = load_settings(RuntimeSettings, None, {}, {}, sections=entries)
            changed = loop != RuntimeSettings(compile=False)
            for entry in entries.values():
                found = load_settings(entry.cls.settings_class, entry.name, {}, {}, sections=entries)
                changed = changed or found != entry.cls.settings_class()
            assert changed, f"{page}:{block.line} sets nothing"


def test_every_variable_that_is_named_is_read() -> None:
    """Variables of strategies that a page invents itself are left out."""
    known = {f"DECODERS_{name.upper()}" for name in (*settings.RuntimeSettings.model_fields, *settings.NOT_SETTINGS)}
    for cls in (*(entry.cls for entry in registry().strategies().values()), MERGED):
        known |= {f"DECODERS_{cls.name}_{field}".upper() for field in cls.settings_class.model_fields}
    for page in PAGES:
        named = set(re.findall(r"DECODERS_[A-Z0-9_]*[A-Z0-9]", (ROOT / page).read_text(encoding="utf-8")))
        assert not {n for n in named if not n.startswith("DECODERS_BIGRAM")} - known, page
