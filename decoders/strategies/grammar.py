"""Jump-ahead decoding: text that a grammar forces is drafted instead of written token by token.

Inside a schema much of the text is determined: quotes, keys, punctuation. The bytes that every legal continuation begins with are
proposed, as in SGLang's jump-forward decoding (Zheng et al. 2024), but as draft tokens: the same bytes can be split into tokens in
several ways, and the target chooses. They are drafted in the way in which the row was written before.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from ..drafters import Forced
from ..errors import UnsupportedError
from ..settings import Settings
from ..strategy import Context, Draft, Sequences, Strategy


class GrammarSettings(Settings):
    """How far to jump."""

    length: int = Field(16, ge=1, le=64, description="Most forced tokens proposed per step.")


class Grammar(Strategy):
    """Proposes the tokens that the grammar of a row forces. Needs ``grammar=``; rows without one are decoded plainly."""

    name = "grammar"
    summary = "Proposes what the grammar forces anyway: keys, quotes, punctuation."
    settings_class = GrammarSettings
    auto_place = 10
    on_device = True
    needs_grammar = True

    def start(self, context: Context) -> Forced:
        if context.guide is None:  # only as a part of another strategy: alone, generate requires grammar=
            raise UnsupportedError("strategy 'grammar' needs grammar=")
        if context.sequences is not None:
            context.guide.expect(context.sequences)
        return context.guide

    def rebatch(self, state: Forced, rows: Tensor, context: Context) -> Forced:
        """Returns the state of the new context, whose guide holds everything."""
        return self.start(context)

    def propose(self, state: Forced, sequences: Sequences) -> Draft:
        return Draft.chain(state.forced(sequences, self.settings.length))
