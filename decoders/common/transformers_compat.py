"""All private parts of transformers that we use, each with the reason and with what would replace it.

It is in this package, not in the engine, because drafting networks read configs as well and must not import the engine.
tests/engine/test_compat.py tries every part, so that a version of transformers that moves one fails there by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import CompileConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_outputs import CausalLMOutputWithPast

# State on model objects.

#: Attributes that ``generate`` sets on a model: caches, compiled calls, and how far the images of the last prompts have shifted
#: positions, which are no part of the network. Not needed once they are kept in an object of their own.
SET_BY_GENERATE = frozenset(
    {"_cache", "_compiled_call", "_last_compile_config", "_previous_max_cache_length", "rope_deltas"}
)

#: Attributes that say how gradients are computed, which trainers switch around every rollout. Not needed once they are kept in an
#: object of their own.
OF_TRAINING = frozenset(
    {"gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook", "_require_grads_hooks"}
)


def is_of_training(hook: Any) -> bool:
    """Whether it is the hook of ``enable_input_require_grads``, which does nothing without gradients. No public attribute marks it."""
    return getattr(hook, "__name__", "") == "make_inputs_require_grads"


def config_value(config: PreTrainedConfig, name: str) -> Any:
    """A field of a config; None if it has no such field; a tuple of the layers' values if layers differ in it.

    From 5.24 on transformers raises RuntimeError if layers differ: Gemma 4 has two widths of heads.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return tuple(getattr(layer, name, None) for layer in config.per_layer_config)


def keeps_recurrent_state(model: PreTrainedModel) -> bool:
    """Whether the model keeps a state that cannot be rolled back; transformers refuses assisted generation by the same attribute."""
    return bool(getattr(model, "_is_stateful", False))


def pad_token_of(config: GenerationConfig) -> int:
    """The token that fills ended rows, in a config prepared by ``generate``: as given, else the first end-of-sequence token, else 0.

    The prepared values are in private tensors; the public fields hold what the user gave.
    """
    pad, stops = getattr(config, "_pad_token_tensor", None), getattr(config, "_eos_token_tensor", None)
    return int(pad) if pad is not None else int(stops[0]) if stops is not None else 0


def compiled_on_any_device() -> CompileConfig:
    """A config with which transformers compiles its static-cache decoding on a CPU, too; by default it does so on CUDA only.

    The field is private; it is set by name because it is declared as None only.
    """
    config = CompileConfig()
    setattr(config, "_compile_all_devices", True)  # noqa: B010
    return config


# Configs.

#: Entries of a config that no forward pass of the loop reads: names, defaults of ``generate``, and flags for further outputs.
#: Not needed once configs mark what describes the network.
NO_PART_OF_NETWORK = frozenset({
    "transformers_version", "architectures", "_name_or_path", "id2label", "label2id", "problem_type", "use_cache", "return_dict",
    "output_hidden_states", "_output_attentions", "_experts_implementation_internal", "bos_token_id", "eos_token_id", "pad_token_id",
    "_post_init_done",
})  # fmt: skip


