"""Callbacks on the host: stopping criteria, which are called after every token, and logits processors that read the text so far.

Processors get the same calls in the same order as in plain decoding, whatever the draft tree is. So stateful processors work, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import InputError, UnsupportedError, amount
from ...sampling.choice import Candidates
from ...sampling.processors import Masks, SamplingPlan, grammar_first
from ...tree import TreeTensors, parents_by_row
from ..model.ranks import ALONE, Ranks
from .core import StepOutput
from .rows import Rows
from .verify import Outcome


@dataclass(frozen=True)
class Criteria:
    """Stopping criteria, called on the host after every token.

    Attributes:
        ask: called with the token ids ``[B, P + t]`` of prompts and ``t`` new tokens, and with the scores ``[B, V]`` of each new token
            (None if not kept). Returns which rows stop, ``[B]`` bool.
        by_row: whether every criterion judges each row by itself and has no state, so that rows may have different lengths.
        ends_rows: whether a row ends when a criterion stops it. Otherwise, as in transformers, rows go on until all are stopped.
        names: the criteria's names, for error messages.
    """

    ask: Callable[[Tensor, tuple[Tensor, ...] | None], Tensor]
    by_row: bool = False
    ends_rows: bool = True
    names: tuple[str, ...] = ()


class CriteriaRun:
    """Calls the criteria of a request after every new token, in the order of plain decoding.

    Args:
        padded_rows: the rows in transformers' layout, which criteria read.
        scores: per row, the processed scores of each generated token; None unless scores are kept.
        ranks: the processes that share the model. The first process's criteria decide for all, because criteria may read a clock.
    """

    def __init__(
        self, criteria: Criteria, padded_rows: PaddedRows, scores: list[list[Tensor]] | None, ranks: Ranks = ALONE
    ) -> None:
        self.criteria, self.padded_rows, self.scores, self.ranks = criteria, padded_rows, scores, ranks
        self.batch = len(padded_rows.generated)
        self.stopped = torch.zeros((), dtype=torch.bool)

    def apply(self, outcome: Outcome, out: StepOutput, rows: Rows, finished: list[bool]) -> None:
        """Cuts each row's new tokens after the first token at which a criterion stops the row. Changes `outcome`, `out` and `rows`."""
        active = [row for row in range(self.batch) if not finished[row]]
        if self.criteria.by_row and self.criteria.ends_rows:
            ends = self._ask_each_row(outcome, active)
        else:
            ends = self._ask_all_rows(outcome, out, active)
        agreed = self.ranks.first([figure for row in active for figure in ends[row]])
        for row, count, ended in zip(active, agreed[::2], map(bool, agreed[1::2]), strict=True):
            rows.length[row] -= outcome.emitted[row] - count
            rows.finished[row] = ended
            outcome.emitted[row], outcome.ended[row] = count, int(ended)
            outcome.accepted[row] = min(outcome.accepted[row], count)
        figures = torch.tensor([outcome.emitted, outcome.accepted, outcome.drafted, outcome.ended], device="cpu")
        out.summary[:, : self.batch] = figures.to(out.summary.device)

    def _ask_each_row(self, outcome: Outcome, active: list[int]) -> dict[int, tuple[int, bool]]:
        """Returns for each active row the number of new tokens to keep, and whether the row has ended."""
        ends = {}
        for row in active:
            done, tokens, count = len(self.padded_rows.generated[row]), tuple(outcome.new[row]), 0
            stop = False
            while not stop and count < outcome.emitted[row]:
                count += 1
                stop = bool(self.criteria.ask(self.padded_rows.of(row, done + count, tokens), None).any())
            ends[row] = count, stop or bool(outcome.ended[row])
        return ends

    def _ask_all_rows(self, outcome: Outcome, out: StepOutput, active: list[int]) -> dict[int, tuple[int, bool]]:
        """Like :meth:`_ask_each_row`, for criteria that judge whole batches. All rows that go on keep the same number of new tokens."""
        done, emitted = len(self.padded_rows.generated[active[0]]), outcome.emitted
        ended = {row: emitted[row] for row in active if outcome.ended[row]}  # row → number of its new tokens
        going = [emitted[row] for row in active if row not in ended]
        last = min(going) if going else max(ended.values())
        count, written = 0, {row: emitted[row] for row in active}
        while count < last:
            count += 1
            extra = {row: tuple(outcome.new[row][: written[row]]) for row in active}
            ids = torch.cat([self.padded_rows.of(row, done + count, extra.get(row, ())) for row in range(self.batch)])
            self.stopped = self.stopped | self._ask(ids, self._scores(out, active, done + count))
            if self.criteria.ends_rows:
                stopped = self.stopped.tolist()
                for row in active:
                    if stopped[row] and ended.get(row, last) >= count:
                        ended[row] = written[row] = count
            elif self.stopped.all():
                ended = dict.fromkeys(active, count)
            if all(ended.get(row, last + 1) <= count for row in active):
                break
        return {row: (min(ended.get(row, count), count), ended.get(row, count + 1) <= count) for row in active}

    def _ask(self, ids: Tensor, scores: tuple[Tensor, ...] | None) -> Tensor:
        """Returns which rows must stop, ``[B]`` bool. If rows end together, the result may also be ``[B, B]``, because transformers
        broadcasts a criterion's ``[B, 1]``. Then the rows end when each entry has been True in this or an earlier call.
        """
        stopped = self.criteria.ask(ids, scores).bool().cpu()
        rows = self.batch
        if stopped.shape == (rows,) or (stopped.shape == (rows, rows) and not self.criteria.ends_rows):
            return stopped
        raise UnsupportedError(
            f"stopping_criteria ({', '.join(self.criteria.names)}) returned shape {list(stopped.shape)} for {amount(rows, 'row')}: "
            "each criterion must return a bool for every row, a tensor [rows]"
        )

    def _scores(self, out: StepOutput, active: list[int], count: int) -> tuple[Tensor, ...] | None:
        """The scores ``[B, V]`` of each of the first `count` generated tokens, zeros in ended rows; None unless scores are kept."""
        if self.scores is None or out.scores is None:
            return None
        steps = []
        for row in range(self.batch):
            own = [*self.scores[row], *(out.scores[row, out.path[row]] if row in active else ())]
            steps.append([own[t] if t < len(own) else torch.zeros_like(out.scores[0, 0]) for t in range(count)])
        return tuple(torch.stack(rows) for rows in zip(*steps, strict=True))


