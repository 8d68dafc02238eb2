"""The contract of a decoding strategy: propose tokens, and observe the verified step. Everything else is the loop's.

A strategy never runs the target, never samples its output, never touches the cache. It affects only *when* a token is found, not
*which*: its draft is verified against the target's own choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from .context import Context, no_costs, no_memory
from .settings import Configured
from .tree.draft import Draft, HostRows, HostStep, PromptChunk, Sequences, Step, check_draft

__all__ = [
    "Context", "Draft", "HostRows", "HostStep", "PromptChunk", "Sequences", "Step", "Strategy", "Traits", "check_draft", "finish_all",
    "finishing", "no_costs", "no_memory",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Everything a strategy declares about itself; see the attributes of :class:`Strategy` of the same names.

    There are no defaults, so that code that builds traits must decide about every one.
    """

    exact: bool
    needs_assistant: bool
    takes_assistant: bool
    needs_grammar: bool
    rests: bool
    misses_steps: bool
    timed: bool
    rows_apart: bool
    on_device: bool
    prompt_logits: bool
    hidden_layers: tuple[int, ...]
    grade_rates: tuple[float, ...]
    observes: bool
    reads_prompt: bool
    rebatches: bool
    limits: bool
    finds_layers: bool

    @staticmethod
    def merged(parts: Sequence[Traits]) -> Traits:
        """The traits of a strategy that merges the drafts of all `parts`."""
        return Traits(
            exact=all(part.exact for part in parts),
            needs_assistant=any(part.needs_assistant for part in parts),
            takes_assistant=any(part.takes_assistant for part in parts),
            needs_grammar=any(part.needs_grammar for part in parts),
            rests=all(part.rests or not (part.observes or part.reads_prompt) for part in parts),
            misses_steps=all(part.misses_steps or not part.observes for part in parts),
            timed=any(part.timed for part in parts),
            rows_apart=all(part.rows_apart for part in parts),
            on_device=all(part.on_device for part in parts),
            prompt_logits=any(part.prompt_logits for part in parts),
            hidden_layers=(),  # they depend on the target: `layers_for` has those of all parts
            grade_rates=(),  # the grades of several drafters are not on one scale
            observes=any(part.observes for part in parts),
            reads_prompt=any(part.reads_prompt for part in parts),
            rebatches=all(part.rebatches for part in parts),
            limits=all(part.limits for part in parts),
            finds_layers=any(part.finds_layers or part.hidden_layers for part in parts),
        )


#: Traits that a class has if it overrides one of these hooks.
_BY_HOOK = {
    "observes": ("observe",), "reads_prompt": ("prefill",), "rebatches": ("rebatch",), "limits": ("limit",),
    "finds_layers": ("layers_of", "layers_for"),
}  # fmt: skip


class Strategy(Configured, ABC):
    """Base class of all strategies. Instances hold settings only; what changes during a call lives in the state.

    ``MyStrategy(width=3)`` and ``MyStrategy(MySettings(width=3))`` are the same.

    Class attributes (those after `settings_class` an instance may refine, by its settings):
        name: registry name, ``snake_case``.
        summary: one line for ``decoders strategies``.
        needs: in a word or two what it needs besides the target, other than a draft model or a grammar: ``"heads"``.
        settings_class: pydantic model of the settings.
        hints: transformers' drafting arguments that stand for a setting, ``{"num_assistant_tokens": "length"}``. Others are
            refused beside this strategy.
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
    exact: bool = True
    needs_assistant: bool = False
    takes_assistant: bool = False
    rests: bool = False
    misses_steps: bool = False
    timed: bool = False
    rows_apart: bool = True
    needs_grammar: bool = False
    on_device: bool = False
    hidden_layers: tuple[int, ...] = ()
    grade_rates: tuple[float, ...] = ()
    prompt_logits: bool = False
    observes: bool = False
    reads_prompt: bool = False
    rebatches: bool = False
    limits: bool = False
    finds_layers: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        parent = next(base for base in cls.__mro__[1:] if issubclass(base, Strategy))
        for trait, hooks in _BY_HOOK.items():
            own = any(getattr(cls, hook) is not getattr(parent, hook) for hook in hooks)
            if own and trait not in vars(cls):
                setattr(cls, trait, any(getattr(cls, hook) is not getattr(Strategy, hook) for hook in hooks))

    @property
    def traits(self) -> Traits:
        """Its declarations in one object."""
        return Traits(**{field.name: getattr(self, field.name) for field in fields(Traits)})

    def declare(self, traits: Traits) -> None:
        """Overrides the class's declarations for this instance: for strategies that are built of others."""
        vars(self).update(vars(traits))

    def compose(self, resolve: Callable[..., Strategy]) -> None:
        """Makes the strategies that the settings name, with ``resolve(name, settings)``, and :meth:`declare` what they need: for
        strategies that are built of others. Called before a call begins; it changes nothing the second time.
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
