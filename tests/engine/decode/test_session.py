"""What a session keeps between calls, and which keys and values a call may take over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoders.engine.decode.prefix_cache import KeptText
from decoders.engine.decode.rows import no_sampling
from decoders.engine.decode.session import Session
from decoders.engine.decode.sessions import KEPT_SESSIONS, Sessions
from decoders.engine.model.cache import CacheBuffers
from decoders.engine.model.self_check import target_of
from decoders.engine.model.target import Target
from decoders.testing import tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def target(request: pytest.FixtureRequest) -> Target:
    return target_of(tiny_model(request.param))


def sampling(rows: int):
    return no_sampling(rows, CPU)


def texts(*texts: list[int]) -> list[Tensor]:
    return [torch.tensor(text) for text in texts]


def read(
    pool: Sessions, prompts: list[Tensor], reuse: bool = True, chunk: int = 512, slots: int = 0
) -> tuple[list, Session]:
    """What a call does before its first step: per row the tokens not read, and the session."""
    lengths = [len(prompt) for prompt in prompts]
    with torch.no_grad(), pool.open(prompts, 4, sampling(len(prompts)), max(*lengths, slots) + 4, reuse) as opened:
        session, reusable, _ = opened
        reused, left = session.prefill(lengths, reusable, chunk, pool.target.prefill)
        assert left == 0
        session.keep([length - 1 for length in lengths])
    return reused, session


def assert_holds(session: Session, prompts: list[Tensor], target: Target) -> None:
    """Every row has the keys and values that reading the whole prompt gives."""
    for row, prompt in enumerate(prompts):
        _, alone = read(Sessions(target), [prompt], reuse=False)
        count = len(prompt) - 1
        own, expected = session.rows.buffers, alone.rows.buffers
        for ours, theirs in zip(own.keys + own.values, expected.keys + expected.values, strict=True):
            torch.testing.assert_close(ours[row, :, :count], theirs[0, :, :count], rtol=1e-4, atol=1e-5)
        assert torch.equal(session.rows.tokens[row, : len(prompt)], prompt)
        assert torch.equal(session.texts[row].tokens, prompt[:-1])


LONG = list(range(3, 43))


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_a_longer_prompt_reads_only_the_rest(target: Target, chunk: int) -> None:
    pool = Sessions(target)
    read(pool, texts(LONG[:30]))
    reused, session = read(pool, texts(LONG), chunk=chunk)
    assert reused == [29]
    assert_holds(session, texts(LONG), target)


def test_rows_that_change_places_take_each_others_texts(target: Target) -> None:
    first, second, third = LONG, LONG[::-1], LONG[::2] + LONG[1::2]
    pool = Sessions(target)
    read(pool, texts(first, second, third))
    swapped = texts([*second, 50], [*third, 51], [*first, 52])
    reused, session = read(pool, swapped)
    assert reused == [39, 39, 39]
    assert_holds(session, swapped, target)


def test_a_batch_of_questions_on_one_document_reads_it_once(target: Target) -> None:
    pool = Sessions(target)
    read(pool, texts([*LONG, 60]))
    questions = texts([*LONG, 61, 62], [*LONG, 63], [*LONG, 64, 65, 66])
    reused, session = read(pool, questions)
    assert reused == [39, 38, 40], "rows advance together: the one with most to read sets the pace"
    assert_holds(session, questions, target)


def test_a_session_grows_and_keeps_what_it_holds(target: Target) -> None:
    pool = Sessions(target)
    _, small = read(pool, texts(LONG))
    slots = small.rows.slots
    reused, session = read(pool, texts([*LONG, 90]), slots=2 * slots)
    assert session is small and session.rows.slots > slots
    assert reused == [39]
    assert_holds(session, texts([*LONG, 90]), target)


def test_one_long_call_does_not_hold_its_memory_for_ever(target: Target) -> None:
    pool = Sessions(target)
    for _ in range(KEPT_SESSIONS):
        read(pool, texts(LONG), slots=4000)
    for i in range(KEPT_SESSIONS):
        _, session = read(pool, texts([i, *LONG[::-1]]))
        assert session.rows.slots < 4000
    assert max(s.rows.slots for s in pool._free) < 4000


def test_the_session_used_longest_ago_goes_first(target: Target) -> None:
    pool = Sessions(target)
    others = [[100 + i, *LONG] for i in range(KEPT_SESSIONS)]
    read(pool, texts(LONG))
    for other in others:
        read(pool, texts(other))
    assert len(pool._free) == KEPT_SESSIONS
    assert read(pool, texts([*others[-1], 50]))[0] == [40]
    assert read(pool, texts([*LONG, 50]))[0] == [0]


def test_memory_is_bounded_whatever_the_numbers_of_rows(target: Target) -> None:
    pool = Sessions(target)
    largest = 0
    for rows in (1, 2, 3, 4, 3, 2, 1, 5):
        read(pool, texts(*[[rows, row, *LONG] for row in range(rows)]))
        largest = max(largest, *(s.rows.buffers.nbytes for s in pool._free))
        assert len(pool._free) <= KEPT_SESSIONS
        assert pool.nbytes <= KEPT_SESSIONS * largest
    pool.release()
    assert pool.nbytes == 0


def test_without_reuse_everything_is_read(target: Target) -> None:
    pool = Sessions(target)
    read(pool, texts(LONG))
    reused, session = read(pool, texts(LONG), reuse=False)
    assert reused == [0]
    assert_holds(session, texts(LONG), target)


def test_what_was_forgotten_is_read_again(target: Target) -> None:
    pool = Sessions(target)
    read(pool, texts(LONG))
    pool.forget()
    assert read(pool, texts(LONG))[0] == [0]


def test_a_call_that_fails_leaves_nothing_that_counts(target: Target) -> None:
    pool = Sessions(target)
    read(pool, texts(LONG))
    with pytest.raises(ZeroDivisionError), pool.open(texts(LONG), 4, sampling(1), 60, True):
        raise ZeroDivisionError
    assert len(pool._free) == 1
    assert read(pool, texts(LONG))[0] == [0]


def test_a_call_that_is_interrupted_while_rows_are_copied_leaves_nothing_that_counts(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Sessions(target)
    pool.kept = 1  # the next call takes this session
    read(pool, texts(LONG, LONG[::-1]))
    copy_row, copied = CacheBuffers.copy_row, []

    def interrupted(self: CacheBuffers, *arguments: Any) -> None:
        copied.append(arguments)
        if len(copied) == 2:
            raise KeyboardInterrupt
        copy_row(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(CacheBuffers, "copy_row", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read(pool, texts(LONG[::-1], LONG))
    reused, session = read(pool, texts(LONG, LONG[::-1]))
    assert len(copied) == 2 and reused == [0, 0]
    assert_holds(session, texts(LONG, LONG[::-1]), target)


def test_a_session_in_use_is_not_taken_by_a_call_within_the_call(target: Target) -> None:
    pool = Sessions(target)
    read(pool, texts(LONG))
    outer, inner = (pool.open(texts(LONG), 4, sampling(1), 60, True) for _ in range(2))
    with torch.no_grad(), outer as (of_outer, *_), inner as (of_inner, reusable, _):
        assert of_inner is not of_outer
        assert reusable == [0], "what a running call holds is no one else's"
    assert len(pool._free) <= KEPT_SESSIONS


PROMPT = st.lists(st.integers(3, 5), min_size=1, max_size=14)


CALLS = st.lists(
    st.tuples(st.lists(PROMPT, min_size=1, max_size=3), st.sampled_from([1, 2, 3, 7, 512]), st.booleans()),
    min_size=2, max_size=6,
)  # fmt: skip


@pytest.mark.parametrize("examples", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_any_sequence_of_calls_holds_what_reading_everything_gives(target: Target, examples: int) -> None:
    settings(max_examples=examples, deadline=None)(given(CALLS)(lambda calls: assert_texts_are_kept(target, calls)))()


def assert_texts_are_kept(target: Target, calls: list) -> None:
    """Three token ids: prompts begin alike, cross between rows, are each other's beginnings."""
    pool = Sessions(target)
    for rows, chunk, reuse in calls:
        prompts = texts(*rows)
        reused, session = read(pool, prompts, reuse, chunk)
        assert reuse or not any(r for r, p in zip(reused, prompts, strict=True) if len(p) == max(map(len, prompts)))
        assert_holds(session, prompts, target)
        assert len(pool._free) <= KEPT_SESSIONS


def test_matching_many_rows_does_not_compare_each_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    target, rows = target_of(tiny_model("llama")), 64
    pool = Sessions(target)
    prompts = texts(*([row, row % 7, row % 3, 5] for row in range(rows)))
    read(pool, prompts)
    compared = []
    shared_with = KeptText.shared_with
    monkeypatch.setattr(KeptText, "shared_with", lambda *both: compared.append(both) or shared_with(*both))
    assert read(pool, prompts[::-1])[0] == [3] * rows
    assert len(compared) <= 4 * rows
