"""Which values of a parameter are quick; combinations of several take turns by the marker ``in_turns``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """The values, of which all but the named ones are slow."""
    quick = list(quick)
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
