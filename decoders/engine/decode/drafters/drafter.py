"""A draft model during a call. Its rows hold the committed tokens, followed by the tokens that it has drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common.host_reads import host_reads
from ....drafters import Advance, Drafter, Expansion
from ....errors import UnsupportedError
from ....report import Stage
from ....report.surroundings import Stopwatch
from ....sampling.processors import Masks
from ....strategy import Context, Sequences, Step
from ....tree import TreeTensors
from ...model.blocks import Blocks
from ...model.buckets import row_bucket, slots_for
from ...model.static_inputs import SameObject
from ..batch import Batch
from ..grammar.guide import Guide
from ..prefix_cache import KeptText
from ..rows import Rows
from ..session import Session
from ..sessions import reorder, take_over
from .core import DraftCore
from .counts import DraftCounts
from .shared_slots import SharedSlots

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelDrafter(Drafter):
    """A draft model with rows and KV cache in a session of its own engine. A round is the model's work from `begin` to `observe`.

    Args:
        batch: the target's batch.
        above: the model that verifies this model's drafts: the target's batch, or another draft model.
        stack: when the strategy ends, closes everything that this drafter has opened.
        context: the context of the strategy that drafts with this model.
        model: the draft model, or a path to load it from.
        ahead: greatest number of nodes that a round writes after the committed tokens, and of tokens that :meth:`advance` adds.
        children: see :class:`DraftCore`.
        seldom: whether the strategy might never use this model. If so, the first round prefills the prompts, not ``__init__``.

    Attributes:
        proposed: number of nodes, without padding, of the draft that is verified next; None before the first draft. Set by the caller
            of the strategy that drafts with this model.
        reach: greatest number of committed tokens that a row may have now.
        counts: pending tokens, passes, tokens and seconds.
        inner: the draft models of the strategy that drafts for this model, if any (:mod:`.staged`).
    """

    def __init__(
        self, batch: Batch, above: Batch | ModelDrafter, stack: ExitStack, context: Context, model: PreTrainedModel | str, ahead: int,
        children: int = 1, seldom: bool = False,
    ) -> None:  # fmt: skip
        self.batch, self.above, self.stack, self.ahead = batch, above, stack, ahead
        self.engine = batch.request.models.draft_models.engine_of(model)
        target = self.engine.target
        if target.recurrent:
            raise UnsupportedError(
                f"{type(target.model).__name__} keeps recurrent states, which a draft model would have to take back whenever a "
                "draft token is rejected: draft with a model that has attention only, or with a strategy without a draft model"
            )
        # Verifiers other than the built-in coupled rule need the distribution that draft tokens were drawn from.
        plan = replace(batch.request.plan, keep_scores=batch.verifier is not None and batch.request.plan.sample)
        self.core = DraftCore(self.engine.forward_pass, plan, context.vocab_size, children)
        self.vocab_size, self.children = self.core.vocab, self.core.children
        self.mask_token = getattr(target.model.config, "pard_token", None)
        self._tiers = self.engine.forward_pass.tiers.steady_tiers(batch.request.runtime.compile)
        slots = (above.longest if target.static else context.slots) + 2 * ahead
        same_cache = target.layout == batch.engine.target.layout[: len(target.layout)]
        shared = context.level == 0 and batch.engine.is_part(model) and same_cache
        self._unread: tuple[list[int], list[int]] | None = (
            None  # before the prefill: lengths of the prompts, and numbers of reusable tokens
        )
        self.session: Session
        if shared:
            batch.read_rest()
            self.session = SharedSlots.of(target, batch.session)
            if target.static:
                self.session.reserve(above.longest + 2 * ahead)
        elif not batch.shared:  # all rows begin now: the session has room for the whole call
            request = batch.request
            if any(bool((prompt < 0).any()) for prompt in request.prompts):
                raise UnsupportedError(
                    "a draft model reads the prompt itself, and a part of this call's prompt has no token ids: pass the whole text as "
                    "input_ids, or take a strategy without a draft model"
                )
            self.session, reusable, lengths = stack.enter_context(
                self.engine.sessions.open(
                    request.prompts, ahead, batch.rows.sampling, slots, request.runtime.reuse, shared=True
                )
            )
            self._unread = lengths, reusable
        else:
            recordings = self.engine.sessions.recordings()
            capacity = row_bucket(batch.capacity, target.static)
            self.session = Session(target, capacity, slots_for(slots, target.static), recordings)
            self._seat(context, [-1] * len(batch.request.prompts))
        self._settle()
        name = model if isinstance(model, str) else model.config.name_or_path or type(model).__name__
        self.counts = DraftCounts(name, context.level + 1, target.static, target.device, shared)
        self._deepest = 0
        self.proposed: int | None = None
        self.inner: list[ModelDrafter] = []
        if not seldom:
            self._read_prompts()

    def _read_prompts(self) -> None:
        """Prefills the prompts, unless this was done before."""
        if self._unread is None:
            return
        (lengths, reusable), request, self._unread = self._unread, self.batch.request, None
        with self._running():
            self.session.prefill(lengths, reusable, request.runtime.prefill_chunk, self._prefill)
        # Slots after the prompts may hold rejected nodes, so only the prompts are kept for later calls.
        self.stack.callback(self.session.keep, [len(prompt) - 1 for prompt in request.prompts])

    def rebatch(self, rows: Sequence[int], context: Context) -> None:
        """Follows the batch after rows have joined or left: reorders this model's rows, and prefills the text of each new row.

        Args:
            rows: the former index of each row, -1 for a new row.
            context: the strategy's new context.
        """
        self._seat(context, rows)
        self._settle()

    def _settle(self) -> None:
        """Makes a new grammar guide, and stores the row lengths at which the next round begins."""
        self.guide: Guide | None = self.above.guide.ahead() if self.above.guide is not None else None
        self._begun = self.rows.length.clone()
        self.reach = max(map(len, self.batch.request.prompts))
        self._drafting = False

    def _seat(self, context: Context, rows: Sequence[int]) -> None:
        """Puts this model's rows in the order of the target's rows, and prefills new rows. rows: see :meth:`rebatch`."""
        session, sequences = self.session, context.sequences
        if isinstance(session, SharedSlots):
            session.restart()
            return
        assert sequences is not None
        request = self.batch.request
        finished = sequences.finished.tolist()
        reorder(session, rows, [len(text) for text in request.prompts])
        with self._running():
            for place, (row, text) in enumerate(zip(rows, request.prompts, strict=True)):
                if row >= 0 or finished[place]:
                    continue
                if self.core.padding:  # token ids that only the target has would be out of range
                    text = text.clamp(max=self.vocab_size - 1)
                session.put(place, text)
                prompt = KeptText(text.cpu(), salt=request.salt_of(place))
                held = [(session, other, kept) for other, kept in enumerate(session.texts)]
                reused = take_over(session, {place: prompt}, held) if request.runtime.reuse else [0]
                session.prefill([len(text)], reused, request.runtime.prefill_chunk, self._prefill, first=place)
                # Slots after the prompt may later hold rejected nodes, so only the prompt is kept.
                session.texts[place] = session.kept(place, prompt.tokens[:-1], prompt)
        lengths = [len(text) for text in request.prompts]
        limits = [length + self.ahead for length in lengths]
        session.arrange(lengths, sequences.prompt_length.tolist(), limits, finished, self.batch.rows.sampling)

    @property
    def _prefill(self) -> Callable[..., None]:
        return partial(self.engine.forward_pass.prefill, recordings=self.session.recordings)

    @property
    def rows(self) -> Rows:
        return self.session.rows

    @property
    def blocks(self) -> Blocks:
        return self.session.blocks

    @property
    def longest(self) -> int:
        """Greatest number of tokens of a row, including a round's draft."""
        return self.above.longest + self.ahead

    @property
    def passes(self) -> int:
        return self.counts.passes

    @property
    def chain(self) -> list[ModelDrafter]:
        """This draft model, the draft models that draft for it, and so on."""
        return [self, *(drafter for inner in self.inner for drafter in inner.chain)]

    @property
    def on_device(self) -> bool:
        """Whether a round never waits for the device, so that it can be recorded."""
        return (self.guide is None or self.guide.on_device) and all(drafter.on_device for drafter in self.inner)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV caches of the :attr:`chain`; slots shared with the target are not counted."""
        return sum(each.rows.buffers.nbytes for each in self.chain if not isinstance(each.session, SharedSlots))

    @property
    def length(self) -> Tensor:
        return self.rows.length

    def begin(self, sequences: Sequences) -> None:
        self._read_prompts()
        self.reach = sequences.tokens.shape[1]
        if isinstance(self.session, SharedSlots):
            self.session.follow()
            if host_reads(sequences.length):  # on a CPU lengths can be read: use only the slots of the rows' tokens
                self.reach = int(sequences.length.max())
        if self.engine.target.static:  # the target's rows may have more slots than this model's rows
            self.reach = min(self.reach, self.rows.slots)
        else:
            self.session.reserve(self.reach)  # the target's rows may have got more slots for a large block
        rows = self.rows
        tokens = sequences.tokens[:, : self.reach]
        if self.core.padding:  # token ids that only the target has would be out of range
            tokens = tokens.clamp(max=self.vocab_size - 1)
        rows.tokens[:, : self.reach].copy_(tokens)
        rows.length.copy_(sequences.length)
        torch.add(sequences.length, self.ahead, out=rows.limit)
        rows.finished.copy_(sequences.finished)
        self._begun.copy_(sequences.length)
        self._drafting = True
        if self.guide is not None:
            self.guide.follow()

    def extend(self) -> Expansion:
        expansion = self.run("extend", self.covering(1)[0], self.counts.range(self.reach), *self._masks())
        if self.guide is not None:
            self.guide.append(expansion.tokens[:, 0, 0])
        return expansion

    def advance(self) -> Advance:
        raise TypeError("advance() needs a drafter that was opened with `stage`: call extend()")

    def root(self) -> Expansion:
        return self.run("root", self.covering(1)[0], self.counts.range(self.reach), *self._masks())

    def expand(self, nodes: Tensor, tree: TreeTensors) -> Expansion:
        count = nodes.shape[1]
        if count == 1:  # a pass over one node would need another compiled graph
            nodes, tree = torch.cat([nodes, self.blocks.no_draft_token[:, :1]], dim=1), tree.padded(len(tree) + 1)
        expansion = self.run("expand", self.covering(len(tree))[0], nodes, tree, *self._expanded(nodes, tree))
        if count == nodes.shape[1]:
            return expansion
        scores = expansion.scores[:, :count] if expansion.scores is not None else None
        return Expansion(expansion.tokens[:, :count], expansion.weights[:, :count], scores)

    def drafted(self, count: int) -> Tensor:
        slots = self._begun[:, None] + torch.arange(count, device=self._begun.device)
        tokens = self.rows.tokens.gather(1, slots)
        return torch.where(slots < self.length[:, None], tokens, -1)

    def observe(self, step: Step, own_nodes: int, displaced: int = 0) -> None:
        if not self._drafting:  # this model did not draft for the step: all its new tokens are pending
            self.fall_behind(int(step.emitted.max()) if host_reads(step.emitted) else step.nodes.shape[1])
            return
        self._drafting = False
        own_nodes = own_nodes if step.own_nodes is None else step.own_nodes
        # If the block has more or fewer nodes than this model's draft, the draft was merged with others or cut by a node budget. Then
        # accepted nodes are in other slots.
        if self.proposed is not None:
            others = self.proposed != own_nodes
        else:
            others = step.nodes.shape[1] != self.above.blocks.size(own_nodes)
        behind = step.nodes.shape[1] - 1 if others else displaced
        self.counts.pending = self.counts.level + behind
        for drafter in self.inner:
            drafter.fall_behind(behind)

    def fall_behind(self, tokens: int) -> None:
        """Counts further pending tokens for each model of the :attr:`chain`. tokens: number of committed tokens not drafted by them."""
        for drafter in self.chain:
            drafter.counts.pending += tokens

    @property
    def room(self) -> int:
        """The greatest number of committed tokens that leaves enough slots in a row for a round with the largest tree so far."""
        own = self.rows.slots - self.ahead - self._deepest
        return min([own, *(drafter.room - self.ahead for drafter in self.inner)])

    def static_parts(self) -> dict[str, Any]:
        """The objects that a recorded round reads and writes besides the session (:mod:`~decoders.engine.model.static_inputs`)."""
        return dict(
            session=SameObject(self.session), slots=self.rows.slots, core=(self.core.plan, self.core.key("root")), ahead=self.ahead,
            level=self.counts.level, begun=self._begun, tally=self.counts.tally, guide=self.guide, inner=self.inner, stage=None,
            model=self.engine.target.model,
        )  # fmt: skip

    @property
    def tiers(self) -> tuple:
        """Which parts of a round run compiled now. A recorded step is replayed only while these tiers stay the same."""
        with self._running():
            own = self.engine.forward_pass.tiers.tier(len(self.rows.length), self.core.plan)
        return own, self.engine.functions_ready, *(drafter.tiers for drafter in self.inner)

    def book_replay(self, seconds: float) -> None:
        """Adds the seconds of a replayed step to the time that decides when this model is worth compiling."""
        with self._running():
            self.engine.forward_pass.tiers.book_replay(seconds, len(self.rows.length))

    def report(self) -> Stage:
        """Returns the report on this model's part in the call. Waits for the device, so call it after the last step."""
        weights = self.engine.precision.weights or "keep"
        return self.counts.report(weights, [drafter.report() for drafter in self.inner])

    @property
    def outdated(self) -> bool:
        """Whether further parts of this model, or of a model that drafts for it, have been compiled since the call began."""
        own = self.engine.forward_pass.tiers.outdated(self._tiers, self.batch.request.runtime.compile, self.core.plan)
        return own or any(drafter.outdated for drafter in self.inner)

    def _running(self) -> AbstractContextManager:
        """A context with this call's rotary table, tier and report, because other calls use the model with other values."""
        target = self.engine.target
        target.use_rope_table(target.rope_table_of(max(map(len, self.batch.request.prompts))))
        return self.engine.forward_pass.tiers.during(self.batch.request.runtime.compile, self.batch.report, self._tiers)

    def run(self, method: str, view: Tensor, *given: Any) -> Any:
        """Calls `method` of :class:`DraftCore` with the rows, `view` and `given`, or replays a recording of it for these sizes."""
        core, rows, forward_pass = self.core, self.rows, self.engine.forward_pass
        run = partial(getattr(core, method), rows, view)
        key = method, core.key(method), rows.place, len(view)
        stopwatch = Stopwatch(self.batch.report.timings)
        with self._running():
            result = forward_pass.replayed(
                self.session.recordings, key, run, given, len(rows.length), core.plan, copy=True
            )
        self.counts.forward_seconds += stopwatch.next()
        self.counts.passes += 1
        self.counts.pending = 0
        return result

    def _masks(self) -> tuple[Masks, ...]:
        """Masks of the tokens that may follow the rows' last tokens; empty without grammars."""
        return (self.guide.end(),) if self.guide is not None else ()

    def _expanded(self, nodes: Tensor, tree: TreeTensors) -> tuple[Masks, ...]:
        """Masks of the tokens that may follow `nodes`, the last nodes of `tree`; empty without grammars."""
        if self.guide is None:
            return ()
        before = len(tree) - nodes.shape[1]
        return (self.guide.expand(nodes, tree.parents[:, before:], before),)

    def covering(self, nodes: int) -> tuple[Tensor, Sequences]:
        """Reserves slots for this round's drafted tokens and a block of `nodes` nodes after them; returns :meth:`Session.view`."""
        end = self.reach + self.ahead + nodes
        if self.engine.target.static:
            end = self.longest + nodes
            self._deepest = max(self._deepest, nodes)
        self.session.reserve(end)
        return self.session.view(end)
