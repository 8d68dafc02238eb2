"""Makes and times one call of one method. Streamers measure the times of tokens, and count transformers' steps.

After a call, the models' configs are as they were before.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..common.transformers_compat import stop_tokens
from ..enabling import graphs_compiled
from .machine import synchronize
from .methods import PLAIN, Method
from .synthetic import Synthetic
from .workloads import Workload

if TYPE_CHECKING:
    from ..report import Report

_GREEDY = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}


@dataclass(frozen=True)
class TimedCall:
    """One finished call.

    Attributes:
        sequences: ``[B, P + new]``, the prompts and the new tokens.
        seconds: wall time, compilation included.
        compile_seconds: seconds spent on compiling.
        compilations: number of graphs that were compiled.
        report: the loop's report; None for transformers.
        steps: number of passes of the target, if another engine reports it.
    """

    sequences: Tensor
    seconds: float
    compile_seconds: float
    compilations: int
    report: Report | None
    steps: int | None = None

    @property
    def decoding(self) -> float:
        """Wall seconds, compilation excluded."""
        return self.seconds - self.compile_seconds


def decode(method: Method, workload: Workload, new_tokens: int, streamer: Any = None) -> TimedCall:
    """Makes one call and times it as a whole; the device is synchronized before and after. Greedy, unless the method samples."""
    if method.engine is not None:
        return _decode_elsewhere(method, workload, new_tokens, streamer)
    model, sampling = method.model, method.sampling
    arguments: dict[str, Any] = {
        "input_ids": workload.input_ids.to(model.device),
        "attention_mask": workload.attention_mask.to(model.device),
        "max_new_tokens": new_tokens,
        "pad_token_id": pad_token(model),
        "return_dict_in_generate": True,
        **(_GREEDY if sampling is None else sampling.arguments()),
        **method.arguments,
    }
    if sampling is not None and method.ours:
        arguments["seed"] = sampling.seed
    elif sampling is not None:
        torch.manual_seed(sampling.seed)
    if streamer is not None:
        arguments["streamer"] = streamer
    # transformers' methods use the model's original `generate`, because ours may have a default strategy from the environment.
    loaded: Any = model  # PreTrainedModel has no `generate`, but the classes of loaded models have it
    generate = loaded.generate if method.ours else type(loaded).generate.__get__(loaded)
    drafter = arguments.get("strategy")
    if isinstance(drafter, Synthetic):
        rehearse(drafter, generate, arguments)
    with lent_configs(method), _unwarned(method):
        graphs = graphs_compiled()
        synchronize(model.device)
        started = time.perf_counter()
        output = generate(**arguments)
        synchronize(model.device)
        seconds = time.perf_counter() - started
    report = output.report if method.ours else None
    compiling = report.timings.compile if report is not None else 0.0
    return TimedCall(output.sequences.cpu(), seconds, compiling, graphs_compiled() - graphs, report)


def rehearse(drafter: Synthetic, generate: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Stores this call's text by plain decoding in `drafter`, unless the last call had the same prompts, seed and number of tokens."""
    ids, mask = arguments["input_ids"], arguments["attention_mask"].bool()
    key = ids.tolist(), arguments.get("seed"), arguments["max_new_tokens"]
    if drafter.rehearsed == key:
        return
    written = generate(**{name: value for name, value in arguments.items() if name != "streamer"} | {"strategy": PLAIN})
    for prompt, kept, row in zip(ids, mask, written.sequences[:, ids.shape[1] :].tolist(), strict=True):
        drafter.learn(prompt[kept].tolist(), row)
    drafter.rehearsed = key


def _decode_elsewhere(method: Method, workload: Workload, new_tokens: int, streamer: Any) -> TimedCall:
    """Times a call of another engine. The result's rows are padded as ``generate`` pads them. An exception in the streamer ends
    the call and is raised.
    """
    assert method.engine is not None
    ids, mask = workload.input_ids, workload.attention_mask
    prompts = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    raised: list[BaseException] = []

    def tell(tokens: list[int]) -> bool:
        try:
            streamer.put(torch.tensor(tokens))
        except BaseException as error:  # the exception must not pass through C++ code of the engine
            raised.append(error)
            return False
        return True

    started = time.perf_counter()
    if streamer is not None:
        streamer.put(ids)
    written = method.engine.generate(
        prompts, new_tokens, frozenset(stop_tokens(method.model)), None if streamer is None else tell
    )
    seconds = time.perf_counter() - started
    if raised:
        raise raised[0]
    if streamer is not None:
        streamer.end()
    longest = max(map(len, written.tokens), default=0)
    pad = pad_token(method.model)
    new = torch.tensor([row + [pad] * (longest - len(row)) for row in written.tokens], dtype=ids.dtype)
    sequences = torch.cat([ids.cpu(), new.reshape(ids.shape[0], -1)], 1)
    return TimedCall(sequences, seconds, 0.0, 0, None, written.steps)


