"""The order of a step, and what its clock is told."""

from __future__ import annotations

from typing import Any

import pytest

from decoders.engine.decode import core
from decoders.engine.decode.core import Core
from decoders.engine.decode.step import Clock, step


class Noted:
    """Notes by name what is called, and gives the name as a result."""

    def __init__(self, notes: list[str], rows: str = "rows") -> None:
        self.notes, self.rows = notes, rows

    @property
    def core(self) -> Noted:
        return self

    def __getattr__(self, name: str) -> Any:
        def noted(*arguments: Any) -> str:
            self.notes.append(f"{name}({', '.join(map(str, arguments))})")
            return name

        return noted


def test_a_step_is_that_of_the_papers() -> None:
    notes: list[str] = []
    noted = Noted(notes)
    assert step(noted, noted, recording=True) == "forward_verify_commit"
    assert notes == [
        "propose()", "block_of(propose)", "mask(propose, block_of)", "forward_verify_commit(propose, mask, rows)",
        "settle(forward_verify_commit, None)", "observe(forward_verify_commit, None)",
    ]  # fmt: skip


def test_forward_verify_and_commit_are_each_shown_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    noted = Noted(notes)
    block, draft = type("Block", (), {"tree": "tree"})(), type("Draft", (), {"in_place": True})()
    members = {"target": "target", "tiers": type("Tiers", (), {"beside": None})}
    passes = type("Pass", (), {**members, "__call__": lambda self, given: noted.results(given)})()
    monkeypatch.setattr(core, "input_of", lambda block, rows: ("nodes", "input"))
    monkeypatch.setattr(Core, "commit", lambda self, *given: noted.commit(*given))
    out = Core(passes, "plan", noted).forward_verify_commit(draft, block, "rows")  # type: ignore[arg-type]
    assert out == "commit"
    assert (
        notes[0] == "results(input)" and notes[1].startswith("verify(") and notes[1].endswith("nodes, results, rows)")
    )
    assert notes[2] == "commit(nodes, tree, rows, results, verify, True)"


def test_stopping_criteria_cut_what_was_committed_before_anything_learns_of_it() -> None:
    notes: list[str] = []
    clock: list[str] = []
    step(Noted(notes), Noted(notes), Noted(clock))
    order = [note.partition("(")[0] for note in notes]
    assert order == [
        "propose",
        "block_of",
        "mask",
        "forward_verify_commit",
        "read",
        "stop",
        "settle",
        "observe",
        "deliver",
    ]
    assert all(f"{name}(forward_verify_commit, read)" in notes for name in ("settle", "observe", "deliver"))
    phases = ["begun", "proposed", "masked", "read", "stopped", "settled", "observed", "delivered"]
    assert [note.partition("(")[0] for note in clock] == phases


def test_a_step_without_a_clock_is_the_same_step() -> None:
    timed: list[str] = []
    plain: list[str] = []
    step(Noted(timed), Noted(timed), Clock())
    step(Noted(plain), Noted(plain))
    assert timed == plain
