"""``decoders doctor``: finds what slows down or breaks decoding in this installation."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .catalogue import taken
from .console import plain_console
from .models import Device, Dtype, Json, Threads

if TYPE_CHECKING:
    from rich.table import Table

    from ..engine.model.facts import Invariance

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Finding:
    """A line of the result.

    Attributes:
        status: "ok"; "note" for information; "warning" if something is slow or set wrongly; "problem" if something does not work.
    """

    name: str
    status: Literal["ok", "note", "warning", "problem"]
    detail: str


def doctor(
    model: Annotated[
        str | None, typer.Argument(help='Model to check as well: folder, Hub name, GGUF file or "demo".')
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Check the installation, and a model if one is named; exit with 1 if something is broken."""
    findings: list[Finding] = []
    checks = {check.__name__: check for check in CHECKS}
    if model is not None:
        checks["model"] = partial(same_tokens, model, dtype, device)
    for name, check in checks.items():
        try:
            findings += check()
        except Exception as error:  # any error is reported, because this command is for broken installations
            findings.append(Finding(name, "problem", f"{type(error).__name__}: {error}"))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        plain_console().print(as_table(findings))
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(1)


def as_table(findings: Iterable[Finding]) -> Table:
    """A table with a line for each finding. Long texts are wrapped in their column."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        table.add_row(Text(finding.status, STYLES[finding.status]), Text(finding.name, "bold"), Text(finding.detail))
    return table


def versions() -> Iterator[Finding]:
    """The versions of Python and of the distributions that decoding needs."""
    yield Finding("python", "ok", platform.python_version())
    for name in ("hf-decoders", "torch", "transformers", "outlines", "llguidance"):
        try:
            yield Finding(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, "problem", f"not installed: pip install {name}")


def clash() -> Iterator[Finding]:
    """A problem if the PyPI project ``decoders`` is installed. It installs a package of the same name in place of this package."""
    try:
        other = metadata.distribution("decoders")
    except metadata.PackageNotFoundError:
        return
    yield Finding(
        "decoders",
        "problem",
        f"the distribution 'decoders' {other.version} is another project that installs the same import package: "
        "pip uninstall decoders, then pip install --force-reinstall --no-deps hf-decoders (in a clone: -e .)",
    )


def device() -> Iterator[Finding]:
    """The device on which models would run, other devices, and whether other processes use the CPU's cores."""
    import torch

    from ..common.devices import TRIED, present
    from ..report import BUSY
    from ..report.surroundings import busy_share

    there = present()
    used = "cuda" if "cuda" in there else "cpu"
    yield Finding("device", "ok", f"{used}: {there[used]}")
    for kind in there.keys() - TRIED:
        yield Finding(
            "device", "note", f"{kind}: {there[kind]}. No such device is tested: --device {kind} tries it, uncompiled"
        )
    number, waits = torch.get_num_threads(), busy_share(0.1)
    threads = f"{number} (torch.set_num_threads, OMP_NUM_THREADS)"
    if waits:
        busy = f"other processes take the cores: code waits {waits:.0%} of its time"
        busy += ". Steps take fewer threads meanwhile" if number > 1 else ""
        if waits > BUSY:
            busy += ", and speeds that are compared now say nothing"
        yield Finding("threads", "warning", f"{threads}; {busy}")
    else:
        yield Finding("threads", "ok", threads)


def cpu_kernels() -> Iterator[Finding]:
    """Whether this package has kernels for this processor. The first call on a machine compiles the kernels."""
    from ..engine.model.kernels import cpu

    choice = cpu.chosen()
    yield Finding("cpu kernels", "warning" if choice.refused or choice.kernels is None else "ok", str(choice))


def compiler() -> Iterator[Finding]:
    """Whether there is a compiler for torch.compile, and the folder in which torch.compile stores kernels."""
    from ..engine.model.torch_compat import cpp_compiler, kernel_folder

    if (program := cpp_compiler()) is not None:
        yield Finding("compiler", "ok", program)
    else:
        yield Finding(
            "compiler",
            "warning",
            "no C++ compiler found, so torch.compile cannot work on the CPU: install g++ or clang, set CXX, or run "
            "uncompiled with DECODERS_COMPILE=0 (slower)",
        )
    yield Finding("cache", "ok", f"{kernel_folder()} (TORCHINDUCTOR_CACHE_DIR)")


