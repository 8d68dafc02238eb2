"""The contract of a decoding strategy: propose tokens, and observe the verified step. The loop does everything else.

A strategy never runs the target, never samples the target's output, never touches the cache. It affects *when* a token is written, not
*which* token is written: the loop verifies the draft against the target's own choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import Tensor

from .context import Context, no_costs, no_memory
from .draft import Draft, HostRows, HostStep, PromptChunk, Sequences, Step, check_draft
from .settings import Configured

__all__ = [
    "Context", "Draft", "HostRows", "HostStep", "PromptChunk", "Sequences", "Step", "Strategy", "TRAITS", "check_draft", "finish_all",
    "finishing", "merged_traits", "no_costs", "no_memory",
]  # fmt: skip


T = TypeVar("T")


@dataclass
class Trait(Generic[T]):
    """A property that a strategy declares about itself, as an attribute of its class or instance.

    Attributes:
        default: the value without a declaration.
        merged: computes the value for a strategy that merges the drafts of several strategies, from the values of these strategies.
        of: returns the value that `merged` gets for a strategy; None: `merged` gets the declared value.
        hooks: names of methods: if a class overrides any of them, the trait is True unless the class declares it.
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
    """Returns a :class:`Trait`, typed as its default, because classes and instances have the value itself as the attribute."""
    return cast(T, Trait(default, merged, **options))


def merged_traits(parts: Sequence[Strategy]) -> dict[str, Any]:
    """The traits of a strategy that merges the drafts of all `parts`."""
    return {
        name: own.merged([own.of(part) if own.of is not None else getattr(part, name) for part in parts])
        for name, own in TRAITS.items()
    }


def _nothing(values: Iterable[Any]) -> tuple:
    return ()


