"""What decoding comes to on a device, beside what its memory can do: steps by nodes, prompts, sampling, and whether texts are exact."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from decoders.bench import machine
from decoders.bench.call import decode, vocabulary_size, written
from decoders.bench.measurement import rotation
from decoders.bench.methods import PLAIN, Method, Sampling, strategy_methods
from decoders.bench.prompts import Workload
from decoders.bench.shapes import random_workloads
from decoders.errors import ContextLengthError, DecodersError
from decoders.settings import Settings
from decoders.strategy import Context, Draft, Sequences, Strategy

#: How tokens are drawn where sampling is measured.
SAMPLING = Sampling(temperature=0.7, top_k=50, top_p=0.9)
#: New tokens of the calls that the longer ones are compared with: what both do besides steps cancels out.
SHORT = 8


@dataclass(frozen=True)
class Figure:
    """One measurement.

    Attributes:
        name: what was measured.
        value: None: there is none, see `reason`.
        unit: of the value.
        ratio: to what `to` names; None: to nothing.
        reason: why there is no value.
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
        strategy: its name.
        identical: None: it was not compared, see `reason`.
        reason: why not, or where the texts differ first.
    """

    strategy: str
    identical: bool | None
    reason: str = ""


class FixedSettings(Settings):
    """How many draft tokens."""

    length: int = Field(1, ge=1, description="Draft tokens of every step.")


class Fixed(Strategy):
    """Drafts the same tokens in every step, hardly ever right: what verifying so many nodes costs."""

    name = "fixed"
    summary = "Draft tokens that are hardly ever right."
    settings_class = FixedSettings
    on_device = True

    def start(self, context: Context) -> Tensor:
        return torch.full((context.rows, self.settings.length), 7, device=context.device)

    def propose(self, state: Tensor, sequences: Sequences) -> Draft:
        return Draft.chain(state)


def plain_decoding(model: PreTrainedModel, compile: bool) -> Method:
    """Plain decoding of `model`, which never ends by itself: random text may say stop at once."""
    method = strategy_methods(model, [PLAIN], decoders_config={"compile": compile})[0]
    return replace(method, arguments={**method.arguments, "eos_token_id": vocabulary_size(model)})


@dataclass
class DeviceBench:
    """Measures one model where it is.

    Attributes:
        plain: plain decoding of the model, of :func:`plain_decoding`.
        nodes: sizes of blocks; one node is always measured.
        prompts: lengths of prompts.
        new_tokens: of the longer calls.
        repeats: of every measurement; the median counts.
        seconds: after so many no further size of a block is begun, nor sampling: each may have to be compiled.
        say: called with what is going to be done.
    """

    plain: Method
    nodes: Sequence[int]
    prompts: Sequence[int]
    new_tokens: int = 128
    repeats: int = 3
    seconds: float = 60.0
    say: Callable[[str], None] = field(default=lambda what: None)

    def figures(self) -> Iterator[Figure]:
        """All but exactness, in the order of the table."""
        model = self.plain.model
        self.say("measuring the memory's bandwidth")
        speed = machine.copy_bandwidth(model.device)
        weights = machine.weight_bytes(model)
        yield Figure("copy", speed / 1e9, "GB/s")
        yield Figure(f"weights, {weights / 1e9:.2f} GB at copy speed", 1e3 * weights / speed, "ms")
        yield from self._first_tokens()
        yield from self._steps(1e3 * weights / speed)

    def _first_tokens(self) -> Iterator[Figure]:
        vocabulary = vocabulary_size(self.plain.model)
        for number, workload in enumerate(random_workloads(vocabulary, list(self.prompts))):
            length = workload.input_ids.shape[1]
            name = f"first token, prompt of {length:,}"
            self.say(name)
            try:
                if not number:  # as by default, nothing waits for the compiler
                    yield Figure(
                        f"first call, prompt of {length:,}", decode(self._uncompiled(), workload, 1).seconds, "s"
                    )
                for _ in range(2):
                    decode(self.plain, workload, 1)
                times = [decode(self.plain, workload, 1).seconds for _ in range(self.repeats)]
            except ContextLengthError as error:
                yield Figure(name, None, "ms", reason=str(error))
                continue
            yield Figure(name, 1e3 * median(times), "ms")

    def _steps(self, limit: float) -> Iterator[Figure]:
        """Plain decoding, larger blocks, sampling. limit: milliseconds of reading the weights at copy speed."""
        begun, text = time.monotonic(), random_workloads(vocabulary_size(self.plain.model), [64])[0]
        sampled = replace(self.plain, sampling=SAMPLING)
        methods = {"1": self.plain} | {str(n): self._of_nodes(n) for n in self.nodes if n > 1} | {"sampled": sampled}
        measured: dict[str, Method] = {}
        for name, method in methods.items():
            if not measured or time.monotonic() < begun + self.seconds:
                self.say(f"warming up: {_described(name)}")
                for _ in range(2):
                    decode(method, text, self.new_tokens)
                measured[name] = method
        pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in measured}
        for turn in range(self.repeats):
            self.say(f"measuring steps, round {turn + 1} of {self.repeats}")
            for name in rotation(list(measured), turn):
                pairs[name].append(self._two_calls(measured[name], text))
        # Medians of each length by themselves: a call that was held up counts for little.
        times = {}
        for name, calls in pairs.items():
            times[name] = 1e3 * median(seconds for seconds, _ in calls) / median(steps for _, steps in calls)
        one = times["1"]
        yield Figure("plain decoding, a token", one, "ms", limit / one, "copy speed")
        for name in list(methods)[1:]:
            what = f"{_described(name)}, a {'token' if name == 'sampled' else 'step'}"
            if name in times:
                yield Figure(what, times[name], "ms", times[name] / one, "greedy" if name == "sampled" else "one node")
            else:
                yield Figure(what, None, "ms", reason=f"not begun within {self.seconds:g} s")

    def _two_calls(self, method: Method, text: Workload) -> tuple[float, float]:
        """Seconds and steps by which a long call exceeds a short one."""
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


def _described(name: str) -> str:
    return "sampled" if name == "sampled" else "plain decoding" if name == "1" else f"{name} nodes"


def exactness(
    model: PreTrainedModel, draft: PreTrainedModel | None, workload: Workload, new_tokens: int, say: Callable[[str], None]
) -> list[Exactness]:  # fmt: skip
    """Every registered strategy beside plain decoding, greedy and sampled, on the same rows, as by default."""
    config = {"compile": "auto"}
    plain, kinds = strategy_methods(model, [PLAIN], decoders_config=config)[0], (None, SAMPLING)
    found = []
    say("exactness: plain decoding")
    expected = {kind: _tokens(replace(plain, sampling=kind), workload, new_tokens) for kind in kinds}
    for method in strategy_methods(model, None, draft, decoders_config=config):
        if method.name == PLAIN:
            continue
        say(f"exactness: {method.name}")
        if reason := method.skip_reason(workload.rows) or ("" if method.exact else "other distribution, by design"):
            found.append(Exactness(method.name, None, reason))
            continue
        try:
            texts = {kind: _tokens(replace(method, sampling=kind), workload, new_tokens) for kind in kinds}
        except DecodersError as error:  # heads that were never trained
            found.append(Exactness(method.name, None, str(error)))
            continue
        different = ["sampled" if kind else "greedy" for kind in kinds if texts[kind] != expected[kind]]
        found.append(Exactness(method.name, not different, f"{' and '.join(different)} text differs" * bool(different)))
    return found


def _tokens(method: Method, workload: Workload, new_tokens: int) -> list[list[int]]:
    return written(method, workload, decode(method, workload, new_tokens).sequences)
