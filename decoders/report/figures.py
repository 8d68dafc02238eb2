"""Parts of a report: seconds, the work of draft models, the cost of grammars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Timings:
    """Seconds of each part of a call. All parts except `background` follow one another and add up to the call's duration.

    Attributes:
        prepare: reading the arguments, transformers' preparation of the inputs, compiling the grammars.
        wait: waiting for calls of other threads to release the model; a scheduler's request waits in the queue and between its steps.
        pack: preparing the model in the first call, and quantizing its weights again after they changed.
        kernels: compiling this package's CUDA kernels in parallel before the first call, or reading them from Triton's cache.
        check: comparing the model with a plain forward pass before its first call.
        start: allocating buffers, and the strategy's ``start``, which may prepare a draft model and read the prompt with it.
        prefill: reading the prompt. If the first step also reads the end of the prompt, its forward pass and verification are included.
        propose: the strategy's ``propose``.
        mask: computing the grammars' masks, and advancing the grammars over new tokens.
        core: the forward passes of the target, verifying and committing.
        observe: the strategy's ``observe``.
        host: the rest of the steps: stopping criteria, streamers, observers, the report.
        compile: waiting for compilation.
        finish: after the last step: storing keys and values for later calls, and making the result.
        background: compiling in parallel with the steps.
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
        """The seconds added since `before`, by part; omits parts that did not change."""
        return {part: seconds for part, now in vars(self).items() if (seconds := now - getattr(before, part))}

    @property
    def steps(self) -> float:
        """Seconds of the decoding steps, without prefill and compilation."""
        return self.propose + self.mask + self.core + self.observe + self.host

    @property
    def ready(self) -> float:
        """Seconds of making the model ready: `pack`, `kernels` and `check`."""
        return self.pack + self.kernels + self.check

    @property
    def call(self) -> float:
        """Seconds of the call: all parts except `background`."""
        return sum(vars(self).values()) - self.background


def mean_length(histogram: Sequence[int]) -> float:
    """Mean tokens per row and step; entry ``n`` of `histogram` counts steps that committed ``n + 1`` tokens."""
    steps = sum(histogram)
    return sum((n + 1) * count for n, count in enumerate(histogram)) / steps if steps else 0.0


@dataclass
class Stage:
    """The work of a draft model in a call, and of the strategy that drafts for the draft model, if any.

    Attributes:
        model: name or path.
        drafter: strategy that drafts for the draft model; None if the draft model decodes token by token.
        passes: number of forward passes of the draft model, without its prefill.
        tokens: number of tokens that the draft model wrote with its drafter's help, all rows.
        drafted, accepted: numbers of the drafter's tokens that the draft model verified and accepted.
        accepted_lengths: histogram; entry ``n`` counts passes (of each row) that wrote ``n + 1`` tokens.
        forward_seconds: seconds of the draft model's forward passes.
        drafter_seconds: seconds of the drafter, including the forward passes of `stages`.
        stages: the draft models of the drafter.
        weights: "int8" or "int4" for quantized weights, "16bit" for copies in 16 bits; "keep" for the checkpoint's weights.
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


#: The end of a warning about a keyword, for example of a JSON schema, that a compiled grammar without ``strict`` does not enforce.
LEFT_OUT = "is left to the validation of the finished text."


@dataclass
class GrammarUse:
    """The grammar of a row, what it cost, and whether the text is complete and valid.

    Attributes:
        name: name of the grammar's language, which is the set of allowed texts.
        backend: name of the backend that compiled it.
        policy: which tokenizations of a text are allowed.
        source: origin of the compiled grammar: "compiled", "memory", "disk" or "given".
        seconds: time for compiling or loading the grammar.
        nbytes: size of the grammar in memory, in bytes.
        warnings: how the language differs from the specification, a sentence per difference.
        complete: whether the text is complete; otherwise the call ended before the text did.
        invalid: why a complete text of the language is invalid under the specification; None if it is valid.
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

    @property
    def left_out(self) -> tuple[str, ...]:
        """The warnings about keywords that are not part of the language: only the validation of the finished text
        enforces them.
        """
        return tuple(warning for warning in self.warnings if warning.endswith(LEFT_OUT))
