"""What ``enable`` attaches to a model beside ``generate``: its state for copies, and methods of a ``PeftModel`` that unload adapters.

Models that PEFT has wrapped are recognised by what they have: the package need not be installed.
"""

from __future__ import annotations

import copy
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
    """Replaces a method of :data:`UNLOADING` on an enabled ``PeftModel``, and enables the model that the method returns.

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
    """Undoes :func:`watch_unloading`."""
    for name in UNLOADING:
        if isinstance(vars(model).get(name), Unloading):
            del vars(model)[name]


#: Where ``copy`` and ``pickle`` ask an object for what it holds; on the instance, it is asked before the class.
GETSTATE = "__getstate__"


class CopiedState(dict[str, Any]):
    """What an enabled model holds. As it stands, which is what ``copy.copy`` takes, it leaves out what ``enable`` put there.

    ``generate`` on an instance is told nothing of whose it is: a shallow copy that had it would run the model it was copied from.

    Attributes:
        whole: all of it, which ``copy.deepcopy`` and ``pickle`` take: there ``generate`` is copied along with its model.
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
