"""Measurements for hf-decoders: other engines, models that are padded to the cost of a larger model, and the costs of single parts;
also the training of the demo models.

Everything is a command in the groups ``decoders bench`` and ``decoders train``. A command imports its modules when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from decoders import hookimpl

from .commands import COMMANDS


@hookimpl
def decoders_commands() -> Mapping[str, Callable[..., None]]:
    return COMMANDS


@hookimpl
def decoders_grammars() -> Mapping[str, Callable[[], Any]]:
    """Some grammars of ``decoders bench grammar``, for decoding with strategies: ``-s "autoregressive[grammar=fifty_keys]"``."""
    names = {
        "flat_object": "flat object", "fifty_keys": "50 keys", "nested_arrays": "nested arrays", "recursive_tree": "recursive tree",
    }  # fmt: skip
    return {name: partial(_measured, subject) for name, subject in names.items()}


def _measured(name: str) -> Any:
    from .grammar_subjects import subjects

    return next(subject.spec() for subject in subjects() if subject.name == name)
