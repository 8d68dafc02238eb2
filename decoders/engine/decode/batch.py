"""Rows that are decoded together: the requests they belong to, and what a step does with their drafts.

Between two steps rows join and leave. A :class:`~decoders.engine.decode.proposer.Proposer` proposes their drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.devices import moved_together
from ...errors import InputError
from ...strategy import Draft, HostRows, PromptChunk
from ...tree import TreeTensors
from ..model.blocks import Blocks, LeadingText, NodeBlock, PromptPiece
from ..model.buckets import round_up, row_bucket
from ..model.cache import CacheBuffers
from ..model.invariance import branch_length
from ..model.target import ForwardResult, Target
from .core import Core, StepOutput
from .criteria import Outcome
from .engine import Engine
from .grammar.device_guide import guide_of
from .grammar.guide import Guide
from .grammar.host_guide import HostGuide
from .request import Request, RequestOutput, empty_report
from .rows import Rows, check_tree, raise_faults
from .rules import rule_of
from .session import Session
from .verify import NOTHING_LEFT


class Batch:
    """Rows that are decoded together. What belongs to one request is in its :class:`RequestOutput`.

    A call of ``generate`` has a batch of its own (:mod:`~decoders.engine.decode.call`). In a scheduler's
    (:mod:`~decoders.engine.decode.lane`) requests of one row join and leave.

    Attributes:
        request: what the members have in common; its prompts are the rows' texts.
        members: the requests and the first row of each, in the order of rows; every row is a member's.
        capacity: greatest number of rows.
        shared: whether requests join and leave; then errors and reports are per request.
        width: rows of a step. Where sizes are static, some may be padding, which counts as ended.
        verifier: decides what is accepted; None: the built-in rule does.
        report: of all steps.
        session: holds the rows' tokens, keys and values.
        longest: most tokens that a row can have, prompt included.
        noise_keys: ``[B]`` int64, the noise key of each row.
        guide: tracks the rows' positions in their grammars; None where no row has one.
        core: forward, verification and commit of a block.
        pending: committed tokens that the next step runs once more in front of the root.
        prompt_left: number of pending tokens that are the end of the prompts and not prefilled yet.
        where: the current phase, for notes on errors.
        next_piece: returns the piece of a waiting prompt that the next step reads in its own pass (chunked prefill); None for none.
        root: ``[B, H]``, the embedding of each row's last position before the first step, if that position has no token id.
        may_err: whether the device may hold faults of hooks (:meth:`raise_faults`).

    Args:
        request: the first or only one.
        capacity: most rows where requests join and leave; None for one call.
    """

    session: Session
    longest: int
    noise_keys: Tensor
    core: Core

    def __init__(self, engine: Engine, request: Request, capacity: int | None = None) -> None:
        self.engine, self.request = engine, request
        self.forward_pass = engine.forward_pass_for(request.strategy)
        self.width = row_bucket(len(request.prompts), self.target.static)
        self.shared, self.capacity = capacity is not None, self.width if capacity is None else capacity
        chosen = request.verifier
        # In greedy decoding every exact verifier keeps the draft tokens that match the target's.
        built_in = chosen.coupled or (chosen.exact and not request.plan.sample)
        self.verifier = None if built_in else chosen
        self.report = empty_report(request, self.target)
        self.members: list[tuple[RequestOutput, int]] = []
        self.guide: Guide | None = None
        self.pending = self.prompt_left = 0
        self.where = "while the prompt was read"
        self.next_piece: Callable[[], PromptPiece] | None = None
        self.may_err = self.verifier is not None
        self.root = request.given.last if request.given is not None else None
        if self.root is not None:  # zeros for padding rows
            self.root = F.pad(self.root, (0, 0, 0, self.width - len(self.root)))

    @property
    def target(self) -> Target:
        return self.forward_pass.target

    @property
    def rows(self) -> Rows:
        return self.session.rows

    @property
    def blocks(self) -> Blocks:
        """The sizes of the rows' blocks."""
        return self.session.blocks

    @property
    def row_count(self) -> int:
        """Rows of requests; padding rows are not counted."""
        return sum(member.rows for member, _ in self.members)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row."""
        return [length for member, _ in self.members for length in member.lengths]

    @property
    def finished(self) -> list[bool]:
        return [ended for member, _ in self.members for ended in member.finished]

    def known(self, outcome: Outcome | None = None) -> HostRows:
        """The rows as lists, without reading the device. outcome: a step that is not in the members' outputs yet."""
        count = self.row_count
        padding = self.width - count
        new = [[] for _ in range(count)] if outcome is None else outcome.written
        ended = self.finished if outcome is None else [bool(end) for end in outcome.ended]
        rows = [(member, row) for member, _ in self.members for row in range(member.rows)]
        begins = [member.lengths[row] for member, row in rows]
        lengths = [begin + len(tokens) for begin, tokens in zip(begins, new, strict=True)]
        prompts = [len(member.request.prompts[row]) for member, row in rows]

        def tokens_from(first: int) -> list[list[int]]:
            # The members' outputs may have grown since, by `new` and by later steps.
            texts = [member.tokens_from(row, first) for member, row in rows]
            own = [
                (text + tokens[max(first - begin, 0) :])[: max(begin + len(tokens) - first, 0)]
                for text, tokens, begin in zip(texts, new, begins, strict=True)
            ]
            return own + [[0][first:] for _ in range(padding)]

        return HostRows(lengths + [1] * padding, prompts + [1] * padding, ended + [True] * padding, tokens_from)

    @property
    def culprit(self) -> str:
        """The strategy as messages name it."""
        strategy = self.request.strategy
        return f"strategy {strategy.name!r} ({self.request.origin or type(strategy).__module__})"

    def arrange(
        self, request: Request, members: list[tuple[RequestOutput, int]], sources: Sequence[int], *, same: bool
    ) -> None:  # fmt: skip
        """Takes `members` as the rows, whose tokens, keys and values are in the session.

        Args:
            request: what the members have in common.
            sources: the former index of each row, -1 for a new row.
            same: whether the rows before were decoded by the same plan.
        """
        self.request, self.members[:], self.width = request, members, len(sources)
        self.longest = max(
            len(prompt) + member.request.new_tokens for member, _ in members for prompt in member.request.prompts
        )
        self.noise_keys = self.rows.sampling.keys.clone()
        self.guide = self._guide(sources)
        if not same:
            # A strategy may keep what it is shown, and the next replay would overwrite that.
            copy = request.strategy.observes
            rule = rule_of(self.forward_pass, request, self.verifier, self.members, self.shared)
            self.core = Core.of(self.forward_pass, request.plan, rule, self.session.recordings, copy=copy)
        self.fit_blocks()

    def _guide(self, sources: Sequence[int]) -> Guide | None:
        """The guide of the rows; rows that stay keep their positions."""
        request, target = self.request, self.target
        if not request.plan.masked:
            return None
        grammars = [*request.grammars, *[None] * (self.width - len(request.grammars))]
        stays = any(source >= 0 and grammar is not None for source, grammar in zip(sources, grammars, strict=True))
        if isinstance(self.guide, HostGuide) and stays:
            return self.guide.rebatch(sources, grammars)
        if self.shared:
            return HostGuide.of(grammars, target.vocab_size, target.device, shared=True)
        return guide_of(grammars, target.vocab_size, target.device, self.compiler(self.engine), target.static)

    def fit_blocks(self) -> None:
        """Sets how blocks are padded, by the tier of the next pass. Node budgets depend on it, so it comes before `start`."""
        self.forward_pass.tiers.fit(self.blocks, self.row_count)

    def block_of(self, draft: Draft) -> NodeBlock:
        """The draft, checked and padded to a block."""
        draft_tokens, tree = self.blocks.of(draft, self.request.strategy.name)
        self.target.ranks.check_draft(draft, self.lengths)
        if isinstance(draft.topology, TreeTensors):
            waits = draft.on_host or not self.target.static
            self.may_err = self.may_err or not waits
            check_tree(draft.topology, self.rows, self.culprit, wait=waits)
        # Recorded steps get all their room at once, because the host does not read lengths between replays.
        end = (self.longest if self.target.static else max(self.lengths)) + draft_tokens.shape[1] + 1
        self.session.reserve(end)
        self.report.nodes = max(self.report.nodes, draft_tokens.shape[1] + 1)
        text = LeadingText(self.pending, max(self.lengths) - 1 - self.pending) if self.pending else LeadingText()
        self.pending = 0
        piece = self.next_piece() if self.next_piece is not None else None
        root, self.root = self.root, None
        return NodeBlock(draft_tokens, tree, self.session.view(end)[0], text=text, piece=piece, root=root)

    def mask(self, draft: Draft, block: NodeBlock) -> NodeBlock:
        """`block` with the grammars' masks after each node, and without the draft tokens that they forbid."""
        self.where = "forward pass and verification"
        if self.guide is None:
            return block
        tokens = block.draft_tokens
        if on_host := (draft.on_host or not draft.tokens.shape[1]) and not self.guide.on_device:
            drafted = draft.tokens if draft.on_host else draft.tokens.new_empty(self.width, 0, device="cpu")
            tokens = F.pad(drafted, (0, tokens.shape[1] - drafted.shape[1]), value=-1)
        legal, masks = self.guide.block(tokens, block.shape_of(draft, self.guide.on_device), draft.levels)
        if on_host:  # a matcher on the host has already been shown the draft, and has read nothing from the device
            legal = block.draft_tokens if legal is tokens else moved_together([legal], self.target.device)[0]
        # A verifier of the draft's distribution must judge every token drawn from it: leaving one out would bias the output.
        return replace(block, draft_tokens=legal if self.verifier is None else block.draft_tokens, masks=masks)

    def read(self, draft: Draft, block: NodeBlock, out: StepOutput) -> Outcome:
        """What was accepted. This is the one place where the host waits for the device."""
        self.raise_faults(wait=False)
        traced = [(member, first) for member, first in self.members if member.request.runtime.trace]
        summary, new, paths = out.read(self.session.lists, paths=draft.drafters is not None or bool(traced))
        outcome = Outcome.of(summary, new, self.row_count)
        self.check_drawn(outcome, out)
        if draft.drafters is not None:
            outcome.drafters = [
                [draft.drafters[row][node - 1] for node in paths[row][1 : count + 1]]
                for row, count in enumerate(outcome.accepted)
            ]
        if traced:
            tokens = block.draft_tokens[:, : draft.tokens.shape[1]].tolist()  # without the tokens that grammars forbid
            for member, first in traced:
                member.trace(draft, tokens, paths, outcome, first)
        return outcome

    def check_drawn(self, outcome: Outcome, out: StepOutput | None = None) -> None:
        """Raises InputError if processors left no token to draw; a request that shares steps ends without this step's tokens.

        Args:
            out: the step whose rows are cut then; None for a call of its own.
        """
        for member, first in self.members if self.request.plan.reads_text else ():
            for row, tokens in enumerate(outcome.part(first, member.rows).written):
                if NOTHING_LEFT not in tokens:
                    continue
                with self._callback_of(member):
                    count = member.lengths[row] + tokens.index(NOTHING_LEFT)
                    names = ", ".join(dict.fromkeys(self.request.plan.operations))
                    raise InputError(
                        f"nothing can be drawn behind {count} tokens: the logits processors left no token ({names})"
                    )
                if out is not None:
                    self._cut(first + row, outcome, out)

    def _cut(self, row: int, outcome: Outcome, out: StepOutput) -> None:
        """Ends a row without the tokens of this step."""
        self.rows.length[row] -= outcome.emitted[row]
        self.rows.finished[row] = True
        outcome.emitted[row], outcome.accepted[row], outcome.ended[row] = 0, 0, 1
        out.summary[:, row] = torch.tensor([0, 0, outcome.drafted[row], 1], device=out.summary.device)

    def stop(self, out: StepOutput, outcome: Outcome) -> None:
        """Cuts a step's tokens where a stopping criterion of a request says so."""
        for member, first in self.members:
            if member.criteria is not None:
                self.where = "stopping criteria"
                with self._callback_of(member):
                    part, end = outcome.part(first, member.rows), first + member.rows
                    member.criteria.apply(part, out.of_rows(first, end), self.rows.of_rows(first, end), member.finished)
                    outcome.put(first, part)

    def settle(self, out: StepOutput, outcome: Outcome | None) -> None:
        """Moves recurrent states, which cannot be cut back, and grammars on to what was committed."""
        if (states := self.rows.buffers.states) is not None:
            states.commit(out.path, out.summary[0], self.rows.length)
        if self.guide is not None:
            self.guide.commit(out, self.rows.finished, outcome)

    def deliver(self, out: StepOutput | None, outcome: Outcome) -> None:
        """Adds a step to the outputs of the requests, and calls their streamers and observers.

        Args:
            out: needed for logits and scores only.
        """
        self.where = "streamer"
        if self.shared:
            self.report.steps += 1  # otherwise the only request counts its own steps
        for member, first in self.members:
            new = member.book(outcome.part(first, member.rows), out, first)
            with self._callback_of(member):
                member.tell(new)
        if out is not None and self.target.multiple > 1:
            self.pending = self.rerun(branch_length(out.path, outcome.emitted))

    @contextmanager
    def _callback_of(self, member: RequestOutput) -> Iterator[None]:
        """Where requests share steps, an exception of a callback ends only the request that the callback belongs to."""
        try:
            yield
        except Exception as error:
            if not self.shared:
                raise
            error.add_note(f"decoders: {self.where} of one request, after {member.report.steps} steps")
            member.error = member.error or error

    def raise_faults(self, wait: bool) -> None:
        """Raises the faults of hooks that the device has noted. If `wait` is false, faults are read only on a CPU."""
        if not self.may_err or (self.target.static and not wait):
            return
        raise_faults(self.rows, self.culprit, f"verifier {self.report.verifier!r}")

    def read_rest(self) -> None:
        """Prefills the tokens that were left to the first step, because a draft model shares the target's slots and needs them now."""
        if not self.prompt_left:
            return
        starts = [max(length - 1 - self.prompt_left, 0) for length in self.lengths]
        self.session.read_rows(0, starts, 0, self.prompt_left, self.prefill)
        self.pending = self.prompt_left = 0

    def rerun(self, count: int) -> int:
        """How many committed tokens the next step runs once more so that it runs the last `count`: rounded up to a multiple, and
        without tokens whose keys and values the loop cannot compute.
        """
        multiple, reaches = self.target.multiple, [n for member, _ in self.members for n in member.request.reach]
        tokens = round_up(count, multiple)
        if not any(reaches) or not count:
            return tokens
        room = min(length - 1 - reach for length, reach in zip(self.lengths, reaches, strict=True))
        return min(tokens, room - room % multiple)

    @property
    def prefill(self) -> Callable[..., None]:
        """Reads a chunk of the prompts, see :meth:`~decoders.engine.model.compiled.forward_pass.ForwardPass.prefill`."""
        return partial(self.forward_pass.prefill, recordings=self.session.recordings)

    def read_chunk(
        self, lengths: Tensor, tokens: Tensor, begin: Tensor, buffers: CacheBuffers, view: Tensor, latest: int, *, logits: bool
    ) -> PromptChunk:  # fmt: skip
        """Runs a chunk of texts for a strategy that reads prompts.

        Args:
            lengths: ``[B]``, of the texts.
            tokens, begin, buffers, view, latest: as of :meth:`Target.features`.
            logits: whether the chunk has logits.
        """
        positions = begin[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        valid = positions < lengths[:, None] - 1
        result = self.forward_pass.features(
            tokens, begin, buffers, view, latest, logits=logits, valid=valid, recordings=self.session.recordings
        )
        return chunk_of(result, tokens, begin, lengths, logits=logits)

    def compiler(self, engine: Engine) -> Callable[[Callable], Callable]:
        """``Context.compile`` for strategies that draft for the model of `engine`."""
        return partial(engine.function, compile=self.request.runtime.compile, report=self.report)


def chunk_of(result: ForwardResult, tokens: Tensor, begin: Tensor, lengths: Tensor, *, logits: bool) -> PromptChunk:
    """A stretch of texts with the results of a pass over it.

    Args:
        tokens: ``[B, N]``, from slots `begin` ``[B]`` on.
        lengths: ``[B]``, of the texts.
    """
    positions = begin[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    valid = positions < lengths[:, None] - 1
    return PromptChunk(tokens, positions, valid, result.hidden, result.layers, result.logits if logits else None)
