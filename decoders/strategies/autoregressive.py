"""Plain decoding in the compiled loop: the baseline of every other strategy."""

from __future__ import annotations

from ..strategy import Draft, Sequences, Strategy


class Autoregressive(Strategy):
    """One token per step, no draft tokens."""

    name = "autoregressive"
    summary = "One token per step in the compiled static-cache loop."
    on_device = True

    def propose(self, state: None, sequences: Sequences) -> Draft:
        return Draft.nothing(sequences.tokens.shape[0], sequences.tokens.device)
