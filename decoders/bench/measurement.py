"""Interleaved measurement: the compared methods take turns, because a machine's speed changes by the minute.

The order of the methods rotates. Otherwise a method would always find the processor's caches as the same other method left them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

from ..enabling import forget as forget_memories
from ..errors import DecodersError
from .machine import has_own_memory, resident, with_peak_memory
from .methods import Method
from .timed_call import Decode, Stamps, TimedCall, compiled_share, decode, first_token, forwards, stamped, written
from .workloads import Workload

T = TypeVar("T")
#: Share of a run's seconds after which no warm-up begins.
WARM_UP = 0.5
#: Called before each call, with a description of it and the expected remaining seconds (infinite until they can be estimated).
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Measurement:
    """One timed call; times in seconds.

    Attributes that are not listed here come from our :class:`~decoders.report.Report` and its timings; they are None, empty or 0 for
    transformers.

    Attributes:
        workload: the workload's name.
        repeat: number of the round.
        position: the method's place in the order of the methods for this prompt.
        seconds: seconds of the whole call without `compile_seconds`.
        compile_seconds: seconds spent on compiling.
        compilations: number of graphs compiled.
        new_tokens: number of new tokens in all rows.
        first_token: seconds from the start of a call to its first token, measured in a separate call that ends with this token.
        prompt_tokens: number of prompt tokens in the longest row.
        compiled_share: share of the steps that ran compiled.
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
    prompt_tokens: int | None = None
    compiled_share: float | None = None
    waiting: float = 0.0


@dataclass(frozen=True)
class WarmupCost:
    """Times and memory of a method's first two calls.

    Attributes:
        first_call, second_call: seconds of the calls.
        compile_seconds: seconds spent on compiling in the first call.
        compilations: number of graphs compiled in the first call.
        second_compilations: number of graphs compiled in the second call.
        peak_memory: peak memory in the second call, in bytes: of the device's allocator or, on CPUs, of the whole process; None if the
            system does not report it.
        cache_bytes: bytes of the loop's KV cache; None for transformers, and on devices whose allocator reports its peak.
        first_token: seconds from the start of the first call to its first token, compilation included.
        memory_added: growth of the process's resident memory in the two calls, in bytes; None if the system does not report it.
    """

    first_call: float
    second_call: float
    compile_seconds: float
    compilations: int
    second_compilations: int
    peak_memory: int | None
    cache_bytes: int | None
    first_token: float | None = None
    memory_added: int | None = None


@dataclass(frozen=True)
class Check:
    """The output of one untimed call.

    Attributes:
        tokens: new tokens of each row.
        steps: number of forward passes of the target that commit tokens.
        accepted_length: mean number of tokens per row and step.
        draft_passes: number of forward passes of the strategy's draft models, or of transformers' assistant; passes of models that
            draft for a draft model are not counted. None without draft models.
    """

    tokens: list[list[int]]
    steps: int
    accepted_length: float
    draft_passes: int | None = None


@dataclass
class Competitor:
    """A method at one batch size.

    Attributes:
        status: "ok", "skipped" (not supported, or no time was left) or "failed" (an error).
        reason: why the method has no figures; "" if it was measured.
        warmup: times and memory of the first two calls.
        checks: the output of one untimed call, by workload.
        samples: the timed calls.
        kind_of: kind of prompt, by workload.
    """

    method: Method
    rows: int
    status: str = "ok"
    reason: str = ""
    warmup: WarmupCost | None = None
    checks: dict[str, Check] = field(default_factory=dict)
    samples: list[Measurement] = field(default_factory=list)
    kind_of: dict[str, str] = field(default_factory=dict)


class Interrupted(KeyboardInterrupt):
    """A run was interrupted after some of its prompts had been measured.

    Attributes:
        entries: the methods' measurements, reduced to the prompts that every method has decoded.
    """

    def __init__(self, entries: list[Competitor]) -> None:
        super().__init__("interrupted")
        self.entries = entries


