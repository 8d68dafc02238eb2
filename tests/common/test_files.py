"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from decoders.common.files import write_whole

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such modes, links and pipes")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_mode_that_the_umask_leaves_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.bin"
    before = os.umask(0o027)
    try:
        write_whole(path, b"1")
        assert mode(path) == 0o640
        path.chmod(0o604)
        write_whole(path, b"22")
    finally:
        os.umask(before)
    assert (mode(path), path.read_bytes(), os.listdir(path.parent)) == (0o604, b"22", ["a.bin"])


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_written_through(tmp_path: Path, exists: bool) -> None:
    path, link = tmp_path / "elsewhere" / "a.bin", tmp_path / "link.bin"
    path.parent.mkdir()
    if exists:
        path.write_bytes(b"old")
    link.symlink_to(path)
    write_whole(link, b"new")
    assert link.is_symlink() and path.read_bytes() == b"new"


def test_what_is_no_regular_file_is_refused_and_stays(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link, tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            write_whole(path, b"1")
    assert pipe.is_fifo() and link.is_symlink() and sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a.bin", b"1")
    assert os.listdir(tmp_path) == []
