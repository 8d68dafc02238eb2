"""Tables of the results for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Column, Table
from rich.text import Text

from ..errors import amount
from .figures import PARTS, Spread
from .load import LoadResult
from .records import Record
from .shapes import RANDOM_WEIGHTS

#: If the fastest repeat is this many times as fast as the slowest, a warning says that repeats lie far apart.
WIDE = 1.5
#: Names of strategies with many settings are wrapped at this width, to leave room for the figures.
NAME_WIDTH = 48
#: Least width of names, and the space between two cells.
SHORT_NAME, GAP = 26, 2


def speed_table(sections: Mapping[str, Sequence[Record]], title: str = "", details: bool = False) -> Table:
    """A table with a line for each method, in sections by heading: medians, and the range of the ratio over the repeats. Notes say
    why figures are missing or where outputs differ.

    Args:
        details: whether to add the range of tokens/s, times to the first token, and passes of draft models. Without them the table
            has 80 columns.
    """
    every = [r for records in sections.values() for r in records]
    drafted = details and any(r.draft_passes is not None for r in every)
    first, drafts = ["first token"] if details else [], ["draft/step"] if drafted else []
    table = plain_table(title, "tokens/s", "ratio", *first, "tok/step", *drafts, "identical")
    for heading, records in sections.items():
        if heading:
            table.add_section()
            table.add_row(Text(heading, style="italic"))
        for r in [r for r in records if r.status == "ok"]:
            speed = r.tokens_per_second
            table.add_row(
                _name(r), ranged(speed, ".0f") if details or speed is None else f"{speed.median:.0f}",
                ranged(r.ratio, ".2f", ratio_style(r.ratio)), *([milliseconds(r.first_token)] if details else []),
                shown(r.accepted_length, ".2f"), *([shown(r.draft_passes, ".2f")] if drafted else []), identical(r),
            )  # fmt: skip
    lines: dict[str, list[str]] = {}
    for r in [r for r in every if r.status != "ok" or r.difference]:
        names = lines.setdefault(reason(r).markup, [])
        names += [r.method] if r.method not in names else []
    captions = [Text.assemble(", ".join(names), ": ", Text.from_markup(why)) for why, names in lines.items()]
    if any(r.random_weights for r in every):
        captions.append(Text(RANDOM_WEIGHTS))
    if captions:
        table.caption, table.caption_justify = Text("\n").join(captions), "left"
    return table


def headings(groups: Mapping[Any, Sequence[Record]]) -> dict[str, Sequence[Record]]:
    """Maps the heading of each group to its records. A single group has the heading "", unless its model is cost-scaled."""
    (first, *others) = groups.values()
    if not others and not first[0].scaled:
        return {"": first}
    return {group_name(records[0]): records for records in groups.values()}


def group_name(record: Record) -> str:
    """A heading: model, dtype, number of rows, and the temperature of a sampled run."""
    named = [subject(record), record.dtype, amount(record.batch, "row")]
    return ", ".join(filter(None, [*named, f"T = {record.temperature:g}" if record.temperature else ""]))


def fitting(table: Table, width: int) -> list[Table]:
    """`table` for a terminal of `width` columns: a wider table is split into several, one below the other, so that no cell is cut."""
    names, *columns = table.columns
    parts: list[list[tuple[str, Column]]] = []
    room = 0
    for column in columns:
        header = str(column.header)
        cells = max((cell_len(line) for cell in column.cells for line in str(cell).splitlines()), default=0)
        needed = max(cells, min(len(header), 8), *map(len, header.split()))
        room -= needed + GAP
        if room < 0:
            parts.append([])
            room = width - SHORT_NAME - GAP - needed - GAP
        parts[-1].append((textwrap.fill(header, needed), column))
    narrower = []
    for part in parts:
        narrow = plain_table(str(table.title or "") if part is parts[0] else "")
        for header, _ in part:
            narrow.add_column(header, justify="right", no_wrap=True)
        for row in zip(names.cells, *(column.cells for _, column in part), strict=True):
            narrow.add_row(*row, end_section=table.rows[len(narrow.rows)].end_section)
        narrower.append(narrow)
    narrower[-1].caption, narrower[-1].caption_justify = table.caption, table.caption_justify
    return narrower


def suite_table(together: Sequence[Record], records: Sequence[Record]) -> Table:
    """Results of a published benchmark: a line for each method, a column for each category, medians of speed-up and tokens per step.

    Args:
        together: one group's records over all kinds of prompt.
        records: the same group's records by kind.
    """
    kinds = ("all", *dict.fromkeys(r.kind for r in records))
    of = {(r.method, r.kind): r for r in records} | {(r.method, "all"): r for r in together}
    title = f"{group_name(together[0])}: speed-up over plain decoding / tokens per step"
    table, counts = plain_table(title, *(kind.replace("_", " ") for kind in kinds)), ["" for _ in kinds]
    for method in [r.method for r in together if r.status == "ok"]:
        own = [of[method, kind] for kind in kinds]
        ratios = ["" if r.plain_ratio is None else f"{r.plain_ratio.median:.2f}" for r in own]
        cells = [
            Text.assemble((ratio, ratio_style(r.plain_ratio)), "/", (shown(r.accepted_length, ".2f"), "dim"))
            for ratio, r in zip(ratios, own, strict=True)
        ]
        table.add_row(_name(own[0]), *cells)
        counts = [str(len({sample.workload for sample in r.samples})) for r in own]
    table.add_row("prompts", *counts)
    return table


def tables(records: Sequence[Record]) -> list[Table]:
    """Tables per model, dtype, batch size and kind of prompt: speed, parts of a step, start-up and memory."""
    result = []
    for group, kind in dict.fromkeys((r.group, r.kind) for r in records):
        members = [r for r in records if (r.group, r.kind) == (group, kind)]
        _, dtype, batch, temperature = group
        drawn = f" · T = {temperature:g}" if temperature else ""
        tokens = next(
            (f" · {amount(round(r.prompt_tokens), 'token')} of prompt" for r in members if r.prompt_tokens), ""
        )
        name = subject(members[0])
        title = f"{name + ' · ' if name else ''}{kind} · {amount(batch, 'row')} · {dtype}{drawn}{tokens}"
        result.append(speed_table({"": members}, title + loops(members), details=True))
        if any(r.status == "ok" for r in members):
            result.append(step_table(members, f"{title} · ms per step"))
            result.append(start_table(members, f"{title} · start and memory"))
    return result


def subject(record: Record) -> str:
    """The model's name and, if a small model is padded to the costs of a larger model, :attr:`Record.scaled`."""
    if not record.scaled:
        return record.model
    return f"{record.model or 'demo target'}, {record.scaled}"


