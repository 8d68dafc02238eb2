"""Attention with causal masks of its own: a private tree opens them, the user's model keeps them."""

from __future__ import annotations

import pytest
import torch

import decoders
from decoders.engine.model import own_masks
from decoders.engine.model.attention import LayerKind
from decoders.engine.model.self_check import target_of
from decoders.errors import UnsupportedError
from decoders.testing import decode, prompts, tiny_model
from decoders.testing.models import WINDOW


def test_windows_of_masks_become_kinds_of_layers() -> None:
    model = tiny_model("gpt_neo")
    masks = [block.attn.attention.bias for block in model.transformer.h]
    target = target_of(model)
    assert target.attending.kinds == (LayerKind(), LayerKind(window=WINDOW))
    assert all(block.attn.attention.bias is mask for block, mask in zip(model.transformer.h, masks, strict=True))
    assert all(block.attn.attention.bias.all() for block in target.model.transformer.h)


def test_texts_are_exact_up_to_the_last_position() -> None:
    model, inputs = decoders.enable(tiny_model("gpt_neo", max_position_embeddings=64)), prompts(2, length=40)
    expected = decode(model, inputs, max_new_tokens=24).sequences
    ours = decode(model, inputs, "prompt_lookup", max_new_tokens=24, decoders_config={"compile": False}).sequences
    assert torch.equal(ours, expected)


def test_a_window_that_is_ignored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = own_masks.take_over
    monkeypatch.setattr(own_masks, "take_over", lambda model, kinds: plain(model, kinds)[:1] * 2)
    with pytest.raises(UnsupportedError, match="differ"):
        target_of(tiny_model("gpt_neo", window_size=256))


@pytest.mark.parametrize(
    "mask, window",
    [
        (torch.ones(9, 9).tril().bool(), 9),
        (torch.ones(1, 1, 9, 9).tril().triu(-3).bool(), 4),
        (torch.ones(9, 9).bool(), None),
        (torch.ones(9, 9).tril(), None),
        (torch.ones(9, 8).tril().bool(), None),
        (torch.ones(9, 9).triu().bool(), None),
        (torch.zeros(0, 0).bool(), None),
        (torch.ones(1, 1).bool(), None),
    ],
)
def test_what_counts_as_a_causal_mask(mask: torch.Tensor, window: int | None) -> None:
    module = torch.nn.Module()
    module.register_buffer("bias", mask)
    assert [found.window for found in own_masks._masks(module)] == ([window] if window else [])
