"""Checks the strategy settings in requests. The server's operator decides which settings clients may set, and to which values."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic.fields import FieldInfo

from ..errors import SettingsError, shortened, suggest
from ..registry import registry
from ..settings import Settings
from ..strategies.merged import Merged
from ..strategy import Strategy
from .refusals import Refusal, wrong

#: Settings that name files or models, or contain other strategies' settings, which may name files. Clients can never set them.
OPERATORS = ("draft_model", "heads", "head", "table", "config", "stage_config")


class ClientSettings:
    """The strategies' settings that clients may set, according to the option ``--client-settings``.

    Args:
        given: ``"bounded"`` allows every setting that is a switch, a choice from a list, or a number with a minimum and a maximum.
            ``"none"`` allows no setting. ``"suffix.remember"`` allows the setting ``remember`` of the strategy ``suffix``, and
            ``"suffix.remember=0..100000"`` only its values from 0 to 100000.

    Raises:
        SettingsError: a text in `given` has another form, or names a setting that does not exist or that only the operator may set.
    """

    def __init__(self, given: Sequence[str] = ("bounded",)) -> None:
        self.bounded = "bounded" in given
        self.named: dict[tuple[str, str], tuple[float, float] | None] = {}
        for text in given:
            if text not in ("bounded", "none"):
                name, limits = _read(text)
                self.named[name] = limits
        if "none" in given and len(given) > 1:
            raise SettingsError("--client-settings none lets clients set nothing: give no other values with it")

    def check(self, strategy: str, config: Mapping[str, Any]) -> None:
        """Raises Refusal for a setting in `config` that does not exist, that only the operator may set, or that has a value outside of
        the operator's limits.

        Args:
            strategy: a name, or several joined by ``+``. Settings in `config` for other strategies are refused later, when `strategy`
                is created.
        """
        for cls, values, place in _parts(strategy, config):
            for name, value in values.items():
                if name not in cls.settings_class.model_fields:
                    shown = shortened(repr(name))
                    message = f"{place}: {cls.name!r} has no setting {shown} that clients may set. {suggest(name, self._open(cls))}"
                    raise Refusal(400, message, param=f"{place}.{name[:60]}", code="invalid_value")
                self._check(cls, name, value, f"{place}.{name}")

    def _open(self, cls: type[Strategy]) -> list[str]:
        return [name for name in cls.settings_class.model_fields if self._allows(cls, name)]

    def _check(self, cls: type[Strategy], name: str, value: Any, place: str) -> None:
        if not self._allows(cls, name):
            able = self._open(cls)
            listed = f"may set {', '.join(able)}" if able else "may set nothing"
            message = f"only the server's operator may set this; for {cls.name!r} clients {listed} (--client-settings)"
            raise wrong(place, message, "operators_setting")
        limits = self.named.get((cls.name, name))
        if limits is not None and not (isinstance(value, int | float) and limits[0] <= value <= limits[1]):
            message = f"{place} must be a number from {limits[0]:g} to {limits[1]:g} (--client-settings)"
            raise Refusal(400, message, param=place, code="operators_setting")

    def _allows(self, cls: type[Strategy], name: str) -> bool:
        field = cls.settings_class.model_fields[name]
        return (cls.name, name) in self.named or (self.bounded and _has_bounds(field.annotation, field.metadata))


def _parts(strategy: str, config: Mapping[str, Any]) -> Iterator[tuple[type[Strategy], Mapping[str, Any], str]]:
    """Yields, for each strategy that has settings in `config`: its class, its settings, and the field of the body with the settings."""
    names = [name.strip() for name in strategy.split("+")]
    if len(names) == 1:
        yield registry().strategy(names[0]), config, "strategy_config"
        return
    classes: list[type[Strategy]] = [*map(registry().strategy, names), Merged]
    for cls in classes:
        own = config.get(cls.name)
        if isinstance(own, Mapping):
            yield cls, own, f"strategy_config.{cls.name}"


def _read(text: str) -> tuple[tuple[str, str], tuple[float, float] | None]:
    """Parses ``"suffix.remember=0..100000"``. Returns (strategy, setting), and (minimum, maximum) or None if there are no bounds."""
    place, equals, limits = text.partition("=")
    strategy, dot, name = place.strip().partition(".")
    if not dot:
        message = f"--client-settings takes bounded, none, STRATEGY.SETTING or STRATEGY.SETTING=MIN..MAX, not {text!r}"
        raise SettingsError(message)
    cls = Merged if strategy == Merged.name else registry().strategy(strategy)
    settings: type[Settings] = cls.settings_class
    if name not in settings.model_fields:
        raise SettingsError(
            f"--client-settings {text}: {strategy!r} has no setting {name!r}. {suggest(name, settings.model_fields)}"
        )
    if name in OPERATORS:
        raise SettingsError(f"--client-settings {text}: {name} may name files or models, so clients can never set it")
    if not equals:
        return (cls.name, name), None
    least, _, most = limits.partition("..")
    with suppress(ValueError):
        if float(least) <= float(most):
            return (cls.name, name), (float(least), float(most))
    raise SettingsError(f"--client-settings {text}: the limits must be two numbers, MIN..MAX, not {limits!r}")


def _has_bounds(kind: Any, metadata: Sequence[Any]) -> bool:
    """Whether a setting is a switch, a choice from a list, or a number with a minimum and a maximum."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        more = [
            each for extra in arguments[1:] for each in (extra.metadata if isinstance(extra, FieldInfo) else [extra])
        ]
        return _has_bounds(arguments[0], [*metadata, *more])
    if origin in (typing.Union, types.UnionType):
        return all(_has_bounds(each, metadata) for each in arguments)
    if kind in (int, float):
        least = any(getattr(each, name, None) is not None for each in metadata for name in ("ge", "gt"))
        most = any(getattr(each, name, None) is not None for each in metadata for name in ("le", "lt"))
        return least and most
    return kind in (bool, types.NoneType) or origin is Literal
