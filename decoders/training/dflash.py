"""`train_dflash` trains a draft model of the DFlash family for a frozen target, in one resumable run.

A block begins at a position of the text, its anchor. The anchor's token stands for the last committed token, and the tokens before it
are the context. One pass over a row drafts the blocks of many anchors. The nodes of a block (the anchor's token and mask tokens)
attend to the context before the anchor and to each other. A place is the position of a draft token. The logits at a place are trained
towards the target's distribution there. If the draft model has a head (DSpark), these logits also depend on the preceding token of
the text or, with a recurrent head, on all tokens of the text from the anchor to this token.

Letters: ``B`` rows, ``A`` anchors of a row, ``K`` places of a block, ``D`` tokens that can be drafted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..common.transformers_compat import decoder_layers, set_attention, stop_tokens
from ..errors import SettingsError
from ..heads.block_heads import DraftedBlock, HeadFields, MarkovHead
from ..heads.dflash import DFlashConfig, DFlashNetwork, embedding_of
from ..heads.dflash_files import DFlashFiles, head_of, load_draft_model, save_draft_model
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
from .recipes import BlockTraining
from .texts import Job, Texts
from .trainer import soft_cross_entropy

#: :func:`fit_context` fits the keys and values of a new draft model to this number of text rows.
FITTED = 64


def train_dflash(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    job: Job,
    *,
    run: BlockTraining = BlockTraining(),
    start: Path | None = None,
) -> dict[str, Any]:
    """Trains a block draft model for the frozen target `model`, and writes it in the format of `speculators`, with a card.

    Args:
        start: folder of a draft model to train further. Its mask token and draft vocabulary are kept. None: a new draft model.

    Returns:
        The figures: steps, tokens, seconds, and :meth:`Acceptance.facts` for each held-out set and kind of text.

    Raises:
        TrainingError: there is too little text, the checkpoint belongs to another run, or the target has no list of decoder layers.
        SettingsError: the target lacks one of `run.layers`, `run.draft_vocab` is too large, or :func:`begin_with` rejects `start`.
    """
    layers = layers_read(model, run)  # wrong settings are reported before hours of work
    size, shape = drafted_size(model, run.draft_vocab, "dflash"), layer_config(model, run.intermediate, run.depth)
    given = load_draft_model(start, model.device, torch.float32) if start is not None else None

    def make(train: Texts, judged: Texts) -> BlockLearner:
        ids = draft_vocabulary(train.ids, size, shape.vocab_size, stop_tokens(model)).to(model.device)
        counts = torch.bincount(train.ids.flatten(), minlength=shape.vocab_size)
        # The mask token is the token that the texts use least.
        config = block_config(run, shape, layers, size, int(counts.argmin()))
        teacher = Teacher(model, layers, run.bf16)
        if given is None:
            draft = new_draft_model(model, run, config)
        else:
            ids = ids if given.vocabulary is None or given.vocabulary.ids is None else given.vocabulary.ids
            draft = begin_with(given, config, model.get_output_embeddings().weight.detach().float()[ids])
        return BlockLearner(run, draft, teacher, ids, train, judged)

    def write(learner: FeatureLearner, figures: dict[str, Any], texts: Mapping[str, Texts]) -> str:
        assert isinstance(learner, BlockLearner)
        draft, ids = learner.model, None if size == shape.vocab_size else learner.ids.cpu()
        output = learner.output if learner.own_output else None
        save_draft_model(draft.config, draft.network, draft.head, job.out, model, ids, output, job.dtype)
        head = f"A head ({run.head}) adds a bias of rank {run.rank} that depends on the tokens before (DSpark, arXiv 2607.05147). "
        about = (
            f"{run.depth} decoder layers for a {type(model).__name__} of hidden size {shape.hidden_size}. They read the outputs of the "
            f"model's layers {', '.join(map(str, layers))} (counted from 0), draft {run.block} tokens in one pass (DFlash, arXiv "
            f"2602.06036), and can propose {size:,} of the model's {shape.vocab_size:,} tokens. {head if run.rank else ''}"
            '`strategy="dflash"` of hf-decoders uses the draft model.'
        )
        how = (
            f"Blocks begin at {run.blocks:.1%} of the positions; cross entropy against the model's distribution, weighted "
            f"{run.decay:g}^k."
        )
        return card("Block draft model", "dflash", about, how, run, figures, job.command)

    return train_network(model, tokenizer, job, run, "draft model", make, write, goes_on=given is not None)


def block_config(run: BlockTraining, shape: Any, layers: tuple[int, ...], size: int, mask: int) -> DFlashConfig:
    """The config of a draft model. shape: config of its decoder layers. size: ``D``. mask: id of the mask token."""
    markov = {
        "markov_rank": run.rank, "markov_head_type": run.head, "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }  # fmt: skip
    # With a head (DSpark), the first token is drafted by the last committed token's node; without a head (DFlash), by the first mask.
    from_last = run.rank > 0
    nodes = run.block + (not from_last)
    fields = HeadFields(markov if run.rank else {}, "dflash", shape, run.block, size)
    return DFlashConfig(shape, nodes, mask, layers, from_last=from_last, head=fields, draft_vocab_size=size)


class BlockDraft(nn.Module):
    """A draft model as one trainable module: the network, and its head or None."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config, self.network, self.head = config, DFlashNetwork(config), head_of(config)


