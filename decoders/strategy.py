"""The contract of a decoding strategy: propose tokens, observe what became of them. Everything else is the loop's.

A strategy never runs the target, never samples, never touches the cache. Its whole effect on the output is *when* a
token is found, not *which*: what it proposes is verified against the target's own choice.
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
from .tree.draft import Draft, PromptChunk, Sequences, Step, check_draft

__all__ = [
    "Context", "Draft", "PromptChunk", "Sequences", "Step", "Strategy", "Traits", "check_draft", "finish_all", "finishing",
    "no_costs", "no_memory",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Traits:
    """All that a strategy declares of itself: the attributes of :class:`Strategy` by the same names, which say what each means.

    There are no defaults: whoever makes one has to decide about every trait.
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
        """Those of a strategy whose drafts are those of all `parts`."""
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
        needs: what it takes beside the target, a draft model and a grammar apart, in a word or two: ``"heads"``.
        settings_class: pydantic model of the settings.
        hints: transformers' drafting arguments that stand for a setting, ``{"num_assistant_tokens": "length"}``. Others are
            refused beside this strategy.
        exact: whether output is token-identical to plain decoding. A lossy strategy is marked in every report.
        needs_assistant: whether the call must bring ``assistant_model=``; others refuse one.
        takes_assistant: whether it may bring one.
        rests: whether it can be left out of steps, and still be shown them: `observe` then comes without a `propose` before it,
            or after a draft of which other nodes than its own were verified, or its first ones only. Those without an `observe`
            always can. Where rows share steps, drafts that are not worth their time are left out so.
        misses_steps: whether steps that it is left out of need not be shown to it either; says something of those that rest, and
            whose `observe` takes time.
        timed: whether what it drafts depends on the clock, so that equal calls may draft differently. The tokens are the same.
        rows_apart: whether what a row drafts depends on that row alone. If not, rows learn from each other, or share a budget or
            random numbers. The kit compares what rows draft together with what they draft alone; the tokens are the same in any case.
        needs_grammar: whether the call must bring ``grammar=``; others take one as well.
        on_device: promises that `propose` and `observe` never wait for the device, take no data from the host, keep all shapes,
            and change nothing but the contents of tensors, so that a whole step can be recorded and replayed. The kit checks it.
            What a guide does counts for the guide: the loop asks it too.
        hidden_layers: decoder layers of the target whose outputs ``Step.layers`` and ``PromptChunk.layers`` hold; 0 is the
            first, -1 the last. Read when a call begins. Taking them is another forward pass to compile.
        grade_rates: how often draft tokens of each grade (:attr:`Draft.grades`) are right if their parent is, as a rule, from grade 0
            on: what they are expected to be before any was judged. Empty where it grades nothing, or does not know.
        prompt_logits: whether :meth:`prefill` is handed the prompts' logits: a pass of the output head over every token.

    Set where a class overrides a hook, unless it declares them itself:
        observes: whether :meth:`observe` does anything. If not, nodes at a draft's end without a draft token in any row are left out.
        reads_prompt: whether :meth:`prefill` is to be called.
        rebatches: whether :meth:`rebatch` keeps the state of rows that stay. One that reads prompts and does not would have to be
            shown all texts anew: it is given its requests one at a time.
        limits: whether it drafts as deep as :meth:`limit` says, so that a token more costs time.
        finds_layers: whether :meth:`layers_of` or :meth:`layers_for` say which hidden layers it reads.
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
        """What it declares, in one object."""
        return Traits(**{field.name: getattr(self, field.name) for field in fields(Traits)})

    def declare(self, traits: Traits) -> None:
        """Declares `traits` of this instance, whatever its class says: for strategies that are built of others."""
        vars(self).update(vars(traits))

    def start(self, context: Context) -> Any:
        """Makes the state of one ``generate`` call (tensors on ``context.device``), given back to the other hooks."""
        return None

    @abstractmethod
    def propose(self, state: Any, sequences: Sequences) -> Draft:
        """Proposes the next tokens of every row. Runs before each target forward; where rows share steps, a strategy that can be left
        out (:attr:`rests`) is asked less often while what it proposes is not worth the time.
        """

    def observe(self, state: Any, step: Step) -> None:
        """Learns from a verified step; updates `state` in place."""

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The hidden layers that a call reads of a target with `count` decoder layers: :attr:`hidden_layers`.

        Overridden where they depend on how many there are.
        """
        return self.hidden_layers

    def layers_for(self, config: Any, count: int) -> tuple[int, ...]:
        """What a call asks for: the same, unless it depends on the target's `config` (transformers' ``PreTrainedConfig``)."""
        return self.layers_of(count)

    @property
    def reads_layers(self) -> bool:
        """Whether it asks for hidden layers of the target."""
        return bool(self.hidden_layers) or self.finds_layers

    def prefill(self, state: Any, chunk: PromptChunk) -> None:
        """Learns from a stretch of the prompts, in order, before the first :meth:`propose`; updates `state` in place.

        A strategy that overrides this is shown whole prompts: nothing is taken from earlier calls, and nothing is left to the
        first step. Behind :meth:`rebatch` it is shown those of the new rows.
        """

    def finish(self, state: Any) -> None:
        """The call is over, done or failed; comes once for every state that :meth:`start` has made."""

    def rebatch(self, state: Any, rows: Tensor, context: Context) -> Any:
        """Requests have come or gone between two steps; makes the state of the rows as they are now, from that of those before.

        By default :meth:`start` is called again, on rows that hold all that was committed so far. That is always exact, and
        forgets what was learnt. A strategy that overrides this keeps the state of rows that stay. Its draft models and modules
        stay open, and have been told: they hold what they held of each row, at its new place.

        Args:
            state: given up; it may be changed and returned.
            rows: ``[B]`` int64: which row of the batch before each row is, -1 for one that is new.
            context: of the rows as they are now, as :meth:`start` gets it.
        """
        return self.start(context)

    def keeps_rows(self, state: Any) -> bool:
        """Whether it does with this state. If not, the loop ends it and starts anew, draft models included."""
        return self.rebatches

    def limit(self, state: Any, tokens: int) -> None:
        """Says how many tokens deep the next draft is wanted at most; strategies to which a token costs something obey."""

    def details(self, state: Any) -> Mapping[str, Any]:
        """What the report is to say of the call besides its figures: JSON-safe, ``report.details``. Asked once, at the end."""
        return {}


@contextmanager
def finishing(strategy: Strategy, state: Callable[[], Any]) -> Iterator[None]:
    """Within it a call runs; behind it `strategy` is told that it is over. What ended the call is what is raised.

    Args:
        state: gives the state as it then is.
    """
    try:
        yield
    except BaseException as error:
        finish_all([(strategy, state())], error)
        raise
    finish_all([(strategy, state())])


def finish_all(states: Iterable[tuple[Strategy, Any]], cause: BaseException | None = None) -> None:
    """Calls :meth:`Strategy.finish` of all `states`, whatever happens, and raises the first error; later ones become its notes.

    Args:
        cause: what has ended the call, if it has failed: then nothing is raised.
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
