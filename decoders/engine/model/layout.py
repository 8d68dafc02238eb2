"""Finds the parts of a model by trial passes, and checks whether the loop supports the model. Class names play no role."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...common.transformers_compat import cache_keyword, keeps_recurrent_state
from ...errors import ContextLengthError, DecodersError, UnsupportedError
from . import attention
from .cache import LayerSpec
from .modules_compat import modules_in, parameters_in
from .ranks import Ranks
from .state_probe import LayoutProbe, Recurrent, StateProbe, may_keep_states
from .torch_compat import uncompiled
from .weights.fused import Group, SharedInputs


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """The model without its output head: the child module that holds the input embeddings."""
    embeddings = model.get_input_embeddings()
    return next(child for child in model.children() if any(module is embeddings for module in child.modules()))


def embeddings_of(model: PreTrainedModel) -> int:
    """The number of token ids that the model accepts: the number of its input embeddings, or else its config's ``vocab_size``."""
    embeddings = model.get_input_embeddings()
    told = getattr(embeddings, "num_embeddings", None)
    if isinstance(told, int):
        return told
    return _rows_of(embeddings) or int(model.config.get_text_config(decoder=True).vocab_size)


def number_of_logits(model: PreTrainedModel) -> int:
    """The number of logits ``V``. If the output head has neither a weight nor ``out_features``, runs the model on one token.

    Raises:
        UnsupportedError: this run fails, or gives no logits.
    """
    head = model.get_output_embeddings()
    told = _rows_of(head) or getattr(head, "out_features", None)
    if isinstance(told, int):
        return told
    try:
        with torch.no_grad():
            output = model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
        return int(output.logits.shape[-1])
    except Exception as error:  # a user's own head may raise anything
        raise UnsupportedError(
            f"{type(model).__name__}: the size of its vocabulary is unknown: its head, a {type(head).__name__}, has no weight, and a "
            f"pass over a token fails ({type(error).__name__}: {error}). Give the head out_features or call generate without strategy=."
        ) from error


