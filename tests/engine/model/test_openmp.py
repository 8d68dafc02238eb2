"""Teams of OpenMP threads end with the work of the thread that they belong to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import StoppingCriteria

import decoders
from decoders.engine.model import call_lock, threads
from decoders.engine.model.call_lock import CallLock
from decoders.testing import prompts, tiny_model


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    threads.release_threads()
    torch.set_num_threads(before)


def tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def becomes(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def run_parallel() -> torch.Tensor:
    return torch.arange(1 << 20, dtype=torch.float32).exp_()


@pytest.mark.skipif(threads._pause() is None, reason="OpenMP is not libgomp here")
def test_a_thread_gives_its_team_back_and_gets_another_one(two_threads: None) -> None:
    expected, busy = run_parallel(), tasks()
    threads.release_threads()
    assert becomes(lambda: tasks() == busy - 1)
    before = tasks()
    assert torch.equal(run_parallel(), expected)
    assert tasks() == before + 1
    threads.release_threads()
    assert becomes(lambda: tasks() == before)


@pytest.mark.skipif(threads._pause() is None, reason="OpenMP is not libgomp here")
@pytest.mark.parametrize("fails", [False, True])
def test_a_call_gives_its_team_back(two_threads: None, fails: bool) -> None:
    class Criterion(StoppingCriteria):
        def __call__(self, *_: object, **__: object) -> torch.Tensor:
            run_parallel()
            if fails:
                raise ValueError("of the criterion")
            return torch.zeros(1, dtype=torch.bool)

    model = decoders.enable(tiny_model("llama"))
    threads.release_threads()
    before = tasks()
    with pytest.raises(ValueError, match="of the criterion") if fails else nullcontext():
        model.generate(
            **prompts(1), strategy="autoregressive", max_new_tokens=2, do_sample=False, stopping_criteria=[Criterion()],
            decoders_config={"compile": False},
        )  # fmt: skip
    assert becomes(lambda: tasks() <= before)


def test_wheels_for_linux_have_the_openmp_that_is_expected() -> None:
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    assert (threads._pause() is not None) == ("libgomp" in loaded and "libiomp" not in loaded)


def test_who_waits_for_a_model_and_who_leaves_it_to_others_give_their_teams_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[str] = []
    monkeypatch.setattr(call_lock, "release_threads", lambda: released.append(threading.current_thread().name))
    lock = CallLock()
    with lock:
        pass
    assert not released  # nobody else decodes: the team is kept
    with lock:
        other = threading.Thread(target=lambda: lock.__enter__() and lock.__exit__(None, None, None), name="other")
        other.start()
        assert becomes(lambda: "other" in released)
    other.join()
    assert released == ["other", threading.current_thread().name]


def test_a_lock_goes_to_who_waits_in_order_but_for_those_that_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, order = CallLock(), list[str]()
    monkeypatch.setattr(call_lock, "release_threads", lambda: None)

    def take(name: str, first: bool) -> None:
        lock.acquire(first)
        with lock:  # it is re-entrant
            order.append(name)
        lock.release()

    def begin(name: str, first: bool = False) -> threading.Thread:
        count = len(lock._waiting)
        thread = threading.Thread(target=take, args=(name, first))
        thread.start()
        assert becomes(lambda: len(lock._waiting) == count + 1)
        return thread

    with lock:
        others = [begin("a"), begin("b"), begin("first", first=True)]
    take("again", False)  # whoever gives it back and wants it again waits for those that waited
    for each in others:
        each.join()
    assert order == ["first", "a", "b", "again"] and lock._owner is None


@pytest.mark.parametrize("given", [False, True], ids=["while it waits", "as it is given"])
def test_who_is_interrupted_leaves_a_lock_to_the_others(monkeypatch: pytest.MonkeyPatch, given: bool) -> None:
    lock, interrupted, released = CallLock(), list[bool](), threading.Event()

    def interrupt() -> None:
        if threading.current_thread() is not threading.main_thread():
            assert not given or released.wait(60)
            raise KeyboardInterrupt

    def wait() -> None:
        try:
            lock.acquire()
        except KeyboardInterrupt:
            interrupted.append(True)

    monkeypatch.setattr(call_lock, "release_threads", interrupt)
    with lock:
        thread = threading.Thread(target=wait)
        thread.start()
        assert becomes(lambda: bool(lock._waiting if given else interrupted))
    released.set()
    thread.join()
    assert interrupted and lock._owner is None and not lock._waiting
