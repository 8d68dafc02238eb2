"""Heads of block drafters: every draft is what the papers' equations, written down plainly, say after the same text."""

from __future__ import annotations

import heapq
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import decoders
from decoders.errors import SettingsError, UnsupportedError
from decoders.heads.block_heads import BlockHead, HeadFields, HeadScores, PathSelector
from decoders.heads.dflash import DFlashNetwork
from decoders.heads.dflash_files import HEADS, load_draft_model, read_config
from decoders.strategies import DFlash, PromptLookup
from decoders.strategies.draft_tree import GRADES, likely_paths
from decoders.strategies.merged import Merged
from decoders.testing import Replay, checks_for, decode, prompts
from decoders.testing.checks import check_on_device
from decoders.testing.company import check_rows_draft_apart
from decoders.testing.conditions import Conditions
from decoders.testing.drafts import check_draft_scores, check_draft_tokens_are_accepted
from decoders.testing.kit import Check, check_alone
from decoders.testing.models import VOCAB
from decoders.testing.spy import Spy
from decoders.testing.toy_grammar import TokenAutomaton

from ..turns import slow_but
from .conftest import paths_of
from .test_dflash import BLOCK, MASK, SHAPE, WINDOW, H, target

LAYERS, RANK, TOP, EPS = (0, 2), 6, 5, SHAPE["rms_norm_eps"]


@dataclass(frozen=True)
class Variant:
    """A draft model.

    Attributes:
        form: of its config.
        fields: of the config, beside those of the layers.
        extra: weights beside those of the network, by shape.
        own_head: tokens that it drafts, with a head and an embedding of its own; None: the target's.
        from_last: whether the last token's own place drafts.
    """

    form: str
    fields: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)
    own_head: int | None = None
    from_last: bool = False


def convolved(count: int) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for layer in range(count):
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{layer}.{name}.base_kernel"] = (2, 2, H)
            shapes[f"layers.{layer}.{name}.kernel_projection.weight"] = (2 * 2 * (H // 8), H)
    return shapes


def markov(kind: str, drafted: int, *, reads: int = RANK) -> dict[str, tuple[int, ...]]:
    """reads: numbers of the token before that the confidence head gets."""
    shapes: dict[str, tuple[int, ...]] = {"markov_head.markov_w1.weight": (VOCAB, RANK)}
    shapes["markov_head.markov_w2.weight"] = (drafted, RANK)
    if kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, H + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if kind == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + H),
            "markov_head.joint_proj.bias": (3 * RANK,),
        }
    return shapes | confidence(H + reads)


def confidence(width: int) -> dict[str, tuple[int, ...]]:
    return {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}


def lattice(width: int, heads: int, factors: int) -> dict[str, tuple[int, ...]]:
    def linear(name: str, given: int, read: int) -> dict[str, tuple[int, ...]]:
        return {f"lilicorr.{name}.weight": (given, read), f"lilicorr.{name}.bias": (given,)}

    shapes: dict[str, tuple[int, ...]] = {
        "lilicorr.slot_embedding": (1, 1, BLOCK - 1, 1, width),
        "lilicorr.rank_embedding": (1, 1, 1, TOP, width),
        "lilicorr.relative_slot_bias": (heads, 2 * BLOCK - 1),
        "lilicorr.same_slot_bias": (heads,),
        "lilicorr.feature_norm.weight": (5,), "lilicorr.feature_norm.bias": (5,),
    }  # fmt: skip
    if width != H:
        shapes |= linear("token_proj", width, H)
    for name, given, read in (
        ("pass_hidden_proj", width, H), ("context_proj", width, H),
        ("feature_mlp.up_proj", width, 5), ("feature_mlp.down_proj", width, width), ("factor_input_proj", width, 3 * width),
        ("out_head", factors, width), ("in_head", factors, width), ("anchor_out_head", factors, width),
    ):  # fmt: skip
        shapes |= linear(name, given, read)
    for layer in range(2):
        own = f"layers.{layer}"
        shapes |= {
            f"lilicorr.{own}.attn.in_proj_weight": (3 * width, width),
            f"lilicorr.{own}.attn.in_proj_bias": (3 * width,),
        }
        shapes |= linear(f"{own}.attn.out_proj", width, width)
        shapes |= linear(f"{own}.mlp.up_proj", 2 * width, width) | linear(f"{own}.mlp.down_proj", width, 2 * width)
        shapes |= {f"lilicorr.{own}.{norm}.weight": (width,) for norm in ("attn_norm", "mlp_norm")}
    return shapes | {f"lilicorr.{norm}.weight": (width,) for norm in ("output_norm", "anchor_norm")}


