"""Heads that choose the tokens of a block after one pass of a :class:`~decoders.heads.dflash.DFlashNetwork`.

A place is a position of the block at which a token is drafted. The network predicts the token of each place without knowing the
tokens that are chosen for other places. A head scores the likely tokens of a place (its candidates) by how well they follow the token
that was chosen for the previous place. Letters: ``B`` rows, ``T`` places of a block, ``Q`` nodes of the draft tree whose children are
scored, ``C`` candidates of a place, ``D`` tokens that can be drafted, ``H`` hidden size of the network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from ..errors import SettingsError, UnsupportedError
from .network_files import Count, FileConfig, Whole

#: The name of a draft model's config file in error messages.
_KIND = "config of a DFlash draft model"


@dataclass(frozen=True)
class HeadFields:
    """The fields of a draft model's ``config.json`` from which a head is created.

    Attributes:
        raw: all fields, including the fields of the section ``dflash_config``.
        place: the strategy and the file, with which error messages begin.
        layer: config of the network's decoder layers.
        places: ``T``, number of tokens drafted per block in training.
        draft_vocab_size: ``D``.
    """

    raw: dict[str, Any]
    place: str
    layer: LlamaConfig
    places: int
    draft_vocab_size: int

    @property
    def vocab_size(self) -> int:
        """``V``, the target's vocabulary size."""
        return self.layer.vocab_size

    def whole_vocabulary(self, head: str) -> int:
        """The target's vocabulary size ``V``. Raises UnsupportedError if the draft vocabulary is smaller. head: the head's name."""
        if self.draft_vocab_size != self.vocab_size:
            raise UnsupportedError(
                f"{self.place}: {head} needs the whole vocabulary of {self.vocab_size} tokens, "
                f"but draft_vocab_size is {self.draft_vocab_size}"
            )
        return self.vocab_size

    def read(self, fields: type[FileConfig]) -> Any:
        """Returns an instance of the class `fields` with the values in `raw`. Raises SettingsError if a value is missing or wrong."""
        return fields.of(self.raw, self.place, _KIND)


@dataclass(frozen=True)
class DraftedBlock:
    """The result of one pass of the network over a block.

    Attributes:
        logits: ``[B, T, D]``, the logits of every place.
        states: ``[B, T, H]``, the hidden states from which the output head computed `logits`.
        context: ``[B, H]``, the last token that the target has read: its hidden states, fused to one vector by the network.
        has_context: ``[B]`` bool, false for rows of which the target has read no token. Their `context` is undefined.
        embed: returns the target's embeddings ``[…, H]`` of tokens.
    """

    logits: Tensor
    states: Tensor
    context: Tensor
    has_context: Tensor
    embed: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class HeadScores:
    """A head's scores for the children of ``Q`` nodes.

    Attributes:
        logits: ``[B, Q, D]``; ``-inf`` for tokens that are not drafted.
        state: ``[B, Q, S]``, the head's state after each node; None if the head's scores depend on the previous token only.
        confidence: ``[B, Q]``, the probability that the best child is accepted; None if the head does not predict it.
    """

    logits: Tensor
    state: Tensor | None = None
    confidence: Tensor | None = None


class BlockHead(nn.Module, ABC):
    """A head that chooses a block's tokens. Its parameters have the names that published checkpoints use.

    To use your own head, list its class in `heads` of a subclass of :class:`~decoders.strategies.DFlash`.

    Attributes:
        candidates: ``C``, greatest number of children of a node; None: all ``D`` tokens.
    """

    candidates: int | None = None

    @classmethod
    @abstractmethod
    def of(cls, fields: HeadFields) -> Self | None:
        """Creates the head that the config `fields` describes, without weights; None if it describes no head of this class."""

    def begin(self, block: DraftedBlock) -> Any:
        """Once per block, computes what does not depend on the chosen tokens. The result is passed to :meth:`choose` as `begun`."""
        return None

    @abstractmethod
    def choose(self, block: DraftedBlock, begun: Any, place: int, tokens: Tensor, above: Tensor | None) -> HeadScores:
        """Scores the tokens that may be drafted at `place`, 0 … T-1, of the block.

        Args:
            begun: the result of :meth:`begin`.
            tokens: ``[B, Q]``, the nodes' tokens, which were chosen for the previous place. For place 0, the rows' last committed
                tokens.
            above: ``[B, Q, S]``, the head's states at the nodes' parents; None for place 0, and for heads without a state.
        """

    @staticmethod
    def only(candidates: Tensor, scores: Tensor, size: int) -> Tensor:
        """Scores of all tokens, ``[B, Q, D]``: the `scores` ``[B, Q, C]`` of `candidates` ``[B, C]``, and ``-inf`` for other tokens."""
        index = candidates[:, None].expand(-1, scores.shape[1], -1)
        return scores.new_full((*scores.shape[:2], size), float("-inf")).scatter(2, index, scores)


