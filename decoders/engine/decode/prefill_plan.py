"""In which chunks prompts are prefilled."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.buckets import prefill_chunks, round_up
from ..model.target import Target


@dataclass(frozen=True)
class PrefillPlan:
    """How prompts are prefilled: in which chunks, each row from where on.

    Attributes:
        starts: tokens of each row that are not read (again). Rows advance together, so one with little left to read reads some
            of its tokens a second time.
        chunks: where each begins behind the starts, and how many tokens it has; each is a pass over all rows.
        left: how many tokens in front of the last one are left pending.
    """

    starts: list[int]
    chunks: list[tuple[int, int]]
    left: int

    @staticmethod
    def of(
        lengths: list[int], reused: list[int], chunk: int | None, target: Target, *, leave_last_chunk: bool = False
    ) -> PrefillPlan:
        """As :meth:`~decoders.engine.decode.session.Session.prefill` has it."""
        chunk = chunk or target.prefill_chunk
        ends, multiple = [length - 1 for length in lengths], target.multiple
        if not target.continues:  # more than one pass would be a pass per token
            chunk = max(chunk, *ends)
        chunk = max(chunk - chunk % multiple, multiple)
        # What a short row reads behind its end is written anew before anything sees it. Where bits matter the end is always read: a
        # step that runs the first tokens of a branch again starts with some of it, and must find what it would write there.
        again = multiple if multiple > 1 else 0
        unread = [max(end - kept, min(end, again)) for end, kept in zip(ends, reused, strict=True)]
        pending = round_up(max(unread, default=0), multiple)
        starts = [max(end - pending, 0) for end in ends]
        last = (pending - 1) % chunk + 1 if pending else 0
        # A long text may be read by other products than blocks; its end is not where blocks may begin with some of it.
        end = multiple if multiple > 1 and target.dequantizes(len(lengths) * (last - multiple)) else last
        if leave_last_chunk:
            return PrefillPlan(starts, prefill_chunks(pending - end, chunk, target.static), end)
        if end == last:
            return PrefillPlan(starts, prefill_chunks(pending, chunk, target.static), 0)
        return PrefillPlan(starts, [*prefill_chunks(pending - end, chunk, target.static), (pending - end, end)], 0)
