"""Draws the pictures of docs/explanation/architecture.md from the code, and quotes it: ``python docs/draw_architecture.py``.

The floors are those of the import contracts in pyproject.toml, which CI checks. For the way of a call one is made, and what it
enters is written down in that order.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
PACKAGE = ROOT / "decoders"

#: What the picture of a call shows: room, module, function.
STATIONS = (
    ("hf.wrapper", "Generate.__call__"),
    ("hf.options", "Options.read"),
    ("hf.arguments", "refuse_arguments"),
    ("hf.arguments", "check_inputs"),
    ("hf.prepared_call", "prepare"),
    ("hf.preparation", "Preparation.of_length"),
    ("hf.wrapper", "Generate.ready_engine"),
    ("engine.decode.engine", "Engine.serves"),
    ("hf.grammars", "Grammars.of"),
    ("engine.decode.call", "decode"),
    ("engine.decode.sessions", "Sessions.open"),
    ("engine.decode.session", "Session.prefill"),
    ("strategies.lookahead", "Lookahead.start"),
    ("engine.decode.step", "step"),
    ("engine.decode.proposer", "Proposer.propose"),
    ("strategies.lookahead", "Lookahead.propose"),
    ("engine.decode.batch", "Batch.block_of"),
    ("engine.model.blocks", "Blocks.of"),
    ("engine.decode.batch", "Batch.mask"),
    ("engine.decode.grammar.host_guide", "HostGuide.block"),
    ("engine.decode.core", "Core.forward_verify_commit"),
    ("engine.model.compiled.forward_pass", "ForwardPass.__call__"),
    ("engine.model.target", "Target.forward"),
    ("engine.model.kernels.products", "decoder_layers"),
    ("engine.decode.core", "CoupledRule.verify"),
    ("sampling.choice", "candidates"),
    ("sampling.choice", "Candidates.choose"),
    ("engine.decode.verify", "follow_matches"),
    ("engine.decode.core", "Core.commit"),
    ("engine.model.cache", "move_slots"),
    ("engine.decode.grammar.host_guide", "HostGuide.commit"),
    ("engine.decode.proposer", "Proposer.observe"),
    ("strategies.lookahead", "Lookahead.observe"),
    ("engine.decode.batch", "Batch.deliver"),
    ("hf.grammars", "Grammars.judge"),
    ("hf.prepared_call", "PreparedCall.partial"),
)


def floors() -> Iterator[str]:
    """The rooms, the highest floor first, each with the rooms within it: what a floor imports lies below it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract for contract in contracts if contract["id"] == "layers")["layers"]
    yield "| floor | what is in it | files |"
    yield "| --- | --- | --- |"
    for layer in layers:
        for name in (part.strip(" ()") for part in layer.split("|")):
            room = PACKAGE / name
            yield _row(room if room.is_dir() else room.with_suffix(".py"))
            yield from (_row(path.parent) for path in sorted(room.glob("*/__init__.py")))


def _row(room: Path) -> str:
    """What is in a room, and how many files that are."""
    name = room.relative_to(PACKAGE).as_posix()
    path = room / "__init__.py" if room.is_dir() else room
    files = len(list(room.rglob("*.py"))) if room.is_dir() else 1
    shown = f"`{name}/`" if room.is_dir() else f"`{name}`"
    return f"| {shown} | {first_sentence(ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))))} | {files} |"


def way() -> Iterator[str]:
    """A call's way through :data:`STATIONS`, as a call takes it: deeper is within."""
    stations = dict(map(_code_of, STATIONS))
    entered: dict[CodeType, int] = {}
    open_: list[CodeType] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code not in stations:
            return
        if event == "call":
            entered.setdefault(code, len(open_))
            open_.append(code)
        elif event == "return" and open_:
            open_.pop()

    call = _ready()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    if missing := [name for code, (name, _) in stations.items() if code not in entered]:
        raise SystemExit(f"a call does not come past {', '.join(missing)}")
    width = max(2 * depth + len(stations[code][0]) for code, depth in entered.items()) + 2
    yield "```text"
    for code, depth in entered.items():
        name, sentence = stations[code]
        yield f"{'  ' * depth + name:{width}}{sentence}"
    yield "```"


def _code_of(station: tuple[str, str]) -> tuple[CodeType, tuple[str, str]]:
    module, qualified = station
    value: Any = importlib.import_module(f"decoders.{module}")
    for part in qualified.split("."):
        value = getattr(value, part)
    code = getattr(value, "__wrapped__", value).__code__
    return code, (f"{module.replace('.', '/')}.py  {qualified}", first_sentence(inspect.getdoc(value)).split(": ")[0])


def _ready() -> Any:
    """A call whose model has been used before: the demo's draft model under lookahead, with a grammar."""
    import decoders

    model, tokenizer = decoders.demo.load("draft")
    decoders.enable(model, tokenizer)
    inputs = tokenizer("def total(values):", return_tensors="pt")
    grammar = decoders.regex(r"[a-z ]{4,40}\.", backend="llguidance")

    def call() -> Any:
        return model.generate(
            **inputs,
            strategy="lookahead",
            grammar=grammar,
            max_new_tokens=6,
            decoders_config={"compile": False, "reuse": False},
        )

    call()
    return call


def first_sentence(docstring: str | None) -> str:
    """The beginning of a docstring, for one line."""
    text = " ".join((docstring or "").split("\n\n")[0].split())
    for mark in (":meth:", ":class:", ":func:", ":data:"):
        text = text.replace(mark, "")
    return text.split(". ")[0].rstrip(".:").replace("``", "`").replace("`~", "`")


def step_code() -> Iterator[str]:
    """The functions that are one step, as they stand in their file."""
    from decoders.engine.decode.core import Core
    from decoders.engine.decode.step import step

    yield "<!-- no-test: quoted from the package -->"
    yield "```python"
    method = textwrap.dedent(inspect.getsource(Core.forward_verify_commit))
    yield f"{inspect.getsource(step)}\n\n{method}".rstrip()
    yield "```"


def page(text: str) -> str:
    """`text` with pictures and quotations as the code has them now."""
    for name, draw in (("floors", floors), ("way", way), ("step", step_code)):
        begin, end = f"<!-- {name}: drawn by docs/draw_architecture.py -->\n", f"<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = head + begin + "\n".join(draw()) + "\n" + end + tail
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
