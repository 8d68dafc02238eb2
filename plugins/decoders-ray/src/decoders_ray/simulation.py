"""Simulates a replica under a load from the measured costs of a step, to estimate the number of replicas and the seconds per request.

One replica is simulated, request by request and step by step, as the scheduler works: between two steps, rows join and leave, and
prompts are read in chunks. Requests are assumed to be distributed evenly over all replicas. The network, the start of replicas and
uneven distribution are left out; the `headroom` of :func:`replicas_for` allows for them.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from decoders.costs import CostCurve


@dataclass(frozen=True)
class Load:
    """The distribution of the requests' lengths.

    Attributes:
        prompt: mean number of tokens of a prompt.
        new: mean number of tokens of an answer.
        spread: standard deviation of the logarithm of both numbers; 0: all requests are equally long.
    """

    prompt: float = 500.0
    new: float = 200.0
    spread: float = 0.7

    def draw(self, chance: random.Random) -> tuple[int, int]:
        """The numbers of tokens of a random request's prompt and answer."""
        shift = -(self.spread**2) / 2  # the mean of a log-normal distribution exceeds its median
        sizes = (mean * math.exp(chance.gauss(shift, self.spread)) for mean in (self.prompt, self.new))
        prompt, new = (max(1, round(size)) for size in sizes)
        return prompt, new


@dataclass(frozen=True)
class Replica:
    """A replica of the model.

    Attributes:
        seconds: returns the seconds of a step, given the numbers of nodes per row, of rows, and of context tokens per row.
        rows: greatest number of rows that are decoded at a time.
        accepted: number of tokens that a row writes per step.
        nodes: number of nodes in a row's block.
        chunk: number of prompt tokens per pass; a pass costs as much as a step of this many nodes.
        shared: share of every prompt that the replica has read for earlier requests.
        overhead: seconds per request besides decoding.
    """

    seconds: Callable[[int, int, int], float]
    rows: int = 8
    accepted: float = 1.0
    nodes: int = 1
    chunk: int = 64
    shared: float = 0.0
    overhead: float = 0.003

    @classmethod
    def of_curve(cls, curve: CostCurve, compiled: bool = False, **options: float) -> Replica:
        """A replica with the measured costs of `curve`."""
        return cls(lambda nodes, rows, context: curve.seconds(nodes, rows, context, compiled), **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation of one replica.

    Attributes:
        requests: number of finished requests.
        tokens_per_second: new tokens per second.
        busy: share of the time in which the replica was working, prefills included.
        first: median and 95th percentile of the seconds to the first token.
        each: median and 95th percentile of the seconds per further token.
        waiting: mean number of requests in the queue.
    """

    requests: int
    tokens_per_second: float
    busy: float
    first: tuple[float, float]
    each: tuple[float, float]
    waiting: float


@dataclass
class _Row:
    arrived: float
    context: int
    left: int
    begun: float = 0.0
    written: float = 0.0


def simulate(replica: Replica, load: Load, rate: float, requests: int = 2000, seed: int = 0) -> Outcome:
    """Simulates a replica until `requests` have finished. Requests arrive at random, `rate` per second in the mean (a Poisson process).
    Percentiles leave out the first tenth of the requests.
    """
    chance = random.Random(seed)
    queue: deque[tuple[float, int, int]] = deque()
    rows: list[_Row] = []
    now = busy = waited = 0.0
    next_arrival = chance.expovariate(rate)
    ended, tokens, arrivals = 0, 0, 0
    first: list[float] = []
    each: list[float] = []
    costs: dict[tuple[int, int, int], float] = {}

    def cost(nodes: int, count: int, context: int) -> float:
        key = nodes, count, max(64, 64 * round(context / 64))
        if key not in costs:
            costs[key] = replica.seconds(*key)
        return costs[key]

    while ended < requests:
        while next_arrival <= now and arrivals < 2 * requests:
            queue.append((next_arrival, *load.draw(chance)))
            arrivals += 1
            next_arrival += chance.expovariate(rate)
        if not rows and not queue:
            now = next_arrival
            continue
        before = now
        if queue and len(rows) < replica.rows:
            arrived, prompt, new = queue.popleft()
            unread, done = round(prompt * (1 - replica.shared)), 0
            now += replica.overhead
            while done < unread:
                size = min(replica.chunk, unread - done)
                now += cost(size, 1, prompt - unread + done + size)
                done += size
            rows.append(_Row(arrived, prompt, new))
        else:
            now += cost(replica.nodes, len(rows), round(sum(row.context for row in rows) / len(rows)))
            for row in list(rows):
                written = row.written + min(replica.accepted, row.left - row.written)
                if not row.begun:
                    row.begun = now
                    first.append(now - row.arrived)
                row.context += round(written) - round(row.written)
                row.written = written
                if row.written >= row.left - 1e-9:
                    rows.remove(row)
                    ended, tokens = ended + 1, tokens + row.left
                    each.append((now - row.begun) / max(row.left - 1, 1))
        busy += now - before
        waited += (now - before) * len(queue)
    warm = len(first) // 10
    return Outcome(
        requests=ended, tokens_per_second=tokens / now, busy=busy / now, first=_percentiles(first[warm:]),
        each=_percentiles(each[warm:]), waiting=waited / now,
    )  # fmt: skip


def sustainable(
    replica: Replica, load: Load, first: float, each: float | None = None, requests: int = 2000, seed: int = 0
) -> tuple[float, Outcome]:
    """The highest sustainable rate, in requests per second, and the outcome at this rate. At a sustainable rate, 95 % of requests get
    their first token within `first` seconds, and 95 % take at most `each` seconds per further token.

    Raises:
        ValueError: a single request already exceeds these times.
    """

    def fine(outcome: Outcome) -> bool:
        return outcome.first[1] <= first and (each is None or outcome.each[1] <= each)

    lowest = 1e-3
    best = simulate(replica, load, lowest, requests, seed)
    if not fine(best):
        raise ValueError(
            f"a request by itself takes {best.first[1]:.2f} s to its first token and {best.each[1]:.3f} s per further token (95th "
            "percentile): allow more time, or take faster replicas"
        )
    low, high = lowest, lowest
    while high < 1e6:
        high *= 2
        outcome = simulate(replica, load, high, requests, seed)
        if not fine(outcome):
            break
        low, best = high, outcome
    for _ in range(12):
        middle = math.sqrt(low * high)
        outcome = simulate(replica, load, middle, requests, seed)
        if fine(outcome):
            low, best = middle, outcome
        else:
            high = middle
    return low, best


def replicas_for(rate: float, each: float, headroom: float = 0.7) -> int:
    """Number of replicas for `rate` requests per second. A replica sustains `each` requests per second, of which the share `headroom`
    is used.
    """
    return max(1, math.ceil(rate / (each * headroom)))


def _percentiles(values: list[float]) -> tuple[float, float]:
    """Median and 95th percentile."""
    largest = heapq.nlargest(max(1, len(values) // 20), values)
    return sorted(values)[len(values) // 2], largest[-1]
