"""The loop that all strategies share: propose, forward + verify + commit, observe, until every row has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import DraftError
from ..report import Report
from ..strategy import Context, Draft, Sequences, Step, Strategy
from ..tree import Topology, TreeTensors
from .capture import WARM_UP_STEPS, CapturedSteps
from .core import Core, Rows, StepOutput
from .engine import Engine, sampling_inputs
from .host import Prefixes, Processors, choose_along_path
from .sampling import SamplingPlan

#: Attention looks at a multiple of this many slots.
VIEW_STEP = 64
#: Smaller blocks are padded: sizes 0 and 1 would get graphs of their own, and two nodes more cost nothing.
MIN_GUESSES = 2
#: Blocks up to this size fit behind the longest row without growing the cache.
BLOCK_MARGIN = 64


@dataclass
class Request:
    """One call, with everything of transformers' resolved.

    Attributes:
        prompts: one 1-D int64 tensor per row, padding removed. padded_prompt: ``[B, P]`` as the user passed it.
        new_tokens: most tokens to generate per row. stop_tokens: end-of-sequence ids. pad_token: follows them.
        plan, values: what runs on logits inside the step (see :class:`SamplingPlan`). seed: of the noise.
        processors: called on the host instead, if the plan cannot express them. criteria: asked after every token.
        on_step: told the new tokens of every row and which rows have ended, after every step.
        keep_logits, keep_scores: return them per generated token.
        context: fields of :class:`Context` that only the caller knows.
    """

    strategy: Strategy
    prompts: list[Tensor]
    padded_prompt: Tensor
    new_tokens: int
    stop_tokens: tuple[int, ...] = ()
    pad_token: int = 0
    plan: SamplingPlan = SamplingPlan()
    values: tuple[float, ...] = ()
    seed: int = 0
    processors: Processors | None = None
    criteria: Callable[..., Any] | None = None
    on_step: Callable[[list[list[int]], list[bool]], None] | None = None
    keep_logits: bool = False
    keep_scores: bool = False
    compile: bool = True
    prefill_chunk: int = 512
    slots: int | None = None
    context: dict[str, Any] = field(default_factory=dict)


@dataclass
class Decoded:
    """Generated token ids per row (stop token included), raw logits and processed scores per row and token if asked."""

    tokens: list[list[int]]
    report: Report
    logits: list[list[Tensor]]
    scores: list[list[Tensor]]


def decode(engine: Engine, request: Request) -> Decoded:
    """Runs a call to its end. Calls on one engine run one after the other."""
    with engine.lock, torch.inference_mode(False), torch.no_grad():
        return _Call(engine, request).run()


@dataclass
class _Outcome:
    """One step as the host knows it, per row: tokens emitted, guesses accepted and made, ended or not, new tokens."""

    emitted: list[int]
    accepted: list[int]
    guessed: list[int]
    ended: list[int]
    new: list[list[int]]


class _Call:
    """The state of one call."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine, self.request, self.target = engine, request, engine.target
        self.batch = len(request.prompts)
        self.lengths = [len(p) for p in request.prompts]
        self.generated: list[list[int]] = [[] for _ in range(self.batch)]
        self.logits: list[list[Tensor]] = [[] for _ in range(self.batch)]
        self.scores: list[list[Tensor]] = [[] for _ in range(self.batch)]
        strategy = request.strategy
        self.finished = [False] * self.batch
        self.report = Report(
            strategy=strategy.name, settings=strategy.settings.model_dump(mode="json"), exact=strategy.exact,
            compiled=request.compile, rows=self.batch, prompt_tokens=list(self.lengths),
        )  # fmt: skip
        self.prefixes = Prefixes(request.padded_prompt, self.generated, request.pad_token)
        self._trees: dict[Topology, TreeTensors] = {}
        self._views: dict[int, tuple[Tensor, Sequences]] = {}

    def run(self) -> Decoded:
        request, target = self.request, self.target
        core = Core(target, request.plan)
        step = self._step_function(core)
        started = time.perf_counter()
        self.rows = Rows.allocate(
            target, request.prompts, self._capacity(), request.new_tokens,
            sampling_inputs(request.values, request.seed, self.batch, request.stop_tokens, target.device),
        )  # fmt: skip
        self._no_guess = torch.full((self.batch, MIN_GUESSES), -1, dtype=torch.int64, device=target.device)
        self._prefill()
        context = Context(
            rows=self.batch, slots=self.rows.tokens.shape[1], device=target.device, compile=self._compile,
            vocab_size=target.vocab_size, **request.context,
        )  # fmt: skip
        state = request.strategy.start(context)
        timings = self.report.timings
        timings.prefill = time.perf_counter() - started

        self.finished = [request.new_tokens == 0] * self.batch
        while not all(self.finished):
            if self._can_capture() and self.report.steps == WARM_UP_STEPS:
                self._run_captured(state, step)
                break
            begun, compiled = time.perf_counter(), timings.compile
            draft = request.strategy.propose(state, self._view(max(self.lengths))[1])
            guesses, tree, view = self._block(draft)
            proposed, compiled_in_propose = time.perf_counter(), timings.compile - compiled
            out = step(guesses, tree, self.rows, view)
            # The one place where the host waits for the device.
            outcome = _Outcome(*out.summary.tolist(), new=out.new.tolist())
            verified = time.perf_counter()
            if request.criteria is not None:
                self._apply_criteria(outcome, out)
            self._observe(state, out)
            observed, compiled_in_observe = time.perf_counter(), timings.compile - compiled - compiled_in_propose
            self._record(outcome, out)
            if self.report.steps == 1:
                self.report.time_to_first_token = verified - started - compiled_in_propose
            # Functions that a strategy had compiled just now are booked as compile time already.
            timings.propose += proposed - begun - compiled_in_propose
            timings.core += verified - proposed
            timings.observe += observed - verified - compiled_in_observe
            timings.host += time.perf_counter() - observed
        self.report.new_tokens = [len(tokens) for tokens in self.generated]
        self.report.peak_memory = self._memory()
        return Decoded(self.generated, self.report, self.logits, self.scores)

    def _can_capture(self) -> bool:
        """Whether nothing in a step needs the host or varies in shape, so that CUDA can replay it."""
        r = self.request
        return (
            self.target.device.type == "cuda" and self.target.flex and self.report.compiled and r.strategy.on_device
            and r.processors is None and r.criteria is None and not (r.keep_logits or r.keep_scores)
        )  # fmt: skip

    def _run_captured(self, state: Any, step: Callable[..., StepOutput]) -> None:
        """The rest of the call as replays of one CUDA graph; its parts cannot be told apart, all time is the core's."""

        def body() -> StepOutput:
            guesses, tree, view = self._block(self.request.strategy.propose(state, self._view(0)[1]))
            out = step(guesses, tree, self.rows, view)
            self._observe(state, out)
            return out

        begun = time.perf_counter()
        for summary, new in CapturedSteps(body):
            self._record(_Outcome(*summary, new=new), None)
            if all(self.finished):
                break
        self.report.timings.core += time.perf_counter() - begun

    def _compile(self, function: Callable) -> Callable:
        return self.engine.compile_function(function, self.report) if self.request.compile else function

    def _step_function(self, core: Core) -> Callable[..., StepOutput]:
        """`core.step` in the form this call needs: eager or compiled, with the choice inside the graph or on the host."""
        request = self.request
        on_host = request.processors is not None
        if request.compile:
            whole = self.engine.step_function(core, self.batch, on_host, self.report)
        else:
            whole = core.forward if on_host else core.step
        if not on_host:
            return whole

        def step(guesses: Tensor, tree: TreeTensors, rows: Rows, view: Tensor) -> StepOutput:
            nodes, forwarded = whole(guesses, tree, rows, view)
            chosen, scores, most = choose_along_path(
                nodes, tree, forwarded.logits, rows, self.prefixes, request.processors, request.plan
            )
            kept = scores if request.keep_scores else None
            return core.commit(nodes, chosen, tree, rows, forwarded, kept, most)

        return step

    def _prefill(self) -> None:
        """Stores keys and values of all prompt tokens but the last, which is node 0 of the first block."""
        end = max(self.lengths) - 1
        for start in range(0, end, self.request.prefill_chunk):
            stop = min(start + self.request.prefill_chunk, end)
            view = self._view(stop)[0].shape[0]
            at = torch.full((self.batch,), start, device=self.target.device)
            self.target.prefill(self.rows.tokens[:, start:stop], at, self.rows.buffers, view)

    def _capacity(self) -> int:
        """Slots per row: prompt, new tokens and the largest block; on CUDA a power of two, since each size is a graph."""
        slots = max(max(self.lengths) + self.request.new_tokens + BLOCK_MARGIN + VIEW_STEP, self.request.slots or 0)
        return 1 << (slots - 1).bit_length() if self.target.flex else slots

    def _view(self, length: int) -> tuple[Tensor, Sequences]:
        """The prefix of the slots that covers `length`, rounded up so that sizes change seldom.

        FlexAttention skips unused blocks by itself and wants static sizes: it gets all slots.
        """
        view = self.rows.tokens.shape[1] if self.target.flex else -(-length // VIEW_STEP) * VIEW_STEP
        if view not in self._views:
            self._views[view] = (self.rows.range[:view], self.rows.sequences(view))
        return self._views[view]

    def _block(self, draft: Draft) -> tuple[Tensor, TreeTensors, Tensor]:
        """A checked draft as the core wants it: at least three nodes, topology per row, attention's view."""
        if not isinstance(draft, Draft):
            raise DraftError(
                f"propose of {self.request.strategy.name!r} must return a Draft, not {type(draft).__name__}"
            )
        draft.check(self.batch)
        guesses, missing = draft.tokens, MIN_GUESSES - draft.tokens.shape[1]
        if missing > 0:
            guesses = torch.cat([guesses, self._no_guess[:, :missing]], dim=1) if guesses.shape[1] else self._no_guess
        nodes = guesses.shape[1] + 1
        tree = draft.topology
        if isinstance(tree, Topology):
            if tree not in self._trees:
                self._trees[tree] = tree.padded(MIN_GUESSES + 1).tensors(self.batch, self.target.device)
            tree = self._trees[tree]
        longest = max(self.lengths)
        # The view must stay smaller than the cache: the graph was made with two different sizes.
        if longest + nodes >= self.rows.tokens.shape[1] - VIEW_STEP:
            self._grow(longest + nodes + VIEW_STEP)
        self.report.nodes = max(self.report.nodes, nodes)
        return guesses, tree, self._view(longest + nodes)[0]

    def _grow(self, slots: int) -> None:
        """More room, for a block larger than the margin."""
        self.rows = self.rows.grown(2 * slots)
        self._views.clear()

    def _apply_criteria(self, outcome: _Outcome, out: StepOutput) -> None:
        """Asks the stopping criteria after every new token and cuts rows where one says stop.

        Criteria may know rows by their index. Rows have different lengths here, so each is shown a batch that repeats
        it, of which its own row counts.
        """
        assert self.request.criteria is not None
        for row, tokens in enumerate(outcome.new):
            done = len(self.generated[row])
            for count in range(1, outcome.emitted[row] + 1):
                ids = self.prefixes.of(row, done + count, tuple(tokens)).expand(self.batch, -1)
                scores = None
                if out.scores is not None:
                    new = out.scores[row, out.path[row, :count]]
                    scores = tuple(t.expand(self.batch, -1) for t in (*self.scores[row], *new))
                stop = self.request.criteria(ids, scores)
                if bool(stop.expand(self.batch)[row] if isinstance(stop, Tensor) else stop):
                    self.rows.length[row] -= outcome.emitted[row] - count
                    self.rows.finished[row] = True
                    outcome.emitted[row], outcome.ended[row] = count, 1
                    break

    def _observe(self, state: Any, out: StepOutput) -> None:
        strategy = self.request.strategy
        if type(strategy).observe is Strategy.observe:
            return
        emitted, accepted = out.summary[0], out.summary[1]
        sequences = self._view(max(self.lengths) + out.nodes.shape[1])[1]
        strategy.observe(
            state, Step(out.nodes, out.chosen, out.path, accepted, emitted, out.logits, out.hidden, sequences)
        )

    def _record(self, outcome: _Outcome, out: StepOutput | None) -> None:
        """Books a step; `out` is needed for logits and scores only."""
        request, report = self.request, self.report
        report.steps += 1
        report.accepted += sum(map(min, outcome.accepted, outcome.emitted))  # criteria may have cut the row
        report.drafted += sum(outcome.guessed)
        new = [tokens[:count] for tokens, count in zip(outcome.new, outcome.emitted, strict=True)]
        for row, tokens in enumerate(new):
            if self.finished[row]:
                continue
            count = len(tokens)
            histogram = report.accepted_lengths
            histogram.extend([0] * (count - len(histogram)))
            histogram[count - 1] += 1
            if out is not None and request.keep_logits:
                self.logits[row] += out.logits[row, out.path[row, :count]].unbind(0)
            if out is not None and out.scores is not None:
                self.scores[row] += out.scores[row, out.path[row, :count]].unbind(0)
            self.generated[row] += tokens
            self.lengths[row] += count
        self.finished = [bool(ended) for ended in outcome.ended]
        if request.on_step is not None:
            request.on_step(new, self.finished)

    def _memory(self) -> int:
        if self.target.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.target.device)
        return self.rows.buffers.nbytes