def rope_parameters_of(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The parameters of a config's rotary embeddings: one set, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    several = [each for each in rope.values() if isinstance(each, dict)]
    return several or ([rope] if rope else [])


# Rotary embeddings.


def rope_type_of(module: nn.Module) -> Any:
    """The kind of table by which transformers' rotary modules decide whether a pass computes it anew: a name, or one for each type of
    layer; None for other modules. No public attribute says it.
    """
    kind = getattr(module, "rope_type", None)
    return kind if isinstance(kind, (str, dict)) else None


def set_rope_type(module: nn.Module, kind: Any) -> None:
    """Sets the kind of table of a rotary module, for all types of layers."""
    present = rope_type_of(module)
    several = isinstance(present, dict) and isinstance(kind, str)
    vars(module)["rope_type"] = dict.fromkeys(present, kind) if several else kind


# Layers.

#: Modules that transformers numbers by decoder layer: attention modules are.
LAYER_INDEX = "layer_idx"


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of `model`: the outermost list of modules each of which contains attention of a single layer index.

    If attention is numbered differently (GPT-Neo), it is the only list whose length is the config's number of layers.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    for module in lists:
        indices = [_indices(layer) for layer in module]
        if all(len(index) == 1 for index in indices) and len(set().union(*indices)) == len(module):
            return list(module)
    if isinstance(config := getattr(model, "config", None), PreTrainedConfig):
        count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
        whole = [module for module in lists if len(module) == count]
        if len(whole) == 1:
            return list(whole[0])
    return []


def _indices(layer: nn.Module) -> set[int]:
    return {i for m in layer.modules() if isinstance(i := getattr(m, LAYER_INDEX, None), int)}


# Attention.


def attention_of(config: PreTrainedConfig) -> str | None:
    """Name of the attention function that a model of `config` runs. Every modeling file reads it; there is no public attribute."""
    return config._attn_implementation


def set_attention(config: PreTrainedConfig, name: str) -> None:
    """Makes modules of `config` run the attention function `name`.

    ``set_attn_implementation`` is for whole models; the single layers of a drafter have only a config.
    """
    config._attn_implementation = name


# Mixtures of experts. transformers has a public setter on models alone, which knows no function of others.


def register_experts(name: str, function: Callable[..., Tensor]) -> None:
    """Registers a function that computes a layer's experts as `name`, as attention functions are registered."""
    ALL_EXPERTS_FUNCTIONS.register(name, function)


def experts_of(module: nn.Module) -> str | None:
    """The name of the function that computes a module's experts; None where it has none, or shares them with other processes."""
    if getattr(module, "_is_expert_parallel", True):
        return None
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def set_experts(module: Any, name: str) -> None:
    """Has a module's experts, and those of all that share its config, computed by the function of this `name`."""
    module.config._experts_implementation = name


# The key-value cache.

#: The keyword of the cache in models' inputs and outputs. transformers 5.24 renamed it; the old name goes with 5.40.
CACHE = next(field.name for field in fields(CausalLMOutputWithPast) if field.name in ("cache", "past_key_values"))


def gated(experts: Any, x: Tensor) -> Tensor:
    """What a module of experts makes of the product of its gate-and-up matrices."""
    return experts._apply_gate(x)


def cache_keyword(module: nn.Module) -> str:
    """The keyword by which `module` takes its key-value cache, ``cache`` or ``past_key_values``.

    That of its ``forward``, since modeling code of a checkpoint or a drafter may use either name; without one, that of the
    installed transformers.
    """
    names = inspect.signature(module.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), CACHE)


def cache_of(output: Any) -> Any:
    """The key-value cache in a model's output."""
    return getattr(output, CACHE)


# Images.


def position_ids_for(model: PreTrainedModel, input_ids: Tensor, arguments: dict[str, Any]) -> Tensor | None:
    """The positions with which ``generate`` begins; None for a design that computes them itself.

    Designs whose images take other positions than tokens have a private method for them.

    Args:
        arguments: the other arguments of the first forward pass.
    """
    prepare = getattr(model, "_prepare_position_ids_for_generation", None)
    if prepare is None or "position_ids" not in inspect.signature(type(model).forward).parameters:
        return None
    positions: Tensor = prepare(input_ids, arguments)
    return positions


def without_position_ids(model: Any) -> None:
    """Makes ``generate`` of a shallow copy of a model prepare no positions, because designs would store the shift by images in
    modules that the copy shares.
    """
    model._prepare_position_ids_for_generation = lambda *args, **kwargs: None


# Several processes.


def device_mesh_of(model: nn.Module) -> Any:
    """The mesh of devices that ``from_pretrained`` has sharded `model` over, or None. Only its size along one axis is public."""
    return getattr(model, "_device_mesh", None)


# Loading.


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Switches off the progress bars of transformers and of its reader of GGUF files.

    The reader uses tqdm's own bar, which has no switch: its import is replaced. Not needed once it uses transformers' bar.
    """
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    bar, tqdm = logging.is_progress_bar_enabled(), reader.tqdm
    logging.disable_progress_bar()
    reader.tqdm = partial(tqdm, disable=True)
    try:
        yield
    finally:
        reader.tqdm = tqdm
        if bar:
            logging.enable_progress_bar()
