"""Medusa heads (Cai et al. 2024, "Medusa", section 2.1), their trees, and their files.

Files in our format are read and written, files in the authors' format are only read.

Letters: ``K`` heads, ``H`` hidden size, ``V`` vocabulary, ``R`` rank of a low-rank projection, ``P`` positions of texts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, ValidationError, field_validator, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..common.files import write_whole
from ..errors import DecodersError, SettingsError
from ..tree import Topology
from .network_files import CONFIG, Count, FileConfig, Stamp, Whole, find_network, read_json, read_tensors, stamp_of

Projection = Literal["tied", "low_rank", "full"]
WEIGHTS = "model.safetensors"
#: Names of the weights file in the authors' format.
UPSTREAM = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


class HeadsConfig(FileConfig):
    """The shape of the heads, and the tree of their draft tokens.

    Attributes:
        heads: ``K``; head k = 1 … K predicts the token k places after the token that the output head predicts.
        layers: number of residual blocks in each head.
        hidden_size: the target's hidden size.
        vocab_size: the target's vocabulary size.
        projection: ``tied``: every head uses the target's output head, and nothing is stored. ``low_rank``: each head adds a learned
            matrix of rank `rank` to the target's output head. ``full``: each head has its own projection, as in the paper.
        rank: rank of the learned matrix; 0 with another `projection`.
        tree: paths in Medusa's notation, best first: the first n paths are the best tree of n nodes. None: the default tree.
    """

    heads: Count
    layers: Count
    hidden_size: Count
    vocab_size: Count
    projection: Projection = "full"
    rank: Annotated[Whole, Field(ge=0)] = 0
    tree: tuple[tuple[Whole, ...], ...] | None = None

    @field_validator("tree", mode="wrap")
    @classmethod
    def _is_tree(cls, value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise ValueError("the tree must be a list of paths of ranks, such as [[0], [0, 1]]") from error

    @model_validator(mode="after")
    def _rank_fits(self) -> Self:
        if (self.projection == "low_rank") != (self.rank > 0):
            raise ValueError("projection low_rank needs a rank of 1 or more, any other projection a rank of 0")
        return self


class HeadWeights(NamedTuple):
    """The stacked tensors of all heads, as inputs of compiled code. Tensors that the heads' kind of projection does not need are None.

    Attributes:
        linear: ``[K, layers, H, H]``, weights of the residual blocks.
        bias: ``[K, layers, H]``, biases of the residual blocks.
        projection: ``[K, V, H]``, full projections.
        down: ``[K, R, H]``, the factor of low-rank projections that is applied first.
        up: ``[K, V, R]``, the factor of low-rank projections that is applied second.
    """

    linear: Tensor
    bias: Tensor
    projection: Tensor | None
    down: Tensor | None
    up: Tensor | None


class MedusaHeads(nn.Module):
    """``K`` heads beside a frozen target.

    Head k maps a hidden state x to ``proj_k(block(… block(x)))`` with ``block(x) = x + SiLU(W·x + b)``. Initially W and b are zero
    and the projection is the target's, so an untrained head predicts what the target's output head predicts. Every block has its own
    weights. In the authors' code all blocks of a head share their weights.

    Args:
        lm_head: ``[V, H]``, weight of the target's output head. Needed only for new heads with a full projection.
    """

    def __init__(self, config: HeadsConfig, lm_head: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        k, h, v, r = config.heads, config.hidden_size, config.vocab_size, config.rank
        self.linear = nn.Parameter(torch.zeros(k, config.layers, h, h))
        self.bias = nn.Parameter(torch.zeros(k, config.layers, h))
        self.projection = self.down = self.up = None
        if config.projection == "full":
            start = torch.zeros(v, h) if lm_head is None else lm_head.detach().float().cpu()
            self.projection = nn.Parameter(start.expand(k, v, h).clone())
        elif config.projection == "low_rank":
            # One factor is random and the other is zero. Their product is zero, but its gradient is not.
            generator = torch.Generator().manual_seed(0)
            self.down = nn.Parameter(torch.randn(k, r, h, generator=generator) * h**-0.5)
            self.up = nn.Parameter(torch.zeros(k, v, r))

    def weights(self) -> HeadWeights:
        """The heads' tensors, for compiled code."""
        return HeadWeights(self.linear, self.bias, self.projection, self.down, self.up)

    def forward(self, hidden: Tensor, lm_head: Tensor, lm_bias: Tensor | None = None) -> Tensor:
        """Logits ``[P, K, V]`` for `hidden` ``[P, H]``. lm_head ``[V, H]``, lm_bias ``[V]``: the target's output head."""
        return head_scores(hidden, self.weights(), lm_head, lm_bias)

    def of_head(self, k: int, hidden: Tensor, lm_head: Tensor, lm_bias: Tensor | None = None) -> Tensor:
        """Logits ``[P, V]`` of the head with index `k` (from 0) alone. The logits of all heads together may not fit in memory."""
        stacked, head = self.weights(), slice(k, k + 1)
        projection, down, up = (None if part is None else part[head] for part in stacked[2:])
        weights = HeadWeights(stacked.linear[head], stacked.bias[head], projection, down, up)
        return head_scores(hidden, weights, lm_head, lm_bias)[:, 0]


