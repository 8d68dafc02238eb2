"""Models that PEFT has wrapped, recognised by what they have: the package need not be installed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..engine.model.torch_compat import hooks_of, remove_hooks
from ..errors import UnsupportedError
from .arguments import REFUSED, shown


def is_peft(model: Any) -> bool:
    """Whether `model` is a ``PeftModel`` around a model of transformers."""
    return isinstance(model, nn.Module) and hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: Any) -> Any:
    """The model of transformers that generates: `model` itself, or what PEFT has wrapped, its layers adapted."""
    return model.get_base_model() if is_peft(model) else model


#: What takes adapters off: the model of transformers comes back.
UNLOADING = ("merge_and_unload", "unload")


class Unloading:
    """Stands on an enabled ``PeftModel`` in the place of a method of :data:`UNLOADING`: what that gives back is enabled, too.

    It refers to the model, not to a bound method, so that ``copy.deepcopy(model)`` copies it along with the model.

    Attributes:
        wrapper: the ``PeftModel``.
        method: the name of its method.
        ready: makes the wrapper ready to be taken apart, and gives what enables the model that is left.
    """

    def __init__(self, wrapper: nn.Module, method: str, ready: Callable[[Any], Callable[[Any], Any]]) -> None:
        self.wrapper, self.method, self.ready = wrapper, method, ready

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        enable = self.ready(self.wrapper)
        base: Any = self.wrapper.base_model  # which PEFT looks the method up in
        return enable(getattr(base, self.method)(*args, **kwargs))


def watch_unloading(model: Any, ready: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Puts :class:`Unloading` on a ``PeftModel`` whose adapters can be taken off. ready: see there."""
    for name in UNLOADING:
        if name not in vars(model) and hasattr(model.base_model, name):
            vars(model)[name] = Unloading(model, name, ready)


def unwatch_unloading(model: Any) -> None:
    """Takes away what :func:`watch_unloading` has put there."""
    for name in UNLOADING:
        if isinstance(vars(model).get(name), Unloading):
            del vars(model)[name]


def refuse_prompt_learning(model: PreTrainedModel, wrapper: Any) -> None:
    """Raises UnsupportedError where an adapter puts vectors in front of the prompt, or begins within it: the loop would decode without.

    Args:
        model: what generates.
        wrapper: the ``PeftModel`` around it, None without one.
    """
    configs = wrapper.peft_config if wrapper is not None else {}
    active = [configs.get(name) for name in getattr(wrapper, "active_adapters", ())]
    learning = next((c for c in active if getattr(c, "is_prompt_learning", False)), None)
    if learning is not None:
        kind = getattr(learning.peft_type, "value", learning.peft_type)
        raise UnsupportedError(
            f"{kind} puts learnt vectors in front of the prompt, which is no token of it. Adapters of layers (LoRA and its "
            "kin) work; call generate without strategy= for this one."
        )
    if any(getattr(config, "alora_invocation_tokens", None) for config in active):
        raise UnsupportedError(
            "aLoRA adapts the tokens from its invocation on, whose places PEFT's own generate looks up and hands to every layer: "
            "the loop would decode without the adapter. Call generate without strategy= for this one."
        )
    replaced = vars(model).get("prepare_inputs_for_generation")
    # PEFT puts the model's own method back as an attribute.
    own = getattr(type(model), "prepare_inputs_for_generation", None)
    if replaced is not None and getattr(replaced, "__func__", None) is not own:
        raise UnsupportedError(
            f"prepare_inputs_for_generation of this {type(model).__name__} was replaced on the instance, as PEFT does for prompt "
            "and prefix tuning; the loop prepares its inputs itself and would ignore it. Call generate without strategy=."
        )


def refuse_adapter_names(model: PreTrainedModel) -> None:
    """Raises UnsupportedError where a ``PeftModel`` around `model` was given ``adapter_names=`` for several rows.

    It keeps the argument to itself, and has every layer read the names of the rows from a hook. An error on the way would leave these
    hooks on the model, where plain calls trip over them: they are removed.
    """
    if "peft_config" not in vars(model):  # PEFT tells the models that it has put layers into
        return
    names: Any = None
    hooked = []
    for module in model.modules():
        before = hooks_of(module)[1]
        for number, hook in before.items():
            given = hook.keywords.get("adapter_names") if isinstance(hook, functools.partial) else None
            if given is not None and len(given) > 1:
                names = given
                hooked.append((module, number))
    if hooked:
        for module, number in hooked:
            remove_hooks(module, [number])
        raise UnsupportedError(
            f"adapter_names={shown(names)} does not go with strategy=: {REFUSED['adapter_names'][1]}."
        )