def new_draft_model(model: PreTrainedModel, run: BlockTraining, config: DFlashConfig) -> BlockDraft:
    """A new draft model, initialized from the target.

    `fc`, the projection of the features, nearly copies the features of the highest layer that is read. The head's bias is zero. Each
    layer copies weights of equal name and shape from one layer of the target: the first layer from the target's first layer, because
    both read embeddings; the last (or only) layer from the target's last layer; the layers between from evenly spaced layers.
    """
    set_attention(config.layer, "sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        draft = BlockDraft(config)
        for parameter in draft.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
    network, hidden = draft.network, config.layer.hidden_size
    with torch.no_grad():
        network.fc.weight[:, -hidden:] += torch.eye(hidden)
        for layer, origin in zip(network.layers, _origins(network, model), strict=True):
            given = _weights(origin)
            _copy(given, layer.state_dict())
        first, final = given.get("input_layernorm.weight"), _scale(getattr(model.base_model, "norm", None))
        norms = {"hidden_norm.weight": first, "norm.weight": final}
        _copy({name: norm for name, norm in norms.items() if norm is not None}, network.state_dict())
        if isinstance(draft.head, MarkovHead):
            draft.head.markov_head.markov_w2.weight.zero_()
            if draft.head.kind == "rnn":  # the recurrent unit expects inputs as large as hidden states
                joint = draft.head.markov_head.joint_proj.weight
                nn.init.normal_(draft.head.markov_head.markov_w1.weight)
                nn.init.normal_(joint, std=joint.shape[1] ** -0.5)
    return draft.to(model.device)


def _origins(network: DFlashNetwork, model: PreTrainedModel) -> list[nn.Module]:
    """For each layer of the draft model, the layer of the target from which it copies weights."""
    decoder = decoder_layers(model)
    top, above = len(decoder) - 1, len(network.layers) - 1
    return [decoder[round(top * index / above) if above else top] for index in range(above + 1)]


@torch.no_grad()
def fit_context(network: DFlashNetwork, teacher: Teacher, texts: Texts, rows: int) -> None:
    """Fits the context's keys and values in each layer to those in the layer of the target that it was copied from (:func:`_origins`).

    `fc` becomes the projection of the features that best predicts the keys and values of these target layers (reduced-rank
    regression). Then each key matrix and each value matrix is fitted by least squares over `texts`. Matrices that have another shape
    than the target's are not changed. If the target has no norms for queries and keys, the weights of the network's query and key norms
    become the root mean squares of the target's queries and keys.

    Args:
        rows: number of rows of `texts` in each pass of the target.
    """
    pairs, norms = list[tuple[nn.Linear, nn.Linear]](), list[tuple[Tensor, nn.Linear]]()
    for layer, origin in zip(network.layers, _origins(network, teacher.model), strict=True):
        parts, theirs = dict(layer.named_modules()), dict(origin.named_modules())
        for part in "qkv":
            own, given = parts[f"self_attn.{part}_proj"], theirs.get(f"self_attn.{part}_proj")
            if isinstance(own, nn.Linear) and isinstance(given, nn.Linear) and own.weight.shape == given.weight.shape:
                if part != "q":
                    pairs.append((own, given))
                if part != "v" and f"self_attn.{part}_norm" not in theirs:
                    norms.append((cast(Tensor, parts[f"self_attn.{part}_norm"].weight), given))

    def sums(read: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor], dict[nn.Module, Tensor]]:
        """Returns sums over all texts.

        These are the Gram matrix of ``read(features)``, the products of ``read(features)`` with the target's keys and values, and the
        mean squares of the target's queries, keys and values.
        """
        outputs, squares = dict[nn.Module, Tensor](), dict[nn.Module, Tensor]()
        gram, products = torch.zeros(()), [torch.zeros(())] * len(pairs)
        hooked = {given for _, given in (*pairs, *norms)}
        with ExitStack() as hooks:
            for given in hooked:
                hooks.enter_context(given.register_forward_hook(lambda of, _, out: outputs.update({of: out})))
            for first in range(0, len(texts.ids), rows):
                states = read(teacher.features(texts.part(first, first + rows))).flatten(0, 1).cpu().double()
                results = {of: out.flatten(0, 1).cpu().double() for of, out in outputs.items()}
                gram = gram + states.T @ states
                products = [sum_ + states.T @ results[of] for sum_, (_, of) in zip(products, pairs, strict=True)]
                share = len(states) / texts.ids.numel()
                squares = {
                    of: squares.get(of, gram.new_zeros(())) + share * out.square().mean() for of, out in results.items()
                }
        # The ridge keeps the matrix invertible if there are few texts or nearly equal features.
        return gram + 1e-4 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype), products, squares

    if not pairs:
        return
    gram, products, squares = sums(lambda features: features)
    best = [torch.linalg.solve(gram, one / squares[of].sqrt()) for one, (_, of) in zip(products, pairs, strict=True)]
    every, hidden = torch.cat(best, dim=1), len(network.fc.weight)
    said = torch.linalg.eigh(every.T @ gram @ every)
    if len(said.eigenvalues) >= hidden:
        size = said.eigenvalues[-hidden:].sum() / hidden / texts.ids.numel()
        network.fc.weight.copy_((every @ said.eigenvectors[:, -hidden:] / size.sqrt()).T)
        network.hidden_norm.weight.fill_(1)
    gram, products, _ = sums(network.fused)
    for (own, _), product in zip(pairs, products, strict=True):
        own.weight.copy_(torch.linalg.solve(gram, product).T)
    for norm, of in norms:
        norm.fill_(squares[of].sqrt())