SELECTED = {"candidate_selector.predecessor_codebook": (VOCAB, RANK), "candidate_selector.successor_codebook": (VOCAB, RANK),
            "candidate_selector.hidden_projection.weight": (RANK, H)}  # fmt: skip
CONVOLUTION = dict(conv_kernel_size=2, conv_group_size=8)
DSPARK = dict(markov_rank=RANK, enable_confidence_head=True, confidence_head_with_markov=True)
DOMINO = dict(projector_type="domino", emb_dim=10, gru_hidden_dim=7)
CORRECTION = {"prefix_gru.weight_ih_l0": (21, H), "prefix_gru.weight_hh_l0": (21, 7), "embed_proj.0.weight": (10, H + 7),
              "embed_proj.2.weight": (VOCAB, 10)}  # fmt: skip
CORRELATOR = dict(
    lilicorr_hidden_size=16, lilicorr_candidate_topk=TOP, lilicorr_num_layers=2, lilicorr_num_heads=2, lilicorr_mlp_ratio=2.0,
    lilicorr_factor_dim=4, lilicorr_vector_eps=1e-6, lilicorr_logit_scale=10.0,
)  # fmt: skip
SMALL = VOCAB // 2
SELECTOR = dict(selector_rank=RANK, selector_top_k=TOP)
WINDOWED = dict(layer_types=["sliding_attention", "full_attention"])

VARIANTS = {
    "dflash2": Variant("authors", CONVOLUTION | SELECTOR, convolved(2) | SELECTED),
    "dflash2 of speculators": Variant(
        "speculators", CONVOLUTION | SELECTOR | WINDOWED | dict(speculators_model_type="dflash2"), convolved(2) | SELECTED,
    ),
    "dspark": Variant("deepspec", DSPARK | dict(markov_head_type="vanilla"), markov("vanilla", VOCAB), VOCAB, from_last=True),
    "dspark gated": Variant(
        "speculators", DSPARK | dict(speculators_model_type="dspark", markov_head_type="gated", sample_from_anchor=False),
        markov("gated", VOCAB),
    ),
    "dspark rnn, small vocabulary": Variant(
        "speculators", DSPARK | dict(speculators_model_type="dspark", markov_head_type="rnn", draft_vocab_size=SMALL),
        markov("rnn", SMALL), SMALL, from_last=True,
    ),
    "confidence alone": Variant("authors", dict(markov_rank=0, enable_confidence_head=True), confidence(H), from_last=True),
    "confidence in a place": Variant(
        "speculators", DSPARK | dict(speculators_model_type="dspark", confidence_head_with_markov=False),
        markov("vanilla", VOCAB, reads=0), from_last=True,
    ),
    "domino": Variant("authors", DOMINO | dict(pure_draft_prefix_len=1), CORRECTION),
    "domino shifted": Variant("authors", DOMINO | dict(shift_label=True), CORRECTION, from_last=True),
    "lilicorr": Variant("authors", CORRELATOR, lattice(16, 2, 4)),
    "lilicorr as wide as the network": Variant("authors", CORRELATOR | dict(lilicorr_hidden_size=0), lattice(H, 2, 4)),
    "windowed": Variant("authors", WINDOWED),
    "jetspec": Variant("authors", dict(causal_head=True)),
    "speculators": Variant("speculators", WINDOWED | dict(speculators_model_type="dflash")),
}  # fmt: skip


@cache
def state(name: str) -> dict[str, Tensor]:
    """Random weights, the same in every run."""
    variant = VARIANTS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        network = DFlashNetwork(read_config(bare(name)))
        shapes = {n: tuple(t.shape) for n, t in network.state_dict().items()} | variant.extra
        if variant.own_head:
            shapes |= {"embed_tokens.weight": (VOCAB, H), "lm_head.weight": (variant.own_head, H)}
        return {n: torch.randn(shape) * 0.3 + (len(shape) == 1 and "norm" in n) for n, shape in shapes.items()}


_folders: list[tempfile.TemporaryDirectory] = []


