"""Prompts that come together while nobody is decoded are read in passes that they share."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from transformers import PreTrainedModel

from decoders.engine.decode import admission
from decoders.engine.decode.lane import Lane
from decoders.engine.decode.session import Session
from decoders.scheduling import scheduler
from decoders.strategies import TokenRecycling

from .conftest import scheduler_of, text_of, write_alone


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Prompts, and tokens of each, of every pass that reads."""
    made: list[tuple[int, int]] = []
    plain = Session.read_rows

    def noted(self: Session, place: int, starts: list[int], done: int, count: int, run: Any) -> None:
        made.append((len(starts), count))
        plain(self, place, starts, done, count, run)

    monkeypatch.setattr(Session, "read_rows", noted)
    return made


def decoded(lane: Lane, calls: list[Any]) -> list[list[int]]:
    members = [lane.offer(call.request) for call in calls]
    while lane.seats:
        lane.advance(1.0)
    assert all(member.error is None for member in members)
    return [member.generated[0] for member in members]


def lane_of(calls: list[Any], rows: int = 8) -> Lane:
    return Lane(calls[0].engine, calls[0].request, rows)


def test_prompts_of_a_burst_are_read_as_one(llama: PreTrainedModel, prepared: Any, passes: list[Any]) -> None:
    texts = [(text_of(n, length), 4 + n) for n, length in enumerate((40, 33, 25, 50, 28))]
    calls = [prepared(ids, new) for ids, new in texts]
    lane = lane_of(calls)
    got = decoded(lane, calls)
    lane.close()
    assert passes == [(5, 49)]
    assert got == [write_alone(llama, ids, max_new_tokens=new) for ids, new in texts]


