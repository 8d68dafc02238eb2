"""Rotary tables that depend on the length of the text. longrope has one table up to the original length and another table beyond it;
dynamic NTK scaling has a different table for every length beyond the original length.

transformers chooses the table by the longest position in a pass, drafts and other rows included. In our copy of a model, all passes of
a call use the same table, which the length of the call's texts decides: table 0 for texts up to the first border length, table 1 for
texts up to the second border, and so on. A call whose texts do not cross a border gets the tables that transformers would choose.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...common.transformers_compat import rope_parameters_of, rope_type_of, set_rope_type
from ...errors import ContextLengthError, UnsupportedError, amount

#: The rope types with tables that depend on the length. The value says whether all lengths beyond the border share a table.
VARYING = {"longrope": True, "dynamic": False}


class RopeTables:
    """Which of a model's rotary tables belongs to which length of text. Tables are numbered from 0, by ascending length.

    Attributes:
        borders: for each table, the greatest length of its texts, in ascending order. If `open`, there is one more table.
        open: whether all texts beyond the last border share a table.
        current: the number of the table that passes use now.
        flag: `current` as a tensor ``[]`` int64, which the rotary modules of all our copies of a model read.
    """

    def __init__(self, borders: tuple[int, ...], open: bool, device: torch.device) -> None:
        self.borders, self.open, self.current = borders, open, 0
        self.flag = torch.zeros((), dtype=torch.int64, device=device)

    def of(self, length: int) -> int:
        """The number of the table for a text of `length` tokens."""
        return min(self._passed(length), len(self.borders) - (not self.open))

    def use(self, number: int) -> None:
        """Makes the next passes use table `number`."""
        if number != self.current:  # a recorded step must not write the flag, because its replays would write it again
            self.current = number
            self.flag.fill_(number)

    def check(self, name: str, prompt: int, new_tokens: int, cached: int | None = None) -> None:
        """Raises ContextLengthError unless one table serves a call from its prompt to its last new token.

        Args:
            name: the model's class name.
            prompt: number of tokens of the longest prompt.
            new_tokens: greatest number of new tokens. The last new token never runs through the model.
            cached: number of the prompt's tokens in the caller's cache; None without a cache.
        """
        before = self._passed(prompt)
        border = self.borders[min(before, len(self.borders) - 1)]
        changes, otherwise = (
            f"{name} has another rotary table for texts of more than",
            "call generate without strategy=.",
        )
        if cached is not None and self._passed(cached) != before:
            raise ContextLengthError(
                f"{changes} {self.borders[before - 1]} tokens: past_key_values was computed with the table for {cached} tokens, and "
                f"the prompt has {prompt} tokens. Pass the whole text as input_ids without past_key_values, or {otherwise}"
            )
        if before == self._passed(prompt + max(new_tokens - 1, 0)) and (self.open or not before):
            return
        room = border + 1 - prompt
        raise ContextLengthError(
            f"{changes} {border} tokens, and {amount(prompt, 'prompt token')} plus {new_tokens} new ones exceed that length, while the "
            "loop decodes a text with one table: "
            + (f"max_new_tokens can be {room} at most, or " if room > 0 else "shorten the prompt, or ")
            + otherwise
        )

    def _passed(self, length: int) -> int:
        return sum(length > border for border in self.borders)


def varies(config: PreTrainedConfig) -> bool:
    """Whether a model's rotary tables depend on the length of the text."""
    return any(kind in VARYING for kind, _ in _kinds(config))


def has_varying_table(module: nn.Module) -> bool:
    """Whether `module` has a table that depends on the length. Its ``forward`` then writes the table to attributes of `module`."""
    kind = rope_type_of(module)
    return kind is not None and not VARYING.keys().isdisjoint(kind.values() if isinstance(kind, dict) else (kind,))


def take_over(model: PreTrainedModel) -> RopeTables | None:
    """Replaces the rotary modules in our copy of a model by modules with several tables. Returns which table belongs to which length;
    None if the model's tables do not depend on the length.

    Raises:
        UnsupportedError: the tables depend on the length in a way that RopeTables cannot express, or no module computes them.
    """
    config = model.config.get_text_config(decoder=True)
    if not varies(config):
        return None
    kinds = list(_kinds(config))
    borders = tuple(sorted({border for kind, border in kinds if kind in VARYING}))
    several = len(borders) > 1
    rope_tables = RopeTables(borders, all(VARYING.get(kind, True) for kind, _ in kinds), model.device)
    modules = {id(module): module for module in model.modules() if _computes_table(module, config)}
    if not modules or (several and not rope_tables.open):
        raise UnsupportedError(
            f"{type(model).__name__} scales its rotary positions by the sequence's length (rope_type "
            f"{' / '.join(kind for kind, _ in kinds)}) in a way that the loop cannot follow. Call generate without strategy=."
        )
    exchanged = {key: RotaryByLength(module, rope_tables) for key, module in modules.items()}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in exchanged:
                setattr(parent, name, exchanged[id(child)])
    return rope_tables


