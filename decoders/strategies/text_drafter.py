"""Drafts *text* with a draft model that shares few tokens with the target (string-level alignment).

transformers' universal assisted decoding and Timor et al. 2025 (arXiv 2502.05202, string-level exact match) do the same. The
committed text is encoded in the draft model's tokens. The draft model continues it greedily, and the continuation is encoded in the
target's tokens. Each step encodes only the end of the text again. The draft is a chain without probabilities, as in prompt lookup.
The target may split the same text into other tokens. Then fewer draft tokens are accepted, but the output does not change.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..constraints import Vocabulary
from ..drafters import ModulePasses, OtherVocabulary, cache_keyword
from ..errors import UnsupportedError
from ..strategy import Context, Draft, Sequences

__all__ = ["TextDrafter"]

#: The last LOOKBEHIND tokens of a text are encoded again together with new text. Encoding begins ANCHOR tokens before them, to find a
#: place at which a token ends both in the old and in the new encoding.
LOOKBEHIND, ANCHOR = 8, 8
#: Greatest number of tokens of a prompt that one pass of the draft model reads.
CHUNK = 512
#: Continuation bytes of UTF-8, 10xxxxxx.
_CONTINUATION = range(0x80, 0xC0)


class TranslatedText:
    """A row's text in the draft model's tokens.

    Args:
        own: vocabulary of the target.
        other: vocabulary of the draft model.
        begin: tokens of the draft model that come before every text.

    Attributes:
        tokens: the target's tokens read so far.
        text: the bytes of `tokens`.
        ids: the same text in the draft model's tokens.
        valid: number of tokens at the start of `ids` that have keys and values in the draft model's cache.
    """

    def __init__(self, own: Vocabulary, other: Vocabulary, begin: Sequence[int]) -> None:
        self.own, self.other = own, other
        self.tokens: list[int] = []
        self.text = b""
        self.ids, self._ends = list(begin), [0] * len(begin)
        self._begin, self.valid = len(begin), 0

    def read(self, tokens: Sequence[int]) -> None:
        """Appends committed tokens of the target to `tokens` and `text`, and encodes the end of the text again for `ids`."""
        self.tokens += tokens
        self.text += self.own.spell(tokens)
        # The last tokens are encoded again, because they may end within a character, or be joined with the new text.
        first = self._boundary(max(len(self.ids) - LOOKBEHIND - ANCHOR, self._begin))
        start = self._ends[first - 1] if first else 0
        new = self.other.encoded(self.text[start:])
        ends = [start + end for end in accumulate(len(self.other.tokens[token] or b"") for token in new)]
        kept, taken = self._meeting(first, ends)
        while kept < len(self.ids) and taken < len(new) and self.ids[kept] == new[taken]:
            kept, taken = kept + 1, taken + 1
        self.ids[kept:], self._ends[kept:] = new[taken:], ends[taken:]
        self.valid = min(self.valid, kept)

    @property
    def pending(self) -> bytes:
        """The bytes of an incomplete character at the end of the text, which `ids` does not contain yet; `ids` is not empty."""
        return self.text[self._ends[-1] :]

    def proposed(self, drafted: Sequence[int]) -> list[int]:
        """The text of `drafted`, tokens of the draft model, in the target's tokens. Empty if the text does not begin with `pending`."""
        text = b""
        for token in drafted:
            piece = self.other.tokens[token]
            if piece is None:  # a stop token, or another token without text
                break
            text += piece
        if not text.startswith(self.pending):
            return []
        text = text[len(self.pending) :]
        first = max(len(self.tokens) - ANCHOR, 0)
        before = self.own.spell(self.tokens[first:])
        while before and before[0] in _CONTINUATION:
            first += 1
            before = self.own.spell(self.tokens[first:])
        size = 0
        tokens = self.own.encoded(before + text)
        for count, token in enumerate(tokens):
            if size == len(before):
                return tokens[count:]
            size += len(self.own.tokens[token] or b"")
        # A token spans the border between committed and drafted text. So the drafted text is encoded by itself.
        return self.own.encoded(text)

    def _boundary(self, place: int) -> int:
        """The greatest index in `ids`, at most `place`, of a token that begins at the start of a character."""
        while place > self._begin and self.text[self._ends[place - 1]] in _CONTINUATION:
            place -= 1
        return place

    def _meeting(self, first: int, ends: Sequence[int]) -> tuple[int, int]:
        """Finds a place in the text at which a token ends both in the old and in the new encoding of the text's end.

        Args:
            first: index in `ids` of the first token that was encoded again.
            ends: for each new token, where it ends in `text`.

        Returns:
            the number of tokens of `ids` and the number of new tokens before this place; ``first, 0`` if there is no such place.
        """
        old = {end: place + 1 for place, end in enumerate(self._ends) if place >= first}
        for place, end in enumerate(ends):
            kept = old.get(end)
            if kept is not None and kept - first >= ANCHOR // 2 and kept <= len(self.ids) - LOOKBEHIND // 2:
                return kept, place + 1
        return first, 0


