"""The check that every verifier must pass: averaged over all drafts, the verifier's output has the target's distribution."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..errors import VerifierError
from ..registry.kinds import VERIFIER
from ..tree import Topology, TreeTensors, parents_by_row
from ..verifiers.verifier import Block, Outcomes, Verifier, check_outcomes
from .checks import check_registrable
from .tape import NoWaiting, RecordingError

#: A model as tables. Table ``d`` is ``[V**d, V]``, the distribution of the next token after every sequence of ``d`` tokens.
Tables = tuple[Tensor, ...]


@dataclass(frozen=True)
class Enumeration:
    """All drafts that a drafter can make for one tree, as the rows of one batch to verify.

    Attributes:
        block: the verifier's input, with ``R`` rows, one per draft.
        weight: ``[R]``, the probability of each draft. The sum is 1.
        prefix: ``[R, N]`` int64, the tokens of each node's path, as one number in base V. -1 if a draft token of the path is missing.
    """

    block: Block
    weight: Tensor
    prefix: Tensor


@dataclass(frozen=True)
class EnumerationCase:
    """A case on which verifiers are checked: a target, a drafter and a tree.

    Attributes:
        name: the case's name, for messages.
        parents: parent of each node; -1 for the root and for nodes that are not draft tokens.
        target: the target model as tables: one table per depth of the tree, the root's depth included.
        draft: the draft model as tables.
        sure: nodes whose token is not drawn, but is the likeliest token that no earlier sibling has.
        silent: nodes that have a draft token only if their parent's :attr:`Enumeration.prefix` is odd.
    """

    name: str
    parents: tuple[int, ...]
    target: Tables
    draft: Tables
    sure: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()

    @property
    def vocab(self) -> int:
        return self.target[0].shape[1]

    @cached_property
    def depths(self) -> list[int]:
        """The depth of each node; -1 for nodes that are not draft tokens."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1 if parent >= 0 else -1)
        return depths

    def drafts(self) -> Enumeration:
        """Enumerates all drafts, node by node: every row is replaced by a row for each token that the drafter can draw at the node."""
        weight = torch.ones(1, dtype=self.target[0].dtype)
        nodes = torch.zeros(1, 1, dtype=torch.int64)
        prefix = torch.zeros(1, 1, dtype=torch.int64)
        draft = weight.new_empty(1, 0, self.vocab)
        for node, parent in enumerate(self.parents[1:], start=1):
            q, chances = self._proposal(node, nodes, prefix)
            row, token = chances.nonzero(as_tuple=True)
            weight = weight[row] * chances[row, token]
            token = torch.where(token < self.vocab, token, -1)
            before = prefix[row, max(parent, 0)]
            after = torch.where((before >= 0) & (token >= 0), before * self.vocab + token, -1)
            after = after if parent >= 0 else torch.full_like(after, -1)
            nodes = torch.cat([nodes[row], token[:, None]], 1)
            prefix = torch.cat([prefix[row], after[:, None]], 1)
            draft = torch.cat([draft[row], q[row][:, None]], 1)
        target = torch.stack([self._after(self.target, node, prefix[:, node]) for node in range(len(self.parents))], 1)
        tree = TreeTensors.from_parents(torch.tensor(self.parents).expand(len(weight), -1))
        return Enumeration(Block(nodes, tree, target, draft), weight, prefix)

    def _proposal(self, node: int, nodes: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """A node's draft distribution for the verifier ``[R, V]``, and probabilities of drafting each token or none ``[R, V+1]``."""
        parent = self.parents[node]
        rows, vocab = len(nodes), self.vocab
        if parent < 0:
            q = self._one_hot(torch.zeros(rows, dtype=torch.int64))
            return q, torch.nn.functional.pad(q, (0, 1))
        q = self._after(self.draft, parent, prefix[:, parent])
        left = q.clone()
        for sibling in range(1, node):
            if self.parents[sibling] == parent:
                taken = nodes[:, sibling, None]
                left = torch.where(torch.arange(vocab) == taken, 0.0, left)
        total = left.sum(1, keepdim=True)
        if node in self.sure:
            q = self._one_hot(left.argmax(1))
            left = torch.where(total > 0, q, left)
        else:
            left = torch.where(total > 0, left / total, left)
        # Children of a missing draft token still get a token, so that the check sees whether the verifier accepts it.
        orphan = prefix[:, parent, None] < 0
        left = torch.where(orphan, self._one_hot(torch.zeros(rows, dtype=torch.int64)), left)
        nothing = (total <= 0) & ~orphan
        if node in self.silent:
            nothing = nothing | (prefix[:, parent, None] % 2 == 0)
        return q, torch.cat([torch.where(nothing, 0.0, left), nothing.to(q.dtype)], 1)

    def _after(self, tables: Tables, node: int, prefix: Tensor) -> Tensor:
        """The distribution of the next token after `node`, ``[R, V]``. Uniform if a token on the node's path is missing."""
        depth = self.depths[node]
        uniform = torch.full_like(tables[0], 1 / self.vocab)
        return uniform.expand(len(prefix), -1) if depth < 0 else torch.where(
            prefix[:, None] >= 0, tables[depth][prefix.clamp(min=0)], uniform
        )  # fmt: skip

    def _one_hot(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens, self.vocab).to(self.target[0].dtype)

    def continued(self, weights: Tensor, depth: int) -> Tensor:
        """Extends `weights` ``[V**depth, V]``, the joint distribution of ``depth + 1`` tokens, by tokens that the target draws."""
        joint = weights.flatten()
        for table in self.target[depth + 1 :]:
            joint = (joint[:, None] * table).flatten()
        return joint

    def wanted(self) -> Tensor:
        """The target's joint distribution of the longest sequences that a step can emit, flattened to one dimension."""
        return self.continued(self.target[0], 0)

    def emitted(self, drafts: Enumeration, outcomes: Outcomes) -> Tensor:
        """The joint distribution if a step follows `outcomes` and the target draws all later tokens. Same shape as :meth:`wanted`."""
        joint = torch.zeros_like(self.wanted())
        for node, depth in enumerate(self.depths):
            reached = (drafts.prefix[:, node] >= 0).to(drafts.weight.dtype)
            mass = (drafts.weight * reached * outcomes.end[:, node])[:, None] * outcomes.next[:, node]
            if depth >= 0:
                weights = mass.new_zeros(self.vocab**depth, self.vocab)
                joint += self.continued(weights.index_add(0, drafts.prefix[:, node].clamp(min=0), mass), depth)
        return joint

    def accepted(self, drafts: Enumeration, outcomes: Outcomes) -> float:
        """The mean number of draft tokens that a step accepts."""
        depths = torch.tensor(self.depths).clamp(min=0).to(drafts.weight.dtype)
        return float((drafts.weight @ outcomes.end) @ depths)


VOCAB = 4
CHAINS = {
    "root alone": (-1,),
    "chain of 1": (-1, 0),
    "chain of 2": (-1, 0, 1),
    "chain of 3": (-1, 0, 1, 2),
    "padded chain": (-1, 0, 1, -1, -1),
}
TREES = {
    "three siblings": (-1, 0, 0, 0),
    "more siblings than tokens": (-1, 0, 0, 0, 0, 0),
    "two branches": (-1, 0, 0, 1, 2),
    "branching at two depths": (-1, 0, 1, 1, 0, 3),
    "three, then two, then one": (-1, 0, 0, 0, 2, 2, 4),
    "window before draft tokens": (-1, -1, 0, 0, -1, 2),
}
#: Largest allowed error of a probability, and of a sum that should be 1.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def check_verifier(verifier: Verifier | type[Verifier], *, seed: int = 0) -> None:
    """Computes the distribution of a verifier's output, and compares it with the target's distribution.

    The vocabulary has four tokens, and the drafts are chains and small trees. All possible drafts are enumerated with their
    probabilities. The target draws the tokens after the accepted tokens. The joint distribution of all tokens must equal the target's
    to 1e-9 in double precision, and to 1e-5 in single precision. For a lossy verifier (``exact = False``) only the contract is
    checked.

    Raises:
        AssertionError: the check failed. The message says what is wrong, and for which drafts.
    """
    check_registrable(VERIFIER, verifier if isinstance(verifier, type) else type(verifier))
    verifier = verifier() if isinstance(verifier, type) else verifier
    for case in cases(trees=verifier.trees, seed=seed):
        drafts = case.drafts()
        try:
            check_case(verifier, case, drafts)
        except Exception as error:
            said = (
                str(error) if isinstance(error, (AssertionError, VerifierError)) else f"{type(error).__name__}: {error}"
            )
            raise AssertionError(f"{verifier!r} on {case.name}: {said}") from error
    _check_no_graph_break(verifier, drafts.block)


def check_case(verifier: Verifier, case: EnumerationCase, drafts: Enumeration) -> None:
    """Checks a verifier on one case, in float64 and float32."""
    double = replace(drafts.block, siblings=Topology.from_parents(case.parents).max_siblings)
    single = replace(drafts.block, target=double.target.float(), draft=double.draft.float())
    for block in (double, single):
        inputs = block.nodes, block.target, block.draft, *vars(block.tree).values()
        copies = [tensor.clone() for tensor in inputs]
        outcomes = verifier.outcomes(block)
        check_outcomes(outcomes, block, verifier.name)
        assert all(map(torch.equal, inputs, copies)), "outcomes() writes into the block"
        check_contract(block, outcomes)
        some = slice(None, None, 3)
        alone = verifier.outcomes(rows_of(block, some))
        assert torch.allclose(alone.end, outcomes.end[some], atol=1e-6) and torch.allclose(
            alone.next, outcomes.next[some], atol=1e-6
        ), "rows depend on the other rows of the batch"
        if verifier.exact:
            outcomes = Outcomes(outcomes.end.double(), outcomes.next.double())
            _compare(case, case.emitted(drafts, outcomes), TOLERANCE[block.target.dtype])


def check_contract(block: Block, outcomes: Outcomes) -> None:
    """Checks that probabilities are valid and have a sum of 1, and that no node without a draft token is accepted."""
    end, after, dtype = outcomes.end, outcomes.next, block.target.dtype
    assert end.isfinite().all() and after.isfinite().all(), "end or next is not finite"
    assert (end >= 0).all() and (after >= 0).all(), "a probability in end or next is negative"
    _refuse(block, ((end.sum(1) - 1).abs() > TOLERANCE[dtype])[:, None], end, "end does not sum to 1")
    off = ((after.sum(2) - 1).abs() > TOLERANCE[dtype]) & (end > 0)
    _refuse(block, off, after.sum(2), "the path may end at a node, but next does not sum to 1 there; sums are")
    missing = block.nodes < 0
    missing[:, 0] = False
    on_path = block.tree.ancestors
    possible = block.tree.candidates & ~(on_path & missing[:, None]).any(-1)
    _refuse(
        block, ~possible & (end > 0), end, "a node without a draft token, a node below it, or no candidate is accepted"
    )


def cases(*, trees: bool, seed: int = 0) -> Iterator[EnumerationCase]:
    """Yields cases: pairs of models, on chains and (if `trees`) on trees, with draft tokens that are drawn, not drawn, or missing."""
    shapes = CHAINS | (TREES if trees else {})
    generator = torch.Generator().manual_seed(seed)
    for (shape, parents), kind in itertools.product(shapes.items(), KINDS):
        target, draft = _models(kind, EnumerationCase("", parents, (), ()).depths, generator)
        nodes = frozenset(range(1, len(parents)))
        draft_tokens = {
            "drawn": {},
            "sure": {"sure": nodes},
            "some sure": {"sure": frozenset(n for n in nodes if n % 2)},
            "tails missing": {"silent": frozenset(n for n in nodes if n > 1)},
        }
        for how, options in draft_tokens.items():
            yield EnumerationCase(f"{shape}, draft tokens {how}, {kind}", parents, target, draft, **options)


KINDS = (
    "random models",
    "draft equal to the target",
    "disjoint supports",
    "zeros as after top-k",
    "sharp models",
    "certain target",
    "certain draft",
    "nearly equal models",
)


def _models(kind: str, depths: list[int], generator: torch.Generator) -> tuple[Tables, Tables]:
    """The tables of a target and of a draft model."""
    levels = max(depths) + 1

    def random(sharpness: float = 1.0) -> Tables:
        scores = [torch.randn(VOCAB**d, VOCAB, generator=generator, dtype=torch.float64) for d in range(levels)]
        return tuple((sharpness * s).softmax(-1) for s in scores)

    def only(tables: Tables, kept: int, *, largest: bool = True) -> Tables:
        best = [t.topk(kept, largest=largest).indices for t in tables]
        masks = [torch.zeros_like(t).scatter(1, b, 1.0) for t, b in zip(tables, best, strict=True)]
        return tuple(t * m / (t * m).sum(1, keepdim=True) for t, m in zip(tables, masks, strict=True))

    target, draft = random(), random()
    if kind == "draft equal to the target":
        draft = target
    elif kind == "disjoint supports":
        target, draft = only(target, 2), only(target, 2, largest=False)
    elif kind == "zeros as after top-k":
        target, draft = only(target, 3), only(draft, 2)
    elif kind == "sharp models":
        target, draft = random(15.0), random(15.0)
    elif kind == "certain target":
        target = only(target, 1)
    elif kind == "certain draft":
        draft = only(draft, 1)
    elif kind == "nearly equal models":
        draft = tuple((t.log() + 1e-6 * d).softmax(-1) for t, d in zip(target, draft, strict=True))
    return target, draft


def rows_of(block: Block, rows: slice) -> Block:
    """`block` with only some of its rows."""
    tree = block.tree
    tree = type(tree)(tree.parents[rows], tree.offsets[rows], tree.visible[rows], tree.ancestors[rows])
    return Block(block.nodes[rows], tree, block.target[rows], block.draft[rows], block.siblings)


def _compare(case: EnumerationCase, got: Tensor, tolerance: float) -> None:
    want = case.wanted()
    worst = int((got - want).abs().argmax())
    digits = [(worst // case.vocab**d) % case.vocab for d in reversed(range(len(case.target)))]
    assert abs(got[worst] - want[worst]) <= tolerance, (
        f"tokens {digits} are written with probability {float(got[worst]):.9f}, and the target's is {float(want[worst]):.9f}"
    )


def _refuse(block: Block, wrong: Tensor, shown: Tensor, reason: str) -> None:
    """If `wrong` (``[R, N]`` or ``[R, 1]``) has a true value, raises an AssertionError that shows the first such row."""
    if wrong.any():
        row = int(wrong.any(1).nonzero()[0])
        parents = parents_by_row(block.tree, len(block.nodes))[row]
        raise AssertionError(
            f"{reason}: {[round(x, 6) for x in shown[row].tolist()]} (tokens {block.nodes[row].tolist()}, parents {parents})"
        )


def _check_no_graph_break(verifier: Verifier, block: Block) -> None:
    """Traces ``outcomes`` with torch.compile, without generating code, and raises AssertionError if the graph breaks."""
    try:
        traced = torch.compile(verifier.outcomes, fullgraph=True, backend="eager")(block)
    except Exception as error:
        raise AssertionError(f"{verifier!r} cannot be compiled without graph breaks: {error}") from error
    try:
        with NoWaiting(host_data=True):  # torch.compile traces some reads, such as `.item()`, without a graph break
            outcomes = verifier.outcomes(block)
    except RecordingError as error:
        raise AssertionError(f"{verifier!r} reads values on the host: {error}") from error
    assert torch.allclose(traced.end, outcomes.end), f"{verifier!r} returns other outcomes when it is compiled"
