"""Ten thousand requests through one scheduler, a fifth of them cancelled or broken: none lost, none mixed up, memory flat."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from decoders.errors import CancelledError

from .conftest import scheduler_of, text_of, write_alone

COUNT = 10_000
#: The process may grow by this much between the second thousand and the last; its first thousand fill caches.
GROWTH = 24 * 2**20


class Breaking:
    """A streamer that raises at the second piece."""

    def __init__(self) -> None:
        self.pieces = 0

    def put(self, value: torch.Tensor) -> None:
        self.pieces += 1
        if self.pieces == 2:
            raise OSError("the reader has gone")

    def end(self) -> None: ...


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["autoregressive", "suffix"])
def test_ten_thousand_requests(llama: PreTrainedModel, strategy: str) -> None:
    kinds = [(text_of(n, 2 + n), 1 + n % 7) for n in range(24)]
    want = [write_alone(llama, ids, max_new_tokens=new) for ids, new in kinds]
    outcomes = {"finished": 0, "cancelled": 0, "broken": 0}
    resident: list[int] = []

    def settle(number: int, generation: Any) -> None:
        ids, _ = kinds[number % 24]
        error = generation.exception(120)
        if error is None:
            assert generation.result()[0, len(ids) :].tolist() == want[number % 24], f"request {number}"
            outcomes["finished"] += 1
        elif number % 10 == 3:
            assert isinstance(error, CancelledError), f"request {number}: {error!r}"
            outcomes["cancelled"] += 1
        else:
            assert number % 10 == 7 and isinstance(error, OSError), f"request {number}: {error!r}"
            outcomes["broken"] += 1

    with scheduler_of(llama, rows=8, queue=64, strategy=strategy) as scheduler:
        open_requests: list[tuple[int, Any]] = []
        for number in range(COUNT):
            ids, new = kinds[number % 24]
            more = {"streamer": Breaking()} if number % 10 == 7 else {}
            generation = scheduler.submit(ids, max_new_tokens=new, wait=True, **more)
            if number % 10 == 3:
                generation.cancel()
            open_requests.append((number, generation))
            if len(open_requests) == 64:
                for each in open_requests:
                    settle(*each)
                open_requests.clear()
            if (number + 1) % 1000 == 0:
                gc.collect()
                resident.append(psutil.Process().memory_info().rss)
        for each in open_requests:
            settle(*each)
        assert scheduler.waiting == scheduler.running == 0
    print("MiB after each thousand:", [size >> 20 for size in resident], outcomes)
    assert sum(outcomes.values()) == COUNT and outcomes["finished"] >= 0.8 * COUNT
    assert outcomes["cancelled"] and outcomes["broken"]
    assert resident[-1] - resident[1] < GROWTH
