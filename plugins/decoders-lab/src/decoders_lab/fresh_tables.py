"""Tables of what :mod:`.fresh` measures in new processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from decoders.bench.shapes import RANDOM_WEIGHTS
from decoders.bench.tables import plain_table, shown, size


def fresh_tables(runs: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The tables of one subject: first calls, memory, decoding and prefill. runs: for each process its method and its figures."""
    title = "{subject} · {dtype}".format(**runs[0])
    complete_runs = [run for run in runs if run.get("decoding")]
    tables = [
        calls_table(runs, f"{title} · calls of a new process"),
        memory_table(runs, f"{title} · process in memory"),
    ]
    for run in complete_runs:
        tables.append(decoding_table(run, f"{title} · {run['method']} · decoding, in turns"))
        tables.append(prefill_table(run, f"{title} · {run['method']} · first token by prompt length, in turns"))
    errors = [Text(f"{run['method']}: {run['error']}", style="red") for run in runs if "error" in run]
    random = [Text(RANDOM_WEIGHTS)] if runs[0]["shape"] else []
    lines = [*errors, *random, *(Text(line) for run in complete_runs for line in notes(run))]
    tables[-1].caption, tables[-1].caption_justify = Text("\n").join(lines), "left"
    return tables


def calls_table(runs: Sequence[Mapping[str, Any]], title: str) -> Table:
    """A table with a row for every call of every process, in order."""
    columns = ("prompt", "first token", "tokens/s after it", "longest pause", "whole call", "making ready", "compiling",
               "in background", "steps compiled")  # fmt: skip
    table = plain_table(title, *columns)
    for run in runs:
        started = f"import {shown(run.get('imported'), '.1f')} s, load {shown(run.get('loaded'), '.1f')} s"
        table.add_row(Text(run["method"], style="bold"), Text(started, style="dim"))
        for call in run.get("calls", ()):
            table.add_row(
                Text("  " + call["call"]), f"{call['prompt_tokens']}" + (f" × {call['rows']}" if call["rows"] > 1 else ""),
                shown(call["first_token"], ".2f", " s"), shown(call["tokens_per_second"], ".1f"),
                shown(call["pause"], ".2f", " s"), shown(call["seconds"], ".2f", " s"),
                shown(call.get("pack_seconds"), ".2f", " s"), shown(call.get("compile_seconds"), ".1f", " s"),
                shown(call.get("background_seconds"), ".1f", " s"), shown(call.get("compiled_share"), ".0%"),
            )  # fmt: skip
    return table


def memory_table(runs: Sequence[Mapping[str, Any]], title: str) -> Table:
    """A table of memory after each call, its growth since loading, and the ratio of this growth (without the cache) to the weights."""
    table = plain_table(title, "in memory", "added", "of the weights", "weights", "cache")
    for run in runs:
        marks = [mark for mark in run.get("memory", ()) if mark["bytes"] is not None]
        for mark in marks:
            added = mark["bytes"] - marks[0]["bytes"]
            first = mark is marks[0]
            cache = 0 if first else run.get("cache_bytes") or 0
            table.add_row(
                Text(f"{run['method']}, after {mark['after']}", style="bold" if first else ""), size(mark["bytes"]),
                "" if first else size(max(added, 0)), "" if first else f"{max(added - cache, 0) / run['weights']:.2f}×",
                size(run["weights"]) if first else "", "" if first else size(cache),
            )  # fmt: skip
    return table


def decoding_table(run: Mapping[str, Any], title: str) -> Table:
    """A table of tokens per second after the first token, beside transformers."""
    table = plain_table(title, "tokens/s", "range", "ratio", "steps compiled")
    for row in run["decoding"]:
        low, high = row["range"]
        table.add_row(
            Text(f"{row['sampling']}: {row['method']}"), shown(row["tokens_per_second"], ".1f"), f"{low:.1f}–{high:.1f}",
            shown(row["ratio"], ".2f"), shown(row["compiled_share"], ".0%"),
        )  # fmt: skip
    return table


def prefill_table(run: Mapping[str, Any], title: str) -> Table:
    """A table of the milliseconds to the first token of a warm call at every prompt length."""
    table = plain_table(title, "transformers", "first token", "ratio")
    for row in run.get("prefill", ()):
        table.add_row(
            f"{row['prompt_tokens']} tokens", shown(row["transformers"] * 1e3, ".0f", " ms"),
            shown(row["first_token"] * 1e3, ".0f", " ms"), shown(row["ratio"], ".2f"),
        )  # fmt: skip
    return table


def notes(run: Mapping[str, Any]) -> list[str]:
    """Lines of text about compiling and about the chat's second turn."""
    lines = []
    for name, end in run.get("settled", {}).items():
        share = "all" if end["compiled_share"] == 1 else f"{shown(end['compiled_share'], '.0%')} of the"
        lines.append(
            f"{run['method']}, {name}: {share} steps compiled {end['seconds']:.0f} s after the first call began"
        )
    if chat := run.get("chat"):
        reused = sum(chat["reused"])
        lines.append(
            f"{run['method']}, second turn of a chat, {chat['question']} new tokens after {chat['history']}: first token after "
            f"{chat['second_first_token'] * 1e3:.0f} ms, in the first turn after {chat['first_token'] * 1e3:.0f} ms, "
            f"ratio {shown(chat['ratio'], '.2f')}, {reused} tokens not read again"
        )
    return lines