@cache
def bare(name: str) -> Path:
    """A folder with the config alone."""
    variant = VARIANTS[name]
    _folders.append(tempfile.TemporaryDirectory(prefix="block-heads-"))
    folder, fields = Path(_folders[-1].name), dict(variant.fields)
    layer = SHAPE | dict(
        vocab_size=VOCAB, layer_types=fields.pop("layer_types", ["full_attention"] * 2), hidden_act="silu"
    )
    if "sliding_attention" in layer["layer_types"]:
        layer |= dict(sliding_window=WINDOW, use_sliding_window=True)
    common = dict(block_size=BLOCK, mask_token_id=MASK)
    if variant.form == "speculators":
        config = common | fields | dict(
            transformer_layer_config=layer | {"model_type": "qwen3"},
            aux_hidden_state_layer_ids=[layer + 1 for layer in LAYERS],
        )  # fmt: skip
        config.setdefault("draft_vocab_size", VOCAB)
    elif variant.form == "deepspec":
        config = (
            layer | common | fields | dict(architectures=["Qwen3DSparkModel"], target_layer_ids=LAYERS, num_anchors=8)
        )
    else:
        config = layer | dict(
            architectures=["DFlashDraftModel"], num_target_layers=5, dflash_config=common | fields | dict(target_layer_ids=LAYERS)
        )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def written(name: str) -> str:
    tensors = dict(state(name))
    if VARIANTS[name].own_head == SMALL:
        tensors["d2t"] = drafted_ids() - torch.arange(SMALL)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB), drafted_ids())
    save_file(tensors, bare(name) / "model.safetensors")
    return str(bare(name))


def drafted_ids() -> Tensor:
    """Of the small vocabulary."""
    return torch.arange(SMALL) * 2 + 1


