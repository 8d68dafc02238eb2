"""The demo corpus, the edit task and the tokenizer."""

from __future__ import annotations

import ast
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders.demo import data
from decoders.demo.data import Batches, encode
from decoders.demo.shapes import END, train_tokenizer


@pytest.fixture(scope="module")
def sources():
    return data.read_sources()


@pytest.fixture(scope="module")
def few(sources):
    return [source for source in sources if "/" not in source.path][:80]


@pytest.fixture(scope="module")
def tokenizer(few):
    return train_tokenizer((source.text for source in few), vocabulary=600)


def test_split_is_disjoint_complete_and_about_three_percent(sources):
    train, held_out = data.split(sources)
    assert not {source.path for source in train} & {source.path for source in held_out}
    assert len(train) + len(held_out) == len(sources)
    assert 0.01 < len(held_out) / len(sources) < 0.06


def test_no_text_of_a_held_out_file_is_trained_on(sources):
    train, held_out = data.split(sources)
    assert not {source.text for source in train} & {source.text for source in held_out}


@pytest.mark.parametrize(
    ("path", "held_out"),
    [("statistics.py", True), ("socket.py", True), ("json/decoder.py", False), ("argparse.py", False)],
)
def test_split_never_changes(path, held_out):
    assert data.is_held_out(path) is held_out


def test_sources_hold_no_machine_specific_or_third_party_file(sources):
    paths = [source.path for source in sources]
    assert paths == sorted(paths)
    assert not [path for path in paths if re.search(r"site-packages|_sysconfigdata|__pycache__|(^|/)config-", path)]


def test_duplicates_are_dropped_before_the_split(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "c.py").write_text("y = 1\n")
    assert [source.path for source in data.read_sources(tmp_path)] == ["a.py", "c.py"]


def test_rename_changes_the_name_and_nothing_else():
    text = (
        "class A:\n    def total(self, items, start):\n        result = start\n        for item in items:\n"
        "            result += item.items\n        return result\n"
    )
    (function,) = data.functions([data.Source("a.py", text)])
    # `items` is also an attribute here, so a textual rename of it would be wrong: it is not on offer.
    assert function.names == ("item", "result", "start")
    task = data.rename_task(function, "result", "answer")
    assert task.text == (
        f"# original\n{function.source}\n# rename result to answer\n{function.source.replace('result', 'answer')}"
    )


@pytest.mark.slow
def test_edit_tasks_parse_and_undo(few):
    functions = data.functions(few)
    names = data.new_names(functions)
    rng = random.Random(0)
    renames = 0
    for function in functions[:300]:
        task = data.edit_task(function, names, rng)
        instruction = task.prompt.rstrip("\n").rsplit("\n", 1)[1]
        before, after = ast.dump(ast.parse(function.source)), ast.dump(ast.parse(task.answer))
        if instruction == "# copy":
            assert task.answer == function.source
            continue
        old, new = re.fullmatch(r"# rename (\w+) to (\w+)", instruction).groups()
        assert before != after
        assert not re.search(rf"\b{old}\b", task.answer)
        assert re.sub(rf"\b{new}\b", old, task.answer) == function.source
        renames += 1
    assert 100 < renames < 300


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_tokenizer_gives_back_any_text(tokenizer, text):
    text = text.replace(END, "")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    "text", ["", " a , b . c 's", "\t\tif x :\n\n    y\r\n", "naïve ∑ 日本 🐍\x00", "don't ( x ) ?"]
)
def test_tokenizer_gives_back_awkward_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_is_reproducible(few, tokenizer):
    again = train_tokenizer((source.text for source in few), vocabulary=600)
    assert again.get_vocab() == tokenizer.get_vocab()


def test_special_token_is_first_and_not_added_to_text(tokenizer):
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == 0
    assert 0 not in tokenizer("def f():\n    pass\n")["input_ids"]


def test_stream_separates_documents(tokenizer):
    ids = encode(tokenizer, ["a\n", "b\n"])
    assert tokenizer.decode(ids.tolist()) == f"{END}a\n{END}b\n{END}"


def test_batch_depends_on_seed_and_step_alone(few, tokenizer):
    some = few[:10]
    first = Batches(some, tokenizer, seed=1, rows=4, length=32)
    second = Batches(some, tokenizer, seed=1, rows=4, length=32)
    second.batch(5000)  # another epoch: leaves nothing behind
    assert first.batch(3).equal(second.batch(3))
    assert not first.batch(3).equal(first.batch(4))
    assert not first.batch(3).equal(Batches(some, tokenizer, seed=2, rows=4, length=32).batch(3))
    assert first.edit_rows == 1
    assert tokenizer.decode(first.batch(3)[-1]).startswith("# original\n")


def test_an_epoch_visits_every_window_once(tokenizer):
    sources = [data.Source("a.py", "".join(f"x{number} = {number}\n" for number in range(200)))]
    batches = Batches(sources, tokenizer, seed=0, rows=1, length=16)
    windows = (len(batches.stream) - 1 - 16) // 16
    rows = {tuple(batches.batch(step)[0].tolist()) for step in range(windows)}
    assert len(rows) == windows
