"""The built-in verifiers, one file each: rules that decide how much of a draft is kept."""

from __future__ import annotations

from ..verifier import Verifier
from .block import BlockVerification
from .coupled import Coupled
from .rejection import Rejection
from .tree_rejection import TreeRejection
from .typical import TypicalAcceptance

__all__ = ["BlockVerification", "Coupled", "Rejection", "TreeRejection", "TypicalAcceptance"]

#: In the order in which they are listed.
BUILT_IN: tuple[type[Verifier], ...] = (Coupled, Rejection, BlockVerification, TreeRejection, TypicalAcceptance)