def rms(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def block_states(name: str, features: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """The network over ``[n, T·H]`` features and the embeddings ``[N, H]`` of a block that follows them, and the fused features."""
    w, config = state(name), read_config(bare(name))
    heads, kept, size = config.layer.num_attention_heads, config.layer.num_key_value_heads, config.layer.head_dim
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    n, count = len(context), len(block)
    places = torch.arange(n + count)
    cos, sin = (part[0] for part in LlamaRotaryEmbedding(config.layer)(block, places[None]))

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = size // 2
        return x * cos[:, None] + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin[:, None]

    def conv(layer: int, part: str, side: int, x: Tensor, kernels: Tensor) -> Tensor:
        base = w[f"layers.{layer}.{part}.base_kernel"][side]
        before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
        taps = base[:, None] + kernels[:, side].repeat_interleave(8, dim=-1).transpose(0, 1)
        return taps[0] * x + taps[1] * before

    def wrapped(layer: int, part: str, x: Tensor, inner: Any) -> Tensor:
        if f"layers.{layer}.{part}.base_kernel" not in w:
            return inner(x)
        kernels = (x @ w[f"layers.{layer}.{part}.kernel_projection.weight"].T).view(count, 2, 2, -1)
        return conv(layer, part, 1, inner(conv(layer, part, 0, x, kernels)), kernels)

    x, fields, speculators = block, VARIANTS[name].fields, VARIANTS[name].form == "speculators"
    for layer, kind in enumerate(fields.get("layer_types", ["full_attention"] * 2)):
        own = {name.removeprefix(f"layers.{layer}."): t for name, t in w.items() if name.startswith(f"layers.{layer}.")}
        sees = torch.ones(count, n + count, dtype=torch.bool)
        apart, windowed = places[n:, None] - places, kind == "sliding_attention"
        if fields.get("causal_head") or (windowed and fields.get("speculators_model_type") == "dflash"):
            sees &= apart >= 0
        if windowed:  # speculators: the same tokens of the context for all
            sees &= places >= n - WINDOW if speculators else apart < WINDOW

        def attention(x: Tensor, own: dict = own, sees: Tensor = sees) -> Tensor:
            q = rms((x @ own["self_attn.q_proj.weight"].T).view(count, heads, size), own["self_attn.q_norm.weight"])
            both = torch.cat([context, x])
            k = rms(
                (both @ own["self_attn.k_proj.weight"].T).view(n + count, kept, size), own["self_attn.k_norm.weight"]
            )
            v = (both @ own["self_attn.v_proj.weight"].T).view(n + count, kept, size)
            q, k = turned(q, cos[n:], sin[n:]), turned(k, cos, sin)
            k, v = (part.repeat_interleave(heads // kept, dim=1) for part in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
            weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
            return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ own["self_attn.o_proj.weight"].T

        def mlp(x: Tensor, own: dict = own) -> Tensor:
            gate, up = (x @ own[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            return (F.silu(gate) * up) @ own["mlp.down_proj.weight"].T

        x = x + wrapped(layer, "attention_conv", rms(x, own["input_layernorm.weight"]), attention)
        x = x + wrapped(layer, "mlp_conv", rms(x, own["post_attention_layernorm.weight"]), mlp)
    return rms(x, w["norm.weight"]), context


class Equations:
    """What the equations say of the block behind a text.

    Args:
        text: ``[n]``, committed tokens.
        length: tokens drafted, of which each has a place in the block; None: as many as in training.
    """

    def __init__(self, name: str, model: Any, text: Tensor, length: int | None = None) -> None:
        self.w, self.variant, self.last = state(name), VARIANTS[name], int(text[-1])
        hidden = model(text[None], output_hidden_states=True).hidden_states
        features = torch.cat([hidden[layer + 1][0, :-1] for layer in LAYERS], dim=-1)
        self.table = self.w.get("embed_tokens.weight", model.get_input_embeddings().weight)
        block = BLOCK if length is None else length + (not self.variant.from_last)
        ids = torch.cat([text[-1:], torch.full((block - 1,), MASK)])
        states, context = block_states(name, features, self.table[ids])
        self.states = states if self.variant.from_last else states[1:]
        logits = self.states @ self.w.get("lm_head.weight", model.get_output_embeddings().weight).T
        if self.variant.own_head == SMALL:
            logits = torch.full((len(logits), VOCAB), float("-inf")).index_copy(1, drafted_ids(), logits)
        self.logits = logits
        self.pairs = []
        if "lilicorr_num_heads" in self.variant.fields:
            self.pairs = correlated(self.w, self.states, logits, context[-1], self.table)
        self.memories: dict[tuple[int, ...], Tensor] = {}  # of recurrent heads, after a path and the token at its end

    def after(self, path: tuple[int, ...]) -> tuple[Tensor, float | None]:
        """Logits ``[V]`` of what follows a path of the block, ``-inf`` of what is not drafted, and the confidence in the best."""
        w, fields, place = self.w, self.variant.fields, len(path)
        h, own, before = self.states[place], self.logits[place], path[-1] if path else self.last
        memory = self.memories.get(path[:-1]) if path else None
        if "selector_rank" in fields:
            top = own.topk(TOP)
            gate = w["candidate_selector.hidden_projection.weight"] @ h
            gate = gate * w["candidate_selector.predecessor_codebook"][before]
            return only(top.indices, top.values + w["candidate_selector.successor_codebook"][top.indices] @ gate), None
        if "markov_rank" in fields:
            kind, bias = fields.get("markov_head_type"), torch.zeros(0)
            if fields["markov_rank"]:
                bias = w["markov_head.markov_w1.weight"][before]
            e = bias
            if kind == "gated":
                read = torch.cat([h, e])
                bias = (w["markov_head.gate_proj.weight"] @ read + w["markov_head.gate_proj.bias"]).sigmoid() * e
            if kind == "rnn":
                memory = torch.zeros(RANK) if memory is None else memory
                read = torch.cat([memory, e, h])
                g, c, o = (w["markov_head.joint_proj.weight"] @ read + w["markov_head.joint_proj.bias"]).chunk(3)
                self.memories[path] = g.sigmoid() * memory + (1 - g.sigmoid()) * c.tanh()
                bias = o.tanh()
            if len(bias):
                added = w["markov_head.markov_w2.weight"] @ bias
                if self.variant.own_head == SMALL:
                    added = torch.zeros(VOCAB).index_copy(0, drafted_ids(), added)
                own = own + added
            read = torch.cat([h, e]) if fields.get("confidence_head_with_markov") else h
            sure = w["confidence_head.proj.weight"] @ read + w["confidence_head.proj.bias"]
            return own, float(sure.sigmoid())
        if "emb_dim" in fields:
            cell = torch.nn.GRUCell(H, 7, bias=False)
            cell.load_state_dict({f"weight_{part}": w[f"prefix_gru.weight_{part}_l0"] for part in ("ih", "hh")})
            memory = cell(self.table[before][None], None if memory is None else memory[None])[0]
            self.memories[path] = memory
            if place >= fields.get("pure_draft_prefix_len", 0):
                own = own + w["embed_proj.2.weight"] @ F.silu(w["embed_proj.0.weight"] @ torch.cat([h, memory]))
        if self.pairs:
            top = self.logits.topk(TOP).indices
            rank = 0 if place == 0 else top[place - 1].tolist().index(before)
            return only(top[place], self.pairs[place][rank]), None
        return own, None

    def best(self, path: tuple[int, ...], count: int) -> list[tuple[int, float]]:
        """The likeliest tokens after a path, and their log-probabilities. Paths that begin it were asked for before."""
        logits, sure = self.after(path)
        top = logits.log_softmax(-1).topk(count)
        weights = top.values if sure is None else top.values - top.values[0] + math.log(sure)
        return list(zip(top.indices.tolist(), weights.tolist(), strict=True))

    def chain(self) -> tuple[list[int], list[float]]:
        """The tokens that are drafted greedily, and their log-probabilities."""
        tree = self.static([(0,) * (place + 1) for place in range(len(self.states))], 1)
        return list(max(tree, key=len)), list(tree.values())

    def static(self, paths: Sequence[Sequence[int]], children: int) -> dict[tuple[int, ...], float]:
        """The tree of a shape, its paths given by ranks: paths by tokens, and each last token's log-probability."""
        tree = {}
        for ranks in paths:
            tokens: tuple[int, ...] = ()
            for rank in ranks:
                token, weight = self.best(tokens, children)[rank]
                tokens += (token,)
            tree[tokens] = weight
        return tree

    def dynamic(self, depth: int, children: int, nodes: int) -> dict[tuple[int, ...], float]:
        """The tree of the likeliest paths, as :meth:`static` gives it."""
        tree: dict[tuple[int, ...], float] = {}
        waiting: list[tuple[float, tuple[int, ...], float]] = [(0.0, (), 0.0)]
        while len(tree) <= nodes:
            unlikely, path, own = heapq.heappop(waiting)
            tree[path] = own
            if len(path) < depth:
                for token, weight in self.best(path, children):
                    heapq.heappush(waiting, (unlikely - weight, (*path, token), weight))
        return {path: own for path, own in tree.items() if path}


def chain(name: str, model: Any, text: Tensor) -> list[int]:
    """The tokens that the equations draft after `text`, greedily."""
    return Equations(name, model, text).chain()[0]


def only(candidates: Tensor, scores: Tensor) -> Tensor:
    return torch.full((VOCAB,), float("-inf")).index_copy(0, candidates, scores)


def grade(weight: float) -> int:
    return sum(math.exp(weight) > bound for bound in GRADES)


def correlated(w: dict[str, Tensor], states: Tensor, logits: Tensor, context: Tensor, table: Tensor) -> list[Tensor]:
    """Of every place the scores ``[C, C]`` of its candidates after those of the place before."""
    own = {name.removeprefix("lilicorr."): t for name, t in w.items() if name.startswith("lilicorr.")}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]

    def feedforward(name: str, x: Tensor) -> Tensor:
        return linear(f"{name}.down_proj", F.silu(linear(f"{name}.up_proj", x)))

    count, width = len(states), len(own["output_norm.weight"])
    top = logits.log_softmax(-1).topk(TOP)
    p = top.values
    rank = torch.arange(TOP).expand(count, TOP)
    features = torch.stack([p, p.exp(), p - p[:, :1], rank / (TOP - 1), (rank == 0).float()], dim=-1)
    tokens = table[top.indices]
    x = (linear("token_proj", tokens) if "token_proj.weight" in own else tokens) + linear("pass_hidden_proj", states)[
        :, None
    ]
    x = x + feedforward(
        "feature_mlp", F.layer_norm(features, (5,), own["feature_norm.weight"], own["feature_norm.bias"])
    )
    x = (x + own["slot_embedding"][0, 0, :count] + own["rank_embedding"][0, 0]).flatten(0, 1)
    slots = torch.arange(count).repeat_interleave(TOP)
    apart = slots[:, None] - slots
    for layer in range(2):
        inner = f"layers.{layer}"
        attention = torch.nn.MultiheadAttention(width, 2, batch_first=True)
        attention.load_state_dict(
            {n.removeprefix(f"{inner}.attn."): t for n, t in own.items() if n.startswith(f"{inner}.attn.")}
        )
        bias = own["relative_slot_bias"][:, apart + BLOCK - 1] + (apart == 0) * own["same_slot_bias"][:, None, None]
        read = rms(x, own[f"{inner}.attn_norm.weight"])[None]
        x = x + attention(read, read, read, attn_mask=bias, need_weights=False)[0][0]
        x = x + feedforward(f"{inner}.mlp", rms(x, own[f"{inner}.mlp_norm.weight"]))
    x = rms(x, own["output_norm.weight"]).view(count, TOP, width)
    anchor = rms(linear("context_proj", context), own["anchor_norm.weight"])
    read = F.silu(linear("factor_input_proj", torch.cat([x, anchor.expand_as(x), x * anchor], dim=-1)))
    outward, inward = (F.normalize(linear(name, read), dim=-1) for name in ("out_head", "in_head"))
    first = F.normalize(linear("anchor_out_head", anchor), dim=-1)
    start = 10.0 * (inward[0] @ first)
    return [start.expand(TOP, TOP)] + [10.0 * outward[t] @ inward[t + 1].T for t in range(count - 1)]


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_every_draft_is_what_the_equations_say(name: str) -> None:
    model, inputs, spy = target(), prompts(2), Spy(DFlash(draft_model=written(name)))
    out = decode(model, inputs, spy, max_new_tokens=8, decoders_config={"prefill_chunk": 7})
    assert torch.equal(out.sequences, decode(model, inputs, "autoregressive", max_new_tokens=8).sequences)
    compared = 0
    for row, padding in enumerate((inputs["attention_mask"] == 0).sum(1).tolist()):
        for step in spy.seen:
            if not step.finished[row]:
                equations = Equations(name, model, out.sequences[row, padding : padding + step.lengths[row]])
                path, weights = equations.chain()
                assert step.draft.tokens[row].tolist() == path
                assert step.draft.grades[row].tolist() == [grade(weight) for weight in weights]
                compared += 1
    assert compared > 12 and len({token for step in spy.seen for token in step.draft.tokens.flatten().tolist()}) > 3


@torch.no_grad()
@pytest.mark.parametrize("name", ["speculators", "dflash2 of speculators"])
def test_speculators_drafts_what_the_equations_say(name: str) -> None:
    """Its own classes, over texts that are longer than the window."""
    library = pytest.importorskip(
        "speculators", reason="pip install speculators: it brings torchaudio and datasets with it"
    )
    model = target()
    config = library.SpeculatorModelConfig.from_pretrained(written(name))
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = library.SpeculatorModel.from_pretrained(written(name), config=config).float()
    theirs.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
    theirs.lm_head.weight.copy_(model.get_output_embeddings().weight)
    for anchor in (9, 29, 33):
        text = torch.randint(1, VOCAB, (1, 40), generator=torch.Generator().manual_seed(anchor))
        hidden = model(text, output_hidden_states=True).hidden_states
        features = torch.cat([hidden[layer + 1] for layer in LAYERS], dim=-1)
        only = torch.zeros(1, 40).scatter_(1, torch.tensor([[anchor]]), 1)
        states, logits, *_ = theirs._backbone_forward(
            features, text, only, torch.zeros(1, 40, H), torch.zeros(1, 40, dtype=torch.long), max_anchors=1
        )
        before, path = text[:, anchor], []
        for place in range(1, BLOCK):
            if "dflash2" in name:
                ids, scores = theirs.candidate_selector.select(logits[:, place], states[:, place], before)
                before = ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
            else:
                before = logits[:, place].argmax(-1)
            path.append(int(before))
        assert path == chain(name, model, text[0, : anchor + 1])


@torch.no_grad()
@pytest.mark.parametrize("name", ["speculators", pytest.param("dflash2", marks=pytest.mark.slow)])
def test_long_contexts_are_seen_whole_or_through_a_window(name: str) -> None:
    """Far beyond the window of a layer, prompt and all; the other layers see the first token still."""
    model, spy = target(positions=4096), Spy(DFlash(draft_model=written(name)))
    text = torch.randint(1, VOCAB, (1, 2048), generator=torch.Generator().manual_seed(4))
    inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    out = decode(model, inputs, spy, max_new_tokens=6, decoders_config={"prefill_chunk": 300})
    assert torch.equal(out.sequences, decode(model, inputs, "autoregressive", max_new_tokens=6).sequences)
    for step in spy.seen:
        read = out.sequences[0, : step.lengths[0]]
        assert step.draft.tokens[0].tolist() == chain(name, model, read)
    assert len(spy.seen) > 2 and chain(name, model, read) != chain(name, model, read[1000:])


@torch.no_grad()
@pytest.mark.in_turns
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_every_node_of_a_tree_is_what_the_equations_say_after_its_path(name: str, tree: str) -> None:
    model, inputs = target(), prompts(2)
    spy = Spy(DFlash(draft_model=written(name), tree=tree, length=3, nodes=24, children=3, beam=9))
    out = decode(model, inputs, spy, max_new_tokens=3)
    for row, padding in enumerate((inputs["attention_mask"] == 0).sum(1).tolist()):
        for step in spy.seen:
            if not step.finished[row]:
                equations = Equations(name, model, out.sequences[row, padding : padding + step.lengths[row]], 3)
                static = likely_paths(3, 3, 24)
                expected = equations.static(static, 3) if tree == "static" else equations.dynamic(3, 3, 24)
                drafted = paths_of(step.draft, row)
                assert set(drafted) == set(expected) and len({path[:2] for path in drafted}) > 4
                grades = {path: int(step.draft.grades[row, node - 1]) for path, node in drafted.items()}
                assert grades == {path: grade(weight) for path, weight in expected.items()}


@pytest.mark.parametrize("tree", ["none", "dynamic"])
def test_drafts_keep_their_grades_where_rows_come_and_go(tree: str) -> None:
    spy = Spy(DFlash(draft_model=written("dspark"), tree=tree, length=3, nodes=8))
    with decoders.Scheduler(target(), strategy=spy, rows=2, slots=128, decoders_config={"compile": False}) as scheduler:
        generations = [scheduler.submit([3 + row, 4, 5], max_new_tokens=3 + row) for row in range(3)]
        assert all(len(generation.result(60)[0]) > 0 for generation in generations)
    assert len(spy.seen) > 3 and all(step.draft.grades is not None for step in spy.seen)


@pytest.mark.parametrize(
    "name, shape, check",
    [
        ("dflash2", dict(tree="dynamic", length=4, nodes=24), check_draft_tokens_are_accepted),
        ("dspark rnn, small vocabulary", {}, check_rows_draft_apart),
        ("domino", dict(tree="static", length=4, nodes=24), check_on_device),
        ("lilicorr", dict(tree="static", length=3, nodes=12), check_draft_scores),
    ],
)
def test_a_head_conforms(name: str, shape: dict[str, Any], check: Check) -> None:
    """What all block drafters share is checked with dflash, and all heads in the slow test."""
    check_alone(check, Conditions(models=(target(),)), DFlash(draft_model=written(name), **shape))


@pytest.mark.parametrize("name", slow_but(list(VARIANTS)[:3], VARIANTS))
def test_a_head_under_grammars_alone_and_merged_writes_what_plain_decoding_writes(name: str) -> None:
    """In ragged rows, greedily alone and drawn merged; heads take turns with the shapes of drafts."""
    model, inputs, stops = target(), prompts(3), [5, 9]
    tree = ("none", "static", "dynamic")[list(VARIANTS).index(name) % 3]
    own = DFlash(draft_model=written(name), tree=tree, length=3, nodes=9)
    grammars = [TokenAutomaton.random(3, VOCAB, stops), None, TokenAutomaton.random(4, VOCAB, stops)]
    options: dict[str, Any] = dict(max_new_tokens=10, grammar=grammars, eos_token_id=stops)
    options["decoders_config"] = {"compile": False, "prune": False}
    drawn = dict(do_sample=True, temperature=0.7, top_p=0.9, seed=3)
    for strategy, more in ((own, {}), (Merged([PromptLookup(), own]), drawn)):
        out = decode(model, inputs, strategy, **options, **more)
        assert torch.equal(out.sequences, decode(model, inputs, "autoregressive", **options, **more).sequences)
        assert out.report.drafted > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tree, compile", [("none", False), ("static", False), ("dynamic", True)])
def test_every_head_conforms(name: str, tree: str, compile: bool) -> None:
    strategy = DFlash(draft_model=written(name), tree=tree, length=4, nodes=16)
    for check in checks_for(strategy):
        if check is not check_draft_tokens_are_accepted:  # random networks with heads are hardly ever right
            check_alone(check, Conditions(models=(target(),), compile=compile), strategy)


@pytest.mark.parametrize("name", ["dflash2", "dspark gated", "domino shifted"])
def test_merged_with_others_a_head_finds_its_place(name: str) -> None:
    model, inputs = target(), prompts(3)
    out = decode(model, inputs, "autoregressive", max_new_tokens=16)
    texts = [row[mask.argmax() :] for row, mask in zip(out.sequences, inputs["attention_mask"], strict=True)]
    known = Replay(texts=tuple(tuple(text.tolist()) for text in texts), length=9, wrong_every=5)
    own = Spy(DFlash(draft_model=written(name)))
    again = decode(model, inputs, Merged([known, own]), max_new_tokens=16)
    assert torch.equal(again.sequences, out.sequences)
    with torch.no_grad():
        for step in own.seen:
            for row, text in enumerate(texts):
                if not step.finished[row]:
                    assert step.draft.tokens[row].tolist() == chain(name, model, text[: step.lengths[row]])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tree_goes_on_where_the_head_is_sure(tmp_path: Path, rank: int) -> None:
    """Of the two likeliest first tokens, the head trusts what follows one."""
    changed = {name: torch.zeros_like(t) for name, t in state("dspark").items() if name.startswith(("markov", "conf"))}
    changed["confidence_head.proj.weight"][0, H:] = 1
    changed["confidence_head.proj.bias"][0] = -4
    changed["lm_head.weight"] = state("dspark")["lm_head.weight"] * 0.05

    def paths(folder: Path) -> set[tuple[int, ...]]:
        folder.mkdir()
        (folder / "config.json").write_text((bare("dspark") / "config.json").read_text())
        save_file(state("dspark") | changed, folder / "model.safetensors")
        spy = Spy(DFlash(draft_model=str(folder), tree="dynamic", length=3, nodes=4, children=2))
        decode(target(), prompts(1), spy, max_new_tokens=1)
        return set(paths_of(spy.seen[0].draft, 0))

    first = {path[0] for path in paths(tmp_path / "unsure of all")}
    trusted = sorted(first)[rank]
    changed["markov_head.markov_w1.weight"][trusted] = 4
    again = paths(tmp_path / "sure of one")
    assert len(first) == 2 and {path[0] for path in again} == first
    assert {path[0] for path in again if len(path) > 1} == {trusted} and len(again) == 4


class Repeats(BlockHead):
    """Prefers the token before, as a researcher's head of a few lines might."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = torch.nn.Parameter(torch.zeros(1))

    @classmethod
    def of(cls, fields: HeadFields) -> Repeats | None:
        return cls() if fields.raw.get("projector_type") == "repeats" else None

    def choose(self, block: Any, begun: Any, place: int, tokens: Tensor, above: Tensor | None) -> HeadScores:
        bias = F.one_hot(tokens, block.logits.shape[-1]) * self.strength
        return HeadScores(block.logits[:, place, None] + bias)


def test_a_head_of_ones_own(tmp_path: Path) -> None:
    class Repeating(DFlash):
        heads = (*HEADS, Repeats)

    raw = json.loads((bare("jetspec") / "config.json").read_text())
    raw["dflash_config"] |= {"projector_type": "repeats"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(state("jetspec") | {"strength": torch.tensor([1e4])}, tmp_path / "model.safetensors")
    model, inputs, spy = target(), prompts(2), Spy(Repeating(draft_model=str(tmp_path)))
    out = decode(model, inputs, spy, max_new_tokens=6)
    assert torch.equal(out.sequences, decode(model, inputs, "autoregressive", max_new_tokens=6).sequences)
    last = inputs["input_ids"][:, -1:]
    assert torch.equal(spy.seen[0].draft.tokens, last.expand(-1, BLOCK - 1))
    with pytest.raises(SettingsError, match="strength has no place"):
        decode(model, inputs, DFlash(draft_model=str(tmp_path)), max_new_tokens=2)


def test_what_a_config_cannot_say(tmp_path: Path) -> None:
    def read(name: str, **changes: Any) -> Any:
        raw = json.loads((bare(name) / "config.json").read_text())
        part = raw.get("dflash_config", raw)
        part |= changes
        (tmp_path / "config.json").write_text(json.dumps(raw))
        save_file(state(name), tmp_path / "model.safetensors")
        return load_draft_model(tmp_path, torch.device("cpu"), torch.float32)

    with pytest.raises(SettingsError, match="conv_group_size 0: set both to 0, or both"):
        read("dflash2", conv_group_size=0)
    with pytest.raises(SettingsError, match="conv_group_size is 5, which does not divide hidden_size"):
        read("dflash2", conv_group_size=5)
    with pytest.raises(SettingsError, match="markov_head_type: Input should be 'vanilla', 'gated' or 'rnn'"):
        read("dspark", markov_head_type="lstm")
    with pytest.raises(SettingsError, match="confidence_head_with_markov needs a markov_rank"):
        read("dspark", markov_rank=0)
    with pytest.raises(SettingsError, match="has no emb_dim"):
        read("domino", emb_dim=None)
    with pytest.raises(SettingsError, match="lilicorr_num_heads is 3, which does not divide the hidden size, 16"):
        read("lilicorr", lilicorr_num_heads=3)
    with pytest.raises(UnsupportedError, match="reads the target's embeddings as a feature"):
        read("speculators", aux_hidden_state_layer_ids=[0, 3])
    with pytest.raises(SettingsError, match="neither d2t nor t2d"):
        read("dspark rnn, small vocabulary")
    fields = HeadFields({"selector_rank": 4}, "here", read_config(bare("dflash2")).layer, BLOCK - 1, SMALL)
    with pytest.raises(UnsupportedError, match="here: a path selector needs the whole vocabulary of 128 tokens"):
        PathSelector.of(fields)
