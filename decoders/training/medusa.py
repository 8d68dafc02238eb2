"""`train_medusa` trains heads for a frozen target (Medusa-1), and searches the best draft tree for them, in one resumable run.

The heads learn to predict tokens after the next token from the target's hidden states. They learn the target's distribution
(self-distillation, section 2.3.2 of the paper), in text of files and in text that the target wrote itself.

Letters: ``B`` rows, ``T`` tokens of a row, ``K`` heads, ``S`` = ``T - K`` positions from which all heads can draft, ``Q`` positions of
them that count.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import amount
from ..heads.medusa import DEFAULT_TREE, HeadsConfig, MedusaHeads, accepted_length, check_fit, save_heads, search_tree
from .cards import card
from .feature_heads import Acceptance, AcceptanceSums, FeatureLearner, Lesson, Teacher, train_network
from .recipes import HeadsTraining
from .texts import Job, Texts
from .trainer import soft_cross_entropy


def train_medusa(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: Job, *, run: HeadsTraining = HeadsTraining(),
    tree: bool = True, nodes: int = len(DEFAULT_TREE), given: MedusaHeads | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Trains heads for the frozen target `model`, searches the best draft tree for them, and writes both with a card.

    Args:
        run: settings of the heads and of their training. Its fields are options of ``decoders train medusa``.
        tree: whether to search a tree on the held-out text. Otherwise the tree of the heads is not changed.
        nodes: number of nodes in the searched tree.
        given: trained heads. Only their tree is searched and their figures are measured. None: new heads are trained.

    Returns:
        The figures: steps, tokens, seconds, :meth:`.Acceptance.facts` for each held-out set and kind of text, and the mean tokens per
        step with the searched tree and with the default tree.

    Raises:
        TrainingError: there is too little text, or the checkpoint belongs to another run.
        SettingsError: the sizes of `given` differ from the target's.
    """
    output = model.get_output_embeddings().weight
    config = config_of(run, output.shape[1], output.shape[0])  # wrong settings are reported before hours of work
    if given is not None:
        check_fit(given, model, "the folder given")
        run = replace(run, heads=given.config.heads)

    def make(train: Texts, judged: Texts) -> HeadsLearner:
        # Loaded heads are cached and shared, so they are copied.
        heads = MedusaHeads(config, output.detach()) if given is None else copy.deepcopy(given).float()
        return HeadsLearner(run, heads.to(output.device), Teacher(model, (), run.bf16), train, judged)

    def write(learner: FeatureLearner, figures: dict[str, Any], texts: Mapping[str, Texts]) -> str:
        assert isinstance(learner, HeadsLearner)
        heads, after = learner.model, ""
        if tree:
            kinds, held = texts["held"].kinds(), texts["held"]
            ranks = learner.ranks(held.chosen(kinds["own"]) if "own" in kinds else held)
            paths = search_tree(ranks, nodes)
            searched, default = (accepted_length(ranks, some) for some in (paths, DEFAULT_TREE[: len(paths)]))
            figures["trees"] = {"nodes": len(paths), "searched": searched, "default": default}
            heads.config = heads.config.model_copy(update={"tree": paths})
            after = f"""
## Tree
Searched on the held-out text: {len(paths)} nodes, {searched:.3f} tokens per step on this text. The first {len(paths)} nodes of the
default tree give {default:.3f}.
"""
        save_heads(heads, job.out, job.dtype)
        own = heads.config
        rank = f", rank {own.rank}" if own.rank else ""
        about = (
            f"{amount(own.heads, 'head')} of {amount(own.layers, 'residual block')} for a {type(model).__name__} of hidden size "
            f"{own.hidden_size} and {own.vocab_size:,} tokens. Vocabulary projection: {own.projection}{rank}. Head k predicts the "
            'token k places after the next token. `strategy="medusa"` of hf-decoders uses the heads.'
        )
        how = f"Cross entropy against the model's distribution, weighted {run.decay:g}^k."
        return card("Medusa heads", "medusa", about, how, run, figures, job.command, after)

    return train_network(model, tokenizer, job, run, "heads", make, write, learns=given is None)


