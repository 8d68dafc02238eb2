"""Training of a head with the target frozen: the loss of the simulated drafts, and the acceptance that training is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..training import Run
from ..training.epochs import EpochLearner
from ..training.losses import soft_cross_entropy
from ..training.optimizers import muon_and_adamw
from ..training.schedules import warmup_stable_decay
from ..training.texts import Texts, stop_tokens
from .head import Eagle3Head
from .lessons import Lesson, Teacher
from .recipe import HeadTraining
from .unroll import unrolled

WARMUP_STEPS = 20
DECAY_SHARE = 0.5
#: Rows that acceptance is measured on between steps.
WATCHED = 32


class HeadLearner(EpochLearner):
    """A head and its optimizers: Muon for the layer's matrices, AdamW for the output matrix and norms, as for the demo models.

    Args:
        ids: ``[D]`` int64, the tokens that the head can propose.
        train: text to learn from.
        held_out: text to judge by; at most :data:`WATCHED` rows of it are, the model's own first.
    """

    model: Eagle3Head

    def __init__(
        self, training: HeadTraining, head: Eagle3Head, teacher: Teacher, ids: Tensor, train: Texts, held_out: Texts
    ) -> None:
        super().__init__(training, len(train.ids), training.rows)
        self.training, self.model, self.teacher, self.ids, self.train = training, head, teacher, ids, train
        self.stops = stop_tokens(teacher.model)
        self.positions = training.rows * (training.length - training.depth)
        self._watched = held_out.part(0, WATCHED)
        self.optimizers = muon_and_adamw(head, training.rate, [head.lm_head.weight])

    def run(self, identity: Mapping[str, Any]) -> Run:
        """The run of this head. identity: fingerprints of text and model."""
        return self.run_at(warmup_stable_decay, identity, clip=1.0, warmup_steps=WARMUP_STEPS, decay_share=DECAY_SHARE)

    def learn(self, step: int) -> Tensor:
        lesson = self.teacher.lesson(self.train.chosen(self.examples_of(step)), self.stops)
        return self.backward(lesson, self._chains(step))

    def _chains(self, step: int) -> Tensor | None:
        """``[C]`` int64, ascending, the positions at which a step simulates whole chains; None: all."""
        slots = self.training.length - self.training.depth
        count = max(1, round(self.training.chains * slots))
        if count >= slots:
            return None
        generator = torch.Generator().manual_seed(self.training.seed * 1_000_003 + step)
        return torch.randperm(slots, generator=generator)[:count].sort().values.to(self.ids.device)

    def backward(self, lesson: Lesson, chains: Tensor | None = None) -> Tensor:
        """Leaves the gradients of ``Σ_k decay^k · CE_k`` in the head; the loss.

        CE of simulated token k is taken against the target's distribution over the tokens that the head has, where the target's best
        token is one of them.

        Args:
            chains: ``[C]`` int64, ascending, the positions at which more than one token is simulated; None: all.
        """
        depth, head, known = self.training.depth, self.model, self.ids
        target = lesson.logits[..., known].softmax(-1)
        counts = (lesson.counted & torch.isin(lesson.logits.argmax(-1), known)).float()
        slots = lesson.features.shape[1] - depth
        every = torch.arange(slots, device=target.device)
        total, through = lesson.features.new_zeros(()), lesson.features.new_zeros(())
        with self.teacher.precision():
            drafted = unrolled(head, lesson.embedded[:, 1:], lesson.features[:, :slots], depth, chains)
            for k, states in enumerate(drafted):
                # The scores of one token at a time: those of all at once are large. The states' own gradient follows below.
                leaf = states.detach().requires_grad_()
                places = (every if k == 0 or chains is None else chains) + k + 1
                scores = head.lm_head(head.norm(leaf))
                weights = self.training.decay**k * counts[:, places] / counts[:, places].sum().clamp(min=1)
                loss, gradient = soft_cross_entropy(scores.detach().float(), target[:, places], weights)
                scores.backward(gradient.to(scores.dtype))
                assert leaf.grad is not None
                through = through + (states.float() * leaf.grad.float()).sum()
                total = total + loss
        through.backward()
        return total

    def scores(self) -> list[float]:
        """Shares of the drafts whose first 1, 2, … tokens are all accepted, greedily."""
        return acceptance(self, self._watched).reached


class Acceptance:
    """What becomes of simulated drafts.

    Attributes:
        drafts: how many there are.
        reached: per length, the share of drafts accepted up to there when greedy.
        rates: per simulated token, how often it is the target's, after text that the target wrote or read.
        overlaps: the same when sampling at temperature 1 with a coupled draw at its best: 1 - TV of both distributions.
    """

    def __init__(self, drafts: int, reached: list[float], rates: list[float], overlaps: list[float]) -> None:
        self.drafts, self.reached, self.rates, self.overlaps = drafts, reached, rates, overlaps

    @property
    def length(self) -> float:
        """Mean tokens of a step that a chain of this depth gives, the target's own included."""
        return 1 + sum(self.reached)

    def facts(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "drafts": self.drafts, "tokens_per_step": self.length, "reached": self.reached, "rates": self.rates,
            "overlaps": self.overlaps,
        }  # fmt: skip


@torch.no_grad()
def acceptance(learner: HeadLearner, texts: Texts) -> Acceptance:
    """Simulates a chain at every position of `texts` that counts.

    In the model's own greedy text this is what a chain meets in decoding, since its tokens are the target's; in other text a draft is
    judged after the text's tokens, not the target's.
    """
    head, depth, known = learner.model, learner.training.depth, learner.ids
    sums, drafts = torch.zeros(3, depth, dtype=torch.float64), 0
    for first in range(0, len(texts.ids), learner.training.rows):
        lesson = learner.teacher.lesson(texts.part(first, first + learner.training.rows), learner.stops)
        slots = lesson.features.shape[1] - depth
        best, target = lesson.logits.argmax(-1), lesson.logits.softmax(-1)[..., known]
        # A draft counts where all of its tokens would.
        whole = torch.stack([lesson.counted[:, k + 1 : k + 1 + slots] for k in range(depth)]).all(0)
        drafts += int(whole.sum())
        accepted = whole
        with learner.teacher.precision():
            for k, states in enumerate(unrolled(head, lesson.embedded[:, 1:], lesson.features[:, :slots], depth)):
                scores, places = head.lm_head(head.norm(states)).float(), slice(k + 1, k + 1 + slots)
                right = known[scores.argmax(-1)] == best[:, places]
                accepted = accepted & right
                overlap = torch.minimum(scores.softmax(-1), target[:, places]).sum(-1)
                for place, what in enumerate((accepted, right & whole, overlap * whole)):
                    sums[place, k] += what.sum().cpu().double()
    reached, rates, overlaps = (sums / max(drafts, 1)).tolist()
    return Acceptance(drafts, reached, rates, overlaps)
