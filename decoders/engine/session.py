"""What outlives a call: the rows' buffers, and the texts whose keys and values they still hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..strategy import Sequences
from .invariance import round_up, round_view
from .rows import Rows
from .sampling import SamplingInputs
from .target import Target

#: Slots come in multiples of this, and a view is at least one smaller than the cache.
VIEW_STEP = 64
#: Blocks up to this size fit behind the longest row without growing the cache.
BLOCK_MARGIN = 64
#: Free sessions that keep their buffers.
KEPT_SESSIONS = 2


@dataclass(frozen=True)
class KeptText:
    """A text whose keys and values stand in slots ``0 … len(tokens)-1`` of a row. tokens: 1-D int64, on the CPU."""

    tokens: Tensor

    def shared_with(self, prompt: Tensor) -> int:
        """How many tokens `prompt` (1-D int64, on the CPU) begins with that this text begins with, too."""
        n = min(len(self.tokens), len(prompt))
        differing = (self.tokens[:n] != prompt[:n]).nonzero()
        return int(differing[0]) if len(differing) else n


NOTHING = KeptText(torch.empty(0, dtype=torch.int64))


class Session:
    """Rows of one batch size, their views, and what the last call left in them.

    Attributes:
        rows: on the device.
        batch: number of rows.
        texts: per row, what the slots hold while no call uses the session.
    """

    def __init__(self, target: Target, batch: int, slots: int) -> None:
        self.target, self.batch = target, batch
        self.rows = Rows.allocate(target, batch, slots)
        self.texts = [NOTHING] * batch
        self._views: dict[int, tuple[Tensor, Sequences]] = {}

    def start(self, prompts: list[Tensor], new_tokens: int, sampling: SamplingInputs) -> None:
        """Puts a call's prompts in the rows; keys and values are still to be computed (:meth:`prefill`)."""
        self.rows = self.rows.started(prompts, new_tokens, sampling)
        self._views.clear()

    def view(self, length: int) -> tuple[Tensor, Sequences]:
        """``range`` of the slots that attention looks at to cover `length`, and the rows' tokens in them.

        FlexAttention skips unused blocks by itself and wants static sizes: it gets all slots.
        """
        slots = self.rows.slots if self.target.flex else round_view(length)
        if slots not in self._views:
            self._views[slots] = (self.rows.range[:slots], self.rows.sequences(slots))
        return self._views[slots]

    def reserve(self, length: int) -> None:
        """Makes room for a block that ends at `length`; what the rows hold stays."""
        # A view must stay smaller than the cache: the graph was made with two different sizes.
        if (length + VIEW_STEP if self.target.flex else round_view(length)) >= self.rows.slots:
            self.rows = self.rows.grown(slots_for(2 * length, self.target.flex))
            self._views.clear()

    def prefill(self, lengths: list[int], reused: list[int], chunk: int, leave: bool) -> tuple[list[int], int]:
        """Stores keys and values of all prompt tokens but each row's last, which is node 0 of the first block.

        Args:
            lengths: tokens per prompt.
            reused: how many of each row's first slots hold its keys and values already.
            chunk: most tokens per row and pass.
            leave: whether the last chunk is left to the first step, which then reads the weights once for both.

        Returns:
            how many tokens of each row are not read again, and how many in front of the last one are left unread. Rows
            advance together, so one with little left to read reads some of its tokens a second time.
        """
        ends = [length - 1 for length in lengths]
        multiple = self.target.multiple
        chunk = max(chunk - chunk % multiple, multiple)
        # What a short row reads behind its end is written anew before anything sees it.
        unread = round_up(max((end - kept for end, kept in zip(ends, reused, strict=True)), default=0), multiple)
        starts = [max(end - unread, 0) for end in ends]
        left = (unread - 1) % chunk + 1 if leave and unread else 0
        rows = self.rows
        begin = torch.tensor(starts, device=rows.tokens.device)
        for done in range(0, unread - left, chunk):
            count = min(chunk, unread - left - done)
            slots = begin[:, None] + torch.arange(done, done + count, device=begin.device)
            latest = max(starts) + done
            view = self.view(latest + count)[0]
            self.target.prefill(rows.tokens.gather(1, slots), begin + done, rows.buffers, view, latest)
        return starts, left

    def keep(self, lengths: list[int]) -> None:
        """Notes that the first so many tokens of each row have their keys and values in their slots."""
        tokens = self.rows.tokens.cpu()
        self.texts = [KeptText(tokens[row, :length].clone()) for row, length in enumerate(lengths)]

    def forget(self) -> None:
        """Notes that the slots hold nothing of use."""
        self.texts = [NOTHING] * self.batch