def loops(records: Sequence[Record]) -> str:
    """The share of the first method's tokens in repetition loops, as text; "" if it is under 0.5 % or the weights are random."""
    share = next((r.looping for r in records if r.looping is not None and not r.random_weights), 0.0)
    return f" · {share:.0%} of the text loops" if share >= 0.005 else ""


def step_table(records: Sequence[Record], title: str = "") -> Table:
    """A table of a step's milliseconds by part, and of the speed of reading the weights, as a share of the copy bandwidth."""
    parts = ("total", *PARTS)
    table = plain_table(title, *parts, "overhead", "bandwidth")
    for r in records:
        if r.step_ms is not None:
            times = (shown(getattr(r.step_ms, part), ".2f") for part in parts)
            table.add_row(_name(r), *times, shown(r.overhead, ".1%"), shown(r.bandwidth_fraction, ".0%"))
    return table


def start_table(records: Sequence[Record], title: str = "") -> Table:
    """A table of start-up times, compiling and memory. Memory that all methods share is counted for the first method."""
    columns = ("cold first token", "prefill", "first call", "compile", "graphs", "later", "compiled",
               "memory", "added", "cache")  # fmt: skip
    table = plain_table(title, *columns)
    for r in records:
        if r.status == "ok":
            table.add_row(
                _name(r), shown(r.cold_first_token, ".2f", " s"), milliseconds(r.prefill),
                shown(r.first_call, ".2f", " s"), shown(r.compile_seconds, ".1f", " s"),
                shown(r.compilations, "d"), shown(r.recompilations, "d"), shown(r.compiled_share, ".0%"),
                size(r.peak_memory), size(r.memory_added), size(r.cache_bytes),
            )  # fmt: skip
    return table


def plain_table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", overflow="fold", min_width=SHORT_NAME, max_width=NAME_WIDTH)
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")  # a truncated figure would be wrong
    return table


def _name(record: Record) -> Text:
    return Text(record.method, style="bold" if record.ours else "")


def noise(records: Sequence[Record]) -> str:
    """A warning if the repeats of a method lie far apart, else ""."""
    wide = [r for r in records if (s := r.tokens_per_second) and s.high > WIDE * s.low]
    if not wide:
        return ""
    names = ", ".join(dict.fromkeys(r.method for r in wide))
    return f"Noisy: the repeats of {names} lie more than {WIDE}× apart. Leave the machine alone, or raise --repeats."


def reason(record: Record) -> Text:
    """Why a method has no figures (red if it failed), or where its output differs from the baseline's."""
    if record.status == "ok":
        return Text(f"differs from {record.baseline} in {record.difference}", style="red" if record.exact else "yellow")
    return Text(f"{record.status}: {record.reason}", style="red" if record.status == "failed" else "yellow")


def identical(record: Record) -> Text:
    """Whether the output equals the baseline's; "no" is red only if it had to be equal."""
    if record.identical is None:
        return Text(record.incomparable or "?", style="dim")
    if record.identical:
        return Text("yes", style="green")
    return Text("no", style="red" if record.exact else "yellow")


def ratio_style(ratio: Spread | None) -> str:
    """The style of a ratio: green if every repeat was faster than the baseline, red if every repeat was slower, else ""."""
    return "" if ratio is None else "green" if ratio.low > 1 else "red" if ratio.high < 1 else ""


def ranged(spread: Spread | None, form: str, style: str = "") -> Text:
    """A text with the median and, dimmed, the smallest and largest value of the repeats; empty for None."""
    if spread is None:
        return Text("")
    if spread.low == spread.high:
        return Text(f"{spread.median:{form}}", style)
    return Text.assemble((f"{spread.median:{form}}", style), (f" ({spread.low:{form}}–{spread.high:{form}})", "dim"))


def shown(value: float | None, form: str, unit: str = "") -> str:
    """`value` with its unit; "" for None."""
    return "" if value is None else format(value, form) + unit


def milliseconds(spread: Spread | None) -> str:
    """The median of `spread`, given in seconds, as a text in milliseconds."""
    return shown(None if spread is None else spread.median * 1e3, ".1f", " ms")


def size(count: int | None) -> str:
    """A number of bytes as a text in MiB; "" for None."""
    return "" if count is None else f"{count / 2**20:.0f} MiB" if count >= 10 << 20 else f"{count / 2**20:.1f} MiB"


def load_table(results: Sequence[LoadResult], within: float, title: str = "") -> Table:
    """A table with a row for each method. within: seconds within which a request must end to count for goodput."""
    table = plain_table(
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
