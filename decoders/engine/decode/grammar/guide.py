"""The contract of guides, which track each row's position in its grammar and mask the tokens after each node of a block.

The host guide (:mod:`~decoders.engine.decode.grammar.host_guide`) supports any grammar, the device guide
(:mod:`~decoders.engine.decode.grammar.device_guide`) tabulated grammars.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ....sampling.processors import Masks
from ....strategy import Sequences
from ....tree import Topology, TreeTensors
from ..core import StepOutput
from ..criteria import Outcome

#: Error if a backend's masks and matcher contradict each other.
MASK_MISMATCH = "row {row}: the grammar's masks allowed a token that its matcher refuses: a defect of the backend"
#: Error if a mask is empty: after a complete text, it must allow a stop token.
NOTHING_ALLOWED = "row {row}: the grammar's mask allows no token, not even a stop token: a defect of the backend"


class Guide(ABC):
    """The rows' positions in their grammars, for a model of a call: the target, or a draft model ahead of the target.

    Attributes:
        on_device: whether no method waits for the device, so that a whole step can be recorded.
    """

    on_device: bool

    @abstractmethod
    def ahead(self) -> Guide:
        """A guide for a draft model that drafts ahead of this guide's rows."""

    @abstractmethod
    def follow(self) -> None:
        """Moves to the positions of the guide whose :meth:`ahead` created this guide."""

    @abstractmethod
    def block(
        self, draft_tokens: Tensor, shape: Topology | TreeTensors, depth: int | None = None
    ) -> tuple[Tensor, Masks]:
        """The tokens that may follow every node of a block.

        Args:
            draft_tokens: ``[B, N-1]`` int64.
            shape: the tree; it may have fewer nodes than the block.
            depth: upper bound of the tree's depth, if known: the device processes this many levels. The host does not need it.

        Returns:
            the draft tokens, with -1 for tokens that are illegal after their parent, and masks for ``N`` nodes.
        """

    @abstractmethod
    def end(self) -> Masks:
        """The masks after every row's last token, ``N`` is 1. These tokens become the roots of trees that :meth:`expand` continues."""

    @abstractmethod
    def expand(self, tokens: Tensor, parents: Tensor, before: int) -> Masks:
        """The masks after further nodes of the rows' trees.

        Args:
            tokens: ``[B, Q]`` int64.
            parents: ``[B, Q]`` int64, indices of earlier nodes in order of expansion; 0 is the root.
            before: number of earlier nodes to keep, root included.
        """

    @abstractmethod
    def append(self, tokens: Tensor) -> None:
        """Appends a token to every row, ``[B]``."""

    @abstractmethod
    def accept(self, out: StepOutput) -> None:
        """Moves the rows over the tokens that a step has chosen from the last block."""

    @abstractmethod
    def commit(self, out: StepOutput, ended: Tensor, outcome: Outcome | None = None) -> None:
        """:meth:`accept` for committed tokens; drops draft nodes.

        Args:
            ended: ``[B]`` bool, the rows that have ended.
            outcome: the step as read by the host; None if the host has not read it.

        Raises:
            GrammarError: a row has left its grammar; on the device :meth:`check` raises it.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises GrammarError if a row has left its grammar. Waits for the device: not for use between steps."""

    def expect(self, sequences: Sequences) -> None:
        """Prepares :meth:`forced` before a step is recorded; `sequences` are the rows as they begin."""

    @abstractmethod
    def forced(self, sequences: Sequences, limit: int) -> Tensor:
        """``[B, K]`` int64, tokens of the bytes that must come next, -1 after the last token; ``K`` is at most `limit`.

        The bytes are split into tokens as the row has tokenized the same text before (:mod:`~decoders.engine.decode.grammar.history`).
        Without this history, the last bytes are omitted if the tokenizer might join them with the bytes after them.

        sequences: the rows as committed, as :meth:`Strategy.propose` gets them.
        """
