"""The laboratory of hf-decoders: other engines beside ours, models padded to a larger one's cost, what single parts cost, and how
the demo models were trained.

Everything is a command in the groups ``decoders bench`` and ``decoders train``. What a command measures with is imported when it runs.
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
    """Some of those that ``decoders bench grammar`` measures, to decode under them: ``-s "autoregressive[grammar=fifty_keys]"``."""
    names = {
        "flat_object": "flat object", "fifty_keys": "50 keys", "nested_arrays": "nested arrays", "recursive_tree": "recursive tree",
    }  # fmt: skip
    return {name: partial(_measured, subject) for name, subject in names.items()}


def _measured(name: str) -> Any:
    from .grammar_subjects import subjects

    return next(subject.spec() for subject in subjects() if subject.name == name)
