"""Logits processors that read the prefix: they need the host between forward and commit.

Processors are run along the path the target actually takes, depth by depth: exactly the calls plain decoding would
make, in the same order, however large the tree is. Stateful processors therefore work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import InputError, UnsupportedError
from ...sampling.choice import Candidates
from ...sampling.processors import Masks, SamplingPlan, grammar_first
from ...tree import TreeTensors, parents_by_row
from .rows import Rows

#: chosen token of nodes that the walk never reached: equals no proposal, not even "no draft token" (-1).
NOT_REACHED = -2


@dataclass
class PaddedRows:
    """Each row as transformers would show it: prompt with its left padding, then what has been generated.

    Attributes:
        prompt: ``[B, P]`` int64 as passed to ``generate``.
        generated: token ids per row.
        pad_token: follows a row's end.
    """

    prompt: Tensor
    generated: list[list[int]]
    pad_token: int = 0

    def of(self, row: int, length: int, extra: tuple[int, ...] = ()) -> Tensor:
        """``[1, P + length]``: the row's generated tokens, then `extra`, cut or padded to `length`."""
        tail = (self.generated[row] + list(extra))[:length]
        tail += [self.pad_token] * (length - len(tail))
        return torch.cat([self.prompt[row], torch.tensor(tail, dtype=torch.int64, device=self.prompt.device)])[None]


#: Logits processors, called one after the other with token ids ``[B, T]`` and scores ``[B, V]``.
Processors = Sequence[Callable[[Tensor, Tensor], Tensor]]


def processed_by(processors: Processors, ids: Tensor, scores: Tensor) -> Tensor:
    """What `processors` make of `scores` ``[B, V]`` float32, in their order.

    Raises:
        UnsupportedError: one returned anything else than scores of that shape; whatever one raises, with a note.
    """
    for processor in processors:
        name = type(processor).__name__
        try:
            result = processor(ids, scores)
        except Exception as error:
            error.add_note(f"decoders: in logits processor {name}, shown {ids.shape[1]} tokens per row")
            raise
        if not isinstance(result, Tensor) or result.shape != scores.shape or not result.is_floating_point():
            what = (
                f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            )
            raise UnsupportedError(f"logits processor {name} returned {what} for scores {list(scores.shape)}")
        scores = result.to(scores.dtype)
    return scores


def choose_along_path(
    nodes: Tensor,
    tree: TreeTensors,
    logits: Tensor,
    rows: Rows,
    padded_rows: PaddedRows,
    processors: Processors,
    plan: SamplingPlan,
    masks: Masks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walks all rows' trees down the target's own choices, one depth of all rows at a time.

    Processors see whole batches at one length, as in plain decoding. The walk therefore ends for all rows where it ends
    for the first: rows stay level, at the price of some accepted draft tokens. What a grammar forbids is masked already. Rows behind
    those of `padded_rows` fill the batch up: processors are not asked about them.

    Args:
        masks: say what is written instead of some tokens.

    Returns:
        chosen ``[B, N]`` int64, :data:`NOT_REACHED` off the path; scores ``[B, N, V]``, zero off the path; and how many
        tokens each row may commit, ``[B]`` int64.
    """
    batch = len(padded_rows.generated)
    sampling = rows.sampling.of_rows(0, batch)
    chosen = torch.full(nodes.shape, NOT_REACHED, dtype=torch.int64, device=nodes.device)
    scores = torch.zeros_like(logits)
    tokens, parents = nodes.tolist(), parents_by_row(tree, len(nodes))
    stops = set(rows.sampling.stop_tokens.flatten().tolist())  # rows that are asked together share them
    room, finished = (rows.limit - rows.length).tolist(), rows.finished.tolist()
    active = [row for row in range(batch) if not finished[row]]
    generated = len(padded_rows.generated[active[0]])
    # Equal siblings stand for the same text: all nodes of a depth that match are followed together.
    reached = {row: [0] for row in active}
    paths: dict[int, tuple[int, ...]] = dict.fromkeys(active, ())
    depth, going = 0, True
    while going:
        ids = torch.cat([padded_rows.of(row, generated + depth, paths.get(row, ())) for row in range(batch)])
        nothing = torch.zeros_like(logits[0, 0])
        level = torch.stack([logits[row, reached[row][0]] if row in reached else nothing for row in range(batch)])
        processed = _scores_behind(ids, level, active, processors, plan)
        positions = torch.full((batch, 1), generated + depth, device=nodes.device)
        drawn = Candidates.whole(processed[:, None]).choose(plan, sampling, positions)[:, 0].tolist()
        if masks is not None and masks.replacements is not None:
            here = torch.tensor([reached[row][0] if row in reached else 0 for row in range(batch)], device=nodes.device)
            kinds = masks.replacements.kinds[:batch].gather(1, here[:, None])
            written = replace(masks.replacements, kinds=kinds).of(torch.tensor(drawn, device=nodes.device)[:, None])
            drawn = written[:, 0].tolist()
        for row in active:
            token = drawn[row]
            scores[row, reached[row]], chosen[row, reached[row]] = processed[row], token
            paths[row] += (token,)
            following = [
                child for child, parent in enumerate(parents[row])
                if parent in reached[row] and tokens[row][child] == token
            ]  # fmt: skip
            reached[row] = following or reached[row]
            going = going and bool(following) and token not in stops and depth + 1 < room[row]
        depth += 1
    return chosen, scores, torch.full((len(nodes),), depth, dtype=torch.int64, device=nodes.device)


def _scores_behind(
    ids: Tensor, logits: Tensor, active: list[int], processors: Processors, plan: SamplingPlan
) -> Tensor:  # fmt: skip
    """What the processors make of the `logits` ``[B, V]`` behind the texts `ids` ``[B, T]``.

    Raises:
        InputError: they leave nothing to draw in one of the rows that are `active`.
    """
    processed = processed_by(processors, ids, logits)
    if plan.masked:  # a processor may force a token: the grammar wins
        processed = grammar_first(processed.masked_fill(logits == float("-inf"), float("-inf")), logits)
    if plan.sample and not processed[active].amax(-1).isfinite().all():  # inf, NaN, or nothing that is left
        raise InputError(
            f"nothing can be drawn behind {ids.shape[1]} tokens: the logits processors left inf, NaN or no token "
            f"({', '.join(type(each).__name__ for each in processors)})"
        )
    return processed
