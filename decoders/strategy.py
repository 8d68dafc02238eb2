"""The contract of a decoding strategy: propose tokens, observe what became of them. Everything else is the loop's.

A strategy never runs the target, never samples, never touches the cache. Its whole effect on the output is *when* a
token is found, not *which*: what it proposes is verified against the target's own choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .context import Context, Sequences, no_costs, no_memory
from .errors import DraftError
from .settings import Configured
from .tree import MAX_NODES, NO_PARENT, Topology, TreeTensors, described, parents_by_row

__all__ = [
    "Context", "Draft", "PromptChunk", "Sequences", "Step", "Strategy", "check_draft", "finish_all", "finishing", "no_costs",
    "no_memory",
]  # fmt: skip


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
        """Upper bound of the depth; the grammar guide on the device walks this many levels."""
        if isinstance(self.topology, Topology):
            return self.topology.max_depth
        return len(self.topology) - 1 if self.depth is None else self.depth

    @property
    def parents(self) -> Sequence[Sequence[int]]:
        """Of every row the parent of each node; -1 for the root and for nodes that are never accepted. Waits for the device."""
        return parents_by_row(self.topology, len(self.tokens))

    @property
    def has_draft_tokens_only(self) -> bool:
        """Whether its nodes may be left out: none is run for what it gives, whatever becomes of it."""
        tree = self.topology
        return isinstance(tree, TreeTensors) or not (tree.extra_visible or NO_PARENT in tree.parents[1:])

    def head(self, count: int) -> Draft:
        """The first `count` draft tokens of every row: parents come before their children, so what is left are trees."""
        if count >= self.tokens.shape[1]:
            return self
        return Draft(
            self.tokens[:, :count], self.topology.head(count + 1),
            scores=self.scores[:, :count] if self.scores is not None else None,
            depth=min(self.levels, count), grades=self.grades[:, :count] if self.grades is not None else None,
        )  # fmt: skip

    @staticmethod
    def chain(tokens: Tensor, scores: Tensor | None = None) -> Draft:
        """One continuation per row: ``tokens`` is ``[B, K]``.

        Raises:
            DraftError: `tokens` is something else.
        """
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            raise DraftError(f"a chain is made of a tensor [rows, length], not {described(tokens)}")
        return Draft(tokens, Topology.chain(tokens.shape[1]), scores)

    @staticmethod
    def branches(tokens: Tensor) -> Draft:
        """Several continuations per row, all from the root: ``tokens`` is ``[B, branches, K]``.

        Raises:
            DraftError: `tokens` is something else.
        """
        if not isinstance(tokens, Tensor) or tokens.dim() != 3:
            raise DraftError(f"branches are made of a tensor [rows, branches, length], not {described(tokens)}")
        return Draft(tokens.flatten(1), Topology.branches(tokens.shape[1], tokens.shape[2]))

    @staticmethod
    def nothing(rows: int, device: torch.device) -> Draft:
        """No draft token at all: plain decoding."""
        return Draft(torch.empty(rows, 0, dtype=torch.int64, device=device), Topology.chain(0))

    def check(self, rows: int) -> None:
        """Raises DraftError if shapes or dtype break the contract (values are never trusted anyway)."""
        if not isinstance(self.tokens, Tensor):
            raise DraftError(f"draft tokens must be int64 [{rows}, N-1], not {described(self.tokens)}")
        if self.tokens.dtype != torch.int64 or self.tokens.dim() != 2 or self.tokens.shape[0] != rows:
            raise DraftError(
                f"draft tokens must be int64 [{rows}, N-1], not {self.tokens.dtype} {list(self.tokens.shape)}"
            )
        if self.tokens.shape[1] + 1 > MAX_NODES:
            raise DraftError(f"a draft may have {MAX_NODES - 1} tokens per row at most, not {self.tokens.shape[1]}")
        if isinstance(self.topology, TreeTensors):
            self.topology.check(rows)
        elif not isinstance(self.topology, Topology):
            raise DraftError(f"a draft's topology is a Topology or TreeTensors, not {described(self.topology)}")
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
                f"draft grades must be int64 {list(self.tokens.shape)}, as the tokens, not {described(self.grades)}"
            )
        if self.scores is not None:
            fits = (
                isinstance(self.scores, Tensor)
                and self.scores.dim() == 3
                and self.scores.shape[:2] == self.tokens.shape
            )
            if not fits or self.scores.dtype != torch.float32:
                wanted = ", ".join(map(str, (*self.tokens.shape, "V")))
                raise DraftError(f"draft scores must be float32 [{wanted}], not {described(self.scores)}")


def check_draft(draft: object, proposer: str, rows: int) -> None:
    """Raises DraftError if what `proposer` proposed is no draft for so many rows; values are never trusted anyway."""
    if not isinstance(draft, Draft):
        raise DraftError(f"propose of {proposer!r} must return a Draft, not {type(draft).__name__}")
    try:
        draft.check(rows)
    except DraftError as error:
        raise DraftError(f"propose of {proposer!r}: {error}") from None


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
        own_nodes: None: the block is your draft, or begins with it. n: only its first n nodes, root included, are your draft,
            in its order. 0: none can be told apart.
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
    """A stretch of the rows' prompts that the target has just read.

    Together the chunks of a call hold every prompt token but each row's last, which is node 0 of the first step; a call whose
    prompts have one token each has none. Where requests come and go (:meth:`Strategy.rebatch`) a chunk is of the prompts of rows that
    are new. In rows that stay no token of it is valid, and all lie behind what they have committed.

    Attributes:
        tokens: ``[B, N]`` int64.
        positions: ``[B, N]`` int64, where in its row each of them is; one after the other in every row.
        valid: ``[B, N]`` bool, which of them are such tokens; the others lie behind their row's text and mean nothing.
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


