"""What a call did, measured: :class:`Report`, returned as ``out.report``; and :class:`Observer`, told of calls while they run."""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Timings:
    """Seconds spent in each part of all steps.

    Attributes:
        prefill: reading the prompt, with the core of a first step that reads the prompt's end.
        propose: in the strategy's ``propose``.
        mask: walking the grammars of the rows.
        core: forward, verify and commit.
        observe: in the strategy's ``observe``.
        host: what is left.
        compile: compilations that the call waited for.
        pack: making the model ready in the first call, its weights packed.
        background: compiling beside the steps.
    """

    prefill: float = 0.0
    propose: float = 0.0
    mask: float = 0.0
    core: float = 0.0
    observe: float = 0.0
    host: float = 0.0
    compile: float = 0.0
    pack: float = 0.0
    background: float = 0.0

    def since(self, before: Timings) -> dict[str, float]:
        """Seconds by part that were booked after `before`, without those that there were none of."""
        return {part: seconds for part, now in vars(self).items() if (seconds := now - getattr(before, part))}

    @property
    def steps(self) -> float:
        """Seconds in decoding steps, prefill and compilation excluded."""
        return self.propose + self.mask + self.core + self.observe + self.host


class Stopwatch:
    """A stopwatch that does not count compilation, which is booked by itself."""

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._begun, self._compiled = time.perf_counter(), timings.compile

    def next(self) -> float:
        """Seconds since the last call, or since the start."""
        begun, compiled = self._begun, self._compiled
        self._begun, self._compiled = time.perf_counter(), self._timings.compile
        return self._begun - begun - (self._compiled - compiled)


@dataclass
class Stage:
    """What a draft model did in a call, and the drafter that helps it, if it has one.

    Attributes:
        model: name or path.
        drafter: strategy that drafts for this model, None if it writes token by token.
        passes: forward passes of this model, its prefill excluded.
        tokens: tokens it wrote with its drafter's help, all rows.
        drafted: draft tokens of the drafter that were put to it.
        accepted: those that it confirmed.
        accepted_lengths: histogram of tokens per row and pass, as in the report.
        forward_seconds: in its passes.
        drafter_seconds: in its drafter, which holds the passes of `stages`.
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
    """The grammar of a row, and what became of the text.

    Attributes:
        name: of the language.
        backend: what compiled it.
        policy: which tokens may spell it.
        source: where the compiled grammar came from: "compiled", "memory", "disk" or "given".
        seconds: it took to get it.
        nbytes: its memory.
        warnings: what it leaves out, or lets pass, of what was asked for.
        complete: whether the text is a whole one of the language; otherwise the call ended before it did.
        invalid: what a complete text breaks of a specification that is narrower than the language; None: nothing.
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


