"""Contracts of pyproject.toml that forbid all but a few rooms name every other one, those that are new too."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {path.stem for path in (ROOT / "decoders").glob("*.py")} | {
    path.parent.name for path in (ROOT / "decoders").glob("*/__init__.py")
}
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
}
#: What a room may import, besides itself.
ALLOWED = {
    "strategies": {
        "strategy", "drafters", "sampling", "costs", "constraints", "tree", "settings", "errors", "heads", "text_memory",
    },
}  # fmt: skip


@pytest.mark.parametrize("room", ALLOWED)
def test_all_but_what_a_room_may_import_is_forbidden(room: str) -> None:
    contract = CONTRACTS[room]
    assert contract["source_modules"] == [f"decoders.{room}"]
    forbidden = {name.removeprefix("decoders.") for name in contract["forbidden_modules"]}
    assert forbidden == ROOMS - ALLOWED[room] - {room, "__init__"}
