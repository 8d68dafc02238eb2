"""Text that is sent in pieces: never half a character, never the beginning of a stop string."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from decoders.server.processors import StopStrings
from decoders.server.texts import ChoiceText
from decoders.server.tools import not_beginning


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text("abé🙂 ", max_size=30),
    stops=st.lists(st.text("abé🙂", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(1, 4), max_size=40),
)
@example(text="aab", stops=["ab"], cuts=[1, 1, 1])
@example(text="baa", stops=["a", "baa"], cuts=[2])
def test_pieces_are_the_text_before_the_first_stop(
    tokenizer: Any, text: str, stops: list[str], cuts: list[int]
) -> None:
    # Writing ends with the character that completes a stop string.
    text = text[: min((text.find(stop) + len(stop) for stop in stops if stop in text), default=len(text))]
    tokens = tokenizer(text).input_ids
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    expected = text[: min(places)] if places else text
    growing, shown, place = ChoiceText(tokenizer, stops), "", 0
    for count in cuts:
        new = tokens[place : place + count]
        place += len(new)
        piece = "".join(span.text for span in growing.add(new, [False] * len(new)))
        assert "\N{REPLACEMENT CHARACTER}" not in piece
        shown += piece
        assert expected.startswith(shown)
    rest = tokens[place:]
    shown += "".join(span.text for span in growing.add(rest, [True] * len(rest), ended=True))
    assert shown == expected == growing.shown
    assert growing.stopped == bool(places)


def test_a_stop_string_ends_the_text_where_it_is_complete(tokenizer: Any) -> None:
    import torch

    prompt, text = tokenizer("stop").input_ids, tokenizer("a sto🙂p stopp").input_ids
    criterion = StopStrings(tokenizer, ["never", "stop"], len(prompt))
    told = [bool(criterion(torch.tensor([prompt + text[:n]]), None)) for n in range(1, len(text) + 1)]
    assert told.index(True) == len(tokenizer("a sto🙂p stop").input_ids) - 1
    fresh = StopStrings(tokenizer, ["stop"], len(prompt))
    assert fresh(torch.tensor([prompt + text]), None).tolist() == [True]  # asked of any place


@settings(deadline=None)
@given(st.text("<tool_c[]\\^-\n{", min_size=1, max_size=6), st.text("<tool_c[]\\^-\n{", max_size=9))
def test_free_text_is_what_does_not_begin_with_a_call(prefix: str, text: str) -> None:
    assert bool(re.fullmatch(not_beginning(prefix), text)) == (not text.startswith(prefix))