@dataclass
class Report:
    """Figures of one ``generate`` call.

    Attributes:
        strategy: registry name.
        settings: the settings in force; of merged strategies those of every part under its name, and of the merging itself.
        exact: False if the strategy or verifier may change the distribution.
        verifier: how drafts are accepted ("coupled").
        verifier_settings: the rule's own settings.
        compiled_steps: how many of `steps` ran compiled, the others uncompiled.
        threads: of the processor, that its last step computed with: fewer than torch's own number where other processes take the cores;
            0 on another device.
        replayed_steps: how many of `steps` were replays of what had been recorded, in part or as a whole (CUDA).
        reused: per row, prompt tokens that were not read, since an earlier call had left their keys and values.
        same_bits: in low precision, whether a token has the same bits in every block, so that drafts change nothing
            at near-ties either: a brief check when the model was made ready. None where it is not checked.
        weights: "int8" or "int4" where the engine was told to compute with quantized copies of the model's weights; "keep": the
            model's own.
        kv_cache: "int8" where it was told to keep keys and values in lower precision; "keep": in the model's own.
        rows: batch size.
        prompt_tokens: per row.
        new_tokens: per row.
        steps: target forwards that commit tokens.
        prefill_steps: how many of them, 0 or 1, read the end of the prompt as well; their core is timed as
            ``timings.prefill``.
        drafted: draft tokens put to the target, all rows.
        accepted: those that it confirmed.
        accepted_lengths: histogram; entry ``n`` counts row-steps that committed ``n + 1`` tokens.
        nodes: largest block that was verified.
        timings: see :class:`Timings`.
        time_to_first_token: seconds from the start of decoding to the first committed token.
        peak_memory: bytes of the static caches (CPU) or of the device allocator's peak (CUDA).
        compilations: graphs compiled during this call.
        stages: the draft models that took part, see :class:`Stage`; their time is part of ``timings.propose``.
        details: what the strategy says of the call, JSON-safe; see :meth:`decoders.Strategy.details`.
        grammars: per row, None for rows that may write anything; empty without ``grammar=``.
    """

    strategy: str
    settings: dict[str, Any] = field(default_factory=dict)
    exact: bool = True
    verifier: str = "coupled"
    verifier_settings: dict[str, Any] = field(default_factory=dict)
    same_bits: bool | None = None
    weights: str = "keep"
    kv_cache: str = "keep"
    rows: int = 1
    prompt_tokens: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    steps: int = 0
    prefill_steps: int = 0
    compiled_steps: int = 0
    replayed_steps: int = 0
    threads: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    nodes: int = 0
    timings: Timings = field(default_factory=Timings)
    time_to_first_token: float = 0.0
    peak_memory: int = 0
    compilations: int = 0
    stages: list[Stage] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    grammars: list[GrammarUse | None] = field(default_factory=list)

    def waited(self, seconds: float) -> None:
        """Books a compilation that the call has waited for."""
        self.timings.compile += seconds
        self.compilations += 1

    def share(self, spent: Mapping[str, float], nodes: int, compiled: bool, replayed: bool) -> None:
        """Books a step that was shared with others: all of its time, the largest block so far, and how it was run."""
        own = vars(self.timings)
        for part, seconds in spent.items():
            own[part] += seconds
        self.nodes = max(self.nodes, nodes)
        self.compiled_steps += compiled
        self.replayed_steps += replayed

    @property
    def compiled(self) -> bool:
        """Whether any step ran compiled."""
        return self.compiled_steps > 0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens committed per row and step, the bonus token included; 1.0 is plain decoding."""
        steps = sum(self.accepted_lengths)
        return sum((n + 1) * count for n, count in enumerate(self.accepted_lengths)) / steps if steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the proposed draft tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def overhead(self) -> float:
        """Share of the decoding steps' seconds outside the forward passes of target and draft models.

        A step whose core was timed as prefill counts as much as the others.
        """

        def inside(stages: list[Stage]) -> float:
            return sum(stage.forward_seconds + inside(stage.stages) for stage in stages)

        later = self.steps - self.prefill_steps
        if later == 0 or self.timings.core == 0:
            return 0.0
        core = self.timings.core * self.steps / later
        return 1 - (core + inside(self.stages)) / (core + self.timings.steps - self.timings.core)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of prefill and steps, compilation excluded."""
        seconds = self.timings.prefill + self.timings.steps
        return sum(self.new_tokens) / seconds if seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything, derived figures included, ready for ``json.dumps``."""
        return asdict(self) | {
            "compiled": self.compiled,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_rate": self.acceptance_rate,
            "overhead": self.overhead,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True, eq=False)
class ObservedCall:
    """One call of ``generate``, or one request of a scheduler. The same object in every method of an observer.

    Attributes:
        model: that decodes.
        strategy: registry name, ``a+b`` of merged ones.
        prompt_tokens: per row.
        max_new_tokens: per row.
        sampled: whether tokens are drawn; greedy otherwise.
    """

    model: PreTrainedModel
    strategy: str
    prompt_tokens: Sequence[int]
    max_new_tokens: int
    sampled: bool


class Observer(ABC):
    """Base class of all observers: methods that do nothing, for subclasses to replace those that they need.

    An observer is made once, without arguments, and told of the calls of all models, in the thread that decodes. What a method
    raises is a warning; the call goes on. Time spent here is part of the call's ``timings.host``.

    Class attributes:
        name: registry name, ``snake_case``.
        summary: one line for listings.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""

    def start(self, call: ObservedCall) -> None:
        """Before anything is read or decoded."""

    def step(self, call: ObservedCall, tokens: list[list[int]]) -> None:
        """After every step. tokens: the new ones of each row, none of rows that have ended."""

    def end(self, call: ObservedCall, report: Report, error: BaseException | None) -> None:
        """When the call is over, however it went. error: what ended it, None of calls that came to their end or were cancelled."""
