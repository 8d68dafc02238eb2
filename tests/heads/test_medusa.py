"""The heads as a module: what untrained ones say, and that no weights are shared."""

from __future__ import annotations

import pytest
import torch

from decoders.errors import SettingsError
from decoders.heads.medusa import HeadsConfig, MedusaHeads

H, V = 6, 11
LM_HEAD = torch.randn(V, H, generator=torch.Generator().manual_seed(0))
HIDDEN = torch.randn(5, H, generator=torch.Generator().manual_seed(1))


def make(projection: str = "full", rank: int = 0, layers: int = 2) -> MedusaHeads:
    config = HeadsConfig(heads=3, layers=layers, hidden_size=H, vocab_size=V, projection=projection, rank=rank)
    return MedusaHeads(config, LM_HEAD)


@pytest.mark.parametrize(("projection", "rank"), [("tied", 0), ("low_rank", 2), ("full", 0)])
def test_untrained_heads_say_what_the_output_head_says(projection, rank):
    scores = make(projection, rank)(HIDDEN, LM_HEAD)
    assert scores.shape == (5, 3, V)
    for k in range(3):
        torch.testing.assert_close(scores[:, k], HIDDEN @ LM_HEAD.T)


@pytest.mark.parametrize(("projection", "rank"), [("tied", 0), ("low_rank", 2), ("full", 0)])
def test_every_part_of_untrained_heads_can_learn(projection, rank):
    heads = make(projection, rank)
    torch.optim.SGD(heads.parameters(), lr=0.1).zero_grad()
    heads(HIDDEN, LM_HEAD).square().sum().backward()
    moved = {name for name, p in heads.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert moved == {name for name, _ in heads.named_parameters()} - {"down"}  # up is zero, so down moves a step later


def test_blocks_are_not_shared():
    heads = make(layers=2)
    with torch.no_grad():
        heads.linear[1, 0].fill_(0.3)
    scores = heads(HIDDEN, LM_HEAD)
    torch.testing.assert_close(scores[:, 0], HIDDEN @ LM_HEAD.T)
    assert not torch.allclose(scores[:, 1], HIDDEN @ LM_HEAD.T)
    x = HIDDEN + torch.nn.functional.silu(HIDDEN @ heads.linear[1, 0].T)  # the second block is still the identity
    torch.testing.assert_close(scores[:, 1], x @ LM_HEAD.T)


def test_one_head_alone_is_that_head():
    heads = make("low_rank", 2)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(3))
    bias = torch.arange(V).float()
    together = heads(HIDDEN, LM_HEAD, bias)
    for k in range(3):
        torch.testing.assert_close(heads.of_head(k, HIDDEN, LM_HEAD, bias), together[:, k])


def test_tied_heads_follow_the_models_weights_and_stay_small():
    heads = make("tied")
    assert sum(p.numel() for p in heads.parameters()) == 3 * 2 * (H * H + H)
    torch.testing.assert_close(heads(HIDDEN, 2 * LM_HEAD), 2 * heads(HIDDEN, LM_HEAD))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (dict(heads=0), "heads: Input should be greater than or equal to 1"),
        (dict(projection="none"), "'tied', 'low_rank' or 'full'"),
        (dict(projection="low_rank"), "needs a rank of 1 or more, any other projection a rank of 0"),
        (dict(projection="tied", rank=3), "needs a rank of 1 or more, any other projection a rank of 0"),
    ],
)
def test_senseless_shapes_are_refused(values, reason):
    with pytest.raises(SettingsError, match=reason):
        HeadsConfig.of({"heads": 2, "layers": 1, "hidden_size": H, "vocab_size": V} | values, "medusa", "shape")
