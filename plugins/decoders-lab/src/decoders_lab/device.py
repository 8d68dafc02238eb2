"""Measures decoding on a device and the speed of its memory: steps by number of nodes, prefill, sampling, exactness."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from decoders.bench import machine
from decoders.bench.measurement import rotation
from decoders.bench.methods import PLAIN, Method, Sampling, strategy_methods
from decoders.bench.shapes import random_workloads
from decoders.bench.timed_call import decode, vocabulary_size, written
from decoders.bench.workloads import Workload
from decoders.errors import DecodersError
from decoders.settings import Settings
from decoders.strategy import Context, Draft, Sequences, Strategy

#: How tokens are drawn in measurements of sampling.
SAMPLING = Sampling(temperature=0.7, top_k=50, top_p=0.9)
#: Number of new tokens of the shorter calls. The difference in time between a longer and a shorter call comes from steps only.
SHORT = 8


@dataclass(frozen=True)
class Figure:
    """One measurement.

    Attributes:
        name: what was measured.
        value: the measured value; None if there is a `reason`.
        unit: unit of the value.
        ratio: ratio to the figure that `to` names; None if there is no such figure.
        reason: why the value is missing.
    """

    name: str
    value: float | None
    unit: str
    ratio: float | None = None
    to: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Exactness:
    """Whether a strategy writes plain decoding's tokens.

    Attributes:
        strategy: the strategy's name.
        identical: whether the tokens are the same; None if they were not compared.
        reason: why they were not compared, or which texts differ: greedy, sampled or both.
    """

    strategy: str
    identical: bool | None
    reason: str = ""


class FixedSettings(Settings):
    """The number of draft tokens."""

    length: int = Field(1, ge=1, description="Draft tokens of every step.")


class Fixed(Strategy):
    """Drafts the same tokens in every step, which are hardly ever accepted, to measure the cost of verifying this many nodes."""

    name = "fixed"
    summary = "Draft tokens that are hardly ever right."
    settings_class = FixedSettings
    on_device = True

    def start(self, context: Context) -> Tensor:
        return torch.full((context.rows, self.settings.length), 7, device=context.device)

    def propose(self, state: Tensor, sequences: Sequences) -> Draft:
        return Draft.chain(state)


def plain_decoding(model: PreTrainedModel, compile: bool) -> Method:
    """Plain decoding of `model` without stop tokens, because random text may stop at once."""
    method = strategy_methods(model, [PLAIN], decoders_config={"compile": compile})[0]
    return replace(method, arguments={**method.arguments, "eos_token_id": vocabulary_size(model)})


@dataclass
class DeviceBench:
    """Measures one model on its device.

    Attributes:
        plain: the result of :func:`plain_decoding` for the model.
        nodes: sizes of blocks; one node is always measured.
        prompts: lengths of prompts.
        new_tokens: number of new tokens of the longer calls.
        repeats: number of repeats of every measurement, of which the median is reported.
        seconds: after this time, no further block size and no sampling are measured, because each may have to be compiled.
        say: called with the name of each measurement, before the measurement.
    """

    plain: Method
    nodes: Sequence[int]
    prompts: Sequence[int]
    new_tokens: int = 128
    repeats: int = 3
    seconds: float = 60.0
    say: Callable[[str], None] = field(default=lambda what: None)

    def figures(self) -> Iterator[Figure]:
        """Yields all figures except exactness, in the order of the table. A measurement that fails gives a figure without a value."""
        self.say("measuring the memory's bandwidth")
        weights, device = machine.weight_bytes(self.plain.model), self.plain.model.device
        yield (copy := _measured("copy", "GB/s", lambda: (1e-9 * machine.copy_bandwidth(device), None)))
        limit = copy.value and 1e-6 * weights / copy.value
        yield Figure(f"weights, {weights / 1e9:.2f} GB at copy speed", limit, "ms", reason=copy.reason)
        workloads = random_workloads(vocabulary_size(self.plain.model), list(self.prompts))
        for number, workload in enumerate(workloads):
            name = f"prompt of {workload.input_ids.shape[1]:,}"
            self.say(f"first token, {name}")
            if not number:  # measured uncompiled: with the default settings, no call waits for the compiler
                yield _measured(f"first call, {name}", "s", partial(self._first_call, workload))
            yield _measured(f"first token, {name}", "ms", partial(self._first_token, workload))
        yield from self._steps(limit)

    def _first_call(self, workload: Workload) -> tuple[float, None]:
        return decode(self._uncompiled(), workload, 1).seconds, None

    def _first_token(self, workload: Workload) -> tuple[float, None]:
        for _ in range(2):
            decode(self.plain, workload, 1)
        return 1e3 * median(decode(self.plain, workload, 1).seconds for _ in range(self.repeats)), None

    def _steps(self, limit: float | None) -> Iterator[Figure]:
        """Yields plain decoding's figure, then figures of larger blocks and sampling. limit: milliseconds to copy the weights."""
        begun, text = time.monotonic(), random_workloads(vocabulary_size(self.plain.model), [64])[0]
        sampled = replace(self.plain, name="sampled", sampling=SAMPLING)
        others = [(self._of_nodes(count), "a step", "one node") for count in self.nodes if count > 1]
        methods = [
            (replace(self.plain, name="plain decoding"), "a token", "copy speed"),
            *others,
            (sampled, "a token", "greedy"),
        ]
        for number, (method, unit, beside) in enumerate(methods):
            what = f"{method.name}, {unit}"
            if number and time.monotonic() >= begun + self.seconds:
                yield Figure(what, None, "ms", reason=f"not begun within {self.seconds:g} s")
                continue

            def measure(method: Method = method, first: bool = not number) -> tuple[float, float | None]:
                if first:
                    one = self._in_turns(text, method)[0]
                    return one, limit and limit / one
                own, one = self._in_turns(text, method, self.plain)
                return own, own / one

            yield _measured(what, "ms", measure, beside)

    def _in_turns(self, text: Workload, *methods: Method) -> list[float]:
        """Milliseconds per step with each of `methods`, in their order, measured in turns after warming up."""
        self.say(f"warming up: {methods[0].name}")
        for method in methods:
            for _ in range(2):
                decode(method, text, self.new_tokens)
        calls: list[list[tuple[float, float]]] = [[] for _ in methods]
        for turn in range(self.repeats):
            self.say(f"measuring {methods[0].name}, round {turn + 1} of {self.repeats}")
            for number in rotation(list(range(len(methods))), turn):
                calls[number].append(self._two_calls(methods[number], text))
        # Seconds and steps have separate medians, so that a single delayed call has little effect.
        return [1e3 * median(seconds for seconds, _ in own) / median(steps for _, steps in own) for own in calls]

    def _two_calls(self, method: Method, text: Workload) -> tuple[float, float]:
        """The seconds and the number of steps by which a long call exceeds a short call."""
        (long, steps), (short, fewer) = (self._call(method, text, count) for count in (self.new_tokens, SHORT))
        return max(long - short, 1e-9), steps - fewer

    @staticmethod
    def _call(method: Method, text: Workload, count: int) -> tuple[float, int]:
        call = decode(method, text, count)
        assert call.report is not None, "methods of ours report"
        return call.decoding, call.report.steps

    def _uncompiled(self) -> Method:
        config = {**self.plain.arguments["decoders_config"], "compile": False}
        return replace(self.plain, arguments={**self.plain.arguments, "decoders_config": config})

    def _of_nodes(self, count: int) -> Method:
        strategy = Fixed(FixedSettings(length=count - 1))
        return replace(self.plain, name=f"{count} nodes", arguments={**self.plain.arguments, "strategy": strategy})