class Sessions:
    """The sessions of one model. A call takes one for itself; the last ones used are kept."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._free: list[Session] = []

    @property
    def nbytes(self) -> int:
        """Memory of the caches that no call uses."""
        return sum(session.rows.buffers.nbytes for session in self._free)

    @contextmanager
    def open(
        self, prompts: list[Tensor], new_tokens: int, sampling: SamplingInputs, slots: int, reuse: bool
    ) -> Iterator[Opened]:
        """A session whose rows hold `prompts`, with room for `slots` tokens in each; it is free again afterwards.

        Without `reuse` it holds nothing of earlier texts. Nor does it for later calls unless the caller says what to
        :meth:`Session.keep`.
        """
        texts = [prompt.cpu() for prompt in prompts]
        session = self._take(texts, slots_for(slots, self.target.flex))
        try:
            reusable = self._fill(session, texts) if reuse else [0] * len(texts)
            session.forget()
            session.start(prompts, new_tokens, sampling)
            yield Opened(session, reusable)
        finally:
            self._free.append(session)
            del self._free[:-KEPT_SESSIONS]

    def forget(self) -> None:
        """Weights have changed: nothing that is kept is theirs."""
        for session in self._free:
            session.forget()

    def release(self) -> None:
        """Frees all buffers that no call uses."""
        self._free.clear()

    def _take(self, texts: list[Tensor], slots: int) -> Session:
        """A free session of the batch's size, or a new one.

        One is taken if what it holds is continued, or if it holds nothing worth keeping; another text's is left alone as
        long as there is room for one more.
        """
        fitting = [session for session in self._free if session.batch == len(texts)]
        best = max(fitting, key=lambda s: (_continued(s, texts), -self._free.index(s)), default=None)
        if best is None or (_continued(best, texts) < 0.5 and len(self._free) < KEPT_SESSIONS):
            return Session(self.target, len(texts), slots)
        self._free.remove(best)
        if best.rows.slots < slots:
            best.rows = best.rows.grown(slots)
        elif best.rows.slots > 4 * slots:  # one long call must not hold its memory for ever
            return Session(self.target, len(texts), slots)
        return best

    def _fill(self, session: Session, texts: list[Tensor]) -> list[int]:
        """Copies keys and values that free rows hold to the rows of `session` whose prompts begin alike."""
        reused, moves = [], []
        for row, prompt in enumerate(texts):
            sources = [
                (text.shared_with(prompt), other is session and place == row, other, place)
                for other in (session, *self._free)
                for place, text in enumerate(other.texts)
            ]
            count, in_place, other, place = max(sources, key=lambda source: source[:2])
            reused.append(min(count, len(prompt) - 1))
            if reused[row] > 0 and not in_place:
                moves.append((row, other.rows.buffers, place, reused[row]))
        own, written = session.rows.buffers, {row for row, *_ in moves}
        # A row that is read from may be written to first: what it holds is set aside.
        sources = [
            (source.of_row(place, count), 0) if source is own and place in written else (source, place)
            for _, source, place, count in moves
        ]
        for (row, _, _, count), (source, place) in zip(moves, sources, strict=True):
            own.copy_row(row, source, place, count)
        return reused


@dataclass(frozen=True)
class Opened:
    """A session in use. reusable: per row, the prompt tokens whose keys and values are in their slots already."""

    session: Session
    reusable: list[int]


def _continued(session: Session, texts: list[Tensor]) -> float:
    """The share of what `session` holds that `texts` begin with; 1 if it holds nothing."""
    held = sum(len(text.tokens) for text in session.texts)
    if not held:
        return 1.0
    return sum(text.shared_with(prompt) for text, prompt in zip(session.texts, texts, strict=True)) / held


def slots_for(tokens: int, static: bool) -> int:
    """Slots per row for `tokens` and a block behind them; a power of two where each size is a graph."""
    slots = tokens + BLOCK_MARGIN
    return 1 << math.ceil(math.log2(slots + VIEW_STEP)) if static else round_view(slots) + VIEW_STEP
