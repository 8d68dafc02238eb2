"""Prompts that come together while nobody is decoded are read in passes that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decoders.engine import admission
from decoders.engine.lane import Lane
from decoders.engine.pool import RowPool
from decoders.engine.request import Request
from decoders.strategies import TokenRecycling


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Prompts, and tokens of each, of every pass that reads."""
    made: list[tuple[int, int]] = []
    plain = RowPool.read_rows

    def noted(self: RowPool, place: int, starts: list[int], done: int, count: int, run: Any) -> None:
        made.append((len(starts), count))
        plain(self, place, starts, done, count, run)

    monkeypatch.setattr(RowPool, "read_rows", noted)
    return made


@pytest.fixture
def request_for(llama: PreTrainedModel) -> Callable[..., tuple[Any, Request]]:
    """The engine, and a request as a scheduler prepares it."""
    from decoders.generate import enabled

    def make(ids: list[int], new: int, **settings: Any) -> tuple[Any, Request]:
        strategy = settings.pop("strategy", "autoregressive")
        tokens = torch.tensor([ids])
        call = enabled(llama, None).prepared(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), strategy=strategy, max_new_tokens=new,
            do_sample=False, pad_token_id=0, decoders_config={"compile": False, **settings},
        )  # fmt: skip
        return call.engine, call.request

    return make


def decoded(lane: Lane, requests: list[Request]) -> list[list[int]]:
    members = [lane.offer(request) for request in requests]
    while lane.seats:
        lane.advance(1.0)
    assert all(member.error is None for member in members)
    return [member.generated[0] for member in members]


def lane_of(calls: list[tuple[Any, Request]], rows: int = 8) -> Lane:
    return Lane(calls[0][0], calls[0][1], rows)


def test_prompts_of_a_burst_are_read_as_one(
    llama: PreTrainedModel, request_for: Any, passes: list[Any], write_alone: Any, text_of: Any
) -> None:
    texts = [(text_of(n, length), 4 + n) for n, length in enumerate((40, 33, 25, 50, 28))]
    calls = [request_for(ids, new) for ids, new in texts]
    lane = lane_of(calls)
    got = decoded(lane, [request for _, request in calls])
    lane.close()
    assert passes == [(5, 49)]
    assert got == [write_alone(llama, ids, max_new_tokens=new) for ids, new in texts]


def test_the_next_burst_is_read_as_one_where_the_first_was(
    llama: PreTrainedModel, request_for: Any, passes: list[Any], write_alone: Any, text_of: Any
) -> None:
    texts = [(text_of(n, 20 + n), 5) for n in range(8)]
    calls = [request_for(ids, new) for ids, new in texts]
    lane = lane_of(calls, rows=4)
    got = decoded(lane, [request for _, request in calls[:4]]) + decoded(lane, [request for _, request in calls[4:]])
    lane.close()
    assert [count for count, _ in passes] == [4, 4]
    assert got == [write_alone(llama, ids, max_new_tokens=new) for ids, new in texts]


def test_much_longer_and_shorter_prompts_are_read_by_themselves(
    llama: PreTrainedModel, request_for: Any, passes: list[Any], write_alone: Any, text_of: Any
) -> None:
    texts = [(text_of(n, length), 3) for n, length in enumerate((20, 21, 70, 22))]
    calls = [request_for(ids, new) for ids, new in texts]
    lane = lane_of(calls)
    got = decoded(lane, [request for _, request in calls])
    lane.close()
    assert sorted(passes) == [(1, 21), (1, 69), (2, 20)], "places with another between them are none side by side"
    assert got == [write_alone(llama, ids, max_new_tokens=new) for ids, new in texts]


def test_a_prompt_that_another_begins_with_is_copied(
    llama: PreTrainedModel, request_for: Any, passes: list[Any], write_alone: Any, text_of: Any
) -> None:
    common = text_of(0, 60)
    texts = [(common + text_of(n, 10), 3) for n in range(1, 4)]
    calls = [request_for(ids, new) for ids, new in texts]
    lane = lane_of(calls)
    members = [lane.offer(request) for _, request in calls]
    while lane.seats:
        lane.advance(1.0)
    lane.close()
    assert [count for count, _ in passes] == [1, 1, 1]
    assert [member.report.reused for member in members[1:]] == [[60], [60]]
    assert [member.generated[0] for member in members] == [write_alone(llama, i, max_new_tokens=n) for i, n in texts]


def test_a_pass_has_so_many_tokens_at_most(
    monkeypatch: pytest.MonkeyPatch, request_for: Any, passes: list[Any], text_of: Any
) -> None:
    monkeypatch.setattr(admission, "SHARED_PASS", 100)
    calls = [request_for(text_of(n, 30), 2) for n in range(7)]
    lane = lane_of(calls)
    decoded(lane, [request for _, request in calls])
    assert [count for count, _ in passes] == [3, 3, 1]
    lane.close()
    del passes[:]
    calls = [request_for(text_of(n, 30), 2, prefill_chunk=8) for n in range(5)]
    lane = lane_of(calls)
    decoded(lane, [request for _, request in calls])
    lane.close()
    assert all(count * tokens <= 100 for count, tokens in passes)
    assert sum(count * tokens for count, tokens in passes) == 5 * 29


def test_one_that_leaves_hurts_nobody_that_it_shares_passes_with(
    llama: PreTrainedModel, request_for: Any, write_alone: Any, text_of: Any
) -> None:
    texts = [(text_of(n, 40), 6) for n in range(4)]
    calls = [request_for(ids, new, prefill_chunk=8) for ids, new in texts]
    lane = lane_of(calls)
    members = [lane.offer(request) for _, request in calls]
    running, ids = request_for(text_of(9, 5), 30), text_of(9, 5)
    first = lane.offer(running[1])
    lane.advance(1e-9)  # reads everything, since nobody waits
    late = [lane.offer(request) for _, request in calls[:2]]
    lane.advance(1e-9)
    lane.remove(late[0])
    while lane.seats:
        lane.advance(1e-9)
    lane.close()
    assert [member.generated[0] for member in [*members, late[1]]] == [
        write_alone(llama, ids, max_new_tokens=new) for ids, new in [*texts, texts[1]]
    ]
    assert first.generated[0] == write_alone(llama, ids, max_new_tokens=30)


def test_strategies_that_read_prompts_are_shown_each_by_itself(
    llama: PreTrainedModel, request_for: Any, passes: list[Any], write_alone: Any, text_of: Any
) -> None:
    texts = [(text_of(n, 30), 6) for n in range(3)]
    calls = [request_for(ids, new, strategy=TokenRecycling(prompt_logits=True)) for ids, new in texts]
    lane = lane_of(calls)
    got = decoded(lane, [request for _, request in calls])
    lane.close()
    assert [count for count, _ in passes] == [1, 1, 1]
    assert got == [write_alone(llama, ids, max_new_tokens=new) for ids, new in texts]
