"""Compiled grammars are kept: in memory, and on disk in files that are checked before they are used."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch

from decoders.constraints import compiling
from decoders.constraints import compiling as cache
from decoders.constraints.auto import Auto
from decoders.constraints.base import Backend, CompiledGrammar, Language, Matcher, Policy
from decoders.constraints.compiling import Cache
from decoders.constraints.llguidance import LLGuidance
from decoders.constraints.specs import Spec
from decoders.constraints.table import Table
from decoders.constraints.vocabulary import Vocabulary
from decoders.errors import GrammarError

BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), None, None], [256])


@dataclass(frozen=True)
class Plain(Spec):
    """Texts of one regular expression."""

    regex: str

    @property
    def key(self) -> str:
        return f"Plain/{self.regex}"

    def language(self) -> Language:
        return Language(self.regex, regex=self.regex)


class Kept(CompiledGrammar):
    """Says what it was compiled from; has nothing else."""

    backend = "kept"

    def __init__(self, language: Language, vocabulary: Vocabulary, policy: Policy) -> None:
        self.language, self.vocabulary, self.policy = language, vocabulary, policy

    def start(self) -> Matcher:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return 0

    def dump(self) -> bytes | None:
        return str(self.language.regex).encode()


class Keeper(Backend):
    name = "keeper"

    compilations = 0
    wait: Callable[[], object] = staticmethod(lambda: None)

    def compile(self, language: Language, vocabulary: Vocabulary, policy: Policy = "full") -> CompiledGrammar:
        type(self).compilations += 1
        self.wait()
        if language.regex == "bad":
            raise GrammarError("bad: no")
        return Kept(language, vocabulary, policy)

    def restore(
        self, content: bytes, language: Language, vocabulary: Vocabulary, policy: Policy = "full"
    ) -> CompiledGrammar:
        if content.decode() != language.regex:
            raise GrammarError("it holds another language")
        return Kept(language, vocabulary, policy)


@pytest.fixture(autouse=True)
def _count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeper, "compilations", 0)


def test_a_grammar_is_compiled_once_for_what_it_follows_from() -> None:
    keep = Cache()
    first = keep.compiled(Plain("a"), BYTES, Keeper())
    again = keep.compiled(Plain("a"), Vocabulary(BYTES.tokens, BYTES.stops), Keeper())
    assert (first.source, again.source) == ("compiled", "memory")
    assert again.grammar is first.grammar
    others = [
        keep.compiled(Plain("b"), BYTES, Keeper()),
        keep.compiled(Plain("a", policy="canonical"), BYTES, Keeper()),
        keep.compiled(Plain("a"), Vocabulary(BYTES.tokens, [257]), Keeper()),
        keep.compiled(Plain("a"), BYTES, LLGuidance()),
    ]
    assert {other.source for other in others} == {"compiled"}
    assert len({id(other.grammar) for other in others} | {id(first.grammar)}) == 5


def test_the_longest_unused_is_given_up() -> None:
    keep = Cache(size=2)
    for regex in ("a", "b", "a", "c"):
        keep.compiled(Plain(regex), BYTES, Keeper())
    assert len(keep) == 2
    assert [keep.compiled(Plain(regex), BYTES, Keeper()).source for regex in ("a", "b")] == ["memory", "compiled"]


def test_the_cache_of_the_process_can_be_emptied() -> None:
    spec = Plain("of the process")
    assert [cache.compiled(spec, BYTES, Keeper()).source for _ in range(2)] == ["compiled", "memory"]
    cache.forget()
    assert cache.compiled(spec, BYTES, Keeper()).source == "compiled"
    cache.forget()


def test_nothing_is_kept_of_a_failure(tmp_path: Path) -> None:
    keep = Cache()
    for _ in range(2):
        with pytest.raises(GrammarError, match="bad: no"):
            keep.compiled(Plain("bad"), BYTES, Keeper(), tmp_path)
    assert Keeper.compilations == 2
    assert (len(keep), list(tmp_path.iterdir())) == (0, [])


def test_threads_that_ask_for_the_same_wait_for_the_one_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeper, "wait", staticmethod(lambda: time.sleep(0.1)))
    keep, found = Cache(), []
    threads = [
        threading.Thread(target=lambda: found.append(keep.compiled(Plain("a"), BYTES, Keeper()))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Keeper.compilations == 1
    assert len({id(each.grammar) for each in found}) == 1
    assert sorted(each.source for each in found) == ["compiled", "memory", "memory", "memory"]


def test_a_folder_named_later_gets_what_is_in_memory(tmp_path: Path) -> None:
    cache = Cache()
    sources = [cache.compiled(Plain("a"), BYTES, Keeper(), folder).source for folder in (None, tmp_path, str(tmp_path))]
    assert sources == ["compiled", "memory", "memory"]
    (file,) = tmp_path.iterdir()
    assert Cache().compiled(Plain("a"), BYTES, Keeper(), tmp_path).source == "disk"
    written = file.stat().st_mtime_ns
    cache.compiled(Plain("a"), BYTES, Keeper(), tmp_path)
    assert (file.stat().st_mtime_ns, Keeper.compilations) == (written, 1)


def test_a_file_is_read_in_the_next_process(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    first = Cache().compiled(Plain("a"), BYTES, Keeper(), folder)
    again = Cache().compiled(Plain("a"), BYTES, Keeper(), folder)
    assert (first.source, again.source, Keeper.compilations) == ("compiled", "disk", 1)
    assert again.grammar.language.name == "a"
    for spec, vocabulary in (
        (Plain("b"), BYTES),
        (Plain("a", policy="canonical"), BYTES),
        (Plain("a"), Vocabulary(BYTES.tokens, [257])),
    ):
        assert Cache().compiled(spec, vocabulary, Keeper(), folder).source == "compiled"
    assert len(list(folder.iterdir())) == 4  # and nothing temporary


def test_llguidance_keeps_no_files_since_it_compiles_faster_than_they_are_read(tmp_path: Path) -> None:
    for _ in range(2):
        assert Cache().compiled(Plain("a"), BYTES, LLGuidance(), tmp_path).source == "compiled"
    assert list(tmp_path.iterdir()) == []


def flip_last_byte(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def renamed(content: bytes) -> bytes:
    return content.replace(b'"key": "', b'"key": "0')


def other_language(content: bytes) -> bytes:
    head = json.loads(content.split(b"\n")[0])
    return json.dumps(head | {"sha256": hashlib.sha256(b"b").hexdigest()}).encode() + b"\nb"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (flip_last_byte, "damaged"),
        (lambda content: content[:-1], "damaged"),
        (lambda content: b"", "Expecting value"),
        (lambda content: b"\x80\x04pickle", "cannot be used"),
        (lambda content: b"[1]\n", "not a compiled grammar"),
        (renamed, "for another grammar"),
        (other_language, "another language"),
    ],
)
def test_a_damaged_or_foreign_file_warns_and_is_made_anew(
    tmp_path: Path, damage: Callable[[bytes], bytes], why: str
) -> None:
    Cache().compiled(Plain("a"), BYTES, Keeper(), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(UserWarning, match=why):
        assert Cache().compiled(Plain("a"), BYTES, Keeper(), tmp_path).source == "compiled"
    assert Cache().compiled(Plain("a"), BYTES, Keeper(), tmp_path).source == "disk"


def test_a_file_of_another_version_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache().compiled(Plain("a"), BYTES, Keeper(), tmp_path)
    monkeypatch.setattr("decoders.constraints.compiling.VERSION", compiling.VERSION + 1)
    assert [Cache().compiled(Plain("a"), BYTES, Keeper(), tmp_path).source for _ in range(2)] == ["compiled", "disk"]


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.warns(UserWarning, match="cannot be read"), pytest.warns(UserWarning, match="could not be saved"):
        assert Cache().compiled(Plain("a"), BYTES, Keeper(), blocked).source == "compiled"


@pytest.mark.parametrize("policy", ["full", "canonical"])
def test_a_table_is_the_same_after_a_file(tmp_path: Path, policy: Policy) -> None:
    vocabulary = Vocabulary([*BYTES.tokens[:256], b'{"', b'"name', b"ab", None], [259])
    spec = Plain(r'\{"name": "[a-z]{0,9}"\}', policy=policy)
    first, again = (Cache().compiled(spec, vocabulary, Auto(), tmp_path) for _ in range(2))
    assert (first.source, again.source) == ("compiled", "disk")
    assert first.grammar.backend == again.grammar.backend == "table"
    old, new = first.grammar.tables(), again.grammar.tables()
    assert old is not None and new is not None
    assert torch.equal(old.next, new.next) and torch.equal(old.classes, new.classes)
    assert torch.equal(old.masks[old.mask_of], new.masks[new.mask_of])
    text = [*b'{"name": "x"}', 259]
    if policy == "full":
        assert again.grammar.start().advance(text) == len(text)


def changed(**tensors: torch.Tensor) -> bytes:
    found = safetensors.torch.load(Table().compile(Language("a", regex="a+"), BYTES).dump())
    return safetensors.torch.save(found | tensors)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"x", "no tensors"),
        (changed(extra=torch.zeros(1)), "do not form a table"),
        (changed(next=torch.zeros(3, dtype=torch.int32)), "do not fit"),
        (changed(masks=torch.zeros(3, 1, dtype=torch.int32)), "do not fit"),
        (changed(classes=torch.full((256,), 99)), "classes points out"),
        (changed(ends=torch.tensor([-1, 1])), "ends points out"),
    ],
)
def test_a_table_that_does_not_hold_together_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        Table().restore(content, Language("a", regex="a+"), BYTES)
