"""Faster, pluggable decoding for Hugging Face causal language models. The model writes the same tokens as in plain decoding.

import decoders
model = decoders.enable(model, tokenizer=tokenizer)
model.generate(**inputs, strategy="prompt_lookup", max_new_tokens=128)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import demo, strategies, testing, verifiers
    from .bench.advice import Advice, advise
    from .common.version import __version__ as __version__
    from .constraints import after, choice, grammar, json_schema, regex, tagged
    from .enabling import (
        Calibration,
        DecodersOutput,
        Warmup,
        calibrate,
        disable,
        enable,
        forget,
        memories,
        release,
        remember,
        warmup,
    )
    from .errors import DecodersError
    from .hookspecs import hookimpl
    from .report import ObservedCall, Observer, Report
    from .scheduling.generation import Generation
    from .scheduling.many import Completion, generate_many
    from .scheduling.scheduler import Scheduler
    from .settings import Settings
    from .strategy import Context, Draft, PromptChunk, Sequences, Step, Strategy
    from .tree import Topology, TreeTensors
    from .verifiers import Block, Outcomes, Verifier

#: The public names of each module. Modules are imported on first use, so that ``import decoders`` and the commands start quickly.
_NAMES = {
    "bench.advice": ("Advice", "advise"),
    "common.version": ("__version__",),
    "constraints": ("after", "choice", "grammar", "json_schema", "regex", "tagged"),
    "enabling": (
        "Calibration", "DecodersOutput", "Warmup", "calibrate", "disable", "enable", "forget", "memories", "release", "remember",
        "warmup",
    ),
    "errors": ("DecodersError",),
    "hookspecs": ("hookimpl",),
    "report": ("ObservedCall", "Observer", "Report"),
    "scheduling.generation": ("Generation",),
    "scheduling.many": ("Completion", "generate_many"),
    "scheduling.scheduler": ("Scheduler",),
    "settings": ("Settings",),
    "strategy": ("Context", "Draft", "PromptChunk", "Sequences", "Step", "Strategy"),
    "tree": ("Topology", "TreeTensors"),
    "verifiers": ("Block", "Outcomes", "Verifier"),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("demo", "strategies", "testing", "verifiers")

__all__ = [
    "Advice", "Block", "Calibration", "Completion", "Context", "DecodersError", "DecodersOutput", "Draft", "Generation", "ObservedCall",
    "Observer", "Outcomes", "PromptChunk", "Report", "Scheduler", "Sequences", "Settings", "Step", "Strategy", "Topology",
    "TreeTensors", "Verifier", "Warmup", "advise", "after", "calibrate", "choice", "demo", "disable", "enable", "forget",
    "generate_many", "grammar", "hookimpl", "json_schema", "memories", "regex", "release", "remember", "strategies",
    "tagged", "testing", "verifiers", "warmup",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOME:
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__ + ["__version__"])
