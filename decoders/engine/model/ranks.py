"""Tensor parallelism: several processes run a model together, each with a part of the weights. This file keeps the processes in step.

A collective ends when every process has entered it, so all processes must run the same passes over blocks of the same sizes. These
rules make all processes decide alike:

- All processes commit the same tokens without exchanging tokens. Logits are gathered or summed over the processes, so that all have
  the same bits. Noise depends only on seed, position and token.
- Values that may differ between processes are taken from the first process: a seed that the call does not name, clocks, measured costs,
  results of stopping criteria. Weights count as changed if they have changed in any process.
- Passes run uncompiled, because processes finish compiling at different times, and compiled passes round differently.
- Calls, and every step's draft, are compared before they run. After a difference, all processes raise an error instead of waiting.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...common.transformers_compat import device_mesh_of
from ...draft import Draft
from ...errors import RanksError, UnsupportedError
from ...tree import Topology
from . import torch_compat

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """The processes that share a model. With a single process, the methods exchange nothing.

    Attributes:
        group: the process group; None for a single process.
        size: number of processes.
        device: device of the tensors that the processes exchange.
    """

    group: Any = None
    size: int = 1
    device: torch.device = torch.device("cpu")

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        """The processes that share `model`. Raises UnsupportedError for parallelism other than tensor or expert parallelism."""
        if not (dist.is_available() and dist.is_initialized()):
            return ALONE
        from torch.distributed.fsdp import FSDPModule  # the import takes a second, and only shared models need it
        from torch.distributed.tensor import DTensor

        shards = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        if not shards:
            return ALONE
        name = type(model).__name__
        advice = (
            'Load it with tp_plan="auto" (or DistributedConfig(tp_plan="auto")), or call generate without strategy=.'
        )
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            raise UnsupportedError(
                f"{name} is sharded by FSDP, whose processes have different batches; strategy= needs the same batch in all "
                f"processes. {advice}"
            )
        mesh = device_mesh_of(model)
        sizes = dict(zip(getattr(mesh, "mesh_dim_names", None) or (), getattr(mesh, "shape", ()), strict=False))
        for part, what in (("pp", "its layers are divided between processes"), ("fsdp", "it is sharded by FSDP")):
            if sizes.get(part, 1) > 1:
                raise UnsupportedError(
                    f"{name}: {what} ({part}_size={sizes[part]}), which strategy= does not support. {advice}"
                )
        meshes = {shard.device_mesh for shard in shards}
        all_groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        groups = {tuple(dist.get_process_group_ranks(group)): group for group in all_groups}
        groups = {members: group for members, group in groups.items() if len(members) > 1}
        if not groups:
            return ALONE
        if len(groups) > 1:
            raise UnsupportedError(
                f"{name} is shared by several groups of processes ({', '.join(map(str, groups))}): take ep_size equal to tp_size. "
                f"{advice}"
            )
        ((members, group),) = groups.items()
        device = torch_compat.local_part(shards[0]).device
        return cls(group, len(members), device)

    @property
    def several(self) -> bool:
        return self.size > 1

    def first(self, values: Sequence[int]) -> list[int]:
        """Returns the first process's `values` in every process."""
        return [int(value) for value in self._first(list(values), torch.int64)] if self.several else list(values)

    def first_number(self, value: float) -> float:
        """Returns the first process's `value` in every process."""
        return float(self._first([value], torch.float64)[0]) if self.several else value

    def clock(self) -> float:
        """The time in seconds on the first process's clock."""
        return self.first_number(time.perf_counter())

    def first_object(self, make: Callable[[], Value]) -> Value:
        """Calls `make` in the first process only, and returns its result in every process."""
        if not self.several:
            return make()
        held = [make() if dist.get_rank(self.group) == 0 else None]
        dist.broadcast_object_list(held, group=self.group, group_src=0, device=self.device)
        return cast(Value, held[0])

    @property
    def writes(self) -> bool:
        """Whether this process writes the files that all processes share."""
        return not self.several or dist.get_rank(self.group) == 0

    def any(self, flag: bool) -> bool:
        """Whether `flag` is True in any process."""
        if not self.several:
            return flag
        held = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(held, dist.ReduceOp.MAX, group=self.group)
        return bool(held.item())

    def check(self, what: str, *parts: object) -> None:
        """Raises RanksError in every process if `parts` differ between processes.

        Args:
            what: the name of `parts` in the error message.
            parts: tensors compared by shape and bits, and other values compared by ``repr``.
        """
        if not self.several:
            return
        number = _digest(parts)
        held = torch.tensor([number, -number], device=self.device)
        dist.all_reduce(held, dist.ReduceOp.MAX, group=self.group)
        if held[0] != -held[1]:
            raise RanksError(
                f"the {self.size} processes that share the model differ in {what}. All of them must make the same calls in the same "
                "order, with the same prompts and arguments. A strategy must read time from Context.clock, and must not draw its own "
                "random numbers"
            )

    def check_draft(self, draft: Draft, lengths: Sequence[int]) -> None:
        """Raises RanksError in every process if a step's draft differs between processes. lengths: number of tokens per row."""
        tree = draft.topology
        shape = tree.parents if isinstance(tree, Topology) else (tree.parents, tree.visible)
        self.check("what a step drafts", draft.tokens, shape, list(lengths))

    def _first(self, values: list, dtype: torch.dtype) -> list:
        held = torch.tensor(values, dtype=dtype, device=self.device)
        dist.broadcast(held, group=self.group, group_src=0)
        return held.tolist()


#: The ranks of a model that runs only in this process.
ALONE = Ranks()


def _digest(parts: Sequence[object]) -> int:
    """A 62-bit hash of `parts`."""
    digest = hashlib.blake2b(digest_size=8)
    for part in _flat(parts):
        if isinstance(part, Tensor):
            digest.update(repr(tuple(part.shape)).encode())
            digest.update(part.detach().cpu().contiguous().numpy().tobytes())
        else:
            digest.update(repr(part).encode())
        digest.update(b"\0")
    return int.from_bytes(digest.digest(), "little") >> 2


def _flat(parts: Sequence[object]) -> list[object]:
    flat: list[object] = []
    for part in parts:
        if isinstance(part, list | tuple) and any(isinstance(entry, Tensor) for entry in part):
            flat += _flat(part)
        else:
            flat.append(part)
    return flat
