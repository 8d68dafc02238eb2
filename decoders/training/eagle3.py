"""`train_eagle3` trains an EAGLE-3 head for a frozen target, in one resumable run.

The head learns by training-time test (Li et al. 2025, section 3): each step simulates a draft of several tokens at every position,
all at once. A draft is identified by its first slot ``t``, its index. Slot ``t`` is the last slot at which the head reads the
target's feature. Simulated token ``k`` is at slot ``t + k``. For ``k > 0`` its feature is the head's output for token ``k - 1`` of
the same draft. Token ``k`` attends to the slots up to ``t`` and to the earlier tokens of its draft, as in decoding.

Letters: ``B`` rows, ``S`` drafts of a row, ``C`` drafts of a row that have more than one token, ``K`` simulated tokens, ``F`` width
of the target's features.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ..common.transformers_compat import stop_tokens
from ..errors import SettingsError
from ..heads.eagle3 import DecoderLayer, Eagle3Config, Eagle3Head
from ..heads.eagle3_files import Eagle3Files, Format, load_head, save_head
from .cards import card
from .feature_heads import (
    Acceptance,
    AcceptanceSums,
    FeatureLearner,
    Lesson,
    Teacher,
    draft_vocabulary,
    drafted_size,
    layer_config,
    layers_read,
    train_network,
)
from .recipes import HeadTraining
from .texts import Job, Texts
from .trainer import soft_cross_entropy

Keys = tuple[Tensor, Tensor]


def train_eagle3(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    job: Job,
    *,
    run: HeadTraining = HeadTraining(),
    start: Path | None = None,
    form: Format = "speculators",
) -> dict[str, Any]:
    """Trains an EAGLE-3 head for the frozen target `model`, and writes it with a card.

    Args:
        start: folder of a head, in either format, to train further. Its draft vocabulary is kept. None: a new head.
        form: the format in which the head is written.

    Returns:
        The figures: steps, tokens, seconds, and :meth:`Acceptance.facts` for each held-out set and kind of text.

    Raises:
        TrainingError: there is too little text, the checkpoint belongs to another run, or the target has no list of decoder layers.
        SettingsError: the target lacks one of `run.layers`, `run.draft_vocab` is too large, or :func:`begin_with` rejects `start`.
    """
    config = head_config(model, run, layers_read(model, run))  # wrong settings are reported before hours of work
    given = load_head(start, model.device, torch.float32) if start is not None else None

    def make(train: Texts, judged: Texts) -> HeadLearner:
        ids = draft_vocabulary(train.ids, config.draft_vocab_size, config.layer.vocab_size, stop_tokens(model))
        if given is not None:
            head, ids = begin_with(given, config, ids)
        else:
            head = new_head(config, model, ids, run.seed)
        teacher = Teacher(model, config.layers or (), run.bf16)
        return HeadLearner(run, head, teacher, ids.to(model.device), train, judged)

    def write(learner: FeatureLearner, figures: dict[str, Any], texts: Mapping[str, Texts]) -> str:
        head: Any = learner.model
        own = head.head_config
        whole = own.draft_vocab_size == own.layer.vocab_size
        save_head(head, None if whole else learner.ids.cpu(), job.out, model, run.depth, form, job.dtype)
        about = (
            f"One decoder layer for a {type(model).__name__} of hidden size {own.target_hidden_size}. It reads the outputs of the "
            f"model's layers {', '.join(map(str, own.layers or ()))} (counted from 0) and can propose {own.draft_vocab_size:,} of the "
            f'model\'s {own.layer.vocab_size:,} tokens. `strategy="eagle3"` of hf-decoders uses it.'
        )
        how = (
            f"Training-time test (Li et al. 2025, arXiv 2503.01840): {run.depth} tokens are drafted at every position, each from the "
            f"head's output for the token before; cross entropy against the model's distribution, weighted {run.decay:g}^k."
        )
        return card("EAGLE-3 head", "eagle3", about, how, run, figures, job.command)

    return train_network(model, tokenizer, job, run, "head", make, write, goes_on=given is not None)


def head_config(model: PreTrainedModel, run: HeadTraining, layers: tuple[int, ...]) -> Eagle3Config:
    """The shape of a head for the target `model`.

    Raises:
        SettingsError: the draft vocabulary is larger than the target's.
    """
    size, layer = drafted_size(model, run.draft_vocab, "eagle3"), layer_config(model, run.intermediate)
    return Eagle3Config(layer, size, layer.hidden_size, layers)


def new_head(config: Eagle3Config, model: PreTrainedModel, ids: Tensor, seed: int) -> Eagle3Head:
    """A new head. At first its decoder layer adds zero, so the logits are nearly the target's output head on the highest layer read."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(config)
        for parameter in head.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.02)
    hidden = config.layer.hidden_size
    with torch.no_grad():
        head.fc.weight[:, -hidden:] += torch.eye(hidden)
        head.midlayer.self_attn.o_proj.weight.zero_()
        head.midlayer.mlp.down_proj.weight.zero_()
        head.lm_head.weight.copy_(model.get_output_embeddings().weight.detach()[ids.to(model.device)])
    return head.to(model.device)


