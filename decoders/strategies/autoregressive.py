"""Plain decoding in the compiled loop: the baseline of every other strategy."""

from __future__ import annotations

from ..strategy import Draft, Sequences, Strategy


class Autoregressive(Strategy):
    """One token per step, no draft tokens."""

    name = "autoregressive"
    summary = "Generates one token per step, without drafting: the baseline."
    on_device = True

    def propose(self, state: None, sequences: Sequences) -> Draft:
        return Draft.nothing(sequences.tokens.shape[0], sequences.tokens.device)
