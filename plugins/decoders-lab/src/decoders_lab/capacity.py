"""Measures whether the time of a step depends on the cache's capacity, for texts of equal length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from decoders.bench.figures import Spread
from decoders.bench.measurement import rotation
from decoders.bench.methods import Method
from decoders.bench.tables import plain_table, ranged
from decoders.bench.timed_call import Decode, decode, vocabulary_size
from decoders.bench.workloads import Workload

#: Lengths of the prompts in tokens, and the cache capacities to compare (slots per row).
LENGTH, SLOTS = 128, (256, 8192)


@dataclass(frozen=True)
class CapacityCost:
    """Milliseconds per step of the core (forward pass, verification, commit) with `slots` cache slots per row, and their ratio to the
    milliseconds with the first capacity. reason: why they are missing.
    """

    dtype: str
    batch: int
    length: int
    slots: int
    core_ms: Spread | None
    ratio: Spread | None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The cost as JSON-safe data."""
        return asdict(self)


def check_capacity(
    methods: Sequence[Method],
    rows: int,
    *,
    slots: Sequence[int] = SLOTS,
    length: int = LENGTH,
    new_tokens: int = 16,
    repeats: int = 5,
    progress: Callable[[str], None] = lambda what: None,
    decode: Decode = decode,
) -> list[CapacityCost]:
    """Times the core of each method's steps (one of our methods per dtype) at every capacity, in turns. Returns all costs by method.

    The prompts are random tokens, because plain decoding takes the same time for every text.
    """
    generator = torch.Generator().manual_seed(0)
    costs = []
    for method in methods:
        vocabulary = vocabulary_size(method.model)
        ids = torch.randint(vocabulary, (rows, length), generator=generator)
        workload = Workload("random", "random", ids, torch.ones_like(ids))
        variants = {
            count: replace(
                method,
                arguments={
                    **method.arguments,
                    "decoders_config": {**method.arguments.get("decoders_config", {}), "slots": count},
                    "eos_token_id": vocabulary,  # an id that is never chosen, because random text may stop at once
                },
            )
            for count in slots
        }
        times: dict[int, list[float]] = {count: [] for count in slots}
        failed: dict[int, str] = {}
        for turn in range(repeats + 1):
            for count in rotation(slots, turn):
                if count not in failed:
                    try:
                        report = decode(variants[count], workload, new_tokens).report
                        assert report is not None, "methods of ours report"
                        decode_steps = report.steps - report.prefill_steps
                        if turn and decode_steps:  # the first round warms up
                            times[count].append(report.timings.core / decode_steps * 1e3)
                    except Exception as error:
                        failed[count] = f"{type(error).__name__}: {error}"
                progress(f"{count} slots")
        base = times[slots[0]]
        costs += [
            CapacityCost(
                method.dtype, rows, length, count, Spread.of(times[count]),
                Spread.of([a / b for a, b in zip(times[count], base, strict=False) if b]), failed.get(count, ""),
            )
            for count in slots
        ]  # fmt: skip
    return costs


def capacity_table(rows: Sequence[CapacityCost]) -> Table:
    """A table of the core's time, with a row for each cache capacity."""
    table = plain_table("step time against cache capacity", "rows", "length", "slots", "core ms/step", "ratio")
    for c in rows:
        table.add_row(
            c.dtype, str(c.batch), str(c.length), str(c.slots),
            ranged(c.core_ms, ".2f") if not c.reason else Text(c.reason, style="red"), ranged(c.ratio, ".2f"),
        )  # fmt: skip
    return table
