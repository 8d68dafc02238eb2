"""The sessions of a model (rows with their cache slots). Some are kept after a call, and the next call gets the most suitable one.

Functions below move the contents of rows: they copy prefixes of kept texts to new prompts, and put rows into a new order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor

from ...sampling.processors import SamplingInputs
from ..model.buckets import row_bucket, slots_for
from ..model.recordings import Recorder, Recordings
from ..model.target import Target
from .prefix_cache import KeptText, PrefixIndex
from .session import Session

#: Greatest number of free sessions that are kept.
KEPT_SESSIONS = 2
#: The same limit if steps are recorded. It is higher, because the recordings of a session are dropped with the session.
KEPT_RECORDING_SESSIONS = 4
#: The text of padding rows.
PADDING = KeptText(torch.zeros(1, dtype=torch.int64, device="cpu"))


class Sessions:
    """The sessions of a model. Each call has its own session; the sessions of the last calls are kept.

    recorder: records steps; None if the device records nothing.
    """

    def __init__(self, target: Target, recorder: Recorder | None = None) -> None:
        self.target, self.recorder = target, recorder
        self.kept = KEPT_SESSIONS if recorder is None else KEPT_RECORDING_SESSIONS
        self._free: list[Session] = []
        self._recordings: weakref.WeakSet[Recordings] = weakref.WeakSet()

    def recordings(self) -> Recordings | None:
        """Empty recordings for a new session; None if the device records nothing."""
        if self.recorder is None:
            return None
        recordings = Recordings(self.recorder)
        self._recordings.add(recordings)
        return recordings

    @property
    def recorded_nbytes(self) -> int:
        """Bytes of all recordings, see :attr:`~decoders.engine.model.recordings.Recordings.nbytes`."""
        return sum(recordings.nbytes for recordings in self._recordings)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV caches that no call uses."""
        return sum(session.rows.buffers.nbytes for session in self._free)

    @contextmanager
    def open(
        self, prompts: list[Tensor], new_tokens: int, sampling: SamplingInputs, slots: int, reuse: bool,
        shared: bool = False, prefixes: Sequence[KeptText] = (), shifts: Sequence[int] = (),
    ) -> Iterator[tuple[Session, list[int], list[int]]]:  # fmt: skip
        """Yields a session with `prompts` in its first rows and at least `slots` slots per row. On exit the session becomes free.

        Also yields, per row, the number of leading prompt tokens whose keys and values are already in the row's slots, and the number
        of tokens of the prompt; padding rows have one token.

        If :meth:`Session.keep` was called, later calls can reuse this call's texts.

        Args:
            reuse: whether to reuse keys and values of kept texts that share a prefix with a prompt.
            shared: whether steps use the tensors of `sampling` themselves, not the session's copies.
            prefixes: the prompts to compare with kept texts, if tokens alone do not identify a prompt (salts, images).
            shifts: the prompts' shifts, if any (:class:`~decoders.engine.model.cache.CacheBuffers`).
        """
        texts = list(prefixes or [KeptText(prompt.cpu()) for prompt in prompts])
        texts += [PADDING] * (row_bucket(len(texts), self.target.static) - len(texts))
        session, weights = self._take(texts, slots_for(slots, self.target.static)), self.target.weights
        lengths = [len(text.tokens) for text in texts]
        try:
            reusable = [0] * len(texts)
            if reuse:
                free = (session, *self._free)
                held = [(other, row, text) for other in free for row, text in enumerate(other.texts)]
                reusable = take_over(session, dict(enumerate(texts)), held)
            session.forget()
            for row, text in enumerate([*prompts, *(text.tokens for text in texts[len(prompts) :])]):
                session.put(row, text, shifts[row] if row < len(shifts) else 0)
            ended = [row >= len(prompts) for row in range(len(texts))]
            own = sampling if shared else session.own(sampling)
            session.arrange(lengths, lengths, [length + new_tokens for length in lengths], ended, own)
            yield session, reusable, lengths
        finally:
            if self.target.weights is not weights:  # a nested call has changed the weights
                session.forget()
            self._free.append(session)
            del self._free[: -self.kept]

    def forget(self) -> None:
        """Drops all kept texts, for example because weights have changed."""
        for session in self._free:
            session.forget()

    def forget_recordings(self) -> None:
        """Drops all recordings, for example because addresses of weights have changed."""
        for recordings in self._recordings:
            recordings.clear()

    def make_room(self) -> str:
        """Frees unused sessions and drops all recordings after a call has run out of memory. Returns a text for the error message."""
        freed, recorded = self.nbytes >> 20, self.recorded_nbytes >> 20
        self.release()
        self.forget_recordings()
        return (
            f"the model can still be used; {freed} MiB of free caches and {recorded} MiB of recordings were dropped. Decode fewer rows "
            "or shorter texts at once, or free what decoders.release(model) and torch.cuda.empty_cache() can"
        )

    def release(self) -> None:
        """Frees all buffers that no call uses."""
        self._free.clear()

    def _take(self, texts: list[KeptText], slots: int) -> Session:
        """Returns a free session with as many rows as `texts`, or a new session.

        A free session is preferred if it has no texts, or if the prompts continue its texts. A free session with other texts is taken
        only if no new session may be allocated.
        """
        fitting = [session for session in self._free if session.batch == len(texts)]
        continued = [_continued(session, texts) for session in fitting]
        best = max(zip(fitting, continued, strict=True), key=lambda pair: pair[1], default=(None, 1.0))[0]
        room = len(self._free) < self.kept and len(fitting) < KEPT_SESSIONS
        if best is None or (room and max(continued) < 0.5):
            return Session(self.target, len(texts), slots, self.recordings())
        self._free.remove(best)
        if best.rows.slots < slots:
            best.grow(slots)
        elif best.rows.slots > 4 * slots:  # frees the memory that a long call has taken
            return Session(self.target, len(texts), slots, self.recordings())
        return best