def _rows_of(layer: nn.Module | None) -> int | None:
    """The number of rows of a module's weight; None if the module has no matrix."""
    weight = getattr(layer, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.dim() == 2 else None


def context_length(model: PreTrainedModel) -> int:
    """The model's number of positions; a very large number if its config names none."""
    text = model.config.get_text_config(decoder=True)
    return getattr(text, "max_position_embeddings", None) or (1 << 31)


#: Matches config attributes that hold the id of a placeholder token, such as ``image_token_id``.
_PLACEHOLDER = re.compile(r"(image|video|audio|speech)_token_(id|index)")


def placeholder_ids(model: PreTrainedModel) -> tuple[int, ...] | None:
    """The ids of the tokens that stand for images, videos and sounds; None for a text-only model.

    A text-only class of a multimodal family may have ``input_modalities``, too, but it has neither inner configs nor placeholders.
    """
    modalities = getattr(model, "input_modalities", "text")
    if {"text"}.issuperset([modalities] if isinstance(modalities, str) else modalities):
        return None
    parts = [part for part in vars(model.config).values() if isinstance(part, PreTrainedConfig)]
    own, inner = (
        {value for part in configs for name, value in vars(part).items() if _PLACEHOLDER.fullmatch(name)}
        for configs in ([model.config], parts)
    )
    if not parts and not own:
        return None
    return tuple(sorted(value for value in own or inner if isinstance(value, int)))


@dataclass(frozen=True)
class Layout:
    """The parts of a model, found by trial passes.

    Attributes:
        layers: what each layer stores in the cache.
        groups: for every layer that calls this package's attention, the number of query heads per key head.
        as_stored: whether attention gets the keys that the cache returns. False if the model computes other keys from them.
        recurrent: the modules that keep recurrent states.
        counted: how the model uses the number of tokens in its cache; None if the model does not use the number.
        shared_inputs: groups of plain linear layers (their paths) with the same input.
    """

    layers: list[LayerSpec]
    groups: list[int]
    as_stored: bool
    recurrent: list[Recurrent]
    counted: CountedTokens | None
    shared_inputs: list[Group]


@torch.no_grad()
def probe_layout(model: PreTrainedModel, kinds: int) -> Layout:
    """Finds the layout of `model` by a pass over one token; by more passes for a model that uses the number of cached tokens.

    kinds: the number of kinds of attention layers (:mod:`.attention`).

    Raises:
        UnsupportedError: the model does not run with the loop's cache and mask, or stores data that the loop's cache cannot store.
    """
    probe = StateProbe(model) if may_keep_states(model) else LayoutProbe()
    name = type(model).__name__
    trouble = (
        "keeps recurrent states in a cache of its own"
        if isinstance(probe, StateProbe)
        else "does not run with the loop's cache and mask"
    )
    shape = attention.Probe()
    with refusing(model, trouble), probe.watching(model), SharedInputs(model) as shared:
        _run(model, kinds, probe, torch.zeros(1, 1, dtype=torch.int64, device=model.device), shape)
    layouts = probe.layouts
    recurrent = probe.recurrent if isinstance(probe, StateProbe) else []
    if keeps_recurrent_state(model) and not recurrent:
        raise UnsupportedError(
            f"{name} keeps a recurrent state outside of the cache, where the nodes of a block cannot have a state each. "
            "Call generate without strategy=."
        )
    if not layouts or (not recurrent and sorted(layouts) != list(range(len(layouts)))):
        raise UnsupportedError(
            f"{name} stored keys and values for layers {sorted(layouts)}: every layer must go through "
            "the cache. Call generate without strategy=."
        )
    states = {entry.layer: entry.states for entry in recurrent}
    nothing = LayerSpec.without_keys(next(iter(layouts.values())))
    layers = range(1 + max(*layouts, *states, -1))
    specs = [replace(layouts.get(i, nothing), states=states.get(i, ())) for i in layers]
    counted = None
    if probe.counted and not recurrent:
        counted = counted_tokens(functools.partial(_run_some_tokens, model, kinds), context_length(model), model.device)
    as_stored = all(any(key is given for given in probe.keys) for key in shape.keys)
    # In a model with recurrent layers, linear layers have no joint products.
    alike = [] if isinstance(probe, StateProbe) else shared.groups()
    return Layout(specs, shape.groups, as_stored, recurrent, counted, alike)


def _run_some_tokens(model: PreTrainedModel, kinds: int, cache: CountingProbe) -> Tensor:
    text = torch.arange(min(PROBED, context_length(model)), device=model.device)[None] % embeddings_of(model)
    return cast(Tensor, _run(model, kinds, cache, text, attention.MaskShape()).logits)


def _run(model: PreTrainedModel, kinds: int, cache: LayoutProbe, text: Tensor, shape: attention.MaskShape) -> Any:
    dtype, n = next(p.dtype for p in model.parameters() if p.is_floating_point()), text.shape[1]
    mask = torch.full((n, n), torch.finfo(dtype).min, dtype=dtype, device=model.device).triu(1)
    mask = mask.expand(1, kinds, n, n).clone()
    attention.tell_shape(mask, shape)
    positions = torch.arange(n, device=model.device)[None]
    return model(
        input_ids=text, attention_mask=mask, position_ids=positions, use_cache=True, **{cache_keyword(model): cache}
    )


#: Least number of positions that a model needs: the check runs a text of at least two tokens and a branch of three tokens after it.
SHORTEST = 5
#: Greatest number of tokens of a trial pass. One token is not enough: softmax over a single key does not depend on a temperature.
PROBED = 8
#: Longest context to try. It is limited, because some models create a tensor of the context's length.
LONGEST = 1 << 24


@dataclass(frozen=True)
class CountedTokens:
    """How a model uses the number of tokens in its cache, for example for a temperature of attention.

    Attributes:
        harmless: up to this number of tokens, the model computes as with an empty cache.
        by_node: whether the model also accepts a tensor with one number per node.
    """

    harmless: int
    by_node: bool

    def check(self, name: str, longest: int, rows: int) -> None:
        """Raises ContextLengthError if texts of up to `longest` tokens cannot be decoded in `rows` rows."""
        if longest <= self.harmless or (rows == 1 and self.by_node):
            return
        raise ContextLengthError(
            f"{name} uses the number of tokens in its cache, which must be equal in all rows, in texts of more than {self.harmless} "
            f"tokens, and a text of {longest} is asked for: "
            + ("decode one prompt at a time with generate, " if self.by_node else "ask for fewer, ")
            + "or call generate without strategy=."
        )


class CountingProbe(LayoutProbe):
    """An empty cache that returns `count` as its number of tokens."""

    def __init__(self, count: int | Tensor) -> None:
        super().__init__()
        self.count = count

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:  # type: ignore[override]
        return self.count


def counted_tokens(
    logits: Callable[[CountingProbe], Tensor], context: int, device: torch.device
) -> CountedTokens | None:
    """How a model uses the number of cached tokens; None if the number has no effect.

    logits: runs :data:`PROBED` tokens (at most `context`) with a given cache, and returns their logits.
    """
    empty = logits(CountingProbe(0))

    def depends_on(count: int | Tensor, usual: Tensor = empty) -> bool:
        try:
            return not torch.equal(logits(CountingProbe(count)), usual)
        except Exception:  # a model may raise anything for this number
            return True

    probed = min(PROBED, context)
    most = max(min(context, LONGEST) - probed, 1)
    if not depends_on(most):
        return None
    harmless, first = 0, most
    while first - harmless > 1:
        middle = int((max(harmless, 1) * first) ** 0.5) if first > 2 * harmless + 2 else (harmless + first) // 2
        middle = min(max(middle, harmless + 1), first - 1)
        harmless, first = (harmless, middle) if depends_on(middle) else (middle, first)
    if harmless:  # the result includes the tokens of the trial pass
        harmless += probed
    of_each = torch.full((probed,), first, device=device)
    return CountedTokens(harmless, by_node=not depends_on(of_each, logits(CountingProbe(first))))


@functools.lru_cache(64)
def _parameters_of(forward: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def refuse_unfit(model: PreTrainedModel) -> None:
    """Raises UnsupportedError for a model that the loop cannot run. Checks capabilities, not class names."""
    name, advice = type(model).__name__, "Call generate without strategy=."
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"{name} is an encoder-decoder model; strategy= needs a causal model. {advice}")
    placed = "position_ids" in _parameters_of(type(model).forward)
    if keeps_recurrent_state(model) and not placed:
        raise UnsupportedError(
            f"{name} keeps only a recurrent state and takes no position_ids: strategy= needs a design that has attention, "
            f"too. {advice}"
        )
    replaced = uncompiled(vars(model).get("forward"))
    if isinstance(replaced, types.FunctionType):
        raise UnsupportedError(
            f"{name}.forward was replaced by the function {replaced.__qualname__!r}, which runs the user's model and not the loop's "
            f"copy of it. Wrap a layer, register a hook, or bind a method instead. {advice}"
        )
    devices = {parameter.device for parameter in parameters_in(modules_in(model))}
    if any(device.type == "meta" for device in devices):
        raise UnsupportedError(
            f"{name} has weights on the meta device, where they have no values: load them first. {advice}"
        )
    if not placed or getattr(model.config, "alibi", False):
        raise UnsupportedError(
            f"{name} takes no position_ids, or computes ALiBi from a 2-D mask: draft trees need positions of their own. {advice}"
        )
    if (context := context_length(model)) < SHORTEST:
        raise UnsupportedError(
            f"the context of {name} has {context} positions, and checking the model needs {SHORTEST}. {advice}"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedError(f"{name} has no output head: load it as a causal language model. {advice}")
    if len(devices) > 1:
        raise UnsupportedError(
            f"{name} is spread over {', '.join(sorted(map(str, devices)))}; strategy= needs one device. Start as many "
            'processes as there are devices with torchrun and load the model with tp_plan="auto": each holds a part of every layer. '
            f"{advice}"
        )
    Ranks.of(model)


@contextmanager
def refusing(model: PreTrainedModel, trouble: str) -> Iterator[None]:
    """Turns an exception that `model` raises in a trial pass into an UnsupportedError with `trouble` in its message."""
    try:
        yield
    except (DecodersError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = str(error).partition("\n")[0]
        why = f"{type(error).__name__}: {said}" if said else type(error).__name__
        raise UnsupportedError(f"{type(model).__name__} {trouble} ({why}). Call generate without strategy=.") from error


def refuse_capture(device: torch.device) -> None:
    """Raises UnsupportedError if the caller is recording a CUDA graph: the loop waits for the device, and waits cannot be recorded."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "generate(strategy=…) cannot be recorded within torch.cuda.graph, since generate waits for the device. Call it outside: "
            "generate records its own steps."
        )