#: The chosen token of nodes off the path. It differs from every token id and from -1, which means "no draft token".
NOT_REACHED = -2


@dataclass
class PaddedRows:
    """The rows in transformers' layout: the prompt with its left padding, then the generated tokens.

    Attributes:
        prompt: ``[B, P]`` int64, as passed to ``generate``.
        generated: generated token ids per row.
        pad_token: fills a row after its end.
    """

    prompt: Tensor
    generated: list[list[int]]
    pad_token: int = 0

    def of(self, row: int, length: int, extra: tuple[int, ...] = ()) -> Tensor:
        """``[1, P + length]``: the row's prompt, then its generated tokens and `extra`, cut or padded to `length` tokens."""
        tail = (self.generated[row] + list(extra))[:length]
        tail += [self.pad_token] * (length - len(tail))
        return torch.cat([self.prompt[row], torch.tensor(tail, dtype=torch.int64, device=self.prompt.device)])[None]


#: Logits processors, called in order with token ids ``[B, T]`` and scores ``[B, V]``.
Processors = Sequence[Callable[[Tensor, Tensor], Tensor]]


def processed_by(processors: Processors, ids: Tensor, scores: Tensor) -> Tensor:
    """Runs all `processors` on `scores` ``[B, V]`` float32, and returns the new scores. An exception of a processor gets a note.

    Raises:
        UnsupportedError: a processor returned something other than scores of the same shape.
    """
    for processor in processors:
        name = type(processor).__name__
        try:
            result = processor(ids, scores)
        except Exception as error:
            error.add_note(f"decoders: in logits processor {name}, shown {amount(ids.shape[1], 'token')} per row")
            raise
        if not isinstance(result, Tensor) or result.shape != scores.shape or not result.is_floating_point():
            what = (
                f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            )
            raise UnsupportedError(f"logits processor {name} returned {what} for scores {list(scores.shape)}")
        scores = result.to(scores.dtype)
    return scores


