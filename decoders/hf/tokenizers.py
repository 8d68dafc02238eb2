"""Checks that a tokenizer belongs to a model. With the tokenizer of another model, grammars, stop strings and drafts would be wrong."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.transformers_compat import stop_tokens
from ..engine.model.layout import embeddings_of
from ..errors import SettingsError

#: A tokenizer and an embedding may differ by `PADDING` tokens; an embedding may also have 1 / `PADDED_PART` of its rows as padding.
#: Published models pad embeddings by up to 2% for the hardware (905 of Phi-2's 51,200 rows), and some text models lack the
#: placeholder token of images.
PADDING, PADDED_PART = 256, 32


def check_tokenizer(model: PreTrainedModel, tokenizer: Any, name: str = "tokenizer", owner: str = "model") -> None:
    """Raises SettingsError if `tokenizer` is a string or a processor, has other stop tokens than `model`, or has far more or fewer
    tokens than `model`.

    Args:
        name, owner: what the error calls the argument and the model.
    """
    if isinstance(tokenizer, str):
        raise SettingsError(
            f"tokenizer must be a tokenizer of transformers, not {tokenizer!r}: pass AutoTokenizer.from_pretrained({tokenizer!r}), "
            f"or strategy={tokenizer!r} if it is the name of a strategy"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        if hasattr(tokenizer, "tokenizer"):
            raise SettingsError(
                f"tokenizer must be a tokenizer of transformers, not a {type(tokenizer).__name__}: pass processor.tokenizer"
            )
        return
    if getattr(
        model.config, "cost_scaled", ""
    ):  # `decoders bench` has enlarged the model and its vocabulary, to give it the cost of a larger model
        return
    added, rows = tokenizer.added_tokens_decoder, embeddings_of(model)
    size = max(len(tokenizer), *(token + 1 for token in added), 0)
    design, advice = type(model).__name__, f"Pass the tokenizer that the {owner} was trained with"
    wrong = f"{name}= is not the {owner}'s: it"
    if size > rows + PADDING or rows > size + max(PADDING, rows // PADDED_PART):
        raise SettingsError(
            f"{wrong} has {size:,} tokens, and {design} has embeddings for {rows:,}. {advice}"
            + (", or model.resize_token_embeddings(len(tokenizer)) if you have added tokens" if size > rows else "")
        )
    own, stops = tokenizer.eos_token_id, stop_tokens(model)
    if own is None or not stops or any(stop in added or stop in tokenizer.all_special_ids for stop in stops):
        return
    texts = " and ".join(
        f"{stop}, which is the text {tokenizer.decode([stop])!r} there" if stop < size else f"{stop}, which it lacks"
        for stop in stops
    )
    raise SettingsError(
        f"{wrong} ends texts with token {own} ({tokenizer.eos_token!r}), and {design} with {texts}. {advice}, "
        f"or set model.generation_config.eos_token_id if the {owner} was trained with this tokenizer"
    )
