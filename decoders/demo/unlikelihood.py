"""Training against loops: text that a demo model writes itself, with the loops in it made unlikely."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..common.repetition import in_loops
from ..training import Learner, Run
from ..training.schedules import warmup_stable_decay
from ..training.texts import own_texts
from .learner import DemoLearner, optimizers_of

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

WARMUP_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class UnlikelihoodTraining:
    """Settings of a demo model's training against loops, which follows its training on files.

    Attributes:
        steps: optimizer steps; each sees a batch of files too, as before.
        learning_rate: peak.
        prompt: tokens of each row of that batch that the model goes on with.
        length: tokens of such a row, the prompt included.
        weight: of the unlikelihood beside the likelihood of the files.
    """

    steps: int
    learning_rate: float = 7e-4
    prompt: int = 64
    length: int = 192
    weight: float = 2.0

    def rate(self, step: int) -> float:
        """Learning rate: warm-up, then linear decay to zero."""
        warmup_steps = min(WARMUP_STEPS, max(1, self.steps // 10))
        return warmup_stable_decay(step, self.steps, self.learning_rate, warmup_steps=warmup_steps, decay_share=1.0)


class UnlikelihoodLearner(Learner):
    """A demo model that unlearns its loops.

    Every step learns a batch of files as in the training before, and makes unlikely what :func:`in_loops` finds in what the
    model writes greedily after the beginnings of its rows: the sequence-level objective of
    Welleck et al. 2020 (arXiv 1908.04319, equation 6), with loops in the place of all repeated n-grams, as code repeats
    n-grams on purpose.

    Args:
        before: the learner whose training is over. Its model is trained on, from the weights that it would write.
        first_step: the first step whose data that training has not seen.
    """

    model: LlamaForCausalLM

    def __init__(self, before: DemoLearner, training: UnlikelihoodTraining, *, first_step: int) -> None:
        self.before, self.training, self.first_step = before, training, first_step
        self.model = before.model
        self.model.load_state_dict(before.rounded().state_dict())
        self.optimizers = optimizers_of(self.model, rate=training.learning_rate, decay=before.training.weight_decay)
        self.positions = before.positions

    def run(self) -> Run:
        """The run that follows `before`'s; resumed only with the same settings of both."""
        before = self.before.training
        identity = {**asdict(self.training), "before": asdict(before), "first_step": self.first_step}
        return Run(steps=self.training.steps, rate=self.training.rate, identity=identity, clip=before.clip)

    def learn(self, step: int) -> Tensor:
        batch = self.before.batches.batch(self.first_step + step)
        loss = self.before.learn_from(batch)
        ids = own_texts(self.model, batch[:, : self.training.length], 1.0, self.training.prompt).ids
        looping = in_loops(ids)[:, self.training.prompt :]
        if looping.any():
            (self.training.weight * self._unlikelihood(ids, looping)).backward()
        return loss

    def _unlikelihood(self, ids: Tensor, looping: Tensor) -> Tensor:
        """-log(1 - p) of the tokens that loop, a mean over all that were written, scalar.

        Args:
            ids: ``[B, T]``.
            looping: ``[B, T - prompt]``.
        """
        with self.before.autocast():
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits[:, -looping.shape[1] :]
        probabilities = logits.float().softmax(-1).gather(-1, ids[:, -looping.shape[1] :, None])[..., 0]
        return -torch.log1p(-probabilities.clamp(max=1 - 1e-5)).masked_fill(~looping, 0).mean()
