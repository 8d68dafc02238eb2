"""Prefills the prompts of a batch: text with the loop's passes, images and sounds with the model's own forward pass."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...strategy import PromptChunk
from ..model.blocks import ForwardResult
from ..model.cache import CacheBuffers
from ..model.own_forward import WRONGLY_DIVIDED, MultimodalInputs, OwnForward
from .batch import Batch
from .prefix_cache import PrefillPlan
from .proposer import Proposer


class PromptReader:
    """Prefills the rows of a batch, and passes their prompts to a strategy that reads prompts."""

    def __init__(self, proposer: Proposer) -> None:
        self.batch, self.proposer = proposer.batch, proposer

    def read(self, lengths: list[int], reusable: list[int], *, leave_last_chunk: bool = False) -> None:
        """Prefills the rows.

        Args:
            lengths: number of tokens per row.
            reusable: per row, number of leading tokens whose keys and values are already in the row's slots.
            leave_last_chunk: whether to leave the end of the prompts to the first step. It must be False if steps are recorded.
        """
        batch = self.batch
        strategy_reads, inputs = batch.request.strategy.reads_prompt, batch.request.multimodal
        if strategy_reads:
            batch.where = "prefill"
        run = self._read_and_show if strategy_reads else batch.prefill
        read: set[int] = set()  # rows that the model's own forward pass has read
        reads_images = inputs is not None and not self.images_in_place(inputs, lengths, reusable)
        if inputs is not None and reads_images:
            if strategy_reads:
                chunk = self.read_images(inputs, lengths, 0, logits=batch.request.strategy.prompt_logits)
                assert chunk is not None
                self.proposer.show(chunk, 0)
                read, run = set(range(len(lengths))), batch.prefill
            else:
                read = self._read_missing_images(inputs, lengths, reusable)
            reusable = [length - 1 if row in read else reusable[row] for row, length in enumerate(lengths)]
        reused, left = batch.session.prefill(
            lengths, reusable, batch.request.runtime.prefill_chunk, run, leave_last_chunk=leave_last_chunk, padded=strategy_reads,
            given=batch.request.given is not None or reads_images,
        )  # fmt: skip
        batch.pending = batch.prompt_left = left
        batch.report.reused = [0 if row in read else count for row, count in enumerate(reused[: batch.row_count])]

    def images_in_place(self, inputs: MultimodalInputs, lengths: list[int], reusable: list[int]) -> bool:
        """Whether only text is left to prefill, because the keys and values of all images are in the rows' slots.

        lengths, reusable: see :meth:`read`.
        """
        target, starts = self.batch.target, reusable
        if not target.recurrent:  # rows prefill equally many tokens, so some reusable tokens may be computed again
            starts = PrefillPlan.of(lengths, reusable, None, target).starts
        return inputs.in_front_of(starts)

    def _read_missing_images(self, inputs: MultimodalInputs, lengths: list[int], reusable: list[int]) -> set[int]:
        """Reads the prompts whose images are not in the cache yet, and returns their rows.

        If `inputs` divides the images among the prompts (``inputs.alone``), prompts are read one by one. The division is a guess: if it
        is wrong, the model raises an exception, and all prompts are read together.
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
        except torch.OutOfMemoryError:  # reading all prompts together would need even more memory
            raise
        except WRONGLY_DIVIDED:
            # Later calls find kept texts by the hashes of their images. A wrong division would give wrong hashes, so it is dropped.
            self.batch.request = replace(self.batch.request, multimodal=replace(inputs, alone=()))
        self.read_images(inputs, lengths, 0, logits=False)
        return set(range(len(lengths)))

    def read_images(
        self, inputs: MultimodalInputs, lengths: list[int], first: int, *, logits: bool
    ) -> PromptChunk | None:  # fmt: skip
        """Reads prompts with the model's own forward pass. Returns the prompts as a chunk if the strategy reads prompts, else None.

        Args:
            lengths: number of tokens of each row from `first` on, padding rows included.
            first: the row of the first prompt.
            logits: whether the chunk includes logits.
        """
        rows, strategy_reads = (
            self.batch.session.stored.of_rows(first, first + len(lengths)),
            self.batch.request.strategy.reads_prompt,
        )
        result = self.own_forward.read(inputs, rows.buffers, rows.tokens, every=strategy_reads, logits=logits)
        if result is None:
            return None
        ends = torch.tensor(lengths, device=rows.tokens.device)
        tokens = rows.tokens[:, : result.hidden.shape[1]]
        return _chunk_of(result, tokens, *_places(ends, tokens, torch.zeros_like(ends)), logits=logits)

    @property
    def own_forward(self) -> OwnForward:
        """The model's own forward pass, which reads prompts with images or sounds."""
        return self.batch.engine.own_forward(self.batch.request.models.model, self.batch.target)

    def _read_and_show(self, tokens: Tensor, begin: Tensor, buffers: CacheBuffers, view: Tensor, latest: int) -> None:
        """Prefills a chunk of the prompts and passes it to the strategy. tokens: ``[B, N]``, for the slots from `begin` ``[B]`` on."""
        logits = self.batch.request.strategy.prompt_logits
        self.proposer.show(
            read_chunk(self.batch, self.batch.rows.length, tokens, begin, buffers, view, latest, logits=logits), latest
        )


def read_chunk(
    batch: Batch, lengths: Tensor, tokens: Tensor, begin: Tensor, buffers: CacheBuffers, view: Tensor, latest: int, *, logits: bool
) -> PromptChunk:  # fmt: skip
    """Runs a pass over a chunk of texts, and returns the chunk for a strategy that reads prompts.

    Args:
        lengths: ``[B]``, number of tokens of each text.
        tokens, begin, buffers, view, latest: see :meth:`Target.features`.
        logits: whether the chunk includes logits.
    """
    positions, valid = _places(lengths, tokens, begin)
    result = batch.forward_pass.features(
        tokens, begin, buffers, view, latest, logits=logits, valid=valid, recordings=batch.session.recordings
    )
    return _chunk_of(result, tokens, positions, valid, logits=logits)


def _places(lengths: Tensor, tokens: Tensor, begin: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``[B, N]`` positions of `tokens`, from `begin` ``[B]`` on, and whether each position is before its text's last token."""
    positions = begin[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    return positions, positions < lengths[:, None] - 1


def _chunk_of(result: ForwardResult, tokens: Tensor, positions: Tensor, valid: Tensor, *, logits: bool) -> PromptChunk:
    return PromptChunk(tokens, positions, valid, result.hidden, result.layers, result.logits if logits else None)