def plugins() -> Iterator[Finding]:
    """The plugins that are loaded, and the reason for each plugin that cannot be used."""
    from ..registry import registry

    infos = taken("plugins")
    for info in infos:
        if info["status"] in ("failed", "conflict"):
            yield Finding(
                "plugin", "problem", f"{info['name']} ({info['provider']} {info['version']}): {info['error']}"
            )
    for problem in registry().unmatched():
        yield Finding("plugins", "warning", problem)
    loaded = ", ".join(info["name"] for info in infos if info["status"] == "loaded")
    yield Finding("plugins", "ok", f"{loaded or 'none'} loaded")


def settings() -> Iterator[Finding]:
    """Whether the settings in the environment and the configuration file are valid, for the loop and every strategy."""
    from ..errors import SettingsError
    from ..registry import registry
    from ..registry.builtin import MERGED
    from ..settings import RuntimeSettings, Settings, load_settings, settings_file, unknown_variables

    classes = {name: entry.cls for name, entry in registry().strategies().items()} | {MERGED.name: MERGED}
    sections: list[tuple[type[Settings], str | None]] = [(RuntimeSettings, None)]
    sections += [(cls.settings_class, name) for name, cls in classes.items()]
    problems = []
    for cls, section in sections:
        try:
            load_settings(cls, section, {}, {}, sections=classes)
        except SettingsError as error:
            problems.append(str(error))
    for problem in dict.fromkeys(problems):  # an unreadable file gives the same error for every section
        yield Finding("settings", "problem", problem)
    for name in unknown_variables(classes):
        yield Finding("settings", "warning", f"{name} is set but nothing reads it")
    if not problems:
        path, _ = settings_file()
        yield Finding("settings", "ok", f"valid: environment, {path or 'no file'} (`decoders config` shows them)")


def same_tokens(name: str, dtype: str, device: str | None = None) -> Iterator[Finding]:
    """Whether all strategies write the same tokens with the model `name` in this dtype on this device, and whether the kernels work."""
    from ..engine.model.invariance import check
    from ..engine.model.self_check import target_of
    from ..engine.model.weights.quantization import Precision
    from ..errors import amount
    from .models import load

    target = target_of(load(name, dtype, device)[0], "auto", Precision())
    dtype_name = str(target.dtype).removeprefix("torch.")
    yield Finding(
        "model",
        "ok",
        f"{name}: {amount(len(target.layout), 'layer')}, {dtype_name} on {target.device}, checked on {target.checks.day}",
    )
    if target.checks.rejected is None:
        yield Finding("attention", "ok", target.attends)
    else:
        yield Finding(
            "attention",
            "problem",
            f"one of our kernels does not work here, so PyTorch's is used: {target.checks.rejected}",
        )
    yield promise(check(target), dtype_name, low_precision=target.dtype.itemsize <= 2)


def promise(invariance: Invariance, dtype: str, low_precision: bool) -> Finding:
    """Whether all strategies write the tokens of plain decoding (docs/explanation/exactness.md). low_precision: at most 16 bits."""
    if not invariance.differs or not low_precision:
        rounding = f" (of two tokens that are equal to the last bits, {', '.join(invariance.differs)} decides)"
        said = f"yes, in {dtype}: every strategy writes the tokens of plain decoding"
        return Finding("same tokens", "ok", said + (rounding if invariance.differs else ""))
    where = f"{dtype} trees" if invariance.holds else dtype
    advice = (
        "strategies that draft one chain write the tokens of plain decoding"
        if invariance.holds
        else "in float32 that is rare"
    )
    return Finding("same tokens", "warning", f"near-ties may differ ({where}): {invariance}; {advice}")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    versions, clash, device, cpu_kernels, compiler, plugins, settings,
)  # fmt: skip
