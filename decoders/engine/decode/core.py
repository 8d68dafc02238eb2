"""One step of decoding: forward over a block of nodes, verify, commit."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...sampling.choice import candidates
from ...sampling.processors import Masks, SamplingInputs, SamplingPlan
from ...strategy import Draft, Sequences, Step
from ...tree import TreeTensors
from ..model.blocks import LeadingText, NodeBlock, PromptPiece, after_text
from ..model.cache import CacheBuffers, move_slots
from ..model.recordings import Recordings
from ..model.target import ForwardResult, Target
from .rows import Rows
from .verify import Acceptance, Verdict, follow_matches


@dataclass(frozen=True)
class StepOutput:
    """Device results of a step.

    Attributes:
        nodes: as in :class:`decoders.strategy.Step`.
        chosen: as there.
        path: as there.
        new: ``[B, N]`` int64, tokens in order of commitment.
        summary: ``[4, B]`` int64 for the host: tokens emitted, draft tokens accepted, draft tokens made, finished.
        logits: ``[B, N, V]``.
        scores: the processed ones if the plan keeps them.
        hidden: ``[B, N, H]``.
        layers: ``[B, N, T, H]``, if any were asked for.
    """

    nodes: Tensor
    chosen: Tensor
    path: Tensor
    new: Tensor
    summary: Tensor
    logits: Tensor
    scores: Tensor | None
    hidden: Tensor
    layers: Tensor | None = None

    def of_rows(self, begin: int, end: int) -> StepOutput:
        """Views of those of some rows."""
        rows, scores, layers = slice(begin, end), self.scores, self.layers
        return StepOutput(
            self.nodes[rows], self.chosen[rows], self.path[rows], self.new[rows], self.summary[:, rows], self.logits[rows],
            scores[rows] if scores is not None else None, self.hidden[rows],
            layers[rows] if layers is not None else None,
        )  # fmt: skip

    def observed(self, sequences: Sequences) -> Step:
        """This step as its strategy sees it; `sequences` hold what it committed."""
        emitted, accepted, _, _ = self.summary.unbind(0)
        return Step(
            self.nodes, self.chosen, self.path, accepted, emitted, self.logits, self.hidden, sequences, layers=self.layers
        )  # fmt: skip


class RunsForward(Protocol):
    """How a model's passes are run, and their results settled (:class:`~decoders.engine.model.compiled.forward_pass.ForwardPass`)."""

    def __call__(
        self,
        nodes: Tensor,
        base: Tensor,
        tree: TreeTensors,
        buffers: CacheBuffers,
        view: Tensor,
        text: LeadingText = LeadingText(),
        piece: PromptPiece | None = None,
    ) -> ForwardResult: ...
    def draw(
        self, logits: Tensor, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor, masks: Masks | None = None
    ) -> tuple[Tensor, Tensor | None]: ...
    def settle(self, nodes: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]: ...
    def replayed(
        self, recordings: Recordings | None, key: Hashable, function: Callable[..., Any], given: tuple, rows: int,
        plan: SamplingPlan | None = None, *, copy: bool,
    ) -> Any: ...  # fmt: skip


