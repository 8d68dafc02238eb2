"""Copies of an enabled model: deep ones and pickled ones are enabled themselves, shallow ones are not."""

from __future__ import annotations

import copy
from typing import Any

from .peft import Unloading

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
