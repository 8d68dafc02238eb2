"""The committed tokens that a draft model has not run yet."""

from __future__ import annotations

import torch
from torch import Tensor

from ...model.buckets import node_bucket

#: Fewest tokens that are run before the root: smaller sizes would get graphs of their own.
MIN_PENDING = 2


class PendingTokens:
    """How many committed tokens are pending in the row that has most of them, and what reads them.

    Args:
        level: how many tokens are pending after a step that has accepted what was drafted.
        static: whether passes have one of a few sizes.
        shared: whether the model that verifies computes what is committed for the draft as well: none of it is read again.

    Attributes:
        count: tokens that are pending.
    """

    def __init__(self, level: int, static: bool, device: torch.device, shared: bool = False) -> None:
        self.level, self.static, self.device, self.shared = level, static, device, shared
        self.count = level
        self._ranges: dict[int, Tensor] = {MIN_PENDING: torch.arange(MIN_PENDING, device=device)}
        self._before = 0

    def after_step(self, behind: int) -> None:
        """A step has committed tokens, `behind` of them after the last that was drafted."""
        self.count = self.level + behind

    def range(self, reach: int) -> Tensor:
        """``[U]`` int64, 0 … U-1: an entry for each pending token, and some more. No row is longer than `reach`."""
        pending = 0 if self.shared else max(min(self.count, reach), MIN_PENDING)
        if self.static and pending:  # with the last token they are a block
            pending = node_bucket(pending + 1) - 1
        if pending not in self._ranges:
            self._ranges[pending] = torch.arange(pending, device=self.device)
        return self._ranges[pending]

    def recording(self) -> None:
        """What follows is recorded: Python runs, and the device does not."""
        self._before = self.count

    def not_recorded(self) -> None:
        """The recording has failed, and nothing has been run."""
        self.count = self._before
