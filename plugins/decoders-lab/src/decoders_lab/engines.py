"""Other engines beside ours: the same weights, prompts and machine, in turns with the methods that are measured here.

An engine is named as on the command line: ``llama.cpp`` is everything that it can do, ``llama.cpp[q8_0]`` plain decoding with
matrices in that
number format, ``llama.cpp[q8_0,lookup]`` and ``llama.cpp[q8_0,draft]`` its own prompt lookup and its speculation with the draft model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from decoders.bench.methods import Engine, Method
from decoders.bench.variants import bracketed
from decoders.errors import DecodersError, SettingsError, UnknownNameError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: What an engine may do beside decoding plainly, as written in the brackets.
PLAIN, LOOKUP, DRAFT = "", "lookup", "draft"
MODES = (PLAIN, LOOKUP, DRAFT)
#: Number format of an engine to the dtype among ours in whose table it stands, where that is measured.
_NEAREST = {"f32": "float32", "f16": "float16"}


class EngineMissingError(DecodersError, ImportError):
    """The library of an engine is not installed."""


@dataclass(frozen=True)
class Request:
    """One engine as it was asked for.

    Attributes:
        engine: a name of :data:`ENGINES`.
        number_format: of the matrices; "" where a file decides.
        mode: one of :data:`MODES`.
        file: a model file in the place of one that is written; None writes one.
    """

    engine: str
    number_format: str
    mode: str = PLAIN
    file: Path | None = None

    @property
    def name(self) -> str:
        """What stands in tables and records."""
        kind = self.file.name if self.file is not None else self.number_format
        return f"{self.engine}[{kind}{',' + self.mode if self.mode else ''}]"


def requests(text: str, draft: bool) -> list[Request]:
    """What ``llama.cpp``, ``llama.cpp[q8_0,lookup]`` or ``llama.cpp[file=model.gguf]`` asks for; `draft`: whether there is a
    draft model.

    Raises:
        UnknownNameError: no such engine, number format or mode.
        SettingsError: several number formats or modes in one pair of brackets.
    """
    name, inside = bracketed(text)
    if name not in ENGINES:
        raise UnknownNameError("engine", name, ENGINES)
    formats = ENGINES[name].formats
    if inside is None:
        modes = [mode for mode in MODES if draft or mode != DRAFT]
        return [Request(name, number_format, mode) for number_format in formats for mode in modes]
    words = [word.strip() for word in inside.split(",") if word.strip()]
    files = [word.removeprefix("file=") for word in words if word.startswith("file=")]
    modes = [word for word in words if word in (LOOKUP, DRAFT)]
    rest = [word for word in words if word not in modes and not word.startswith("file=")]
    for word in rest:
        if word not in formats:
            raise UnknownNameError("number format or mode", word, (*formats, LOOKUP, DRAFT))
    if len(files) + len(rest) != 1 or len(modes) > 1:
        raise SettingsError(
            f"{text!r}: the brackets hold one number format and at most one mode, as in {name}[bf16,lookup]"
        )
    return [Request(name, rest[0] if rest else "", modes[0] if modes else PLAIN, Path(files[0]) if files else None)]


@dataclass(frozen=True)
class EngineKind:
    """What is known of an engine before it is loaded.

    Attributes:
        library: module that has to be importable.
        extra: of this distribution, which brings it.
        formats: number formats, widest first.
        one_row_modes: what it does for a single row only.
    """

    library: str
    extra: str
    formats: tuple[str, ...]
    one_row_modes: tuple[str, ...] = ()


ENGINES: dict[str, EngineKind] = {
    "llama.cpp": EngineKind("llama_cpp", "llamacpp", ("f32", "bf16", "q8_0", "q4_0", "q4_1"), (LOOKUP, DRAFT)),
    "openvino": EngineKind("openvino_genai", "openvino", ("f32", "bf16", "int8", "int4")),
}


def check_installed(engine: str) -> None:
    """Whether the library of `engine` is there.

    Raises:
        EngineMissingError: it is not; names what to install.
    """
    from importlib.util import find_spec

    kind = ENGINES[engine]
    missing = [name for name in (kind.library, *(["gguf"] if engine == "llama.cpp" else [])) if find_spec(name) is None]
    if missing:
        raise EngineMissingError(
            f"{engine} needs {' and '.join(missing)}: pip install 'decoders-lab[{kind.extra}]'"
        )  # fmt: skip


def beside_methods(
    wanted: Sequence[Request],
    model: PreTrainedModel,
    folder: Path,
    draft: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtypes: Sequence[str] = (),
    progress: Callable[[str], None] = lambda what: None,
) -> list[Method]:
    """Methods of other engines with the weights of `model`, written into `folder` in each number format that is needed.

    Args:
        model: in float32, so that every engine rounds the same numbers.
        tokenizer: OpenVINO's speculation compares those of target and draft.
        dtypes: of the tables; an engine's figures stand in the one nearest to its number format.

    Raises:
        EngineMissingError: a library is not installed.
        ExportError: the model cannot be written.
    """
    methods = []
    for request in wanted:
        check_installed(request.engine)
        kind = ENGINES[request.engine]
        method = Method(
            request.name, table_dtype(request.number_format, dtypes), model, exact=False,
            settings={"engine": request.engine, "mode": request.mode or "plain"},
            one_row_only=f"{request.engine} does {request.mode or 'this'} for one row" if request.mode in kind.one_row_modes else "",
            impossible="needs a draft model: --draft" if request.mode == DRAFT and draft is None else "",
        )  # fmt: skip
        if not method.impossible:
            progress(f"writing {request.name}")
            engine, bits = _opened(request, model, draft, tokenizer, folder)
            method = replace(method, engine=engine, weights=request.number_format or "file", bits=bits)
        methods.append(method)
    return methods


def table_dtype(number_format: str, dtypes: Sequence[str]) -> str:
    """The dtype among ours whose table shows it: the same one, or else the narrowest."""
    nearest = _NEAREST.get(number_format, "bfloat16")
    return nearest if nearest in dtypes or not dtypes else dtypes[-1]


def _opened(
    request: Request,
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
) -> tuple[Engine, float | None]:
    """The engine, and bits of one weight."""
    models = {"target": model} | ({"draft": draft} if request.mode == DRAFT and draft is not None else {})
    paths: dict[str, Path] = {}
    if request.engine == "llama.cpp":
        from . import gguf_files
        from . import llama_cpp_engine as llama

        for role, each in models.items():
            # A file given by hand holds the target; its draft has eight bits.
            number_format = request.number_format or "q8_0"
            paths[role] = folder / f"{role}-{number_format}.gguf"
            if role == "target" and request.file is not None:
                paths[role] = request.file
            elif not paths[role].exists():
                gguf_files.write(each, paths[role], number_format)
        engine: Engine = llama.LlamaCpp(paths["target"], request.mode, paths.get("draft"))
        bits = gguf_files.BITS.get(request.number_format)
    else:
        from . import openvino_engine as openvino
        from . import openvino_files

        if request.file is not None:
            raise SettingsError(f"{request.name}: only llama.cpp takes a file")
        for role, each in models.items():
            paths[role] = folder / f"{role}-{request.number_format}"
            if not paths[role].exists():
                openvino_files.write(each, paths[role], request.number_format)
            if request.mode == DRAFT and tokenizer is not None:
                openvino_files.write_tokenizer(tokenizer, paths[role])
        engine = openvino.OpenVino(paths["target"], request.number_format, request.mode, paths.get("draft"))
        bits = openvino_files.BITS[request.number_format]
    return engine, bits
