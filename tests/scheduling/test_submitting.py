"""Requests are submitted without waiting for the step that is running."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import decoders
from decoders.errors import InputError, UnsupportedError
from decoders.hf import grammars
from decoders.scheduling import scheduler as scheduler_module

from .conftest import scheduler_of, text_of


def test_a_request_is_submitted_while_the_model_is_busy(llama: PreTrainedModel) -> None:
    engine = vars(llama)["generate"].engine()
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.lock:
            held.set()
            free.wait(60)

    with scheduler_of(llama) as scheduler:
        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(60)
        submitted: list[Any] = []
        asks = threading.Thread(target=lambda: submitted.append(scheduler.submit(text_of(0, 5), max_new_tokens=3)))
        asks.start()
        asks.join(30)
        try:
            assert submitted and not submitted[0].done()
        finally:
            free.set()
            holder.join()
        assert len(submitted[0].result(60)[0]) == 8


def test_no_step_of_others_waits_while_a_grammar_is_compiled(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps of a request that comes later are made before the compilation may end, and none of them is another's."""
    ready, compiled, options = threading.Event(), grammars.compiled, dict(max_new_tokens=12, eos_token_id=1)

    def held(*arguments: Any) -> Any:
        assert ready.wait(60)
        return compiled(*arguments)

    monkeypatch.setattr(grammars, "compiled", held)
    with scheduler_of(llama) as scheduler, ThreadPoolExecutor(1) as threads:
        asking = threads.submit(
            scheduler.submit, text_of(1, 9), grammar=decoders.regex("[ab]{3}x{4,}"), seed=3, **options
        )
        try:
            other = scheduler.submit(text_of(0, 9), **options)
            assert other.result(60).shape[1] > 9 and not asking.done()
            assert other.report is not None and other.report.steps == sum(other.report.new_tokens)
        finally:
            ready.set()
        assert asking.result(60).result(60).shape[1] > 9


def test_weights_that_were_written_to_are_seen_by_the_next_request(llama: PreTrainedModel) -> None:
    with scheduler_of(llama) as scheduler:
        before = scheduler.submit(text_of(0, 5), max_new_tokens=8).result(60)
        weight = llama.lm_head.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(weight.flip(0))
        changed = scheduler.submit(text_of(0, 5), max_new_tokens=8).result(60)
        with torch.no_grad():
            weight.copy_(kept)
        assert not torch.equal(before, changed)
        assert torch.equal(before, scheduler.submit(text_of(0, 5), max_new_tokens=8).result(60))


def test_who_submits_and_a_scheduler_that_rests_give_their_openmp_threads_back(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []
    monkeypatch.setattr(scheduler_module, "release_threads", lambda: released.append(threading.current_thread().name))
    with scheduler_of(llama) as scheduler:
        released.clear()
        scheduler.submit(text_of(0, 5), max_new_tokens=3).result(60)
        assert threading.current_thread().name in released
        until = time.monotonic() + 60
        while "decoders-scheduler" not in released and time.monotonic() < until:
            time.sleep(0.01)
        assert "decoders-scheduler" in released


def test_a_misspelt_keyword_has_the_nearest_one_beside_it(llama: PreTrainedModel) -> None:
    """Each of them passes the keywords that it does not know to ``generate``."""
    with scheduler_of(llama) as scheduler:
        for call, name, near in (
            (decoders.Scheduler, "row", "rows"), (decoders.Scheduler, "longestpause", "longest_pause"),
            (scheduler.submit, "priorty", "priority"), (decoders.generate_many, "order", "ordered"),
            (decoders.warmup, "stratgies", "strategies"), (decoders.calibrate, "second", "seconds"),
        ):  # fmt: skip
            model = [] if call == scheduler.submit else [llama]
            prompt = [[[1, 2]]] if call == decoders.generate_many else [[1, 2]] if call == scheduler.submit else []
            with pytest.raises(UnsupportedError, match=rf"has no argument {name}=\. Did you mean {near}=\?"):
                call(*model, *prompt, **{name: 3})  # type: ignore[operator]
        with pytest.raises(UnsupportedError, match=r"generate_many\(\) has no argument queue=: it submits"):
            decoders.generate_many(llama, [[1, 2]], queue=3)
        assert not scheduler.waiting and not scheduler.running


def test_a_prompt_on_the_meta_device_is_refused(llama: PreTrainedModel) -> None:
    with scheduler_of(llama) as scheduler, pytest.raises(InputError, match="the prompt is on the meta device"):
        scheduler.submit(torch.ones(3, dtype=torch.int64, device="meta"))