def begin_with(given: DFlashFiles, config: DFlashConfig, output: Tensor) -> BlockDraft:
    """The draft model in `given` as a trainable module, so that it can be trained further.

    Args:
        output: ``[D, H]``, the rows of the target's output matrix for the tokens that can be drafted.

    Raises:
        SettingsError: the draft model's config differs from `config`, or its embedding or output matrix is not the target's.
    """
    layer, vocab = copy.deepcopy(given.config.layer), config.layer.vocab_size
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # checkpoints may leave these out
        setattr(layer, name, getattr(config.layer, name))
    set_attention(layer, "sdpa")
    own = replace(given.config, layer=layer)
    draft = BlockDraft(own)
    wanted = {name: tensor.shape for name, tensor in BlockDraft(config).state_dict().items()}
    parts = {"network": given.network, "head": given.head}
    state = {f"{part}.{name}": t for part, of in parts.items() if of is not None for name, t in of.state_dict().items()}
    if (
        {name: tensor.shape for name, tensor in state.items()} != wanted
        or (own.layers, own.block_size, own.from_last) != (config.layers, config.block_size, config.from_last)
        or (own.draft_vocab_size or vocab) != config.draft_vocab_size
        or any(own.causal)
        or layer.sliding_window is not None
        or own.windows
        or given.embed is not None
        or (given.lm_head is not None and not _same(given.lm_head.weight, output))
    ):
        raise SettingsError(
            "dflash: training can continue from a draft model only if its shape and layers= equal the settings, it has no "
            "causal layers or windows, and its embedding and output head are the target's: change the settings, or train a new one"
        )
    draft.load_state_dict(state)
    return draft.to(next(given.network.parameters()).device)


def _same(matrix: Tensor, other: Tensor) -> bool:
    """Whether two matrices are equal, up to the rounding in a checkpoint."""
    return matrix.shape == other.shape and torch.allclose(matrix, other, rtol=1e-2, atol=1e-4)


