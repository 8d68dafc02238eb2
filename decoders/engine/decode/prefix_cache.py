"""Prefix reuse and prefill plans: how many tokens a prompt shares with a kept (cached) text, and which passes prefill the rest."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..model.buckets import LEAST_NODES, prefill_chunks, round_up
from ..model.target import PREFILL_CHUNK, Target


@dataclass(frozen=True)
class KeptText:
    """A text whose keys and values are in slots ``0 … len(tokens)-1`` of a row; or a prompt to compare with kept texts.

    Attributes:
        tokens: 1-D int64, on the CPU.
        whole: whether only a prompt that begins with the whole text can reuse it, because a recurrent state cannot be rolled back.
        salt: texts with different salts share nothing.
        least: least number of leading tokens that can be reused: up to the last image, because all images are read together.
    """

    tokens: Tensor
    whole: bool = False
    salt: str = ""
    least: int = 0

    @cached_property
    def key(self) -> tuple[str, bytes]:
        """The key for sorting: salt, and tokens as bytes, because Python sorts bytes much faster than tensors."""
        return self.salt, self.tokens.numpy().tobytes()

    def shared_with(self, prompt: KeptText) -> int:
        """The number of leading tokens that `prompt` shares with this text and can reuse."""
        n = min(len(self.tokens), len(prompt.tokens))
        if not n or prompt.salt != self.salt or (self.whole and len(self.tokens) >= len(prompt.tokens)):
            return 0
        differing = (self.tokens[:n] != prompt.tokens[:n]).nonzero()
        if len(differing):
            n = 0 if self.whole else int(differing[0])
        return n if n >= self.least else 0

    def cut(self, count: int) -> KeptText:
        """The first `count` tokens of this text, if they can be reused; else an empty text."""
        if count >= len(self.tokens):
            return self
        return NOTHING if self.whole or count < self.least else replace(self, tokens=self.tokens[:count])


NOTHING = KeptText(torch.empty(0, dtype=torch.int64, device="cpu"))


class PrefixIndex:
    """Finds the text that shares the longest prefix with a prompt.

    If texts and prompt are sorted, this text is a neighbour of the prompt. So n prompts and n texts take O(n log n) comparisons.
    """

    def __init__(self, texts: list[KeptText]) -> None:
        self.texts = texts
        self._order = sorted(range(len(texts)), key=lambda place: texts[place].key)
        self._keys = [texts[place].key for place in self._order]
        self._any_whole = any(text.whole for text in texts)

    def longest(self, prompt: KeptText) -> tuple[int, int]:
        """The greatest number of tokens that a text shares with `prompt`, and the text's index; ``(0, 0)`` without texts."""
        index = bisect_left(self._keys, prompt.key)
        beside = self._order[max(index - 1, 0) : index + 1]
        if self._any_whole:  # a shorter text may be reusable although both neighbours are not
            beside = self._order
        return max(((self.texts[place].shared_with(prompt), place) for place in beside), default=(0, 0))


@dataclass(frozen=True)
class PrefillPlan:
    """How prompts are prefilled.

    Attributes:
        starts: per row, the first slot that is prefilled. All rows prefill the same number of tokens, so a row that reuses more tokens
            than others computes some of them again.
        chunks: ``(offset from starts, number of tokens)``; each is a pass over all rows.
        left: number of tokens before each row's last token that no prefill pass runs, because the first step runs them.
    """

    starts: list[int]
    chunks: list[tuple[int, int]]
    left: int

    @staticmethod
    def of(
        lengths: list[int], reused: list[int], chunk: int | None, target: Target, *, leave_last_chunk: bool = False,
        given: bool = False,
    ) -> PrefillPlan:  # fmt: skip
        """The plan. The arguments are as in :meth:`~decoders.engine.decode.session.Session.prefill`.

        Args:
            given: whether reused tokens must not be computed again, because they have no token ids (images, the caller's cache).
        """
        chunk = chunk or PREFILL_CHUNK
        ends, multiple = [length - 1 for length in lengths], target.multiple
        # Some recurrent layers cannot continue a text with several tokens. They would read a second chunk token by token, so one chunk
        # is used.
        if not target.continues:
            chunk = max(chunk, *ends)
        # Passes with fewer tokens than LEAST_NODES would run uncompiled in a compiled call, and round differently. But passes of
        # recurrent models are not padded, because states must stop at a text's end.
        least = 1 if target.recurrent else LEAST_NODES
        chunk = max(chunk - chunk % multiple, multiple, least)
        # A chunk may reach beyond the end of a row's prompt; steps overwrite such slots before they read them. If `multiple` > 1, a
        # step may run the last tokens of a prompt again, and must write the bits that the prefill has written. As a kept text may
        # come from another tier (compiled or not), its last `multiple` tokens are computed again.
        again = multiple if multiple > 1 and not given else 0
        unread = [max(end - kept, min(end, again)) for end, kept in zip(ends, reused, strict=True)]
        longest = max(unread, default=0)
        pending = round_up(longest, multiple)
        starts = list(reused) if given else [max(end - pending, 0) for end in ends]
        last = (pending - 1) % chunk + 1 if pending else 0
        if leave_last_chunk and (not given or all(count == pending for count in unread)):
            return PrefillPlan(starts, prefill_chunks(pending - last, chunk, target.static, least), last)
        return PrefillPlan(starts, prefill_chunks(pending, chunk, target.static, least), 0)