def head_scores(hidden: Tensor, weights: HeadWeights, lm_head: Tensor, lm_bias: Tensor | None) -> Tensor:
    """Logits ``[P, K, V]`` for `hidden` ``[P, H]``: :meth:`MedusaHeads.forward` as a function of tensors."""
    states = hidden[:, None].expand(-1, weights.linear.shape[0], -1).to(weights.linear.dtype)
    for linear, bias in zip(weights.linear.unbind(1), weights.bias.unbind(1), strict=True):
        states = states + nn.functional.silu(torch.einsum("pkh,kgh->pkg", states, linear) + bias)
    if weights.projection is not None:
        return torch.einsum("pkh,kvh->pkv", states, weights.projection)
    scores = states @ lm_head.to(states.dtype).T
    if lm_bias is not None:
        scores = scores + lm_bias
    if weights.down is not None and weights.up is not None:
        scores = scores + torch.einsum("pkr,kvr->pkv", torch.einsum("pkh,krh->pkr", states, weights.down), weights.up)
    return scores


def find_heads(named: str | None, model: PreTrainedModel) -> Path:
    """The folder of the heads for the target `model`: `named`, or else the target's subfolder ``medusa``.

    Raises:
        SettingsError: there is no folder `named`.
        UnsupportedError: no folder is named, and the target's folder has no subfolder ``medusa``.
    """
    folder = find_network(named, model.config, "medusa", "heads", "heads", "`decoders train medusa` makes one")
    if not folder.exists():
        raise SettingsError(f"medusa: there are no heads at {str(named)!r}; train heads with `decoders train medusa`")
    return folder


def check_fit(heads: MedusaHeads, model: PreTrainedModel, origin: str | Path) -> None:
    """Raises SettingsError if the hidden size or vocabulary of `heads` differs from the target's. origin: file or folder of `heads`."""
    config, (vocab, hidden) = heads.config, model.get_output_embeddings().weight.shape
    if (config.vocab_size, config.hidden_size) != (vocab, hidden):
        raise SettingsError(
            f"medusa: the heads in {origin} are for hidden size {config.hidden_size} and a vocabulary of "
            f"{config.vocab_size}, this {type(model).__name__} has hidden size {hidden} and a vocabulary of {vocab}"
        )