def config_of(training: HeadsTraining, hidden_size: int, vocab_size: int) -> HeadsConfig:
    """The shape of the heads for a target with this hidden size and vocabulary size."""
    shape = dict(hidden_size=hidden_size, vocab_size=vocab_size, heads=training.heads, layers=training.layers)
    return HeadsConfig.of(
        shape | dict(projection=training.projection, rank=training.rank), "medusa", "shape of Medusa heads"
    )


class HeadsLearner(FeatureLearner):
    """Trains Medusa heads. The head with index ``k`` drafts, from position ``t``, the token after position ``t + k + 1``."""

    model: MedusaHeads

    def __init__(
        self, training: HeadsTraining, heads: MedusaHeads, teacher: Teacher, train: Texts, held_out: Texts
    ) -> None:
        output = teacher.model.get_output_embeddings()
        ids = torch.arange(heads.config.vocab_size, device=output.weight.device)
        heads.requires_grad_(True)
        super().__init__(training, training.rows, heads, teacher, ids, train, held_out, ())
        self.training = training
        self.output, bias = output.weight.detach().float(), getattr(output, "bias", None)
        self.bias = bias if bias is None else bias.detach().float()

    def learn(self, step: int) -> Tensor:
        """Computes the loss ``Σ_k decay^k · CE_k``, accumulates its gradients in the parameters' ``.grad``, and returns the loss.
        ``CE_k`` is the cross entropy of head ``k`` against the target's distribution, computed head by head to save memory.
        """
        lesson, total = self.lesson(step)[1], torch.zeros((), device=self.ids.device)
        for k in range(self.training.heads):
            counts = lesson.counted[:, k + 1 :].float()
            with self.teacher.precision():
                scores = self._scores(k, lesson.features[:, : -k - 1])
            weights = self.training.decay**k * counts / counts.sum().clamp(min=1)
            loss, gradient = soft_cross_entropy(scores.detach().float(), lesson.logits[:, k + 1 :].softmax(-1), weights)
            scores.backward(gradient.to(scores.dtype))
            total += loss
        return total

    @torch.no_grad()
    def acceptance(self, texts: Texts) -> Acceptance:
        """The acceptance of chains of each head's best token, from every position of `texts`."""
        sums = AcceptanceSums(self.model.config.heads)
        for _, lesson in self.lessons(texts):
            sums.begin(self._whole(lesson))
            for scores, places in self._drafted(lesson):
                sums.add(scores, scores.argmax(-1) == lesson.best[:, places], lesson.probabilities[:, places])
        return sums.acceptance

    @torch.no_grad()
    def ranks(self, texts: Texts) -> Tensor:
        """The rank of the target's best token among each head's tokens, ``[Q, K]`` int64. 0: the best."""
        parts = []
        for _, lesson in self.lessons(texts):
            ranks = []
            for scores, places in self._drafted(lesson):
                right = scores.gather(-1, lesson.best[:, places, None])
                # Negated, so that scores that are not numbers are never right.
                ranks.append((~(scores <= right)).sum(-1))
            parts.append(torch.stack(ranks, -1)[self._whole(lesson)].cpu())
        return torch.cat(parts)

    def _drafted(self, lesson: Lesson) -> Iterator[tuple[Tensor, slice]]:
        """Yields each head's scores ``[B, S, V]`` float32, and the positions whose next tokens the head drafts."""
        slots = lesson.features.shape[1] - self.model.config.heads
        for k in range(self.model.config.heads):
            yield self._scores(k, lesson.features[:, :slots]).float(), slice(k + 1, k + 1 + slots)

    def _whole(self, lesson: Lesson) -> Tensor:
        """Which of the ``S`` positions count: those from which the drafts of all heads count. ``[B, S]`` bool."""
        return lesson.counted[:, 1:].unfold(1, self.model.config.heads, 1).all(-1)

    def _scores(self, k: int, features: Tensor) -> Tensor:
        return self.model.of_head(k, features.flatten(0, 1), self.output, self.bias).unflatten(0, features.shape[:2])
