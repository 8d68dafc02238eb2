"""Two small models that this project trains itself, and prompts from files that the models were not trained on.

`load()` returns the target. `load("draft")` returns the draft model, which is 8 times smaller. `prompts()` returns the benchmark's
prompts. Nothing here uses the network.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.checkpoints import load_model
from ..errors import DecodersError, UnknownNameError

if TYPE_CHECKING:
    import os

    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["MODELS", "DemoModelMissingError", "Prompt", "available", "load", "prompts"]

MODELS = ("target", "draft")
KINDS = ("code", "copy", "docstring")


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: the prompt's name.
        kind: what the model has to do. "code": continue code. "copy": copy a function with a rename. "docstring": write a docstring.
        text: the prompt itself.
        source: the held-out file from which it is taken, as a path relative to the standard library.
        answer: the right answer to a copy prompt; an empty string for other kinds.
    """

    id: str
    kind: str
    text: str
    source: str
    answer: str = ""


class DemoModelMissingError(DecodersError, RuntimeError):
    """The demo weights were not found."""


def available(directory: str | os.PathLike[str] | None = None) -> bool:
    """Whether the weights of both demo models are in `directory` (default: the package)."""
    return all((_directory(directory) / name / "model.safetensors").is_file() for name in MODELS)


def load(
    name: str = "target", dtype: torch.dtype | None = None, directory: str | os.PathLike[str] | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The demo model `name` ("target" or "draft") in eval mode, and its tokenizer.

    Args:
        dtype: default: float32.
        directory: a folder that `decoders train demo` of decoders-lab wrote; default: the weights in this package.

    Raises:
        UnknownNameError: there is no demo model of this name.
        DemoModelMissingError: the model's weights were not found.
    """
    if name not in MODELS:
        raise UnknownNameError("demo model", name, MODELS)
    path = _directory(directory) / name
    if not (path / "model.safetensors").is_file():
        raise DemoModelMissingError(
            f"There is no demo model in {path}. Train it with `decoders train demo`, of the distribution decoders-lab (an hour and a "
            "half on a laptop CPU), and pass the directory it wrote."
        )
    import torch
    from transformers import AutoTokenizer

    model = load_model(path, torch.float32 if dtype is None else dtype)
    return model, AutoTokenizer.from_pretrained(path)


def prompts(kind: str | None = None) -> list[Prompt]:
    """The prompts in this package, of one `kind` ("code", "copy" or "docstring") or of all kinds. All come from held-out files.

    They are stored, and not extracted from the running Python, because versions of Python have different sources.
    """
    if kind is not None and kind not in KINDS:
        raise UnknownNameError("kind of prompt", kind, KINDS)
    data = json.loads(resources.files(__package__).joinpath("prompts.json").read_text(encoding="utf-8"))
    all_prompts = [Prompt(**prompt) for prompt in data["prompts"]]
    return [prompt for prompt in all_prompts if kind in (None, prompt.kind)]


def _directory(directory: str | os.PathLike[str] | None) -> Path:
    return Path(__file__).parent / "models" if directory is None else Path(directory)
