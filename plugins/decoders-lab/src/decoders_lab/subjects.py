"""The subjects of ``decoders bench beside``: padded models, and the same weights in other engines."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from decoders.bench import Method
from decoders.cli.bench_run import Loaded, Plan, Subjects
from decoders.cli.benches import pieces
from decoders.cli.console import waiting

from .engines import Request, beside_methods, check_installed, requests
from .scaling import ScaledSubjects

if TYPE_CHECKING:
    from rich.console import Console


def checked_engines(texts: Sequence[str] | None, has_draft: bool) -> list[Request]:
    """The requested engines.

    Raises:
        DecodersError: an engine is unknown or not installed.
    """
    engines = [request for text in pieces(texts) or () for request in requests(text, has_draft)]
    for request in engines:
        check_installed(request.engine)
    if engines and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # shows the place in the code if an engine crashes the process
    return engines


class LabSubjects(Subjects):
    """Models, padded or not, and methods of other engines with the same weights.

    It is a context manager, which deletes the engines' files at its end.
    """

    def __init__(self, scale: str | None, engines: Sequence[Request]) -> None:
        self.models = Subjects() if scale is None else ScaledSubjects(scale)
        self.engines, self.loaded_as = engines, self.models.loaded_as
        self.facts = {"scale": scale, "beside": [request.name for request in engines]}
        self._folder = TemporaryDirectory(prefix="decoders-")

    def __enter__(self) -> LabSubjects:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def load(self, model: str, draft: str | None, dtype: str, device: str | None) -> Loaded:
        return self.models.load(model, draft, dtype, device)

    def methods(self, plan: Plan, name: str, measured: Sequence[Method], console: Console) -> list[Method]:
        """The engines' methods. Stop tokens and sizes are the measured model's; the weights come from the same model in float32."""
        if not self.engines:
            return []
        dtypes = list(dict.fromkeys(method.dtype for method in measured))
        with waiting(console, "writing models for other engines") as status:
            # Loaded in float32, so that every engine rounds the same weights.
            target, tokenizer, draft = self.load(name, plan.draft, "float32", "cpu")
            folder = Path(self._folder.name)
            methods = beside_methods(self.engines, target, folder, draft, tokenizer, dtypes, status.update)
        return [replace(method, model=measured[0].model) for method in methods]