def begin_with(given: Eagle3Files, config: Eagle3Config, ids: Tensor) -> tuple[Eagle3Head, Tensor]:
    """A copy of the head in `given`, and the tokens ``[D]`` that it can propose. These are `ids` if the checkpoint lists no tokens.

    Raises:
        SettingsError: the head is not an EAGLE-3 head, its shape differs from `config`, or it has its own embedding or sliding windows.
    """
    if not isinstance(given.head, Eagle3Head) or given.head.embed_tokens is not None:
        raise SettingsError(
            "eagle3: training can continue from EAGLE-3 heads only, and only if they use the target's embedding"
        )
    other = given.head.head_config
    shapes = {name: list(tensor.shape) for name, tensor in Eagle3Head(config).state_dict().items()}
    if (
        shapes != {name: list(tensor.shape) for name, tensor in given.head.state_dict().items()}
        or other.layers not in (None, config.layers)
        or other.windows
    ):
        raise SettingsError(
            "eagle3: training can continue from a head only if its shape and the layers that it reads equal the settings, and "
            "it has no sliding windows: change the settings, or train a new head"
        )
    head = copy.deepcopy(given.head).requires_grad_(True)
    layer = copy.deepcopy(other.layer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # checkpoints may leave these out
        setattr(layer, name, getattr(config.layer, name))
    head.head_config = replace(other, layers=config.layers, layer=layer)
    return head, given.vocabulary.ids.cpu() if given.vocabulary.ids is not None else ids


class HeadLearner(FeatureLearner):
    """Trains an EAGLE-3 head."""

    model: Eagle3Head

    def __init__(
        self, training: HeadTraining, head: Eagle3Head, teacher: Teacher, ids: Tensor, train: Texts, held_out: Texts
    ) -> None:
        super().__init__(training, training.rows, head, teacher, ids, train, held_out, [head.lm_head.weight])
        self.training = training

    def learn(self, step: int) -> Tensor:
        return self.backward(self.lesson(step)[1], self._chains(step))

    def _chains(self, step: int) -> Tensor | None:
        """The indices of drafts that have more than one token in this step, ``[C]`` int64, ascending. None: all indices."""
        slots = self.training.length - self.training.depth
        count = max(1, round(self.training.chains * slots))
        if count >= slots:
            return None
        generator = torch.Generator().manual_seed(self.training.seed * 1_000_003 + step)
        return torch.randperm(slots, generator=generator)[:count].sort().values.to(self.ids.device)

    def backward(self, lesson: Lesson, chains: Tensor | None = None) -> Tensor:
        """Computes the loss ``Σ_k decay^k · CE_k``, accumulates its gradients in the parameters' ``.grad``, and returns the loss.

        ``CE_k`` is the cross entropy of simulated token k against the target's distribution over the tokens that the head can
        propose. A position in ``lesson.counted`` counts if the head can propose the target's best token there.

        Args:
            chains: ``[C]`` int64, ascending, the indices of drafts with more than one simulated token; None: all.
        """
        depth, head, known = self.training.depth, self.model, self.ids
        target = lesson.logits.softmax(-1)
        counts = (lesson.counted & torch.isin(lesson.best, known)).float()
        slots = lesson.features.shape[1] - depth
        every = torch.arange(slots, device=target.device)
        total, through = lesson.features.new_zeros(()), lesson.features.new_zeros(())
        with self.teacher.precision():
            drafted = unrolled(head, lesson.embedded[:, 1:], lesson.features[:, :slots], depth, chains)
            for k, states in enumerate(drafted):
                # Scores are computed for one simulated token at a time, to save memory. `leaf` receives the gradient of `states`.
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

    @torch.no_grad()
    def acceptance(self, texts: Texts) -> Acceptance:
        """The acceptance of drafts that begin at every position of `texts`. A draft counts if all its positions count.

        In text that the target wrote greedily, the result is the acceptance in decoding. In other text, a draft token counts as
        accepted if the target would choose it after the text so far, even if the text continues differently.
        """
        head, depth, known = self.model, self.training.depth, self.ids
        sums = AcceptanceSums(depth)
        for _, lesson in self.lessons(texts):
            slots = lesson.features.shape[1] - depth
            best, target = lesson.best, lesson.probabilities
            whole = torch.stack([lesson.counted[:, k + 1 : k + 1 + slots] for k in range(depth)]).all(0)
            sums.begin(whole)
            with self.teacher.precision():
                drafted = unrolled(head, lesson.embedded[:, 1:], lesson.features[:, :slots], depth)
                for k, states in enumerate(drafted):
                    scores, places = head.lm_head(head.norm(states)).float(), slice(k + 1, k + 1 + slots)
                    sums.add(scores, known[scores.argmax(-1)] == best[:, places], target[:, places])
        return sums.acceptance


def unrolled(
    head: Eagle3Head, embedded: Tensor, features: Tensor, depth: int, chains: Tensor | None = None
) -> Iterator[Tensor]:
    """Yields the states of simulated tokens 0, 1, … ``depth - 1`` before the head's final norm.

    The states are ``[B, S, H]`` for token 0, and ``[B, C, H]`` for each later token.

    Args:
        embedded: ``[B, S + depth - 1, H]``, the embedding of the token that follows each slot. Simulated token ``k`` of the draft
            with index ``t`` reads entry ``t + k``.
        features: ``[B, S, F]``, the target's features of the first ``S`` slots.
        chains: ``[C]`` int64, ascending, the indices of drafts that continue after token 0; None: all ``S``.
    """
    indices = torch.arange(features.shape[1], device=features.device)
    chains = indices if chains is None else chains
    states, seen = head.fc(features), list[Keys]()
    for k in range(depth):
        rotary = head.rotary_emb(states, (indices + k)[None])
        states = _layer(head.midlayer, embedded[:, indices + k], states, rotary, seen, indices)
        yield states
        if head.head_config.norm_output:
            states = head.norm(states)
        if k == 0:
            indices, states = chains, states[:, chains]


def _layer(
    layer: DecoderLayer, embedded: Tensor, states: Tensor, rotary: Keys, seen: list[Keys], indices: Tensor
) -> Tensor:
    """The output of :class:`DecoderLayer` for one simulated token of each draft. Appends the tokens' keys and values to `seen`."""
    normed = layer.hidden_norm(states)
    residual = normed if layer.norm_before_residual else states
    attention, shape = layer.self_attn, (*states.shape[:2], -1, layer.self_attn.head_dim)
    read = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
    q, k, v = (getattr(attention, name)(read).view(shape).transpose(1, 2) for name in ("q_proj", "k_proj", "v_proj"))
    q, k = apply_rotary_pos_emb(q, k, *rotary)
    groups = attention.num_key_value_groups
    seen.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    attended = _attention(q, seen, attention.scaling, indices).transpose(1, 2).flatten(2)
    states = residual + attention.o_proj(attended)
    return states + layer.mlp(layer.post_attention_layernorm(states))


def _attention(q: Tensor, seen: list[Keys], scaling: float, indices: Tensor) -> Tensor:
    """The attention outputs ``[B, heads, S or C, d]``. A draft attends to the slots up to its index, and to its own tokens."""
    (keys, values), later = seen[0], seen[1:]
    if not later:
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scaling)
    count = keys.shape[2]
    scores = (q @ keys.transpose(2, 3)).float()
    hidden = torch.arange(count, device=q.device) > indices[:, None]
    own = torch.stack([(q * k).sum(-1) for k, _ in later], dim=-1).float()
    scores = torch.cat([scores.masked_fill(hidden, float("-inf")), own], dim=-1) * scaling
    weights = scores.softmax(-1).to(values.dtype)
    attended = weights[..., :count] @ values
    for place, (_, v) in enumerate(later, start=count):
        attended = attended + weights[..., place : place + 1] * v
    return attended
