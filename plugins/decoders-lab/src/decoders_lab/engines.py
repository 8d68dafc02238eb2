"""Other engines, measured in turns with our methods, with the same weights and prompts on the same machine.

Their names on the command line: ``llama.cpp`` stands for everything that the engine can do, ``llama.cpp[q8_0]`` for plain decoding
with matrices in this number format, ``llama.cpp[q8_0,lookup]`` for the engine's prompt lookup, and ``llama.cpp[q8_0,draft]`` for
its speculative decoding with the draft model.
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

#: The modes in which an engine can decode, as written in the brackets.
PLAIN, LOOKUP, DRAFT = "", "lookup", "draft"
MODES = (PLAIN, LOOKUP, DRAFT)
#: By number format, the dtype of the table that lists an engine with this format, if that is measured. Other formats: bfloat16.
_NEAREST = {"f32": "float32", "f16": "float16"}


class EngineMissingError(DecodersError, ImportError):
    """The library of an engine is not installed."""


@dataclass(frozen=True)
class Request:
    """A requested engine.

    Attributes:
        engine: a name of :data:`ENGINES`.
        number_format: number format of the matrices; "" if a file determines it.
        mode: one of :data:`MODES`.
        file: a model file to use; None: a file is written.
    """

    engine: str
    number_format: str
    mode: str = PLAIN
    file: Path | None = None

    @property
    def name(self) -> str:
        """The name in tables and records."""
        kind = self.file.name if self.file is not None else self.number_format
        return f"{self.engine}[{kind}{',' + self.mode if self.mode else ''}]"


def requests(text: str, draft: bool) -> list[Request]:
    """The requests for a text such as ``llama.cpp``, ``llama.cpp[q8_0,lookup]`` or ``llama.cpp[file=model.gguf]``. draft: whether
    there is a draft model.

    Raises:
        UnknownNameError: no such engine, number format or mode.
        SettingsError: the brackets do not hold exactly one number format or file, or hold several modes.
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
    """Facts about an engine, known before it is loaded.

    Attributes:
        library: module that must be importable.
        extra: this distribution's extra that installs the library.
        formats: number formats, widest first.
        one_row_modes: modes that support a single row only.
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
    """Checks that the library of `engine` is installed.

    Raises:
        EngineMissingError: the library is missing; the error says what to install.
    """
    from importlib.util import find_spec

    kind = ENGINES[engine]
    missing = [name for name in (kind.library, *(["gguf"] if engine == "llama.cpp" else [])) if find_spec(name) is None]
    if missing:
        raise EngineMissingError(
            f"{engine} needs {' and '.join(missing)}: pip install './plugins/decoders-lab[{kind.extra}]' in a clone of hf-decoders"
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
    """Methods of other engines with the weights of `model`, written to `folder` in each requested number format.

    Args:
        model: a model in float32, so that every engine rounds the same weights.
        tokenizer: written for OpenVINO, whose speculative decoding compares the tokenizers of target and draft.
        dtypes: dtypes of the tables; an engine is listed in the table nearest to its number format.

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
            settings={
                "engine": request.engine, "mode": request.mode or "plain", "weights": request.number_format or "file",
            },
            one_row_only=f"{request.engine} does {request.mode or 'this'} for one row" if request.mode in kind.one_row_modes else "",
            impossible="needs a draft model: --draft" if request.mode == DRAFT and draft is None else "",
        )  # fmt: skip
        if not method.impossible:
            progress(f"writing {request.name}")
            engine, bits = _opened(request, model, draft, tokenizer, folder)
            method = replace(method, engine=engine, bits=bits)
        methods.append(method)
    return methods


def table_dtype(number_format: str, dtypes: Sequence[str]) -> str:
    """The dtype of the table that lists a number format: the nearest dtype if it is measured, else the last of `dtypes`."""
    nearest = _NEAREST.get(number_format, "bfloat16")
    return nearest if nearest in dtypes or not dtypes else dtypes[-1]


def _opened(
    request: Request,
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
) -> tuple[Engine, float]:
    """The engine, and its bits per weight. Writes the files that the engine needs to `folder`."""
    models = {"target": model} | ({"draft": draft} if request.mode == DRAFT and draft is not None else {})
    paths: dict[str, Path] = {}
    if request.engine == "llama.cpp":
        from . import gguf_files
        from . import llama_cpp_engine as llama

        for role, each in models.items():
            # If a model file is given, it holds only the target, and the draft model is written with eight bits.
            number_format = request.number_format or "q8_0"
            paths[role] = folder / f"{role}-{number_format}.gguf"
            if role == "target" and request.file is not None:
                paths[role] = request.file
            elif not paths[role].exists():
                gguf_files.write(each, paths[role], number_format)
        engine: Engine = llama.LlamaCpp(paths["target"], request.mode, paths.get("draft"))
        bits = gguf_files.bits_per_weight(paths["target"])
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
