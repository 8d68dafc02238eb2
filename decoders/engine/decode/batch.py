"""A batch: rows that are decoded together, the requests that they belong to, and the parts of a step that verify drafts.

Rows may join and leave between two steps. A :class:`~decoders.engine.decode.proposer.Proposer` proposes the drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.devices import has_64_bits, moved_together
from ...errors import InputError, amount
from ...strategy import Draft, HostRows
from ...tree import TreeTensors
from ..model.blocks import Blocks, LeadingText, NodeBlock, PromptPiece
from ..model.buckets import round_up, row_bucket
from ..model.invariance import branch_length
from ..model.target import Target
from .core import Core, StepOutput, core_of
from .engine import Engine
from .grammar.device_guide import DeviceGuide
from .grammar.guide import Guide
from .grammar.host_guide import HostGuide
from .hook_checks import check_tree, raise_faults
from .output import RequestOutput
from .request import Request, empty_report
from .rows import Rows
from .rules import rule_of
from .session import Session
from .verify import NOTHING_LEFT, Outcome


class Batch:
    """Rows that are decoded together. Each request's own output is in its :class:`RequestOutput`.

    A call of ``generate`` has its own batch (:mod:`~decoders.engine.decode.call`). In a scheduler's batch
    (:mod:`~decoders.engine.decode.lane`) requests with one row each join and leave.

    Attributes:
        request: one request that represents all requests of the batch: it has their common settings, and all rows' texts as prompts.
        members: per request, its output and the index of its first row, in the order of rows. Padding rows belong to no member.
        capacity: greatest number of rows that the batch can have.
        shared: whether requests join and leave. If so, errors and reports are per request.
        width: number of rows in a step. On devices that record steps (CUDA graphs), some rows may be padding. Padding rows are marked
            as ended.
        verifier: decides which draft tokens are accepted; None: the built-in rule.
        report: the report on all steps.
        session: holds the rows' tokens, keys and values.
        longest: greatest number of tokens that a row can have, prompt included.
        noise_keys: ``[B]`` int64, the key of each row's sampling noise.
        guide: tracks the rows' positions in their grammars; None if no row has a grammar.
        core: runs the forward pass over a block, verifies the block, and commits the accepted tokens.
        pending: number of tokens before the root (the last committed token) that the next step also runs: the end of the prompts, or
            tokens accepted on a tree's second or later branch, which must run again (:mod:`~decoders.engine.model.invariance`).
        prompt_left: how many of the pending tokens are prompt tokens that are not prefilled yet.
        where: the hook or part of a step that runs now, for notes on errors.
        next_piece: returns the piece of a waiting prompt that the next step's pass also prefills (chunked prefill); None for no piece.
        root: ``[B, H]``, for the first step: the caller's embeddings of the prompts' last positions; None if these have token ids.
        may_err: whether a check of trees or verifiers may have noted a fault on the device. If so, :meth:`raise_faults` looks it up.

    Args:
        request: the first or only request.
        capacity: greatest number of rows, if requests join and leave the batch; None for the batch of one call.
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
        # In greedy decoding every exact verifier accepts the same draft tokens as the built-in rule.
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
        if self.root is not None:  # padding rows get zeros
            self.root = F.pad(self.root, (0, 0, 0, self.width - len(self.root)))

    @property
    def target(self) -> Target:
        return self.forward_pass.target

    @property
    def rows(self) -> Rows:
        return self.session.rows

    @property
    def blocks(self) -> Blocks:
        """The object that turns drafts for these rows into blocks."""
        return self.session.blocks

    @property
    def row_count(self) -> int:
        """Number of rows without padding."""
        return sum(member.rows for member, _ in self.members)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of every row, prompt included."""
        return [length for member, _ in self.members for length in member.lengths]

    @property
    def finished(self) -> list[bool]:
        return [ended for member, _ in self.members for ended in member.finished]

    def known(self, outcome: Outcome | None = None) -> HostRows:
        """Returns the rows' lengths and tokens as lists, without reading from the device.

        outcome: the last step's outcome, if its tokens are not in the members' outputs yet.
        """
        count = self.row_count
        padding = self.width - count
        new = [[] for _ in range(count)] if outcome is None else outcome.written
        ended = self.finished if outcome is None else [bool(end) for end in outcome.ended]
        rows = [(member, row) for member, _ in self.members for row in range(member.rows)]
        begins = [member.lengths[row] for member, row in rows]
        lengths = [begin + len(tokens) for begin, tokens in zip(begins, new, strict=True)]
        prompts = [len(member.request.prompts[row]) for member, row in rows]

        def tokens_from(first: int) -> list[list[int]]:
            # When the strategy calls `tokens_from`, the members' outputs may already hold the tokens of `new` and of later steps.
            texts = [member.tokens_from(row, first) for member, row in rows]
            own = [
                (text + tokens[max(first - begin, 0) :])[: max(begin + len(tokens) - first, 0)]
                for text, tokens, begin in zip(texts, new, begins, strict=True)
            ]
            return own + [[0][first:] for _ in range(padding)]

        return HostRows(lengths + [1] * padding, prompts + [1] * padding, ended + [True] * padding, tokens_from)

    @property
    def culprit(self) -> str:
        """The strategy's name and origin, for error messages."""
        strategy = self.request.strategy
        return f"strategy {strategy.name!r} ({self.request.origin or type(strategy).__module__})"

    def arrange(
        self, request: Request, members: list[tuple[RequestOutput, int]], sources: Sequence[int], *, same: bool
    ) -> None:  # fmt: skip
        """Makes the rows of `members` the batch's rows. Their tokens, keys and values are already in the session.

        Args:
            request: see :attr:`request`.
            sources: the former index of each row, -1 for a new row.
            same: whether the former and the new rows have the same sampling plan. If so, :attr:`core` is kept.
        """
        self.request, self.members[:], self.width = request, members, len(sources)
        self.longest = max(
            len(prompt) + member.request.new_tokens for member, _ in members for prompt in member.request.prompts
        )
        self.noise_keys = self.rows.sampling.keys.clone()
        self.guide = self._guide(sources)
        if not same:
            # A strategy may keep the tensors that it observes. Without copies the next replay would overwrite these tensors.
            copy = request.strategy.observes
            rule = rule_of(self.forward_pass, request, self.verifier, self.members, self.shared)
            self.core = core_of(self.forward_pass, request.plan, rule, self.session.recordings, copy=copy)
        self.fit_blocks()

    def _guide(self, sources: Sequence[int]) -> Guide | None:
        """Returns the guide of the rows; None if no row has a grammar. Rows that stay in the batch keep their positions in grammars."""
        request, target = self.request, self.target
        if not request.plan.masked:
            return None
        grammars = [*request.grammars, *[None] * (self.width - len(request.grammars))]
        stays = any(source >= 0 and grammar is not None for source, grammar in zip(sources, grammars, strict=True))
        if isinstance(self.guide, HostGuide) and stays:
            return self.guide.rebatch(sources, grammars)
        on_device: Guide | None = None
        if not self.shared and target.static and has_64_bits(target.device):  # recorded steps cannot use the host
            on_device = DeviceGuide.of(grammars, target.vocab_size, target.device, self.compiler(self.engine))
        return on_device or HostGuide.of(grammars, target.vocab_size, target.device, shared=self.shared)

    def fit_blocks(self) -> None:
        """Sets how blocks are padded. This depends on whether the next pass is compiled. Call it before the strategy's `start`, because
        node budgets depend on the padding.
        """
        self.forward_pass.fit(self.blocks, self.row_count)

    def block_of(self, draft: Draft) -> NodeBlock:
        """Checks the draft's trees, and returns the draft as a padded block of nodes, with enough slots reserved for it."""
        draft_tokens, tree = self.blocks.of(draft)
        if self.target.ranks.size > 1:
            self.target.ranks.check_draft(draft, self.lengths)
        if isinstance(draft.topology, TreeTensors):
            waits = draft.on_host or not self.target.static
            self.may_err = self.may_err or not waits
            check_tree(draft.topology, self.rows, self.culprit, wait=waits)
        # For recorded steps, slots for the longest row are reserved at once, because the host does not read lengths between replays.
        end = (self.longest if self.target.static else max(self.lengths)) + draft_tokens.shape[1] + 1
        self.session.reserve(end)
        self.report.nodes = max(self.report.nodes, draft_tokens.shape[1] + 1)
        text = LeadingText(self.pending, max(self.lengths) - 1 - self.pending) if self.pending else LeadingText()
        self.pending = 0
        piece = self.next_piece() if self.next_piece is not None else None
        root, self.root = self.root, None
        return NodeBlock(draft_tokens, tree, self.session.view(end)[0], text=text, piece=piece, root=root)

    def mask(self, draft: Draft, block: NodeBlock) -> NodeBlock:
        """Returns `block` with masks of the tokens that grammars allow after each node. Draft tokens that grammars forbid are removed,
        unless :attr:`verifier` judges the draft.
        """
        self.where = "forward pass and verification"
        if self.guide is None:
            return block
        tokens = block.draft_tokens
        if on_host := (draft.on_host or not draft.tokens.shape[1]) and not self.guide.on_device:
            drafted = draft.tokens if draft.on_host else draft.tokens.new_empty(self.width, 0, device="cpu")
            tokens = F.pad(drafted, (0, tokens.shape[1] - drafted.shape[1]), value=-1)
        legal, masks = self.guide.block(tokens, block.shape_of(draft, self.guide.on_device), draft.levels)
        if on_host:  # the guide read the draft on the host, so the legal tokens are copied to the device now
            legal = block.draft_tokens if legal is tokens else moved_together([legal], self.target.device)[0]
        # A verifier that uses the draft's distribution must judge every token drawn from it: leaving a token out would bias the output.
        return replace(block, draft_tokens=legal if self.verifier is None else block.draft_tokens, masks=masks)

    def read(self, draft: Draft, block: NodeBlock, out: StepOutput) -> Outcome:
        """Reads from the device which tokens were accepted, and returns the outcome. Usually only this part of a step waits for the
        device.
        """
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
            # Tokens that grammars forbid are -1, unless a verifier judges the draft.
            tokens = block.draft_tokens[:, : draft.tokens.shape[1]].tolist()
            for member, first in traced:
                member.trace(draft, tokens, paths, outcome, first)
        return outcome

    def check_drawn(self, outcome: Outcome, out: StepOutput | None = None) -> None:
        """Raises InputError if logits processors removed all tokens of a row. In a shared batch the error ends only the row's request,
        and the row loses the tokens of this step. out: the step's output; None after a replay of the whole step.
        """
        for member, first in self.members if self.request.plan.reads_text else ():
            for row, tokens in enumerate(outcome.part(first, member.rows).written):
                if NOTHING_LEFT not in tokens:
                    continue
                with self._callback_of(member):
                    count = member.lengths[row] + tokens.index(NOTHING_LEFT)
                    names = ", ".join(dict.fromkeys(self.request.plan.operations))
                    raise InputError(
                        f"nothing can be drawn after {amount(count, 'token')}: the logits processors left no token ({names})"
                    )
                if out is not None:
                    self._cut(first + row, outcome, out)

    def _cut(self, row: int, outcome: Outcome, out: StepOutput) -> None:
        """Ends a row, and removes the tokens of this step from it."""
        self.rows.length[row] -= outcome.emitted[row]
        self.rows.finished[row] = True
        outcome.emitted[row], outcome.accepted[row], outcome.ended[row] = 0, 0, 1
        out.summary[:, row] = torch.tensor([0, 0, outcome.drafted[row], 1], device=out.summary.device)

    def stop(self, out: StepOutput, outcome: Outcome) -> None:
        """Cuts each row's new tokens after the token at which a stopping criterion of the row's request ends the row."""
        for member, first in self.members:
            if member.criteria is not None:
                self.where = "stopping criteria"
                with self._callback_of(member):
                    part, end = outcome.part(first, member.rows), first + member.rows
                    member.criteria.apply(part, out.of_rows(first, end), self.rows.of_rows(first, end), member.finished)
                    outcome.put(first, part)

    def settle(self, out: StepOutput, outcome: Outcome | None) -> None:
        """Advances recurrent states, which cannot be rolled back, and grammars over the committed tokens. Runs after :meth:`stop`."""
        if (states := self.rows.buffers.states) is not None:
            states.commit(out.path, out.summary[0], self.rows.length)
        if self.guide is not None:
            self.guide.commit(out, self.rows.finished, outcome)

    def deliver(self, out: StepOutput | None, outcome: Outcome) -> None:
        """Adds a step's results to the outputs of the requests, and calls their streamers and observers.

        Args:
            out: the step's output, used only for logits, scores and paths; None after a replay of the whole step.
        """
        self.where = "streamer"
        if self.shared:
            self.report.steps += 1  # if the batch is not shared, its only request's output counts the steps
        for member, first in self.members:
            new = member.book(outcome.part(first, member.rows), out, first)
            with self._callback_of(member):
                member.tell(new)
        if out is not None and self.target.multiple > 1:
            self.pending = self.rerun(branch_length(out.path, outcome.emitted))

    @contextmanager
    def _callback_of(self, member: RequestOutput) -> Iterator[None]:
        """Wraps a callback of `member`. In a shared batch an exception of the callback ends only this request."""
        try:
            yield
        except BaseException as error:  # SystemExit too: in a scheduler's thread only callbacks raise it
            if not self.shared:
                raise
            error.add_note(f"decoders: {self.where} of one request, after {amount(member.report.steps, 'step')}")
            member.error = member.error or error

    def raise_faults(self, wait: bool) -> None:
        """Raises faults of strategies and verifiers noted on the device. Does nothing if this would wait and `wait` is False."""
        if not self.may_err or (self.target.static and not wait):
            return
        raise_faults(self.rows, self.culprit, f"verifier {self.report.verifier!r}")

    def read_rest(self) -> None:
        """Prefills the end of the prompts, if it was left to the first step. Called for drafters that share the target's slots."""
        if not self.prompt_left:
            return
        starts = [max(length - 1 - self.prompt_left, 0) for length in self.lengths]
        self.session.read_rows(0, starts, 0, self.prompt_left, self.prefill)
        self.pending = self.prompt_left = 0

    def rerun(self, count: int) -> int:
        """Returns the number of committed tokens before the root that the next step runs again: `count`, rounded up to a multiple of
        `Target.multiple`. Prompt tokens whose keys and values the loop cannot compute (:attr:`Request.reach`) never run again.
        """
        multiple, reaches = self.target.multiple, [n for member, _ in self.members for n in member.request.reach]
        tokens = round_up(count, multiple)
        if not any(reaches) or not count:
            return tokens
        room = min(length - 1 - reach for length, reach in zip(self.lengths, reaches, strict=True))
        return min(tokens, room - room % multiple)

    @property
    def prefill(self) -> Callable[..., None]:
        """The function that prefills a chunk: :meth:`~decoders.engine.model.compiled.forward_pass.ForwardPass.prefill`."""
        return partial(self.forward_pass.prefill, recordings=self.session.recordings)

    def compiler(self, engine: Engine) -> Callable[[Callable], Callable]:
        """Returns the function that strategies get as ``Context.compile`` if they draft for the model of `engine`."""
        return partial(engine.function, compile=self.request.runtime.compile, report=self.report)
