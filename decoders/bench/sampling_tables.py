"""What choosing a token costs as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from .sampling import SamplingTime
from .tables import _table, shown


def sampling_table(times: Sequence[SamplingTime], title: str = "") -> Table:
    """A row for each plan and number of nodes, of one vocabulary."""
    table = _table(title, "nodes", "median", "least", "by definition")
    previous = None
    for time in sorted(times, key=lambda time: list(dict.fromkeys(t.plan for t in times)).index(time.plan)):
        table.add_row(
            Text(time.plan if time.plan != previous else "", style="bold"), str(time.nodes), shown(time.median, ".2f"),
            shown(time.least, ".2f"), shown(time.definition, ".1f"),
        )  # fmt: skip
        previous = time.plan
    return table
