"""The loop that all strategies share: propose, forward + verify + commit, observe, until every row has ended."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..report import Report
from ..strategy import Context, Draft, Sequences, Step, Strategy
from ..tree import Topology, TreeTensors
from . import compiler
from .core import Core, Rows, StepOutput
from .host import Prefixes, Processors, choose_along_path
from .sampling import SamplingInputs, SamplingPlan, row_keys
from .target import Target, fingerprint

#: Attention looks at a multiple of this many slots.
VIEW_STEP = 64
#: Blocks up to this size fit behind the longest row without growing the cache.
BLOCK_MARGIN = 64


@dataclass
class Request:
    """One call, with everything of transformers' resolved.

    Attributes:
        prompts: one 1-D int64 tensor per row, padding removed. padded_prompt: ``[B, P]`` as the user passed it.
        new_tokens: most tokens to generate per row. stop_tokens: end-of-sequence ids.
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
    plan: SamplingPlan = SamplingPlan()
    values: tuple[float, ...] = ()
    seed: int = 0
    processors: Processors | None = None
    criteria: Callable[[Tensor, Any], Any] | None = None
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


class Engine:
    """Target and compiled graphs of one model. Calls on one engine run one after the other.

    Raises:
        UnsupportedError: see :class:`Target`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.lock = threading.Lock()
        self.target = Target(model)
        self._steps: dict[tuple, Callable] = {}
        self._functions: dict[Callable, compiler.CompiledFunction] = {}

    def current(self, model: PreTrainedModel) -> bool:
        """Whether the weights are still those this engine was built (and its graphs frozen) for."""
        return fingerprint(model) == self.target.weights

    def decode(self, request: Request) -> Decoded:
        """Runs a call to its end."""
        with self.lock, torch.no_grad():
            return _Call(self, request).run()

    def step_function(self, core: Core, rows: int, on_host: bool, report: Report) -> Callable:
        """The compiled `core.step` (or `core.forward` if the choice is made on the host), warmed up for `rows` rows."""
        key = ("forward" if on_host else core.plan, rows > 1)
        if key not in self._steps:
            started, before = time.perf_counter(), compiler.compilations()
            sibling = self._steps.get((key[0], not key[1]))
            step = sibling or compiler.compile_core(core.forward if on_host else core.step, self.target.device)
            _warm_up(step, self.target, core.plan, 1 if rows == 1 else 3)
            self._steps[key] = step
            report.timings.compile += time.perf_counter() - started
            report.compilations += compiler.compilations() - before
        return self._steps[key]

    def compile_function(self, function: Callable, report: Report) -> Callable:
        """`function` compiled for use by strategies, one graph for all calls on this engine."""
        if function not in self._functions:
            self._functions[function] = compiler.CompiledFunction(function)
        compiled = self._functions[function]

        def book(seconds: float) -> None:
            report.timings.compile += seconds
            report.compilations += 1

        compiled.on_compile = book
        return compiled


def _warm_up(step: Callable, target: Target, plan: SamplingPlan, batch: int) -> None:
    """Compiles `step` on made-up rows whose sizes are pairwise different, so that Dynamo takes none for another."""
    device = target.device
    sampling = sampling_inputs((0.5,) * len(plan.operations), 0, batch, (), device)
    rows = Rows.allocate(target, [torch.zeros(2, dtype=torch.int64)] * batch, 176, 1, sampling)
    tree = Topology.chain(10).tensors(batch, device)
    guesses, view = torch.full((batch, 10), -1, device=device), rows.range[:80]
    per_row = [rows.length, rows.prompt_length, rows.finished, rows.limit, sampling.keys]
    sizes = [(guesses, (1,)), (view, (0,)), (rows.tokens, (1,)), (rows.range, (0,)), (tree.parents, (1,)),
             (tree.offsets, (1,)), (tree.visible, (1, 2)), (tree.ancestors, (1, 2))]  # fmt: skip
    sizes += [(t, (2,)) for t in (*rows.buffers.keys, *rows.buffers.values)]
    if batch > 1:
        sizes = [(t, (0, *dims) if t is not view and t is not rows.range else dims) for t, dims in sizes]
        sizes += [(t, (0,)) for t in per_row]
    compiler.mark_dynamic(sizes)
    step(guesses, tree, rows, view)


def sampling_inputs(
    values: tuple[float, ...], seed: int, rows: int, stop_tokens: tuple[int, ...], device: torch.device
) -> SamplingInputs:
    """The tensors of a plan. Stop tokens are padded to a multiple of 8 with -1, so that their number seldom matters."""
    padded = list(stop_tokens) + [-1] * (max(8, -len(stop_tokens) % 8 + len(stop_tokens)) - len(stop_tokens))
    return SamplingInputs(
        torch.tensor(values or (0.0,), dtype=torch.float32, device=device),
        row_keys(seed, rows, device),
        torch.tensor(padded, device=device),
    )


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
        self.report = Report(
            strategy=strategy.name, settings=strategy.settings.model_dump(mode="json"), exact=strategy.exact,
            compiled=request.compile, rows=self.batch, prompt_tokens=list(self.lengths),
        )  # fmt: skip
        self.prefixes = Prefixes(request.padded_prompt, self.generated)
        self._trees: dict[Topology, TreeTensors] = {}
        self._views: dict[int, tuple[Tensor, Sequences]] = {}

    def run(self) -> Decoded:
        request, target = self.request, self.target
        core = Core(target, request.plan)
        step = self._step_function(core)
        started = time.perf_counter()
        slots = max(self.lengths) + request.new_tokens + BLOCK_MARGIN + VIEW_STEP
        self.rows = Rows.allocate(
            target, request.prompts, max(slots, request.slots or 0), request.new_tokens,
            sampling_inputs(request.values, request.seed, self.batch, request.stop_tokens, target.device),
        )  # fmt: skip
        self._no_guess = torch.full((self.batch, 1), -1, dtype=torch.int64, device=target.device)
        self._prefill()
        context = Context(
            rows=self.batch, slots=self.rows.tokens.shape[1], device=target.device, compile=self._compile,
            vocab_size=target.vocab_size, **request.context,
        )  # fmt: skip
        state = request.strategy.start(context)
        strategy = request.strategy
        observes = type(strategy).observe is not Strategy.observe
        timings = self.report.timings
        timings.prefill = time.perf_counter() - started

        finished = [request.new_tokens == 0] * self.batch
        while not all(finished):
            begun, compiled = time.perf_counter(), timings.compile
            draft = strategy.propose(state, self._view(max(self.lengths))[1])
            guesses, tree, view = self._block(draft)
            proposed = time.perf_counter()
            out = step(guesses, tree, self.rows, view)
            # The one place where the host waits for the device.
            emitted, accepted, guessed, ended = out.summary.tolist()
            verified = time.perf_counter()
            if request.criteria is not None:
                self._apply_criteria(out, emitted, ended)
            if observes:
                strategy.observe(state, self._as_step(out))
            observed = time.perf_counter()
            self._record(out, emitted, accepted, guessed, finished, ended)
            finished = ended
            if self.report.steps == 1:
                self.report.time_to_first_token = verified - started - (timings.compile - compiled)
            # Functions that a strategy had compiled just now are booked as compile time already.
            timings.propose += proposed - begun - (timings.compile - compiled)
            timings.core += verified - proposed
            timings.observe += observed - verified
            timings.host += time.perf_counter() - observed
        self.report.new_tokens = [len(tokens) for tokens in self.generated]
        self.report.peak_memory = self._memory()
        return Decoded(self.generated, self.report, self.logits, self.scores)

    def _compile(self, function: Callable) -> Callable:
        return self.engine.compile_function(function, self.report) if self.request.compile else function

    def _step_function(self, core: Core) -> Callable[..., StepOutput]:
        """`core.step` in the form this call needs: eager or compiled, with the choice inside the graph or on the host."""
        request = self.request
        on_host = request.processors is not None
        whole = core.forward if on_host else core.step
        if request.compile:
            try:
                whole = self.engine.step_function(core, self.batch, on_host, self.report)
            except Exception as error:  # noqa: BLE001 - whatever the compiler met, eager decoding gives the same tokens
                warnings.warn(f"decoders: the step could not be compiled, decoding eagerly instead: {error}", stacklevel=2)
                self.report.compiled = False
        if not on_host:
            return whole

        def step(guesses: Tensor, tree: TreeTensors, rows: Rows, view: Tensor) -> StepOutput:
            nodes, forwarded = whole(guesses, tree, rows, view)
            chosen, scores = choose_along_path(
                nodes, tree, forwarded.logits, rows, self.prefixes, request.processors, request.plan
            )
            return core.commit(nodes, chosen, tree, rows, forwarded, scores if request.keep_scores else None)

        return step

    def _prefill(self) -> None:
        """Stores keys and values of all prompt tokens but the last, which is node 0 of the first block."""
        end = max(self.lengths) - 1
        for start in range(0, end, self.request.prefill_chunk):
            stop = min(start + self.request.prefill_chunk, end)
            view = min(-(-stop // VIEW_STEP) * VIEW_STEP, self.rows.tokens.shape[1])
            at = torch.full((self.batch,), start, device=self.target.device)
            self.target.prefill(self.rows.tokens[:, start:stop], at, self.rows.buffers, view)

    def _view(self, length: int) -> tuple[Tensor, Sequences]:
        """The prefix of the slots that covers `length`, rounded up so that sizes change seldom."""
        view = -(-length // VIEW_STEP) * VIEW_STEP
        if view not in self._views:
            self._views[view] = (self.rows.range[:view], self.rows.sequences(view))
        return self._views[view]

    def _block(self, draft: Draft) -> tuple[Tensor, TreeTensors, Tensor]:
        """A checked draft as the core wants it: at least two nodes, topology per row, attention's view."""
        draft.check(self.batch)
        guesses = draft.tokens if draft.tokens.shape[1] else self._no_guess
        nodes = guesses.shape[1] + 1
        tree = draft.topology
        if isinstance(tree, Topology):
            if tree not in self._trees:
                self._trees[tree] = tree.padded(2).tensors(self.batch, self.target.device)
            tree = self._trees[tree]
        longest = max(self.lengths)
        if longest + nodes >= self.rows.tokens.shape[1] - VIEW_STEP:
            self._grow(longest + nodes + VIEW_STEP)
        self.report.nodes = max(self.report.nodes, nodes)
        return guesses, tree, self._view(longest + nodes)[0]

    def _grow(self, slots: int) -> None:
        """More room, for a block larger than the margin."""
        self.rows = self.rows.grown(2 * slots)
        self._views.clear()

    def _apply_criteria(self, out: StepOutput, emitted: list[int], ended: list[int]) -> None:
        """Asks the stopping criteria after every new token and cuts rows where one says stop."""
        new = out.new.tolist()
        for row in range(self.batch):
            done = len(self.generated[row])
            for count in range(1, emitted[row] + 1):
                ids = self.prefixes.of(row, done, tuple(new[row][:count]))
                stop = self.request.criteria(ids, None)
                if bool(stop.all() if isinstance(stop, Tensor) else stop):
                    self.rows.length[row] -= emitted[row] - count
                    self.rows.finished[row] = True
                    emitted[row], ended[row] = count, 1
                    break

    def _as_step(self, out: StepOutput) -> Step:
        emitted, accepted = out.summary[0], out.summary[1]
        sequences = self._view(max(self.lengths) + out.nodes.shape[1])[1]
        return Step(out.nodes, out.chosen, out.path, accepted, emitted, out.logits, out.hidden, sequences)

    def _record(
        self,
        out: StepOutput,
        emitted: list[int],
        accepted: list[int],
        guessed: list[int],
        finished: list[int],
        ended: list[int],
    ) -> None:
        """Books a step: `finished` rows had ended before it, `ended` rows have now."""
        request, report = self.request, self.report
        report.steps += 1
        report.accepted += sum(map(min, accepted, emitted))  # criteria may have cut the row
        report.drafted += sum(guessed)
        new = out.new.tolist()
        for row, count in enumerate(emitted):
            if finished[row]:
                continue
            tokens = new[row][:count]
            histogram = report.accepted_lengths
            histogram.extend([0] * (count - len(histogram)))
            histogram[count - 1] += 1
            if request.keep_logits:
                self.logits[row] += out.logits[row, out.path[row, :count]].unbind(0)
            if request.keep_scores:
                self.scores[row] += out.scores[row, out.path[row, :count]].unbind(0)
            self.generated[row] += tokens
            self.lengths[row] += count
        if request.on_step is not None:
            request.on_step([tokens[:count] for tokens, count in zip(new, emitted, strict=True)], [bool(e) for e in ended])

    def _memory(self) -> int:
        if self.target.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.target.device)
        return self.rows.buffers.nbytes
