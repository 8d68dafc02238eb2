"""Strategies for tests. `Wrapped` forwards to a strategy, `Replayed` replays its hooks like a CUDA graph, `Replay` drafts a text."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ..engine.decode.hook_checks import tensors_of
from ..engine.model.recordings import WARM_UP_STEPS
from ..engine.model.static_inputs import find_tensors
from ..settings import Configured, Settings
from ..strategy import Context, Draft, Sequences, Step, Strategy
from ..tree import Topology
from .tape import NoHostData, Tape

#: Every method of a strategy that the loop calls.
HOOKS = [
    name
    for cls in (Configured, Strategy)
    for name, value in vars(cls).items()
    if inspect.isfunction(value) and not name.startswith("_") and name != "declare"
]


class Wrapped(Strategy):
    """Declares the traits of `inner` and forwards every hook to it.

    Only the trait `rests`, which lets the loop skip drafts, is False: what is drafted then does not depend on the costs of steps.
    """

    def __init__(self, inner: Strategy) -> None:
        self.inner, self.settings = inner, inner.settings
        self.declare(**inner.traits | {"rests": False})
        of_class = ("name", "summary", "needs", "hints", "settings_class", "auto_place", "auto_settings")
        vars(self).update({name: getattr(inner, name) for name in of_class})

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        return self.inner.propose(state, sequences)

    def compose(self, resolve: Callable[..., Strategy], registered: Mapping[str, type[Strategy]]) -> None:
        self.inner.compose(resolve, registered)
        self.declare(**self.inner.traits | {"rests": False})


def _passed_on(hook: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Strategy, hook))
    def passed_on(self: Wrapped, *arguments: Any) -> Any:
        return getattr(self.inner, hook)(*arguments)

    return passed_on


for _hook in HOOKS:
    if _hook not in vars(Wrapped):
        setattr(Wrapped, _hook, _passed_on(_hook))


class Replayed(Wrapped):
    """Forwards calls to `inner`, as CUDA graphs do, with arguments in the same tensors in every step. Logs every draft.

    After the first steps, shapes and the tensors of the strategy's state must stay the same, because a recording cannot follow changes.

    Args:
        record: whether each hook is recorded after the first steps, and replayed from then on.

    Attributes:
        drafts: the draft tokens of every step, as lists.
        rebound: path of the first value in the state that is not a tensor and has changed; None if there is none.
    """

    def __init__(self, inner: Strategy, record: bool) -> None:
        super().__init__(inner)
        self.record = record
        self.drafts: list[list[list[int]]] = []
        self.rebound: str | None = None

    def start(self, context: Context) -> Any:
        # If a grammar computes forced tokens on the host (``context.guide``), no step is recorded.
        self._recordable = context.guide is None or context.guide.on_device
        self.drafts = []
        self._tapes: dict[str, tuple[Tape, Any]] = {}
        self._static: dict[str, Tensor] = {}
        self._slots = context.slots
        self._shape: tuple | None = None
        self._places: dict[str, Tensor] | None = None
        self._others: dict[str, Any] = {}
        return self.inner.start(context)

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        given = self._sequences(sequences)
        if self._recording and self._recordable:
            self._compare_places(state)
        draft = self._run("propose", lambda: self.inner.propose(state, given))
        if self._recording:
            self._compare_shape(draft)
        self.drafts.append(draft.tokens.tolist())
        return draft

    def observe(self, state: Any, step: Step) -> None:
        if not self.inner.observes:
            return
        tensors: dict[str, Any] = {n: self._copy(f"step.{n}", t) for n, t in tensors_of(step).items()}
        static = Step(**tensors, sequences=self._sequences(step.sequences), own_nodes=step.own_nodes)
        self._run("observe", lambda: self.inner.observe(state, static))

    @property
    def _recording(self) -> bool:
        return len(self.drafts) >= WARM_UP_STEPS

    def _run(self, hook: str, call: Any) -> Any:
        """Calls `call`, or replays its recording, and returns the result."""
        # `observe` is recorded in the same step as `propose`, but after the step's draft was logged, so 1 is subtracted.
        if not self.record or not self._recordable or len(self.drafts) - (hook == "observe") < WARM_UP_STEPS:
            return call()
        if hook not in self._tapes:
            tape = Tape()
            with NoHostData(), tape:
                result = call()
            self._tapes[hook] = tape, result
        tape, result = self._tapes[hook]
        tape.replay()
        return result

    def _sequences(self, sequences: Sequences) -> Sequences:
        """A copy of `sequences`. As on CUDA, the copy's tensors are the same in every step, and have slots for the whole call."""
        parts = tensors_of(sequences)
        tokens = self._static.setdefault("tokens", sequences.tokens.new_zeros(sequences.tokens.shape[0], self._slots))
        width = min(self._slots, sequences.tokens.shape[1])
        tokens[:, :width].copy_(sequences.tokens[:, :width])
        own: dict[str, Any] = {n: tokens if n == "tokens" else self._copy(n, t) for n, t in parts.items()}
        return Sequences(**own)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        own = self._static.get(name)
        # Shapes may change until the recorded step.
        if own is None or (own.shape != tensor.shape and len(self.drafts) <= WARM_UP_STEPS + 1):
            self._static[name] = own = tensor.clone()
        if own.shape != tensor.shape:
            raise ShapeError(f"{name} is {list(tensor.shape)} after {list(own.shape)}: shapes must stay the same")
        return own.copy_(tensor)

    def _compare_shape(self, draft: Draft) -> None:
        tree = draft.topology
        shape = (tuple(draft.tokens.shape), tree if isinstance(tree, Topology) else len(tree), draft.scores is None)
        if self._shape is not None and shape != self._shape:
            nodes, before = shape[0][1] + 1, self._shape[0][1] + 1
            what = f"{nodes} nodes after {before}" if nodes != before else f"another tree of {nodes} nodes"
            raise ShapeError(f"proposes {what}: shapes must stay the same; pad with -1, or use TreeTensors")
        self._shape = shape

    def _compare_places(self, state: Any) -> None:
        """Checks that the state still holds the tensors of the step before, because a recording reads and writes these tensors."""
        # The tensors of the step before are kept alive, so that a new tensor cannot get the address of an old one.
        tensors, others = find_tensors(state)
        for path, tensor in tensors.items() if self._places is not None else ():
            before = self._places.get(path, tensor)  # type: ignore[union-attr]
            if before.shape != tensor.shape or before.data_ptr() != tensor.data_ptr():
                shapes = f"is {list(tensor.shape)} after {list(before.shape)}"
                how = shapes if before.shape != tensor.shape else "has moved"
                raise ShapeError(f"{path} {how}: a recorded step keeps using the old tensor; write into it with copy_")
        if self._places is not None and self.rebound is None:
            changed = [path for path, leaf in others.items() if not _equal(self._others.get(path, leaf), leaf)]
            self.rebound = changed[0] if changed else None
        self._places, self._others = tensors, others


