"""Jump-ahead decoding: text that a grammar forces is drafted, so that one step can write several tokens.

A schema determines much of the text: quotes, keys, punctuation. If all legal continuations begin with the same bytes, these bytes are
proposed, as in SGLang's jump-forward decoding (Zheng et al. 2024). SGLang writes the bytes. This strategy only drafts them, because
the same bytes can be split into tokens in several ways, and the target chooses the split. The draft uses the tokens with which the
row has written the same text before (its tokenization history).
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from ..drafters import Forced
from ..errors import UnsupportedError
from ..settings import Settings
from ..strategy import Context, Draft, Sequences, Strategy


class GrammarSettings(Settings):
    """The length of drafts."""

    length: int = Field(16, ge=1, le=64, description="Maximum number of forced tokens proposed per step.")


class Grammar(Strategy):
    """Proposes the text that a row's grammar forces. Needs ``grammar=``; rows without a grammar are decoded plainly."""

    name = "grammar"
    summary = "Proposes the text that the grammar forces: keys, quotes, punctuation."
    settings_class = GrammarSettings
    auto_place = 10
    on_device = True
    needs_grammar = True

    def start(self, context: Context) -> Forced:
        if context.guide is None:  # only in a merged strategy: alone, the loop requires grammar=
            raise UnsupportedError("strategy 'grammar' needs grammar=")
        if context.sequences is not None:
            context.guide.expect(context.sequences)
        return context.guide

    def rebatch(self, state: Forced, rows: Tensor, context: Context) -> Forced:
        """Returns the new context's guide, which holds the grammar states of all rows of the batch."""
        return self.start(context)

    def propose(self, state: Forced, sequences: Sequences) -> Draft:
        return Draft.chain(state.forced(sequences, self.settings.length))
