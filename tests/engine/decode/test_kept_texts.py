"""Which kept text begins most like a prompt."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoders.engine.decode.prefix_cache import NOTHING, KeptText, PrefixIndex

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
    assert KeptText(tensor(kept)).shared_with(KeptText(tensor(prompt))) == shared


@pytest.mark.parametrize(
    ("kept", "prompt", "shared"),
    [([1, 2], [1, 2, 3], 2), ([1, 2], [1, 2], 0), ([1, 2, 3], [1, 2], 0), ([1, 9], [1, 2, 3], 0), ([], [1], 0)],
)
def test_a_text_with_a_recurrent_state_is_continued_at_its_end_or_not_at_all(
    kept: list, prompt: list, shared: int
) -> None:
    assert KeptText(tensor(kept), whole=True).shared_with(KeptText(tensor(prompt))) == shared


@pytest.mark.parametrize(
    ("prompt", "shared"), [([1, 7, 7, 2], 4), ([1, 7, 7, 5], 3), ([1, 7, 5], 0), ([1, 7], 0), ([1, 7, 7], 3)]
)
def test_a_text_with_an_image_serves_no_prompt_that_begins_otherwise_before_the_image_ends(
    prompt: list, shared: int
) -> None:
    kept = KeptText(tensor([1, 7, 7, 2]), least=3)
    assert kept.shared_with(KeptText(tensor(prompt))) == shared
    assert kept.shared_with(KeptText(tensor(prompt), salt="another image")) == 0
    assert len(kept.cut(3).tokens) == 3 and not len(kept.cut(2).tokens)


SALTS = st.sampled_from(["", "a", "b"])


@given(st.lists(st.tuples(TOKENS, SALTS), max_size=12), TOKENS, SALTS, st.booleans())
def test_the_index_finds_what_comparing_with_each_text_finds(
    kept: list[tuple[list[int], str]], prompt: list[int], salt: str, whole: bool
) -> None:
    texts = [KeptText(tensor(tokens), whole, own) for tokens, own in kept]
    wanted = KeptText(tensor(prompt), salt=salt)
    count, place = PrefixIndex(texts).longest(wanted)
    assert count == max((text.shared_with(wanted) for text in texts), default=0)
    assert not texts or texts[place].shared_with(wanted) == count
    assert not count or texts[place].salt == salt


def test_an_empty_index_shares_nothing() -> None:
    assert PrefixIndex([]).longest(KeptText(tensor([1]))) == (0, 0)
    assert PrefixIndex([NOTHING]).longest(KeptText(tensor([1]))) == (0, 0)
