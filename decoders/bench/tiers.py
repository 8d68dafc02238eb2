"""The loop's two tiers: uncompiled from the first step on, compiled once that is ready."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..report import Report

#: Settings with which the first token waits for no compilation.
AT_ONCE = {"compile": "auto"}


def compiles(config: Mapping[str, Any]) -> bool:
    """Whether calls with `config` ever run compiled."""
    return config.get("compile", True) is not False


def compiled_share(report: Report | None) -> float | None:
    """Share of a call's steps that ran compiled, None of transformers'."""
    return report.compiled_steps / report.steps if report is not None and report.steps else None