class Strategy(Configured, ABC):
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
    """

    name: str
    summary: ClassVar[str] = ""
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
        own, plain = type(self), Strategy
        return (
            bool(self.hidden_layers) or own.layers_of is not plain.layers_of or own.layers_for is not plain.layers_for
        )

    def prefill(self, state: Any, chunk: PromptChunk) -> None:
        """Learns from a stretch of the prompts, in order, before the first :meth:`propose`; updates `state` in place.

        A strategy that overrides this is shown whole prompts: nothing is taken from earlier calls, and nothing is left to the
        first step. Behind :meth:`rebatch` it is shown those of the new rows.
        """

    def finish(self, state: Any) -> None:
        """The call is over, done or failed; comes once for every state that :meth:`start` has made."""

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
        forgets what was learnt. A strategy that overrides this keeps the state of rows that stay. Its draft models and modules
        stay open, and have been told: they hold what they held of each row, at its new place.

        Args:
            state: given up; it may be changed and returned.
            rows: ``[B]`` int64: which row of the batch before each row is, -1 for one that is new.
            context: of the rows as they are now, as :meth:`start` gets it.
        """
        return self.start(context)

    @property
    def rebatches(self) -> bool:
        """Whether :meth:`rebatch` keeps the state of rows that stay: where it is overridden.

        A strategy that is built of others asks them. One that reads prompts and keeps no rows would have to be shown all texts
        anew: it is given its requests one at a time.
        """
        return type(self).rebatch is not Strategy.rebatch

    def keeps_rows(self, state: Any) -> bool:
        """Whether it does with this state. If not, the loop ends it and starts anew, draft models included."""
        return self.rebatches

    def limit(self, state: Any, tokens: int) -> None:
        """Says how many tokens deep the next draft is wanted at most; strategies to which a token costs something obey."""

    @property
    def limits(self) -> bool:
        """Whether it drafts as deep as :meth:`limit` says, so that a token more costs time: where that is overridden."""
        return type(self).limit is not Strategy.limit

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
