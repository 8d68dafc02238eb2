"""The requests that are decoded together, and their rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...strategy import HostRows, PromptChunk
from ..model.blocks import Blocks
from ..model.buckets import round_up, row_bucket
from ..model.cache import CacheBuffers
from ..model.target import ForwardResult
from .criteria import Outcome
from .engine import Engine
from .grammar.guide import Guide
from .request import Request, RequestOutput, empty_report
from .rows import Rows
from .session import Session


class Roster:
    """Requests and their rows. :class:`~decoders.engine.decode.batch.Batch` adds what their steps need.

    Attributes:
        request: what the members have in common; its prompts are the rows' texts.
        members: the requests and the first row of each, in the order of rows; every row is a member's.
        capacity: most rows there can be.
        shared: whether requests join and leave; then errors and reports are per request.
        width: rows of a step. Where sizes are static, some may be padding, which counts as ended.
        verifier: decides what is accepted; None where the built-in rule does.
        report: of all steps.
        session: where the rows' tokens, keys and values are.
        longest: most tokens that a row can have, prompt included.
        noise_keys: ``[B]`` int64, the noise key of each row.
        guide: tracks the rows' positions in their grammars; None where no row has one.
        pending: committed tokens that the next step runs once more in front of the root.
        prompt_left: how many of these are the end of the prompts, not prefilled yet.

    Args:
        request: the first or only one.
        capacity: most rows where requests join and leave; None for one call.
    """

    session: Session
    longest: int
    noise_keys: Tensor

    def __init__(self, engine: Engine, request: Request, capacity: int | None) -> None:
        self.engine, self.request = engine, request
        self.forward_pass = engine.forward_pass_for(request.strategy)
        self.target = self.forward_pass.target
        self.width = row_bucket(len(request.prompts), self.target.static)
        self.shared, self.capacity = capacity is not None, self.width if capacity is None else capacity
        chosen = request.verifier
        # In greedy decoding every exact verifier keeps the draft tokens that match the target's.
        built_in = chosen.coupled or (chosen.exact and not request.plan.sample)
        self.verifier = None if built_in else chosen
        self.report = empty_report(request, self.target)
        self.members: list[tuple[RequestOutput, int]] = []
        self.guide: Guide | None = None
        self.pending = self.prompt_left = 0

    @property
    def rows(self) -> Rows:
        return self.session.rows

    @property
    def blocks(self) -> Blocks:
        """The sizes of the rows' blocks."""
        return self.session.blocks

    @property
    def row_count(self) -> int:
        """Rows of requests; padding rows are not counted."""
        return sum(member.rows for member, _ in self.members)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row."""
        return [length for member, _ in self.members for length in member.lengths]

    @property
    def finished(self) -> list[bool]:
        return [ended for member, _ in self.members for ended in member.finished]

    def known(self, outcome: Outcome | None = None) -> HostRows:
        """The rows as lists, without reading the device. outcome: a step that is not in the members' outputs yet."""
        count = self.row_count
        padding = self.width - count
        new = [[] for _ in range(count)] if outcome is None else outcome.written
        ended = self.finished if outcome is None else [bool(end) for end in outcome.ended]
        rows = [(member, row) for member, _ in self.members for row in range(member.rows)]
        begins = [member.lengths[row] for member, row in rows]
        lengths = [begin + len(tokens) for begin, tokens in zip(begins, new, strict=True)]
        prompts = [len(member.request.prompts[row]) for member, row in rows]

        def tokens_from(first: int) -> list[list[int]]:
            # The members' outputs may have grown since, by `new` and by later steps.
            texts = [member.tokens_from(row, first) for member, row in rows]
            own = [
                (text + tokens[max(first - begin, 0) :])[: max(begin + len(tokens) - first, 0)]
                for text, tokens, begin in zip(texts, new, begins, strict=True)
            ]
            return own + [[0][first:] for _ in range(padding)]

        return HostRows(lengths + [1] * padding, prompts + [1] * padding, ended + [True] * padding, tokens_from)

    @property
    def culprit(self) -> str:
        """The strategy as messages name it."""
        strategy = self.request.strategy
        return f"strategy {strategy.name!r} ({self.request.origin or type(strategy).__module__})"

    def read_rest(self) -> None:
        """Prefills the tokens that were left to the first step, for a draft model that shares the target's slots and needs them now."""
        if not self.prompt_left:
            return
        starts = [max(length - 1 - self.prompt_left, 0) for length in self.lengths]
        self.session.read_rows(0, starts, 0, self.prompt_left, self.prefill)
        self.pending = self.prompt_left = 0

    def rerun(self, count: int) -> int:
        """How many committed tokens the next step runs once more so that it runs the last `count`: rounded up to a multiple, and
        without tokens whose keys and values the loop cannot compute.
        """
        multiple, reaches = self.target.multiple, [n for member, _ in self.members for n in member.request.reach]
        tokens = round_up(count, multiple)
        if not any(reaches) or not count:
            return tokens
        room = min(length - 1 - reach for length, reach in zip(self.lengths, reaches, strict=True))
        return min(tokens, room - room % multiple)

    @property
    def prefill(self) -> Callable[..., None]:
        """Reads a chunk of the prompts, see :meth:`~decoders.engine.model.compiled.forward_pass.ForwardPass.prefill`."""
        return partial(self.forward_pass.prefill, recordings=self.session.recordings)

    def read_chunk(
        self, lengths: Tensor, tokens: Tensor, begin: Tensor, buffers: CacheBuffers, view: Tensor, latest: int, *, logits: bool
    ) -> PromptChunk:  # fmt: skip
        """Runs a chunk of texts for a strategy that reads prompts.

        Args:
            lengths: ``[B]``, of the texts.
            tokens, begin, buffers, view, latest: as of :meth:`Target.features`.
            logits: whether the chunk has them.
        """
        positions = begin[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        valid = positions < lengths[:, None] - 1
        result = self.forward_pass.features(
            tokens, begin, buffers, view, latest, logits=logits, valid=valid, recordings=self.session.recordings
        )
        return chunk_of(result, tokens, begin, lengths, logits=logits)

    def compiler(self, engine: Engine) -> Callable[[Callable], Callable]:
        """``Context.compile`` for strategies that draft for the model of `engine`."""
        return partial(engine.function, compile=self.request.runtime.compile, report=self.report)


def chunk_of(result: ForwardResult, tokens: Tensor, begin: Tensor, lengths: Tensor, *, logits: bool) -> PromptChunk:
    """A stretch of texts with what a pass over it gave.

    Args:
        tokens: ``[B, N]``, from slots `begin` ``[B]`` on.
        lengths: ``[B]``, of the texts.
    """
    positions = begin[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    valid = positions < lengths[:, None] - 1
    return PromptChunk(tokens, positions, valid, result.hidden, result.layers, result.logits if logits else None)
