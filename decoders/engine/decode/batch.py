"""Rows that are decoded together, in steps of :mod:`~decoders.engine.decode.step`; between two steps they join and leave."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.devices import moved_together, recorded
from ...costs.worth import DraftWorth
from ...strategy import Draft, HostStep, PromptChunk, check_draft, finish_all
from ...tree import TreeTensors
from ..model.blocks import LeadingText, NodeBlock, PromptPiece, without_empty_end
from ..model.cache import CacheBuffers
from ..model.own_forward import WRONGLY_DIVIDED, MultimodalInputs, OwnForward
from .core import Core, StepOutput
from .criteria import Outcome
from .drafts.drafter import ModelDrafter
from .engine import Engine
from .grammar.device_guide import guide_of
from .grammar.guide import Guide
from .grammar.host_guide import HostGuide
from .prompts import PrefillPlan
from .request import Request, RequestOutput
from .resources import CallResources
from .roster import Roster, chunk_of
from .rows import Rows, check_tree, raise_faults, untouched
from .rules import decider
from .verify import step_keys


class Batch(Roster):
    """Rows that are decoded together, and what their steps need. What belongs to one request is in its :class:`RequestOutput`.

    A call of ``generate`` has one to itself (:mod:`~decoders.engine.decode.call`). In a scheduler's
    (:mod:`~decoders.engine.decode.lane`) requests of one row join and leave.

    Attributes:
        resources: draft models, modules and costs that the strategy uses.
        state: the strategy's.
        decide: forward, verification and commit of a block.
        worth: decides how many nodes of a draft are verified; None for a single row, or with ``prune=False``.
        where: the current phase, for notes on errors.
        arranged: whether it has had rows yet.
        skipped: whether this step has no draft, because drafting does not pay at present.
        next_piece: returns the piece of a waiting prompt that the next step reads in its own pass (chunked prefill); None for none.
        piece_seconds: the last step's share of time for such a piece.
        learning_seconds: seconds of the strategy's last `observe`, where they count as part of drafting.
        root: ``[B, H]``, the embedding of what the rows end with before the first step, where that is no token.
        may_err: whether the device may hold faults of hooks (:meth:`raise_faults`).

    Args:
        stack: closes what is opened here.
        capacity: most rows where requests join and leave; None for one call.
    """

    decide: Callable[[Draft, NodeBlock, Rows], StepOutput]

    def __init__(self, engine: Engine, request: Request, stack: ExitStack, capacity: int | None = None) -> None:
        super().__init__(engine, request, capacity)
        self.resources = CallResources(self, stack)
        self.state: Any = None
        self.worth: DraftWorth | None = None
        if request.runtime.prune and (self.shared or len(request.prompts) > 1):  # one row waits for no other
            ends = [len(prompt) + request.new_tokens for prompt in request.prompts]
            self.worth = DraftWorth(
                self.resources.step_costs, None if self.shared else ends, request.strategy.grade_rates
            )
        self.where = "while the prompt was read"
        self.next_piece: Callable[[], PromptPiece] | None = None
        self.piece_seconds = self.learning_seconds = 0.0
        self.may_err = self.verifier is not None
        self.root = request.given.last if request.given is not None else None
        if self.root is not None:  # zeros for padding rows
            self.root = F.pad(self.root, (0, 0, 0, self.width - len(self.root)))
        self.skipped = self.arranged = self._started = False
        self._verified: int | None = None  # the nodes of a draft that was cut off

    @property
    def drafters(self) -> list[ModelDrafter]:
        """The draft models that the strategy has opened."""
        return self.resources.drafters

    def read_prompts(self, lengths: list[int], reusable: list[int], *, leave_last_chunk: bool = False) -> None:
        """Prefills the rows.

        Args:
            lengths: tokens per row.
            reusable: how many of them have their keys and values in place.
            leave_last_chunk: whether the end of the prompts is left to the first step. Not where steps are recorded, in one size.
        """
        shows, inputs = self.request.strategy.reads_prompt, self.request.multimodal
        run = self._read_and_show if shows else self.prefill
        read: set[int] = set()  # rows that the model's own forward pass has read
        apart = inputs is not None and not self.images_in_place(inputs, lengths, reusable)
        if inputs is not None and apart:
            if shows:
                chunk = self.read_images(inputs, lengths, 0, logits=self.request.strategy.prompt_logits)
                assert chunk is not None
                self.show(chunk, 0)
                read, run = set(range(len(lengths))), self.prefill
            else:
                read = self._read_missing_images(inputs, lengths, reusable)
            reusable = [length - 1 if row in read else reusable[row] for row, length in enumerate(lengths)]
        reused, left = self.session.prefill(
            lengths, reusable, self.request.runtime.prefill_chunk, run, leave_last_chunk=leave_last_chunk, padded=shows,
            given=self.request.given is not None or apart,
        )  # fmt: skip
        self.pending = self.prompt_left = left  # tokens of the prompts that the first step reads
        self.report.reused = [0 if row in read else count for row, count in enumerate(reused[: self.row_count])]

    def images_in_place(self, inputs: MultimodalInputs, lengths: list[int], reusable: list[int]) -> bool:
        """Whether the tokens of prompts that are still to be read are all text. lengths, reusable: as of :meth:`read_prompts`."""
        target, starts = self.target, reusable
        if not target.recurrent:  # rows advance together: one may have to read some of its text again
            starts = PrefillPlan.of(lengths, reusable, None, target).starts
        return inputs.in_front_of(starts)

    def _read_missing_images(self, inputs: MultimodalInputs, lengths: list[int], reusable: list[int]) -> set[int]:
        """Reads the prompts whose images are not in place, one by one where it is known which images are whose; returns their rows.

        The division of the images is a guess. Where it is wrong the model raises, and all prompts are read together.
        """
        read: set[int] = set()
        try:
            for prompt, own in enumerate(inputs.alone):
                rows = range(prompt * inputs.repeats, (prompt + 1) * inputs.repeats)
                if own is not None and not own.in_front_of([reusable[row] for row in rows]):
                    self.read_images(own, list(own.lengths), rows.start, logits=False)
                    read |= set(rows)
            if inputs.alone:
                return read
        except torch.OutOfMemoryError:  # reading all together would need more still
            raise
        except WRONGLY_DIVIDED:
            # Kept texts are found by the hashes of their images, and those of a wrong division are not theirs.
            self.request = replace(self.request, multimodal=replace(inputs, alone=()))
        self.read_images(inputs, lengths, 0, logits=False)
        return set(range(len(lengths)))

    def read_images(
        self, inputs: MultimodalInputs, lengths: list[int], first: int, *, logits: bool
    ) -> PromptChunk | None:  # fmt: skip
        """Reads prompts by the model's own forward pass, and returns what a strategy that reads prompts is shown.

        Args:
            lengths: of the prompts, those that fill the batch up included.
            first: the row of the first prompt.
            logits: whether that contains logits.
        """
        rows, shows = self.session.stored.of_rows(first, first + len(lengths)), self.request.strategy.reads_prompt
        result = self.own_forward.read(inputs, rows.buffers, rows.tokens, every=shows, logits=logits)
        if result is None:
            return None
        ends = torch.tensor(lengths, device=rows.tokens.device)
        return chunk_of(result, rows.tokens[:, : result.hidden.shape[1]], torch.zeros_like(ends), ends, logits=logits)

    @property
    def own_forward(self) -> OwnForward:
        """The model's own forward pass, which reads prompts that are more than text."""
        return self.engine.own_forward(self.request.model, self.target)

    def _read_and_show(self, tokens: Tensor, begin: Tensor, buffers: CacheBuffers, view: Tensor, latest: int) -> None:
        """Runs a chunk of the prompts and shows it to the strategy. tokens: ``[B, N]`` from slots `begin` ``[B]`` on."""
        logits = self.request.strategy.prompt_logits
        self.show(self.read_chunk(self.rows.length, tokens, begin, buffers, view, latest, logits=logits), latest)

    def show(self, chunk: PromptChunk, latest: int) -> None:
        """Shows a chunk of the prompts to the strategy. latest: largest of the slots at which it begins."""
        for module in self.resources.modules:  # padding behind the prompts' ends needs room as well
            module.reserve(latest + chunk.tokens.shape[1])
        strategy = self.request.strategy
        with untouched("prefill", strategy, chunk):
            strategy.prefill(self.state, chunk)

    def arrange(self, request: Request, members: list[tuple[RequestOutput, int]], sources: list[int]) -> bool:
        """Takes `members` as the rows, whose tokens, keys and values are in the session, and starts or rebatches the strategy.

        Args:
            request: what the members have in common.
            sources: which row of the batch before each row is, -1 for one that is new.

        Returns:
            whether the strategy was started again.
        """
        strategy, same = request.strategy, self.arranged and request.plan == self.request.plan
        self.request, self.members[:], self.width, self.arranged = request, members, len(sources), True
        self.longest = max(
            len(prompt) + member.request.new_tokens for member, _ in members for prompt in member.request.prompts
        )
        self.noise_keys = self.rows.sampling.keys.clone()
        stays = same and strategy.keeps_rows(self.state)
        self.where = "rebatch" if stays else "start"
        if self.worth is not None:
            self.worth.rebatch(sources[: self.row_count])
        self.guide = self._guide(sources)
        if not same:
            core = Core(self.forward_pass, request.plan)
            self.decide = decider(core, request, self.verifier, self.members, self.shared, self.session.recordings)
        self.resources.costs = None
        self.fit_blocks()
        if stays:
            context = self.resources.rebatch(sources)
            with untouched("rebatch", strategy, context.sequences):
                self.state = strategy.rebatch(self.state, torch.tensor(sources, device=self.target.device), context)
            return False
        self.finish()
        self.resources.close()
        context = self.resources.context()
        with untouched("start", strategy, context.sequences):
            self.state = strategy.start(context)
        self._started = True
        return True

    def _guide(self, sources: list[int]) -> Guide | None:
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

    def finish(self, cause: BaseException | None = None) -> None:
        """Calls the strategy's `finish`, if it has started. cause: see :func:`~decoders.strategy.finish_all`."""
        if self._started:
            self._started = False
            finish_all([(self.request.strategy, self.state)], cause)

    def fit_blocks(self) -> None:
        """Sets how blocks are padded, by the tier of the next pass. Node budgets depend on it, so it comes before `start`."""
        self.forward_pass.fit(self.blocks, self.row_count)

    @property
    def tiers(self) -> tuple:
        """Which parts of a step run compiled now: the target's pass, those of draft models, and the strategy's functions."""
        target = self.forward_pass.tier(self.width, self.request.plan)
        return target, self.engine.functions_ready, *(drafter.tiers for drafter in self.drafters)

    def book_replay(self, seconds: float) -> None:
        """Books the time of a replayed step with every model it may run: enough time makes their compilation worthwhile."""
        share = seconds / (1 + len(self.drafters))
        self.forward_pass.book_replay(share, self.width)
        for drafter in self.drafters:
            drafter.book_replay(share)

    def propose(self) -> Draft:
        """What the strategy proposes, without the nodes at its end that are not worth verifying."""
        if self.verifier is not None:  # verifiers other than the coupled one need fresh noise in every step
            self.rows.sampling.keys.copy_(step_keys(self.noise_keys, self.rows.length))
        strategy = self.request.strategy
        self.skipped = self._prunes and self.worth is not None and not self.worth.due()
        if self.skipped:
            draft = Draft.nothing(self.width, self.target.device)
        else:
            sequences = self.session.view(max(self.lengths))[1]
            if self._shows_lists:
                sequences = replace(sequences, known=self.known())
            with untouched("propose", strategy, sequences):
                draft = strategy.propose(self.state, sequences)
        check_draft(draft, strategy.name, self.blocks.rows)
        self.fit_blocks()
        # A block behind text has a multiple of `Target.multiple` nodes, as the text has.
        if self.pending:
            self.blocks.single = False
        if self.verifier is not None:  # judges by the scores, on the device
            draft = draft if draft.scores is None else draft.moved(self.target.device)
        draft = self._pruned(self._without_placeholders(draft))
        if self.skipped:
            self._verified = 0
        return draft

    @property
    def _shows_lists(self) -> bool:
        """Whether the strategy is shown what the host knows of the rows: one that promises to stay on the device asks for none."""
        return not self.request.strategy.on_device and not recorded()

    def _without_placeholders(self, draft: Draft) -> Draft:
        """`draft` without placeholders of images, which occur in prompts only. Verifiers of a draft's distribution judge all of it."""
        target = self.target
        if target.placeholders is None or self.verifier is not None:
            return draft
        placeholders = target.placeholders_on_host if draft.on_host else target.placeholders
        assert placeholders is not None  # both are there, or none
        # Not isin, which sorts where there are many placeholders or few tokens, and waits for the device.
        stands_for_images = (draft.tokens[..., None] == placeholders).any(-1)
        return replace(draft, tokens=draft.tokens.masked_fill(stands_for_images, -1))

    @property
    def _prunes(self) -> bool:
        """Whether drafts may be cut or left out: not if a verifier judges their distribution, or a strategy learns from every step."""
        strategy = self.request.strategy
        return not self.target.static and self.verifier is None and (strategy.rests or not strategy.observes)

    def _pruned(self, draft: Draft) -> Draft:
        """`draft` without the nodes at its end that have no draft token in any row, or that are not worth verifying."""
        self._verified = None
        if not self._prunes:
            return draft
        proposed, tree = draft.tokens.shape[1], draft.topology
        draft = without_empty_end(draft, self.rows.finished)
        if self.worth is not None and draft.tokens.shape[1] and draft.has_draft_tokens_only:
            if isinstance(tree, TreeTensors):
                check_tree(tree, self.rows, self.culprit, wait=True)
            draft = draft.head(self.worth.nodes(draft, self.lengths, self.finished))
        if draft.tokens.shape[1] < proposed:
            self._verified = draft.tokens.shape[1] + 1
        return draft

    def raise_faults(self, wait: bool) -> None:
        """Raises the faults of hooks that the device has noted. Without `wait` they are read only on a CPU."""
        if not self.may_err or (self.target.static and not wait):
            return
        raise_faults(self.rows, self.culprit, f"verifier {self.report.verifier!r}")

    def block_of(self, draft: Draft) -> NodeBlock:
        """The draft, checked and padded to a block."""
        draft_tokens, tree = self.blocks.of(draft, self.request.strategy.name)
        self.target.ranks.check_draft(draft, self.lengths)
        if isinstance(draft.topology, TreeTensors):
            waits = draft.on_host or not self.target.static
            self.may_err = self.may_err or not waits
            check_tree(draft.topology, self.rows, self.culprit, wait=waits)
        for drafter in self.drafters:
            drafter.proposed = len(draft.topology)
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
        if self.guide is None:
            return block
        tokens = block.draft_tokens
        if on_host := (draft.on_host or not draft.tokens.shape[1]) and not self.guide.on_device:
            drafted = draft.tokens if draft.on_host else draft.tokens.new_empty(self.width, 0, device="cpu")
            tokens = F.pad(drafted, (0, tokens.shape[1] - drafted.shape[1]), value=-1)
        legal, masks = self.guide.block(tokens, block.shape_of(draft, self.guide.on_device), draft.levels)
        if on_host:  # a matcher on the host has been shown what was drafted there, and read nothing from the device
            legal = block.draft_tokens if legal is tokens else moved_together([legal], self.target.device)[0]
        # A verifier of the draft's distribution must judge every token drawn from it: leaving one out would bias the output.
        return replace(block, draft_tokens=legal if self.verifier is None else block.draft_tokens, masks=masks)

    def settle(self, out: StepOutput, outcome: Outcome | None) -> None:
        """Moves recurrent states, which cannot be cut back, and grammars on to what was committed."""
        if (states := self.rows.buffers.states) is not None:
            states.commit(out.path, out.summary[0], self.rows.length)
        if self.guide is not None:
            self.guide.commit(out, self.rows.finished, outcome)

    def observe(self, out: StepOutput, outcome: Outcome | None) -> None:
        """Shows the strategy what became of its draft."""
        strategy = self.request.strategy
        if not strategy.observes or (self.skipped and strategy.misses_steps):
            return
        sequences = self.session.view(max(self.lengths) + out.nodes.shape[1])[1]
        read = None
        if outcome is not None and self._shows_lists:
            sequences = replace(sequences, known=self.known(outcome))
            padding = self.width - self.row_count
            read = HostStep([*outcome.accepted, *[0] * padding], [*outcome.written, *([] for _ in range(padding))])
        step = out.observed(sequences, read)
        with untouched("observe", strategy, sequences, step):
            strategy.observe(self.state, step if self._verified is None else replace(step, own_nodes=self._verified))
