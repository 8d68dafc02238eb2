"""What replicas would do under a load, from the measured costs of a step: how many it takes, how long requests wait, what it costs.

One replica is simulated, request by request and step by step, as the scheduler works: rows come and go between two steps, a
prompt is read in chunks between them. Requests are dealt out evenly, so many replicas are one replica under its share of the load.
What that leaves out: the network, the time a replica takes to start, and uneven dealing; `headroom` stands for them.
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
    """What requests are like.

    Attributes:
        prompt: mean tokens of a prompt.
        new: mean tokens of an answer.
        spread: of both: standard deviation of the logarithm. 0: all are alike.
    """

    prompt: float = 500.0
    new: float = 200.0
    spread: float = 0.7

    def draw(self, chance: random.Random) -> tuple[int, int]:
        """Tokens of one request's prompt and answer."""
        shift = -(self.spread**2) / 2  # so that the mean is the mean
        sizes = (mean * math.exp(chance.gauss(shift, self.spread)) for mean in (self.prompt, self.new))
        prompt, new = (max(1, round(size)) for size in sizes)
        return prompt, new


@dataclass(frozen=True)
class Replica:
    """A process with a model.

    Attributes:
        seconds: of a step, by nodes per row, rows and context per row (tokens).
        rows: decoded at a time, at most.
        accepted: tokens that a row writes per step.
        nodes: of a row's block.
        chunk: prompt tokens per pass; a pass of many tokens costs what its nodes cost.
        shared: share of every prompt that was read before and is kept.
        overhead: seconds per request beside decoding.
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
        """One whose steps cost what was measured."""
        return cls(lambda nodes, rows, context: curve.seconds(nodes, rows, context, compiled), **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Outcome:
    """What became of the requests of one replica.

    Attributes:
        requests: that ended.
        tokens_per_second: of answers.
        busy: share of the time in which something was decoded.
        first: median and 95th percentile of the seconds to the first token.
        each: the same of the seconds per further token.
        waiting: mean requests in the queue.
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
    """One replica to which `rate` requests per second come (Poisson), until `requests` have ended; the first tenth is not counted."""
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
    """The highest rate, requests per second, at which 95 of 100 requests have their first token within `first` seconds and further
    ones within `each`, and what it is like.

    Raises:
        ValueError: not even a request by itself does.
    """

    def fine(outcome: Outcome) -> bool:
        return outcome.first[1] <= first and (each is None or outcome.each[1] <= each)

    lowest = 1e-3
    best = simulate(replica, load, lowest, requests, seed)
    if not fine(best):
        raise ValueError(
            f"a request by itself takes {best.first[1]:.2f} s to its first token and {best.each[1]:.3f} s per further one (95th "
            "percentile): ask for less, or take faster replicas"
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
    """Replicas for `rate` requests per second where one sustains `each`, used to a share of `headroom`."""
    return max(1, math.ceil(rate / (each * headroom)))


def _percentiles(values: list[float]) -> tuple[float, float]:
    """Median and 95th percentile."""
    largest = heapq.nlargest(max(1, len(values) // 20), values)
    return sorted(values)[len(values) // 2], largest[-1]
