"""The lanes of a scheduler. A lane is a batch of requests that share their steps; lanes take turns."""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack

import torch

from ..engine.decode.lane import Lane
from ..errors import CancelledError, DeadlineError, DecodersError, amount
from .generation import Generation

#: Number of lanes without requests that stay open, with the KV cache of their latest texts.
IDLE_LANES = 2


class Lanes:
    """The lanes of a scheduler. Only the scheduler's thread may change them; other threads may read the running requests.

    Args:
        rows: greatest number of requests decoded at once.
        longest_pause: greatest number of seconds by which prefilling prompts may delay a step of the running requests.
    """

    def __init__(self, rows: int, longest_pause: float) -> None:
        self.rows, self.longest_pause = rows, longest_pause
        self._active: dict[Lane, list[Generation]] = {}

    @property
    def running(self) -> int:
        """The number of requests that have a row."""
        return sum(len(generations) for generations in list(self._active.values()))

    @property
    def used(self) -> bool:
        """Whether there is a lane, with or without requests."""
        return bool(self._active)

    def generations(self) -> list[Generation]:
        """The requests that have a row."""
        return [generation for several in list(self._active.values()) for generation in several]

    def admit(self, generation: Generation) -> None:
        """Gives a request a row in a lane whose steps it can share, or in a new lane.

        A lane is outdated if its requests began before the forward pass was compiled: it decodes these requests uncompiled to their
        end. An outdated lane takes new requests only if there are two outdated lanes.
        """
        call = generation.call
        alike = [lane for lane in self._active if lane.fits(call.engine, call.request)]
        current = [lane for lane in alike if not lane.outdated]
        # Each lane has its own KV cache, so two outdated lanes take new requests: a third lane would need more memory.
        if len(alike) - len(current) > 1:
            current = alike
        lane = max((lane for lane in current if lane.free), key=lambda lane: len(lane.seats), default=None)
        if lane is None:
            lane = Lane(call.engine, call.request, self.rows)
            self._active[lane] = []
        generation.waited = time.monotonic() - generation.submitted
        generation.member = lane.offer(call.request)
        generations = self._active[lane]
        generations.append(generation)
        # The most recently used lane comes last. The dict is replaced in one assignment, because other threads read it.
        self._active = {other: there for other, there in self._active.items() if other is not lane} | {
            lane: generations
        }

    def sweep(self, now: float) -> None:
        """Ends requests that were cancelled or whose deadline has passed."""
        for lane, generations in list(self._active.items()):
            for generation in [g for g in generations if is_over(g, now)]:
                assert generation.member is not None
                generations.remove(generation)
                try:
                    lane.remove(generation.member)
                except Exception as error:  # only this lane is closed
                    self._fail(lane, generations, error)
                    generation._end(reason(generation))
                    break
                generation._end(reason(generation))

    def step(self) -> int:
        """Runs a step of every lane with requests; returns the number of steps without an error."""
        return sum(self._step(lane, generations) for lane, generations in list(self._active.items()) if generations)

    def _step(self, lane: Lane, generations: list[Generation]) -> bool:
        """Runs a step of a lane. An error ends all requests in the lane. Returns False after an error."""
        try:
            ended = lane.advance(self.longest_pause)
        except Exception as error:
            error.add_note(
                f"decoders: {lane.batch.culprit}, {lane.batch.where}; {amount(len(generations), 'request')} shared the step"
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
        """Drops a lane and ends its requests with `error`, even if closing the lane raises."""
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
        """Closes idle lanes (lanes without requests), except the `kept` most recently used idle lanes."""
        idle = [lane for lane, generations in self._active.items() if not generations]
        for lane in idle[: max(len(idle) - kept, 0)]:
            del self._active[lane]
            lane.close()

    def close(self) -> None:
        """Closes all lanes, even if closing one of them raises. The caller ends the requests of the lanes."""
        with ExitStack() as stack:
            for lane in self._active:
                stack.callback(lane.close)
            self._active.clear()


def copied(error: BaseException) -> BaseException:
    """A copy of `error`, or a DecodersError with `error` as its cause if `error` cannot be copied.

    If one error ends several requests, each request raises a copy with its own ``partial`` (its output so far).
    """
    try:
        own = copy.copy(error)
    except Exception:
        own = DecodersError(f"{type(error).__name__}: {error}")
        own.__cause__ = error
    own.__notes__ = list(getattr(error, "__notes__", []))
    return own.with_traceback(error.__traceback__)


def is_over(generation: Generation, now: float) -> bool:
    """Whether a request was cancelled or its deadline has passed."""
    return generation.cancelled or now >= generation.expires


def reason(generation: Generation) -> Exception:
    """The error of a request that was cancelled or whose deadline has passed."""
    if generation.cancelled:
        return CancelledError("the request was cancelled")
    seconds = generation.expires - generation.submitted
    return DeadlineError(f"the request was not finished within its {seconds:.3g} s")
