"""What grammars cost as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from .grammar import NODES, Cost
from .tables import _table, shown


def cost_tables(costs: Sequence[Cost], seconds: Mapping[tuple[str, int], float]) -> list[Table]:
    """One per vocabulary, a row for each grammar and backend; in the caption what could not be compiled and why.

    Args:
        seconds: that each backend took to prepare for each size of vocabulary.
    """
    return [
        cost_table([cost for cost in costs if cost.vocabulary == size], f"{size:,} tokens", seconds)
        for size in dict.fromkeys(cost.vocabulary for cost in costs)
    ]


def cost_table(costs: Sequence[Cost], title: str, seconds: Mapping[tuple[str, int], float]) -> Table:
    """A table of one vocabulary."""
    columns = (
        "backend",
        "compile ms",
        "first mask ms",
        "mask µs",
        "p99 µs",
        f"{NODES}-node tree µs",
        "MB",
        "states",
        "rows",
    )
    table = _table(title, *columns)
    previous = None
    for cost in costs:
        if cost.error is not None:
            continue
        table.add_row(
            Text(cost.subject if cost.subject != previous else "", style="bold"),
            cost.backend if cost.backend == cost.compiled_by else f"{cost.backend}: {cost.compiled_by}",
            shown(cost.compile_ms, ".1f"), shown(cost.first_mask_ms, ".1f"), shown(cost.mask_us, ".1f"),
            shown(cost.slow_mask_us, ".0f"), shown(cost.tree_us, ".0f"),
            shown(None if cost.memory is None else cost.memory / 1e6, ".1f"), shown(cost.states, ",d"), shown(cost.rows, ",d"),
        )  # fmt: skip
        previous = cost.subject
    lines = [
        Text(f"{cost.backend} cannot compile {cost.subject}: {cost.error}") for cost in costs if cost.error is not None
    ]
    lines += [
        Text(f"{backend} prepares once per tokenizer: {prepare_seconds:.2f} s")
        for (backend, size), prepare_seconds in seconds.items()
        if any(cost.vocabulary == size for cost in costs)
    ]
    table.caption, table.caption_justify = Text("\n").join(lines), "left"
    return table
