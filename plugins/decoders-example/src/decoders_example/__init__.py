"""A decoding strategy as a plugin of hf-decoders: after each token, it drafts the token that last followed the same token."""

from itertools import pairwise

import torch
from pydantic import Field

from decoders import Draft, Sequences, Settings, Strategy, hookimpl


class BigramSettings(Settings):
    """The length of drafts."""

    length: int = Field(4, ge=1, le=64, description="Tokens proposed per step.")


class Bigram(Strategy):
    """Drafts the token that last followed the same token. A wrong draft token costs time, but does not change the output."""

    name = "bigram"
    summary = "Chains each token's most recent follower in prompt and output."
    settings_class = BigramSettings

    def propose(self, state: None, sequences: Sequences) -> Draft:
        drafts = []
        for tokens, length in zip(sequences.tokens.tolist(), sequences.length.tolist(), strict=True):
            text = tokens[:length]  # the tokens after a row's length are undefined
            follower = dict(pairwise(text))  # maps each token to its last follower
            draft = [text[-1]]
            for _ in range(self.settings.length):
                draft.append(follower.get(draft[-1], -1))  # -1: no draft token
            drafts.append(draft[1:])
        return Draft.chain(torch.tensor(drafts, device=sequences.tokens.device))


@hookimpl
def decoders_strategies() -> list[type[Strategy]]:
    return [Bigram]
