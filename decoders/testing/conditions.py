"""What the checks of the conformance kit decode with: models, numbers of rows, and one call with what a strategy needs."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..engine.model.torch_compat import writes_counted
from ..generate import disable, enable
from ..strategy import Strategy
from .exactness import decode
from .models import VOCAB, tiny_draft, tiny_model
from .toy_grammar import TokenAutomaton

#: Tokens of each call, and of each call of a thorough run.
NEW_TOKENS, MANY_TOKENS = 16, 32


@dataclass(frozen=True)
class Conditions:
    """What the checks decode with.

    Attributes:
        models: tiny models by name, or models of your own.
        compile: run the loop compiled.
        thorough: try every combination of model, number of rows and kind of drawing, on longer texts; otherwise every pair
            of them.
    """

    models: tuple[str | PreTrainedModel, ...] = ("llama", "gemma2")
    compile: bool = False
    thorough: bool = False

    @property
    def new_tokens(self) -> int:
        """How many tokens a call decodes."""
        return MANY_TOKENS if self.thorough else NEW_TOKENS

    def combinations(self, kinds: Sequence[Any]) -> Iterator[tuple[str | PreTrainedModel, int, Any]]:
        """Models, numbers of rows and two `kinds` of call: all of them if thorough or with a single model, else half of
        them, in which every model meets both numbers of rows and both kinds, and every number of rows both kinds.
        """
        for (m, model), (r, rows), (k, kind) in itertools.product(
            enumerate(self.models), enumerate((1, 4)), enumerate(kinds)
        ):
            if self.thorough or len(self.models) == 1 or (m + r + k) % 2 == 0:
                yield model, rows, kind

    @contextmanager
    def enabled(self, model: str | PreTrainedModel) -> Iterator[PreTrainedModel]:
        """`model` with ``generate(strategy=…)``; a model of the caller's is left as it was found.

        Raises:
            AssertionError: what ran meanwhile has changed the model.
        """
        given = _tiny(model) if isinstance(model, str) else model
        was_enabled = "generate" in vars(given)
        before = _condition(given)
        try:
            yield enable(given)
            changed = [what for what, value in _condition(given).items() if value != before[what]]
            if changed:
                _tiny.cache_clear()  # no other check is to meet it
                raise AssertionError(f"changed {' and '.join(changed)} of the model, which is shown to be read")
        finally:
            if not was_enabled:
                disable(given)


def _condition(model: PreTrainedModel) -> dict[str, Any]:
    """What a strategy must leave as it is, by its name for messages."""
    config = model.generation_config
    return {
        "the mode (train or eval)": [module.training for module in model.modules()],
        "the config": model.config.to_dict(),
        "the generation config": config.to_dict() if config is not None else None,
        "the weights": [(id(weight), writes_counted(weight)) for weight in model.parameters()],
    }


@functools.cache
def _tiny(name: str) -> PreTrainedModel:
    return enable(tiny_model(name))


@functools.cache
def _anything(*stops: int) -> TokenAutomaton:
    return TokenAutomaton.anything(VOCAB, stops)


@functools.cache
def _draft(name: str) -> PreTrainedModel:
    return tiny_draft(name)


def needs(
    model: PreTrainedModel, name: str | PreTrainedModel, strategy: Strategy, stops: int | Sequence[int] = ()
) -> dict[str, Any]:
    """What a strategy cannot do without: a draft model, a grammar of all texts."""
    options: dict[str, Any] = {}
    if strategy.needs_assistant:
        options["assistant_model"] = _draft(name) if isinstance(name, str) else disable(copy.deepcopy(model))
    if strategy.needs_grammar:
        options["grammar"] = _anything(*([stops] if isinstance(stops, int) else stops))
    return options


def run(
    model: PreTrainedModel, name: str | PreTrainedModel, strategy: Strategy, inputs: dict[str, Tensor],
    conditions: Conditions, **options: Any,
) -> Any:  # fmt: skip
    """One call with `strategy`; a strategy that needs a draft model gets one, and one that needs a grammar one of all texts."""
    options = needs(model, name, strategy, options.get("eos_token_id", [])) | options
    # Strategies start cold unless a check is about what they keep, and all that they draft is verified.
    loop = {"memory": False, "prune": False} | options.pop("decoders_config", {"compile": conditions.compile})
    options = dict(max_new_tokens=conditions.new_tokens, decoders_config=loop) | options
    return decode(model, inputs, strategy, **options)