@contextlib.contextmanager
def lent_configs(method: Method) -> Iterator[None]:
    """Replaces the generation configs of target and assistant by copies during a call of transformers.

    transformers reads the number of draft tokens from the assistant's config, not from the call, and its heuristic schedule writes
    the last number there. Without copies, later calls of this and other methods would start from that number.
    """
    models = [] if method.ours else [m for m in (method.model, method.assistant) if m is not None]
    own_configs = [m.generation_config for m in models]
    try:
        for model in models:
            model.generation_config = copy.deepcopy(model.generation_config)
        if models and method.assistant is not None:
            for name, value in method.assistant_config.items():
                setattr(method.assistant.generation_config, name, value)
        yield
    finally:
        for model, config in zip(models, own_configs, strict=True):
            model.generation_config = config


@contextlib.contextmanager
def _unwarned(method: Method) -> Iterator[None]:
    """Silences warnings about arguments that transformers itself passes to the assistant in assisted generation."""
    level = logging.get_verbosity()
    if method.assistant is not None:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def pad_token(model: PreTrainedModel) -> int:
    """The token that fills rows that have ended: the model's pad token, else its first stop token, else 0."""
    stops = stop_tokens(model)
    pad = model.generation_config.pad_token_id
    return pad if pad is not None else stops[0] if stops else 0


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of rows of the input embedding; for a cost-scaled model, the number of rows before it was scaled."""
    if own := getattr(model.config, "cost_scaled_vocabulary", None):
        return int(own)
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


Decode = Callable[..., TimedCall]


class _FirstToken(Exception):
    """Raised by a streamer, to end a call at its first token."""


class Stamps(BaseStreamer):
    """A streamer that notes the time of every call of `put`, except the first call, which brings the prompt.

    transformers calls `put` once for each forward pass of the target, however many tokens the pass commits. In assisted generation, the
    first pass is the prefill and already verifies draft tokens. The last `put` ends with the stop token or the last requested token,
    as our last step does. So tokens per `put` are comparable with our tokens per step.

    Args:
        first_only: whether to end the call at its first token, by raising an exception.
    """

    def __init__(self, first_only: bool = False) -> None:
        self.times: list[float] = []
        self._first_only, self._prompt_seen = first_only, False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.perf_counter())
            if self._first_only:
                raise _FirstToken
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing to close."""


@contextlib.contextmanager
def forwards(model: PreTrainedModel | None) -> Iterator[list[int]]:
    """Yields a list with one entry, the number of the assistant's passes so far. The prefill counts, because it drafts a token."""
    count = [0]
    if model is None:
        yield count
        return

    def counted(*_: Any) -> None:
        count[0] += 1

    with model.register_forward_hook(counted):
        yield count


def first_token(method: Method, workload: Workload, new_tokens: int, decode: Decode = decode) -> float | None:
    """Seconds from the start of a call to its first token; None if there is no token.

    On some devices, transformers passes tokens to the streamer one step late. The time for transformers then includes this step.
    """
    device = method.model.device
    synchronize(device)
    started = time.perf_counter()
    try:
        decode(method, workload, new_tokens, Stamps(first_only=True))
    except _FirstToken:
        return time.perf_counter() - started
    finally:
        synchronize(device)
    return None


def written(method: Method, workload: Workload, sequences: Tensor) -> list[list[int]]:
    """New tokens per row, up to and including the stop token. If the model has no stop token, padding is counted as text."""
    stops = set(stop_tokens(method.model))
    rows = []
    for row in sequences[:, workload.input_ids.shape[1] :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        rows.append(row[:end])
    return rows


def stamped(
    method: Method, workload: Workload, new_tokens: int, decode: Decode = decode
) -> tuple[TimedCall, dict[str, float | None]]:
    """Makes a call. Returns the call and its times, compilation included: `first_token`, seconds from the start; `pause`, the most
    seconds between two tokens; `tokens_per_second` of all rows after the first token, if each `put` brings one token per row.
    """
    synchronize(method.model.device)
    stamps, started = Stamps(), time.perf_counter()
    call = decode(method, workload, new_tokens, stamps)
    if not stamps.times:
        return call, {"first_token": None, "pause": None, "tokens_per_second": None}
    times = stamps.times
    span = times[-1] - times[0]
    return call, {
        "first_token": times[0] - started,
        "pause": max((b - a for a, b in pairwise(times)), default=None),
        "tokens_per_second": (len(times) - 1) * workload.rows / span if span > 0 else None,
    }


def compiled_share(report: Report | None) -> float | None:
    """Share of a call's steps that ran compiled; None for transformers."""
    return report.compiled_steps / report.steps if report is not None and report.steps else None
