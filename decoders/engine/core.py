"""One step of decoding: forward over a block of nodes, verify, commit. This file is what gets compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..strategy import Sequences, Step
from ..tree import TreeTensors
from ..verifier import Block, Verifier
from .cache import CacheBuffers, move_slots
from .candidates import candidates
from .sampling import Masks, SamplingInputs, SamplingPlan
from .target import ForwardResult, Target
from .verify import Acceptance, draw, follow_matches


@dataclass(frozen=True)
class Rows:
    """The rows of one call on the device; updated in place.

    Attributes:
        tokens: ``[B, L]`` int64, ``L`` cache slots. length, prompt_length: ``[B]`` int64. finished: ``[B]`` bool.
        limit: ``[B]`` int64, the length at which a row ends.
        buffers: the static cache. sampling: noise keys and parameters of the plan.
        range: ``[L]`` int64, 0 … L-1; its prefix of length `view` tells the graph how many slots attention looks at.
    """

    tokens: Tensor
    length: Tensor
    prompt_length: Tensor
    finished: Tensor
    limit: Tensor
    buffers: CacheBuffers
    sampling: SamplingInputs
    range: Tensor

    @staticmethod
    def allocate(target: Target, prompts: list[Tensor], slots: int, new_tokens: int, sampling: SamplingInputs) -> Rows:
        """Rows that hold `prompts` (1-D int64 tensors) in slots 0 … and may grow by `new_tokens` each."""
        device = target.device
        tokens = torch.zeros(len(prompts), slots, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        length = torch.tensor([len(prompt) for prompt in prompts], device=device)
        return Rows(
            tokens, length, length.clone(), torch.zeros(len(prompts), dtype=torch.bool, device=device),
            length + new_tokens, CacheBuffers.allocate(target.layout, len(prompts), slots), sampling,
            torch.arange(slots, device=device),
        )  # fmt: skip

    def grown(self, slots: int) -> Rows:
        """The same rows with room for `slots` tokens each."""

        def wider(tensor: Tensor, dim: int) -> Tensor:
            shape = list(tensor.shape)
            shape[dim] = slots - shape[dim]
            return torch.cat([tensor, tensor.new_zeros(shape)], dim)

        buffers = CacheBuffers([wider(t, 2) for t in self.buffers.keys], [wider(t, 2) for t in self.buffers.values])
        tokens = wider(self.tokens, 1)
        return replace(self, tokens=tokens, buffers=buffers, range=torch.arange(slots, device=tokens.device))

    def sequences(self, view: int) -> Sequences:
        return Sequences(self.tokens[:, :view], self.length, self.prompt_length, self.finished, self.sampling.keys)


@dataclass(frozen=True)
class StepOutput:
    """Device results of a step.

    Attributes:
        nodes, chosen, path: as in :class:`decoders.strategy.Step`. new: ``[B, N]`` int64, tokens in order of commitment.
        summary: ``[4, B]`` int64 for the host: tokens emitted, guesses accepted, guesses made, finished.
        logits: ``[B, N, V]``. scores: the processed ones if the plan keeps them. hidden: ``[B, N, H]``.
    """

    nodes: Tensor
    chosen: Tensor
    path: Tensor
    new: Tensor
    summary: Tensor
    logits: Tensor
    scores: Tensor | None
    hidden: Tensor

    def observed(self, sequences: Sequences) -> Step:
        """This step as its strategy sees it; `sequences` hold what it committed."""
        emitted, accepted, _, _ = self.summary.unbind(0)
        return Step(self.nodes, self.chosen, self.path, accepted, emitted, self.logits, self.hidden, sequences)


class Core:
    """Forward + verify + commit for one target and one sampling plan.

    Attributes:
        vocabulary: how many tokens a grammar's masks speak of: those of the target that decides.
    """

    def __init__(self, target: Target, plan: SamplingPlan) -> None:
        self.target, self.plan, self.vocabulary = target, plan, target.vocab_size

    def key(self, method: str) -> tuple:
        """What the graph of `method` depends on, besides the model."""
        return () if method == "forward" else (self.plan,)

    def step(
        self, guesses: Tensor, tree: TreeTensors, rows: Rows, view_range: Tensor, masks: Masks | None = None
    ) -> StepOutput:
        """Runs one block. guesses: ``[B, N-1]`` int64, N at least 3. view_range: ``[view]``, see :class:`Rows`."""
        nodes, forwarded = self.forward(guesses, tree, rows, view_range)
        return self.decide(nodes, forwarded, tree, rows, masks)

    def decide(
        self, nodes: Tensor, forwarded: ForwardResult, tree: TreeTensors, rows: Rows, masks: Masks | None = None
    ) -> StepOutput:
        """Draws the target's token after every node and commits the path that agrees."""
        positions = rows.length[:, None] - rows.prompt_length[:, None] + tree.offsets
        left = candidates(forwarded.logits, self.plan, rows.sampling, positions, masks)
        if self.plan.keep_scores:
            left = left.settled()
        chosen = left.choose(self.plan, rows.sampling, positions)
        return self.commit(nodes, chosen, tree, rows, forwarded, left.dense() if self.plan.keep_scores else None)

    def judge(
        self, nodes: Tensor, forwarded: ForwardResult, tree: TreeTensors, rows: Rows, masks: Masks | None,
        drawn_from: Tensor | None, verifier: Verifier, siblings: int | None,
    ) -> StepOutput:  # fmt: skip
        """Lets `verifier` decide in the place of :meth:`decide`; the rows' keys must be those of this step.

        Args:
            drawn_from: ``[B, N-1, V]``, scores that the guesses were drawn from, None if they were not drawn.
            siblings: most children of a node, None if the host does not know.
        """
        positions = rows.length[:, None] - rows.prompt_length[:, None] + tree.offsets
        left = candidates(forwarded.logits, self.plan, rows.sampling, positions, masks).settled()
        scores = left.dense()
        vocab, dtype = scores.shape[-1], scores.dtype
        target = scores.softmax(-1) if self.plan.sample else one_hot(scores.argmax(-1), vocab, dtype)
        draft = one_hot(nodes[:, 1:], vocab, dtype) if drawn_from is None else drawn_from.softmax(-1)
        outcomes = verifier.outcomes(Block(nodes, tree, target, draft, siblings))
        acceptance, last = draw(nodes, tree, outcomes, rows.sampling.keys)
        # What was decided, as choices: every accepted node is its parent's, and `last` that of the deepest one.
        end = acceptance.path.gather(1, acceptance.depth[:, None])
        accepted = tree.ancestors.gather(1, end[..., None].expand(-1, 1, len(tree)))[:, 0]
        accepted = accepted & (torch.arange(len(tree), device=nodes.device) > 0)
        chosen = torch.nn.functional.pad(left.choose(self.plan, rows.sampling, positions), (0, 1))
        chosen = chosen.scatter(1, torch.where(accepted, tree.parents, len(tree)), nodes)[:, :-1]
        chosen = chosen.scatter(1, end, last[:, None])
        return self.commit(
            nodes, chosen, tree, rows, forwarded, scores if self.plan.keep_scores else None, acceptance=acceptance
        )

    def forward(
        self, guesses: Tensor, tree: TreeTensors, rows: Rows, view_range: Tensor
    ) -> tuple[Tensor, ForwardResult]:
        """The block's nodes ``[B, N]`` and the target's results for them."""
        base = rows.length - 1
        nodes = torch.cat([rows.tokens.gather(1, base[:, None]), guesses], dim=1)
        return nodes, self.target.forward(nodes, base, tree, rows.buffers, view_range.shape[0])

    def commit(
        self,
        nodes: Tensor,
        chosen: Tensor,
        tree: TreeTensors,
        rows: Rows,
        result: ForwardResult,
        scores: Tensor | None,
        most: Tensor | None = None,
        acceptance: Acceptance | None = None,
    ) -> StepOutput:
        """Moves the accepted path's keys and values and appends its tokens, `most` of them (``[B]``).

        Unless a verifier has decided already, the path is that which matches the choices.
        """
        n = nodes.shape[1]
        index = torch.arange(n, device=nodes.device)
        base = (rows.length - 1)[:, None]
        if acceptance is None:
            acceptance = follow_matches(nodes, chosen, tree)
        move_slots(rows.buffers, base + acceptance.path, base + index)

        new = chosen.gather(1, acceptance.path)
        room = torch.where(rows.finished, 0, rows.limit - rows.length)
        if most is not None:
            room = torch.minimum(room, most)
        candidate = tree.ancestors[:, 1:, 0]  # a lookahead window is not guessed: it can never be accepted
        guessed = torch.where(rows.finished, 0, ((nodes[:, 1:] >= 0) & candidate).sum(-1))
        emitted = torch.minimum(acceptance.depth + 1, room)
        is_stop = (new[:, :, None] == rows.sampling.stop_tokens).any(-1) & (index < emitted[:, None])
        first_stop = torch.where(is_stop, index, n).amin(-1)
        emitted = torch.minimum(emitted, first_stop + 1)
        # Rejected tokens land behind the new length, where the next step overwrites them.
        row = torch.arange(nodes.shape[0], device=nodes.device)[:, None]
        rows.tokens[row, base + 1 + index] = new
        rows.length.add_(emitted)
        rows.finished.logical_or_((first_stop < n) | (rows.length >= rows.limit))
        accepted = torch.minimum(acceptance.depth, emitted)  # an accepted stop token has no bonus token after it
        summary = torch.stack([emitted, accepted, guessed, rows.finished.long()])
        return StepOutput(nodes, chosen, acceptance.path, new, summary, result.logits, scores, result.hidden)


def one_hot(tokens: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """``[…, V]``: all of the probability on one token, none anywhere for -1."""
    return (tokens[..., None] == torch.arange(vocab, device=tokens.device)).to(dtype)
