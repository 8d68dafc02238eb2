"""What grammars cost is measured on texts that follow them, and grammars that do not compile are listed too."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from decoders_lab import grammar as g
from decoders_lab.commands.grammar import vocabulary_sizes
from decoders_lab.grammar import allocated, cost_tables
from decoders_lab.grammar_subjects import Subject, subjects
from rich.console import Console
from typer.testing import CliRunner

from decoders.cli import app
from decoders.constraints import Backend, CompiledGrammar, Language, LLGuidance, Policy, Regex, Vocabulary
from decoders.errors import GrammarError, SettingsError

BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b'":', b'", "', b"aa", None], [259])
WORD = Subject("word", "aab", lambda: Regex("[ab]{1,20}", label="word"))


class Never(Backend):
    name = "never"

    def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> CompiledGrammar:
        raise GrammarError(f"{language.name}: never")


def test_every_figure_is_there_and_what_does_not_compile_has_its_reason() -> None:
    told: list[str] = []
    cost, failed = g.measure(WORD, [LLGuidance(), Never()], BYTES, 2, told.append)
    assert (cost.subject, cost.backend, cost.compiled_by, cost.vocabulary) == ("word", "llguidance", "llguidance", 260)
    figures = (cost.language_ms, cost.compile_ms, cost.first_mask_ms, cost.mask_us, cost.slow_mask_us, cost.tree_us)
    assert all(figure is not None and figure > 0 for figure in figures)
    assert cost.slow_mask_us >= cost.mask_us  # type: ignore[operator]
    assert failed == g.Cost("word", "never", 260, error="word: never")
    assert told == ["word, llguidance, 260 tokens", "word, never, 260 tokens"]
    assert g.measure(WORD, [Never()], BYTES, 2) == [failed]


def test_a_text_that_does_not_follow_its_grammar_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"the text goes on with b'c'"):
        g.measure(Subject("word", "abc", WORD.spec), [LLGuidance()], BYTES, 1)


@pytest.mark.parametrize("subject", subjects(), ids=lambda subject: subject.name)
def test_texts_follow_their_grammars(subject: Subject) -> None:
    matcher = LLGuidance().compile(subject.language(), BYTES).start()
    tokens = [*BYTES.encode(subject.text), BYTES.stops[0]]
    assert matcher.advance(tokens) == len(tokens)


def test_trees_are_full_and_legal_at_first_and_equal_in_every_run() -> None:
    grammar = LLGuidance().compile(WORD.language(), BYTES)
    grown = g.trees(grammar, list(BYTES.encode("ababababab")))
    assert grown == g.trees(grammar, list(BYTES.encode("ababababab")))
    assert len(grown) == g.PLACES
    for tree in grown:
        assert len(tree.parents) == len(tree.tokens) == g.NODES
        assert tree.parents[: g.DEPTH + 1] == [-1, *range(g.DEPTH)]
        matcher = grammar.start()
        assert matcher.advance(tree.taken) == len(tree.taken)


def test_memory_that_is_held_is_seen() -> None:
    before = allocated()
    if not hasattr(psutil, "heap_info"):  # the C library does not report its heap
        assert before is None
        return
    assert before is not None
    block = bytearray(200_000_000)
    after = allocated()
    # Memory of other tests may be freed meanwhile, for instance by a thread that compiles.
    assert after is not None and after - before >= len(block) / 2


def test_tables_name_who_compiled_it_and_who_could_not() -> None:
    costs = [
        g.Cost("word", "auto", 260, "table", 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7_000_000, 8, 9),
        g.Cost("word", "never", 260, error="word: never"),
        g.Cost("other", "auto", 1000, "auto"),
    ]
    console = Console(width=200, record=True)
    for table in cost_tables(costs, {("auto", 260): 0.25}):
        console.print(table)
    text = console.export_text()
    assert "auto: table" in text and "7.0" in text
    assert "never cannot compile word: word: never" in text
    assert "auto prepares once per tokenizer: 0.25 s" in text
    assert "1,000 tokens" in text


def test_sizes_of_vocabularies() -> None:
    assert vocabulary_sizes("4k, 32000,4000") == [4000, 32000]
    for wrong in ("", "4m", "12", "-4k"):
        with pytest.raises(SettingsError, match="--vocabulary"):
            vocabulary_sizes(wrong)


def test_command_writes_tables_and_json(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = CliRunner().invoke(
        app, ["bench", "grammar", "-g", "iso_date,json", "--vocabulary", "1k", "--repeats", "1", "-b", "auto,llguidance",
              "--json", str(file)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    assert set(found) == {"machine", "run", "prepared", "costs"}
    assert {(cost["subject"], cost["backend"]) for cost in found["costs"]} == {
        (subject, backend) for subject in ("iso_date", "json") for backend in ("auto", "llguidance")
    }
    assert not any(cost["error"] for cost in found["costs"])
    assert {each["backend"] for each in found["prepared"]} == {"auto", "llguidance"}
    assert "1,000 tokens" in done.stdout
    wrong = CliRunner().invoke(app, ["bench", "grammar", "-g", "iso_dat"])
    assert wrong.exit_code == 2 and "Did you mean 'iso_date'?" in wrong.stderr
