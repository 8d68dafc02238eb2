"""What quantization costs and saves as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from .precision import PrecisionCost
from .tables import _table, shown


def precision_table(costs: Sequence[PrecisionCost], title: str = "") -> Table:
    """A row for each precision."""
    nodes = list(costs[0].step_seconds) if costs else []
    table = _table(
        title, "perplexity", "KL", "same best", "logit error", "weights MB", "cache B/token", "same bits",
        *(f"{count} nodes ms" for count in nodes),
    )  # fmt: skip
    for cost in costs:
        table.add_row(
            Text(cost.name, style="bold"), shown(cost.perplexity, ".2f"), shown(cost.divergence, ".4f"),
            f"{cost.agreement:.1%}", shown(cost.logit_error, ".3f"), shown(cost.matrix_bytes / 1e6, ".0f"),
            str(cost.slot_bytes), {None: "", True: "yes", False: "no"}[cost.same_bits],
            *(shown(cost.step_seconds[count] * 1e3, ".1f") for count in nodes),
        )  # fmt: skip
    return table
