"""Records as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from .capacity import Capacity
from .records import Record, Spread


def tables(records: Sequence[Record]) -> list[Table]:
    """Two tables per dtype, batch size and kind of prompt: speed, and where the time and memory went."""
    made = []
    for (dtype, batch, kind), group in groupby(records, key=lambda r: (r.dtype, r.batch, r.kind)):
        members = list(group)
        title = f"{kind} · {batch} row{'s' if batch > 1 else ''} · {dtype}"
        made += [speed_table(members, title), step_table(members, title)]
    return made


def speed_table(records: Sequence[Record], title: str = "") -> Table:
    """Speed, with the range over the repeats, and whether the output is transformers' own."""
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("", no_wrap=True)
    for header in ("tokens/s", "range", "ratio", "range", "first token", "tokens/step", "identical"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("")
    for r in records:
        if r.status != "ok":
            table.add_row(r.contestant, *[""] * 7, reason(r))
            continue
        table.add_row(
            Text(r.contestant, style="bold" if r.ours else ""),
            number(r.tokens_per_second, ".1f"), span(r.tokens_per_second, ".1f"),
            Text(number(r.ratio, ".2f") + ("×" if r.ratio else ""), style=ratio_style(r.ratio)), span(r.ratio, ".2f"),
            number(r.first_token, ".1f", 1e3) + (" ms" if r.first_token else ""),
            shown(r.accepted_length, ".2f"), identical(r), Text(r.difference, style="dim"),
        )  # fmt: skip
    return table


def step_table(records: Sequence[Record], title: str = "") -> Table:
    """Milliseconds of a step by part, compilation, memory and bandwidth."""
    table = Table(title=f"{title} · step", title_justify="left", pad_edge=False)
    table.add_column("", no_wrap=True)
    headers = ("ms/step", "propose", "core", "observe", "host", "outside core", "first call", "second", "compile",
               "graphs", "again", "peak memory", "cache", "bandwidth")  # fmt: skip
    for header in headers:
        table.add_column(header, justify="right")
    for r in records:
        if r.status != "ok":
            continue
        s = r.step_ms
        table.add_row(
            r.contestant,
            *(shown(getattr(s, part) if s else None, ".2f") for part in ("total", "propose", "core", "observe", "host")),
            shown(r.outside_core, ".0%"), shown(r.first_call, ".2f", " s"), shown(r.second_call, ".2f", " s"),
            shown(r.compile_seconds, ".1f", " s"), shown(r.compilations, "d"), shown(r.recompilations, "d"),
            size(r.peak_memory), size(r.cache_bytes), shown(r.bandwidth_fraction, ".0%"),
        )  # fmt: skip
    return table


def capacity_table(rows: Sequence[Capacity]) -> Table:
    """Time of the core against the room in the cache."""
    table = Table(title="step time against cache capacity", title_justify="left", pad_edge=False)
    for header in ("dtype", "rows", "length", "slots", "core ms/step", "range", "ratio", ""):
        table.add_column(header, justify="right")
    for c in rows:
        table.add_row(
            c.dtype, str(c.batch), str(c.length), str(c.slots), number(c.core_ms, ".2f"), span(c.core_ms, ".2f"),
            number(c.ratio, ".2f") + ("×" if c.ratio else ""), Text(c.reason, style="yellow"),
        )  # fmt: skip
    return table


def reason(record: Record) -> Text:
    """Why a row has no figures, in the colour of a failure if it is one."""
    return Text(record.reason, style="red" if record.status == "failed" else "yellow", overflow="fold")


def identical(record: Record) -> Text:
    """Whether the output is the yardstick's; red only where it had to be."""
    if record.identical is None:
        return Text("?")
    if record.identical:
        return Text("yes", style="green")
    return Text("no", style="red" if record.exact else "yellow")


def ratio_style(ratio: Spread | None) -> str:
    """Green where every repeat was faster than the yardstick, red where every one was slower."""
    return "" if ratio is None else "green" if ratio.low > 1 else "red" if ratio.high < 1 else ""


def number(spread: Spread | None, form: str, scale: float = 1.0) -> str:
    """The median, or nothing."""
    return "" if spread is None else format(spread.median * scale, form)


def span(spread: Spread | None, form: str) -> Text:
    """Smallest and largest of the repeats."""
    return Text("" if spread is None else f"{spread.low:{form}}–{spread.high:{form}}", style="dim")


def shown(value: float | None, form: str, unit: str = "") -> str:
    """`value` with its unit, or nothing."""
    return "" if value is None else format(value, form) + unit


def size(count: int | None) -> str:
    """Bytes as MiB."""
    return "" if count is None else f"{count / 2**20:.0f} MiB" if count >= 10 << 20 else f"{count / 2**20:.1f} MiB"