def save_heads(heads: MedusaHeads, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes config and weights to `folder`, each file atomically."""
    from safetensors.torch import save

    state = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in heads.state_dict().items()}
    config = {"model_type": "decoders_medusa", **heads.config.model_dump(mode="json")}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in config.items()]  # a tree on one line
    write_whole(folder / WEIGHTS, save(state, metadata={"format": "pt"}))
    # The config is written last, because a folder with a config is taken for complete heads.
    write_whole(folder / CONFIG, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def load_heads(folder: str | Path, device: torch.device | None = None, dtype: torch.dtype | None = None) -> MedusaHeads:
    """Loads heads from a folder in our or the authors' format, or from the authors' weights file. Caches them until the files change.

    No code in the files is run: a pickled checkpoint is read by torch's ``weights_only`` loader.

    Raises:
        SettingsError: files are missing, unreadable, or hold no heads.
    """
    path = Path(folder)
    files = [path] if path.is_file() else [path / name for name in (CONFIG, WEIGHTS, *UPSTREAM)]
    return _load(path.absolute(), stamp_of(files), device or torch.device("cpu"), dtype)


@lru_cache(maxsize=8)
def _load(path: Path, stamp: Stamp, device: torch.device, dtype: torch.dtype | None) -> MedusaHeads:
    names = {name for name, *_ in stamp}
    weights = path if path.is_file() else next((path / n for n in (WEIGHTS, *UPSTREAM) if n in names), None)
    if weights is None:
        raise SettingsError(f"medusa: {path} holds no Medusa heads: there is no {WEIGHTS}, {' or '.join(UPSTREAM)}")
    state = read_tensors(weights, "medusa")
    heads = _ours(path, state) if "linear" in state else _upstream(weights, state)
    heads.requires_grad_(False)
    return heads.to(device=device, dtype=dtype).eval()


def _ours(path: Path, state: dict[str, Tensor]) -> MedusaHeads:
    place = f"medusa: {path / CONFIG}"
    raw = read_json(path / CONFIG, f"these Medusa heads have no config at {str(path / CONFIG)!r}", "medusa")
    heads = MedusaHeads(HeadsConfig.of(raw, place, "config of Medusa heads"))
    try:
        heads.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    except RuntimeError as error:  # a tensor is missing, or has another shape
        raise SettingsError(
            f"medusa: {path}: the weights of these Medusa heads do not fit their config: {error}"
        ) from error
    return heads


def _upstream(file: Path, state: dict[str, Tensor]) -> MedusaHeads:
    """Reads heads in the authors' format: a ``ModuleList`` of ``Sequential(ResBlock, …, Linear)``.

    The keys of the first head are ``0.0.linear.weight`` and ``0.0.linear.bias`` for its first block, and ``0.1.weight`` for its
    projection. In some files all keys begin with ``medusa_head.``. The authors' code writes a shared block once for each use. Each
    copy becomes a separate block here.
    """
    pattern = re.compile(r"(?:.*\bmedusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
    parts: dict[tuple[int, int, str], Tensor] = {}
    for name, tensor in state.items():
        if match := pattern.fullmatch(name):
            parts[int(match[1]), int(match[2]), match[3]] = tensor.float()
    projections = {(head, place): t for (head, place, kind), t in parts.items() if kind == "weight"}
    blocks = {(head, place) for head, place, kind in parts if kind == "linear.weight"}
    count, layers = len(projections), len(blocks) // max(len(projections), 1)
    expected = {(k, layers) for k in range(count)}
    if not count or set(projections) != expected or blocks != {(k, i) for k in range(count) for i in range(layers)}:
        raise SettingsError(
            f"medusa: {file} holds no Medusa heads: heads have keys such as 0.0.linear.weight and 0.1.weight, this file has "
            f"{', '.join(sorted(state)[:4]) or 'none'}"
        )
    vocab, hidden = projections[0, layers].shape
    config = HeadsConfig(heads=count, layers=layers, hidden_size=hidden, vocab_size=vocab)
    heads = MedusaHeads(config)

    def stacked(kind: str) -> Tensor:
        zero = torch.zeros(hidden)
        rows = [[parts.get((k, i, kind), zero) for i in range(layers)] for k in range(count)]
        return torch.stack([torch.stack(row) for row in rows])

    try:
        heads.load_state_dict(
            {
                "linear": stacked("linear.weight"),
                "bias": stacked("linear.bias"),
                "projection": torch.stack([projections[k, layers] for k in range(count)]),
            }
        )
    except RuntimeError as error:
        raise SettingsError(f"medusa: {file}: these Medusa heads are of different sizes: {error}") from error
    return heads


Tree = tuple[tuple[int, ...], ...]

#: The authors' sparse tree of 63 nodes (their ``mc_sim_7b_63``, found for Vicuna-7B), best path first. A path lists one rank per
#: level. Rank 0 is the best token of the level's head.
DEFAULT_TREE: Tree = (
    (0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 2), (3,), (0, 3), (4,), (0, 4), (2, 0), (0, 5), (0, 0, 1),
    (5,), (0, 6), (6,), (0, 7), (0, 1, 0), (1, 1), (7,), (0, 8), (0, 0, 2), (3, 0), (0, 9), (8,), (9,), (1, 0, 0),
    (0, 2, 0), (1, 2), (0, 0, 3), (4, 0), (2, 1), (0, 0, 4), (0, 0, 5), (0, 0, 0, 0), (0, 1, 1), (0, 0, 6), (0, 3, 0),
    (5, 0), (1, 3), (0, 0, 7), (0, 0, 8), (0, 0, 9), (6, 0), (0, 4, 0), (1, 4), (7, 0), (0, 1, 2), (2, 0, 0), (3, 1),
    (2, 2), (8, 0), (0, 5, 0), (1, 5), (1, 0, 1), (0, 2, 1), (9, 0), (0, 6, 0), (0, 0, 0, 1), (1, 6), (0, 7, 0),
)  # fmt: skip


def search_tree(ranks: Tensor, nodes: int, widest: int = 16) -> Tree:
    """Returns the tree of at most `nodes` nodes with the longest mean accepted path on calibration data: its paths, best first.

    At every position of the data, the right token of each head has a rank among the head's tokens. The ranks of all heads form the
    position's path. The tree accepts the part of this path that it contains. So a node adds a fixed share to the mean accepted
    length: the share of positions whose path contains the node. A parent's share is at least its child's, so the nodes with the
    largest shares form a tree, which is the best tree. The paper instead multiplies the accuracies of single heads, as if they were
    independent.

    Args:
        ranks: ``[P, K]`` int64, the rank of the right token among each head's tokens at ``P`` positions. 0: the best; -1: unknown.
        widest: number of best tokens considered per head.

    Raises:
        DecodersError: the first head's `widest` best tokens are never right.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for row, count in zip(*(t.tolist() for t in torch.unique(ranks, dim=0, return_counts=True)), strict=True):
        for depth, rank in enumerate(row):
            if not 0 <= rank < widest:
                break
            counts[tuple(row[: depth + 1])] += count
    if not counts:
        raise DecodersError(f"no tree can be found: none of the first head's {widest} best tokens is ever right")
    # Among equally frequent paths the shorter comes first, so that a parent comes before its child.
    return tuple(sorted(counts, key=lambda path: (-counts[path], len(path), path))[:nodes])


def accepted_length(ranks: Tensor, tree: Sequence[Sequence[int]]) -> float:
    """Mean tokens per step with `tree` on calibration data, counting the target's own token. ranks: as in :func:`search_tree`."""
    paths = {tuple(path) for path in tree}
    tokens = 0
    for row, count in zip(*(t.tolist() for t in torch.unique(ranks, dim=0, return_counts=True)), strict=True):
        depth = 0
        while depth < len(row) and tuple(row[: depth + 1]) in paths:
            depth += 1
        tokens += count * (depth + 1)
    return tokens / len(ranks)


def picture(tree: Sequence[Sequence[int]]) -> str:
    """The attention mask of a tree's block as text. Each line is a node, with ``■`` in the columns of the nodes that it sees."""
    topology, _ = Topology.from_paths(tree)
    ordered = [(), *sorted({tuple(path) for path in tree}, key=lambda path: (len(path), path))]
    names = ["root" if not path else "head " + str(len(path)) + " " + "·".join(map(str, path)) for path in ordered]
    width = max(map(len, names))
    visible = topology.tensors(1, torch.device("cpu")).visible[0].tolist()
    lines = [
        f"{name:<{width}}  " + " ".join("■" if s else "·" for s in row)
        for name, row in zip(names, visible, strict=True)
    ]
    return "\n".join(lines)
