"""In which tier a forward pass runs: uncompiled at once, compiled as soon as that has been worth its time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..report import Report
from ..tree import TreeTensors
from . import compiler
from .cache import CacheBuffers
from .target import ForwardResult, Target

#: Setting ``compile``: in the background when it pays, before the first step, or never.
Compile = Literal["auto"] | bool


class ForwardPass:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.compiled_passes = 0

    @contextmanager
    def during(self, mode: Compile, report: Report) -> Iterator[None]:
        yield

    def __call__(
        self, nodes: Tensor, base: Tensor, tree: TreeTensors, buffers: CacheBuffers, view: int
    ) -> ForwardResult:
        """As :meth:`Target.forward`."""
        return self.target.forward(nodes, base, tree, buffers, view)

    def forget(self) -> None: ...
