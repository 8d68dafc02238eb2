"""Tokenization history: learns how rows split text into tokens, to propose tokens for the bytes that a grammar forces.

Forced bytes do not determine tokens: the target may split them in another way than the tokenizer, and tends to repeat its splits. The
first choice is the token that last followed the same token in the row, the second choice the row's latest token with the same first
byte. If the forced bytes do not begin with either token, the tokenizer's token is proposed.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ....constraints import Policy, Vocabulary
from ....strategy import Sequences

#: How many of a row's last tokens are read before every proposal; the first proposal reads the whole text. A step appends fewer tokens,
#: so committed tokens override what was learnt from a draft model's rejected tokens.
WINDOW = 64


class HostHistory:
    """The tokenization history of one row, on the host."""

    def __init__(self) -> None:
        self.after: dict[int | None, int] = {}  # for each token, the latest token that followed it
        self.begun: dict[int, int] = {}  # for each byte, the latest token that began with it
        self.last: int | None = None  # the row's last token; None before the first `read`

    def read(self, tokens: Tensor, length: int, vocabulary: Vocabulary) -> None:
        """Learns from the row's text, ``tokens[:length]``; after the first call only from the last :data:`WINDOW` tokens."""
        begin = 0 if self.last is None else max(length - WINDOW - 1, 0)
        for before, token in pairwise(tokens[begin:length].tolist()):
            if min(before, token) < 0:  # -1 stands for a position without a token id
                continue
            self.after[before] = token
            if text := vocabulary.tokens[token]:
                self.begun[text[0]] = token
        self.last = int(tokens[length - 1])

    def spell(self, forced: bytes, vocabulary: Vocabulary, policy: Policy, limit: int) -> list[int]:
        """Returns at most `limit` tokens that spell `forced`, or the beginning of it."""
        run: list[int] = []
        before, canonical = self.last, list[int]()  # the rest of the tokenizer's own split
        while forced and len(run) < limit:
            token = self._learnt(before, forced, vocabulary)
            if policy == "canonical":  # only the tokenizer's own split is legal
                canonical = vocabulary.canonical(forced)
                token = canonical[0] if canonical else token
            elif token is None:
                canonical = canonical or vocabulary.canonical(forced)
                token = canonical[0] if canonical else None
            if token is None:
                break
            canonical = canonical[1:] if canonical[:1] == [token] else []
            run.append(token)
            before, forced = token, forced[len(vocabulary.tokens[token] or b"") :]
        return run

    def _learnt(self, before: int | None, forced: bytes, vocabulary: Vocabulary) -> int | None:
        for token in (self.after.get(before), self.begun.get(forced[0])):
            if token is not None and (text := vocabulary.tokens[token]) and forced.startswith(text):
                return token
        return None


class DeviceHistory:
    """The tokenization history of all rows, on the device.

    Attributes:
        after: ``[B, V]`` int64, ``time * V + token`` for the latest token that followed each token; -1 for none.
        begun: ``[B, 257]`` int64, ``time * V + token`` for the latest token that began with each byte; the last column is for tokens
            without text.
        sizes: ``[V]`` int64, number of bytes of each token.
        leads: ``[V]`` int64, first byte of each token; 256 for a token without text.
        time: 0-D int64, number of slots per row that :meth:`read` has read, so that later tokens get larger values.
    """

    def __init__(self, rows: int, vocabulary: Vocabulary, device: torch.device) -> None:
        texts = vocabulary.tokens
        self.sizes = torch.tensor([len(text or b"") for text in texts], device=device)
        self.leads = torch.tensor([text[0] if text else 256 for text in texts], device=device)
        self.after = torch.full((rows, len(texts)), -1, device=device)
        self.begun = torch.full((rows, 257), -1, device=device)
        self.time = torch.zeros((), dtype=torch.int64, device=device)
        self._window: int | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that recorded steps read and write: what was learnt from the rows, and the sizes and first bytes of tokens."""
        return self.after, self.begun, self.time, self.sizes, self.leads

    def read(self, sequences: Sequences) -> None:
        """Learns from the committed tokens of the rows."""
        tokens, length = sequences.tokens, sequences.length[:, None]
        window, self._window = self._window or tokens.shape[1], WINDOW
        index = torch.arange(window, device=tokens.device)
        position = length - window + index
        slot = position.clamp(0, tokens.shape[1] - 1)
        new, before = tokens.gather(1, slot), tokens.gather(1, (slot - 1).clamp(min=0))
        # The latest token has the largest value, so the maximum keeps it, whatever the order of the scatter's writes.
        valid = (position >= 1) & (new >= 0) & (before >= 0)
        worth = torch.where(valid, (self.time + index) * self.after.shape[1] + new, -1)
        self.after.scatter_reduce_(1, before.clamp(min=0), worth, "amax")
        self.begun.scatter_reduce_(1, self.leads[new.clamp(min=0)], worth, "amax")
        self.time.add_(window)


def spell(
    limit: int, position: Tensor, before: Tensor, after: Tensor, begun: Tensor, sizes: Tensor,
    columns: Tensor, grammar: Tensor, entries: Tensor, room: Tensor, byte: Tensor, canonical: Tensor,
) -> Tensor:  # fmt: skip
    """Returns tokens for the bytes that the grammars force, ``[B, limit]`` int64, -1 after the last token.

    Args:
        position, before: ``[B]`` int64, the rows' positions in `entries`, and their last tokens.
        after, begun, sizes: see :class:`DeviceHistory`.
        columns, grammar, entries: see :class:`~decoders.engine.decode.grammar.device_guide.DeviceAutomaton`.
        room, byte, canonical: ``[S]`` int64, for each state the number of forced bytes, the first forced byte, and the first token of
            the tokenizer's split of these bytes; -1 for no byte or no token.
    """
    run = []
    before = before.clamp(min=0)
    for _ in range(limit):
        state = entries[position]
        left, lead = room[state][:, None], byte[state][:, None]
        learnt = torch.cat([after.gather(1, before[:, None]), begun.gather(1, lead.clamp(min=0))], dim=1)
        tokens = torch.where(learnt >= 0, learnt % after.shape[1], 0)
        leads = entries[position[:, None] + columns[grammar[:, None], tokens]]
        size = sizes[tokens]
        fits = (learnt >= 0) & (size > 0) & (size <= left) & (leads > 0)
        token = torch.where(fits[:, 0], tokens[:, 0], torch.where(fits[:, 1], tokens[:, 1], canonical[state]))
        token = torch.where(left[:, 0] > 0, token, -1)
        run.append(token)
        # After the last token, rows are in the dead state, which forces nothing.
        before = token.clamp(min=0)
        following = entries[position + columns[grammar, before]]
        position = torch.where(token >= 0, following, 0)
    return torch.stack(run, dim=1)
