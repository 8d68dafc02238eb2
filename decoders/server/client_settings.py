"""Checks the strategy settings in requests. The server's operator decides which settings clients may set."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic.fields import FieldInfo

from ..errors import SettingsError, shortened, suggest
from ..registry import registry
from ..settings import Settings
from ..strategies.merged import Merged
from ..strategy import Strategy
from .refusals import Refusal, wrong

#: Settings that name files or models, or hold settings of other strategies that may do so. Clients can never set them.
OPERATORS = ("draft_model", "heads", "head", "table", "config", "stage_config")


class ClientSettings:
    """The strategies' settings that clients may set, according to the option ``--client-settings``.

    Args:
        given: ``"bounded"``: every setting that is a switch, a choice from a list, or a number with a minimum and a maximum;
            ``"none"``: no setting; ``"suffix.remember"``: strategy ``suffix``'s setting ``remember``.

    Raises:
        SettingsError: a text in `given` has another form, or names a setting that does not exist or that only the operator may set.
    """

    def __init__(self, given: Sequence[str] = ("bounded",)) -> None:
        self.bounded = "bounded" in given
        self.named = {_read(text) for text in given if text not in ("bounded", "none")}
        if "none" in given and len(given) > 1:
            raise SettingsError("--client-settings none stands alone: with it, clients may set nothing")

    def check(self, strategy: str, config: Mapping[str, Any]) -> None:
        """Raises Refusal for a setting in `config` that does not exist, or that only the operator may set.

        Args:
            strategy: a name, or several joined by ``+``. Settings in `config` for other strategies are refused later, when `strategy`
                is created.
        """
        for cls, values, place in _parts(strategy, config):
            able = [name for name in cls.settings_class.model_fields if self._allows(cls, name)]
            for name in values:
                if name not in cls.settings_class.model_fields:
                    shown = shortened(repr(name))
                    message = (
                        f"{place}: {cls.name!r} has no setting {shown} that clients may set. {suggest(name, able)}"
                    )
                    raise Refusal(400, message, param=f"{place}.{name[:60]}", code="invalid_value")
                if name not in able:
                    listed = f"may set {', '.join(able)}" if able else "may set nothing"
                    message = f"only the server's operator may set this; for {cls.name!r} clients {listed} (--client-settings)"
                    raise wrong(f"{place}.{name}", message, "operators_setting")

    def _allows(self, cls: type[Strategy], name: str) -> bool:
        field = cls.settings_class.model_fields[name]
        return (cls.name, name) in self.named or (self.bounded and _has_bounds(field.annotation, field.metadata))


def _parts(strategy: str, config: Mapping[str, Any]) -> Iterator[tuple[type[Strategy], Mapping[str, Any], str]]:
    """Yields, for each strategy that has settings in `config`: its class, its settings, and the place of the settings in the body."""
    names = [name.strip() for name in strategy.split("+")]
    if len(names) == 1:
        yield registry().strategy(names[0]), config, "strategy_config"
        return
    classes: list[type[Strategy]] = [*map(registry().strategy, names), Merged]
    for cls in classes:
        own = config.get(cls.name)
        if isinstance(own, Mapping):
            yield cls, own, f"strategy_config.{cls.name}"


def _read(text: str) -> tuple[str, str]:
    """Parses ``"suffix.remember"``. Returns the strategy and the setting."""
    strategy, dot, name = text.strip().partition(".")
    if not dot:
        raise SettingsError(f"--client-settings takes bounded, none or STRATEGY.SETTING, not {text!r}")
    cls = Merged if strategy == Merged.name else registry().strategy(strategy)
    settings: type[Settings] = cls.settings_class
    if name not in settings.model_fields:
        raise SettingsError(
            f"--client-settings {text}: {strategy!r} has no setting {name!r}. {suggest(name, settings.model_fields)}"
        )
    if name in OPERATORS:
        raise SettingsError(
            f"--client-settings {text}: {name} names a file or a model, or holds settings that may do so"
        )
    return cls.name, name


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
