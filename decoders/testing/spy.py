"""A wrapper that checks every draft and every hook of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..engine.decode.hook_checks import tensors_of
from ..engine.model.recordings import WARM_UP_STEPS
from ..errors import DraftError
from ..strategies.merged import Merged
from ..strategy import Context, Draft, PromptChunk, Sequences, Step, Strategy
from ..tree import Topology, TreeTensors
from . import memory
from .memory import undisturbed
from .tape import HostReadError, NoHostData, NoHostReads, NoWaiting, RecordingError
from .wrapped import Wrapped

if TYPE_CHECKING:
    from ..drafters import Forced


class _Reads:
    """Raises errors if a hook waits for the device or, from the first recorded step on, creates tensors from data of the host."""

    def __init__(self) -> None:
        self.modes: tuple[NoHostReads, NoWaiting] | tuple[()] = ()

    @contextmanager
    def refused(self, recorded: bool) -> Iterator[None]:
        self.modes = (NoHostData() if recorded else NoHostReads(), NoWaiting(host_data=not recorded))
        with self.modes[0], self.modes[1]:
            yield
        self.modes = ()

    def excuse(self, off: bool) -> None:
        for mode in self.modes:
            mode.off = off


class _Exempt:
    """Wraps ``context.guide``, so that its method `forced` is not checked: the guide declares whether it waits for the device."""

    def __init__(self, guide: Forced, reads: _Reads) -> None:
        self.guide, self.reads = guide, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.guide, name)

    def forced(self, sequences: Sequences, limit: int) -> Tensor:
        self.reads.excuse(True)
        try:
            return self.guide.forced(sequences, limit)
        finally:
            self.reads.excuse(False)


@dataclass(frozen=True)
class SpyLog:
    """One step of the wrapped strategy: the rows' texts and lengths before the step, which rows have finished, and the draft."""

    texts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    finished: tuple[bool, ...]
    draft: Draft


class Spy(Wrapped):
    """Forwards every call to `inner`, and logs steps in `seen`. Raises AssertionError for drafts that break the contract of
    ``Draft``.

    The spy also raises AssertionError for hooks that write to the loop's tensors, or that change the strategy's instance, its settings,
    or the state of the process (random states, default dtype, grad mode and others). The message names the hook.

    Args:
        forbid_host_reads: whether hooks must not copy values from the device to the host.
        part: whether `inner` is a part of another strategy. Messages then name `inner`.
    """

    def __init__(self, inner: Strategy, forbid_host_reads: bool = False, part: bool = False) -> None:
        super().__init__(inner)
        self.watched = inner  # the strategies whose instances must not change
        self.reads = _Reads() if forbid_host_reads else None
        self.seen: list[SpyLog] = []
        self.finished = 0  # calls of `finish`
        self.vocab = 0
        self._of = f" of {inner.name!r}" if part else ""

    def start(self, context: Context) -> Any:
        self.vocab, self.seen = context.vocab_size, []
        if self.reads is not None and context.guide is not None:
            context = replace(context, guide=cast("Forced", _Exempt(context.guide, self.reads)))
        return self._untouched("start", lambda: self.inner.start(context), context.sequences)

    def rebatch(self, state: Any, rows: Tensor, context: Context) -> Any:
        return self._untouched("rebatch", lambda: self.inner.rebatch(state, rows, context), context.sequences)

    def prefill(self, state: Any, chunk: PromptChunk) -> None:
        self._untouched("prefill", lambda: self.inner.prefill(state, chunk), None, chunk)

    def finish(self, state: Any) -> None:
        self.finished += 1
        self._untouched("finish", lambda: self.inner.finish(state), None)

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        draft = self._untouched("propose", lambda: self.inner.propose(state, sequences), sequences)
        try:
            inspect_draft(draft, sequences, self.vocab)
        except (AssertionError, DraftError) as error:
            raise AssertionError(f"propose of {self.name!r}: {error}") from error
        # The draft is copied, because the strategy may write the next draft to the same tensors.
        kept, tree = draft.scores.clone() if draft.scores is not None else None, draft.topology
        tree = (
            tree if isinstance(tree, Topology) else TreeTensors(*(getattr(tree, f.name).clone() for f in fields(tree)))
        )
        copied = replace(draft, tokens=draft.tokens.clone(), topology=tree, scores=kept)
        lengths, finished = tuple(sequences.length.tolist()), tuple(sequences.finished.tolist())
        texts = tuple(tuple(text[:end]) for text, end in zip(sequences.tokens.tolist(), lengths, strict=True))
        self.seen.append(SpyLog(texts, lengths, finished, copied))
        return draft

    def observe(self, state: Any, step: Step) -> None:
        self._untouched("observe", lambda: self.inner.observe(state, step), step.sequences, step)

    def _untouched(
        self, hook: str, call: Callable[[], Any], sequences: Sequences | None, step: Step | PromptChunk | None = None
    ) -> Any:
        given = tensors_of(step) | tensors_of(sequences)
        before, own = {name: tensor.clone() for name, tensor in given.items()}, memory.of_instance(self.watched)
        name = f"{hook}{self._of}"
        with ExitStack() as stack:
            stack.enter_context(undisturbed(name))
            if self.reads is not None and hook in ("propose", "observe"):
                stack.enter_context(self.reads.refused(recorded=len(self.seen) - (hook == "observe") >= WARM_UP_STEPS))
            try:
                result = call()
            except (HostReadError, RecordingError) as error:
                raise type(error)(f"{name}: {error}" if self._of else str(error)) from error
        after = tensors_of(step) | tensors_of(sequences)
        for what, new in given.items():
            old = before[what]
            assert after.get(what) is new, (
                f"{name} put another tensor in the place of `{what}`, which belongs to the loop"
            )
            if what == "tokens" and "length" in before:
                inside = torch.arange(new.shape[1], device=new.device) < before["length"][:, None]
                assert torch.equal(torch.where(inside, old, 0), torch.where(inside, new, 0)), (
                    f"{name} changed `tokens`, which belongs to the loop"
                )
                assert torch.equal(old, new), (
                    f"{name} wrote into `tokens` after the rows' lengths: the whole tensor belongs to the loop; work on a copy"
                )
            assert torch.equal(old, new), f"{name} changed `{what}`, which belongs to the loop"
        changed = memory.difference(own, memory.of_instance(self.watched))
        assert changed is None, (
            f"{name} changed {'the settings' if changed.startswith('settings.') else 'its instance'}: {changed}; so state leaks "
            "from call to call. An instance may hold settings only: keep other state in the object that start returns"
        )
        return result