def _measured(name: str, unit: str, measure: Callable[[], tuple[float, float | None]], to: str = "") -> Figure:
    """A figure from the value and ratio that `measure` returns; any error becomes the reason of a missing value."""
    try:
        value, ratio = measure()
        return Figure(name, value, unit, ratio, to)
    except Exception as error:
        return Figure(name, None, unit, reason=_reason(error))


def _reason(error: Exception) -> str:
    """The message of an error, at most 300 characters. The class comes before it, unless it is one of this project's errors."""
    text = " ".join(str(error).split())[:300]
    return text if text and isinstance(error, DecodersError) else f"{type(error).__name__}: {text}"


def exactness(
    model: PreTrainedModel, draft: PreTrainedModel | None, workload: Workload, new_tokens: int, say: Callable[[str], None]
) -> Iterator[Exactness]:  # fmt: skip
    """Yields, for every registered strategy, whether its greedy and sampled texts equal plain decoding's, with default settings."""
    config = {"compile": "auto"}
    plain, kinds = strategy_methods(model, [PLAIN], decoders_config=config)[0], (None, SAMPLING)
    say("exactness: plain decoding")
    try:
        expected = {kind: _tokens(replace(plain, sampling=kind), workload, new_tokens) for kind in kinds}
    except Exception as error:
        yield Exactness(PLAIN, None, _reason(error))
        return
    for method in strategy_methods(model, None, draft, decoders_config=config):
        if method.name == PLAIN:
            continue
        say(f"exactness: {method.name}")
        if reason := method.skip_reason(workload.rows) or ("" if method.exact else "other distribution, by design"):
            yield Exactness(method.name, None, reason)
            continue
        try:
            texts = {kind: _tokens(replace(method, sampling=kind), workload, new_tokens) for kind in kinds}
        except Exception as error:  # heads are missing, or the strategy has a fault
            yield Exactness(method.name, None, _reason(error))
            continue
        different = ["sampled" if kind else "greedy" for kind in kinds if texts[kind] != expected[kind]]
        yield Exactness(method.name, not different, f"{' and '.join(different)} text differs" * bool(different))


def _tokens(method: Method, workload: Workload, new_tokens: int) -> list[list[int]]:
    return written(method, workload, decode(method, workload, new_tokens).sequences)
