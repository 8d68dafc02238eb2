"""Distillation: the draft model learns the target's distribution after every token, in files and in the target's own text."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..training import Learner, Run
from ..training.losses import soft_cross_entropy
from ..training.optimizers import muon_and_adamw
from ..training.schedules import warmup_stable_decay
from ..training.texts import Texts, counted, stop_tokens
from .recipe import DraftTraining

WARMUP_STEPS = 20
DECAY_SHARE = 0.5
#: Rows that agreement is measured on between steps.
WATCHED = 16


class DraftLearner(Learner):
    """A draft model and its optimizers.

    Args:
        target: frozen; its logits are computed as they are needed.
        train: text to learn from.
        held_out: text to judge by; at most :data:`WATCHED` rows of it are, the target's own first.
    """

    model: PreTrainedModel

    def __init__(
        self, training: DraftTraining, draft: PreTrainedModel, target: PreTrainedModel, train: Texts, held_out: Texts
    ) -> None:
        self.training, self.model, self.target, self.train = training, draft, target, train
        self.stops, self.positions = stop_tokens(target), training.rows * training.length
        self._watched = held_out.part(0, WATCHED)
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        outer = (draft.get_input_embeddings(), draft.get_output_embeddings())
        self.optimizers = muon_and_adamw(draft, training.rate, [cast(Tensor, m.weight) for m in outer if m is not None])

    @property
    def steps_per_epoch(self) -> int:
        return max(1, len(self.train.ids) // self.training.rows)

    def run(self, identity: Mapping[str, Any]) -> Run:
        """The run of this draft model. identity: fingerprints of text and target."""
        training, steps = self.training, self.training.epochs * self.steps_per_epoch
        return Run(
            steps=steps,
            rate=partial(
                warmup_stable_decay, steps=steps, peak=training.rate, warmup_steps=WARMUP_STEPS, decay_share=DECAY_SHARE
            ),
            identity={**asdict(training), **identity},
            clip=1.0,
            check_every=max(1, self.steps_per_epoch // training.checks),
            patience=training.patience,
        )

    def learn(self, step: int) -> Tensor:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.training.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.train.ids), generator=generator)
        rows = self._order[place * self.training.rows : (place + 1) * self.training.rows]
        texts = Texts(self.train.ids[rows], self.train.own[rows])
        target, counts = self._taught(texts)
        scores = self._scores(self.model, texts)
        loss, gradient = soft_cross_entropy(
            scores.detach().float(), target.softmax(-1), counts / counts.sum().clamp(min=1)
        )
        scores.backward(gradient.to(scores.dtype))
        return loss

    def scores(self) -> list[float]:
        """How often draft and target choose the same token, and how much their distributions have in common."""
        return list(agreement(self, self._watched))

    def _taught(self, texts: Texts) -> tuple[Tensor, Tensor]:
        """The target's logits ``[B, T, V]`` float32, and ``[B, T]`` float32 after which tokens they count."""
        with torch.no_grad():
            logits = self._scores(self.target, texts).float()
        return logits, counted(texts, self.stops).to(logits.device).float()

    def _scores(self, model: PreTrainedModel, texts: Texts) -> Tensor:
        device = self.target.device
        with torch.autocast(device.type, torch.bfloat16) if self.training.bf16 else nullcontext():
            return model(input_ids=texts.ids.to(device), use_cache=False).logits


@torch.no_grad()
def agreement(learner: DraftLearner, texts: Texts) -> tuple[float, float]:
    """How often both choose the same token greedily, and 1 - TV of their distributions, where `texts` count."""
    training, sums, count = learner.model.training, torch.zeros(2, dtype=torch.float64), 0.0
    learner.model.eval()
    for first in range(0, len(texts.ids), learner.training.rows):
        part = texts.part(first, first + learner.training.rows)
        target, counts = learner._taught(part)
        scores = learner._scores(learner.model, part).float()
        same = (target.argmax(-1) == scores.argmax(-1)) * counts
        overlap = torch.minimum(target.softmax(-1), scores.softmax(-1)).sum(-1) * counts
        sums += torch.stack([same.sum(), overlap.sum()]).cpu().double()
        count += counts.sum().item()
    learner.model.train(training)
    same, overlap = (sums / max(count, 1)).tolist()
    return same, overlap