def _weights(layer: nn.Module) -> dict[str, Tensor]:
    """The layer's weights by name: of its linear layers, and of the norms for which :func:`_scale` returns a weight."""
    parts = {name: p.weight if isinstance(p, nn.Linear) else _scale(p) for name, p in layer.named_modules()}
    return {
        f"{name}.weight": weight for name, weight in parts.items() if weight is not None and weight.is_floating_point()
    }


@torch.no_grad()
def _scale(norm: Any) -> Tensor | None:
    """The weight of `norm` if the module maps a vector of ones to its weight, as RMSNorm does. None for any other module."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or "norm" not in type(norm).__name__.lower():
        return None
    return weight if torch.allclose(norm(torch.ones_like(weight)), weight, rtol=1e-2, atol=1e-3) else None


def _copy(weights: Mapping[str, Tensor], to: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        if name in to and to[name].shape == weight.shape:
            to[name].copy_(weight)


class BlockLearner(FeatureLearner):
    """Trains a block draft model.

    Attributes:
        own_output: whether the draft model stores its own output head: rows of the target's output matrix, without a bias. True if
            the draft vocabulary is reduced, or if the target scales or bounds its logits: in training they are not scaled or bounded.
    """

    model: BlockDraft

    def __init__(
        self, training: BlockTraining, draft: BlockDraft, teacher: Teacher, ids: Tensor, train: Texts, held_out: Texts
    ) -> None:
        outer = [] if draft.head is None else list(draft.head.parameters())
        super().__init__(training, training.rows, draft, teacher, ids, train, held_out, outer)
        self.training, self.places = training, torch.arange(draft.config.places, device=ids.device)
        output = teacher.model.get_output_embeddings()
        self.output = output.weight.detach().float()[ids]
        self.own_output = len(ids) < len(output.weight) or not teacher.has_linear_head(train.ids[:1])
        self.bias = None if self.own_output or getattr(output, "bias", None) is None else output.bias.detach().float()
        self._embedding = embedding_of(teacher.model, teacher.model.get_input_embeddings())

    def begin(self) -> None:
        fit_context(self.model.network, self.teacher, self.train.part(0, FITTED), self.rows)

    def learn(self, step: int) -> Tensor:
        """Computes the loss ``Σ_k decay^k · CE_k``, accumulates its gradients in the parameters' ``.grad``, and returns the loss.

        ``CE_k`` is the cross entropy at place ``k`` against the target's distribution over the draft vocabulary. A place is left out
        if ``lesson.counted`` excludes it, or if the target's best token there is not in the draft vocabulary.
        """
        texts, lesson = self.lesson(step)
        ids = texts.ids.to(self.ids.device)
        anchors = self._anchors(lesson, step)
        preceding = self._places_of(anchors)
        counts = _rows_at(lesson.counted & torch.isin(lesson.best, self.ids), preceding).float()
        weights = counts * self.training.decay**self.places
        with self.teacher.precision():
            block, tokens = self.drafted(lesson, ids, anchors), _rows_at(ids, preceding)
            scores = torch.stack(list(self._scores(block, tokens)), dim=1).float()
        target = _rows_at(lesson.logits, preceding).softmax(-1)
        loss, gradient = soft_cross_entropy(scores.detach(), target, weights / counts.sum().clamp(min=1))
        scores.backward(gradient)
        return loss

    def _anchors(self, lesson: Lesson, step: int) -> Tensor:
        """The anchors of a step, ``[B, A]`` int64, ascending. They are drawn from the positions in :attr:`Lesson.counted`, or from
        others if these are too few.
        """
        room = lesson.counted.shape[1] - len(self.places) + 1
        count = min(max(1, round(self.training.blocks * lesson.counted.shape[1])), room)
        generator = torch.Generator().manual_seed(self.training.seed * 1_000_003 + step)
        chances = lesson.counted[:, :room].float().cpu() + 1e-6
        return torch.multinomial(chances, count, generator=generator).sort(1).values.to(self.ids.device)

    def _places_of(self, anchors: Tensor) -> Tensor:
        """The position before each place, ``[B, A, K]``. The target's distribution after this position is the label of the place."""
        return anchors[..., None] + self.places

    def drafted(self, lesson: Lesson, ids: Tensor, anchors: Tensor) -> DraftedBlock:
        """The network's output for the blocks that begin at `anchors` ``[B, A]``, one row per block. ids: ``[B, T]``, the text."""
        network, config, device = self.model.network, self.model.config, ids.device
        slots, blocks, nodes = ids.shape[1], anchors.shape[1], config.block_size
        read = ids.new_full((*anchors.shape, nodes), config.mask_token_id)
        read[..., 0] = ids.gather(1, anchors)
        sees = visibility(anchors, slots, nodes)[:, None]
        positions = (anchors[..., None] + torch.arange(nodes, device=device)).flatten(1)
        cache = DynamicCache()
        place = torch.arange(slots, device=device)[None]
        fused = network(lesson.features, attention_mask=sees, position_ids=place, cache=cache, context=True)
        states = network(self._embed(read.flatten(1)), attention_mask=sees, position_ids=positions, cache=cache)
        states = states.unflatten(1, (blocks, nodes)).flatten(0, 1)[:, int(not config.from_last) :]
        logits = nn.functional.linear(states, self.output, self.bias)
        context = fused.gather(1, (anchors - 1).clamp(min=0)[..., None].expand(-1, -1, fused.shape[-1])).flatten(0, 1)
        return DraftedBlock(logits, states, context, anchors.flatten() > 0, self._embed)

    @torch.no_grad()
    def _embed(self, tokens: Tensor) -> Tensor:
        return self._embedding(tokens).float()

    def _scores(self, block: DraftedBlock, tokens: Tensor) -> Iterator[Tensor]:
        """Yields the logits ``[B·A, D]`` of each place in turn.

        Args:
            tokens: ``[B·A, K]``, the text's token before each place. Or ``[B·A, 1]``, only the token before the first place: the head
                then reads drafted tokens before the later places.
        """
        head, above = self.model.head, None
        if head is None:
            yield from block.logits.unbind(1)
            return
        begun, before = head.begin(block), tokens[:, :1]
        for place in range(len(self.places)):
            if place < tokens.shape[1]:
                before = tokens[:, place, None]
            choice = head.choose(block, begun, place, before, above)
            scores, above = choice.logits[:, 0], choice.state
            yield scores
            if tokens.shape[1] == 1:
                before = self.ids[scores.argmax(-1)][:, None]

    @torch.no_grad()
    def acceptance(self, texts: Texts) -> Acceptance:
        """The acceptance of chains of ``K`` tokens that begin at every ``K``-th position of `texts`.

        In text that the target wrote greedily, the result is the acceptance in decoding. In other text, a draft token counts as
        accepted if the target would choose it after the text so far, even if the text continues differently.
        """
        sums = AcceptanceSums(len(self.places))
        for part, lesson in self.lessons(texts):
            ids = part.ids.to(self.ids.device)
            room, every = ids.shape[1] - len(self.places) + 1, len(self.places)
            anchors = torch.arange(0, room, every, device=ids.device).expand(len(ids), -1)
            preceding = self._places_of(anchors)
            best, target = _rows_at(lesson.best, preceding), _rows_at(lesson.probabilities, preceding)
            sums.begin(_rows_at(lesson.counted, preceding).all(1))
            with self.teacher.precision():
                chain = self._scores(self.drafted(lesson, ids, anchors), ids.gather(1, anchors).flatten()[:, None])
                for place, scores in enumerate(chain):
                    right = self.ids[scores.argmax(-1)] == best[:, place]
                    sums.add(scores.float(), right, target[:, place])
        return sums.acceptance


def visibility(anchors: Tensor, slots: int, nodes: int) -> Tensor:
    """The attention mask ``[B, A·nodes, slots + A·nodes]`` bool: a node sees the slots before its anchor, and its block's nodes.

    Args:
        anchors: ``[B, A]``, positions where blocks begin.
        slots: number of context slots.
        nodes: number of nodes in a block.
    """
    of_block = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(nodes)
    before = torch.arange(slots, device=anchors.device) < anchors.repeat_interleave(nodes, 1)[..., None]
    return torch.cat([before, (of_block[:, None] == of_block).expand(len(anchors), -1, -1)], dim=-1)


def _rows_at(values: Tensor, at: Tensor) -> Tensor:
    """Selects ``values[b, at[b, a, k]]`` from `values` ``[B, T, …]``. Returns ``[B·A, K, …]``."""
    rows = torch.arange(len(values), device=values.device)[:, None, None]
    return values[rows, at].flatten(0, 1)
