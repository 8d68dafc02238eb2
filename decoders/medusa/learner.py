"""Training of the heads with the model frozen (Medusa-1): examples, loss, and the accuracy that training is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..training import Run
from ..training.epochs import EpochLearner
from ..training.schedules import warmup_cosine
from .config import HeadsTraining
from .heads import MedusaHeads
from .hidden_states import UNKNOWN

WARMUP_SHARE = 0.05
#: Positions that head accuracy is measured on between steps.
WATCHED = 8192
#: Positions per pass of an evaluation.
CHUNK = 1024


@dataclass(frozen=True)
class Examples:
    """Positions to learn from.

    Attributes:
        hidden: ``[P, H]``, a mapped file.
        labels: ``[P, K]``.
        known: ``[Q]``, the positions that have a label at all.
    """

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
    """The model's output projection, which heads share.

    Attributes:
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
    """

    weight: Tensor
    bias: Tensor | None


class HeadsLearner(EpochLearner):
    """Heads and their optimizer.

    Args:
        head: the model's output projection.
        train: positions to learn from.
        held_out: positions to judge by; at most :data:`WATCHED` of them are.
    """

    model: MedusaHeads

    def __init__(self, training: HeadsTraining, head: Head, train: Examples, held_out: Examples) -> None:
        super().__init__(training, len(train.known), training.batch)
        self.training, self.head, self.train = training, head, train
        vocab, hidden = head.weight.shape
        self.model = MedusaHeads(training.config(hidden, vocab), head.weight).to(head.weight.device)
        self.optimizers = [
            torch.optim.AdamW(self.model.parameters(), lr=training.rate, betas=(0.9, 0.95), weight_decay=0.0)
        ]
        self.positions = training.batch
        watched = _some(held_out.known, WATCHED, training.seed)
        self._held_out = Examples(held_out.hidden, held_out.labels, watched)

    def run(self, identity: Mapping[str, Any]) -> Run:
        """The run of these heads. identity: fingerprints of text and model."""
        return self.run_at(warmup_cosine, identity, warmup_share=WARMUP_SHARE)

    def learn(self, step: int) -> Tensor:
        """Head by head, because the scores of all at once are large."""
        positions = self.train.known[self.examples_of(step)]
        device = self.head.weight.device
        hidden = self.train.hidden[positions].to(device).float()
        labels = self.train.labels[positions].to(device)
        total = torch.zeros((), device=device)
        for k in range(self.training.heads):
            right = labels[:, k]
            with torch.autocast(device.type, torch.bfloat16) if self.training.bf16 else nullcontext():
                scores = self.model.of_head(k, hidden, self.head.weight, self.head.bias)
            loss = torch.nn.functional.cross_entropy(scores.float(), right, ignore_index=UNKNOWN, reduction="sum")
            loss = self.training.decay**k * loss / (right != UNKNOWN).sum().clamp(min=1)
            loss.backward()
            total += loss.detach()
        return total

    def scores(self) -> list[float]:
        return accuracies(ranks_of(self.model, self.head, self._held_out))


@torch.no_grad()
def ranks_of(heads: MedusaHeads, head: Head, examples: Examples) -> Tensor:
    """``[Q, K]`` int64: how many tokens each head prefers to the right one; -1 where that is not known."""
    chunks = []
    for positions in examples.known.split(CHUNK):
        hidden, labels = examples.hidden[positions].to(head.weight.device), examples.labels[positions]
        labels = labels.to(hidden.device)
        ranks = []
        for k in range(heads.config.heads):
            scores = heads.of_head(k, hidden, head.weight, head.bias).float()
            right = scores.gather(1, labels[:, k : k + 1].clamp(min=0))
            ranks.append(torch.where(labels[:, k] == UNKNOWN, -1, (scores > right).sum(-1)))
        chunks.append(torch.stack(ranks, 1).cpu())
    return torch.cat(chunks) if chunks else torch.empty(0, heads.config.heads, dtype=torch.int64)


def accuracies(ranks: Tensor, among: int = 1) -> list[float]:
    """Per head, how often the right token is among its best `among` draft tokens."""
    known = (ranks >= 0).sum(0).clamp(min=1)
    return (((ranks >= 0) & (ranks < among)).sum(0) / known).tolist()


def _some(positions: Tensor, count: int, seed: int) -> Tensor:
    """At most `count` of `positions`, drawn without replacement."""
    generator = torch.Generator().manual_seed(seed)
    return positions[torch.randperm(len(positions), generator=generator)[:count].sort().values]