def with_own_tables(model: nn.Module) -> None:
    """Gives our copy of a model its own buffers for the tables that rotary modules write in ``forward``."""
    for module in model.modules():
        if has_varying_table(module):
            for name, buffer in list(module.named_buffers(recurse=False)):
                module.register_buffer(name, buffer.clone(), persistent=False)


def _kinds(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """Yields a model's rope types, each with the greatest length for which the type's first table is used."""
    for parameters in rope_parameters_of(config):
        kind = str(parameters.get("rope_type", parameters.get("type", "default")))
        context = int(getattr(config, "max_position_embeddings", None) or (1 << 31))
        original = parameters.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        yield kind, int(original) if kind == "longrope" and original else context


def _computes_table(module: nn.Module, config: PreTrainedConfig) -> bool:
    """Whether a module computes rotary tables that depend on the text's length.

    Its config (or else `config`) must name a rope type in :data:`VARYING`, and it must take positions and have buffers, but no weights.
    """
    if not varies(getattr(module, "config", config)) or next(module.parameters(), None) is not None:
        return False
    return "position_ids" in inspect.signature(module.forward).parameters and next(module.buffers(), None) is not None


class RotaryByLength(nn.Module):
    """A rotary module that uses table number :attr:`RopeTables.flag` for all positions. module: the rotary module to replace."""

    flag: Tensor

    def __init__(self, module: nn.Module, rope_tables: RopeTables) -> None:
        super().__init__()
        self._place = list(inspect.signature(module.forward).parameters).index("position_ids")
        begins = (0, *rope_tables.borders)[: len(rope_tables.borders) + rope_tables.open]
        self._range = [(begin, *rope_tables.borders[number : number + 1]) for number, begin in enumerate(begins)]
        self.tables = nn.ModuleList(copy.deepcopy(module) for _ in begins)
        self.register_buffer("flag", rope_tables.flag, persistent=False)
        self._settled = [False] * len(begins)
        self._settled = [self._settle(number) for number in range(len(begins))]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # some models read attributes of the replaced module
            return getattr(cast(nn.ModuleList, super().__getattr__("tables"))[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        table = self._table(0, args, kwargs)
        for number in range(1, len(self.tables)):
            chosen, other = self.flag == number, self._table(number, args, kwargs)
            table = _each(lambda own, new, chosen=chosen: torch.where(chosen, new, own), table, other)
        return table

    def _table(self, number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Table `number`: what the replaced module would return if the longest text of the pass had a length for this table."""
        module = self.tables[number]
        if self._settled[number]:
            return module(*args, **kwargs)
        begin, *border = self._range[number]
        named = "position_ids" in kwargs
        positions: Tensor = kwargs["position_ids"] if named else args[self._place]
        if border:
            positions = positions.clamp(max=border[0] - 1)
        positions = torch.cat([positions, torch.full_like(positions[..., :1], begin)], dim=-1)
        if named:
            table = module(*args, **kwargs | {"position_ids": positions})
        else:
            table = module(*args[: self._place], positions, *args[self._place + 1 :], **kwargs)
        return _each(lambda values: values[..., :-1, :], table)

    def _settle(self, number: int) -> bool:
        """Fixes table `number`, so that passes neither compute nor write the table. Returns whether this succeeded."""
        module, kind = self.tables[number], rope_type_of(self.tables[number])
        if kind is None:
            return False
        x = torch.zeros(1, 1, 1, device=self.flag.device)
        given: list[dict[str, Any]] = [{"layer_type": each} for each in kind] if isinstance(kind, dict) else [{}]
        positions = torch.arange(4, device=self.flag.device)[None]
        beyond = torch.cat([positions, positions + max(max(each) for each in self._range)], dim=1)
        try:
            before = [self._table(number, (x, positions), each) for each in given]
            set_rope_type(module, "default")
            for text in (positions, beyond):
                after = [_each(lambda values: values[..., :4, :], module(x, text, **each)) for each in given]
                pairs = [pair for own, new in zip(before, after, strict=True) for pair in _pairs(own, new)]
                if not all(torch.equal(*pair) for pair in pairs):
                    break
            else:
                return True
        except Exception:  # a module of an unknown model may raise anything
            pass
        set_rope_type(module, kind)
        return False


def _each(function: Callable[..., Tensor], *tables: Any) -> Any:
    """Applies `function` to `tables`, element by element if the tables are tuples of tensors."""
    if isinstance(tables[0], Tensor):
        return function(*tables)
    return tuple(function(*parts) for parts in zip(*tables, strict=True))


def _pairs(one: Any, other: Any) -> list[tuple[Tensor, Tensor]]:
    return [(one, other)] if isinstance(one, Tensor) else list(zip(one, other, strict=True))
