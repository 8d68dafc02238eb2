"""Attributes that ``enable`` sets on a model besides ``generate``: for copies of the model, and for unloading PEFT adapters.

A ``PeftModel`` is recognised by its attributes, so PEFT need not be installed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..engine.model.modules_compat import hooks_of, remove_hooks
from ..errors import UnsupportedError
from .arguments import REFUSED, shown


def is_peft(model: Any) -> bool:
    """Whether `model` is a ``PeftModel`` around a model of transformers."""
    return isinstance(model, nn.Module) and hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: Any) -> Any:
    """The model of transformers that generates: `model` itself, or the adapted model inside a ``PeftModel``."""
    return model.get_base_model() if is_peft(model) else model


#: Methods that unload adapters and return the model of transformers.
UNLOADING = ("merge_and_unload", "unload")


class Unloading:
    """Replaces a method of :data:`UNLOADING` on an enabled ``PeftModel``, and enables the model that the method returns.

    Holds the model, not a bound method, so that ``copy.deepcopy(model)`` copies this object with the model.

    Attributes:
        wrapper: the ``PeftModel``.
        method: the name of the replaced method.
        ready: prepares the wrapper for unloading, and returns a function that enables the remaining model.
    """

    def __init__(self, wrapper: nn.Module, method: str, ready: Callable[[Any], Callable[[Any], Any]]) -> None:
        self.wrapper, self.method, self.ready = wrapper, method, ready

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        enable = self.ready(self.wrapper)
        base: Any = self.wrapper.base_model  # where PEFT looks the method up
        return enable(getattr(base, self.method)(*args, **kwargs))


def watch_unloading(model: Any, ready: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Sets an :class:`Unloading` object with `ready` on a ``PeftModel`` in place of its methods in :data:`UNLOADING`."""
    for name in UNLOADING:
        if name not in vars(model) and hasattr(model.base_model, name):
            vars(model)[name] = Unloading(model, name, ready)


def unwatch_unloading(model: Any) -> None:
    """Undoes :func:`watch_unloading`."""
    for name in UNLOADING:
        if isinstance(vars(model).get(name), Unloading):
            del vars(model)[name]


#: The method that ``copy`` and ``pickle`` call for an object's state. They look it up on the instance before the class.
GETSTATE = "__getstate__"


class CopiedState(dict[str, Any]):
    """The state of an enabled model for copies. ``copy.copy`` uses this dict, which lacks the attributes that ``enable`` has set.

    With the attached ``generate``, a shallow copy would run the original model, because ``generate`` holds its model.

    Attributes:
        whole: the whole state, which ``copy.deepcopy`` and ``pickle`` use: they copy ``generate`` together with its model.
    """

    def __init__(self, whole: dict[str, Any], previous: Any) -> None:
        super().__init__(
            {
                name: value
                for name, value in whole.items()
                if name not in ("generate", GETSTATE) and not isinstance(value, Unloading)
            }
        )
        if previous is not None:
            self["generate"] = previous
        self.whole = whole

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.whole, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (), None, None, iter(list(self.whole.items()))


def refuse_ignored_adapters(model: PreTrainedModel, wrapper: Any) -> None:
    """Raises UnsupportedError for PEFT adapters that the loop would ignore or apply wrongly: aLoRA, adapters whose own ``generate``
    prepares the layers (X-LoRA), and adapters that change the model's inputs.

    Args:
        wrapper: the ``PeftModel`` around `model`, or None.
    """
    configs = wrapper.peft_config if wrapper is not None else {}
    active = [configs.get(name) for name in getattr(wrapper, "active_adapters", ())]
    if any(getattr(config, "alora_invocation_tokens", None) for config in active):
        raise UnsupportedError(
            "aLoRA adapts the tokens from its invocation on: PEFT's own generate looks the invocation up and tells every layer; "
            "the loop would decode without the adapter. Call generate without strategy= for this adapter."
        )
    tuner = type(getattr(wrapper, "base_model", None))
    if tuner is not type(model) and "generate" in vars(tuner):
        raise UnsupportedError(
            f"{tuner.__name__} of PEFT prepares its layers in a generate of its own, which the loop would bypass. Call generate "
            "without strategy= for this adapter."
        )
    replaced = vars(model).get("prepare_inputs_for_generation")
    # PEFT may also set the model's own method as an attribute. Only a different method comes from an adapter.
    own = getattr(type(model), "prepare_inputs_for_generation", None)
    if replaced is not None and getattr(replaced, "__func__", None) is not own:
        raise UnsupportedError(
            f"prepare_inputs_for_generation of this {type(model).__name__} was replaced on the instance, as PEFT does for prompt "
            "and prefix tuning; the loop prepares its inputs itself and would ignore it. Call generate without strategy=."
        )


def refuse_adapter_names(model: PreTrainedModel) -> None:
    """Raises UnsupportedError if the caller passed ``adapter_names=`` for several rows to a ``PeftModel`` around `model`.

    Before it raises, it removes the hooks with which PEFT handles the argument on every layer: they would break later plain calls.
    """
    if "peft_config" not in vars(model):  # PEFT sets it on models whose layers it has replaced
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
            f"adapter_names={shown(names)} cannot be combined with a strategy: {REFUSED['adapter_names'][1]}."
        )