class TextDrafter:
    """Drafts text during a call, with a draft model that has another vocabulary than the target.

    Args:
        context: the call's context.
        vocabularies: the result of ``context.vocabulary_of(model)``, for the model that drafts.
        length: greatest number of tokens of the draft model per step.
    """

    def __init__(self, context: Context, vocabularies: OtherVocabulary, length: int) -> None:
        if context.level > 0:
            raise UnsupportedError(
                "a draft model with another vocabulary can draft for the target only, not for a draft model"
            )
        self.vocabularies, self.device = vocabularies, context.device
        self.rows = [
            TranslatedText(vocabularies.own, vocabularies.other, vocabularies.begin) for _ in range(context.rows)
        ]
        # On a CPU the draft model's cache grows.
        self.capacity = math.inf if self.device.type == "cpu" else context.slots
        self._without_text = TranslatedText(vocabularies.own, vocabularies.other, ())
        self.module: ModulePasses = context.module(
            likeliest_tokens(vocabularies.model), ahead=length + 2, on_device=False,
            example=(torch.zeros(1, 1, dtype=torch.int64, device=context.device),),
        )  # fmt: skip

    @property
    def passes(self) -> int:
        """Number of passes of the draft model so far."""
        return self.module.passes

    def draft(self, sequences: Sequences, length: int) -> Draft:
        """Drafts `length` tokens with the draft model. Returns their text as a chain of the target's tokens. Waits for the device."""
        known = sequences.read()
        first = min(len(row.tokens) for row in self.rows)
        for row, written, end in zip(self.rows, known.tokens_from(first), known.lengths, strict=True):
            if end > len(row.tokens):
                row.read(written[len(row.tokens) - first :])
        # A token of the target may be many tokens of the draft model. Rows that exceed the draft model's cache are not read, and get
        # no draft.
        rows = [row if len(row.ids) < self.capacity else self._without_text for row in self.rows]
        open_rows = [not ended and bool(row.ids) for row, ended in zip(rows, known.finished, strict=True)]
        if not any(open_rows):
            return Draft.chain(torch.full((len(rows), 1), -1, device=self.device))
        drafted = self._run(rows, length).tolist()
        proposals = [
            row.proposed(ids)[: 2 * length] if going else []
            for row, ids, going in zip(rows, drafted, open_rows, strict=True)
        ]
        width = max(1, *map(len, proposals))
        padded = [[*ids, *[-1] * (width - len(ids))] for ids in proposals]
        return Draft.listed(padded)

    def _run(self, rows: Sequence[TranslatedText], length: int) -> Tensor:
        """The draft model's greedy continuation of the rows, ``[B, length]`` int64."""
        while (missing := max(len(row.ids) - row.valid for row in rows)) > CHUNK:
            taken = min(missing - 1, CHUNK)
            starts = [min(row.valid, max(len(row.ids) - 1, 0)) for row in rows]
            self.module(*self._window(rows, starts, taken), last=True)
            for row, start in zip(rows, starts, strict=True):
                row.valid = min(start + taken, max(len(row.ids) - 1, 0))
        width = max(2, missing)
        starts = [max(len(row.ids) - width, 0) for row in rows]
        ends = torch.tensor([max(len(row.ids) - 1, 0) for row in rows], device=self.device)
        last = torch.tensor([row.ids[-1] if row.ids else 0 for row in rows], device=self.device)[:, None]
        # Only the token after each row's last token is needed. If no row is shorter than the pass, the pass's last node predicts it.
        even = all(len(row.ids) >= width for row in rows)
        best = self.module(*self._window(rows, starts, width), last=even)
        place = ends - torch.tensor(starts, device=self.device)
        drafted = [best if even else best.gather(1, place[:, None])]
        for step in range(1, length):
            # The pass reads the previous token again, because a pass over one token would need another graph.
            read, last = torch.cat([last, drafted[-1]], dim=1), drafted[-1]
            drafted.append(self.module(ends + step - 1, read, last=True))
        for row in rows:
            row.valid = len(row.ids)
        return torch.cat(drafted, dim=1)

    def _window(self, rows: Sequence[TranslatedText], starts: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """The inputs of a pass: every row's first slot ``[B]`` and tokens ``[B, count]``. Tokens after a row's end are arbitrary."""
        ids = [row.ids[start : start + count] for row, start in zip(rows, starts, strict=True)]
        padded = [[*some, *[0] * (count - len(some))] for some in ids]
        return torch.tensor(list(starts), device=self.device), torch.tensor(padded, device=self.device)


class _LikeliestTokens(nn.Module):
    """A language model whose passes return the likeliest next token after every node."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = copy.copy(model)  # the copy shares the modules, so the model object itself can be freed
        vars(self.model).pop("generate", None)
        self.cache_keyword = cache_keyword(self.model)
        config = model.config.get_text_config(decoder=True)
        self.positions = getattr(config, "max_position_embeddings", None) or 1 << 30

    def forward(
        self, tokens: Tensor, *, attention_mask: Tensor, position_ids: Tensor, cache: Any, last: bool = False
    ) -> Tensor:  # fmt: skip
        """The likeliest next token after every node, ``[B, N]`` int64. With `last`, only after the last node, ``[B, 1]``."""
        logits = self.model(
            input_ids=tokens, attention_mask=attention_mask, position_ids=position_ids.clamp(max=self.positions - 1),
            use_cache=True, logits_to_keep=1 if last else 0, **{self.cache_keyword: cache},
        ).logits  # fmt: skip
        return logits.argmax(-1)


_made_ready: weakref.WeakKeyDictionary[PreTrainedModel, nn.Module] = weakref.WeakKeyDictionary()


def likeliest_tokens(model: PreTrainedModel) -> nn.Module:
    """The module for :attr:`Context.module`. The same model always gives the same object."""
    if model not in _made_ready:
        _made_ready[model] = _LikeliestTokens(model)
    return _made_ready[model]
