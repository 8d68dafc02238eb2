"""All private parts of transformers that this package uses, with reasons. tests/engine/model/test_compat.py tests every part.

The module is outside the engine, because drafting networks use it to read configs, and must not import the engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from torch import Tensor, distributed, nn
from transformers import CompileConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_outputs import CausalLMOutputWithPast

# State on model objects.

#: Attributes that ``generate`` sets on a model and that are not part of the network: caches, compiled calls, and ``rope_deltas`` (how
#: far the images of the last prompt shift its positions).
SET_BY_GENERATE = frozenset(
    {"_cache", "_compiled_call", "_last_compile_config", "_previous_max_cache_length", "rope_deltas"}
)

#: Attributes that trainers change around every rollout, to switch the computation of gradients off and on.
OF_TRAINING = frozenset(
    {"gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook", "_require_grads_hooks"}
)


def is_of_training(hook: Any) -> bool:
    """Whether ``enable_input_require_grads`` has set `hook`, which has no effect without gradients. No public attribute marks it."""
    return getattr(hook, "__name__", "") == "make_inputs_require_grads"


def config_value(config: PreTrainedConfig, name: str) -> Any:
    """The value of the config's field `name`; None if there is no such field. If the layers have different values, a tuple with a value
    per layer: for such fields, like Gemma 4's head width, transformers raises RuntimeError from 5.24 on.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return tuple(getattr(layer, name, None) for layer in config.per_layer_config)


def keeps_recurrent_state(model: PreTrainedModel) -> bool:
    """Whether the model has a recurrent state that cannot be rolled back.

    transformers' assisted generation reads the class attribute ``_is_stateful``. A class for models with recurrent and attention layers
    sets this attribute even for a model whose layers are all attention.
    """
    kinds = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    attention = {"full_attention", "sliding_attention", "chunked_attention"}
    return bool(getattr(model, "_is_stateful", False)) and not (kinds and kinds <= attention)


def pad_token_of(config: GenerationConfig) -> int:
    """The padding token of a config prepared by ``generate``, else the first end-of-sequence token, else 0.

    ``generate`` stores the prepared values in private tensors; the public fields hold the user's values.
    """
    pad, stops = getattr(config, "_pad_token_tensor", None), getattr(config, "_eos_token_tensor", None)
    return int(pad) if pad is not None else int(stops[0]) if stops is not None else 0


def stop_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """The end-of-sequence ids in the model's generation config."""
    given = getattr(model.generation_config, "eos_token_id", None)
    return tuple(map(int, given if isinstance(given, Iterable) else () if given is None else (given,)))


def compiled_on_any_device() -> CompileConfig:
    """A config with which transformers compiles static-cache decoding not only on CUDA, but also on a CPU. It sets a private field."""
    config = CompileConfig()
    setattr(config, "_compile_all_devices", True)  # noqa: B010
    return config


# Configs.

#: Entries of a config that no forward pass of the loop reads: names, defaults of ``generate``, and flags for further outputs.
NO_PART_OF_NETWORK = frozenset({
    "transformers_version", "architectures", "_name_or_path", "id2label", "label2id", "problem_type", "use_cache", "return_dict",
    "output_hidden_states", "_output_attentions", "_experts_implementation_internal", "bos_token_id", "eos_token_id", "pad_token_id",
    "_post_init_done",
})  # fmt: skip