def choose_along_path(
    nodes: Tensor, tree: TreeTensors, logits: Tensor, rows: Rows, padded_rows: PaddedRows, processors: Processors,
    plan: SamplingPlan, masks: Masks | None = None, scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Follows the target's own tokens down the trees of all rows, depth by depth.

    Processors get all rows at one length, as in plain decoding. So all rows stop at the depth at which the first row stops, and some
    rows lose matching draft tokens.

    Args:
        masks: grammar masks, which have already been applied to `logits`. Only their token replacements are used, on the chosen tokens.
        scores: ``[B, N, V]``, a buffer for the processed scores of nodes on the path; None if scores are not kept.

    Returns:
        the target's token after each node, ``[B, N]`` int64, with :data:`NOT_REACHED` for nodes off the path; and the number of tokens
        that each row may commit, ``[B]`` int64.
    """
    batch = len(nodes)
    chosen = torch.full(nodes.shape, NOT_REACHED, dtype=torch.int64, device=nodes.device)
    tokens, parents = nodes.tolist(), parents_by_row(tree, batch)
    stops = set(rows.sampling.stop_tokens.flatten().tolist())  # all rows of a call have the same stop tokens
    room, finished = (rows.limit - rows.length).tolist(), rows.finished.tolist()
    active = [row for row in range(batch) if not finished[row]]
    generated = len(padded_rows.generated[active[0]])
    # Siblings with equal tokens stand for the same text, so all matching nodes of a depth are followed together.
    reached = {row: [0] for row in active}
    paths: dict[int, tuple[int, ...]] = dict.fromkeys(active, ())
    depth, going = 0, True
    while going:
        ids = torch.cat([padded_rows.of(row, generated + depth, paths.get(row, ())) for row in range(batch)])
        nothing = torch.zeros_like(logits[0, 0])
        level = torch.stack([logits[row, reached[row][0]] if row in reached else nothing for row in range(batch)])
        processed = _scores_behind(ids, level, active, processors, plan)
        positions = torch.full((batch, 1), generated + depth, device=nodes.device)
        drawn = Candidates.whole(processed[:, None]).choose(plan, rows.sampling, positions)[:, 0].tolist()
        if masks is not None and masks.replacements is not None:
            here = torch.tensor([reached[row][0] if row in reached else 0 for row in range(batch)], device=nodes.device)
            kinds = masks.replacements.kinds.gather(1, here[:, None])
            written = replace(masks.replacements, kinds=kinds).of(torch.tensor(drawn, device=nodes.device)[:, None])
            drawn = written[:, 0].tolist()
        for row in active:
            token = drawn[row]
            chosen[row, reached[row]] = token
            if scores is not None:
                scores[row, reached[row]] = processed[row]
            paths[row] += (token,)
            following = [
                child for child, parent in enumerate(parents[row])
                if parent in reached[row] and tokens[row][child] == token
            ]  # fmt: skip
            reached[row] = following or reached[row]
            going = going and bool(following) and token not in stops and depth + 1 < room[row]
        depth += 1
    return chosen, torch.full((batch,), depth, dtype=torch.int64, device=nodes.device)


def _scores_behind(
    ids: Tensor, logits: Tensor, active: list[int], processors: Processors, plan: SamplingPlan
) -> Tensor:  # fmt: skip
    """Applies all processors to the `logits` ``[B, V]`` after the texts `ids` ``[B, T]``, and returns the scores. Tokens that a grammar
    forbids stay forbidden.

    Raises:
        InputError: the processors leave no token to draw in an `active` row.
    """
    processed = processed_by(processors, ids, logits)
    if plan.masked:  # a processor may force a token that the grammar forbids: the grammar decides
        processed = grammar_first(processed.masked_fill(logits == float("-inf"), float("-inf")), logits)
    if plan.sample and not processed[active].amax(-1).isfinite().all():  # inf, NaN, or no token left
        raise InputError(
            f"nothing can be drawn after {amount(ids.shape[1], 'token')}: the logits processors left inf, NaN or no token "
            f"({', '.join(type(each).__name__ for each in processors)})"
        )
    return processed
