"""What became of a load, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from rich.table import Table
from rich.text import Text

from .load import LoadResult
from .tables import _table


def load_table(results: Sequence[LoadResult], within: float, title: str = "") -> Table:
    """A row for each method. within: seconds of a request that count for goodput."""
    table = _table(
        title, "tokens/s", "first token s, 50/90/99 %", "ms per token, 50/90 %", "latency s, 50/90/99 %",
        f"done in {within:g} s, per s",
    )  # fmt: skip
    for result in results:
        table.add_row(
            Text(result.method, style="bold"), f"{result.tokens_per_second:.1f}",
            _percentiles(result.first_token, 50, 90, 99), _percentiles([1e3 * x for x in result.per_token], 50, 90),
            _percentiles(result.latency, 50, 90, 99), f"{result.goodput(within):.2f}",
        )  # fmt: skip
    return table


def _percentiles(values: Sequence[float], *shares: int) -> str:
    return " / ".join(f"{numpy.percentile(values, share):.2f}" for share in shares) if values else ""