def _continued(session: Session, texts: list[KeptText]) -> float:
    """The share of the session's kept tokens that the prompts `texts` can reuse; 1 if the session has no kept tokens."""
    held = sum(len(text.tokens) for text in session.texts)
    if not held:
        return 1.0
    return sum(text.shared_with(prompt) for text, prompt in zip(session.texts, texts, strict=True)) / held


def take_over(
    session: Session, prompts: Mapping[int, KeptText], held: Sequence[tuple[Session, int, KeptText]]
) -> list[int]:
    """Copies to each prompt's row the keys and values of the longest prefix that the prompt shares with a text in `held`.

    Args:
        prompts: the prompts by row of `session`.
        held: the texts to copy from: a session, the index of a row in that session, and the text in the row.

    Returns:
        per prompt, the number of leading tokens whose keys and values are in its row now.
    """
    index = PrefixIndex([text for *_, text in held])
    reused, moves = [], []
    for row, prompt in prompts.items():
        in_place = session.texts[row].shared_with(prompt)
        longest, place = index.longest(prompt)
        reused.append(min(max(longest, in_place), len(prompt.tokens) - 1))
        if reused[-1] > in_place:
            holder, source_row, _ = held[place]
            moves.append((row, holder.stored.buffers, source_row, reused[-1]))
    own, written = session.stored.buffers, {row for row, *_ in moves}
    # Rows that are both copied and overwritten are saved first.
    sources = [
        (source.of_row(place, count), 0) if source is own and place in written else (source, place)
        for _, source, place, count in moves
    ]
    for row in written:  # before copying: if a copy fails midway, these rows have no reusable text
        session.drop(row)
    for (row, _, _, count), (source, place) in zip(moves, sources, strict=True):
        own.copy_row(row, source, place, count)
    return reused


def exchange(session: Session, one: int, other: int, count: int, other_count: int) -> None:
    """Swaps the contents of two different places: `count` slots of place `one`, and `other_count` slots of place `other`."""
    buffers, tokens = session.stored.buffers, session.stored.tokens
    if count < other_count:
        one, other, count, other_count = other, one, other_count, count
    aside = (buffers.of_row(other, other_count), tokens[other, :other_count].clone()) if other_count else None
    buffers.copy_row(other, buffers, one, count)
    tokens[other, :count] = tokens[one, :count]
    if aside is not None:
        buffers.copy_row(one, aside[0], 0, other_count)
        tokens[one, :other_count] = aside[1]
    session.texts[one], session.texts[other] = session.texts[other], session.texts[one]
    session.used[one], session.used[other] = session.used[other], session.used[one]


def reorder(
    session: Session, sources: Sequence[int], counts: Sequence[int], beside: Mapping[int, int] = MappingProxyType({})
) -> dict[int, int]:
    """Moves the first `counts[i]` slots of place `sources[i]` to place ``i``; a source of -1 moves nothing.

    beside: number of used slots of other places, by place. The contents of these places are kept, but may move.

    Returns:
        for each place in use, the place where its contents are now.
    """
    in_use = {**beside, **{source: count for source, count in zip(sources, counts, strict=True) if source >= 0}}
    where = {place: place for place in in_use}
    for place, source in enumerate(sources):
        if source < 0 or where[source] == place:
            continue
        present = next((s for s, p in where.items() if p == place), None)
        kept = in_use[present] if present is not None else len(session.texts[place].tokens)
        if present is not None:
            where[present] = where[source]
        exchange(session, place, where[source], kept, in_use[source])
        where[source] = place
    return where
