"""The contract of guides, which track each row's position in its grammar and mask the tokens after each node of a block.

The host guide (:mod:`~decoders.engine.decode.grammar.host_guide`) supports any grammar. The device guide
(:mod:`~decoders.engine.decode.grammar.device_guide`) supports grammars that have tables, which store the transitions of an automaton.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ....drafters import Forced
from ....sampling.processors import Masks
from ....strategy import Sequences
from ....tree import Topology, TreeTensors
from ..core import StepOutput
from ..verify import Outcome

#: Error text for a backend whose masks and matcher contradict each other.
MASK_MISMATCH = "row {row}: the grammar's masks allowed a token that its matcher refuses: a defect of the backend"
#: Error text for an empty mask. After a complete text, a mask must allow a stop token.
NOTHING_ALLOWED = "row {row}: the grammar's mask allows no token, not even a stop token: a defect of the backend"


class Guide(Forced, ABC):
    """Tracks the rows' positions in their grammars, for one model of a call: the target, or a draft model.

    Attributes:
        on_device: whether no method waits for the device, so that a whole step can be recorded.
    """

    @abstractmethod
    def ahead(self) -> Guide:
        """Returns a new guide, with the same grammars, for a draft model that drafts for this guide's model."""

    @abstractmethod
    def follow(self) -> None:
        """Moves to the positions of the guide whose :meth:`ahead` created this guide."""

    @abstractmethod
    def block(
        self, draft_tokens: Tensor, shape: Topology | TreeTensors, depth: int | None = None
    ) -> tuple[Tensor, Masks]:
        """Finds the illegal draft tokens of a block, and computes the masks of the tokens that may follow each node.

        Args:
            draft_tokens: ``[B, N-1]`` int64, the tokens of all nodes but the root; -1 for no draft token.
            shape: the tree; it may have fewer nodes than the block.
            depth: upper bound of the tree's depth, if known. The device guide processes this many levels; the host guide ignores it.

        Returns:
            the draft tokens, with -1 for tokens that are illegal after their parent, and the masks after all ``N`` nodes.
        """

    @abstractmethod
    def end(self) -> Masks:
        """Returns the masks after every row's last token (so ``N`` is 1). This token becomes the root of :meth:`expand`'s tree."""

    @abstractmethod
    def expand(self, tokens: Tensor, parents: Tensor, before: int) -> Masks:
        """Adds nodes to the rows' trees, and returns the masks after the new nodes.

        Args:
            tokens: ``[B, Q]`` int64, the tokens of the new nodes.
            parents: ``[B, Q]`` int64, the index of each new node's parent, in the order in which nodes were added; 0 is the root.
            before: number of earlier nodes to keep, root included.
        """

    @abstractmethod
    def append(self, tokens: Tensor) -> None:
        """Advances every row over its token in `tokens` ``[B]``."""

    @abstractmethod
    def accept(self, out: StepOutput) -> None:
        """Advances the rows over the new tokens of a step. The step has verified the block that was last passed to :meth:`block`."""

    @abstractmethod
    def commit(self, out: StepOutput, ended: Tensor, outcome: Outcome | None = None) -> None:
        """Advances the rows over the committed tokens, and drops the positions of draft nodes.

        Args:
            ended: ``[B]`` bool, the rows that have ended.
            outcome: the step's results as read by the host; None if the host has not read them.

        Raises:
            GrammarError: a row has left its grammar. For a guide on the device, :meth:`check` raises the error.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises GrammarError if a row has left its grammar. Waits for the device, so call it after the last step."""

    def expect(self, sequences: Sequences) -> None:
        """See :meth:`decoders.drafters.Forced.expect`."""

    @abstractmethod
    def forced(self, sequences: Sequences, limit: int) -> Tensor:
        """See :meth:`decoders.drafters.Forced.forced`. The module :mod:`.history` chooses tokens for the forced bytes."""
