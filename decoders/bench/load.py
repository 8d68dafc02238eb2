"""Runs a load of many requests of different lengths in a scheduler, in batches of ``generate``, and in transformers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..scheduling.scheduler import Scheduler
from .synthetic import Synthetic
from .timed_call import rehearse

#: Spread of the requests' numbers of new tokens: standard deviation of their logarithm.
SPREAD = 0.9
#: Seconds without a result after which a run of transformers' continuous batching is ended.
PATIENCE = 120.0


@dataclass(frozen=True)
class Arrival:
    """A request of the load.

    Attributes:
        seconds: time of arrival, in seconds after the start.
        prompt: token ids.
        new_tokens: number of tokens to generate; there are no stop tokens.
    """

    seconds: float
    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True)
class LoadResult:
    """The result of one method under a load.

    Attributes:
        method: the method's name.
        seconds: seconds from the first arrival to the last end.
        tokens: number of requested tokens, of all requests.
        first_token: per request, seconds from arrival to first token; empty if the method does not report first tokens.
        latency: per request, seconds from arrival to end.
        per_token: per request with more than one token, seconds from first token to end, divided by the number of further tokens.
    """

    method: str
    seconds: float
    tokens: int
    first_token: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def goodput(self, within: float) -> float:
        """The number of requests per second that ended within `within` seconds of their arrival."""
        return sum(latency <= within for latency in self.latency) / self.seconds


def arrivals(
    prompts: Sequence[list[int]], count: int, median: float, longest: int, rate: float | None = None, seed: int = 0,
    spread: float = SPREAD,
) -> list[Arrival]:  # fmt: skip
    """`count` requests whose numbers of new tokens follow a log-normal distribution, cut off at `longest`.

    Args:
        prompts: token ids of the prompts. Request ``i`` gets prompt ``i % len(prompts)``.
        median, longest: median and greatest number of new tokens.
        rate: arrivals per second, a Poisson process; None: all arrive at once.
        spread: standard deviation of the logarithm of the numbers of new tokens; 0: all requests have the median.
    """
    drawn, now, requests = random.Random(seed), 0.0, []
    for number in range(count):
        new_tokens = min(max(round(median * drawn.lognormvariate(0, spread)), 1), longest)
        requests.append(Arrival(now, prompts[number % len(prompts)], new_tokens))
        now += drawn.expovariate(rate) if rate is not None else 0.0
    return requests


def rehearse_load(
    model: PreTrainedModel, drafters: Sequence[Synthetic], load: Sequence[Arrival], options: Mapping[str, Any]
) -> None:
    """Writes the texts of a load by plain decoding, and stores them in synthetic drafters (``Synthetic.learn``)."""
    longest: dict[tuple[int, ...], int] = {}
    for request in load if drafters else ():
        longest[tuple(request.prompt)] = max(longest.get(tuple(request.prompt), 0), request.new_tokens)
    for prompt, new_tokens in longest.items():
        ids = torch.tensor([prompt], device=model.device)
        call = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens, "do_sample": False,
            "return_dict_in_generate": True, **options,
        }  # fmt: skip
        for drafter in drafters:
            rehearse(drafter, model.generate, call)  # type: ignore[arg-type]


def scheduled(
    model: PreTrainedModel, strategy: str | Synthetic, load: Sequence[Arrival], rows: int, options: Mapping[str, Any]
) -> LoadResult:
    """Runs the load in a :class:`decoders.Scheduler` with `rows` rows."""
    ends = [0.0] * len(load)

    def note(number: int) -> Callable[[Any], None]:
        def ended(_: Any) -> None:
            ends[number] = time.monotonic()

        return ended

    slots = max(len(request.prompt) + request.new_tokens for request in load)
    with Scheduler(model, strategy=strategy, rows=rows, queue=len(load), slots=slots, **options) as scheduler:
        began, generations = time.monotonic(), []
        for number, request in enumerate(load):
            _sleep_until(began + request.seconds)
            generation = scheduler.submit(request.prompt, max_new_tokens=request.new_tokens, do_sample=False)
            generation.add_done_callback(note(number))
            generations.append(generation)
        for generation in generations:
            generation.result()
    return result_of(
        f"scheduler, {strategy}", load, began, [generation.times[0][0] for generation in generations], ends
    )


def in_batches(
    model: PreTrainedModel, strategy: str | Synthetic | None, load: Sequence[Arrival], rows: int,
    options: Mapping[str, Any],
) -> LoadResult:  # fmt: skip
    """Runs the load in batches of ``generate``. A batch consists of up to `rows` requests that have arrived, and lasts until its
    longest row ends. strategy: None for transformers' own ``generate``.
    """
    ours = {} if strategy is None else {"strategy": strategy, **options}
    waiting, ends, began = list(range(len(load))), [0.0] * len(load), time.monotonic()
    while waiting:
        _sleep_until(began + load[waiting[0]].seconds)
        now = max(time.monotonic() - began, load[waiting[0]].seconds)
        batch = [number for number in waiting[:rows] if load[number].seconds <= now]
        waiting = waiting[len(batch) :]
        longest = max(len(load[number].prompt) for number in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, number in enumerate(batch):
            prompt = load[number].prompt
            ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = torch.tensor(prompt), 1
        new_tokens = max(load[number].new_tokens for number in batch)
        model.generate(  # type: ignore[operator]
            ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=new_tokens, do_sample=False,
            **{"pad_token_id": 0, **ours},
        )  # fmt: skip
        for number in batch:
            ends[number] = time.monotonic()
    name = "transformers, batches" if strategy is None else f"batches, {strategy}"
    return result_of(name, load, began, [], ends)


def continuous(model: PreTrainedModel, load: Sequence[Arrival]) -> LoadResult:
    """Runs the load in transformers' continuous batching.

    Raises:
        RuntimeError: transformers returned no result for :data:`PATIENCE` seconds.
    """
    config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1)
    ends, numbers = [0.0] * len(load), {f"load-{number}": number for number in range(len(load))}
    with model.continuous_batching_context_manager(generation_config=config) as manager:  # type: ignore[operator]
        began = time.monotonic()

        def submit() -> None:
            for name, number in numbers.items():
                request = load[number]
                _sleep_until(began + request.seconds)
                manager.add_request(request.prompt, request_id=name, max_new_tokens=request.new_tokens)

        sender = threading.Thread(target=submit, daemon=True)
        sender.start()
        for _ in load:
            result = manager.get_result(timeout=PATIENCE)
            if result is None:
                raise RuntimeError(f"transformers' continuous batching returned nothing for {PATIENCE:.0f} seconds")
            ends[numbers[result.request_id]] = time.monotonic()
        sender.join()
    return result_of("transformers, continuous", load, began, [], ends)


def _sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.monotonic(), 0.0))


def result_of(
    method: str, load: Sequence[Arrival], began: float, firsts: Sequence[float], ends: Sequence[float]
) -> LoadResult:
    """The result of a load, from its start time, the times of the requests' first tokens (if known) and their end times."""
    arrived = [began + request.seconds for request in load]
    further = [
        (end - first) / (request.new_tokens - 1)
        for request, first, end in zip(load, firsts, ends, strict=False)
        if request.new_tokens > 1
    ]
    return LoadResult(
        method, max(ends) - began, sum(request.new_tokens for request in load),
        [first - at for first, at in zip(firsts, arrived, strict=False)],
        [end - at for end, at in zip(ends, arrived, strict=True)], further,
    )  # fmt: skip
