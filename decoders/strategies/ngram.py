"""N-gram drafting: the likeliest followers of the last two tokens, as in the lowest stage of Spector & Ré (2023).

A follower of a context is a token that came after the same tokens earlier. Stupid back-off (Brants et al. 2007) scores a follower by
the longest context that it followed. In the draft tree, only the likeliest node of each depth is expanded, as in "Accelerating LLM
Inference with Staged Speculative Decoding" (arXiv 2308.04623).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn.functional import pad

from ..sampling import in_64_bits
from ..settings import Settings
from ..strategy import Context, Draft, Sequences, Strategy
from ..tree import NO_PARENT, Topology
from .followed_text import FollowedText, follow_rows
from .ngram_counts import BACK_OFF, SCORE_BITS, NgramCounts
from .ngram_table import MAX_NGRAM, context_key, load_table


class NgramSettings(Settings):
    """The shape of drafts, and the source of the counts.

    The default tree costs as much as a chain of 7 tokens. Wider trees, such as the paper's, are faster only if nodes are almost free.
    """

    widths: tuple[int, ...] = Field(
        (2, 1, 1, 1, 1, 1),
        min_length=1,
        max_length=16,
        description="Number of draft tokens at each depth of the tree; all of them follow the best token of the depth before. "
        "Paper: 12, 7, 4, 1, 1, 1.",
    )
    max_ngram: int = Field(
        3,
        ge=1,
        le=MAX_NGRAM,
        description="Maximum length of an n-gram, in tokens: 3 predicts from the last two tokens.",
    )
    table: Path | None = Field(
        None,
        description="File of n-gram counts from `decoders train ngram`, which are added to the counts of the text. None: only "
        "the counts of the text.",
    )
    text_weight: int = Field(
        512, ge=1, le=10**6, description="Weight of an occurrence in the text, relative to an occurrence in the table."
    )

    @field_validator("widths")
    @classmethod
    def _some_at_each_depth(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if not all(1 <= width <= 64 for width in widths):
            raise ValueError("every width must be 1 … 64")
        return widths


@dataclass(frozen=True)
class NgramState:
    """The state of a call.

    Attributes:
        predict: :func:`mini_tree`, compiled if the call is compiled.
        scratch: ``[B, V]`` int32, working memory for counting equal tokens; its values are not kept between steps.
        table: tensors of the saved table, four for each length of n-grams (:class:`~.ngram_table.NgramOrder`).
        texts: the rows' texts with their counts, for steps on the host. Empty if every step counts the whole text, in tensors.
        append_only: whether the rows' texts only grow.
    """

    predict: Callable[..., Tensor]
    scratch: Tensor
    table: tuple[Tensor, ...]
    texts: list[FollowedText[NgramCounts]]
    append_only: bool


class Ngram(Strategy):
    """Proposes the tokens that most often followed the row's last tokens, in prompt and output, in a saved table, or in both.

    On a GPU, or with a table, every step counts the whole text. On a CPU without a table, each step only updates the counts; if
    the strategy drafts for a draft model, it also subtracts rejected tokens. Drafts are the same in all cases.
    """

    name = "ngram"
    summary = "Proposes the likeliest followers by n-gram counts of the text so far, a saved table, or both."
    settings_class = NgramSettings
    auto_place = 30
    auto_settings = {"widths": (2, 1, 1, 1, 1, 1, 1, 1)}
    on_device = True
    grade_rates = (0.05, 0.3, 0.75)  # a token's grade is its order (:func:`followers`)

    def start(self, context: Context) -> NgramState:
        s: NgramSettings = self.settings
        scratch = in_64_bits(torch.empty(context.rows, context.vocab_size, dtype=torch.int32, device=context.device))
        orders = load_table(s.table, context.vocab_size, scratch.device)[: s.max_ngram] if s.table else ()
        table = tuple(tensor for order in orders for tensor in order)
        # If this strategy drafts for a draft model, the target may reject tokens, which are then removed from the text.
        return NgramState(context.compile(mini_tree), scratch, table, [], append_only=context.level == 0)

    def rebatch(self, state: NgramState, rows: Tensor, context: Context) -> NgramState:
        texts = [state.texts[row] if row >= 0 else self._text() for row in rows.tolist()] if state.texts else []
        return replace(state, scratch=state.scratch.new_empty(context.rows, context.vocab_size), texts=texts)

    def propose(self, state: NgramState, sequences: Sequences) -> Draft:
        s: NgramSettings = self.settings
        if sequences.on_host and not state.table:
            state.texts.extend(self._text() for _ in range(len(sequences.tokens) - len(state.texts)))
            finished = follow_rows(state.texts, sequences, state.append_only, lambda _: self._text())
            nothing = [-1] * sum(s.widths), [0] * sum(s.widths)
            drafts = [
                nothing if ended else text.index.spine(s.widths)
                for text, ended in zip(state.texts, finished, strict=True)
            ]
            draft_tokens, orders = (torch.tensor(values) for values in zip(*drafts, strict=True))
        else:
            text = in_64_bits(sequences.tokens), in_64_bits(sequences.length)
            predicted = state.predict(*text, s.widths, s.max_ngram, s.text_weight, state.scratch, *state.table)
            draft_tokens, orders = (tensor.to(sequences.tokens.device) for tensor in predicted)
        return Draft(draft_tokens, spine(s.widths), grades=orders)

    def _text(self) -> FollowedText[NgramCounts]:
        return FollowedText(NgramCounts(self.settings.max_ngram))


@lru_cache
def spine(widths: tuple[int, ...]) -> Topology:
    """The tree in which only the first node of each depth has children. The widths ``(3, 2)`` give the parents ``-1, 0, 1, 0, 0, 1``.

    The first nodes of all depths come before the other nodes. So the first nodes have the cache slots that plain decoding would give
    them, and the same bits in their keys and values.
    """
    siblings = [depth for depth, width in enumerate(widths) for _ in range(width - 1)]
    return Topology.from_parents([NO_PARENT, *range(len(widths)), *siblings])


def mini_tree(
    tokens: Tensor, length: Tensor, widths: tuple[int, ...], max_ngram: int, text_weight: int, scratch: Tensor,
    *table: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The draft tokens, in the sequence of the nodes of :func:`spine`, and the n-gram order of each token (:func:`followers`).

    Both are ``[B, sum(widths)]`` int64. All depths compile to one graph, because calling one graph for each depth would take longer.
    """
    slots = length[:, None] - 1 - torch.arange(max_ngram - 1, device=tokens.device)[None]
    context = torch.where(slots >= 0, tokens.gather(1, slots.clamp(min=0)), -1)
    draft_tokens, orders = [], []
    for width in widths:
        best, context, order = followers(tokens, length, context, width, text_weight, scratch, *table)
        draft_tokens.append(best)
        orders.append(order)
    return _best_first(draft_tokens), _best_first(orders)


