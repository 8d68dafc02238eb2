"""The built-in verifiers, one file each: rules that decide how much of a draft is kept."""

from __future__ import annotations

from .block import BlockVerification
from .coupled import Coupled
from .rejection import Rejection
from .tree_rejection import TreeRejection
from .typical import TypicalAcceptance

__all__ = ["BlockVerification", "Coupled", "Rejection", "TreeRejection", "TypicalAcceptance"]
