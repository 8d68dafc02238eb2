"""Rows of a draft model that consists of the target's first layers. It reads and writes keys and values in the target's own slots."""

from __future__ import annotations

import torch

from ...model.blocks import Blocks
from ...model.target import Target
from ..rows import Rows
from ..session import Session


class SharedSlots(Session):
    """A session that shares the keys and values of the target's first layers, but has its own tokens and lengths of the rows.

    The slots already hold keys and values of committed tokens, because the target has computed them with the same weights. Drafting
    writes only to slots from the root on. The target's pass over the block overwrites these slots, and nothing reads slots after them.

    Args:
        target: the draft model, which consists of the first layers of the owner's model.
        owner: the session of the target's rows.
    """

    def __init__(self, target: Target, owner: Session) -> None:
        self.target, self.owner, self.recordings = target, owner, owner.recordings
        self._followed: Rows | None = None
        self.follow()

    @staticmethod
    def of(target: Target, owner: Session) -> SharedSlots:
        """The session that shares the slots of `owner`. It is the same object in every call, because recorded steps use its tensors."""
        layers = len(target.layout)
        known = owner.shared.get(layers)
        if not isinstance(known, SharedSlots) or known.target is not target:
            known = owner.shared[layers] = SharedSlots(target, owner)
        known.restart()
        return known

    def restart(self) -> None:
        """Copies the tokens and lengths of the target's rows, which have changed."""
        self.follow()
        for own, theirs in ((self.rows.tokens, self.owner.rows.tokens), (self.rows.length, self.owner.rows.length)):
            own.copy_(theirs)

    def follow(self) -> None:
        """Switches to the buffers of the target's current rows, if these rows have been replaced or enlarged."""
        theirs = self.owner.rows
        if theirs is self._followed:
            return
        count, slots = theirs.tokens.shape
        if self._followed is None or len(self.rows.tokens) != count:
            self.batch, device = count, self.target.device
            self.blocks = Blocks(count, device, self.target.static, self.target.multiple)
            tokens, length, finished, limit, faults = (
                t.clone() for t in (theirs.tokens, theirs.length, theirs.finished, theirs.limit, theirs.faults)
            )
        else:
            own = self.rows
            tokens, length, finished, limit, faults = own.tokens, own.length, own.finished, own.limit, own.faults
            if own.slots != slots:
                tokens = torch.nn.functional.pad(tokens, (0, slots - own.slots))
        # Recorded steps read the buffers' table of addresses, so the table is kept as long as the buffers are the same.
        same = self._followed is not None and self._followed.buffers is theirs.buffers
        buffers = self.rows.buffers if same else theirs.buffers.first_layers(len(self.target.layout))
        self.rows = Rows(
            tokens, length, theirs.prompt_length, finished, limit, faults, buffers, theirs.sampling, theirs.range,
        )  # fmt: skip
        self._followed = theirs
        self._forget_views()

    def grow(self, slots: int) -> None:
        self.owner.grow(slots)
        self.follow()
