"""The built-in verifiers, which decide how much of a draft is accepted; the contract is in ``verifier.py``."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from ..settings import Settings
from .verifier import Block, Outcomes, Verifier, normalised


class Coupled(Verifier):
    """Token matching, the rule of :func:`decoders.engine.decode.verify.follow_matches`.

    The engine's rule draws the target's token with noise that depends on seed and position alone. A draft that adds the same noise
    tends to draw the same token: Daliri, Musco & Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative
    Decoding" (arXiv 2408.07978). To compare rules, this class computes the outcome distribution for drafts made without the noise. Then
    the target draws from p, and the path continues at the child that holds the drawn token. Among children with equal tokens this class
    follows the first child, and the engine's rule follows the child with the longest accepted path. Both emit the same tokens with
    the same probability.
    """

    name = "coupled"
    summary = "accepts a draft token if the target draws the same token from the seed; same tokens under every strategy"
    coupled = True

    def outcomes(self, block: Block) -> Outcomes:
        p, parents, drafted = block.target, block.tree.parents, block.drafted
        rows, n, vocab = p.shape
        tokens = block.nodes.clamp(min=0)
        index = torch.arange(n, device=p.device)
        earlier_twin = (
            drafted[:, None, :]
            & (parents[:, :, None] == parents[:, None, :])
            & (tokens[:, :, None] == tokens[:, None, :])
            & (index[None, :] < index[:, None])
        ).any(-1)
        probability = parents * vocab + tokens  # [B, N], index of each token's p in the flattened target
        edges = torch.where(drafted & ~earlier_twin, p.flatten(1).gather(1, probability), 0.0)
        keep = torch.ones_like(p).flatten(1).scatter_reduce(1, probability, (~drafted).to(p.dtype), "amin")
        undrafted = p * keep.view(rows, n, vocab)
        return Outcomes(block.reach(edges) * undrafted.sum(-1), normalised(undrafted, p))


class Rejection(Verifier):
    """Leviathan, Kalman & Matias 2023, "Fast Inference from Transformers via Speculative Decoding", Algorithm 1;
    Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling", Algorithm 2.

    We use Leviathan's letters (Chen swaps p and q). Draft token ``x_i`` is accepted with probability
    ``min(1, p_i(x_i) / q_i(x_i))``. After the first rejection the next token is drawn from ``norm(max(0, p_i - q_i))``; after a
    fully accepted chain it is drawn from p.
    """

    name = "rejection"
    summary = "speculative sampling: each draft token of a chain is accepted with probability min(1, p/q)"
    trees = False

    def outcomes(self, block: Block) -> Outcomes:
        p, q, chain = block.target[:, :-1], block.draft, block.chain
        probability = p.gather(2, block.nodes[:, 1:, None].clamp(min=0))[..., 0]
        accept = torch.where(chain, (probability / block.drawn).clamp(max=1), 0.0)  # [B, N-1], entry i for node i+1
        reach = pad(accept, (1, 0), value=1.0).cumprod(1)
        residual = torch.where(chain[..., None], normalised((p - q).clamp(min=0), p), p)
        return Outcomes(reach * (1 - pad(accept, (0, 1))), torch.cat([residual, block.target[:, -1:]], 1))


class BlockVerification(Verifier):
    """Sun et al. 2024, "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444), Algorithm 2.

    A later draft token that is likelier to the target than to the draft can make up for an earlier, less likely token. The paper
    proves that the rule maximizes the expected number of tokens per step.

    Our p, q are the paper's ``M_b``, ``M_s``; the paper's ``p_i`` is `weight` in the code, with ``p_0 = 1`` and
    ``p_i = min(p_{i-1} · p(x_i) / q(x_i), 1)``. Let ``S_i = Σ_x max(p_i · p(x | x_1 … x_i) - q(x | x_1 … x_i), 0)``. Each i is drawn
    as a possible end with probability ``h_i = S_i / (S_i + 1 - p_i)``, the last token γ with ``h_γ = p_γ``. The accepted chain ends
    at the largest drawn i. The next token comes from ``norm(max(p_i · p - q, 0))``, or from p if i is γ. Each row has its own γ.
    """

    name = "block"
    summary = "speculative sampling that judges a chain as a whole: accepts at least as much as rejection"
    trees = False

    def outcomes(self, block: Block) -> Outcomes:
        p, q, chain = block.target[:, :-1], block.draft, block.chain
        probability = p.gather(2, block.nodes[:, 1:, None].clamp(min=0))[..., 0]
        # With r_i = p(x_i) / q(x_i), p_i is the smallest of 1 and the products r_j … r_i (j ≤ i). In logarithms this is a running sum
        # minus its running maximum: no loop, so the number of nodes can be dynamic in a compiled graph.
        ratio = pad(torch.where(chain, probability.log() - block.drawn.log(), 0.0), (1, 0)).cumsum(1)
        weight = (ratio - ratio.cummax(1).values).exp()  # [B, N]

        excess = (weight[:, :-1, None] * p - q).clamp(min=0)
        s = excess.sum(-1)
        # S_i + (1 - p_i), because S_i + 1 would round a small S_i away. The sum is 0 if p_i = 1 and p = q: token i is surely accepted.
        allowed = s + (1 - weight[:, :-1])
        h = torch.where(chain, torch.where(allowed > 0, s / allowed, 1.0), weight[:, :-1])
        h = torch.cat([h, weight[:, -1:]], 1)
        later = torch.where(chain, h[:, 1:], 0.0)  # [B, N-1], h of nodes 1 … N-1
        none_later = pad((1 - later).flip(1).cumprod(1).flip(1), (0, 1), value=1.0)
        end = torch.cat([h[:, :1], later], 1) * none_later
        residual = torch.where(chain[..., None], normalised(excess, p), p)
        return Outcomes(end, torch.cat([residual, block.target[:, -1:]], 1))


class TreeRejection(Verifier):
    """Miao et al. 2024, "SpecInfer", Algorithm 2 (multi-step speculative sampling), for siblings drawn without
    replacement as in Chen et al. 2024, "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", Algorithm 2.

    At each node, ``r`` (Sequoia's R) starts as the target's distribution p, and ``q`` (Sequoia's D) as the draft's. The
    children ``x_1, x_2, …`` are judged in node order: ``x_j`` is accepted with probability ``min(1, r(x_j) / q(x_j))``. If
    ``x_j`` is rejected, ``r`` becomes ``norm(max(r - q, 0))``, and ``q`` loses ``x_j`` and is scaled to sum to 1 again. If
    all children are rejected, the next token comes from ``r``. If ``q`` has no tokens left, Sequoia drafts uniformly; this rule
    accepts no further child. For draft tokens that were not sampled (one-hot ``q``) the rule equals
    :class:`~decoders.verifiers.Coupled`.

    The loop runs over the rank among siblings, for all parents at once. Each iteration reads and writes several ``[B, N, V]`` tensors.
    """

    name = "tree_rejection"
    summary = "speculative sampling down a tree, siblings drawn without replacement"

    def outcomes(self, block: Block) -> Outcomes:
        p, draft, drafted, parents = block.target, block.draft, block.drafted, block.tree.parents
        n = block.nodes.shape[1]
        if n == 1:
            return Outcomes(torch.ones_like(p[..., 0]), p)
        index = torch.arange(n, device=p.device)
        vocabulary = torch.arange(p.shape[2], device=p.device)
        elder = drafted[:, None, :] & (parents[:, :, None] == parents[:, None, :]) & (index[None, :] < index[:, None])
        rank = elder.sum(-1)  # [B, N], the rank of a draft token among its parent's children
        is_child = drafted[:, None, :] & (parents[:, None, :] == index[None, :, None])  # [B, parent, child]

        r = p
        tried = torch.zeros_like(p, dtype=torch.bool)
        stay = torch.ones_like(p[..., 0])  # [B, N], probability that no child so far was accepted
        edges = torch.zeros_like(stay)
        for turn in range(n - 1 if block.siblings is None else block.siblings):
            on_turn = is_child & (rank[:, None, :] == turn)
            child = torch.where(on_turn, index, 0).sum(-1)  # [B, N], each parent's child on turn; 0 for none
            token = block.nodes.gather(1, child).clamp(min=0)[..., None]
            q = draft.gather(1, (child - 1).clamp(min=0)[..., None].expand_as(p))
            if turn > 0:  # not in the first iteration, because scaling rounds, and a q equal to p must stay equal
                q = self.left(q, tried)
            drawn = q.gather(2, token)
            proposed = (child > 0)[..., None] & (drawn > 0)  # [B, N, 1]
            accept = torch.where(proposed, (r.gather(2, token) / drawn).clamp(max=1), 0.0)
            edges = edges + torch.where(on_turn, (stay[..., None] * accept), 0.0).sum(1)
            stay = stay * (1 - accept[..., 0])
            r = torch.where(proposed, normalised((r - q).clamp(min=0), r), r)
            tried = tried | (proposed & (vocabulary == token))
        return Outcomes(block.reach(edges) * stay, r)

    @staticmethod
    def left(q: Tensor, tried: Tensor) -> Tensor:
        """`q` ``[B, N, V]`` without the tokens already tried, scaled to sum to 1; zeros if no token is left."""
        return normalised(q.masked_fill(tried, 0.0), 0.0)


class TypicalSettings(Settings):
    """The settings ε and δ of the probability ``min(ε, δ·exp(-entropy))`` above which a draft token is accepted."""

    epsilon: float = Field(
        0.09,
        gt=0,
        le=1,
        description="ε: a draft token with a higher probability is always accepted. A larger ε accepts fewer draft tokens.",
    )
    delta: float = Field(
        0.3,
        gt=0,
        description="δ: scale of the threshold δ·exp(-entropy), which applies where the target's entropy is high. A larger δ "
        "accepts fewer draft tokens.",
    )


class TypicalAcceptance(Verifier):
    """Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", section 2.3.1.

    A draft token x is accepted if all draft tokens before x are accepted, and ``p(x) > min(ε, δ·exp(-H(p)))``. Here p is the target's
    distribution at the position of x, and H(p) its entropy. Few tokens pass if the target is sure, many if the target is unsure. The
    longest accepted path is committed; if several are equally long, the likeliest (as in the authors' code). The next token is drawn
    from p. The path is not drawn: among plausible tokens the drafter decides, so the output does *not* follow the target's
    distribution.

    In greedy decoding p has all its mass on one token, and the rule is exact. The report still says that the rule is lossy.
    """

    name = "typical"
    summary = "LOSSY: accepts every draft token that the target finds plausible; more tokens per step, but another distribution"
    exact = False
    settings_class = TypicalSettings

    def outcomes(self, block: Block) -> Outcomes:
        p, tree = block.target, block.tree
        index = torch.arange(block.nodes.shape[1], device=p.device)
        root = index == 0
        threshold = (self.settings.delta * torch.exp(-entropy(p))).clamp(max=self.settings.epsilon)  # [B, N]
        tokens = block.nodes.clamp(min=0)
        # The probability p of every node's token after its parent, looked up in the flattened target.
        probability = p.flatten(1).gather(1, tree.parents * p.shape[2] + tokens)
        plausible = (probability > threshold.gather(1, tree.parents)) & (block.nodes >= 0)
        accepted = tree.candidates & (~tree.ancestors | (plausible | root)[:, None]).all(-1)
        depth = torch.where(accepted, tree.offsets, -1)
        longest = accepted & (depth == depth.amax(-1, keepdim=True))
        surprise = torch.where(plausible & ~root, -probability.clamp(min=torch.finfo(p.dtype).tiny).log(), 0.0)
        along = torch.where(tree.ancestors, surprise[:, None], 0.0).sum(-1)
        along = torch.where(longest, along, float("inf"))
        least = along == along.amin(-1, keepdim=True)
        end = torch.where(least, index, len(index)).amin(-1, keepdim=True)
        return Outcomes((index == end).to(p.dtype), p)


def entropy(p: Tensor) -> Tensor:
    """The entropy over the last axis, in nats; a probability of zero adds nothing."""
    return -torch.where(p > 0, p * p.clamp(min=torch.finfo(p.dtype).tiny).log(), 0.0).sum(-1)
