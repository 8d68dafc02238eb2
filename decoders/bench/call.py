"""One timed call of one method; the models' own configs stay as they are."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..engine.model.compiled.functions import compilations

if TYPE_CHECKING:
    from ..report import Report
    from .batches import Workload
    from .methods import Method

_GREEDY = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}


@dataclass(frozen=True)
class TimedCall:
    """One finished call.

    Attributes:
        sequences: ``[B, P + new]``.
        seconds: wall time, compilation included.
        compile_seconds: spent on compiling.
        compilations: graphs that were compiled.
        report: the loop's own, None of transformers.
        steps: passes of the target that another engine tells.
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
    """One call, timed as a whole with the device waited for at both ends. Greedy, unless the method samples."""
    if method.engine is not None:
        from .beside import decode as decode_beside

        sequences, seconds, steps = decode_beside(method, workload, new_tokens, streamer)
        return TimedCall(sequences, seconds, 0.0, 0, None, steps)
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
    # transformers' own must not pass through ours, whose default strategy may be set in the environment.
    loaded: Any = model  # its type does not tell `generate`, which comes with the class that was loaded
    generate = loaded.generate if method.ours else type(loaded).generate.__get__(loaded)
    with lent_configs(method), _unwarned(method):
        graphs = compilations()
        synchronize(model.device)
        started = time.perf_counter()
        output = generate(**arguments)
        synchronize(model.device)
        seconds = time.perf_counter() - started
    report = output.report if method.ours else None
    compiling = report.timings.compile if report is not None else 0.0
    return TimedCall(output.sequences.cpu(), seconds, compiling, compilations() - graphs, report)


@contextlib.contextmanager
def lent_configs(method: Method) -> Iterator[None]:
    """For the length of a call of transformers' own, copies in the place of both models' generation configs.

    transformers reads how many tokens to draft from the assistant's config, not from the call, and under its heuristic
    schedule writes there what it ended with. Later calls, of other methods too, would start from that.
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
    """Silences transformers in assisted generation, which warns of arguments that it passes to the assistant itself."""
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


def stop_tokens(model: PreTrainedModel) -> list[int]:
    """End-of-sequence ids of the model's generation config."""
    stops = model.generation_config.eos_token_id
    return [] if stops is None else [stops] if isinstance(stops, int) else list(stops)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the model's input embedding; of a padded model those of the small one."""
    if own := getattr(model.config, "cost_scaled_vocabulary", None):
        return int(own)
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def synchronize(device: torch.device) -> None:
    """Waits until the device has done its work; nothing to wait for on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
