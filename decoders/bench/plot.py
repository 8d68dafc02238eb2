"""Draws speed as horizontal bars, one panel per model, dtype, batch size and kind of prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from ..errors import UnknownNameError, UnsupportedError, amount, installing
from .methods import BASELINE
from .records import Record
from .tables import subject


def check_format(path: Path) -> None:
    """Raises an error before minutes of measuring: UnsupportedError without matplotlib, UnknownNameError for an unknown format."""
    try:
        from matplotlib.figure import Figure  # without pyplot, which would open a display
    except ImportError as error:
        raise UnsupportedError(f"--plot needs matplotlib: {installing('bench')}") from error
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise UnknownNameError("format of a plot", path.suffix[1:], formats)


def plot(records: Sequence[Record], path: Path) -> None:
    """Writes the picture; bars are medians, whiskers the smallest and largest repeat, the dashed line is transformers.

    Raises:
        UnsupportedError: no method finished.
    """
    from matplotlib.figure import Figure

    usable = [r for r in records if r.tokens_per_second is not None]
    panels = [
        (f"{name + ', ' if name else ''}{kind}, {amount(batch, 'row')}, {dtype}", list(group))
        for (name, dtype, batch, kind), group in groupby(usable, key=lambda r: (subject(r), r.dtype, r.batch, r.kind))
    ]
    if not panels:
        raise UnsupportedError("nothing to plot: no method finished")
    heights = [len(members) for _, members in panels]
    figure = Figure(figsize=(8, sum(0.32 * n + 0.9 for n in heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (title, members) in zip(axes, panels, strict=True):
        speeds = [r.tokens_per_second for r in members if r.tokens_per_second is not None]  # for the type checker
        medians = [s.median for s in speeds]
        whiskers = [[s.median - s.low for s in speeds], [s.high - s.median for s in speeds]]
        colours = ["#2a6fbb" if r.ours else "#9a9a9a" for r in members]
        bars = axis.barh([r.method for r in members], medians, color=colours, height=0.7)
        axis.errorbar(
            medians, range(len(members)), xerr=whiskers, fmt="none", ecolor="#333333", elinewidth=1, capsize=2
        )
        labels = [f"{r.ratio.median:.2f}×" if r.ratio and r.method != BASELINE else "" for r in members]
        axis.bar_label(bars, labels=labels, label_type="center", color="white", fontsize=8)
        base = next((s.median for r, s in zip(members, speeds, strict=True) if r.method == BASELINE), None)
        if base is not None:
            axis.axvline(base, color="#333333", linestyle="--", linewidth=0.8)
        axis.invert_yaxis()
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("new tokens per second")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