def _equal(own: Any, other: Any) -> bool:
    try:
        return own is other or (type(own) is type(other) and bool(own == other))
    except Exception:  # values that cannot be compared count as different
        return False


class ShapeError(AssertionError):
    """A shape or tensor changed between steps, which a recording cannot follow."""


class ReplaySettings(Settings):
    """The text to propose, and which of its tokens are made wrong."""

    texts: tuple[tuple[int, ...], ...] = Field((), description="Prompt and output of every row, without padding.")
    length: int = Field(6, ge=1, description="Tokens proposed per branch.")
    branches: int = Field(1, ge=1, description="Number of branches; the right branch changes place from step to step.")
    wrong_every: int = Field(5, ge=0, description="Every so many positions the token is wrong; 0: no token is wrong.")


class Replay(Strategy):
    """Proposes the next tokens of a known text, some of them changed, so that all acceptance lengths occur."""

    name = "replay"
    summary = "Proposes a known text with some wrong tokens (for tests)."
    settings_class = ReplaySettings
    on_device = True
    rows_apart = False  # row i of the batch drafts from text i

    def start(self, context: Context) -> Tensor:
        texts = self.settings.texts
        width = max(map(len, texts), default=0) + self.settings.length + 1
        known = torch.full((context.rows, max(width, context.slots)), -1, dtype=torch.int64)
        for row, text in enumerate(texts[: context.rows]):
            known[row, : len(text)] = torch.tensor(text)
        return known.to(context.device)

    def propose(self, state: Tensor, sequences: Sequences) -> Draft:
        s: ReplaySettings = self.settings
        at = sequences.length[:, None] + torch.arange(s.length, device=state.device)
        draft_token = state.gather(1, at.clamp(max=state.shape[1] - 1))
        if s.wrong_every:
            # Each row has its wrong tokens at other positions, so that rows advance unevenly.
            row = torch.arange(state.shape[0], device=state.device)[:, None]
            draft_token = torch.where((at + 2 * row) % s.wrong_every == 0, (draft_token - 1).clamp(min=-1), draft_token)
        branch = torch.arange(s.branches, device=state.device)
        right = branch[None] == sequences.length[:, None] % s.branches
        decoy = (draft_token - 2).clamp(min=-1)
        return Draft.branches(torch.where(right[:, :, None], draft_token[:, None], decoy[:, None]))