def spied(strategy: Strategy, forbid_host_reads: bool = False) -> Spy:
    """`strategy` in a :class:`Spy`. Each part of a merged strategy is wrapped in its own spy, so that messages name the part."""
    if type(strategy) is Merged:
        parts = [Spy(part, forbid_host_reads, part=True) for part in strategy.parts]
        spy = Spy(Merged(parts, strategy.settings))
        spy.watched = strategy
        return spy
    return Spy(strategy, forbid_host_reads)


def inspect_draft(draft: Draft, sequences: Sequences, vocab: int) -> None:
    """Raises AssertionError or DraftError if `draft` breaks the contract of ``Draft``. Also checks the values in its tensors."""
    rows = sequences.length.shape[0]
    assert isinstance(draft, Draft), f"propose must return a Draft, not {type(draft).__name__}"
    draft.check(rows)
    device = torch.device("cpu") if draft.on_host else sequences.tokens.device
    assert draft.tokens.device == device, f"draft tokens are on {draft.tokens.device}, the loop on {device}"
    if draft.tokens.numel():
        low, high = draft.tokens.min().item(), draft.tokens.max().item()
        assert low >= -1 and high < vocab, f"draft tokens must lie in -1 … {vocab - 1}, not {low} … {high}"
    if draft.scores is not None:
        inspect_scores(draft, sequences, vocab)
    if draft.grades is not None:
        negative = draft.grades[(draft.tokens >= 0) & (draft.grades < 0)]
        assert not len(negative), f"Draft.grades must be 0 or more, not {int(negative[0])}"
    if isinstance(draft.topology, TreeTensors):
        inspect_tree(draft.topology, rows)
        deepest = int(draft.topology.ancestors.sum(-1).max()) - 1
        assert deepest <= draft.levels, f"Draft.depth is {draft.depth}, and a path has {deepest} draft tokens"
    else:
        assert isinstance(draft.topology, Topology), f"topology is a {type(draft.topology).__name__}"


def inspect_scores(draft: Draft, sequences: Sequences, vocab: int) -> None:
    """Raises AssertionError if the scores of a draft have a wrong dtype or shape, or hold NaN, inf or only -inf."""
    scores = draft.scores
    assert scores is not None
    wanted = [*draft.tokens.shape, vocab]
    assert scores.dtype == torch.float32 and list(scores.shape) == wanted, (
        f"Draft.scores must be torch.float32 {wanted}, not {scores.dtype} {list(scores.shape)}"
    )
    drafted = scores[(draft.tokens >= 0) & ~sequences.finished[:, None]]
    assert not drafted.isnan().any(), "Draft.scores holds NaN where a token is drafted"
    assert not (drafted == float("inf")).any(), "Draft.scores holds inf where a token is drafted"
    assert (drafted > float("-inf")).any(-1).all(), (
        "Draft.scores is -inf for the whole vocabulary where a token is drafted"
    )


def inspect_tree(tree: TreeTensors, rows: int) -> None:
    """Raises AssertionError if the tensors of a tree have a wrong dtype or shape, or contradict each other."""
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
            "node 0 must be the root, with parent -1 and no other ancestor than itself, and parents must come before their children"
        )
        for node in range(1, n):
            if not any(ancestors[node]):
                continue  # a node that is not a candidate may see any nodes, and have any position
            parent = parents[node]
            assert 0 <= parent < node, f"node {node} has parent {parent}: a parent must come before its child"
            wanted = list(ancestors[parent])
            wanted[node] = True
            assert any(ancestors[parent]), f"node {node} continues node {parent}, which can never be accepted"
            assert ancestors[node] == wanted, (
                f"ancestors of node {node} are not the ancestors of its parent {parent} and itself"
            )
            assert offsets[node] == offsets[parent] + 1, f"node {node} is not one position after its parent {parent}"
            assert visible[node] == wanted, (
                f"node {node} may be accepted, so it must see its ancestors, itself, nothing else"
            )
