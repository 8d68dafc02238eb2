"""A batch as those see it who serve its strategy: they read it when they need it, so that nothing is copied and nothing goes stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ...report import Report
    from ...verifiers.verifier import Verifier
    from ..model.blocks import Blocks
    from ..model.target import Target
    from .engine import Engine
    from .grammar.guide import Guide
    from .request import Request
    from .rows import Rows
    from .session import Session


class Verifies(Protocol):
    """A model that is drafted for: the target with its batch, or a draft model that has a drafter of its own."""

    @property
    def longest(self) -> int:
        """Most tokens that a row can have."""

    @property
    def blocks(self) -> Blocks:
        """The sizes of the blocks in which it verifies."""

    @property
    def guide(self) -> Guide | None:
        """Where its rows stand in their grammars."""


class BatchView(Verifies, Protocol):
    """What resources and draft models read of a :class:`~decoders.engine.decode.batch.Batch`; see there."""

    @property
    def request(self) -> Request: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def target(self) -> Target: ...
    @property
    def session(self) -> Session: ...
    @property
    def rows(self) -> Rows: ...
    @property
    def verifier(self) -> Verifier | None: ...
    @property
    def report(self) -> Report: ...
    @property
    def width(self) -> int: ...
    @property
    def lengths(self) -> list[int]: ...
    @property
    def capacity(self) -> int: ...
    @property
    def shared(self) -> bool: ...
    def read_rest(self) -> None: ...
    def compiler(self, engine: Engine) -> Callable[[Callable], Callable]: ...
