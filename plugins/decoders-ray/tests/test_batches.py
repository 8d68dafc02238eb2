"""The files that a run over many prompts writes; the run itself is tested in test_cluster.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decoders_ray.batches import complete, write_part, written


def test_a_part_is_written_whole_and_once(tmp_path: Path) -> None:
    for _ in range(2):  # the task is repeated
        write_part(tmp_path, ["a", "b"], [{"id": "a", "text": "x"}, {"id": "b", "error": "no"}])
    write_part(tmp_path, ["c"], [{"id": "c", "text": "z"}])
    (tmp_path / ".part-half.12").write_text('{"id": "d", "te')
    assert sorted(written(tmp_path)) == ["a", "b", "c"]
    assert len(list(tmp_path.glob("part-*"))) == 2


def test_a_run_that_is_done_starts_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "part-1.jsonl").write_text(json.dumps({"id": 7, "text": "seven"}) + "\n")
    figures = complete([{"id": 7, "prompt": "7"}], tmp_path, model="nowhere")
    assert figures == {"prompts": 1, "earlier": 1, "written": 0, "failed": 0}
    with pytest.raises(ValueError, match="1 ids are used twice"):
        complete([{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}], tmp_path, model="nowhere")
