"""Private parts of transformers that we use: each with why, and what would replace it. Nothing else reads them.

tests/engine/test_compat.py tries every one, so that a version of transformers that moves one says which.
"""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedModel


def keeps_recurrent_state(model: PreTrainedModel) -> bool:
    """Whether the design keeps a state that cannot be rolled back. transformers asks the same where it refuses assisted generation."""
    return bool(getattr(model, "_is_stateful", False))


def pad_token_of(config: GenerationConfig) -> int:
    """The token that fills ended rows, in a config that ``generate`` has prepared: as given, else the first that ends a text, else 0.

    The prepared values stand in private tensors; the public fields hold what the user gave.
    """
    pad, stops = getattr(config, "_pad_token_tensor", None), getattr(config, "_eos_token_tensor", None)
    return int(pad) if pad is not None else int(stops[0]) if stops is not None else 0