def test_requests_that_are_submitted_one_after_the_other_begin_together(
    llama: PreTrainedModel, passes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GATHERING", "LONGEST_GATHERING"):
        monkeypatch.setattr(scheduler, name, 60.0)  # ends sooner: no more than four have a row
    with scheduler_of(llama, rows=4) as requests:
        generations = [requests.submit(text_of(n, 30 + n), max_new_tokens=6) for n in range(4)]
        assert [generation.result().shape[1] for generation in generations] == [36, 37, 38, 39]
        assert requests.steps == 6
    assert passes == [(4, 32)]


def test_a_request_that_is_being_submitted_is_waited_for(
    llama: PreTrainedModel, passes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = scheduler.Scheduler._prepared

    def slowly(self: Any, *args: Any) -> Any:
        time.sleep(2 * scheduler.GATHERING)
        return prepared(self, *args)

    monkeypatch.setattr(scheduler.Scheduler, "_prepared", slowly)
    monkeypatch.setattr(scheduler, "LONGEST_GATHERING", 60.0)
    with scheduler_of(llama, rows=4) as requests:
        with requests._comes():  # or a busy machine might take longer than GATHERING between two of them
            generations = [requests.submit(text_of(n, 30 + n), max_new_tokens=6) for n in range(3)]
            with pytest.raises(ValueError, match="max_new_tokens"):
                requests.submit(text_of(3, 30), max_new_tokens=-1)
        assert [generation.result().shape[1] for generation in generations] == [36, 37, 38], "one that failed is not"
    assert passes == [(3, 31)]


def test_nobody_is_waited_for_long(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asks, go_on = threading.Event(), threading.Event()
    prepared = scheduler.Scheduler._prepared

    def waits(self: Any, *args: Any) -> Any:
        if asks.is_set():
            go_on.wait(60)
        return prepared(self, *args)

    monkeypatch.setattr(scheduler.Scheduler, "_prepared", waits)
    with scheduler_of(llama, rows=4) as requests:
        first = requests.submit(text_of(0, 30), max_new_tokens=6)
        asks.set()
        other = threading.Thread(target=lambda: requests.submit(text_of(1, 30), max_new_tokens=6))
        other.start()
        try:
            assert first.result(60).shape[1] == 36, "while the other is still being submitted"
        finally:
            go_on.set()
            other.join()


def test_the_next_burst_is_read_as_one_where_the_first_was(
    llama: PreTrainedModel, prepared: Any, passes: list[Any]
) -> None:
    texts = [(text_of(n, 20 + n), 5) for n in range(8)]
    calls = [prepared(ids, new) for ids, new in texts]
    lane = lane_of(calls, rows=4)
    got = decoded(lane, calls[:4]) + decoded(lane, calls[4:])
    lane.close()
    assert [count for count, _ in passes] == [4, 4]
    assert got == [write_alone(llama, ids, max_new_tokens=new) for ids, new in texts]


def test_much_longer_and_shorter_prompts_are_read_by_themselves(
    llama: PreTrainedModel, prepared: Any, passes: list[Any]
) -> None:
    texts = [(text_of(n, length), 3) for n, length in enumerate((20, 21, 70, 22))]
    calls = [prepared(ids, new) for ids, new in texts]
    lane = lane_of(calls)
    got = decoded(lane, calls)
    lane.close()
    assert sorted(passes) == [(1, 21), (1, 69), (2, 20)], "places with another between them are none side by side"
    assert got == [write_alone(llama, ids, max_new_tokens=new) for ids, new in texts]


def test_a_prompt_that_another_begins_with_is_copied(llama: PreTrainedModel, prepared: Any, passes: list[Any]) -> None:
    common = text_of(0, 60)
    texts = [(common + text_of(n, 10), 3) for n in range(1, 4)]
    calls = [prepared(ids, new) for ids, new in texts]
    lane = lane_of(calls)
    members = [lane.offer(call.request) for call in calls]
    while lane.seats:
        lane.advance(1.0)
    lane.close()
    assert [count for count, _ in passes] == [1, 1, 1]
    assert [member.report.reused for member in members[1:]] == [[60], [60]]
    assert [member.generated[0] for member in members] == [write_alone(llama, i, max_new_tokens=n) for i, n in texts]


def test_a_pass_has_so_many_tokens_at_most(monkeypatch: pytest.MonkeyPatch, prepared: Any, passes: list[Any]) -> None:
    monkeypatch.setattr(admission, "SHARED_PASS", 100)
    calls = [prepared(text_of(n, 30), 2) for n in range(7)]
    lane = lane_of(calls)
    decoded(lane, calls)
    assert [count for count, _ in passes] == [3, 3, 1]
    lane.close()
    del passes[:]
    calls = [prepared(text_of(n, 30), 2, prefill_chunk=8) for n in range(5)]
    lane = lane_of(calls)
    decoded(lane, calls)
    lane.close()
    assert all(count * tokens <= 100 for count, tokens in passes)
    assert sum(count * tokens for count, tokens in passes) == 5 * 29


def test_one_that_leaves_hurts_nobody_that_it_shares_passes_with(llama: PreTrainedModel, prepared: Any) -> None:
    texts = [(text_of(n, 40), 6) for n in range(4)]
    calls = [prepared(ids, new, prefill_chunk=8) for ids, new in texts]
    lane = lane_of(calls)
    members = [lane.offer(call.request) for call in calls]
    running, ids = prepared(text_of(9, 5), 30), text_of(9, 5)
    first = lane.offer(running.request)
    lane.advance(1e-9)  # reads everything, since nobody waits
    late = [lane.offer(call.request) for call in calls[:2]]
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
    llama: PreTrainedModel, prepared: Any, passes: list[Any]
) -> None:
    texts = [(text_of(n, 30), 6) for n in range(3)]
    calls = [prepared(ids, new, strategy=TokenRecycling(prompt_logits=True)) for ids, new in texts]
    lane = lane_of(calls)
    got = decoded(lane, calls)
    lane.close()
    assert [count for count, _ in passes] == [1, 1, 1]
    assert got == [write_alone(llama, ids, max_new_tokens=new) for ids, new in texts]


def test_each_request_has_its_own_settings_in_passes_that_they_share(
    llama: PreTrainedModel, prepared: Any, passes: list[Any]
) -> None:
    texts = [(text_of(n, 40), 4) for n in range(2)]
    settings: list[dict[str, Any]] = [{}, {"reuse": False, "prefill_chunk": 16}]
    calls = [prepared(ids, new, **own) for (ids, new), own in zip(texts, settings, strict=True)]
    lane = lane_of(calls)
    for _ in range(2):  # the second time both texts are there
        members = [lane.offer(call.request) for call in calls]
        while lane.seats:
            lane.advance(1.0)
        assert [m.generated[0] for m in members] == [write_alone(llama, ids, max_new_tokens=new) for ids, new in texts]
    lane.close()
    assert passes[:3] == [(2, 16), (2, 16), (2, 7)]
    assert sum(count for _, count in passes[3:]) == 39, "the one that reuses nothing is read once more"
