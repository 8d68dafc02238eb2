"""Prompts with a common beginning go to one replica."""

from __future__ import annotations

from decoders_ray import PrefixTable

SYSTEM = list(range(100, 180))
IDLE = {"a": 0, "b": 0, "c": 0}


def test_who_has_read_the_longest_beginning_is_first() -> None:
    table = PrefixTable(block=16)
    table.note(SYSTEM[:32] + [1] * 40, "a")
    table.note(SYSTEM + [2] * 40, "b")
    assert table.ranked(SYSTEM + [3] * 40, IDLE, slack=4)[0] == "b"
    assert set(table.ranked(SYSTEM, IDLE, slack=4)) == set(IDLE)


def test_routers_that_know_nothing_choose_alike_and_spread_prompts() -> None:
    prompts = [[n] * 20 for n in range(60)]
    first = [PrefixTable().ranked(prompt, IDLE, slack=4)[0] for prompt in prompts]
    assert first == [PrefixTable().ranked(prompt, dict(reversed(IDLE.items())), slack=4)[0] for prompt in prompts]
    assert all(first.count(name) > 8 for name in IDLE)


def test_only_prompts_of_a_replica_that_goes_move() -> None:
    prompts = [[n] * 20 for n in range(60)]
    before = [PrefixTable().ranked(prompt, IDLE, slack=4) for prompt in prompts]
    after = [PrefixTable().ranked(prompt, {"a": 0, "c": 0}, slack=4)[0] for prompt in prompts]
    assert all(new == old[0] for old, new in zip(before, after, strict=True) if old[0] != "b")
    assert all(new == old[1] for old, new in zip(before, after, strict=True) if old[0] == "b")


def test_a_replica_that_is_much_busier_comes_last() -> None:
    table = PrefixTable()
    table.note(SYSTEM, "a")
    assert table.ranked(SYSTEM, {"a": 4, "b": 0}, slack=4)[0] == "a"
    assert table.ranked(SYSTEM, {"a": 5, "b": 0}, slack=4) == ["b", "a"]


def test_short_prompts_go_where_least_is_to_do() -> None:
    assert PrefixTable().ranked([1, 2], {"a": 3, "b": 1, "c": 2}, slack=4)[0] == "b"


def test_a_replica_that_died_is_forgotten_and_memory_is_bounded() -> None:
    table = PrefixTable(blocks=8)
    table.note(SYSTEM, "a")
    table.forget(["a"])
    assert len(table) == 0
    for n in range(20):
        table.note([n] * 32, "b")
    assert len(table) == 8


def test_texts_are_compared_like_tokens() -> None:
    table = PrefixTable()
    table.note("You are a helpful assistant. Who?", "c")
    assert table.ranked("You are a helpful assistant. Why?", IDLE, slack=4)[0] == "c"
