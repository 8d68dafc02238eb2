"""A pass that decodes rows and reads a piece of a prompt gives what a pass of each gives."""

from __future__ import annotations

import copy
import itertools
import sys

import pytest
import torch
from torch import Tensor

from decoders.enabling import graphs_compiled
from decoders.engine.model import mixed, self_check
from decoders.engine.model.blocks import ForwardResult, LeadingText, PassInput, PromptPiece, after_text
from decoders.engine.model.cache import CacheBuffers
from decoders.engine.model.compiled import regions
from decoders.engine.model.compiled.tiers import Tiers
from decoders.engine.model.self_check import target_of
from decoders.engine.model.target import Target
from decoders.report import Report
from decoders.testing import tiny_model
from decoders.testing.models import ARCHITECTURES
from decoders.tree import Topology, TreeTensors

from ...turns import slow_but
from ...versions import OLDEST

CPU = torch.device("cpu")
SLOTS = 96
#: Text in front of the nodes, and the tree.
BLOCKS = {
    "single": (0, Topology.chain(0)),
    "chain": (0, Topology.chain(3)),
    "tree": (0, Topology.branches(2, 2)),
    "text": (2, Topology.branches(2, 1)),
}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


class Rows:
    """Rows of different lengths that are decoded, and one more, some of whose prompt was read.

    Args:
        lengths: tokens in the cache: of the rows, and at last of the prompt.
    """

    def __init__(self, target: Target, lengths: list[int]) -> None:
        self.target, self.lengths = target, lengths
        self.buffers = CacheBuffers.allocate(target.layout, len(lengths), SLOTS)
        generator = torch.Generator().manual_seed(len(lengths))
        self.tokens = torch.randint(3, 50, (len(lengths), SLOTS), generator=generator)
        for row, length in enumerate(lengths):
            if not length:
                continue
            begin = torch.zeros(1, dtype=torch.int64)
            own = self.buffers.of_rows(row, row + 1)
            target.prefill(self.tokens[row : row + 1, :length], begin, own, self.view(length), 0)

    def view(self, end: int) -> Tensor:
        return torch.arange(SLOTS)[: min(-(-end // 16) * 16, SLOTS)]

    def block(self, text: int, topology: Topology) -> tuple[Tensor, Tensor, TreeTensors, Tensor]:
        rows = len(self.lengths) - 1
        base = torch.tensor(self.lengths[:rows])
        tree = topology.tensors(rows, CPU)
        tree = after_text(text, tree) if text else tree
        index = base[:, None] + torch.arange(len(tree))
        return self.tokens[:rows].gather(1, index), base, tree, self.view(max(self.lengths[:rows]) + len(tree))

    def piece(self, count: int) -> PromptPiece:
        start = self.lengths[-1]
        tokens = self.tokens[-1:, start : start + count].clone(memory_format=torch.contiguous_format)
        return PromptPiece(tokens, torch.tensor([start]), start, self.view(start + count), self.buffers)

    def apart(self, text: int, topology: Topology, count: int) -> ForwardResult:
        """The results of a pass of the rows; another one reads the piece."""
        nodes, base, tree, view = self.block(text, topology)
        leading = LeadingText(text, max(self.lengths))
        result = self.target.forward(PassInput(nodes, base, tree, self.buffers.of_rows(0, len(nodes)), view, leading))
        self.target.prefill(*self.piece(count).alone)
        return result


#: One of each kind: full attention, sliding window with soft caps, learnt positions, latent attention, sinks, slices of the mask.
QUICK = ("llama", "gemma2", "gpt2", "deepseek_v3", "gpt_oss", "gemma4")


def same_as_apart(rows: Rows, text: int, topology: Topology, count: int, compiled=None) -> tuple[list, list]:
    """What a mixed pass computes and writes, and what two passes do."""
    other = copy.copy(rows)
    other.buffers = copy.deepcopy(rows.buffers)
    nodes, base, tree, view = rows.block(text, topology)
    if compiled is None:
        ours = mixed.forward(
            rows.target, PassInput(nodes, base, tree, rows.buffers, view, LeadingText(text)), rows.piece(count)
        )
    else:
        kept = mixed.with_logits(*nodes.shape, text, CPU)
        piece = regions.laid_out_piece(rows.piece(count))
        given = ForwardResult(*compiled(nodes, base, regions.laid_out(tree), view, piece, kept))
        ours = mixed.by_row(given, *nodes.shape).behind(text)
    theirs = other.apart(text, topology, count)
    return [ours.logits, ours.hidden, *rows.buffers.tensors], [theirs.logits, theirs.hidden, *other.buffers.tensors]


@pytest.mark.parametrize("name", slow_but(QUICK, ARCHITECTURES))
def test_rows_and_piece_get_what_passes_of_their_own_give(name: str) -> None:
    target = target_of(tiny_model(name))
    # Not those with attention of their own in the place of transformers' function by name (in 5.17 more had it), nor one whose last
    # layers get slices of the mask (not in 5.17).
    by_name = hasattr(sys.modules[type(target.model).__module__], "ALL_ATTENTION_FUNCTIONS")
    mixes = self_check.can_mix(target)
    assert mixes == (by_name and (name != "gemma4" or OLDEST))
    if not mixes:
        return
    rows = ([5, 40, 23], 9), ([31, 2, 60, 17, 48], 30), ([4, 9, 0], 1)
    # All pairs for one design; for the others each block with one number of rows.
    turns = [(block, rows[turn % 3]) for turn, block in enumerate(BLOCKS.values())]
    for (text, topology), (lengths, count) in itertools.product(BLOCKS.values(), rows) if name == "llama" else turns:
        ours, theirs = same_as_apart(Rows(target, lengths), text, topology, count)
        for one, another in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, another, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_rows_have_the_same_bits_in_low_precision(block: str) -> None:
    target = target_of(tiny_model("llama").bfloat16())
    for lengths, count in (([5, 40, 23], 9), ([31, 2, 60, 17, 48], 30)):
        ours, theirs = same_as_apart(Rows(target, lengths), *BLOCKS[block], count)
        assert all(torch.equal(one, another) for one, another in zip(ours, theirs, strict=True))


def test_a_design_that_mixes_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check compares both: a line whose rows are told apart wrongly is not used."""
    assert self_check.can_mix(target_of(tiny_model("llama")))
    plain = mixed.MixedCache.__init__

    def shifted(self, buffers, row, slots, view) -> None:
        plain(self, buffers, row.roll(1), slots, view)

    monkeypatch.setattr(mixed.MixedCache, "__init__", shifted)
    assert not self_check.can_mix(target_of(tiny_model("llama")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gemma3", torch.float32), ("llama", torch.float32), ("llama", torch.bfloat16), ("mixtral", torch.float32)],
)
def test_one_graph_reads_any_number_of_tokens_beside_any_number_of_rows(name: str, dtype: torch.dtype) -> None:
    target = target_of(tiny_model(name).to(dtype))
    compiled = regions.regional_mixed(target)
    for count in (1, 11):
        compiled.compile(*regions.mixed_examples(target, count))
    before, tolerance = graphs_compiled(), 1e-4 if dtype == torch.float32 else 0.03
    for lengths, count in (([5, 40, 23], 9), ([31, 2, 60, 17, 48], 30), ([31, 2, 60, 17, 48, 3, 8, 9, 12], 47)):
        for text, topology in (BLOCKS["single"], BLOCKS["chain"], BLOCKS["text"]):
            ours, theirs = same_as_apart(Rows(target, lengths), text, topology, count, compiled)
            for one, another in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, another, rtol=tolerance, atol=tolerance)
    assert graphs_compiled() == before


def test_a_pass_is_mixed_where_its_tier_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_model("llama"))
    forward = Tiers(target)
    report = Report(strategy="autoregressive")
    with forward.during(False, report):
        assert forward.mixes(2, single=True) and forward.mixes(2, single=False)
        assert not forward.mixes(1, single=True)  # nothing is shared that way
    monkeypatch.setattr(forward, "ready", lambda kind: not kind.mixed)
    with forward.during("auto", report):
        assert not forward.mixes(2, single=True)  # compiled passes mix by a graph of their own
