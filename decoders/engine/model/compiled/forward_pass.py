"""The forward pass of a model for all callers: compiled or uncompiled, replayed (CUDA graph) or not, with or without a prompt piece."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ....sampling.processors import SamplingPlan
from .. import mixed
from ..attention import STRETCH
from ..blocks import Blocks, ForwardResult, PassInput, PromptPiece, causal_block
from ..buckets import LEAST_NODES
from ..cache import CacheBuffers
from ..recordings import Recordings
from ..static_inputs import copied
from ..target import Target
from .regions import laid_out, laid_out_piece
from .tiers import PassKind, Tiers

#: Number of nodes that get logits in a compiled pass if no logits are needed. A single node would need another graph.
FEWEST_LOGITS = 2


class ForwardPass:
    """The forward pass of one model. All uses of the model, as target or as draft model, share this object.

    Attributes:
        tiers: decides which passes run compiled.
        compiled_passes: number of passes that ran compiled so far.
    """

    def __init__(self, target: Target) -> None:
        self.target, self.tiers = target, Tiers(target)
        self.compiled_passes = 0

    def __call__(self, given: PassInput) -> ForwardResult:
        """Runs one pass over a block of nodes, compiled or not, and returns the results of :meth:`Target.forward`.

        A prompt piece is prefilled in the same pass if :meth:`~decoders.engine.model.compiled.tiers.Tiers.mixes` allows it, else in a
        separate pass. A pass with a root embedding always runs uncompiled; a call of ``generate`` has at most one such pass.
        """
        nodes = given.nodes
        if given.piece is not None and given.root is None:
            compiled, single = self.tiers.runs_compiled(several=True), nodes.shape[1] == 1
            if self.tiers.mixes(len(nodes), single=single):
                return self._mixed(given, given.piece, compiled)
            # The piece was meant for a mixed pass, but the block has an unexpected size, or a compilation has ended meanwhile.
            started = time.perf_counter()
            self.prefill(*given.piece.alone)
            self.tiers.book_mixed(time.perf_counter() - started, len(nodes), single=single)
        if given.root is None and self.tiers.runs_compiled(len(nodes) > 1):
            first = given.text.length
            return self._run(given, torch.arange(first, nodes.shape[1], device=nodes.device)).behind(first)
        with self._counted(nodes):
            return self.target.forward(given)

    def prefill(
        self, tokens: Tensor, start: Tensor, buffers: CacheBuffers, view: Tensor, latest: int,
        recordings: Recordings | None = None,
    ) -> None:  # fmt: skip
        """Runs :meth:`Target.prefill`, compiled or replayed if possible. recordings: the session's recordings; None for no replay."""
        if recordings is not None:
            # A recording fixes the number of slots that attention reads, so attention reads all slots.
            key = "prefill", buffers.place, len(view)
            read = lambda tokens, start: self.prefill(tokens, start, buffers, view, buffers.slots)  # noqa: E731
            self.replayed(recordings, key, read, (tokens, start), len(tokens), copy=False)
            return
        if self._reads_compiled(tokens):
            self._run(
                PassInput(tokens, start, causal_block(len(tokens), tokens.shape[1], tokens.device), buffers, view)
            )
            return
        with self._counted(tokens):
            self.target.prefill(tokens, start, buffers, view, latest)

    def features(
        self, tokens: Tensor, start: Tensor, buffers: CacheBuffers, view: Tensor, latest: int, *, logits: bool,
        valid: Tensor | None = None, recordings: Recordings | None = None,
    ) -> ForwardResult:  # fmt: skip
        """Runs :meth:`Target.features`, compiled or replayed if possible. If `logits` is False, only one or two tokens get logits."""
        if recordings is not None:
            key = "features", buffers.place, len(view), logits

            def read(tokens: Tensor, start: Tensor) -> ForwardResult:
                return self.features(tokens, start, buffers, view, buffers.slots, logits=logits)

            return self.replayed(recordings, key, read, (tokens, start), len(tokens), copy=True)
        if self._reads_compiled(tokens):
            kept = torch.arange(tokens.shape[1], device=tokens.device) if logits else None
            block = causal_block(len(tokens), tokens.shape[1], tokens.device)
            return self._run(PassInput(tokens, start, block, buffers, view), kept)
        with self._counted(tokens):
            return self.target.features(tokens, start, buffers, view, latest, logits=logits, valid=valid)

    def replayed(
        self, recordings: Recordings | None, key: Hashable, function: Callable[..., Any], given: tuple, rows: int,
        plan: SamplingPlan | None = None, *, copy: bool,
    ) -> Any:  # fmt: skip
        """Returns ``function(*given)``, the result of a pass. Once the function is recorded, a replay computes the result.

        Args:
            key, given: see :meth:`~decoders.engine.model.recordings.Recordings.run`.
            rows: number of rows of the pass.
            plan: the sampling plan with which the function draws tokens; None if it draws no tokens.
            copy: whether to copy the result of a replay, so that the next replay does not overwrite it.
        """
        if recordings is None:
            return function(*given)
        replays = recordings.replays
        result = recordings.run(lambda: (self, key, self.tiers.tier(rows, plan)), function, given)
        if recordings.replays == replays:
            return result
        self.compiled_passes += self.tiers.tier(rows, plan).compiled
        return copied(result) if copy else result

    def runs_single(self, rows: int) -> bool:
        """Whether the next pass may have a single node per row: if it runs uncompiled, or if passes with single nodes are compiled.

        Code compiled with dynamic sizes needs at least three nodes, so single nodes are compiled separately.
        """
        if not self.target.takes_single_nodes(rows):
            return False
        return not self.tiers.compiles(rows > 1) or self.tiers.may_take(PassKind(rows > 1, single_node=True))

    def fit(self, blocks: Blocks, rows: int) -> None:
        """Sets the padding of `blocks`, which depends on the number of rows and on whether the next pass runs compiled."""
        padded = self.target.static or self.target.rounds or self.target.pads_blocks
        blocks.exact = rows > 1 and not (padded or self.tiers.compiles(several=True))
        blocks.single = self.runs_single(rows)

    def _run(self, given: PassInput, kept: Tensor | None = None) -> ForwardResult:
        """Runs a compiled pass. kept: ``[K]`` int64, the nodes that get logits; None for :data:`FEWEST_LOGITS` nodes."""
        assert self.tiers.regional is not None
        self.compiled_passes += 1
        kept = torch.arange(FEWEST_LOGITS, device=given.nodes.device) if kept is None else kept
        tree = laid_out(given.tree)
        return ForwardResult(*self.tiers.regional(given.nodes, given.base, tree, given.buffers, given.view, kept))

    def _mixed(self, given: PassInput, piece: PromptPiece, compiled: bool) -> ForwardResult:
        if not compiled:
            with self._counted(given.nodes):
                return mixed.forward(self.target, given, piece)
        assert self.tiers.regional_mixed is not None
        self.compiled_passes += 1
        (rows, n), text = given.nodes.shape, given.text.length
        kept = mixed.with_logits(rows, n, text, given.nodes.device)
        tree, piece = laid_out(given.tree), laid_out_piece(piece)
        result = ForwardResult(*self.tiers.regional_mixed(given.nodes, given.base, tree, given.view, piece, kept))
        return mixed.by_row(result, rows, n).behind(text)

    def _reads_compiled(self, tokens: Tensor) -> bool:
        """Whether a chunk of text is prefilled by a compiled pass."""
        return tokens.shape[1] >= LEAST_NODES and self.tiers.runs_compiled(len(tokens) > 1)

    @contextmanager
    def _counted(self, nodes: Tensor) -> Iterator[None]:
        """Adds the seconds of the uncompiled pass in this context to the total that decides when this kind of pass is compiled. A long
        pass counts only in part, because compiling saves no more time in a long pass than in a short one.
        """
        started = time.perf_counter()
        yield
        share = min(STRETCH / nodes.shape[1], 1.0)
        self.tiers.kinds[PassKind(len(nodes) > 1)].seconds += share * (time.perf_counter() - started)
