"""Options of ``decoders bench`` as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import SettingsError


def pieces(texts: Sequence[str] | None) -> list[str] | None:
    """Comma-separated and repeated options as one list; None if the option was not given."""
    from ..bench.variants import split

    return None if texts is None else [piece for text in texts for piece in split(text)]


def by_strategy(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Settings of the loop, and the others by strategy.

    Raises:
        SettingsError: one is neither the loop's nor keyed by strategy, or the loop does not take its value.
    """
    from ..settings import RuntimeSettings

    loop_settings = {name: value for name, value in settings.items() if name in RuntimeSettings.model_fields}
    RuntimeSettings.parse(loop_settings)
    for name, value in settings.items():
        if name not in loop_settings and not isinstance(value, dict):
            raise SettingsError(f"--set {name}=…: name the strategy too, as in --set prompt_lookup.{name}=…")
    return loop_settings, {name: value for name, value in settings.items() if name not in loop_settings}


def in_both_tiers(names: Sequence[str] | None) -> list[str]:
    """Every strategy, and every one uncompiled."""
    from ..bench.variants import COMPILE
    from ..plugins import registry

    uncompiled = f"{COMPILE}=false"
    variants = []
    for name in registry().strategies() if names is None else names:
        first, plus, rest = name.partition("+")
        variant = f"{first[:-1]},{uncompiled}]" if first.endswith("]") else f"{first}[{uncompiled}]"
        variants += [name, variant + plus + rest]
    return variants


def numbers(text: str, expected: str = "--batch takes batch sizes such as 1,4") -> list[int]:
    """``"1,4"`` as numbers; `said` begins the message if they are none.

    Raises:
        SettingsError: anything but positive whole numbers.
    """
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise SettingsError(f"{expected}, not {text!r}")
    return list(dict.fromkeys(values))
