"""What a user asks for with ``grammar=``: specifications, from which backends get a language."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from .base import Language, Policy


@dataclass(frozen=True, kw_only=True)
class Spec(ABC):
    """A specification of the texts that a row may write.

    Attributes:
        backend: registry name of what compiles it; ``auto`` takes the table automaton where it can.
        policy: which tokens may spell a legal text, see :data:`~decoders.constraints.base.Policy`.
    """

    backend: str | None = field(default=None)
    policy: Policy = field(default="full")

    @property
    @abstractmethod
    def key(self) -> str:
        """A text that tells specifications apart, for caches in memory and on disk: class, content and options."""

    @abstractmethod
    def language(self) -> Language:
        """The language, in every notation that can express it.

        Raises:
            GrammarError: it cannot be expressed; names the keyword, its path and what would handle it.
        """
