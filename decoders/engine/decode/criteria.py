"""Stopping criteria that the host asks after every token, and rows that end where one says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ..model.ranks import ALONE, Ranks
from .core import StepOutput
from .host_processors import PaddedRows
from .rows import Rows


@dataclass
class Outcome:
    """One step as the host knows it, each list by row.

    Attributes:
        emitted: tokens that the row has got.
        accepted: draft tokens among them.
        drafted: draft tokens that were put to the target.
        ended: whether the row has ended, 0 or 1.
        new: tokens in order of commitment, `emitted` of them valid.
        drafters: whose the accepted draft tokens are, where several have drafted; else nothing.
    """

    emitted: list[int]
    accepted: list[int]
    drafted: list[int]
    ended: list[int]
    new: list[list[int]]
    drafters: list[list[str]] = field(default_factory=list)

    @staticmethod
    def of(summary: list[list[int]], new: list[list[int]], rows: int) -> Outcome:
        """The outcome of the first `rows` rows; see :class:`StepOutput`. The rows behind them only fill the batch up."""
        emitted, accepted, drafted, ended = (figures[:rows] for figures in summary)
        return Outcome(emitted, accepted, drafted, ended, new[:rows])

    def part(self, first: int, count: int) -> Outcome:
        """A copy for `count` rows from `first` on."""
        return Outcome(*(figures[first : first + count] for figures in vars(self).values()))

    def put(self, first: int, part: Outcome) -> None:
        """Writes `part` to the rows from `first` on."""
        for name, figures in vars(part).items():
            getattr(self, name)[first : first + len(figures)] = figures


@dataclass(frozen=True)
class Criteria:
    """What the host asks after every token, besides lengths and stop tokens.

    Attributes:
        ask: ``(ids [B, P + t], scores)`` → ``[B]`` bool. scores: ``[B, V]`` per new token, None unless they are kept.
        by_row: every criterion looks at one row and remembers none, so rows need not be level when they are asked.
        ends_rows: whether a row ends when it is told to. transformers writes such a row on until all have been told, unless a
            criterion has stop tokens.
        names: the criteria as messages name them.
    """

    ask: Callable[[Tensor, tuple[Tensor, ...] | None], Tensor]
    by_row: bool = False
    ends_rows: bool = True
    names: tuple[str, ...] = ()


class CriteriaRun:
    """The criteria of one call, asked in the order in which plain decoding would ask them.

    Args:
        padded_rows: the rows as transformers would show them.
        scores: per row and token, where they are kept.
        ranks: of the processes that decode, the first one's criteria are heard: a clock says something else in each.
    """

    def __init__(
        self, criteria: Criteria, padded_rows: PaddedRows, scores: list[list[Tensor]] | None, ranks: Ranks = ALONE
    ) -> None:
        self.criteria, self.padded_rows, self.scores, self.ranks = criteria, padded_rows, scores, ranks
        self.batch = len(padded_rows.generated)
        self.told = torch.zeros((), dtype=torch.bool)

    def apply(self, outcome: Outcome, out: StepOutput, rows: Rows, finished: list[bool]) -> None:
        """Cuts what a step has written where a criterion says stop; `outcome`, `out` and `rows` are changed alike."""
        active = [row for row in range(self.batch) if not finished[row]]
        if self.criteria.by_row and self.criteria.ends_rows:
            ends = self._each(outcome, active)
        else:
            ends = self._level(outcome, out, active)
        agreed = self.ranks.first([figure for row in active for figure in ends[row]])
        for row, count, ended in zip(active, agreed[::2], map(bool, agreed[1::2]), strict=True):
            rows.length[row] -= outcome.emitted[row] - count
            rows.finished[row] = ended
            outcome.emitted[row], outcome.ended[row] = count, int(ended)
            outcome.accepted[row] = min(outcome.accepted[row], count)
        figures = torch.tensor([outcome.emitted, outcome.accepted, outcome.drafted, outcome.ended])
        out.summary[:, : self.batch] = figures.to(out.summary.device)

    def _each(self, outcome: Outcome, active: list[int]) -> dict[int, tuple[int, bool]]:
        """Per row, how many of its new tokens stay, and whether it has ended; each row is asked by itself."""
        ends = {}
        for row in active:
            done, tokens, count = len(self.padded_rows.generated[row]), tuple(outcome.new[row]), 0
            stop = False
            while not stop and count < outcome.emitted[row]:
                count += 1
                stop = bool(self.criteria.ask(self.padded_rows.of(row, done + count, tokens), None).any())
            ends[row] = count, stop or bool(outcome.ended[row])
        return ends

    def _level(self, outcome: Outcome, out: StepOutput, active: list[int]) -> dict[int, tuple[int, bool]]:
        """As :meth:`_each`, where criteria see whole batches with all rows at one length: rows go as far as the slowest."""
        done, emitted = len(self.padded_rows.generated[active[0]]), outcome.emitted
        ended = {row: emitted[row] for row in active if outcome.ended[row]}  # row → its new tokens
        going = [emitted[row] for row in active if row not in ended]
        last = min(going) if going else max(ended.values())
        count, written = 0, {row: emitted[row] for row in active}
        while count < last:
            count += 1
            extra = {row: tuple(outcome.new[row][: written[row]]) for row in active}
            ids = torch.cat([self.padded_rows.of(row, done + count, extra.get(row, ())) for row in range(self.batch)])
            self.told = self.told | self._ask(ids, self._scores(out, active, done + count))
            if self.criteria.ends_rows:
                told = self.told.tolist()
                for row in active:
                    if told[row] and ended.get(row, last) >= count:
                        ended[row] = written[row] = count
            elif self.told.all():
                ended = dict.fromkeys(active, count)
            if all(ended.get(row, last + 1) <= count for row in active):
                break
        return {row: (min(ended.get(row, count), count), ended.get(row, count + 1) <= count) for row in active}

    def _ask(self, ids: Tensor, scores: tuple[Tensor, ...] | None) -> Tensor:
        """Which rows are told to stop, ``[B]`` bool.

        Where rows end together it may be ``[B, B]``, which transformers makes of a criterion that returns ``[B, 1]``: it asks
        whether all of it was true at some time.
        """
        told = self.criteria.ask(ids, scores).bool().cpu()
        rows = self.batch
        if told.shape == (rows,) or (told.shape == (rows, rows) and not self.criteria.ends_rows):
            return told
        raise UnsupportedError(
            f"stopping_criteria ({', '.join(self.criteria.names)}) made {list(told.shape)} of {rows} rows: each criterion "
            "must return a bool for every row, a tensor [rows]"
        )

    def _scores(self, out: StepOutput, active: list[int], count: int) -> tuple[Tensor, ...] | None:
        """``[B, V]`` per new token, zeros for rows that have ended."""
        if self.scores is None or out.scores is None:
            return None
        steps = []
        for row in range(self.batch):
            own = [*self.scores[row], *(out.scores[row, out.path[row]] if row in active else ())]
            steps.append([own[t] if t < len(own) else torch.zeros_like(out.scores[0, 0]) for t in range(count)])
        return tuple(torch.stack(rows) for rows in zip(*steps, strict=True))
