"""Cost curves on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decoders.costs import curve as curve_files

from .test_curve import SUBJECT, curve, point


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = curve(point(3, 1.0), point(9, 2.0))
    path = curve_files.write(tmp_path / "new", written)
    assert path is not None and path.name == f"{SUBJECT.key}{curve_files.SUFFIX}"
    assert curve_files.read(tmp_path / "new", SUBJECT) == written
    assert [p.name for p in (tmp_path / "new").iterdir()] == [path.name]  # nothing half-written is left


def test_points_of_two_processes_come_together(tmp_path: Path) -> None:
    curve_files.write(tmp_path, curve(point(3, 1.0), point(9, 2.0)))
    curve_files.write(tmp_path, curve(point(9, 2.5), point(17, 4.0)))
    kept = curve_files.read(tmp_path, SUBJECT)
    assert kept is not None and [p.seconds for p in kept.points] == [1.0, 2.5, 4.0]


def test_another_subject_has_another_file(tmp_path: Path) -> None:
    curve_files.write(tmp_path, curve(point(3, 1.0)))
    assert curve_files.read(tmp_path, SUBJECT.model_copy(update={"threads": 1})) is None


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 1}', "\udcff"])
def test_a_damaged_file_warns_and_is_measured_anew(tmp_path: Path, content: str) -> None:
    curve_files.path_of(tmp_path, SUBJECT).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.warns(UserWarning, match="are measured again"):
        assert curve_files.read(tmp_path, SUBJECT) is None


def test_a_file_of_another_version_is_passed_over(tmp_path: Path) -> None:
    curve_files.path_of(tmp_path, SUBJECT).write_text(json.dumps({"version": 0}))
    assert curve_files.read(tmp_path, SUBJECT) is None


def test_a_file_of_another_machine_under_this_name_is_refused(tmp_path: Path) -> None:
    other = curve(point(3, 1.0)).model_copy(update={"subject": SUBJECT.model_copy(update={"device": "another"})})
    curve_files.path_of(tmp_path, SUBJECT).write_text(other.model_dump_json())
    with pytest.warns(UserWarning, match="another model or machine"):
        assert curve_files.read(tmp_path, SUBJECT) is None


def test_a_folder_that_cannot_be_written_warns(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be saved"):
        assert curve_files.write(tmp_path / "file" / "costs", curve(point(3, 1.0))) is None


def test_the_default_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert curve_files.default_folder() == Path("/somewhere/hf-decoders/costs")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert curve_files.default_folder() == Path.home() / ".cache" / "hf-decoders" / "costs"
