"""The report of a call: figures as lines, in a notebook or as a plot; and the base class of observers."""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import SettingsError, amount, installing
from .drawing import draw
from .figures import GrammarUse, Stage, Timings, mean_length
from .written import Tree, Written, bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: If steps waited for processors for more than the share BUSY of their time, speeds cannot be compared. Calls of fewer than FEW_STEPS
#: steps are not judged.
BUSY, FEW_STEPS = 0.5, 4


@dataclass
class Report:
    """Figures of one ``generate`` call.

    Attributes:
        strategy: registry name.
        settings: the strategy's settings; for merged strategies, the settings of every part by name, and of the merge itself.
        exact: False if the strategy or verifier may change the distribution of the tokens.
        verifier, verifier_settings: name of the verifier, "coupled" by default, and its settings.
        compiled_steps: number of `steps` that ran compiled.
        threads: number of processor threads of the last step, below torch's number if other processes take the cores; 0 on a GPU.
        waiting: share of the steps' time in which the decoding thread, or a thread that it waited for, had no processor because
            other processes take the cores (see :attr:`busy`); 0 on a GPU.
        replayed_steps: number of `steps` that replayed recordings (CUDA graphs), in part or as a whole.
        unrecorded: why steps that should have been recorded ran kernel by kernel (CUDA, slow); recording is tried again. "" if all
            were recorded.
        reused: per row, number of prompt tokens whose keys and values came from an earlier call.
        same_bits: in low precision, whether a token's logits have the same bits with every draft, so that drafts do not change
            near-ties; from a brief check when the model was prepared. False for models with recurrent layers, which are not checked.
            None in float32.
        checked: ISO date on which the prepared model was compared with transformers' forward passes, today or before.
        weights: "int8" or "int4" for quantized weights, "16bit" for copies in 16 bits; "keep" for the checkpoint's weights.
        kv_cache: "int8" for keys and values in int8; "keep" for the model's dtype.
        rows: batch size.
        prompt_tokens, new_tokens: numbers of prompt tokens and of new tokens, per row.
        steps: number of forward passes of the target that commit tokens.
        prefill_steps: number of `steps` (0 or 1) that also read the end of the prompt; ``timings.prefill`` includes their ``core``.
        drafted, accepted: numbers of draft tokens that the target verified and accepted, all rows.
        accepted_lengths: histogram; entry ``n`` counts steps (of each row) that committed ``n + 1`` tokens.
        nodes: greatest number of nodes per row that a step verified.
        timings: see :class:`Timings`.
        time_to_first_token: seconds from the call to the first committed token.
        peak_memory: bytes of the static caches (CPU), or the peak of the device's allocator (CUDA).
        recorded_memory: bytes that recordings (CUDA graphs) keep for replays, including recordings of earlier calls.
        compilations: number of graphs compiled during the call.
        stages: the draft models that took part, see :class:`Stage`; their time is part of ``timings.propose``.
        details: the strategy's own figures, JSON-safe; see :meth:`decoders.Strategy.details`.
        grammars: per row, its :class:`GrammarUse`, or None for a row without a grammar; empty without ``grammar=``.
        written: the tokens, their drafters, and with the setting ``trace`` the tree of every step. Not in :meth:`as_dict`.
    """

    strategy: str
    settings: dict[str, Any] = field(default_factory=dict)
    exact: bool = True
    verifier: str = "coupled"
    verifier_settings: dict[str, Any] = field(default_factory=dict)
    same_bits: bool | None = None
    checked: str = ""
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
    unrecorded: str = ""
    threads: int = 0
    waiting: float = 0.0
    drafted: int = 0
    accepted: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    nodes: int = 0
    timings: Timings = field(default_factory=Timings)
    time_to_first_token: float = 0.0
    peak_memory: int = 0
    recorded_memory: int = 0
    compilations: int = 0
    stages: list[Stage] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    grammars: list[GrammarUse | None] = field(default_factory=list)
    written: Written | None = field(default=None, repr=False, compare=False)

    def waited(self, seconds: float) -> None:
        """Adds the `seconds` of a compilation that the call waited for."""
        self.timings.compile += seconds
        self.compilations += 1

    def finished(self, begun: float | None) -> None:
        """Adds the time since the last measured part to `timings.finish`. begun: when the call began; None adds nothing."""
        if begun is not None:
            self.timings.finish += time.perf_counter() - begun - self.timings.call

    def share(self, spent: Mapping[str, float], nodes: int, compiled: bool, replayed: bool) -> None:
        """Adds a step that requests shared. spent: seconds of the whole step, by part. nodes: number of verified nodes per row."""
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
    def busy(self) -> bool:
        """Whether the steps waited for processors for more than half of their time; if so, speeds cannot be compared."""
        return self.waiting > BUSY and self.steps >= FEW_STEPS

    @property
    def busy_line(self) -> str:
        """The line that says how long steps waited, for reports and warnings."""
        return f"other processes take the cores: steps waited {self.waiting:.0%} of their time"

    @property
    def seconds(self) -> float:
        """Seconds of the whole call, which `timings` divides into parts."""
        return self.timings.call

    @property
    def same_tokens(self) -> str:
        """Whether the tokens equal the tokens of plain decoding, in words."""
        if not self.exact:
            return f"no: {self.strategy if self.verifier == 'coupled' else f'verifier {self.verifier}'} is lossy"
        if self.same_bits is None:
            return "yes, in float32"
        return "near-ties may differ" + (" on branches of trees" if self.same_bits else "")

    @property
    def mean_accepted_length(self) -> float:
        """Tokens committed per row and step, the bonus token included; 1.0 is plain decoding."""
        return mean_length(self.accepted_lengths)

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified draft tokens that were accepted; 0 without draft tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def overhead(self) -> float:
        """Share of the decoding steps' seconds outside the forward passes of target and draft models.

        If the first step's ``core`` is part of ``timings.prefill``, the mean of the other steps stands for it.
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
        """New tokens of all rows, divided by the seconds of start, prefill and steps. Work done once per model does not count."""
        seconds = self.timings.start + self.timings.prefill + self.timings.steps
        return sum(self.new_tokens) / seconds if seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All attributes except `written` and all properties except `busy_line`, as a dict for ``json.dumps``."""
        figures = asdict(replace(self, written=None))
        del figures["written"]
        return figures | {
            "seconds": self.seconds,
            "same_tokens": self.same_tokens,
            "compiled": self.compiled,
            "busy": self.busy,
            "mean_accepted_length": self.mean_accepted_length,
            "acceptance_rate": self.acceptance_rate,
            "overhead": self.overhead,
            "tokens_per_second": self.tokens_per_second,
        }

    def lines(self) -> list[tuple[str, str]]:
        """The main figures as about ten lines ``(name, text)``."""
        share = f" ({self.acceptance_rate:.0%})" if self.drafted else ""
        compiled = f"{self.compiled_steps} of {amount(self.steps, 'step')}"
        if self.compilations:
            compiled += (
                f"; {amount(self.compilations, 'graph')} in {self.timings.compile + self.timings.background:.1f} s"
            )
        return [
            ("strategy", self.strategy),
            ("same tokens", self.same_tokens + (f" (checked on {self.checked})" if self.checked else "")),
            *([("verifier", self.verifier)] if self.verifier != "coupled" else []),
            ("tokens", f"{sum(self.new_tokens)} new after {sum(self.prompt_tokens)} of prompt"),
            ("speed", f"{self.tokens_per_second:.1f} tokens/s, the first after {self.time_to_first_token:.2f} s"),
            *([("busy", self.busy_line)] if self.busy else []),
            ("steps", f"{self.steps}, {self.mean_accepted_length:.2f} tokens each"),
            (
                "lengths",
                ", ".join(f"{n}: {count}×" for n, count in enumerate(self.accepted_lengths, 1) if count) or "none",
            ),
            ("drafts", f"{self.accepted} of {amount(self.drafted, 'token')} accepted{share}"),
            ("seconds", seconds_line(self.timings)),
            ("overhead", f"{self.overhead:.0%} of the steps outside the models' forward passes"),
            *(("grammar", grammar_line(use, self.timings.mask)) for use in self.grammars if use is not None),
            *(line for stage in self.stages for line in stage_lines(stage)),
            ("compiled", compiled),
            *([("unrecorded", self.unrecorded)] if self.unrecorded else []),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{name:<11} {value}" for name, value in self.lines())

    def _repr_html_(self) -> str:
        """For notebooks: the figures, the histogram of tokens per step, and the text with drafted tokens in colour."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in self.lines()
        )
        text = self.written.html() if self.written is not None else ""
        return f"<table>{rows}</table>{bars(self.accepted_lengths)}{text}"

    def tree(self, step: int, row: int = 0) -> Tree:
        """The draft tree of a step, counted from 0, which ``print`` and notebooks draw as text.

        Raises:
            SettingsError: no trees were kept (``decoders_config={"trace": True}`` keeps them), or no such step or row exists.
        """
        traced = self.written.steps if self.written is not None else []
        if not any(traced):
            raise SettingsError('no tree was kept: give generate decoders_config={"trace": True}')
        if not 0 <= row < len(traced) or not 0 <= step < len(traced[row]):
            counts = ", ".join(map(str, map(len, traced)))
            raise SettingsError(f"there is no step {step} of row {row}: rows have {counts} steps, counted from 0")
        assert self.written is not None
        return self.written.tree(step, row)

    def plot(self, path: str | Path | None = None) -> Any:
        """Draws tokens per step, accepted draft tokens and seconds by part with matplotlib (``pip install 'hf-decoders[bench]'``).

        Returns matplotlib's ``Figure``, which notebooks show; writes it to the picture file `path`, if given.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure  # without pyplot, which would open a display
        except ImportError as error:
            raise ImportError(f"report.plot() needs matplotlib: {installing('bench')}") from error
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        draw(self, *figure.subplots(1, 3, width_ratios=(3, 2, 3)))
        if path is not None:
            figure.savefig(path)
        return figure


def seconds_line(timings: Timings) -> str:
    """A call's seconds by part, the longest first; parts below 1% are summed."""
    whole = timings.call
    parts = {name: value for name, value in vars(timings).items() if name != "background"}
    large = sorted((n for n, v in parts.items() if v >= whole / 100 and v), key=lambda n: -parts[n])
    rest = whole - sum(parts[name] for name in large)
    named = [f"{name} {parts[name]:.2f}" for name in large] + ([f"others {rest:.2f}"] if rest >= 0.005 else [])
    return f"{whole:.2f}: " + ", ".join(named)


def grammar_line(use: GrammarUse, seconds: float) -> str:
    """The line about a row's grammar: its cost, and whether the text is complete. seconds: the time for the masks of all rows."""
    outcome = "complete" if use.complete else "not complete"
    if use.invalid:
        outcome = f"invalid: {use.invalid}"
    compilation = f"{use.backend}, {use.source} in {use.seconds * 1e3:.0f} ms, {use.nbytes / 1e6:.1f} MB"
    return f"{use.name} ({compilation}); masks {seconds:.2f} s; {outcome}"


def stage_lines(stage: Stage, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yields lines ``(name, text)`` about a draft model and, indented below, about the draft models that help to draft for it."""
    quantized = "" if stage.weights == "keep" else f" in {stage.weights}"
    text = f"{stage.model}{quantized}: {amount(stage.passes, 'pass', 'passes')} in {stage.forward_seconds:.2f} s"
    if stage.drafter is not None:
        text += (
            f", {mean_length(stage.accepted_lengths):.2f} tokens each with {stage.drafter} ({stage.accepted} of {stage.drafted} "
            f"draft tokens, {stage.drafter_seconds:.2f} s)"
        )
    yield "  " * depth + "draft", text
    for inner in stage.stages:
        yield from stage_lines(inner, depth + 1)


@dataclass(frozen=True, eq=False)
class ObservedCall:
    """One call of ``generate``, or one request of a scheduler. All methods of an observer receive the same object for one call.

    Attributes:
        model: the model that decodes.
        strategy: registry name, ``a+b`` for merged strategies.
        prompt_tokens: number of prompt tokens of each row.
        max_new_tokens: greatest number of new tokens per row.
        sampled: True for sampling, False for greedy decoding.
    """

    model: PreTrainedModel
    strategy: str
    prompt_tokens: Sequence[int]
    max_new_tokens: int
    sampled: bool


class Observer(ABC):
    """Base class of all observers. Its methods do nothing; subclasses override the methods that they need.

    An observer is created once, without arguments. The decoding thread calls its methods for the calls of all models. An exception
    in a method becomes a warning, and the call goes on. The methods' time is part of the call's ``timings.host``.

    Class attributes:
        name: registry name, ``snake_case``.
        summary: one line for listings.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""

    def start(self, call: ObservedCall) -> None:
        """Called before the prompt is read."""

    def step(self, call: ObservedCall, tokens: list[list[int]]) -> None:
        """Called after every step. tokens: each row's new tokens; empty for rows that have ended."""

    def end(self, call: ObservedCall, report: Report, error: BaseException | None) -> None:
        """Called after the call. error: the error that ended it; None if it was completed or cancelled."""
