"""Models of random weights, and prompts of random tokens."""

from __future__ import annotations

import pytest

from decoders.bench.shapes import SHAPES, build, random_workloads
from decoders.errors import UnknownNameError

SMALL = dict(
    model_type="llama", num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=128, max_position_embeddings=256, tie_word_embeddings=True)  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    return "small"


def test_a_shape_is_the_same_in_every_run_and_has_no_stop_token(small: str) -> None:
    one, two, other = build(small), build(small), build(small, seed=1)
    ids = random_workloads(128, [9])[0].input_ids
    assert one(ids).logits.equal(two(ids).logits)
    assert not one(ids).logits.equal(other(ids).logits)
    assert one.generation_config.eos_token_id is None
    assert one.get_output_embeddings().weight is one.get_input_embeddings().weight
    assert len(one.get_input_embeddings().weight.unique(dim=0)) == 128, "equal rows would be ties"


def test_an_unknown_shape_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'llama-110m'"):
        build("llama-100m")


def test_random_prompts_are_the_same_in_every_run() -> None:
    prompts = random_workloads(50, [4, 8], rows=2, count=2)
    assert [(p.name, p.kind, tuple(p.input_ids.shape)) for p in prompts] == [
        ("4-01", "4 random tokens", (2, 4)), ("4-02", "4 random tokens", (2, 4)),
        ("8-01", "8 random tokens", (2, 8)), ("8-02", "8 random tokens", (2, 8)),
    ]  # fmt: skip
    again = random_workloads(50, [4, 8], rows=2, count=2)
    assert all(a.input_ids.equal(b.input_ids) for a, b in zip(prompts, again, strict=True))
    assert not prompts[0].input_ids.equal(prompts[1].input_ids)
