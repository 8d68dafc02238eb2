"""A strategy wrapped so that every draft is inspected where it is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..strategy import Context, Draft, Sequences, Step, Strategy
from ..tree import Topology, TreeTensors

if TYPE_CHECKING:
    from ..engine.guide import Guide

#: Tensor methods that make the host wait for the device, or whose result has a size only the device knows.
HOST_READS = frozenset(
    {
        "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__",
        "nonzero", "masked_select", "unique", "bincount",
    }
)  # fmt: skip


class HostReadError(AssertionError):
    """A hook of a strategy that claims ``on_device`` read the device."""


class NoHostReads(TorchFunctionMode):
    """Raises HostReadError at whatever reads the device."""

    off = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.off:
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        by_mask = name == "__getitem__" and any(
            isinstance(i, Tensor) and i.dtype == torch.bool
            for i in (args[1] if isinstance(args[1], tuple) else args[1:])
        )
        if name in HOST_READS or by_mask:
            shown = "indexing with a bool mask" if by_mask else f"{name}()"
            raise HostReadError(f"{shown} waits for the device; set on_device = False or use torch.where / gather")
        return func(*args, **(kwargs or {}))


class _Excused:
    """A guide that may read the device when it is asked what is forced: the loop asks the guide itself whether it does."""

    def __init__(self, guide: Guide, reads: NoHostReads) -> None:
        self.guide, self.reads = guide, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.guide, name)

    def forced(self, sequences: Sequences, limit: int) -> Tensor:
        self.reads.off = True
        try:
            return self.guide.forced(sequences, limit)
        finally:
            self.reads.off = False


@dataclass(frozen=True)
class Seen:
    """One step as the wrapped strategy saw and answered it; lengths are those before the step."""

    lengths: tuple[int, ...]
    finished: tuple[bool, ...]
    draft: Draft


class Spy(Strategy):
    """Passes every call on to `inner`, refuses drafts that break the contract, and keeps what happened in `seen`.

    Args:
        forbid_host_reads: also refuse hooks that read the device.
    """

    def __init__(self, inner: Strategy, forbid_host_reads: bool = False) -> None:
        self.inner, self.settings = inner, inner.settings
        self.reads = NoHostReads() if forbid_host_reads else None
        self.seen: list[Seen] = []
        self.name, self.exact = inner.name, inner.exact
        self.needs_assistant, self.needs_grammar = inner.needs_assistant, inner.needs_grammar
        self.on_device = inner.on_device
        self.vocab = 0

    def start(self, context: Context) -> Any:
        self.vocab, self.seen = context.vocab_size, []
        if self.reads is not None and context.guide is not None:
            context = replace(context, guide=cast("Guide", _Excused(context.guide, self.reads)))
        return self.inner.start(context)

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        draft = self._untouched("propose", lambda: self.inner.propose(state, sequences), _committed(sequences))
        inspect_draft(draft, sequences, self.vocab)
        self.seen.append(Seen(tuple(sequences.length.tolist()), tuple(sequences.finished.tolist()), draft))
        return draft

    def observe(self, state: Any, step: Step) -> None:
        tensors = {f.name: getattr(step, f.name) for f in fields(step) if f.name != "sequences"}
        self._untouched("observe", lambda: self.inner.observe(state, step), tensors | _committed(step.sequences))

    def _untouched(self, hook: str, call: Callable[[], Any], given: dict[str, Tensor]) -> Any:
        before = {name: tensor.clone() for name, tensor in given.items()}
        lengths = given["length"].clone()
        with self.reads or nullcontext():
            result = call()
        for name, tensor in given.items():
            old, new = before[name], tensor
            if name == "tokens":  # behind a row's length anything may stand
                valid = torch.arange(new.shape[1], device=new.device) < lengths[:, None]
                old, new = torch.where(valid, old, 0), torch.where(valid, new, 0)
            assert torch.equal(old, new), f"{hook} changed `{name}`, which belongs to the loop"
        return result


def _committed(sequences: Sequences) -> dict[str, Tensor]:
    return {f.name: getattr(sequences, f.name) for f in fields(sequences)}


def inspect_draft(draft: Draft, sequences: Sequences, vocab: int) -> None:
    """Raises AssertionError or DraftError unless `draft` keeps the contract, values included."""
    rows = sequences.length.shape[0]
    assert isinstance(draft, Draft), f"propose must return a Draft, not {type(draft).__name__}"
    draft.check(rows)
    device = sequences.tokens.device
    assert draft.tokens.device == device, f"draft tokens are on {draft.tokens.device}, the loop on {device}"
    if draft.tokens.numel():
        low, high = draft.tokens.min().item(), draft.tokens.max().item()
        assert low >= -1 and high < vocab, f"draft tokens must lie in -1 … {vocab - 1}, not {low} … {high}"
    if isinstance(draft.topology, TreeTensors):
        inspect_tree(draft.topology, rows)
    else:
        assert isinstance(draft.topology, Topology), f"topology is a {type(draft.topology).__name__}"


def inspect_tree(tree: TreeTensors, rows: int) -> None:
    """The same for a topology made on the device, which nothing has checked yet."""
    n = len(tree)
    for name, shape, dtype in (
        ("parents", (rows, n), torch.int64), ("offsets", (rows, n), torch.int64),
        ("visible", (rows, n, n), torch.bool), ("ancestors", (rows, n, n), torch.bool),
    ):  # fmt: skip
        tensor = getattr(tree, name)
        assert tuple(tensor.shape) == shape and tensor.dtype == dtype, (
            f"topology.{name} must be {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}"
        )
    for row in range(rows):
        parents, offsets = tree.parents[row].tolist(), tree.offsets[row].tolist()
        ancestors, visible = tree.ancestors[row].tolist(), tree.visible[row].tolist()
        assert ancestors[0] == [True] + [False] * (n - 1) and offsets[0] == 0, (
            "node 0 must be the root, its own ancestor"
        )
        for node in range(1, n):
            if not any(ancestors[node]):
                continue  # no candidate: it may see and be whatever it likes
            parent = parents[node]
            assert 0 <= parent < node, f"node {node} has parent {parent}: a parent must come before its child"
            wanted = list(ancestors[parent])
            wanted[node] = True
            assert any(ancestors[parent]), f"node {node} continues node {parent}, which can never be accepted"
            assert ancestors[node] == wanted, (
                f"ancestors of node {node} are not those of its parent {parent} and itself"
            )
            assert offsets[node] == offsets[parent] + 1, (
                f"node {node} does not sit one position after its parent {parent}"
            )
            assert visible[node] == wanted, (
                f"node {node} may be accepted, so it must see its ancestors, itself, nothing else"
            )
