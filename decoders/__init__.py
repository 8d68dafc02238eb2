"""Faster, pluggable decoding for Hugging Face causal language models. The output stays the same, token for token.

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

#: The module of each public name. Modules are imported on first use, so that ``import decoders`` and the commands start quickly.
_HOME = {
    "__version__": "common.version",
    "enable": "enabling",
    "disable": "enabling",
    "forget": "enabling",
    "memories": "enabling",
    "release": "enabling",
    "remember": "enabling",
    "warmup": "enabling",
    "calibrate": "enabling",
    "advise": "bench.advice",
    "Advice": "bench.advice",
    "Calibration": "enabling",
    "Warmup": "enabling",
    "DecodersOutput": "enabling",
    "DecodersError": "errors",
    "Report": "report",
    "Scheduler": "scheduling.scheduler",
    "Generation": "scheduling.generation",
    "Completion": "scheduling.many",
    "generate_many": "scheduling.many",
    "Settings": "settings",
    "ObservedCall": "report",
    "Observer": "report",
    "Strategy": "strategy",
    "Draft": "strategy",
    "Step": "strategy",
    "PromptChunk": "strategy",
    "Sequences": "strategy",
    "Context": "strategy",
    "Topology": "tree",
    "TreeTensors": "tree",
    "Verifier": "verifiers",
    "Block": "verifiers",
    "Outcomes": "verifiers",
    "hookimpl": "hookspecs",
    "after": "constraints",
    "choice": "constraints",
    "grammar": "constraints",
    "json_schema": "constraints",
    "regex": "constraints",
    "tagged": "constraints",
}
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
