"""Which models fit the loop, asked of what they can do and never of their names."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from ...common.transformers_compat import keeps_recurrent_state
from ...errors import DecodersError, UnsupportedError
from .ranks import Ranks
from .torch_compat import modules_in, parameters_in


@functools.lru_cache(64)
def _parameters_of(forward: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def refuse_unfit(model: PreTrainedModel) -> None:
    """Raises UnsupportedError for designs that cannot run several nodes at once, judged by capability, not by name."""
    name, advice = type(model).__name__, "Call generate without strategy=."
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"{name} is an encoder-decoder model; the shared loop decodes causal models. {advice}")
    placed = "position_ids" in _parameters_of(type(model).forward)
    if keeps_recurrent_state(model) and not placed:
        raise UnsupportedError(
            f"{name} keeps nothing but a recurrent state and takes no position_ids: the shared loop runs designs that have "
            f"attention, too. {advice}"
        )
    replaced = vars(model).get("forward")
    if isinstance(replaced, types.FunctionType):
        raise UnsupportedError(
            f"{name}.forward was replaced by the function {replaced.__qualname__!r}, which runs the model as it is and not as the "
            f"loop has it. Wrap a layer, register a hook, or bind a method instead. {advice}"
        )
    devices = {parameter.device for parameter in parameters_in(modules_in(model))}
    if any(device.type == "meta" for device in devices):
        raise UnsupportedError(
            f"{name} has weights on the meta device, where they have no values: load them first. {advice}"
        )
    if not placed or getattr(model.config, "alibi", False):
        raise UnsupportedError(
            f"{name} takes no position_ids, or adds ALiBi, which derives positions from a 2-D mask: nodes of a tree cannot be placed. "
            f"{advice}"
        )
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    varying = [r.get("rope_type") for r in (rope, *(v for v in rope.values() if isinstance(v, dict)))]
    if {"longrope", "dynamic"} & set(varying):
        # The rotary table is chosen by the longest position of the whole batch, so a draft would change other tokens.
        raise UnsupportedError(
            f"{name} scales its rotary positions by the sequence's length (rope_type "
            f"{' / '.join(str(v) for v in varying if v)}), which no static cache can follow exactly. {advice}"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedError(f"{name} has no output head: load it as a causal language model. {advice}")
    if len(devices) > 1:
        raise UnsupportedError(
            f"{name} is spread over {', '.join(sorted(map(str, devices)))}; the shared loop needs one device. Start as many "
            'processes as there are devices with torchrun and load it with tp_plan="auto": each then holds a part of every layer. '
            f"{advice}"
        )
    Ranks.of(model)


@contextmanager
def refusing(model: PreTrainedModel, trouble: str) -> Iterator[None]:
    """Makes an UnsupportedError of whatever a design raises in passes that try it. trouble: what that says of the design."""
    try:
        yield
    except (DecodersError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = str(error).partition("\n")[0]
        why = f"{type(error).__name__}: {said}" if said else type(error).__name__
        raise UnsupportedError(f"{type(model).__name__} {trouble} ({why}). Call generate without strategy=.") from error


def refuse_capture(device: torch.device) -> None:
    """Raises UnsupportedError within a recording of the caller's: a call waits for the device, which no recording holds."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "generate(strategy=…) cannot be recorded within torch.cuda.graph, since it waits for the device. Call it outside: its "
            "steps are recorded by themselves."
        )