def rope_parameters_of(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The parameters of a config's rotary embeddings: a list of one dict, or of a dict per type of layer; empty if there are none."""
    rope = getattr(config, "rope_parameters", None) or {}
    several = [each for each in rope.values() if isinstance(each, dict)]
    return several or ([rope] if rope else [])


# Rotary embeddings.


def rope_type_of(module: nn.Module) -> Any:
    """The rope type of a rotary module: a name, or a name per type of layer; None for other modules. No public attribute has it.

    From the rope type, transformers decides whether a forward pass computes the rotary frequencies again.
    """
    kind = getattr(module, "rope_type", None)
    return kind if isinstance(kind, (str, dict)) else None


def set_rope_type(module: nn.Module, kind: Any) -> None:
    """Sets the rope type of a rotary module, for all types of layers."""
    present = rope_type_of(module)
    several = isinstance(present, dict) and isinstance(kind, str)
    vars(module)["rope_type"] = dict.fromkeys(present, kind) if several else kind


# Layers.

#: The attribute of an attention module that holds the index of its decoder layer.
LAYER_INDEX = "layer_idx"


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of `model`: the outermost list of modules with one layer index per module, different in each module.

    If there is no such list (GPT-Neo), the only list whose length is the config's number of layers; else an empty list.
    """
    # The text's decoder comes first, because the modules that read images and sounds may have indexed layers, too.
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else model
    modules = dict.fromkeys((*decoder.modules(), *model.modules()))
    lists = [module for module in modules if isinstance(module, nn.ModuleList) and len(module) > 0]
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
    """The name of the attention function in `config`. Every modeling file reads the private attribute; there is no public one."""
    return config._attn_implementation


def set_attention(config: PreTrainedConfig, name: str) -> None:
    """Sets the attention function in `config`. A drafting network lacks ``set_attn_implementation``, a method of PreTrainedModel."""
    config._attn_implementation = name


# Mixtures of experts. The public setter needs a model, and accepts only transformers' own functions.


def register_experts(name: str, function: Callable[..., Tensor]) -> None:
    """Registers, under `name`, a function that computes a layer's experts."""
    ALL_EXPERTS_FUNCTIONS.register(name, function)


def experts_of(module: nn.Module) -> str | None:
    """The name of the function that computes a module's experts; None without experts, or if several processes share the experts."""
    # transformers 5.17 does not say whether processes share a module's experts.
    several = distributed.is_available() and distributed.is_initialized()
    if getattr(module, "_is_expert_parallel", several) or not hasattr(module, "_apply_gate"):
        return None
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def set_experts(module: Any, name: str) -> None:
    """Sets the function that computes the experts of a module, and of all modules with the same config."""
    module.config._experts_implementation = name


def gated(experts: Any, x: Tensor) -> Tensor:
    """The gated activation of the module `experts`. x: the outputs of the module's gate and up projections, in one tensor."""
    return experts._apply_gate(x)


# The key-value cache.

#: The keyword of the cache in models' inputs and outputs. transformers 5.24 renamed it; 5.40 removes the old name.
CACHE = next(field.name for field in fields(CausalLMOutputWithPast) if field.name in ("cache", "past_key_values"))


def cache_keyword(module: nn.Module) -> str:
    """The keyword for the key-value cache in the signature of the module's ``forward``: ``cache``, or ``past_key_values`` in modules
    for older versions of transformers. If the signature has neither, the keyword of the installed transformers.
    """
    names = inspect.signature(module.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), CACHE)


def cache_of(output: Any) -> Any:
    """The key-value cache in a model's output."""
    return getattr(output, CACHE)


# Images.


def position_ids_for(model: PreTrainedModel, input_ids: Tensor, arguments: dict[str, Any]) -> Tensor | None:
    """The positions of the first forward pass of ``generate``, from a private method of some multimodal models; None for other models.

    arguments: the other arguments of the first forward pass.
    """
    prepare = getattr(model, "_prepare_position_ids_for_generation", None)
    if prepare is None or "position_ids" not in inspect.signature(type(model).forward).parameters:
        return None
    positions: Tensor = prepare(input_ids, arguments)
    return positions


def without_position_ids(model: Any) -> None:
    """Stops ``generate`` of `model`, a shallow copy, from preparing positions. Some models would store how far images shift positions
    (``rope_deltas``) in modules that the copy shares with the original.
    """
    model._prepare_position_ids_for_generation = lambda *args, **kwargs: None


# Several processes.


def device_mesh_of(model: nn.Module) -> Any:
    """The device mesh over which ``from_pretrained`` has sharded `model`, or None. Only the mesh's size along one axis is public."""
    return getattr(model, "_device_mesh", None)


# Loading.


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Switches off the progress bars of transformers and of its GGUF reader. The reader uses tqdm's bar, which has no switch."""
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
