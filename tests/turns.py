"""Which values of a parameter are quick; combinations of several take turns by the marker ``in_turns``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """The values, of which all but the named ones are slow; a tuple is a value of each of several parameters."""
    quick = list(quick)
    cases = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [pytest.param(*case, marks=() if value in quick else pytest.mark.slow) for value, case in cases]
