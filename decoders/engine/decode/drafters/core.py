"""What a draft model computes: the next token of every row, the next level of a token tree, or the verification of a block."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.host_reads import host_reads
from ....drafters import Expansion
from ....sampling.choice import Candidates, candidates
from ....sampling.prefixes import Prefixes
from ....sampling.processors import Masks, SamplingPlan, grammar_first
from ....tree import TreeTensors
from ...model.blocks import ForwardResult, NodeBlock, PassInput, after_text, causal_block
from ...model.buckets import LEAST_NODES, node_bucket
from ...model.compiled.forward_pass import ForwardPass
from ..core import Core, CoupledRule, StepOutput
from ..rows import Rows


class DraftCore(Core):
    """The forward passes of a draft model. Another model verifies the draft tokens.

    A block starts with each row's ``U`` pending tokens, the last committed tokens before the root. Their keys and values may be
    missing: the last token of a fully accepted draft was never run, and accepted tree nodes were written to other slots. Running
    pending tokens costs next to nothing, and saves moving keys and values. A draft model that uses the target's own slots
    (:mod:`.shared_slots`) lacks no keys and values. Then ``U`` is 0, and blocks that are too small are padded after the root.

    Args:
        vocab: size of the target's vocabulary. Token ids of the draft model beyond this size are padding and never proposed.
        children: ``C``, how many continuations :meth:`root`, :meth:`expand` and :meth:`advance` return per node.

    If rows have grammars, every pass gets a grammar mask for each node that is continued.
    """

    def __init__(self, forward_pass: ForwardPass, plan: SamplingPlan, vocab: int, children: int = 1) -> None:
        super().__init__(forward_pass, plan, CoupledRule(forward_pass, plan))
        target = self.target
        self.vocab, self.padding = min(vocab, target.vocab_size), max(vocab - target.vocab_size, 0)
        self.children = min(children, self.vocab)

    def key(self, method: str) -> tuple:
        """Returns the settings of this object that a recording of `method` depends on."""
        return self.plan, self.vocab, self.padding, 1 if method == "extend" else self.children

    def extend(self, rows: Rows, view: Tensor, pending: Tensor, masks: Masks | None = None) -> Expansion:
        """Draws the next token of every row, and appends it to the row. pending: ``[U]``; only its length is used.

        The returned expansion has one node and one continuation per row.
        """
        result = self._read(rows, view, pending)
        positions = (rows.length - rows.prompt_length)[:, None]
        left = self._process(result.logits, rows, positions, masks, self._text(rows, view))
        tokens = left.choose(self.plan, rows.sampling, positions)
        row = torch.arange(tokens.shape[0], device=tokens.device)
        rows.tokens[row, rows.length] = tokens[:, 0]
        rows.length.add_(1)
        weights = left.log_probabilities(tokens)[..., None]
        return Expansion(tokens[..., None], weights, self._kept(left))

    def advance(
        self, rows: Rows, view: Tensor, draft_tokens: Tensor, tree: TreeTensors, pending: Tensor, masks: Masks | None = None
    ) -> tuple[StepOutput, Expansion]:  # fmt: skip
        """Verifies and commits a block that a strategy drafted for this draft model. The pass also runs the `pending` tokens before the
        root. The returned expansion has continuations of all ``N`` nodes. Each node's best continuation is the token chosen after it.
        """
        u = pending.shape[0]
        base = rows.length - 1 - u
        nodes = torch.cat([self._tail(rows, pending), draft_tokens], dim=1)
        block = after_text(u, tree)
        result = self.forward_pass(PassInput(nodes, base, block, rows.buffers, view))
        cut = ForwardResult(result.logits[:, u:, : self.vocab], result.hidden[:, u:])
        own, positions = nodes[:, u:], (rows.length - rows.prompt_length)[:, None] + tree.offsets
        prefixes = rows.prefixes(own, tree, view) if self.plan.reads_text else None
        expansion = self._expanded(cut.logits, rows, positions, masks, prefixes)
        verified = self.rule.verify(None, NodeBlock(own[:, 1:], tree, view, masks), own, cut, rows)
        return self.commit(own, tree, rows, cut, verified), expansion

    def root(self, rows: Rows, view: Tensor, pending: Tensor, masks: Masks | None = None) -> Expansion:
        """Returns the first level of a tree: continuations of every row's last token. pending: see :meth:`extend`."""
        result = self._read(rows, view, pending)
        positions = (rows.length - rows.prompt_length)[:, None]
        return self._expanded(result.logits, rows, positions, masks, self._text(rows, view))

    def expand(
        self, rows: Rows, view: Tensor, nodes: Tensor, tree: TreeTensors, masks: Masks | None = None
    ) -> Expansion:
        """Returns a further level of a tree: continuations of `nodes` ``[B, Q]``, the last ``Q`` nodes of `tree`.

        Earlier passes have run the tree's other nodes. This pass does not get their tokens, so it leaves out operations that read the
        text.
        """
        result = self.forward_pass(PassInput(nodes, rows.length - 1, tree, rows.buffers, view))
        positions = (rows.length - rows.prompt_length)[:, None] + tree.offsets[:, -nodes.shape[1] :]
        return self._expanded(result.logits[..., : self.vocab], rows, positions, masks)

    def _text(self, rows: Rows, view: Tensor) -> Prefixes | None:
        """The text of every row up to its last token; None if the plan reads no text."""
        if not self.plan.reads_text:
            return None
        last = rows.tokens.gather(1, rows.length[:, None] - 1)
        return rows.prefixes(last, causal_block(len(last), 1, last.device), view)

    def _process(
        self, logits: Tensor, rows: Rows, positions: Tensor, masks: Masks | None, prefixes: Prefixes | None
    ) -> Candidates:
        left = candidates(logits, self.plan, rows.sampling, positions, masks, self.children, prefixes)
        if masks is None or not self.padding:
            return left.settled()
        # A grammar may allow only tokens that the draft model lacks; the tokens drafted after such a node are never accepted.
        if host_reads(logits) and bool((left.scores.amax(-1) > float("-inf")).all()):
            return left.settled()
        return Candidates.whole(grammar_first(left.dense(), logits))

    def _expanded(
        self, logits: Tensor, rows: Rows, positions: Tensor, masks: Masks | None, prefixes: Prefixes | None = None
    ) -> Expansion:
        left = self._process(logits, rows, positions, masks, prefixes)
        tokens, weights = left.best(self.children, self.plan, rows.sampling, positions)
        return Expansion(tokens, weights, self._kept(left))

    def _kept(self, left: Candidates) -> Tensor | None:
        if not self.plan.keep_scores:
            return None
        scores = left.dense()
        return torch.nn.functional.pad(scores, (0, self.padding), value=float("-inf")) if self.padding else scores

    def _read(self, rows: Rows, view: Tensor, pending: Tensor) -> ForwardResult:
        """Runs a pass over every row's pending tokens and last token; returns the results of the last token, ``[B, 1, …]``."""
        nodes, root = self._tail(rows, pending), pending.shape[0]
        if root + 1 < LEAST_NODES:
            size = node_bucket(root + 1, self.target.static, self.target.multiple)
            nodes = torch.nn.functional.pad(nodes, (0, size - root - 1), value=-1)
        block = causal_block(nodes.shape[0], nodes.shape[1], nodes.device)
        base = rows.length - 1 - root
        result = self.forward_pass(PassInput(nodes, base, block, rows.buffers, view))
        last = slice(root, root + 1)
        return ForwardResult(result.logits[:, last, : self.vocab], result.hidden[:, last])

    @staticmethod
    def _tail(rows: Rows, pending: Tensor) -> Tensor:
        """``[B, U+1]``: every row's last ``U+1`` tokens. If a row has fewer tokens, copies of its first token come before them."""
        slots = rows.length[:, None] - 1 - pending.shape[0] + torch.arange(pending.shape[0] + 1, device=pending.device)
        return rows.tokens.gather(1, slots.clamp(min=0))
