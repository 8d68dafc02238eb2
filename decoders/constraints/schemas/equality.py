"""When two values are equal in JSON."""

from __future__ import annotations

import json
from typing import Any

from .numbers import fraction


def canonical(value: Any) -> str:
    """One text for all values that are equal: 1, 1.0 and 1e0 are, objects in any order are, 1 and true are not.

    Raises:
        GrammarError: an infinite number is in it.
    """
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(fraction(value))
    return json.dumps(value)
