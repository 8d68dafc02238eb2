"""The lanes of a scheduler: requests that can share a step are in one, and lanes take turns."""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack

import torch

from ..engine.decode.lane import Lane
from ..errors import CancelledError, DeadlineError, DecodersError
from .generation import Generation

#: Lanes without requests that stay open, with the texts in them.
IDLE_LANES = 2


class Lanes:
    """Used by the scheduler's thread; others may ask how many are running.

    Args:
        rows: most requests that are decoded at a time.
        longest_pause: seconds that reading a prompt may hold up those that are being decoded, per step.
    """

    def __init__(self, rows: int, longest_pause: float) -> None:
        self.rows, self.longest_pause = rows, longest_pause
        self._active: dict[Lane, list[Generation]] = {}

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return sum(len(generations) for generations in list(self._active.values()))

    @property
    def used(self) -> bool:
        """Whether there is any lane."""
        return bool(self._active)

    def generations(self) -> list[Generation]:
        """The requests that have a row."""
        return [generation for several in list(self._active.values()) for generation in several]

    def admit(self, generation: Generation) -> None:
        """Gives a request a row, in a lane whose requests it can share steps with.

        One whose requests began before its passes were compiled takes no more: they end there, uncompiled, beside a new lane.
        """
        call = generation.call
        alike = [lane for lane in self._active if lane.fits(call.engine, call.request)]
        current = [lane for lane in alike if not lane.outdated]
        if len(alike) - len(current) > 1:  # each has a cache of its own: no third one
            current = alike
        lane = max((lane for lane in current if lane.free), key=lambda lane: len(lane.seats), default=None)
        if lane is None:
            lane = Lane(call.engine, call.request, self.rows)
            self._active[lane] = []
        generation.waited = time.monotonic() - generation.submitted
        generation.member = lane.offer(call.request)
        generations = self._active[lane]
        generations.append(generation)
        # The last one was used last. In one piece, for threads that look at all of them.
        self._active = {other: there for other, there in self._active.items() if other is not lane} | {
            lane: generations
        }

    def sweep(self, now: float) -> None:
        """Ends requests that were cancelled or whose time is over."""
        for lane, generations in list(self._active.items()):
            for generation in [g for g in generations if is_over(g, now)]:
                assert generation.member is not None
                generations.remove(generation)
                try:
                    lane.remove(generation.member)
                except Exception as error:  # the lane cannot go on; other lanes can
                    self._fail(lane, generations, error)
                    generation._end(reason(generation))
                    break
                generation._end(reason(generation))

    def step(self) -> int:
        """A step of every lane that has requests; gives how many succeeded."""
        return sum(self._step(lane, generations) for lane, generations in list(self._active.items()) if generations)

    def _step(self, lane: Lane, generations: list[Generation]) -> bool:
        """One step of a lane; what it raises ends all requests in it."""
        try:
            ended = lane.advance(self.longest_pause)
        except Exception as error:
            error.add_note(
                f"decoders: {lane.batch.culprit}, {lane.batch.where}; {len(generations)} requests shared the step"
            )
            self._fail(lane, generations, error)
            return False
        for generation in list(generations):
            member = generation.member
            assert member is not None
            if member in ended:
                generations.remove(generation)
                generation._end(member.error)
            else:
                generation._show()
        return True

    def _fail(self, lane: Lane, generations: list[Generation], error: Exception) -> None:
        """Gives a lane up, and the requests in it, even if it cannot be closed."""
        del self._active[lane]
        try:
            with ExitStack() as stack:
                stack.callback(lane.close, error)
                if isinstance(error, torch.OutOfMemoryError):
                    self.close_idle(kept=0)
        finally:
            for generation in generations:
                generation._end(copied(error))

    def close_idle(self, kept: int = IDLE_LANES) -> None:
        """Closes lanes without requests, all but the few that were used last."""
        idle = [lane for lane, generations in self._active.items() if not generations]
        for lane in idle[: max(len(idle) - kept, 0)]:
            del self._active[lane]
            lane.close()

    def close(self) -> None:
        """Closes all lanes, even if some raise. The caller ends their requests."""
        with ExitStack() as stack:
            for lane in self._active:
                stack.callback(lane.close)
            self._active.clear()


def copied(error: BaseException) -> BaseException:
    """`error` for one of several requests that it ends: each has a ``partial`` of its own.

    An exception that cannot be made again is chained to one that says so.
    """
    try:
        own = copy.copy(error)
    except Exception:
        own = DecodersError(f"{type(error).__name__}: {error}")
        own.__cause__ = error
    own.__notes__ = list(getattr(error, "__notes__", []))
    return own.with_traceback(error.__traceback__)


def is_over(generation: Generation, now: float) -> bool:
    """Whether a request was cancelled or its time is over."""
    return generation.cancelled or now >= generation.expires


def reason(generation: Generation) -> Exception:
    """Why a request that is over was not done."""
    if generation.cancelled:
        return CancelledError("the request was cancelled")
    seconds = generation.expires - generation.submitted
    return DeadlineError(f"the request was not done within the {seconds:.3g} seconds that it was given")
