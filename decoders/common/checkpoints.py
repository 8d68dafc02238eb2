"""Loads a checkpoint from disk or hub without progress bars, which would mix with the output of commands and calls.

A checkpoint is a folder, a name on the hub, or a GGUF file: ``folder/model.gguf``, ``owner/name/model.gguf``.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ..errors import DecodersError, installing

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


class GgufError(DecodersError, ImportError):
    """A package that reads GGUF files is missing."""


def load_model(path: str | os.PathLike[str], dtype: torch.dtype | str, **options: Any) -> PreTrainedModel:
    """Loads the causal language model or vision-language model at `path`, in evaluation mode. Dequantizes a GGUF file.
    options: further arguments of ``from_pretrained``.

    Raises:
        OSError, ValueError: transformers found no model at `path`, or the model is neither a causal nor a vision-language model.
        GgufError: a package that reads GGUF files is missing.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from .transformers_compat import without_progress_bars

    folder, arguments = _source(path)
    if arguments:
        _need_gguf(path)
        # transformers may keep GGUF blocks packed; the engine's kernels read dense matrices.
        with contextlib.suppress(ImportError):
            from transformers.utils.quantization_config import GgufConfig

            arguments["quantization_config"] = GgufConfig(dequantize=True)
    with without_progress_bars():
        try:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **arguments, **options).eval()
        except ValueError:  # the checkpoint may be a vision-language model
            with contextlib.suppress(ValueError):
                return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, **arguments, **options).eval()
            raise


def load_tokenizer(path: str | os.PathLike[str], **options: Any) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of the checkpoint at `path`. options: further arguments of ``from_pretrained``.

    Raises:
        OSError, ValueError: transformers found no tokenizer at `path`. GgufError: a package that reads GGUF files is missing.
    """
    from transformers import AutoTokenizer

    from .transformers_compat import without_progress_bars

    folder, arguments = _source(path)
    if arguments:
        _need_gguf(path)
    with without_progress_bars():
        return AutoTokenizer.from_pretrained(folder, **arguments, **options)


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether `path` names a GGUF file."""
    return os.fspath(path).lower().endswith(".gguf")


def absent(name: str) -> str | None:
    """Why `name` cannot be the name of a model; None if it is an existing path, or may be a name on the hub."""
    repository, _ = _source(name)
    if Path(name).exists() or _HUB_NAME.fullmatch(repository):
        return None
    return f"there is no such {'file' if is_gguf(name) else 'folder'} here, and names on the hub are like owner/name"


def _source(path: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """The folder or hub name, and the arguments with which ``from_pretrained`` reads a GGUF file (empty for other checkpoints)."""
    if not is_gguf(path):
        return os.fspath(path), {}
    return str(PurePath(path).parent), {"gguf_file": PurePath(path).name}


def _need_gguf(path: str | os.PathLike[str]) -> None:
    from importlib.util import find_spec

    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise GgufError(
            f"{os.fspath(path)} is a GGUF file, and reading one needs {' and '.join(missing)}: {installing('gguf')}"
        )
