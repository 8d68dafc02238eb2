"""The conditions under which checks decode: models, numbers of rows, the arguments that a strategy requires, and contexts for tests."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..enabling import disable, enable
from ..engine.model.modules_compat import writes_counted
from ..strategy import Context, Strategy
from .exactness import assert_same_tokens, decode, reference
from .models import VOCAB, tiny_draft, tiny_model
from .toy_grammar import TokenAutomaton

#: Number of new tokens in a call: NEW_TOKENS, or MANY_TOKENS in a thorough run.
NEW_TOKENS, MANY_TOKENS = 16, 32


@dataclass(frozen=True)
class Conditions:
    """The models and options with which checks decode.

    Attributes:
        models: names of tiny models, or models of your own.
        compile: whether the loop is compiled.
        thorough: whether to try every combination of model, number of rows and options of ``generate``, on longer texts. Otherwise
            fewer combinations are tried, among which every pair of values occurs.
    """

    models: tuple[str | PreTrainedModel, ...] = ("llama", "gemma2")
    compile: bool = False
    thorough: bool = False

    @property
    def new_tokens(self) -> int:
        """Number of new tokens in a call."""
        return MANY_TOKENS if self.thorough else NEW_TOKENS

    def combinations(self, options: Sequence[Any]) -> Iterator[tuple[str | PreTrainedModel, int, Any]]:
        """Yields combinations of model, number of rows and options.

        Yields all combinations if thorough or with a single model. Otherwise yields half of the combinations, among which every pair of
        values occurs.

        Args:
            options: two alternative sets of options, such as greedy and sampling.
        """
        for (m, model), (r, rows), (k, option) in itertools.product(
            enumerate(self.models), enumerate((1, 4)), enumerate(options)
        ):
            if self.thorough or len(self.models) == 1 or (m + r + k) % 2 == 0:
                yield model, rows, option

    @contextmanager
    def enabled(self, model: str | PreTrainedModel) -> Iterator[PreTrainedModel]:
        """Enables `model` inside the block. Afterwards a model that was not enabled is disabled again.

        Raises:
            AssertionError: the block changed the model.
        """
        given = _tiny(model) if isinstance(model, str) else model
        was_enabled = "generate" in vars(given)
        before = _read_only(given)
        try:
            yield enable(given)
            changed = [what for what, value in _read_only(given).items() if value != before[what]]
            if changed:
                _tiny.cache_clear()  # the changed model must not reach other checks
                raise AssertionError(f"changed {' and '.join(changed)} of the model, which strategies may only read")
        finally:
            if not was_enabled:
                disable(given)


def _read_only(model: PreTrainedModel) -> dict[str, Any]:
    """The parts of the model's state that a strategy must not change, by the names that error messages use."""
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
    """The arguments of ``generate`` that a strategy requires: a draft model, or a grammar that allows all texts.

    name: the name of the tiny model that `model` is, or `model` itself.
    """
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
    """Decodes with `strategy` and the arguments that it requires (:func:`needs`), and returns the output."""
    options = needs(model, name, strategy, options.get("eos_token_id", [])) | options
    # Memory and pruning are off, unless a check sets them.
    loop = {"memory": False, "prune": False} | options.pop("decoders_config", {"compile": conditions.compile})
    options = dict(max_new_tokens=conditions.new_tokens, decoders_config=loop) | options
    return decode(model, inputs, strategy, **options)


def run_alike(
    model: PreTrainedModel, name: str | PreTrainedModel, strategy: Strategy, inputs: dict[str, Tensor],
    conditions: Conditions, what: str, baseline: str | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Calls :func:`run` and returns its output. If the strategy is exact, asserts that the tokens equal the tokens of `baseline`.

    Args:
        what: description of the call, for messages.
        baseline: name of the strategy whose tokens are expected; None: the tokens of transformers' own loop.
    """
    options = dict(max_new_tokens=conditions.new_tokens) | options
    out = run(model, name, strategy, inputs, conditions, **options)
    if strategy.exact:
        options.pop("decoders_config", None)
        loop: dict[str, Any] = {} if baseline is None else {"decoders_config": {"compile": conditions.compile}}
        expected = reference(model, inputs, baseline, **options, **loop)
        assert_same_tokens(model, inputs, expected.sequences, out.sequences, what)
    return out


def context(
    rows: int = 1, *, model: PreTrainedModel | None = None, slots: int = 256, vocab_size: int | None = None,
    device: torch.device | str | None = None, **more: Any,
) -> Context:  # fmt: skip
    """A :class:`~decoders.Context` for ``Strategy.start`` outside of a call, to test a strategy's proposals.

    Draft models, strategies by name, and the target's embedding and output head exist only in a call. Outside a call, their use
    raises UnsupportedError. ``context.compile`` compiles nothing. :func:`~decoders.testing.check_strategy` checks whole calls.

    Args:
        rows: number of rows ``B``.
        model: ``context.model``; None for strategies that do not use it.
        slots: capacity of each row in tokens, prompt included.
        vocab_size: ``V``; default: the model's, or 1000 without a model.
        device: device of the strategy's tensors; default: the model's, or the CPU.
        more: other attributes of the context, such as ``clock=``, ``costs=``, ``memory=`` or ``assistant_model=``.

    Raises:
        TypeError: a context has no such attribute.
    """
    if vocab_size is None:
        vocab_size = 1000 if model is None else model.config.get_text_config().vocab_size
    if device is None:
        device = "cpu" if model is None else model.device
    fields: dict[str, Any] = dict(tokenizer=None, assistant_model=None, compile=lambda function: function)
    return Context(
        model=cast(PreTrainedModel, model),
        rows=rows, slots=slots, device=torch.device(device), vocab_size=vocab_size, **fields | more,
    )  # fmt: skip
