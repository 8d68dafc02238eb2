"""Which kept text begins most like a prompt."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoders.engine.decode.prompts import NOTHING, KeptText, PrefixIndex

TOKENS = st.lists(st.sampled_from([0, 1, 255, 256, 70_000]), max_size=6)


def tensor(tokens: list[int]) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


@pytest.mark.parametrize(
    ("kept", "prompt", "shared"),
    [
        ([], [1, 2], 0),
        ([1, 2], [], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [9, 2, 3], 0),
    ],
)
def test_what_a_text_shares_with_a_prompt_is_their_common_beginning(kept: list, prompt: list, shared: int) -> None:
    assert KeptText(tensor(kept)).shared_with(tensor(prompt)) == shared


@pytest.mark.parametrize(
    ("kept", "prompt", "shared"),
    [([1, 2], [1, 2, 3], 2), ([1, 2], [1, 2], 0), ([1, 2, 3], [1, 2], 0), ([1, 9], [1, 2, 3], 0), ([], [1], 0)],
)
def test_a_text_with_a_recurrent_state_is_continued_at_its_end_or_not_at_all(
    kept: list, prompt: list, shared: int
) -> None:
    assert KeptText(tensor(kept), whole=True).shared_with(tensor(prompt)) == shared


SALTS = st.sampled_from(["", "a", "b"])


@given(st.lists(st.tuples(TOKENS, SALTS), max_size=12), TOKENS, SALTS, st.booleans())
def test_the_index_finds_what_comparing_with_each_text_finds(
    kept: list[tuple[list[int], str]], prompt: list[int], salt: str, whole: bool
) -> None:
    texts = [KeptText(tensor(tokens), whole, own) for tokens, own in kept]
    count, place = PrefixIndex(texts).longest(tensor(prompt), salt)
    assert count == max((text.shared_with(tensor(prompt), salt) for text in texts), default=0)
    assert not texts or texts[place].shared_with(tensor(prompt), salt) == count
    assert not count or texts[place].salt == salt


def test_an_empty_index_shares_nothing() -> None:
    assert PrefixIndex([]).longest(tensor([1])) == (0, 0)
    assert PrefixIndex([NOTHING]).longest(tensor([1])) == (0, 0)
