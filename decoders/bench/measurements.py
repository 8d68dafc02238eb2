"""What is measured of methods: timed calls, warm-ups, and what untimed calls wrote."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..report import Stage
from .methods import Method


@dataclass(frozen=True)
class Measurement:
    """One timed call; times in seconds. What comes from our report is None, or empty, for transformers.

    Attributes:
        workload: its name.
        repeat: which round.
        position: place in that round's order.
        seconds: of the whole call without `compile_seconds`.
        compile_seconds: spent on compiling.
        compilations: graphs compiled.
        new_tokens: of all rows.
        first_token: from the start of a call to its first token, from a call of its own that is cut off there.
        steps: of the report.
        prefill_steps: of the report.
        prefill: of the report's timings.
        propose: of the report's timings.
        core: of the report's timings.
        observe: of the report's timings.
        mask: of the report's timings.
        host: of the report's timings.
        overhead: of the report.
        accepted_lengths: of the report.
        draft_passes: forward passes of the draft models that the strategy runs itself.
        stages: of the report.
        prompt_tokens: of the longest row.
        compiled_share: of the steps, in the compiled tier.
    """

    workload: str
    repeat: int
    position: int
    seconds: float
    compile_seconds: float
    compilations: int
    new_tokens: int
    first_token: float | None
    steps: int | None = None
    prefill_steps: int = 0
    prefill: float | None = None
    propose: float | None = None
    core: float | None = None
    observe: float | None = None
    mask: float | None = None
    host: float | None = None
    overhead: float | None = None
    accepted_lengths: list[int] | None = None
    draft_passes: int | None = None
    stages: list[Stage] = field(default_factory=list)
    prompt_tokens: int | None = None
    compiled_share: float | None = None


@dataclass(frozen=True)
class WarmupCost:
    """The first two calls.

    Attributes:
        first_call: seconds of the first.
        second_call: seconds of the second.
        compile_seconds: spent on compiling in the first.
        compilations: graphs compiled in the first.
        second_compilations: graphs compiled in the second.
        peak_memory: bytes; None where the system does not tell.
        memory_kind: what of: "device", "process" or "unknown".
        cache_bytes: of the loop's key-value cache.
        first_token: seconds from the start of the first call to its first token, compilation included.
        memory_added: bytes by which the two calls made the process larger; None where the system does not tell.
        pack_seconds: for packing weights, as reported.
        background_seconds: for compiling beside a call that went on, as reported.
    """

    first_call: float
    second_call: float
    compile_seconds: float
    compilations: int
    second_compilations: int
    peak_memory: int | None
    memory_kind: str
    cache_bytes: int | None
    first_token: float | None = None
    memory_added: int | None = None
    pack_seconds: float | None = None
    background_seconds: float | None = None


@dataclass(frozen=True)
class Check:
    """What one untimed call wrote.

    Attributes:
        tokens: new tokens of each row.
        steps: forward passes of the target that commit tokens.
        accepted_length: tokens per row and step.
        draft_passes: forward passes of the draft model; None without one.
    """

    tokens: list[list[int]]
    steps: int
    accepted_length: float
    draft_passes: int | None = None


@dataclass
class Competitor:
    """A method at one batch size.

    Attributes:
        status: "ok", "skipped" (the method does not do this) or "failed" (an error).
        reason: why there are no figures, empty if there are.
        warmup: the first two calls.
        checks: what one untimed call wrote, by workload.
        samples: the timed calls.
        kind_of: kind of prompt by workload.
    """

    method: Method
    rows: int
    status: str = "ok"
    reason: str = ""
    warmup: WarmupCost | None = None
    checks: dict[str, Check] = field(default_factory=dict)
    samples: list[Measurement] = field(default_factory=list)
    kind_of: dict[str, str] = field(default_factory=dict)