def rotation(items: Sequence[T], turn: int) -> list[T]:
    """`items` rotated by `turn` places, and reversed in every second cycle of turns, so that no two items always follow each other."""
    if not items:
        return []
    order = deque(items)
    order.rotate(-(turn % len(items)))
    return list(reversed(order)) if (turn // len(items)) % 2 else list(order)


def measure(
    methods: Sequence[Method],
    workloads: Sequence[Workload],
    *,
    new_tokens: int,
    repeats: int = 3,
    progress: Progress = lambda what, left: None,
    decode: Decode = decode,
    first_tokens: bool = True,
    checks: bool = True,
    seconds: float | None = None,
    measured: Callable[[list[Competitor]], None] = lambda entries: None,
) -> list[Competitor]:
    """Calls :func:`warm_up`, then :func:`take_turns`, on workloads of one batch size, and returns the measured methods.

    A method that raises is not called again, and its entry's `reason` says why. `progress` is called before every call.

    Args:
        seconds: time limit of the run, compiling included. Methods that would begin their warm-up in the second half of this time
            are skipped, and no call begins after this time. The baseline, one strategy and one prompt are always measured.
        measured: called whenever every method has decoded a prompt, with the measurements so far.

    Raises:
        Interrupted: Ctrl-C, after some prompts were measured.
    """
    began, checks = time.monotonic(), checks and seconds is None
    deadlines = (None, None) if seconds is None else (began + WARM_UP * seconds, began + seconds)
    entries = warm_up(
        methods, workloads, new_tokens=new_tokens, progress=progress, decode=decode, deadline=deadlines[0],
        texts=len(workloads) * (repeats + checks),
    )  # fmt: skip
    try:
        take_turns(
            entries, workloads, new_tokens=new_tokens, repeats=repeats, progress=progress, decode=decode,
            first_tokens=first_tokens, checks=checks, deadline=deadlines[1], by_prompt=True,
            measured=lambda: measured(complete(entries)),
        )  # fmt: skip
    except KeyboardInterrupt:
        if not (kept := complete(entries)):
            raise
        raise Interrupted(kept) from None
    return complete(entries) or entries


def complete(entries: Sequence[Competitor]) -> list[Competitor]:
    """`entries`, reduced to the prompts that every method has decoded; an empty list if there is no such prompt."""
    sampled = [{sample.workload for sample in entry.samples} for entry in entries if entry.status == "ok"]
    names = set.intersection(*sampled) if sampled else set()
    kept = [
        replace(
            entry,
            kind_of={name: kind for name, kind in entry.kind_of.items() if name in names},
            samples=[sample for sample in entry.samples if sample.workload in names],
        )
        for entry in entries
    ]
    return kept if names else []


def warm_up(
    methods: Sequence[Method],
    workloads: Sequence[Workload],
    *,
    new_tokens: int,
    progress: Progress = lambda what, left: None,
    decode: Decode = decode,
    deadline: float | None = None,
    texts: int = 0,
) -> list[Competitor]:
    """Makes two calls of every method on the first workload, to compile and to measure memory. Returns an entry per method.

    Args:
        texts: number of texts that each method writes after the warm-up, to estimate the remaining seconds.
        deadline: by ``time.monotonic``; methods that would begin later are skipped, except the first method and our first strategy.
    """
    rows = {w.rows for w in workloads}
    if len(rows) != 1:
        raise ValueError(f"all workloads must have the same number of rows, not {sorted(rows)}")
    entries = [Competitor(c, workloads[0].rows, kind_of={w.name: w.kind for w in workloads}) for c in methods]
    for number, entry in enumerate(entries):
        needed = not number or (entry.method.ours and not any(e.method.ours and e.warmup for e in entries[:number]))
        late = _late(deadline) and not needed
        entry.reason = entry.method.skip_reason(entry.rows) or ("no time was left for it: --seconds" if late else "")
        entry.status = "skipped" if entry.reason else "ok"
        progress(f"{entry.method.name} · compile, warm up", _left(entries, number, texts))
        _attempt(entry, partial(_warm_up, entry, workloads[0], new_tokens, decode))
    return entries


def take_turns(
    entries: Sequence[Competitor],
    workloads: Sequence[Workload],
    *,
    new_tokens: int,
    repeats: int = 3,
    progress: Progress = lambda what, left: None,
    decode: Decode = decode,
    first_tokens: bool = True,
    checks: bool = True,
    deadline: float | None = None,
    by_prompt: bool = False,
    measured: Callable[[], None] = lambda: None,
) -> int:
    """First makes one untimed call of each method per workload: this call prepares the method for the prompt's length, and its text is
    compared with the baseline's. Then runs `repeats` timed rounds over all workloads, and changes the methods' order at every workload.

    Args:
        first_tokens: whether to measure the time to the first token, in a separate call.
        checks: whether to make the untimed calls; otherwise the texts of the first round are compared.
        deadline: by ``time.monotonic``; after the first round, no round begins that would end later.
        by_prompt: whether the deadline can also end the untimed calls or a round early, once every method has decoded one prompt.
        measured: called when all methods have decoded a prompt in a round.

    Returns:
        The number of complete rounds.
    """
    texts, done, began = len(workloads) * (repeats + checks), 0, time.monotonic()

    def told(what: str) -> None:
        nonlocal done
        coming, spent = len(entries) * texts - done, time.monotonic() - began
        progress(what, spent / done * coming if done else _left(entries, len(entries), texts))
        done += 1

    forget(entries)
    for number, workload in enumerate(workloads if checks else ()):
        if by_prompt and number and _late(deadline, 2 * (time.monotonic() - began) / number):
            workloads = workloads[:number]
            break
        for entry in entries:
            told(f"{entry.method.name} · check")
            _attempt(entry, partial(_call, entry.method, entry, workload, new_tokens, decode))
    turn, round_began = 0, 0.0
    for repeat in range(repeats):
        if repeat and _late(deadline, time.monotonic() - round_began):  # expected to take as long as the round before
            return repeat
        round_began = time.monotonic()
        forget(entries)
        for workload in workloads:
            for position, entry in enumerate(rotation(entries, turn)):
                if by_prompt and turn and _late(deadline):
                    for other in entries if repeat else ():  # an incomplete round counts only if it is the first
                        other.samples = [sample for sample in other.samples if sample.repeat < repeat]
                    return repeat
                told(f"{entry.method.name} · round {repeat + 1} of {repeats}")
                _attempt(entry, partial(_sample, entry, workload, repeat, position, new_tokens, decode, first_tokens))
            turn += 1
            measured()
    return repeats


def _left(entries: Sequence[Competitor], number: int, texts: int) -> float:
    """Expected seconds from the warm-up of ``entries[number]`` to the end, compiling included. A method is assumed to take as long as
    earlier methods of its kind (ours, or transformers'); infinite if a kind has no earlier method. texts: as in :func:`warm_up`.
    """
    done = [(entry.method.ours, entry.warmup) for entry in entries[:number] if entry.warmup is not None]
    alike = [[warmup for ours, warmup in done if ours == entry.method.ours] for entry in entries[number:]]
    if not done or not all(alike):
        return math.inf
    coming = sum(fmean(w.first_call + (1 + texts) * w.second_call for w in warmups) for warmups in alike)
    return coming + texts * sum(w.second_call for _, w in done)


def _late(deadline: float | None, needed: float = 0.0) -> bool:
    """Whether work of `needed` seconds would end after `deadline`. False without a deadline."""
    return deadline is not None and time.monotonic() + needed > deadline


def forget(entries: Sequence[Competitor]) -> None:
    """Clears the memories of strategies at the start of a round, so that each round learns from the same prompts in the same order."""
    for entry in entries:
        if entry.method.arguments.get("decoders_config", {}).get("memory"):
            forget_memories(entry.method.model)


def _attempt(entry: Competitor, action: Callable[[], object]) -> None:
    if entry.status != "ok":
        return
    try:
        action()
    except DecodersError as error:  # not supported by the method, as the message explains
        entry.status, entry.reason = "skipped", _first_line(error)
    except Exception as error:
        entry.status, entry.reason = "failed", f"{type(error).__name__}: {_first_line(error)}"


def _warm_up(entry: Competitor, workload: Workload, new_tokens: int, decode: Decode) -> None:
    device, before = entry.method.model.device, resident()
    first, stamps = stamped(entry.method, workload, new_tokens, decode)
    second, peak = with_peak_memory(device, lambda: decode(entry.method, workload, new_tokens))
    # transformers does not report its compile time. If it compiled, the additional seconds of the first call are taken instead.
    compiling = first.compile_seconds
    if first.report is None and first.compilations:
        compiling = max(first.seconds - second.seconds, 0.0)
    after = resident()
    cache = None if second.report is None or has_own_memory(device) else second.report.peak_memory
    entry.warmup = WarmupCost(
        first.seconds, second.seconds, compiling, first.compilations, second.compilations, peak, cache, stamps["first_token"],
        None if before is None or after is None else max(after - before, 0),
    )  # fmt: skip


def _call(
    method: Method, entry: Competitor, workload: Workload, new_tokens: int, decode: Decode
) -> tuple[TimedCall, list[list[int]]]:
    """Makes a call; returns it, and the new tokens of each row. Stores the output of a workload's first call in ``entry.checks``."""
    if workload.name in entry.checks:
        call = decode(method, workload, new_tokens)
        return call, written(method, workload, call.sequences)
    stamps = None if method.ours else Stamps()
    with forwards(method.assistant) as drafted:
        call = decode(method, workload, new_tokens, stamps)
    tokens = written(method, workload, call.sequences)
    if (report := call.report) is not None:
        passes = sum(stage.passes for stage in report.stages) if report.stages else None
        entry.checks[workload.name] = Check(tokens, report.steps, report.mean_accepted_length, passes)
    else:
        steps = call.steps or (len(stamps.times) if stamps is not None and stamps.times else max(map(len, tokens)))
        length = sum(map(len, tokens)) / steps if workload.rows == 1 and steps else 1.0
        entry.checks[workload.name] = Check(tokens, steps, length, drafted[0] or None)
    return call, tokens


def _sample(
    entry: Competitor,
    workload: Workload,
    repeat: int,
    position: int,
    new_tokens: int,
    decode: Decode,
    first_tokens: bool,
) -> None:
    method = entry.method.in_round(repeat)
    call, tokens = _call(method, entry, workload, new_tokens, decode)
    count = sum(map(len, tokens))
    first = first_token(method, workload, new_tokens, decode) if first_tokens else None
    parts: dict[str, Any] = {"prompt_tokens": workload.input_ids.shape[1]}
    if (report := call.report) is not None:
        t = report.timings
        parts |= dict(
            steps=report.steps, prefill_steps=report.prefill_steps, prefill=t.prefill, propose=t.propose, mask=t.mask,
            core=t.core, observe=t.observe, host=t.host, overhead=report.overhead,
            accepted_lengths=report.accepted_lengths, compiled_share=compiled_share(report), waiting=report.waiting,
        )  # fmt: skip
    sample = Measurement(
        workload.name, repeat, position, call.decoding, call.compile_seconds, call.compilations, count, first, **parts
    )
    entry.samples.append(sample)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
