"""Files of completions: nothing that stands in them is lost, whatever is killed, refused or full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from decoders import scheduling
from decoders.errors import SettingsError
from decoders.scheduling import outputs
from decoders.scheduling.lines import InputLine
from decoders.scheduling.outputs import OutputLines, locked


def line(number: int, text: str = "") -> InputLine:
    return InputLine(Path("in.jsonl"), number, number + 1, text or f"prompt {number}")


def item(number: int, **outcome: Any) -> dict[str, Any]:
    return {"index": number, "input": line(number).mark} | (outcome or {"text": f"α{number}"})


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_a_line_that_was_cut_off_is_written_anew_wherever_that_was(path: Path) -> None:
    with OutputLines(path) as out:
        out.write(item(0))
        out.write(item(1))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in [0, *range(len('{"index": '), len(whole) + 1)]:
        path.write_bytes(whole[:size])
        with OutputLines(path) as out:
            assert path.read_bytes() == whole[:size]  # nothing is dropped before there is something to write
            assert list(out.done) == [0] * (size >= first - 1) + [1] * (size >= len(whole) - 1)
            for number in {0, 1} - out.done.keys():
                assert not out.check(line(number))
                out.write(item(number))
        assert written(path) == [item(0), item(1)]


@pytest.mark.parametrize(
    "content",
    [
        b"mine", b"mine\n", b"{", b"{}", b'{"index": 0}\n', b'{"index": 0, "text": ',
        b'{"index": true, "input": "0123456789ab", "text": ""}\n', b'{"index": -1, "input": "0123456789ab", "text": ""}\n',
        b'{"index": 0, "input": "zz", "text": ""}\n', b'{"index": 0, "input": "0123456789ab", "text": ""}\nmy notes',
        b'{"index": 0, "input": "0123456789ab", "text": ""}\n\xff\n', b"[" * 5000, b'{"a":' * 5000, b"\0" * 100,
    ],
)  # fmt: skip
def test_a_file_of_something_else_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(SettingsError, match="not a completion|holds no completions"):
        OutputLines(path)
    assert path.read_bytes() == content


def test_another_or_a_longer_input_is_refused(path: Path) -> None:
    with OutputLines(path) as out:
        out.write(item(0))
        out.write(item(1, error="no"))
        assert out.check(line(0)) and not out.check(line(1)) and not out.check(line(1, "mended"))
        with pytest.raises(SettingsError, match="another input"):
            out.check(line(0, "other"))
        out.check_count(2)
        with pytest.raises(SettingsError, match="longer input"):
            out.check_count(1)


def test_other_options_are_refused_with_what_differs(path: Path) -> None:
    options = {"model": "a", "temperature": 0.8, "seed": 3}
    with OutputLines(path) as out:
        out.write(item(0))  # as earlier versions did
        out.check_options(options)
        out.write({"options": {"model": "b"}} | item(1, error="no"))
        out.check_options(options)
        out.write({"options": options} | item(2))
    with OutputLines(path) as out:
        out.check_options(options)
        different = r"\(temperature 0.8, now not given, seed 3, now 4, chat not given, now True\): give the same options, name another"
        with pytest.raises(SettingsError, match="other options " + different):
            out.check_options({"model": "a", "seed": 4, "chat": True})


def test_a_prompt_that_failed_has_its_next_outcome_in_its_place(path: Path) -> None:
    first = [item(0), item(1, error="a"), item(2, error="b"), item(3)]
    with OutputLines(path) as out:
        for each in first:
            out.write(each)
    with OutputLines(path) as out:
        assert (list(out.done), list(out.failed)) == ([0, 3], [1, 2])
        out.write(item(2))
        out.write(item(1, error="c"))
        assert written(path) == [*first, item(2), item(1, error="c")]  # what a kill leaves
    assert written(path) == [item(0), item(1, error="c"), item(2), item(3)]
    assert os.listdir(path.parent) == ["out.jsonl"]


def test_what_a_kill_leaves_of_a_second_try_is_merged_by_the_next(path: Path) -> None:
    with OutputLines(path) as out:
        for each in [item(0, error="a"), item(1, error="b"), item(2)]:
            out.write(each)
    out = OutputLines(path)
    out.write(item(1))
    out.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    path.write_bytes(path.read_bytes() + b'{"index": 0, "inp')
    with OutputLines(path) as out:
        assert list(out.failed) == [0] and len(written_whole(path)) == 4
        out.write(item(0, error="a"))  # fails as it did before
    assert written(path) == [item(0, error="a"), item(1), item(2)]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_ends_in_the_middle_of_a_merge_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    lines = [item(0, error="a"), item(1), item(0)]

    def fails(*arguments: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        out = OutputLines(path)
        for each in lines:
            out.write(each)
        with pytest.raises(
            SettingsError if error is OSError else error
        ):  # the command does not end as if all were well
            out.__exit__(None, None, None)
    assert written(path) == lines
    with OutputLines(path) as out:
        assert sorted(out.done) == [0, 1]
    assert written(path) == [item(0), item(1)]
    assert os.listdir(path.parent) == ["out.jsonl"]


def test_a_file_beside_is_written_through_no_link(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    (path.parent / f".{path.name}.merging").symlink_to(other)
    with OutputLines(path) as out:
        out.write(item(0, error="a"))
        out.write(item(0))
    assert written(path) == [item(0)] and other.read_text() == "mine"


def test_links_in_a_circle_are_refused(path: Path) -> None:
    path.symlink_to(path)
    with pytest.raises(SettingsError, match="cannot be written"):
        OutputLines(path)


def test_a_file_that_another_process_has_put_in_its_place_is_the_one_that_is_locked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OutputLines(path) as out:
        out.write(item(0))

    def moved_meanwhile(file: Any) -> bool:
        monkeypatch.setattr(outputs, "locked", locked)
        new = path.with_name("new")
        new.write_bytes(path.read_bytes() + json.dumps(item(1)).encode() + b"\n")
        new.replace(path)
        return locked(file)

    monkeypatch.setattr(outputs, "locked", moved_meanwhile)
    with OutputLines(path) as out:
        assert sorted(out.done) == [0, 1]
        out.write(item(2))
    assert written(path) == [item(0), item(1), item(2)]


def written_whole(path: Path) -> list[bytes]:
    return [each for each in path.read_bytes().splitlines(True) if each.endswith(b"\n")]


def test_a_last_line_without_its_end_is_whole_if_it_is_json(path: Path) -> None:
    content = "".join(json.dumps(each) + "\n" for each in [item(0, error="a"), item(1), item(0)])
    path.write_text(content[:-1])
    with OutputLines(path) as out:
        assert sorted(out.done) == [0, 1]
    assert written(path) == [item(0), item(1)]


def test_half_of_a_surrogate_pair_is_written_escaped(path: Path) -> None:
    with OutputLines(path) as out:
        out.write(item(0) | {"id": "\ud800"})
        out.write(item(1))
    assert written(path) == [item(0) | {"id": "\ud800"}, item(1)]
    assert "α1" in path.read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
def test_a_full_disk_cuts_no_line(path: Path) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with OutputLines(path) as out:
        out.write(item(0))
        whole = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, limits[1]))
        try:
            with pytest.raises(OSError, match="large"):
                out.write(item(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == whole
        out.write(item(1))
    assert written(path) == [item(0), item(1)]


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no devices")
@pytest.mark.parametrize("name", ["/dev/null", "/dev/full", "/dev/zero"])
def test_a_device_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="not a regular file"):
        OutputLines(Path(name))


def test_a_folder_that_cannot_be_made_is_refused(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(SettingsError, match="cannot be written"):
        OutputLines(path / "below" / "out.jsonl")


def test_a_link_is_written_through(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    for outcome in ({"error": "a"}, {"text": "b"}):
        with OutputLines(link) as out:
            out.write(item(0, **outcome))
    assert link.is_symlink() and written(path) == [item(0, text="b")]


def test_a_run_that_writes_nothing_leaves_no_file(path: Path) -> None:
    with OutputLines(path):
        assert path.exists()
    assert not path.exists()
    path.touch()  # but this one is the user's
    with OutputLines(path):
        pass
    assert path.exists()


#: Without the rest of its package, which imports torch and transformers.
HOLDER = f"""
import sys; from pathlib import Path; from types import ModuleType; import decoders
package = sys.modules["decoders.scheduling"] = ModuleType("decoders.scheduling")
package.__path__ = {scheduling.__path__!r}
from decoders.scheduling.outputs import OutputLines
out = OutputLines(Path(sys.argv[1])); print("held", flush=True); sys.stdin.read()
"""


def test_two_processes_do_not_write_one_file_and_a_dead_one_holds_nothing(path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with pytest.raises(SettingsError, match="another process writes"):
                OutputLines(path)
        finally:
            holder.kill()
    with OutputLines(path) as out:
        out.write(item(0))
    assert written(path) == [item(0)]
