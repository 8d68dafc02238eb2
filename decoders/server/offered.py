"""The strategies that requests can name on a server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import UnknownNameError, shortened, suggest
from ..registry import registry
from ..strategy import Strategy
from .client_settings import ClientSettings
from .pool import SchedulerPool
from .refusals import Refusal


class Offered:
    """The strategies that requests can name on a server: those that run with its model and draft model.

    Args:
        model: the served model.
        pool: the server's schedulers.
        settings: the settings that requests may set.
    """

    def __init__(self, model: PreTrainedModel, pool: SchedulerPool, settings: ClientSettings) -> None:
        self._model: Any = model
        self._pool, self._settings = pool, settings

    @cached_property
    def names(self) -> list[str]:
        """Names of the strategies that run here. On first use, every strategy that needs draft heads or certain layers is tried: it
        generates a token.
        """
        known = registry().strategies()
        able = {name for name, entry in known.items() if self._can_run(name, entry.cls)}
        return sorted(able | {self._pool.default} & known.keys())

    def _can_run(self, name: str, cls: type[Strategy]) -> bool:
        if cls.needs_assistant:
            return self._pool.assistant is not None
        if not cls.needs:
            return True
        token = torch.zeros(1, 1, dtype=torch.int64, device=self._model.device)
        options = dict(max_new_tokens=1, pad_token_id=0, decoders_config={"compile": False})
        try:
            self._model.generate(token, attention_mask=torch.ones_like(token), strategy=name, **options)
        except Exception:  # any error here would occur in requests as well
            return False
        return True

    def check(self, asked: str | None, config: Mapping[str, Any], constrained: bool) -> None:
        """Checks the strategy of a request.

        Args:
            asked: the strategy's name, or several names joined by ``+``; None: the server's default strategy.
            config: the strategy's settings.
            constrained: whether the request has a grammar.

        Raises:
            Refusal: there is no strategy of that name, the server lacks something that the strategy needs, or clients may not set a
                setting.
        """
        names = asked or self._pool.default
        classes = [self._known(name.strip()) for name in names.split("+")]
        self._settings.check(names, config)
        for cls in classes:
            if cls.needs_grammar and not constrained:
                message = f"strategy {cls.name!r} needs a grammar: give response_format or tools"
                raise Refusal(400, message, param="strategy", code="invalid_value")
            if asked is not None and (cls.needs_assistant or cls.needs) and cls.name not in self.names:
                lacks = "a draft model (--assistant)" if cls.needs_assistant else f"the {cls.needs} for it"
                message = f"strategy {cls.name!r} does not run here: the server was started without {lacks}. {suggest('', self.names)}"
                raise Refusal(400, message, param="strategy", code="strategy_unavailable")

    def _known(self, name: str) -> type[Strategy]:
        try:
            return registry().strategy(name)
        except UnknownNameError as error:
            message = f"there is no strategy {shortened(repr(name))} here. {suggest(name, self.names)}"
            raise Refusal(400, message, param="strategy", code="unknown_strategy") from error
