"""What `auto` may spend: on looks at drafters that bring nothing, and in all beside plain decoding."""

from __future__ import annotations

from dataclasses import dataclass

#: Looks at a drafter that bring nothing may cost this share of the time; the first run of a draft model, which somebody has given,
#: twice as much.
LOOKS_SHARE, FIRST_SHARE = 0.0075, 0.015
#: Steps in which drafts are made may leave a call behind plain decoding by this share of the time.
BEHIND_SHARE = 0.015
#: Of a call that is to come, at most so many tokens per row are counted on: it may end sooner.
COUNTED_AHEAD = 256
#: From the start a call may be behind by the share of so many steps; each step adds its own.
FIRST_STEPS = 64
#: A call cannot be ahead by more plain steps than this, what was gained long ago is not staked; nor decode plainly for more steps on
#: end than this before it makes another attempt.
MOST_AHEAD, LONGEST_REST = 64, 32
#: How many times more than its price a draft token is to bring where a call is as far behind as it may be.
STRICTNESS = 4


@dataclass
class Ledger:
    """How far a call is behind plain decoding; where it is too far, it decodes plainly until it can afford another attempt.

    Rows that begin and end together are as far as the last of them: a call takes as long as its slowest row.

    Attributes:
        written: tokens of each row; None where rows come and go, whose mean counts.
        least: tokens of the last row that goes on.
        behind: seconds, less what it may be behind after so many steps; negative if it is ahead.
    """

    written: list[int] | None
    least: int = 0
    behind: float = 0.0

    def may_try(self, plain: float) -> bool:
        """Whether drafts may be made in this step. plain: seconds of a step without."""
        return self.behind <= FIRST_STEPS * BEHIND_SHARE * plain

    def strictness(self, plain: float) -> float:
        """How many times its price a draft token is to bring: the further behind, the surer it has to be."""
        return 1 + STRICTNESS * max(self.behind, 0.0) / (FIRST_STEPS * BEHIND_SHARE * plain)

    def book(self, extra: float, plain: float, emitted: dict[int, int]) -> None:
        """A step is done.

        Args:
            extra: seconds that it took more than a plain one, without what is done once in a call.
            plain: seconds of a plain one.
            emitted: tokens that it wrote, by row that goes on.
        """
        behind = self.behind + extra - plain * (self._gained(emitted) - 1 + BEHIND_SHARE)
        most = (FIRST_STEPS + LONGEST_REST) * BEHIND_SHARE * plain
        self.behind = min(max(behind, -MOST_AHEAD * plain), most)

    def _gained(self, emitted: dict[int, int]) -> float:
        """How many plain steps would have brought the call as far."""
        if self.written is None:
            return sum(emitted.values()) / max(len(emitted), 1)
        for row, count in emitted.items():
            self.written[row] += count
        before, self.least = self.least, min((self.written[row] for row in emitted), default=self.least)
        return self.least - before
