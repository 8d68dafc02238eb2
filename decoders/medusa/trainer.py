"""Training of the heads with the model frozen (Medusa-1): loss, schedule, early stop, and a state that can be resumed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .calibration import UNKNOWN, MedusaTrainingError
from .config import Run
from .heads import MedusaHeads

WARMUP_SHARE = 0.05
#: Positions that head accuracy is measured on between steps.
WATCHED = 8192
#: Positions per pass of an evaluation.
CHUNK = 1024


@dataclass(frozen=True)
class Examples:
    """Positions to learn from: ``hidden`` ``[P, H]`` (a mapped file), ``labels`` ``[P, K]``, ``known`` ``[Q]`` positions that
    have a label at all."""

    hidden: Tensor
    labels: Tensor
    known: Tensor

    @staticmethod
    def of(hidden: Tensor, labels: Tensor) -> Examples:
        """hidden: ``[W, T, H]``, labels: ``[W, T, K]``."""
        labels = labels.flatten(0, 1)
        return Examples(hidden.flatten(0, 1), labels, (labels != UNKNOWN).any(-1).nonzero()[:, 0])


@dataclass(frozen=True)
class Head:
    """The model's output projection, which heads share: ``weight`` ``[V, H]``, ``bias`` ``[V]`` or None."""

    weight: Tensor
    bias: Tensor | None


class Trainer:
    """Heads, optimizer and progress of one run: the state that a checkpoint holds.

    Args:
        identity: what else a checkpoint must agree on: the digests of text and model.
    """

    def __init__(self, run: Run, head: Head, identity: dict[str, Any]) -> None:
        self.run, self.head = run, head
        self.identity = {**asdict(run), **identity}
        vocab, hidden = head.weight.shape
        self.heads = MedusaHeads(run.config(hidden, vocab), head.weight).to(head.weight.device)
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), lr=run.rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.step = self.since_best = 0
        self.seconds = self.best_accuracy = 0.0
        self.best = {name: tensor.clone() for name, tensor in self.heads.state_dict().items()}

    def total(self, examples: Examples) -> int:
        """Steps of a run that is not stopped early."""
        return self.run.epochs * self.per_epoch(examples)

    def per_epoch(self, examples: Examples) -> int:
        return max(1, len(examples.known) // self.run.batch)

    def steps(self, train: Examples, watched: Examples) -> Iterator[tuple[int, float, list[float] | None]]:
        """Trains to the end: an item a step, ``(steps done, loss, head accuracies if they were just measured)``.

        The positions of a step depend on the seed and the step alone, so that a resumed run sees what it would have seen.
        """
        total, per_epoch = self.total(train), self.per_epoch(train)
        every = max(1, per_epoch // self.run.checks)
        epoch, order = -1, train.known
        watched = Examples(watched.hidden, watched.labels, _some(watched.known, WATCHED, self.run.seed))
        while self.step < total and self.since_best < self.run.patience:
            started = time.monotonic()
            now, place = divmod(self.step, per_epoch)
            if now != epoch:
                generator = torch.Generator().manual_seed(self.run.seed * 1_000_003 + now)
                epoch, order = now, train.known[torch.randperm(len(train.known), generator=generator)]
            loss = self._learn(train, order[place * self.run.batch : (place + 1) * self.run.batch], total)
            self.step += 1
            measured = None
            if self.step % every == 0 or self.step == total:
                measured = accuracies(ranks_of(self.heads, self.head, watched))
                self._note(sum(measured) / len(measured))
            self.seconds += time.monotonic() - started
            yield self.step, loss, measured
        self.heads.load_state_dict(self.best)

    def _learn(self, train: Examples, positions: Tensor, total: int) -> float:
        """One optimizer step. Head by head, because the scores of all at once are large."""
        device = self.head.weight.device
        hidden = train.hidden[positions].to(device).float()
        labels = train.labels[positions].to(device)
        sum_of_losses = 0.0
        for k in range(self.run.heads):
            right = labels[:, k]
            with torch.autocast(device.type, torch.bfloat16) if self.run.bf16 else nullcontext():
                scores = self.heads.of_head(k, hidden, self.head.weight, self.head.bias)
            loss = torch.nn.functional.cross_entropy(scores.float(), right, ignore_index=UNKNOWN, reduction="sum")
            loss = self.run.decay**k * loss / (right != UNKNOWN).sum().clamp(min=1)
            loss.backward()
            sum_of_losses += loss.item()
        warm = min(1.0, (self.step + 1) / max(1.0, WARMUP_SHARE * total))
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.rate * warm * 0.5 * (1 + math.cos(math.pi * self.step / total))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum_of_losses

    def _note(self, accuracy: float) -> None:
        """Keeps the best heads so far."""
        if accuracy > self.best_accuracy:
            self.best_accuracy, self.since_best = accuracy, 0
            self.best = {name: tensor.clone() for name, tensor in self.heads.state_dict().items()}
        else:
            self.since_best += 1

    def save(self, checkpoint: Path) -> None:
        """Writes the whole state, loadable with ``weights_only``; an interrupted write costs no earlier checkpoint."""
        state = {
            "identity": self.identity, "heads": self.heads.state_dict(), "best": self.best,
            "optimizer": self.optimizer.state_dict(), "step": self.step, "since_best": self.since_best,
            "best_accuracy": self.best_accuracy, "seconds": self.seconds,
        }  # fmt: skip
        partial = checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(checkpoint)

    def load(self, checkpoint: Path) -> None:
        """Goes on from a checkpoint.

        Raises:
            MedusaTrainingError: it is of another run.
        """
        state = torch.load(checkpoint, weights_only=True, map_location=self.head.weight.device)
        differs = sorted(
            name for name in {*state["identity"], *self.identity}
            if state["identity"].get(name) != self.identity.get(name)
        )  # fmt: skip
        if differs:
            raise MedusaTrainingError(
                f"{checkpoint} is of a run with other {', '.join(differs)}; choose another folder, or train without resuming"
            )
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best, self.step, self.since_best = state["best"], state["step"], state["since_best"]
        self.best_accuracy, self.seconds = state["best_accuracy"], state["seconds"]


@torch.no_grad()
def ranks_of(heads: MedusaHeads, head: Head, examples: Examples) -> Tensor:
    """``[Q, K]`` int64: how many tokens each head prefers to the right one; -1 where that is not known."""
    found = []
    for positions in examples.known.split(CHUNK):
        hidden, labels = examples.hidden[positions].to(head.weight.device), examples.labels[positions]
        labels = labels.to(hidden.device)
        ranks = []
        for k in range(heads.config.heads):
            scores = heads.of_head(k, hidden, head.weight, head.bias).float()
            right = scores.gather(1, labels[:, k : k + 1].clamp(min=0))
            ranks.append(torch.where(labels[:, k] == UNKNOWN, -1, (scores > right).sum(-1)))
        found.append(torch.stack(ranks, 1).cpu())
    return torch.cat(found) if found else torch.empty(0, heads.config.heads, dtype=torch.int64)


def accuracies(ranks: Tensor, among: int = 1) -> list[float]:
    """Per head, how often the right token is among its best `among` draft tokens."""
    known = (ranks >= 0).sum(0).clamp(min=1)
    return (((ranks >= 0) & (ranks < among)).sum(0) / known).tolist()


def _some(positions: Tensor, count: int, seed: int) -> Tensor:
    """At most `count` of `positions`, drawn without replacement."""
    generator = torch.Generator().manual_seed(seed)
    return positions[torch.randperm(len(positions), generator=generator)[:count].sort().values]
