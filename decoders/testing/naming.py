"""What strategies, verifiers and grammar backends are listed and looked up by."""

from __future__ import annotations

from typing import Any

from ..registry.kinds import SNAKE_CASE


def check_name_and_summary(cls: type[Any]) -> None:
    """Name and summary can be listed and looked up."""
    name, summary = getattr(cls, "name", None), cls.summary
    assert isinstance(name, str) and SNAKE_CASE.fullmatch(name), f"{cls.__name__}.name must be snake_case, not {name!r}"
    assert isinstance(summary, str) and summary.strip() and "\n" not in summary, (
        f"{cls.__name__}.summary must be one line that says what it does, not {summary!r}"
    )