class Core:
    """Forward + verify + commit for one target and one sampling plan.

    Args:
        run: how the target's passes are run; without it, as :class:`Target` has them.

    Attributes:
        vocabulary: how many tokens a grammar's masks speak of: those of the target that decides.
    """

    def __init__(self, target: Target, plan: SamplingPlan, run: RunsForward | None = None) -> None:
        self.target, self.plan, self.vocabulary = target, plan, target.vocab_size
        self.runs = run
        self.run: Callable[..., ForwardResult] = run or target.forward
        self.draw: Callable[..., tuple[Tensor, Tensor | None]] = run.draw if run is not None else draw_tokens
        self.settle: Callable[..., tuple[Tensor, Tensor, Tensor]] = run.settle if run is not None else settle

    def key(self, method: str) -> tuple:
        """What a recording of `method` depends on, besides the model."""
        return (self.target.layers,) if method == "forward" else (self.plan, self.target.layers)

    def replayed(
        self, method: str, function: Callable[[NodeBlock, Rows], Any], block: NodeBlock, rows: Rows,
        recordings: Recordings | None, *, copy: bool,
    ) -> Any:  # fmt: skip
        """``function(block, rows)``, as a replay once it has been recorded for blocks of this size.

        Args:
            method: what recordings of `function` are known by: ``step`` or ``forward``.
            recordings: of the session of the rows; None where nothing can be recorded.
            copy: whether the result is to outlive the next replay.
        """
        if self.runs is None or block.text.length or block.piece is not None:
            return function(block, rows)

        def run(draft_tokens: Tensor, tree: TreeTensors, masks: Masks | None) -> Any:
            return function(NodeBlock(draft_tokens, tree, block.view, masks), rows)

        key, given = (
            (method, self.key(method), rows.place, len(block.view)),
            (block.draft_tokens, block.tree, block.masks),
        )
        return self.runs.replayed(recordings, key, run, given, len(rows.length), self.plan, copy=copy)

    def forward(self, block: NodeBlock, rows: Rows) -> tuple[Tensor, ForwardResult]:
        """The block's nodes ``[B, N]`` and the target's results for them."""
        base = rows.length - 1
        nodes = torch.cat([rows.tokens.gather(1, base[:, None]), block.draft_tokens], dim=1)
        tokens, begin, tree = nodes, base, block.tree
        if count := block.text.length:
            begin = base - count
            positions = begin[:, None] + torch.arange(count, device=base.device)
            tokens = torch.cat([rows.tokens.gather(1, positions.clamp(min=0)), nodes], dim=1)
            tree = after_text(count, tree)
        piece = (block.piece,) if block.piece is not None else ()
        return nodes, self.run(tokens, begin, tree, rows.buffers, block.view, block.text, *piece)

    def choose(
        self, draft: Draft | None, block: NodeBlock, nodes: Tensor, forwarded: ForwardResult, rows: Rows
    ) -> Verdict:
        """Draws the target's token after every node: accepted is what matches."""
        positions = rows.length[:, None] - rows.prompt_length[:, None] + block.tree.offsets
        return Verdict(*self.draw(forwarded.logits, self.plan, rows.sampling, positions, block.masks))

    def commit(
        self, nodes: Tensor, tree: TreeTensors, rows: Rows, result: ForwardResult, verdict: Verdict
    ) -> StepOutput:
        """Moves the accepted path's keys and values and appends its tokens.

        Recurrent states stay where they were, as stopping criteria may still cut the rows.
        """
        # One shape, whether rows share their stop tokens or not: compiled code serves both.
        stop_tokens = rows.sampling.stop_tokens.expand(len(nodes), -1).contiguous()
        rewritten = (rows.tokens, rows.length, rows.limit, rows.finished, stop_tokens)
        chosen = verdict.chosen
        if verdict.acceptance is None and verdict.most is None:
            path, new, summary = self.settle(nodes, chosen, tree, *rewritten)
        else:
            acceptance = verdict.acceptance or follow_matches(nodes, chosen, tree)
            path = acceptance.path
            new, summary = append(nodes, chosen, tree, acceptance, *rewritten, verdict.most)
        move_slots(rows.buffers, rows.length - summary[0] - 1, path)
        return StepOutput(
            nodes, chosen, path, new, summary, result.logits, verdict.scores, result.hidden, result.layers
        )


def draw_tokens(
    logits: Tensor, plan: SamplingPlan, inputs: SamplingInputs, positions: Tensor, masks: Masks | None = None
) -> tuple[Tensor, Tensor | None]:
    """The target's token after each node, ``[B, N]`` int64, and the processed scores if the plan keeps them.

    Args:
        logits: ``[B, N, V]``.
        positions: ``[B, N]`` int64, how many tokens were generated before each.
    """
    left = candidates(logits, plan, inputs, positions, masks)
    if plan.keep_scores:
        left = left.settled()
    return left.choose(plan, inputs, positions), left.dense() if plan.keep_scores else None


def settle(
    nodes: Tensor, chosen: Tensor, tree: TreeTensors, tokens: Tensor, length: Tensor, limit: Tensor, finished: Tensor,
    stop_tokens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Accepts the path that matches the choices and appends its tokens: path, new tokens and summary of the step."""
    acceptance = follow_matches(nodes, chosen, tree)
    return acceptance.path, *append(nodes, chosen, tree, acceptance, tokens, length, limit, finished, stop_tokens)


def append(
    nodes: Tensor, chosen: Tensor, tree: TreeTensors, acceptance: Acceptance, tokens: Tensor, length: Tensor,
    limit: Tensor, finished: Tensor, stop_tokens: Tensor, most: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Appends an accepted path's tokens to the rows, in place; see :class:`Rows` for the tensors, stop_tokens: ``[E]`` or ``[B, E]``.

    Returns:
        the new tokens ``[B, N]`` and the summary ``[4, B]`` of the step, as in :class:`StepOutput`.
    """
    n = nodes.shape[1]
    index = torch.arange(n, device=nodes.device)
    new = chosen.gather(1, acceptance.path)
    room = torch.where(finished, 0, limit - length)
    if most is not None:
        room = torch.minimum(room, most)
    candidate = tree.ancestors[:, 1:, 0]  # a lookahead window is not drafted: it can never be accepted
    drafted = torch.where(finished, 0, ((nodes[:, 1:] >= 0) & candidate).sum(-1))
    emitted = torch.minimum(acceptance.depth + 1, room)
    is_stop = (new[:, :, None] == stop_tokens[..., None, :]).any(-1) & (index < emitted[:, None])
    first_stop = torch.where(is_stop, index, n).amin(-1)
    emitted = torch.minimum(emitted, first_stop + 1)
    # Rejected tokens land behind the new length, where the next step overwrites them.
    row = torch.arange(nodes.shape[0], device=nodes.device)[:, None]
    tokens[row, length[:, None] + index] = new
    length.add_(emitted)
    finished.logical_or_((first_stop < n) | (length >= limit))
    accepted = torch.minimum(acceptance.depth, emitted)  # an accepted stop token has no bonus token after it
    return new, torch.stack([emitted, accepted, drafted, finished.long()])
