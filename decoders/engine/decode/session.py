"""What outlives a call: the rows' buffers, and the texts whose keys and values they still hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import CacheMemoryError
from ...sampling.processors import SamplingInputs
from ...strategy import Sequences
from ..model.blocks import Blocks
from ..model.buckets import row_bucket, slots_for, view_bucket
from ..model.recordings import Recorder, Recordings
from ..model.target import Target
from .prefill_plan import PrefillPlan
from .prefixes import NOTHING, KeptText, PrefixIndex
from .rows import Rows

#: Free sessions that keep their buffers.
KEPT_SESSIONS = 2
#: The same where steps are recorded: what was recorded goes with its session.
KEPT_RECORDING_SESSIONS = 4


class Session:
    """Rows of one batch size, their views, what the last call left in them, and the steps recorded with them.

    Attributes:
        rows: on the device.
        batch: number of rows; where sizes are static it may exceed that of a call, whose rows come first.
        blocks: drafts as the core wants them.
        recordings: what was recorded on these very tensors; None where nothing can be.
        texts: per row, what the slots hold while no call uses the session.
        shared: sessions of drafts that are so many of the target's first layers (:mod:`~decoders.engine.decode.drafts.shared_slots`).
    """

    def __init__(self, target: Target, batch: int, slots: int, recordings: Recordings | None = None) -> None:
        self.target, self.batch = target, batch
        with room_for(batch, slots):
            self.rows = Rows.allocate(target, batch, slots)
        self.blocks = Blocks(batch, target.device, target.static, target.multiple)
        self.recordings = recordings
        self.texts = [NOTHING] * batch
        self.shared: dict[int, Session] = {}
        self._views: dict[int, tuple[Tensor, Sequences]] = {}
        self._sampling: dict[tuple, SamplingInputs] = {}

    def start(self, prompts: list[Tensor], new_tokens: int, sampling: SamplingInputs) -> None:
        """Puts a call's prompts in the rows; keys and values are still to be computed (:meth:`prefill`)."""
        self.rows = self.rows.started(prompts, new_tokens, sampling)
        self.blocks.exact = self.blocks.single = False  # how an earlier call padded them
        self._views.clear()

    def own(self, sampling: SamplingInputs) -> SamplingInputs:
        """The values of `sampling` in tensors that later calls with as many of them get, too: recorded steps read these."""
        sizes = tuple([tensor.shape for tensor in vars(sampling).values()])
        own = self._sampling.setdefault(sizes, sampling)
        if own is not sampling:
            for name, tensor in vars(own).items():
                tensor.copy_(getattr(sampling, name))
        return own

    @property
    def replays(self) -> int:
        """How often something was replayed on these rows."""
        return self.recordings.replays if self.recordings is not None else 0

    def lists(self, *tensors: Tensor) -> tuple[list, ...]:
        """The values of small tensors of a step, which the host waits for."""
        if self.recordings is not None:
            return self.recordings.lists(*tensors)
        return tuple([tensor.tolist() for tensor in tensors])

    def view(self, length: int) -> tuple[Tensor, Sequences]:
        """``range`` of the slots that attention looks at to cover `length`, and the rows' tokens in them.

        Where sizes are static these are all slots, so that a row's length is no shape. The kernel ends where a row ends.
        """
        slots = self.rows.slots if self.target.static else view_bucket(length)
        if slots not in self._views:
            self._views[slots] = (self.rows.range[:slots], self.rows.sequences(slots))
        return self._views[slots]

    def reserve(self, length: int) -> None:
        """Makes room for a block that ends at `length`; what the rows hold stays."""
        # Otherwise a view must stay smaller than the cache (see slots_for).
        static = self.target.static
        if (length > self.rows.slots) if static else (view_bucket(length) >= self.rows.slots):
            self.grow(slots_for(2 * length, static))

    def grow(self, slots: int) -> None:
        """Gives every row room for `slots` tokens. What was recorded knows the old tensors only: it is dropped."""
        with room_for(self.batch, slots):
            self.rows = self.rows.enlarged(slots)
        self._views.clear()
        if self.recordings is not None:
            self.recordings.clear()

    def prefill(
        self, lengths: list[int], reused: list[int], chunk: int | None, run: Callable[..., None], *,
        leave_last_chunk: bool = False, padded: bool = False,
    ) -> tuple[list[int], int]:  # fmt: skip
        """Stores keys and values of all prompt tokens but each row's last, which is node 0 of the first block.

        Args:
            lengths: tokens per prompt.
            reused: how many of each row's first slots hold its keys and values already.
            chunk: most tokens per row and pass; None is :attr:`Target.prefill_chunk`.
            run: runs each pass, as :meth:`Target.prefill` does.
            leave_last_chunk: whether that is left to the first step, which then reads the weights once for both.
            padded: whether `run` tells recurrent layers what is no row's text; otherwise they are shown one row at a time.

        Returns:
            how many tokens of each row are not read again, and how many in front of the last one are left pending. Rows
            advance together, so one with little left to read reads some of its tokens a second time.
        """
        if self.target.recurrent and not padded:
            return self._prefill_each(lengths, reused, chunk, run)
        plan = PrefillPlan.of(lengths, reused, chunk, self.target, leave_last_chunk=leave_last_chunk)
        begin = torch.tensor(plan.starts, device=self.rows.tokens.device)
        for done, count in plan.chunks:
            self.read(self.rows, begin, max(plan.starts), done, count, run)
        return plan.starts, plan.left

    def _prefill_each(
        self, lengths: list[int], reused: list[int], chunk: int | None, run: Callable[..., None]
    ) -> tuple[list[int], int]:
        """As :meth:`prefill`, row by row: what a recurrent layer reads cannot be read a second time, nor behind a text's end."""
        for row, (length, kept) in enumerate(zip(lengths, reused, strict=True)):
            plan = PrefillPlan.of([length], [kept], chunk, self.target)
            begin = torch.tensor(plan.starts, device=self.rows.tokens.device)
            for done, count in plan.chunks:
                self.read(self.rows.of_rows(row, row + 1), begin, plan.starts[0], done, count, run)
        return reused, 0

    def read(self, rows: Rows, begin: Tensor, latest: int, done: int, count: int, run: Callable[..., None]) -> None:
        """One pass over `count` prompt tokens of `rows`, from `done` tokens behind `begin` on, at most `latest` ``[B]``."""
        if self.target.static:  # what is read behind the end needs room as well
            self.reserve(latest + done + count)
            rows = rows if rows.slots == self.rows.slots else self.rows
        slots = begin[:, None] + torch.arange(done, done + count, device=begin.device)
        tokens, view = rows.tokens.gather(1, slots), self.view(latest + done + count)[0]
        run(tokens, begin + done, rows.buffers, view, latest + done)

    def keep(self, lengths: list[int]) -> None:
        """Notes that the first so many tokens of each row, from the first row on, have their keys and values in their slots."""
        tokens = self.rows.tokens.cpu()
        self.texts = [self.kept(row, tokens[row, :length].clone()) for row, length in enumerate(lengths)]
        self.texts += [NOTHING] * (self.batch - len(lengths))

    def kept(self, row: int, text: Tensor) -> KeptText:
        """`text` (1-D, on the CPU) as what a row keeps; nothing if a recurrent state has seen more of it, or less."""
        states = self.rows.buffers.states
        if states is None:
            return KeptText(text)
        return KeptText(text, whole=True) if int(states.reached[row]) == len(text) else NOTHING

    def forget(self) -> None:
        """Notes that the slots hold nothing of use."""
        self.texts = [NOTHING] * self.batch