def _best_first(depths: list[Tensor]) -> Tensor:
    """Concatenates the nodes of all depths: the best node of each depth, then all other nodes. depths: ``[B, width]`` each."""
    return torch.cat([*(depth[:, :1] for depth in depths), *(depth[:, 1:] for depth in depths)], 1)


def followers(
    tokens: Tensor, length: Tensor, context: Tensor, width: int, text_weight: int, scratch: Tensor, *table: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest followers of `context` in each row.

    The order of a follower is the greatest ``n`` for which it followed the ``n`` most recent tokens of `context`, in the text or in the
    table. The follower's score is its share among all followers of these ``n`` tokens, times 0.4 for each older token of `context`.
    Among equal scores, followers in the text come first, the latest first. Then come followers found only in the table: higher orders
    first, and followers of the same order in the table's sequence.

    Args:
        tokens: ``[B, L]`` int64, the rows' token ids, less than V.
        length: ``[B]`` int64, number of valid tokens per row.
        context: ``[B, 0 … 2]`` int64, the most recent token first; -1 where a row is too short.
        text_weight: weight of an occurrence in the text relative to an occurrence in the table.
        scratch: ``[B, V]`` int32, working memory, overwritten.
        table: the tensors of every :class:`~decoders.strategies.ngram_table.NgramOrder`, the lowest order first.

    Returns:
        the followers, ``[B, width]`` int64, best first, without duplicates, padded with -1; the next context, which begins with the
        best follower; and the order of each follower, ``[B, width]``.
    """
    slots = tokens.shape[1]
    inside = torch.arange(slots, device=tokens.device)[None] < length[:, None]
    last = [context[:, k : k + 1] for k in range(context.shape[1])]
    matches = [inside]
    for back, token in enumerate(last, 1):
        # earlier[p] = tokens[p - back]. Before the start `earlier` is -2, unlike all tokens, and unlike -1 for a missing token.
        earlier = pad(tokens, (back, 0), value=-2)[:, :slots]
        matches.append(matches[-1] & (earlier == token))
    entries = _entries(table, last, length[:, None], scratch.shape[1])
    best, order = _ranked(torch.where(inside, tokens, 0), matches, entries, width, text_weight, scratch)
    return best, torch.cat([best[:, :1], context], 1)[:, : context.shape[1]], order


def _entries(
    table: tuple[Tensor, ...], context: list[Tensor], lengths: Tensor, vocab_size: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The table's entries for `context`, one for each order: followers ``[B, C]``, their counts ``[B, C]``, and the total ``[B, 1]``.

    If the context is not in the table, the followers are -1, and counts and total are 0. lengths: ``[B, 1]`` int64.
    """
    counts_by_order = []
    for n in range(len(table) // 4):
        keys, tokens, counts, totals = table[4 * n : 4 * n + 4]
        # The key is negative, and so not in the table, if the text is too short for a context of this order.
        key = context_key(context[:n], vocab_size, lengths)
        at = torch.searchsorted(keys, key).clamp(max=keys.shape[0] - 1)
        known = keys[at] == key
        row = at[:, 0]
        counts_by_order.append(
            (
                torch.where(known, tokens[row].long(), -1),
                torch.where(known, counts[row], 0).double(),
                torch.where(known, totals[at], 0).double(),
            )
        )
    return counts_by_order


def _ranked(
    text: Tensor, matches: list[Tensor], entries: list[tuple[Tensor, Tensor, Tensor]], width: int, text_weight: int,
    scratch: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The best followers of each row, ``[B, width]``, best first, padded with -1; and each follower's order (:func:`followers`).

    Args:
        text: ``[B, L]`` int64.
        matches: a ``[B, L]`` bool tensor for each order: whether a token of the text follows the context of this order.
        entries: the table's entries for each order, from :func:`_entries`.
    """
    # The candidates, with duplicates: the table's followers, then the text's tokens. Among equal scores the later candidate wins.
    tokens = torch.cat([*(tokens.flip(1) for tokens, _, _ in entries), text], 1).clamp(min=0)
    slot = torch.arange(tokens.shape[1], device=text.device)[None].expand_as(tokens)
    # Equal tokens are counted together, at the slot that `scratch` holds for the token after this assignment. Only entries written here
    # are read, so `scratch` need not be cleared. Compiled code assigns in place, while scatter_ would copy all of `scratch`.
    scratch[torch.arange(len(tokens), device=text.device)[:, None], tokens] = slot.int()
    place = scratch.gather(1, tokens).long()
    score = torch.zeros_like(tokens, dtype=torch.float64)
    order = torch.zeros_like(tokens)
    # True for slots whose token follows the longest context that the same token follows in any slot.
    eligible = torch.zeros_like(tokens, dtype=torch.bool)
    for n, matched in enumerate(matches):
        # Sums of integers in float64 are exact in any order, so every device finds the same ties.
        own = matched.double() * text_weight
        total = own.sum(1, keepdim=True)
        of_table = [torch.zeros_like(counts) for _, counts, _ in entries]
        if n < len(entries):
            of_table[n] = entries[n][1].flip(1)
            total = total + entries[n][2]
        weight = torch.cat([*of_table, own], 1)
        count = torch.zeros_like(score).scatter_add_(1, place, weight).gather(1, place)
        score = torch.where(count > 0, count / total, BACK_OFF * score)
        eligible = torch.where(count > 0, weight > 0, eligible)
        order = torch.where(count > 0, n, order)
    # An integer that sorts candidates by score and then by slot. A token gets the largest integer of its slots.
    worth = torch.where(eligible, (score * 2.0**SCORE_BITS).long() * tokens.shape[1] + slot, -1)
    worth = torch.full_like(worth, -1).scatter_reduce_(1, place, worth, "amax")
    best = pad(worth, (0, width), value=-1).topk(width, 1).values
    place = best % tokens.shape[1]
    return torch.where(best >= 0, tokens.gather(1, place), -1), order.gather(1, place)