class _SelectorFields(FileConfig):
    selector_rank: Count
    selector_top_k: Count = 16


class _Codebooks(nn.Module):
    def __init__(self, vocab_size: int, width: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)


class PathSelector(BlockHead):
    """DFlash2 (z-lab, 2026): scores the ``C`` likeliest tokens of every place by how well they follow the previous token.

    At place ``t``, the score of token ``b`` after token ``a`` is ``S_t(a, b) = U_t(b) + <A(a) * W h_t, B(b)>``. ``U`` are the
    network's logits, ``h`` its hidden states, and ``W`` is a projection. The tables ``A`` and ``B`` hold a short vector for each
    token.
    """

    candidates: int

    def __init__(self, vocab_size: int, width: int, rank: int, candidates: int) -> None:
        super().__init__()
        self.candidates = min(candidates, vocab_size)
        self.candidate_selector = _Codebooks(vocab_size, width, rank)

    @classmethod
    def of(cls, fields: HeadFields) -> Self | None:
        if "selector_rank" not in fields.raw:
            return None
        own = fields.read(_SelectorFields)
        return cls(
            fields.whole_vocabulary("a path selector"), fields.layer.hidden_size, own.selector_rank, own.selector_top_k
        )

    def begin(self, block: DraftedBlock) -> tuple[Tensor, Tensor, Tensor]:
        top = block.logits.topk(self.candidates, dim=-1)
        return top.values, top.indices, self.candidate_selector.hidden_projection(block.states)

    def choose(self, block: DraftedBlock, begun: Any, place: int, tokens: Tensor, above: Tensor | None) -> HeadScores:
        own, candidates, gates = (part[:, place] for part in begun)
        gated = F.embedding(tokens, self.candidate_selector.predecessor_codebook) * gates[:, None]
        pairs = gated @ F.embedding(candidates, self.candidate_selector.successor_codebook).mT
        return HeadScores(self.only(candidates, own[:, None] + pairs, block.logits.shape[-1]))


class _MarkovFields(FileConfig):
    markov_rank: Annotated[Whole, Field(ge=0)] = 0
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False


#: The config fields of a Markov head.
MARKOV_FIELDS = tuple(_MarkovFields.model_fields)


class _MarkovTables(nn.Module):
    def __init__(self, vocab_size: int, draft_vocab_size: int, width: int, rank: int, kind: str) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)


