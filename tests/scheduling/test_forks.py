"""A scheduler in a child made by ``os.fork``: its thread lives on in the parent only."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import decoders
from decoders.errors import CancelledError

from .conftest import scheduler_of, text_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
MANY: dict[str, Any] = {"rows": 2, "pad_token_id": 0, "decoders_config": {"compile": False}}


def code_of(child: Callable[[], bool]) -> int | None:
    """The exit code of a forked child: 0 where `child` is true, None if it waits for ever."""
    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(not child()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads, which is what is tried here
        process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    return code


def is_refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except CancelledError as error:
        return "belongs to the process from which this process was forked: create another" in str(error)
    return False


def test_a_forked_child_is_told_at_once_that_the_scheduler_is_not_its_own(llama: PreTrainedModel) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not live on in a child
    with scheduler_of(llama, max_new_tokens=100) as scheduler:
        begun = [scheduler.submit(text_of(n, 4)) for n in range(5)]
        locked, free = threading.Event(), threading.Event()

        def hold() -> None:
            with scheduler._changed:
                locked.set()
                free.wait(60)

        def child() -> bool:
            refused = is_refused(lambda: scheduler.submit(text_of(0, 4)))
            refused &= is_refused(lambda: scheduler.submit(text_of(0, 4), wait=True))
            refused &= all(is_refused(generation.result) for generation in begun)
            scheduler.close()
            with scheduler_of(llama, max_new_tokens=2) as own:
                return refused and not scheduler.alive and len(own.submit(text_of(0, 4)).result(60)[0]) == 6

        holder = threading.Thread(target=hold)
        holder.start()
        locked.wait(60)
        try:
            assert code_of(child) == 0
        finally:
            free.set()
            holder.join()
        assert all(len(generation.result(60)[0]) == 104 for generation in begun), "the parent goes on"


def test_a_forked_child_does_not_wait_for_the_completions_of_its_parent(llama: PreTrainedModel) -> None:
    prompts = [{"prompt": text_of(n, 4), "max_new_tokens": 150 if n else 2} for n in range(4)]
    completions = decoders.generate_many(llama, prompts, **MANY)
    first = next(completions)
    assert code_of(lambda: is_refused(lambda: list(completions))) == 0
    assert [done.index for done in [first, *completions]] == [0, 1, 2, 3]
