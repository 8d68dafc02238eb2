"""Fewer threads where steps wait for other processes; all of them again where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from decoders.engine.model.threads import AGAIN, STEPS, Threads, own_number_afterwards, torchs_own


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def quiet(threads: int) -> tuple[float, float]:
    """A step (seconds, and seconds computing) that more threads make faster."""
    return 0.02 / threads, 0.02 / threads


def busy(threads: int) -> tuple[float, float]:
    """The same beside processes that leave one core: more threads only wait."""
    return (0.02, 0.018) if threads == 1 else (0.05 * threads, 0.02)


def half_busy(threads: int) -> tuple[float, float]:
    return (0.02 / threads, 0.02 / threads) if threads <= 2 else (0.2, 0.05)


def run(threads: Threads, machine: Callable[[int], tuple[float, float]], steps: int) -> list[int]:
    """The numbers of threads that so many steps computed with."""
    numbers = []
    for _ in range(steps):
        threads.use()
        numbers.append(torch.get_num_threads())
        threads.judge(*machine(numbers[-1]))
    return numbers


def test_a_quiet_machine_keeps_all_threads() -> None:
    threads = Threads()
    with own_number_afterwards():
        assert set(run(threads, quiet, 200)) == {4}


def test_a_busy_machine_leads_to_one_thread_within_a_few_steps() -> None:
    threads = Threads()
    with own_number_afterwards():
        run(threads, busy, 60)
        assert threads.count == 1
        numbers = run(threads, busy, 400)
    assert numbers.count(1) > 0.9 * len(numbers), "tries of more threads are few"
    assert torch.get_num_threads() == 4, "a call leaves torch's number as it was"


def test_trials_are_few_where_steps_are_long() -> None:
    def slow(number: int) -> tuple[float, float]:
        wall, computing = busy(number)
        return 100 * wall, 100 * computing

    threads = Threads()
    with own_number_afterwards():
        run(threads, slow, 60)
        assert run(threads, slow, 400).count(1) > 380


def test_half_the_cores_are_found() -> None:
    threads = Threads()
    with own_number_afterwards():
        run(threads, half_busy, 60)
        assert threads.count == 2
        assert run(threads, half_busy, 400).count(2) > 360


def test_all_threads_come_back_when_the_machine_is_quiet_again() -> None:
    threads = Threads()
    with own_number_afterwards():
        run(threads, busy, 60)
    with own_number_afterwards():
        assert run(threads, quiet, 1) == [1], "the next call begins with what the last one found"
        run(threads, quiet, int(4 * AGAIN / 0.02))
        assert threads.count == 4


def test_calls_may_overlap_in_any_order() -> None:
    threads, one, other = Threads(), own_number_afterwards(), own_number_afterwards()
    one.__enter__()
    run(threads, busy, 60)
    other.__enter__()
    assert torchs_own() == 4 and torch.get_num_threads() == 1
    one.__exit__(None, None, None)
    assert torch.get_num_threads() == 1
    other.__exit__(None, None, None)
    assert torch.get_num_threads() == torchs_own() == 4


def test_another_number_of_torchs_begins_anew() -> None:
    threads = Threads()
    with own_number_afterwards():
        run(threads, busy, 60)
    torch.set_num_threads(2)
    with own_number_afterwards():
        assert run(threads, quiet, 1) == [2]


def test_one_thread_is_left_alone() -> None:
    torch.set_num_threads(1)
    threads = Threads()
    with own_number_afterwards():
        assert set(run(threads, lambda _: (0.1, 0.01), 10 * STEPS)) == {1}
