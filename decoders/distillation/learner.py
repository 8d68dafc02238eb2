"""Distillation: the draft model learns the target's distribution after every token, in files and in the target's own text."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..training import Run
from ..training.epochs import EpochLearner
from ..training.losses import soft_cross_entropy
from ..training.optimizers import muon_and_adamw
from ..training.schedules import warmup_stable_decay
from ..training.texts import Texts, counted, stop_tokens
from .recipe import DraftTraining

WARMUP_STEPS = 20
DECAY_SHARE = 0.5
#: Rows that agreement is measured on between steps.
WATCHED = 16


class DraftLearner(EpochLearner):
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
        super().__init__(training, len(train.ids), training.rows)
        self.training, self.model, self.target, self.train = training, draft, target, train
        self.stops, self.positions = stop_tokens(target), training.rows * training.length
        self._watched = held_out.part(0, WATCHED)
        outer = (draft.get_input_embeddings(), draft.get_output_embeddings())
        self.optimizers = muon_and_adamw(draft, training.rate, [cast(Tensor, m.weight) for m in outer if m is not None])

    def run(self, identity: Mapping[str, Any]) -> Run:
        """The run of this draft model. identity: fingerprints of text and target."""
        return self.run_at(warmup_stable_decay, identity, clip=1.0, warmup_steps=WARMUP_STEPS, decay_share=DECAY_SHARE)

    def learn(self, step: int) -> Tensor:
        texts = self.train.chosen(self.examples_of(step))
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
