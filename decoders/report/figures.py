"""Parts of a report: seconds, the work of draft models, the cost of grammars."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Timings:
    """Seconds spent in each part of a call. All parts but the last follow one another and add up to the call.

    Attributes:
        prepare: reading the arguments, transformers' own preparation of the inputs, compiling the grammars.
        wait: until the model is free: during calls of other threads; for a scheduler's request in the queue, and between its steps.
        pack: making the model ready in the first call, and quantizing its weights again after they were written to.
        kernels: compiling our kernels for CUDA before the first call, side by side, or reading them from Triton's cache.
        check: comparing it with a plain forward pass before its first call.
        start: buffers, and the strategy's ``start``, which makes a draft model ready and reads the prompt with it.
        prefill: reading the prompt, with the core of a first step that reads the prompt's end.
        propose: in the strategy's ``propose``.
        mask: walking the grammars of the rows.
        core: forward, verify and commit.
        observe: in the strategy's ``observe``.
        host: the rest of the steps: stopping criteria, streamers, observers, the report.
        compile: compilations that the call waited for.
        finish: after the last step: storing keys and values for later calls, and making the result.
        background: compiling beside the steps.
    """

    prepare: float = 0.0
    wait: float = 0.0
    pack: float = 0.0
    kernels: float = 0.0
    check: float = 0.0
    start: float = 0.0
    prefill: float = 0.0
    propose: float = 0.0
    mask: float = 0.0
    core: float = 0.0
    observe: float = 0.0
    host: float = 0.0
    compile: float = 0.0
    finish: float = 0.0
    background: float = 0.0

    def since(self, before: Timings) -> dict[str, float]:
        """The seconds added since `before`, by part; parts without any are left out."""
        return {part: seconds for part, now in vars(self).items() if (seconds := now - getattr(before, part))}

    @property
    def steps(self) -> float:
        """Seconds in decoding steps, prefill and compilation excluded."""
        return self.propose + self.mask + self.core + self.observe + self.host

    @property
    def call(self) -> float:
        """Seconds of the call: all parts but the background."""
        return sum(vars(self).values()) - self.background


class Stopwatch:
    """A stopwatch that leaves out compilation, which has its own entry."""

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._begun, self._compiled = time.perf_counter(), timings.compile

    def next(self) -> float:
        """Seconds since the last call, or since the start."""
        begun, compiled = self._begun, self._compiled
        self._begun, self._compiled = time.perf_counter(), self._timings.compile
        return self._begun - begun - (self._compiled - compiled)


def mean_length(histogram: Sequence[int]) -> float:
    """Tokens per row and step; entry ``n`` of `histogram` counts steps that committed ``n + 1`` tokens."""
    steps = sum(histogram)
    return sum((n + 1) * count for n, count in enumerate(histogram)) / steps if steps else 0.0


@dataclass
class Stage:
    """The work of a draft model in a call, and of the drafter that helps it, if it has one.

    Attributes:
        model: name or path.
        drafter: strategy that drafts for this model, None if it writes token by token.
        passes: forward passes of this model, its prefill excluded.
        tokens: tokens it wrote with its drafter's help, all rows.
        drafted: number of the drafter's tokens that the model verified.
        accepted: number of them that it accepted.
        accepted_lengths: histogram of tokens per row and pass, as in the report.
        forward_seconds: seconds in its passes.
        drafter_seconds: seconds in its drafter, including the passes of `stages`.
        stages: the draft models of its drafter.
        weights: "int8" or "int4" where it computed with quantized copies of its weights; "keep": the model's own.
    """

    model: str
    drafter: str | None = None
    passes: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    forward_seconds: float = 0.0
    drafter_seconds: float = 0.0
    stages: list[Stage] = field(default_factory=list)
    weights: str = "keep"


@dataclass
class GrammarUse:
    """A row's grammar, and whether its text is complete and valid.

    Attributes:
        name: name of the language.
        backend: name of the backend that compiled it.
        policy: which tokens may spell a text.
        source: where the compiled grammar came from: "compiled", "memory", "disk" or "given".
        seconds: time for getting it.
        nbytes: its memory.
        warnings: how the language differs from the specification, one sentence each.
        complete: whether the text is complete; otherwise the call ended before the text did.
        invalid: the rule that a complete text breaks, if the specification is narrower than the language; None: it breaks none.
    """

    name: str
    backend: str
    policy: str
    source: str
    seconds: float
    nbytes: int
    warnings: tuple[str, ...]
    complete: bool = False
    invalid: str | None = None
