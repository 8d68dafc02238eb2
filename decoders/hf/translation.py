"""Draft models with another vocabulary than the target's: token-level intersection, Timor et al. 2025 (arXiv 2502.05202).

A copy of the draft model gets an embedding and a head with a row for every token of the *target*. Everything else (rows, cache, noise,
grammars, verification) works with the target's ids.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..constraints import Vocabulary
from ..engine.model.layout import number_of_logits
from ..errors import UnsupportedError
from .attached import GETSTATE

#: Least share of the target's tokens that the draft must have.
LEAST_SHARED = 0.1
#: Logit of tokens that the draft lacks: probability 0 in every precision. Infinity would break the checks that compare logits.
ABSENT = -1e4


@dataclass(frozen=True)
class TokenMap:
    """Maps every token of the target to a token of the draft model.

    Attributes:
        written: ``[V]`` int64, the draft's token with the same bytes or role (BOS, EOS); -1 if there is none.
        read: ``[V]`` int64, the draft's token that stands for each target token in the draft's input: `written`, or where it is -1, the
            last token of the text in the draft's tokenizer. So every target token occupies one slot in both caches.
        shared: fraction of the target's text tokens that the draft has.
        own: the bytes of the target's tokens.
        other: the bytes of the draft's tokens.
    """

    written: Tensor
    read: Tensor
    shared: float
    own: Vocabulary
    other: Vocabulary


def token_map(
    draft: PreTrainedModel, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase
) -> TokenMap:  # fmt: skip
    """The map from the target's to the draft model's tokens. Raises UnsupportedError if the bytes of tokens are unknown."""
    size, draft_size = number_of_logits(target), number_of_logits(draft)
    try:
        own, other = Vocabulary.of(tokenizer, size, []), Vocabulary.of(draft_tokenizer, draft_size, [])
    except UnsupportedError as error:
        raise UnsupportedError(f"the tokens of the two vocabularies cannot be compared: {error}") from error
    written = [other.ids.get(text, -1) if text is not None else -1 for text in own.tokens]
    texts = sum(text is not None for text in own.tokens)
    shared = sum(token >= 0 for token in written)
    for name in ("bos_token_id", "eos_token_id"):
        mine, theirs = getattr(tokenizer, name), getattr(draft_tokenizer, name)
        if mine is not None and theirs is not None and mine < size and theirs < draft_size:
            written[mine] = theirs
    read = list(written)
    missing = [token for token, known in enumerate(written) if known < 0]
    names = [_text(own.tokens[token], tokenizer, token) for token in missing]
    encoded = draft_tokenizer(names, add_special_tokens=False, verbose=False)["input_ids"] if names else []
    fallback = next((t for t in (draft_tokenizer.unk_token_id, draft_tokenizer.eos_token_id) if t is not None), 0)
    for token, ids in zip(missing, encoded, strict=True):
        read[token] = ids[-1] if ids and ids[-1] < draft_size else fallback
    return TokenMap(torch.tensor(written), torch.tensor(read), shared / max(texts, 1), own, other)


def _text(text: bytes | None, tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token's text without invalid UTF-8, or the name of a special token."""
    if text is None:
        name = tokenizer.convert_ids_to_tokens(token)
        return name if isinstance(name, str) else ""
    return text.decode("utf-8", errors="ignore")


def translated(draft: PreTrainedModel, target: PreTrainedModel, tokens: TokenMap) -> PreTrainedModel:
    """A copy of `draft` with the target's vocabulary. It shares all parameters with `draft` except the embedding and the head.

    Raises:
        UnsupportedError: the models share too few tokens, or rows of the draft's embedding or head cannot be selected.
    """
    head, embedding = draft.get_output_embeddings(), draft.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        raise UnsupportedError("a draft model with another vocabulary must have an nn.Embedding and an nn.Linear head")
    size = number_of_logits(target)
    if tokens.shared < LEAST_SHARED:
        raise UnsupportedError(
            f"the draft has {tokens.shared:.0%} of the target's tokens, which is too few to draft with "
            f"({LEAST_SHARED:.0%} at least): use strategy 'speculative' with tree='none' and alignment='strings', which drafts text"
        )
    twin = copy.deepcopy(draft, {id(parameter): parameter for parameter in draft.parameters()})
    vars(twin).pop("generate", None)
    vars(twin).pop(GETSTATE, None)
    written, read = tokens.written.to(head.weight.device), tokens.read.to(head.weight.device)
    present = written >= 0
    own_head: Any = twin.get_output_embeddings()
    own_embedding: Any = twin.get_input_embeddings()
    weight = torch.where(present[:, None], head.weight.detach()[written.clamp(min=0)], 0)
    bias = weight.new_zeros(size) if head.bias is None else head.bias.detach()[written.clamp(min=0)]
    own_head.weight = nn.Parameter(weight, requires_grad=False)
    own_head.bias = nn.Parameter(torch.where(present, bias, ABSENT).to(weight.dtype), requires_grad=False)
    own_embedding.weight = nn.Parameter(embedding.weight.detach()[read], requires_grad=False)
    own_head.out_features = own_embedding.num_embeddings = size
    own_embedding.padding_idx = None
    for config in {id(c): c for c in (twin.config, twin.config.get_text_config())}.values():
        config.vocab_size, config.tie_word_embeddings = size, False
    return twin
