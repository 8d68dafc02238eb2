"""The contract of guides, which track each row's position in its grammar and mask the tokens after each node of a block.

The host guide (:mod:`~decoders.engine.decode.grammar.host_guide`) walks any grammar, the device guide
(:mod:`~decoders.engine.decode.grammar.device_guide`) those that are tables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ....sampling.processors import Masks
from ....strategy import Sequences
from ....tree import Topology, TreeTensors
from ..core import StepOutput
from ..criteria import Outcome

#: Raised where a backend's masks and its matcher contradict each other.
MASK_MISMATCH = "row {row}: the grammar's masks allowed a token that its matcher refuses: a defect of the backend"
#: Raised where a mask is empty: even a text that is complete may end.
NOTHING_ALLOWED = "row {row}: the grammar's mask allows no token, not even a stop token: a defect of the backend"


class Guide(ABC):
    """The rows' positions in their grammars, for one model of a call: the target, or a draft model that writes ahead of it.

    Attributes:
        on_device: whether no method waits for the device, so that a whole step can be recorded.
    """

    on_device: bool

    @abstractmethod
    def ahead(self) -> Guide:
        """A guide for a draft model that writes ahead of this one's rows."""

    @abstractmethod
    def follow(self) -> None:
        """Moves to the positions of the guide that this one was made from by :meth:`ahead`."""

    @abstractmethod
    def block(
        self, draft_tokens: Tensor, shape: Topology | TreeTensors, depth: int | None = None
    ) -> tuple[Tensor, Masks]:
        """What may follow every node of a block.

        Args:
            draft_tokens: ``[B, N-1]`` int64.
            shape: the tree; it may have fewer nodes than the block.
            depth: upper bound of the tree's depth, if known: as many levels are walked on the device. The host does not need it.

        Returns:
            the draft tokens, with -1 for those that are illegal after their parent, and masks for ``N`` nodes.
        """

    @abstractmethod
    def end(self) -> Masks:
        """What may follow every row, ``N`` is 1. The rows' last tokens become the roots of trees that :meth:`expand` continues."""

    @abstractmethod
    def expand(self, tokens: Tensor, parents: Tensor, before: int) -> Masks:
        """What may follow further nodes of the rows' trees.

        Args:
            tokens: ``[B, Q]`` int64.
            parents: ``[B, Q]`` int64, indices of earlier nodes in order of expansion; 0 is the root.
            before: how many earlier nodes there are, the root included; any further ones are forgotten.
        """

    @abstractmethod
    def append(self, tokens: Tensor) -> None:
        """Appends one token to every row, ``[B]``."""

    @abstractmethod
    def accept(self, out: StepOutput) -> None:
        """Moves the rows over the tokens that a step has chosen from the last block."""

    @abstractmethod
    def commit(self, out: StepOutput, ended: Tensor, outcome: Outcome | None = None) -> None:
        """As :meth:`accept`, for tokens that stay; draft nodes are forgotten.

        Args:
            ended: ``[B]`` bool, the rows that have ended.
            outcome: the step as read by the host; None where it was not read.

        Raises:
            GrammarError: a row has left its grammar; on the device :meth:`check` raises it.
        """

    @abstractmethod
    def check(self) -> None:
        """Reads the device: not for use between steps. Raises GrammarError: a row has left its grammar."""

    def expect(self, sequences: Sequences) -> None:
        """Prepares :meth:`forced` before a step is recorded; `sequences` are the rows as they begin."""

    @abstractmethod
    def forced(self, sequences: Sequences, limit: int) -> Tensor:
        """``[B, K]`` int64, tokens of the bytes that must come next, -1 behind the last one; ``K`` is at most `limit`.

        The bytes are split into tokens as each row has spelled such text before
        (:mod:`~decoders.engine.decode.grammar.history`). The last bytes are left out where a row has no history of them and
        the tokenizer might join them with what follows.

        Args:
            sequences: the rows as committed, as :meth:`Strategy.propose` gets them.
        """
