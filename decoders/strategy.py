"""The contract of a decoding strategy: propose tokens, observe what became of them. Everything else is the loop's.

A strategy never runs the target, never samples, never touches the cache. Its whole effect on the output is *when* a
token is found, not *which*: what it proposes is verified against the target's own choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .errors import DraftError, UnsupportedError
from .settings import Settings
from .tree import MAX_NODES, Topology, TreeTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .costs.steps import StepCosts
    from .drafting import Drafter, Forced, ModulePasses
    from .sampling.processors import SamplingInputs, SamplingPlan


def _outside_a_call(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError("this Context was made by hand; draft models and strategies by name exist in a call only")


def no_costs(measure: bool = False) -> None:
    """Of a context made by hand, and of a draft model."""


def no_memory(key: str, factory: Callable[[], Any], of: Strategy | None = None) -> Any:
    """Of a context made by hand, of a draft model, and with the setting ``memory=False``: nothing is kept."""
    return factory()


@dataclass(frozen=True)
class Context:
    """What a strategy may prepare itself from, once per ``generate`` call.

    Attributes:
        model: the user's model (its weights and config; do not change either).
        tokenizer: the tokenizer given to ``enable`` or ``generate``, if any.
        assistant_model: the ``assistant_model=`` of the call, if any.
        rows: number of rows ``B``.
        slots: capacity of each row in tokens, prompt included.
        device: where the loop's tensors live.
        vocab_size: size ``V`` of the target's logits.
        compile: compiles a plain tensor function without graph breaks, once per model, with sizes left dynamic; gives it
            back as it is when the call runs eagerly. The time of the first call is booked as compile time.
        draft: opens a draft model for this call: ``draft(model, ahead=K)`` gives a
            :class:`~decoders.drafting.Drafter`, with its own cache and compiled passes.
        strategy: makes a strategy from a registry name and settings, for strategies that are built of others.
        sequences: the rows as they are at the start, prompts only; None in a context made by hand.
        coupled: whether target and drafts share their noise, so that a draft token drawn with it is likely the target's token. If
            not, a draft says what it was drawn from (:attr:`Draft.scores`).
        level: 0 if the strategy drafts for the target, 1 if it drafts for the target's draft model, and so on.
        plan, sampling: what the target's logits go through before a token is chosen
            (:func:`decoders.sampling.process`), for strategies that have scores of their own. None: greedy, as they are.
        guide: where the rows stand in their grammars, and what these force them to write; None without ``grammar=``. Illegal
            draft tokens need not be looked for: the loop takes them out.
        decoder_layers: how many the target has, of which :attr:`Strategy.hidden_layers` may name some.
        costs: what a verification step costs on this machine, by nodes: ``costs()`` gives a
            :class:`decoders.costs.StepCosts`, which the loop keeps true while the call runs, or None where nothing was ever
            measured; ``costs(measure=True)`` measures it first, some steps of several sizes.
        memory: what this strategy keeps between calls on the model: ``memory(key, factory)`` gives what `factory` made in the
            first call with a strategy of this class and these settings that asked for `key`. What is in it must not change the
            tokens. The least recently used go when there are many; :func:`decoders.forget` and :func:`decoders.release` free
            all. With the setting ``memory=False``, and for a draft model's strategies, every call gets a new one.
        embed: the target's own input embedding: ``embed(tokens)``, ``[…]`` int64 to ``[…, H]``, exactly its embedding module.
            What a model does to embeddings behind that module (Gemma-2's factor) is not in it.
        head: the target's own output head on packed weights: ``head(hidden)``, ``[B, N, H]`` to logits ``[B, N, V]`` float32.
            `hidden` is what the head reads, as in :attr:`Step.hidden`; all that the model does after its head is in it: a
            soft-cap, a scale.
        module: makes a drafter that is no language model ready for this call: ``module(module, ahead=K, example=(…))`` gives
            :class:`~decoders.drafting.ModulePasses`, with a slot cache, tree masks and packed weights like a draft model's, compiled
            where the call compiles. `module` is called with its inputs and ``attention_mask``, ``position_ids`` and
            ``past_key_values``, all ready, which it hands to attention layers of transformers (``LlamaDecoderLayer``, say).
            `example`: what it reads of one node, ``[1, 1, …]`` each. `ahead`: most nodes that a step writes behind a row.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    assistant_model: PreTrainedModel | None
    rows: int
    slots: int
    device: torch.device
    vocab_size: int
    compile: Callable[[Callable[..., Any]], Callable[..., Any]]
    draft: Callable[..., Drafter] = _outside_a_call
    strategy: Callable[..., Strategy] = _outside_a_call
    sequences: Sequences | None = None
    coupled: bool = True
    level: int = 0
    plan: SamplingPlan | None = None
    sampling: SamplingInputs | None = None
    guide: Forced | None = None
    decoder_layers: int = 0
    costs: Callable[..., StepCosts | None] = no_costs
    memory: Callable[..., Any] = no_memory
    embed: Callable[[Tensor], Tensor] = _outside_a_call
    head: Callable[[Tensor], Tensor] = _outside_a_call
    module: Callable[..., ModulePasses] = _outside_a_call

    def part(self, strategy: Strategy) -> Context:
        """The same for a strategy that another one is built of: what it keeps is its own, whoever contains it."""
        return replace(self, memory=partial(self.memory, of=strategy))


@dataclass(frozen=True)
class Sequences:
    """The rows as committed so far; device tensors, updated in place by the loop between steps.

    Attributes:
        tokens: ``[B, L]`` int64, prompt and output from slot 0 on; what lies behind a row's length is undefined. ``L``
            covers the longest row and may grow from step to step.
        length: ``[B]`` int64, committed tokens per row.
        prompt_length: ``[B]`` int64, how many of them are prompt.
        finished: ``[B]`` bool, rows that generate no more.
        noise_keys: ``[B]`` int64, keys of the noise that drafts are drawn with
            (:func:`decoders.sampling.gumbel_noise`). With the coupled verifier they are those of the call and the
            target's own draws; with others they are fresh in every step.
    """

    tokens: Tensor
    length: Tensor
    prompt_length: Tensor
    finished: Tensor
    noise_keys: Tensor

    @property
    def last(self) -> Tensor:
        """``[B, 1]`` int64, the last committed token of each row: node 0 of the next block."""
        return self.tokens.gather(1, self.length[:, None] - 1)


@dataclass(frozen=True)
class Draft:
    """A small tree of draft tokens for every row.

    Attributes:
        tokens: ``[B, N-1]`` int64, the draft tokens of nodes 1 … N-1 (node 0 is the last committed token). ``-1`` means "no
            draft token here": such a node and whatever continues it is never accepted.
        topology: the block's shape, one for all rows (:class:`Topology`) or one per row (:class:`TreeTensors`).
        scores: ``[B, N-1, V]`` float32, what each draft token was drawn from (``softmax``), given its parent; siblings are drawn
            without replacement, in node order. None: the draft tokens were not drawn by chance. The coupled verifier needs
            none.
        depth: most draft tokens on a path, for trees per row whose proposer knows it; see :attr:`levels`.
        grades: ``[B, N-1]`` int64, 0 or more: how sure the strategy is of each draft token, by a measure of its own with few
            values. Tokens of one grade should be right about equally often; ``auto`` counts how often that is.
    """

    tokens: Tensor
    topology: Topology | TreeTensors
    scores: Tensor | None = None
    depth: int | None = None
    grades: Tensor | None = None

    @property
    def levels(self) -> int:
        """Most draft tokens on a path, as far as the host knows: what walks trees on the device goes so far."""
        if isinstance(self.topology, Topology):
            return self.topology.max_depth
        return len(self.topology) - 1 if self.depth is None else self.depth

    @staticmethod
    def chain(tokens: Tensor, scores: Tensor | None = None) -> Draft:
        """One continuation per row: ``tokens`` is ``[B, K]``.

        Raises:
            DraftError: `tokens` is something else.
        """
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            raise DraftError(f"a chain is made of a tensor [rows, length], not {_described(tokens)}")
        return Draft(tokens, Topology.chain(tokens.shape[1]), scores)

    @staticmethod
    def branches(tokens: Tensor) -> Draft:
        """Several continuations per row, all from the root: ``tokens`` is ``[B, branches, K]``.

        Raises:
            DraftError: `tokens` is something else.
        """
        if not isinstance(tokens, Tensor) or tokens.dim() != 3:
            raise DraftError(f"branches are made of a tensor [rows, branches, length], not {_described(tokens)}")
        return Draft(tokens.flatten(1), Topology.branches(tokens.shape[1], tokens.shape[2]))

    @staticmethod
    def nothing(rows: int, device: torch.device) -> Draft:
        """No draft token at all: plain decoding."""
        return Draft(torch.empty(rows, 0, dtype=torch.int64, device=device), Topology.chain(0))

    def check(self, rows: int) -> None:
        """Raises DraftError if shapes or dtype break the contract (values are never trusted anyway)."""
        if not isinstance(self.tokens, Tensor):
            raise DraftError(f"draft tokens must be int64 [{rows}, N-1], not {_described(self.tokens)}")
        if self.tokens.dtype != torch.int64 or self.tokens.dim() != 2 or self.tokens.shape[0] != rows:
            raise DraftError(
                f"draft tokens must be int64 [{rows}, N-1], not {self.tokens.dtype} {list(self.tokens.shape)}"
            )
        if self.tokens.shape[1] + 1 > MAX_NODES:
            raise DraftError(f"a draft may have {MAX_NODES - 1} tokens per row at most, not {self.tokens.shape[1]}")
        if isinstance(self.topology, TreeTensors):
            self.topology.check(rows)
        elif not isinstance(self.topology, Topology):
            raise DraftError(f"a draft's topology is a Topology or TreeTensors, not {_described(self.topology)}")
        if len(self.topology) != self.tokens.shape[1] + 1:
            raise DraftError(
                f"{self.tokens.shape[1]} draft tokens need a topology of {self.tokens.shape[1] + 1} nodes (the root counts), "
                f"not {len(self.topology)}"
            )
        if self.grades is not None and (
            not isinstance(self.grades, Tensor)
            or self.grades.dtype != torch.int64
            or self.grades.shape != self.tokens.shape
        ):
            raise DraftError(
                f"draft grades must be int64 {list(self.tokens.shape)}, as the tokens, not {_described(self.grades)}"
            )
        if self.scores is not None:
            fits = (
                isinstance(self.scores, Tensor)
                and self.scores.dim() == 3
                and self.scores.shape[:2] == self.tokens.shape
            )
            if not fits or not self.scores.is_floating_point():
                wanted = [*self.tokens.shape, "V"]
                raise DraftError(f"draft scores must be floating-point {wanted}, not {_described(self.scores)}")


def check_draft(draft: object, proposer: str, rows: int) -> None:
    """Raises DraftError if what `proposer` proposed is no draft for so many rows; values are never trusted anyway."""
    if not isinstance(draft, Draft):
        raise DraftError(f"propose of {proposer!r} must return a Draft, not {type(draft).__name__}")
    try:
        draft.check(rows)
    except DraftError as error:
        raise DraftError(f"propose of {proposer!r}: {error}") from None


def _described(value: object) -> str:
    """What was given, for a message."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}"


@dataclass(frozen=True)
class Step:
    """What became of a draft.

    Attributes:
        nodes: ``[B, N]`` int64, the block as run: node 0 and the draft tokens. ``N`` may exceed the draft's (padding).
        chosen: ``[B, N]`` int64, the target's token after each node; -2 for nodes off the path when logits processors
            run on the host.
        path: ``[B, N]`` int64, accepted node at each depth; valid up to `accepted`.
        accepted: ``[B]`` int64, how many draft tokens were accepted.
        emitted: ``[B]`` int64, tokens committed by this step: accepted draft tokens and one more, cut at the end of a row.
        logits: ``[B, N, V]`` float32, the target's raw logits after each node.
        hidden: ``[B, N, H]``, the hidden states that the output head read.
        sequences: the rows with this step's tokens committed.
        own_nodes: how many of the block's first nodes, root included, are the first of the strategy's own draft, in its order,
            where the block holds no others that could be accepted; 0 where it does. None: it is the draft as proposed, or
            (merged) begins with it.
        layers: ``[B, N, T, H]``, what the ``T`` decoder layers of :attr:`Strategy.hidden_layers` gave, in that order; None
            where none was asked for.
    """

    nodes: Tensor
    chosen: Tensor
    path: Tensor
    accepted: Tensor
    emitted: Tensor
    logits: Tensor
    hidden: Tensor
    sequences: Sequences
    own_nodes: int | None = None
    layers: Tensor | None = None


@dataclass(frozen=True)
class PromptChunk:
    """A stretch of the rows' prompts that the target has just read, all rows at the same positions.

    Together the chunks of a call hold every prompt token but each row's last, which is node 0 of the first step; a call whose
    prompts have one token each has none.

    Attributes:
        tokens: ``[B, N]`` int64.
        positions: ``[B, N]`` int64, where in its row each of them is.
        valid: ``[B, N]`` bool, which of them are such tokens; the others lie behind their row's prompt and mean nothing.
        hidden: ``[B, N, H]``, the hidden states that the output head reads, as in :class:`Step`.
        layers: ``[B, N, T, H]``, as in :class:`Step`.
        logits: ``[B, N, V]`` float32, the raw logits; None unless :attr:`Strategy.prompt_logits` asks for them.
    """

    tokens: Tensor
    positions: Tensor
    valid: Tensor
    hidden: Tensor
    layers: Tensor | None = None
    logits: Tensor | None = None


class Strategy(ABC):
    """Base class of all strategies. Instances hold settings only; what changes during a call lives in the state.

    ``MyStrategy(width=3)`` and ``MyStrategy(MySettings(width=3))`` are the same.

    Class attributes (those after `settings_class` an instance may refine, by its settings):
        name: registry name, ``snake_case``.
        summary: one line for ``decoders strategies``.
        settings_class: pydantic model of the settings.
        hints: transformers' drafting arguments that stand for a setting, ``{"num_assistant_tokens": "length"}``. Others are
            refused beside this strategy.
        exact: whether output is token-identical to plain decoding. A lossy strategy is marked in every report.
        needs_assistant: whether the call must bring ``assistant_model=``; others refuse one.
        takes_assistant: whether it may bring one.
        rests: whether it can be left out of steps, and still be shown them: `observe` then comes without a `propose` before it,
            or after a draft of which other nodes than its own were verified. Those without an `observe` always can.
        timed: whether what it drafts depends on the clock, so that equal calls may draft differently. The tokens are the same.
        needs_grammar: whether the call must bring ``grammar=``; others take one as well.
        on_device: promises that `propose` and `observe` never wait for the device, take no data from the host, keep all shapes,
            and change nothing but the contents of tensors, so that a whole step can be recorded and replayed. The kit checks it.
            What a guide does counts for the guide: the loop asks it too.
        hidden_layers: decoder layers of the target whose outputs :attr:`Step.layers` and :attr:`PromptChunk.layers` hold; 0 is
            the first, -1 the last. Read when a call begins. Taking them is another forward pass to compile.
        prompt_logits: whether :meth:`prefill` is handed the prompts' logits: a pass of the output head over every token.
    """

    name: str
    summary: ClassVar[str] = ""
    settings_class: ClassVar[type[Settings]] = Settings
    hints: ClassVar[Mapping[str, str]] = {}
    exact: bool = True
    needs_assistant: bool = False
    takes_assistant: bool = False
    rests: bool = False
    timed: bool = False
    needs_grammar: bool = False
    on_device: bool = False
    hidden_layers: tuple[int, ...] = ()
    prompt_logits: bool = False

    def __init__(self, settings: Settings | None = None, /, **values: Any) -> None:
        if settings is not None and values:
            raise TypeError("give either a settings object or keyword settings, not both")
        if settings is not None and not isinstance(settings, self.settings_class):
            raise TypeError(
                f"{type(self).__name__} takes {self.settings_class.__name__}, not {type(settings).__name__}"
            )
        self.settings: Any = settings if settings is not None else self.settings_class.parse(values)

    def start(self, context: Context) -> Any:
        """Makes the state of one ``generate`` call (tensors on ``context.device``), given back to the other hooks."""
        return None

    @abstractmethod
    def propose(self, state: Any, sequences: Sequences) -> Draft:
        """Proposes the next tokens of every row. Runs before each target forward."""

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
        own, plain = type(self), Strategy
        return (
            bool(self.hidden_layers) or own.layers_of is not plain.layers_of or own.layers_for is not plain.layers_for
        )

    def prefill(self, state: Any, chunk: PromptChunk) -> None:
        """Learns from a stretch of the prompts, in order, before the first :meth:`propose`; updates `state` in place.

        A strategy that overrides this is shown whole prompts: nothing is taken from earlier calls, and nothing is left to the
        first step.
        """

    def finish(self, state: Any) -> None:
        """The call is over, done or failed; comes once for every state that :meth:`start` has made.

        Of a strategy `on_device` it is the state that the steps have worked on, which may be that of an equal call before.
        """

    @property
    def reads_prompt(self) -> bool:
        """Whether :meth:`prefill` is to be called: where it is overridden."""
        return type(self).prefill is not Strategy.prefill

    @property
    def observes(self) -> bool:
        """Whether :meth:`observe` does anything. If not, nodes at a draft's end without a draft token in any row are left out."""
        return type(self).observe is not Strategy.observe

    def rebatch(self, state: Any, rows: Tensor, context: Context) -> Any:
        """Requests have come or gone between two steps; makes the state of the rows as they are now, from that of those before.

        By default :meth:`start` is called again, on rows that hold all that was committed so far. That is always exact, and
        forgets what was learnt. A strategy that overrides this keeps the state of rows that stay. Its draft models stay open,
        and have been told.

        Args:
            state: given up; it may be changed and returned.
            rows: ``[B]`` int64: which row of the batch before each row is, -1 for one that is new.
            context: of the rows as they are now, as :meth:`start` gets it.
        """
        return self.start(context)

    def limit(self, state: Any, tokens: int) -> None:
        """Says how many tokens deep the next draft is wanted at most; strategies to which a token costs something obey."""

    def details(self, state: Any) -> Mapping[str, Any]:
        """What the report is to say of the call besides its figures: JSON-safe, ``report.details``. Asked once, at the end."""
        return {}

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={v!r}" for k, v in self.settings.model_dump().items())
        return f"{type(self).__name__}({shown})"


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
                first = error
            else:
                first.add_note(f"decoders: finish of {strategy.name!r} failed as well: {error!r}")
    if first is not None and cause is None:
        raise first