class _Confidence(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class MarkovHead(BlockHead):
    """DSpark (arXiv:2607.05147): adds to the network's logits a low-rank bias that depends on the previous token.

    The config may describe a second head, which predicts the probability that a draft token is accepted. The bias after token ``a``
    at a place with hidden state ``h`` depends on ``markov_head_type``. ``vanilla``: ``W2 W1[a]``. ``gated``: ``W2 (sigmoid(G [h;
    W1[a]]) * W1[a])``. ``rnn``: ``W2`` times the output of a recurrent unit with state ``s``. The unit computes its gate, candidate
    state and output as one matrix times ``[s; W1[a]; h]``.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, width: int, own: _MarkovFields) -> None:
        super().__init__()
        rank, self.kind = own.markov_rank, own.markov_head_type if own.markov_rank else "none"
        self.reads_token = own.confidence_head_with_markov
        if rank:
            self.markov_head = _MarkovTables(vocab_size, draft_vocab_size, width, rank, self.kind)
        self.confidence_head = _Confidence(width + rank * self.reads_token) if own.enable_confidence_head else None

    @classmethod
    def of(cls, fields: HeadFields) -> Self | None:
        if "markov_rank" not in fields.raw and not fields.raw.get("enable_confidence_head"):
            return None
        own = fields.read(_MarkovFields)
        if own.confidence_head_with_markov and own.enable_confidence_head and not own.markov_rank:
            raise SettingsError(
                f"{fields.place}: confidence_head_with_markov needs a markov_rank of 1 or more, but markov_rank is 0"
            )
        return cls(fields.vocab_size, fields.draft_vocab_size, fields.layer.hidden_size, own)

    def begin(self, block: DraftedBlock) -> Tensor | None:
        """The product of the gate's or the recurrent unit's matrix with the hidden state of each place, ``[B, T, …]``."""
        name = {"gated": "gate_proj", "rnn": "joint_proj"}.get(self.kind)
        if name is None:
            return None
        proj, width = getattr(self.markov_head, name), block.states.shape[-1]
        weight = proj.weight[:, :width] if self.kind == "gated" else proj.weight[:, -width:]
        return F.linear(block.states, weight, proj.bias)

    def choose(self, block: DraftedBlock, begun: Any, place: int, tokens: Tensor, above: Tensor | None) -> HeadScores:
        logits, read, state = block.logits[:, place, None].expand(-1, tokens.shape[1], -1), None, None
        if self.kind != "none":
            previous = self.markov_head.markov_w1(tokens)
            bias, state = self._bias(previous, begun if begun is None else begun[:, place, None], above)
            logits = logits + bias
            read = previous if self.reads_token else None
        if self.confidence_head is None:
            return HeadScores(logits, state)
        states = block.states[:, place, None].expand(-1, tokens.shape[1], -1)
        read = states if read is None else torch.cat([states, read], dim=-1)
        return HeadScores(logits, state, self.confidence_head.proj(read)[..., 0].float().sigmoid())

    def _bias(self, previous: Tensor, projected: Tensor | None, above: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the bias and the new states. previous: ``W1[a]`` of the previous tokens. projected: the place's part of `begun`."""
        head, rank = self.markov_head, previous.shape[-1]
        if projected is None:
            return head.markov_w2(previous), None
        if self.kind == "gated":
            gate = projected + F.linear(previous, head.gate_proj.weight[:, -rank:])
            return head.markov_w2(gate.sigmoid() * previous), None
        above = torch.zeros_like(previous) if above is None else above
        joint = projected + F.linear(torch.cat([above, previous], dim=-1), head.joint_proj.weight[:, : 2 * rank])
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return head.markov_w2(output.tanh()), gate * above + (1 - gate) * candidate.tanh()


class _DominoFields(FileConfig):
    emb_dim: Count
    gru_hidden_dim: Count
    pure_draft_prefix_len: Annotated[Whole, Field(ge=0)] = 0


class DominoHead(BlockHead):
    """Domino (SpecForge): a recurrent unit and a network of two layers correct the logits.

    The recurrent unit with state ``s`` reads the block's tokens one by one. The network reads ``[h; s]``, where ``h`` is the place's
    hidden state. The first ``pure_draft_prefix_len`` places are not corrected.
    """

    def __init__(self, draft_vocab_size: int, width: int, own: _DominoFields) -> None:
        super().__init__()
        self.untouched = own.pure_draft_prefix_len
        self.prefix_gru = nn.GRU(width, own.gru_hidden_dim, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + own.gru_hidden_dim, own.emb_dim, bias=False), nn.SiLU(),
            nn.Linear(own.emb_dim, draft_vocab_size, bias=False),
        )  # fmt: skip

    @classmethod
    def of(cls, fields: HeadFields) -> Self | None:
        if fields.raw.get("projector_type") != "domino":
            return None
        return cls(fields.draft_vocab_size, fields.layer.hidden_size, fields.read(_DominoFields))

    def choose(self, block: DraftedBlock, begun: Any, place: int, tokens: Tensor, above: Tensor | None) -> HeadScores:
        read = block.embed(tokens).to(block.states.dtype)
        above = read.new_zeros(*tokens.shape, self.prefix_gru.hidden_size) if above is None else above
        unit: Any = self.prefix_gru
        state = torch.gru_cell(read.flatten(0, 1), above.flatten(0, 1), unit.weight_ih_l0, unit.weight_hh_l0)
        state = state.unflatten(0, tokens.shape)
        logits = block.logits[:, place, None].expand(-1, tokens.shape[1], -1)
        if place >= self.untouched:
            states = block.states[:, place, None].expand(-1, tokens.shape[1], -1)
            logits = logits + self.embed_proj(torch.cat([states, state], dim=-1))
        return HeadScores(logits, state)