class Strategy(Configured, ABC):
    """Base class of all strategies. Instances hold settings only; the state holds everything that changes during a call.

    ``MyStrategy(width=3)`` and ``MyStrategy(MySettings(width=3))`` are the same.

    Class attributes (an instance may override `exact` and the attributes after it, depending on its settings):
        name: registry name, ``snake_case``.
        summary: one line for ``decoders strategies``.
        needs: in a word or two, what a call needs besides the target, a draft model and a grammar: ``"heads"``.
        settings_class: pydantic model of the settings.
        hints: the strategy's setting for each drafting argument of transformers, ``{"num_assistant_tokens": "length"}``. Other
            drafting arguments raise.
        auto_place: its place among the candidates of ``auto``. ``auto`` asks candidates with low numbers first, so cheap strategies
            have low numbers: the built-in strategies 10 (no work) to 50 (a second model). None: it is a candidate only if the user
            names it. A candidate must be `exact`, and declare `rests` unless it has no `observe`.
        auto_settings: its settings as a candidate of ``auto``. Drafts can be longer, because ``auto`` verifies only the part that pays.
        exact: whether output is token-identical to plain decoding. Every report marks a lossy strategy.
        needs_assistant, takes_assistant: whether a call must or may have ``assistant_model=``.
        rests: whether the loop may skip or cut its drafts. `observe` then also gets steps for which `propose` was not called, and steps
            that verified other nodes or only the first nodes of the draft. The drafts of strategies without `observe` can always be
            skipped. On CPUs the loop skips drafts that are not worth their time.
        misses_steps: whether the loop may also skip `observe` after steps without its draft; for strategies whose `observe` is slow.
        timed: whether its drafts depend on the clock, so that equal calls may draft differently. The tokens are the same.
        rows_apart: whether a row's drafts depend on this row alone. If not, rows learn from each other, or share a budget or random
            numbers. The conformance kit compares drafts of rows together and alone; the tokens are the same in any case.
        needs_grammar: whether a call must have ``grammar=``; every strategy takes it.
        on_device: promises that `propose` and `observe` never wait for the device, take no data from the host, keep all shapes, and
            change nothing but the contents of tensors: then a whole step can be recorded and replayed. The conformance kit checks it.
        hidden_layers: decoder layers of the target whose outputs are in ``Step.layers`` and ``PromptChunk.layers``; 0 is the first,
            -1 the last. Read when a call begins. Every selection of layers compiles another forward pass.
        grade_rates: for each grade (:attr:`Draft.grades`) from 0 on, the typical acceptance rate of a draft token whose parent was
            accepted; used until enough tokens were judged. Empty without grades, or if the rates are unknown.
        prompt_logits: whether :meth:`prefill` gets the prompts' logits; the output head then runs on every prompt token.

    These are True if the class overrides the named method, unless the class declares another value:
        observes: whether :meth:`observe` does anything. If not, the loop cuts nodes at the block's end that are draft tokens in no row.
        reads_prompt: whether the loop calls :meth:`prefill`.
        rebatches: whether :meth:`rebatch` keeps the state of rows that stay. If not, a strategy that reads prompts would have to read
            all texts again, so a scheduler gives it one request at a time.
        limits: whether it drafts as deep as :meth:`limit` says, because deeper drafts take more time.
        finds_layers: whether :meth:`layers_of` or :meth:`layers_for` choose the hidden layers.
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
    finds_layers: bool = trait(False, any, of=lambda part: part.reads_layers, hooks=("layers_of", "layers_for"))

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
        """All traits by name."""
        return {name: getattr(self, name) for name in TRAITS}

    def declare(self, **traits: Any) -> None:
        """Overrides the class's traits for this instance, for strategies that are composed of others."""
        vars(self).update(traits)

    def compose(self, resolve: Callable[..., Strategy], registered: Mapping[str, type[Strategy]]) -> None:
        """For strategies that are composed of others: creates the strategies that the settings name, with ``resolve(name, settings)``,
        and calls :meth:`declare` with their traits. It runs before each call of ``generate``; only the first time has an effect.

        Args:
            registered: the classes of all registered strategies, by name.
        """

    def start(self, context: Context) -> Any:
        """Creates the state of a ``generate`` call (tensors on ``context.device``); the other methods get it."""
        return None

    @abstractmethod
    def propose(self, state: Any, sequences: Sequences) -> Draft:
        """Returns a draft of the next tokens of every row. The loop calls it before each forward pass of the target; on CPUs it calls a
        strategy with the trait :attr:`rests` less often while its drafts are not worth their time.
        """

    def observe(self, state: Any, step: Step) -> None:
        """Learns from a verified step; updates `state` in place."""

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The hidden layers to read from a target with `count` decoder layers; :attr:`hidden_layers` unless overridden."""
        return self.hidden_layers

    def layers_for(self, config: Any, count: int) -> tuple[int, ...]:
        """As :meth:`layers_of`, for strategies that choose layers by the target's `config` (transformers' ``PreTrainedConfig``)."""
        return self.layers_of(count)

    @property
    def reads_layers(self) -> bool:
        """Whether it reads hidden layers of the target."""
        return bool(self.hidden_layers) or self.finds_layers

    def prefill(self, state: Any, chunk: PromptChunk) -> None:
        """Learns from a chunk of the prompts, in order, before the first :meth:`propose`; updates `state` in place.

        A strategy that overrides it reads whole prompts: the loop then reuses no prefix of an earlier call, and leaves no part of a
        prompt to the first step. After :meth:`rebatch` it reads the prompts of the new rows.
        """

    def finish(self, state: Any) -> None:
        """Called once for every state from :meth:`start`, after the call has ended or failed."""

    def rebatch(self, state: Any, rows: Tensor, context: Context) -> Any:
        """Returns the state for the batch after requests have joined or left between two steps.

        The default calls :meth:`start` again, with rows that hold all committed tokens; this is always exact, and drops what the
        state has learnt. An override keeps the state of rows that stay. Draft models and modules stay open and are already rebatched.

        Args:
            state: the former state; it may be changed and returned.
            rows: ``[B]`` int64: the former index of each row, -1 for a new row.
            context: the context of the new batch, as in :meth:`start`.
        """
        return self.start(context)

    def keeps_rows(self, state: Any) -> bool:
        """Whether :meth:`rebatch` can keep `state`. If not, the loop calls :meth:`finish` and :meth:`start`, with new draft models."""
        return self.rebatches

    def limit(self, state: Any, tokens: int) -> None:
        """Sets the greatest useful depth of the next draft, for strategies whose deeper drafts take more time."""

    def details(self, state: Any) -> Mapping[str, Any]:
        """``report.details``: the strategy's figures of the call, JSON-safe. Called once, at the end."""
        return {}


@contextmanager
def finishing(strategy: Strategy, state: Callable[[], Any]) -> Iterator[None]:
    """Calls `finish` of `strategy` at the end of a call; an error of the call is raised unchanged. state: returns the last state."""
    try:
        yield
    except BaseException as error:
        finish_all([(strategy, state())], error)
        raise
    finish_all([(strategy, state())])


def finish_all(states: Iterable[tuple[Strategy, Any]], cause: BaseException | None = None) -> None:
    """Calls :meth:`Strategy.finish` of all `states`, even if one raises, and raises the first error with later errors as notes.

    cause: the error that ended the call, if any. Errors of `finish` then become notes of `cause`, and the function does not raise.
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
