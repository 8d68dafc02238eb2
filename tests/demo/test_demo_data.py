"""The demo corpus and the edit task."""

from __future__ import annotations

import ast
import random
import re

import pytest

from decoders.demo import data


@pytest.fixture(scope="module")
def sources():
    return data.read_sources()


@pytest.fixture(scope="module")
def few(sources):
    return [source for source in sources if "/" not in source.path][:80]


@pytest.mark.slow
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