@contextmanager
def room_for(rows: int, slots: int) -> Iterator[None]:
    """Raises CacheMemoryError where there is no memory for the buffers; CUDA's own error gets a note, and so does any other."""
    what = f"the key-value cache of {rows} rows with {slots} slots each"
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # The CPU's allocator has no error of its own; sizes above 2⁶³ bytes "overflow".
        cpu = isinstance(error, MemoryError) or any(word in str(error) for word in ("memory", "overflow"))
        if isinstance(error, torch.OutOfMemoryError) or not cpu:
            error.add_note(f"decoders: while allocating {what}")
            raise
        raise CacheMemoryError(
            f"there is no memory for {what}: ask for fewer tokens, rows or slots ({error})"
        ) from error


class Sessions:
    """The sessions of one model. A call takes one for itself; the last ones used are kept.

    Args:
        recorder: records steps, where the device can.
    """

    def __init__(self, target: Target, recorder: Recorder | None = None) -> None:
        self.target, self.recorder = target, recorder
        self.kept = KEPT_SESSIONS if recorder is None else KEPT_RECORDING_SESSIONS
        self._free: list[Session] = []
        self._recordings: weakref.WeakSet[Recordings] = weakref.WeakSet()

    def recordings(self) -> Recordings | None:
        """For the tensors of a new session; None where nothing can be recorded."""
        if self.recorder is None:
            return None
        recordings = Recordings(self.recorder)
        self._recordings.add(recordings)
        return recordings

    @property
    def nbytes(self) -> int:
        """Memory of the caches that no call uses."""
        return sum(session.rows.buffers.nbytes for session in self._free)

    @contextmanager
    def open(
        self, prompts: list[Tensor], new_tokens: int, sampling: SamplingInputs, slots: int, reuse: bool,
        shared: bool = False,
    ) -> Iterator[OpenSession]:  # fmt: skip
        """A session whose first rows hold `prompts`, with room for `slots` tokens in each; it is free again afterwards.

        Its rows read the very tensors of `sampling` if these are `shared`, and else the session's own copy of them.

        Without `reuse` it holds nothing of earlier texts. Nor does it for later calls unless the caller says what to
        :meth:`Session.keep`.
        """
        texts = [prompt.cpu() for prompt in prompts]
        texts += [torch.zeros(1, dtype=torch.int64)] * (row_bucket(len(texts), self.target.static) - len(texts))
        session, weights = self._take(texts, slots_for(slots, self.target.static)), self.target.weights
        try:
            reusable = self._fill(session, texts) if reuse else [0] * len(texts)
            session.forget()
            session.start(prompts, new_tokens, sampling if shared else session.own(sampling))
            yield OpenSession(session, reusable, [len(text) for text in texts])
        finally:
            if self.target.weights is not weights:  # a call within this one has met others
                session.forget()
            self._free.append(session)
            del self._free[: -self.kept]

    def forget(self) -> None:
        """Weights have changed: nothing that is kept is theirs."""
        for session in self._free:
            session.forget()

    def forget_recordings(self) -> None:
        """Weights are elsewhere: what was recorded reads where they were."""
        for recordings in self._recordings:
            recordings.clear()

    def release(self) -> None:
        """Frees all buffers that no call uses."""
        self._free.clear()

    def _take(self, texts: list[Tensor], slots: int) -> Session:
        """A free session of the batch's size, or a new one.

        One is taken if what it holds is continued, or if it holds nothing worth keeping; another text's is left alone as
        long as there is room for one more.
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
        elif best.rows.slots > 4 * slots:  # one long call must not hold its memory for ever
            return Session(self.target, len(texts), slots, self.recordings())
        return best

    def _fill(self, session: Session, texts: list[Tensor]) -> list[int]:
        """Copies keys and values that free rows hold to the rows of `session` whose prompts begin alike."""
        places = [(other, row) for other in (session, *self._free) for row in range(other.batch)]
        index = PrefixIndex([other.texts[row] for other, row in places])
        reused, moves = [], []
        for row, prompt in enumerate(texts):
            in_place = session.texts[row].shared_with(prompt)
            longest, place = index.longest(prompt)
            reused.append(min(max(longest, in_place), len(prompt) - 1))
            if reused[row] > in_place:
                other, source_row = places[place]
                moves.append((row, other.rows.buffers, source_row, reused[row]))
        own, written = session.rows.buffers, {row for row, *_ in moves}
        # A row that is read from may be written to first: what it holds is set aside.
        sources = [
            (source.of_row(place, count), 0) if source is own and place in written else (source, place)
            for _, source, place, count in moves
        ]
        session.forget()  # from here on its rows are written to, and whatever ends that leaves nothing that counts
        for (row, _, _, count), (source, place) in zip(moves, sources, strict=True):
            own.copy_row(row, source, place, count)
        return reused


@dataclass(frozen=True)
class OpenSession:
    """A session in use.

    Attributes:
        reusable: per row, the prompt tokens whose keys and values are in their slots already.
        lengths: tokens per row; rows that a call has not asked for hold one.
    """

    session: Session
    reusable: list[int]
    lengths: list[int]


def _continued(session: Session, texts: list[Tensor]) -> float:
    """The share of what `session` holds that `texts` begin with; 1 if it holds nothing."""
    held = sum(len(text.tokens) for text in session.texts)
    if not held:
        return 1.0
    return sum(text.shared_with(prompt) for text, prompt in zip(session.texts, texts, strict=True)) / held
