"""The two ways in which the loop runs: uncompiled from the first step on, compiled once that is ready."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..report import Report
from ..settings import RuntimeSettings


def runtime(**settings: Any) -> dict[str, Any]:
    """`settings` for ``decoders_config``, without those that the loop does not have."""
    return {name: value for name, value in settings.items() if name in RuntimeSettings.model_fields}


def at_once() -> dict[str, Any]:
    """Settings with which the first token waits for no compilation."""
    try:  # plain {"compile": "auto"} once the setting takes it
        RuntimeSettings(compile="auto")  # type: ignore[arg-type]
    except ValueError:
        return {"compile": False}
    return {"compile": "auto"}


def compiles(config: Mapping[str, Any]) -> bool:
    """Whether calls with `config` ever run compiled."""
    return config.get("compile", True) is not False


def compiled_share(report: Report | None) -> float | None:
    """Share of a call's steps that ran compiled; None of transformers', and of a call without steps."""
    if report is None or not report.steps:
        return None
    compiled = getattr(report, "compiled_steps", None)  # plain once Report.compiled_steps exists
    return float(report.compiled) if compiled is None else compiled / report.steps
