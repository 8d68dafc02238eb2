"""The contract of a decoding strategy: propose tokens, and observe the verified step. Everything else is the loop's.

A strategy never runs the target, never samples its output, never touches the cache. It affects only *when* a token is found, not
*which*: its draft is verified against the target's own choice.
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
    """Something that a strategy declares about itself. A class or an instance says otherwise by an attribute of the same name.

    Attributes:
        default: holds where nothing is said.
        merged: makes the value of a strategy that merges the drafts of others out of their values.
        of: the value of one of these; None: its own.
        hooks: where a class overrides one of them, the trait is True unless the class declares it.
    """

    default: T
    merged: Callable[[Iterable[Any]], T]
    of: Callable[[Strategy], Any] | None = None
    hooks: tuple[str, ...] = ()

    def __set_name__(self, owner: type, name: str) -> None:
        TRAITS[name] = self

    def __get__(self, instance: object, owner: type | None = None) -> T:
        return self.default


#: All traits by name.
TRAITS: dict[str, Trait] = {}


def trait(default: T, merged: Callable[[Iterable[Any]], T], **options: Any) -> T:
    """A :class:`Trait` that type checkers take for its value."""
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
    """Base class of all strategies. Instances hold settings only; what changes during a call lives in the state.

    ``MyStrategy(width=3)`` and ``MyStrategy(MySettings(width=3))`` are the same.

    Class attributes (those after `auto_settings` an instance may refine, by its settings):
        name: registry name, ``snake_case``.
        summary: one line for ``decoders strategies``.
        needs: in a word or two what it needs besides the target, other than a draft model or a grammar: ``"heads"``.
        settings_class: pydantic model of the settings.
        hints: transformers' drafting arguments that stand for a setting, ``{"num_assistant_tokens": "length"}``. Others are
            refused beside this strategy.
        auto_place: its place among the candidates of ``auto``, which asks those with lower numbers first: the cheapest have the lowest.
            Built-in ones have 10 (no work) to 50 (a second model). None: it is a candidate only where a user names it. A candidate is
            exact, and :attr:`rests`.
        auto_settings: its settings as a candidate: longer drafts, because ``auto`` verifies as much of them as pays.
        exact: whether output is token-identical to plain decoding. A lossy strategy is marked in every report.
        needs_assistant: whether the call must bring ``assistant_model=``; others refuse one.
        takes_assistant: whether it may bring one.
        rests: whether it can be left out of steps and still observe them: `observe` then comes without a `propose` before it, or
            after other nodes than its draft's, or only its first ones, were verified. Strategies without `observe` always can.
            Where rows share steps, drafts that are not worth their time are left out.
        misses_steps: whether it need not even observe the steps that it is left out of; for strategies that rest and whose `observe`
            takes time.
        timed: whether its drafts depend on the clock, so that equal calls may draft differently. The tokens are the same.
        rows_apart: whether a row's drafts depend on that row alone. If not, rows learn from each other, or share a budget or
            random numbers. The kit compares drafts of rows together with drafts alone; the tokens are the same in any case.
        needs_grammar: whether the call must bring ``grammar=``; others take one as well.
        on_device: promises that `propose` and `observe` never wait for the device, take no data from the host, keep all shapes,
            and change only the contents of tensors, so that a whole step can be recorded and replayed. The kit checks it. Guides
            have a promise of their own, which the loop asks for.
        hidden_layers: decoder layers of the target whose outputs are in ``Step.layers`` and ``PromptChunk.layers``; 0 is the
            first, -1 the last. Read when a call begins. Every selection of layers is a forward pass of its own to compile.
        grade_rates: the usual rates at which draft tokens of each grade (:attr:`Draft.grades`) are right if their parent is, from grade
            0 on; used until enough were judged. Empty if it has no grades, or the rates are unknown.
        prompt_logits: whether :meth:`prefill` gets the prompts' logits, for which the output head runs over every prompt token.

    True if the class overrides the hook, unless it declares them itself:
        observes: whether :meth:`observe` does anything. If not, nodes at a draft's end without a draft token in any row are left out.
        reads_prompt: whether :meth:`prefill` is to be called.
        rebatches: whether :meth:`rebatch` keeps the state of rows that stay. A strategy that reads prompts and cannot would have to be
            shown all texts again, so it gets its requests one at a time.
        limits: whether it drafts as deep as :meth:`limit` asks for, because deeper drafts take more time.
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
    # Those of merged parts depend on the target: `layers_for` has them.
    hidden_layers: tuple[int, ...] = trait((), _nothing)
    # The grades of several drafters are not on one scale.
    grade_rates: tuple[float, ...] = trait((), _nothing)
    prompt_logits: bool = trait(False, any)
    observes: bool = trait(False, any, hooks=("observe",))
    reads_prompt: bool = trait(False, any, hooks=("prefill",))
    rebatches: bool = trait(False, all, hooks=("rebatch",))
    limits: bool = trait(False, all, hooks=("limit",))
    finds_layers: bool = trait(False, any, of=lambda part: part.reads_layers, hooks=("layers_of", "layers_for"))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("auto_place", "auto_settings"):  # what derives from a candidate is none by that
            if name not in vars(cls):
                setattr(cls, name, vars(Strategy)[name])
        parent = next(base for base in cls.__mro__[1:] if issubclass(base, Strategy))
        for name, declared in TRAITS.items():
            own = any(getattr(cls, hook) is not getattr(parent, hook) for hook in declared.hooks)
            if own and name not in vars(cls):
                setattr(cls, name, any(getattr(cls, hook) is not getattr(Strategy, hook) for hook in declared.hooks))

    @property
    def traits(self) -> dict[str, Any]:
        """Its declarations by name."""
        return {name: getattr(self, name) for name in TRAITS}

    def declare(self, **traits: Any) -> None:
        """Overrides the class's declarations for this instance: for strategies that are built of others."""
        vars(self).update(traits)

    def compose(self, resolve: Callable[..., Strategy], registered: Mapping[str, type[Strategy]]) -> None:
        """Makes the strategies that this one is built of, with ``resolve(name, settings)``, and :meth:`declare` what they need. Called
        before a call begins; it changes nothing the second time.

        Args:
            registered: the classes of all registered strategies, by name.
        """

    def start(self, context: Context) -> Any:
        """Creates the state of one ``generate`` call (tensors on ``context.device``), which the other hooks get."""
        return None

    @abstractmethod
    def propose(self, state: Any, sequences: Sequences) -> Draft:
        """Proposes the next tokens of every row. Runs before each forward pass of the target; where rows share steps, a strategy that
        :attr:`rests` is asked less often while its drafts are not worth their time.
        """

    def observe(self, state: Any, step: Step) -> None:
        """Learns from a verified step; updates `state` in place."""

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The hidden layers that a call reads of a target with `count` decoder layers: :attr:`hidden_layers`.

        Override it if they depend on the number of layers.
        """
        return self.hidden_layers

    def layers_for(self, config: Any, count: int) -> tuple[int, ...]:
        """As :meth:`layers_of`; override it if the layers depend on the target's `config` (transformers' ``PreTrainedConfig``)."""
        return self.layers_of(count)

    @property
    def reads_layers(self) -> bool:
        """Whether it reads hidden layers of the target."""
        return bool(self.hidden_layers) or self.finds_layers

    def prefill(self, state: Any, chunk: PromptChunk) -> None:
        """Learns from a chunk of the prompts, in order, before the first :meth:`propose`; updates `state` in place.

        A strategy that overrides this is shown whole prompts: no prefix is reused, and nothing is left to the first step. After
        :meth:`rebatch` it is shown those of the new rows.
        """

    def finish(self, state: Any) -> None:
        """Called when the call has ended or failed, once for every state from :meth:`start`."""

    def rebatch(self, state: Any, rows: Tensor, context: Context) -> Any:
        """Returns the state for the batch after requests have joined or left between two steps.

        By default :meth:`start` is called again, with rows that hold all committed tokens. That is always exact, and forgets what
        was learnt. A strategy that overrides this keeps the state of rows that stay. Its draft models and modules stay open and
        were rebatched already.

        Args:
            state: no longer used by the loop; it may be changed and returned.
            rows: ``[B]`` int64: the former index of each row, -1 for a new one.
            context: of the new batch, as :meth:`start` gets it.
        """
        return self.start(context)

    def keeps_rows(self, state: Any) -> bool:
        """Whether :meth:`rebatch` can keep this state. If not, the loop finishes it and calls :meth:`start`, with new draft models."""
        return self.rebatches

    def limit(self, state: Any, tokens: int) -> None:
        """Sets the greatest useful depth of the next draft, for strategies whose deeper drafts take more time."""

    def details(self, state: Any) -> Mapping[str, Any]:
        """``report.details``: further information on the call, JSON-safe. Called once, at the end."""
        return {}


@contextmanager
def finishing(strategy: Strategy, state: Callable[[], Any]) -> Iterator[None]:
    """Surrounds a call and calls `finish` of `strategy` at its end. An error of the call is raised unchanged.

    Args:
        state: returns the state at the end.
    """
    try:
        yield
    except BaseException as error:
        finish_all([(strategy, state())], error)
        raise
    finish_all([(strategy, state())])


def finish_all(states: Iterable[tuple[Strategy, Any]], cause: BaseException | None = None) -> None:
    """Calls :meth:`Strategy.finish` of all `states`, whatever they raise, and raises the first error with later ones as notes.

    Args:
        cause: the error that has ended the call, if any: errors become its notes, and nothing is raised.
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
