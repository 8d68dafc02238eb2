"""The order of a step, and what its clock is told."""

from __future__ import annotations

from typing import Any

from decoders.engine.decode.step import Clock, Parts, forward_verify_commit, step


class Noted:
    """Notes by name what is called, and gives the name as a result."""

    def __init__(self, notes: list[str], rows: str = "rows") -> None:
        self.notes, self.rows = notes, rows

    def __getattr__(self, name: str) -> Any:
        def noted(*arguments: Any) -> str:
            self.notes.append(f"{name}({', '.join(map(str, arguments))})")
            return name

        return noted


def test_a_step_is_that_of_the_papers() -> None:
    notes: list[str] = []
    noted = Noted(notes)
    assert step(noted, noted, recording=True) == "decide"
    assert notes == [
        "propose()", "block_of(propose)", "mask(propose, block_of)", "decide(propose, mask, rows)", "settle(decide, None)",
        "observe(decide, None)",
    ]  # fmt: skip


def test_forward_verify_and_commit_are_each_shown_what_they_need() -> None:
    notes: list[str] = []
    noted = Noted(notes)
    block = type("Block", (), {"tree": "tree"})()

    def forward(block: Any, rows: Any) -> tuple[str, str]:
        notes.append("forward")
        return "nodes", "results"

    draft = type("Draft", (), {"in_place": True})()
    out = forward_verify_commit(Parts(forward, noted.verify, noted.commit), draft, block, "rows")  # type: ignore[arg-type]
    assert out == "commit"
    assert notes[0] == "forward" and notes[1].endswith("nodes, results, rows)")
    assert notes[2] == "commit(nodes, tree, rows, results, verify, True)"


def test_stopping_criteria_cut_what_was_committed_before_anything_learns_of_it() -> None:
    notes: list[str] = []
    clock: list[str] = []
    step(Noted(notes), Noted(notes), Noted(clock))
    order = [note.partition("(")[0] for note in notes]
    assert order == ["propose", "block_of", "mask", "decide", "read", "stop", "settle", "observe", "deliver"]
    assert "settle(decide, read)" in notes and "observe(decide, read)" in notes and "deliver(decide, read)" in notes
    phases = ["begun", "proposed", "masked", "read", "stopped", "settled", "observed", "delivered"]
    assert [note.partition("(")[0] for note in clock] == phases


def test_a_step_without_a_clock_is_the_same_step() -> None:
    timed: list[str] = []
    plain: list[str] = []
    step(Noted(timed), Noted(timed), Clock())
    step(Noted(plain), Noted(plain))
    assert timed == plain
