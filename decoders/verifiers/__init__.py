"""Rules that decide how much of a draft is kept: the contract in ``verifier.py``, and the built-in rules in ``builtin.py``."""

from __future__ import annotations

from .builtin import BlockVerification, Coupled, Rejection, TreeRejection, TypicalAcceptance
from .verifier import Block, Outcomes, Verifier, normalised

__all__ = [
    "Block", "BlockVerification", "Coupled", "Outcomes", "Rejection", "TreeRejection", "TypicalAcceptance", "Verifier",
    "normalised",
]  # fmt: skip

#: The built-in verifiers, in the order of listings.
BUILT_IN: tuple[type[Verifier], ...] = (Coupled, Rejection, BlockVerification, TreeRejection, TypicalAcceptance)
