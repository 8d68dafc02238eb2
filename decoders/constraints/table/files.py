"""Compiled automata on disk, as safetensors: nothing in a file is run, and nothing is believed that can be checked."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from torch import Tensor

from ...errors import GrammarError
from ..base import Language, Policy, Tables, mask_words
from ..vocabulary import Vocabulary
from .automaton import Automaton

#: Goes up whenever the same regex would give other tables.
VERSION = "1"


def identity(language: Language, vocabulary: Vocabulary, policy: Policy) -> dict[str, str]:
    """What a file was compiled from: it may stand in for a compilation only if all of this is equal."""
    regex = hashlib.sha256((language.regex or "").encode(errors="surrogatepass")).hexdigest()
    return {
        "format": "decoders table", "version": VERSION, "regex": regex, "vocabulary": vocabulary.fingerprint,
        "policy": policy,
    }  # fmt: skip


def save(path: str | os.PathLike[str], automaton: Automaton, identity: dict[str, str]) -> None:
    """Writes a file, whole or not at all."""
    from safetensors.torch import save_file

    tables = automaton.tables
    tensors = {
        "next": tables.next, "classes": tables.classes, "mask_of": tables.mask_of, "masks": tables.masks,
        "accepting": automaton.accepting, "ends": torch.tensor([tables.start, tables.stopped]),
    }  # fmt: skip
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            draft,
            metadata=identity | {"digest": _digest(tensors)},
        )
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], identity: dict[str, str], size: int) -> Automaton:
    """The automaton in a file, for a vocabulary of `size` tokens.

    Raises:
        GrammarError: no such file, not of this format or version, of another regex, vocabulary or policy, or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise GrammarError(f"{os.fspath(path)} cannot be read as a compiled grammar: {error}") from error
    for name, value in identity.items():
        if metadata.get(name) != value:
            raise GrammarError(f"{os.fspath(path)} is a compiled grammar of another {name}: {metadata.get(name)!r}")
    if metadata.get("digest") != _digest(tensors) or not _sound(tensors, size):
        raise GrammarError(f"{os.fspath(path)} is damaged: compile the grammar anew")
    start, stopped = tensors["ends"].tolist()
    tables = Tables(
        tensors["next"], tensors["classes"], tensors["mask_of"], tensors["masks"], start=start, stopped=stopped
    )
    return Automaton(tables, tensors["accepting"])


def _digest(tensors: dict[str, Tensor]) -> str:
    """Of names, types, shapes and contents."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sound(tensors: dict[str, Tensor], size: int) -> bool:
    """Whether all tensors are there, have their shapes and types, and no number points outside of them."""
    types = {
        "next": torch.int32, "classes": torch.int64, "mask_of": torch.int64, "masks": torch.int32,
        "accepting": torch.bool, "ends": torch.int64,
    }  # fmt: skip
    if {name: tensor.dtype for name, tensor in tensors.items()} != types:
        return False
    after, masks = tensors["next"], tensors["masks"]
    if after.dim() != 2 or masks.dim() != 2 or not len(after) or not len(masks):
        return False
    states, classes = after.shape
    shapes = {"classes": (256,), "mask_of": (states,), "accepting": (states,), "ends": (2,)}
    if masks.shape[1] != mask_words(size) or any(tuple(tensors[name].shape) != shapes[name] for name in shapes):
        return False
    limits = {"next": states, "classes": classes, "mask_of": len(masks), "ends": states}
    return all(int(tensors[name].min()) >= 0 and int(tensors[name].max()) < limits[name] for name in limits)
