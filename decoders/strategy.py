"""The contract of a decoding strategy: propose tokens, and observe the verified step. The decoding loop does everything else.

A strategy never runs the target, never samples the target's output, and never touches the cache. It affects *when* a token is
written, not *which* token is written, because the loop verifies the draft against the target's own choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import Tensor

from .context import Context, no_costs, no_memory
from .draft import Draft, check_draft
from .sequences import HostRows, HostStep, PromptChunk, Sequences, Step
from .settings import Configured

__all__ = [
    "Context", "Draft", "HINTS", "HostRows", "HostStep", "PromptChunk", "Sequences", "Step", "Strategy", "TRAITS", "check_draft",
    "finish_all", "finishing", "merged_traits", "no_costs", "no_memory",
]  # fmt: skip


#: transformers' arguments about drafting, which a strategy maps to its settings (``Strategy.hints``).
HINTS = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
)

T = TypeVar("T")


@dataclass
class Trait(Generic[T]):
    """A property that a strategy declares about itself, as an attribute of its class or instance.

    Attributes:
        default: the value for a strategy that declares none.
        merged: computes the value for a strategy that merges the drafts of several parts, from the parts' values.
        of: takes a part, and returns the part's value for `merged`; None: `merged` gets the value that the part declares.
        hooks: names of methods. In a class that overrides any of them, the trait is True unless the class declares a value.
    """

    default: T
    merged: Callable[[Iterable[Any]], T]
    of: Callable[[Strategy], Any] | None = None
    hooks: tuple[str, ...] = ()

    def __set_name__(self, owner: type, name: str) -> None:
        TRAITS[name] = self
        setattr(owner, name, self.default)


#: All traits by name.
TRAITS: dict[str, Trait] = {}


def trait(default: T, merged: Callable[[Iterable[Any]], T], **options: Any) -> T:
    """Returns a :class:`Trait`, typed as `default`, because ``__set_name__`` replaces the trait by `default` in the class."""
    return cast(T, Trait(default, merged, **options))


def merged_traits(parts: Sequence[Strategy]) -> dict[str, Any]:
    """The values of all traits, by name, for a strategy that merges the drafts of `parts`."""
    return {
        name: own.merged([own.of(part) if own.of is not None else getattr(part, name) for part in parts])
        for name, own in TRAITS.items()
    }


def _nothing(values: Iterable[Any]) -> tuple:
    return ()


class Strategy(Configured, ABC):
    """Base class of all strategies. Instances hold only settings. :meth:`start` returns a state object, which holds everything that
    changes during a call.

    ``MyStrategy(width=3)`` and ``MyStrategy(MySettings(width=3))`` are the same.

    Class attributes (an instance may override `exact` and the attributes after it, depending on its settings):
        name: registry name, ``snake_case``.
        summary: one line for ``decoders strategies``.
        needs: what a call needs besides the target, a draft model and a grammar, in a word or two, such as ``"heads"``.
        settings_class: pydantic model of the settings.
        hints: maps drafting arguments of transformers to settings, ``{"num_assistant_tokens": "length"}``. Other drafting arguments
            raise an error.
        auto_place: the strategy's place among the candidates of ``auto``. ``auto`` asks candidates in ascending order, so cheap
            strategies should have low numbers. Built-in strategies have numbers from 10 (almost no work) to 50 (a second model). None:
            the strategy is a candidate only if the user names it. A candidate must be `exact`, and must declare `rests` if it overrides
            `observe`.
        auto_settings: default settings of a candidate of ``auto``. They may ask for long drafts: ``auto`` verifies only a part.
        exact: whether output is token-identical to plain decoding. Every report marks a lossy strategy.
        needs_assistant, takes_assistant: whether a call must or may have ``assistant_model=``.
        rests: whether the loop may skip or cut its drafts. If so, `observe` is also called for steps without a call of `propose`, and
            for steps that verified other nodes or only the first nodes of the draft. The drafts of strategies without `observe` can
            always be skipped. On CPUs the loop skips drafts that are not worth their time.
        misses_steps: whether the loop may also skip `observe` after steps without the strategy's draft. Useful if `observe` is slow.
        timed: whether its drafts depend on the clock, so that equal calls may draft differently. The output tokens are the same.
        rows_apart: whether a row's drafts depend on this row alone. If False, rows learn from each other, or share a budget or random
            numbers. If True, the conformance kit compares a row's drafts in a batch and alone. The output is always the same.
        needs_grammar: whether a call must have ``grammar=``. All strategies accept ``grammar=``.
        on_device: whether `propose` and `observe` never wait for the device, copy no data from the host, keep all shapes, and change
            only the contents of tensors. Whole steps can then be recorded (CUDA graphs) and replayed. The conformance kit checks
            this.
        hidden_layers: decoder layers of the target whose outputs are in ``Step.layers`` and ``PromptChunk.layers``; 0 is the first, -1
            the last. The loop reads this attribute when a call begins, and compiles a forward pass for each selection of layers.
        grade_rates: for each grade (:attr:`Draft.grades`) from 0 on, the usual acceptance rate of a draft token, given that its parent
            was accepted. The rate is used until enough tokens of the grade have been compared with the output. Empty without grades or
            rates.
        prompt_logits: whether the chunks for :meth:`prefill` contain logits. The output head then runs on every prompt token.

    Each attribute below is True if the class overrides the method in its description, unless the class declares another value:
        observes: whether :meth:`observe` does anything. If not, the loop may drop a draft's last nodes if they are padding in all rows.
        reads_prompt: whether the loop calls :meth:`prefill`.
        rebatches: whether :meth:`rebatch` keeps the state of rows that stay. If not, a strategy that reads prompts would have to read
            all texts again when a request joins, so a scheduler decodes its requests one by one.
        limits: whether :meth:`limit` restricts the depth of drafts. Useful if deeper drafts take more time.
        finds_layers: whether :meth:`layers_for` chooses the hidden layers.
    """

    name: str
    summary: ClassVar[str] = ""
    needs: ClassVar[str] = ""
    hints: ClassVar[Mapping[str, str]] = {}
    auto_place: ClassVar[float | None] = None
    auto_settings: ClassVar[Mapping[str, Any]] = {}
    exact: bool = trait(True, all)
    needs_assistant: bool = trait(False, any)
    takes_assistant: bool = trait(False, any)
    rests: bool = trait(False, all, of=lambda part: part.rests or not (part.observes or part.reads_prompt))
    misses_steps: bool = trait(False, all, of=lambda part: part.misses_steps or not part.observes)
    timed: bool = trait(False, any)
    rows_apart: bool = trait(True, all)
    needs_grammar: bool = trait(False, any)
    on_device: bool = trait(False, all)
    # The hidden layers of merged parts depend on the target: `layers_for` returns them.
    hidden_layers: tuple[int, ...] = trait((), _nothing)
    # Grades of several drafters have no common scale.
    grade_rates: tuple[float, ...] = trait((), _nothing)
    prompt_logits: bool = trait(False, any)
    observes: bool = trait(False, any, hooks=("observe",))
    reads_prompt: bool = trait(False, any, hooks=("prefill",))
    rebatches: bool = trait(False, all, hooks=("rebatch",))
    limits: bool = trait(False, all, hooks=("limit",))
    finds_layers: bool = trait(False, any, of=lambda part: part.reads_layers, hooks=("layers_for",))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("auto_place", "auto_settings"):  # a class derived from a candidate is not a candidate
            if name not in vars(cls):
                setattr(cls, name, vars(Strategy)[name])
        parent = next(base for base in cls.__mro__[1:] if issubclass(base, Strategy))
        for name, declared in TRAITS.items():
            own = any(getattr(cls, hook) is not getattr(parent, hook) for hook in declared.hooks)
            if own and name not in vars(cls):
                setattr(cls, name, any(getattr(cls, hook) is not getattr(Strategy, hook) for hook in declared.hooks))

    @property
    def traits(self) -> dict[str, Any]:
        """The values of all traits, by name."""
        return {name: getattr(self, name) for name in TRAITS}

    def declare(self, **traits: Any) -> None:
        """Sets `traits` for this instance, in place of the class's values. Used by strategies that are composed of others."""
        vars(self).update(traits)

    def compose(self, resolve: Callable[..., Strategy], registered: Mapping[str, type[Strategy]]) -> None:
        """Creates the parts that the settings name, in strategies that are composed of others.

        An override creates the parts with ``resolve(name, settings)``, and calls :meth:`declare` with the merged traits. ``compose``
        runs before each call of ``generate``, but only its first run changes the strategy.

        Args:
            resolve: creates a strategy from its name and settings.
            registered: the classes of all registered strategies, by name.
        """

    def start(self, context: Context) -> Any:
        """Returns a new state for a ``generate`` call, with tensors on ``context.device``. The loop passes it to the other methods."""
        return None

    @abstractmethod
    def propose(self, state: Any, sequences: Sequences) -> Draft:
        """Returns a draft of the next tokens of every row. The loop calls it before each forward pass of the target.

        On CPUs, the loop calls a strategy with the trait :attr:`rests` less often while its drafts are not worth their time.
        """

    def observe(self, state: Any, step: Step) -> None:
        """Learns from a verified step. Updates `state` in place."""

    def layers_for(self, config: Any, count: int) -> tuple[int, ...]:
        """The hidden layers to read from a target with `count` decoder layers and this `config` (transformers' ``PreTrainedConfig``).

        Returns :attr:`hidden_layers` unless overridden.
        """
        return self.hidden_layers

    @property
    def reads_layers(self) -> bool:
        """Whether the strategy reads outputs of the target's decoder layers."""
        return bool(self.hidden_layers) or self.finds_layers

    def prefill(self, state: Any, chunk: PromptChunk) -> None:
        """Learns from a chunk of the prompts. Updates `state` in place. All chunks come in order, before the first :meth:`propose`.

        If a strategy overrides this method, the chunks hold whole prompts. The loop then reuses no prefix of an earlier call, and
        leaves no part of a prompt to the first step. After :meth:`rebatch`, chunks hold the prompts of the new rows.
        """

    def finish(self, state: Any) -> None:
        """Releases or stores what `state` holds. Called once for every state, after the call has ended or failed."""

    def rebatch(self, state: Any, rows: Tensor, context: Context) -> Any:
        """Returns the state after requests have joined or left the batch between two steps.

        The default calls :meth:`start` again, with rows that hold all committed tokens. This is always exact, but drops what the
        state has learnt. An override keeps the state of rows that stay. The call's draft models and modules already hold the new
        rows.

        Args:
            state: the former state; it may be changed and returned.
            rows: ``[B]`` int64, the former index of each row, -1 for a new row.
            context: the context of the new batch, as in :meth:`start`.
        """
        return self.start(context)

    def keeps_rows(self, state: Any) -> bool:
        """Whether :meth:`rebatch` can keep `state`. If not, the loop calls :meth:`finish` and :meth:`start`, with new draft models."""
        return self.rebatches

    def limit(self, state: Any, tokens: int) -> None:
        """Sets the greatest useful depth of the next draft, for strategies whose deeper drafts take more time."""

    def details(self, state: Any) -> Mapping[str, Any]:
        """Returns the strategy's statistics of the call for ``report.details``, JSON-safe. Called once, at the end of the call."""
        return {}


@contextmanager
def finishing(strategy: Strategy, state: Callable[[], Any]) -> Iterator[None]:
    """Context manager: calls :func:`finish_all` for `strategy` when the ``with`` block ends or fails. state: returns its state."""
    try:
        yield
    except BaseException as error:
        finish_all([(strategy, state())], error)
        raise
    finish_all([(strategy, state())])


def finish_all(states: Iterable[tuple[Strategy, Any]], cause: BaseException | None = None) -> None:
    """Calls :meth:`Strategy.finish` for all `states`, even if a call raises. Raises the first error, with later errors as notes.

    Args:
        cause: the error that ended the call, if any. With a cause, errors of `finish` become notes of the cause, and nothing is raised.
    """
    first = cause
    for strategy, state in states:
        try:
            strategy.finish(state)
        except Exception as error:
            if first is None:
                error.add_note(f"decoders: in finish of {strategy.name!r}")
                first = error
            else:
                first.add_note(f"decoders: finish of {strategy.name!r} failed as well: {error!r}")
    if first is not None and cause is None:
        raise first
