"""The guide on the device says what the one on the host says, and never waits."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoders.common import host_reads
from decoders.constraints import lookups
from decoders.constraints.base import CompiledGrammar, Language, Policy, pack, unpack
from decoders.constraints.lookups import TokenTable
from decoders.constraints.table.backend import Table
from decoders.constraints.vocabulary import Vocabulary
from decoders.engine.decode.grammar.device_guide import DeviceGuide
from decoders.engine.decode.grammar.host_guide import HostGuide
from decoders.errors import GrammarError
from decoders.testing.tape import NoHostReads
from decoders.testing.toy_grammar import Matched, TokenAutomaton
from decoders.tree import Topology, TreeTensors

from .guides import allowed_by, output, sequences

CPU = torch.device("cpu")
STOPS = (3, 40)
WORDS = [
    b"a", b"b", b"c", b"0", b"1", b'"', b"ab", b"abc", b"ba", b"00", b'"a', b'a"', b"a" * 40, b"ab" * 9, b"cab", b"a",
]  # fmt: skip
#: Some bytes more, a token without text, and none of "d": texts that need one are dead ends.
TOKENS = [
    b"b", b"a", b"e", b"<end>", *WORDS, None, b"de", b"\xc3", b"\xa9", b"\xc3\xa9", *(b"%d" % n for n in range(2, 20)),
]  # fmt: skip
VOCABULARY = Vocabulary(TOKENS, STOPS)
V = len(VOCABULARY)
REGEXES = [
    "[abc]{1,60}", '"(a|b|c|0)*"', "(ab|abc|ba){2,5}", "[0-9]{1,3}(a|cab)?", "abcab0{2}(1|a)", "(é|e)+", "a*(d|de|b)e?",
    "(aaaa){10}b", "0|1|[2-9][0-9]?|1[0-9]", '"abc"(00|1)',
]  # fmt: skip


@functools.cache
def compiled(regex: str, policy: Policy) -> CompiledGrammar:
    return Table().compile(Language(regex, regex=regex), VOCABULARY, policy)


grammars = st.lists(
    st.one_of(st.none(), st.builds(compiled, st.sampled_from(REGEXES), st.sampled_from(["full", "canonical"]))),
    min_size=1, max_size=4,
)  # fmt: skip


def on_device(rows: list[CompiledGrammar | None], vocabulary: int = V) -> DeviceGuide:
    made = DeviceGuide.of(rows, vocabulary, CPU)
    assert made is not None
    return made


def walk(data: st.DataObject, mask: torch.Tensor, wild: bool = True) -> int:
    """A token: mostly one that `mask` ``[V]`` allows, else anything, no draft token and the end of the text among it."""
    legal = mask.nonzero().flatten().tolist()
    ends = [token for token in STOPS if mask[token]]
    kind = data.draw(st.sampled_from(["legal", "legal", "legal", "end", "none", "any"] if wild else ["legal", "end"]))
    if kind == "none":
        return -1
    return data.draw(st.sampled_from(ends if kind == "end" and ends else range(V) if kind == "any" else legal))


@pytest.mark.parametrize("examples", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_it_says_what_the_host_says(examples):
    settings(max_examples=examples, deadline=None)(given(st.data(), grammars)(assert_says_what_the_host_says))()


def assert_says_what_the_host_says(data, rows):
    """Step after step: masks and pruned draft tokens of random trees, then a path is committed and some rows end."""
    host, device = HostGuide.of(rows, V, CPU), on_device(rows)
    ended = [False] * len(rows)
    texts = [data.draw(st.lists(st.integers(0, V - 1), min_size=1, max_size=9)) for _ in rows]
    for _ in range(data.draw(st.integers(1, 4))):
        assert same_runs(host.forced(sequences(texts), 5), device.forced(sequences(texts), 5))
        nodes = data.draw(st.integers(1, 8))
        parents = [-1, *(data.draw(st.integers(-1, node - 1)) for node in range(1, nodes))]
        for node in range(1, nodes):
            if parents[node] > 0 and parents[parents[node]] < 0:
                parents[node] = -1
        shape = Topology.from_parents(parents)
        # Draft tokens that go on legally where they can: the host itself says what may follow, level by level.
        draft_tokens = torch.full((len(rows), nodes - 1), -1)
        for node in range(1, nodes):
            allowed = allowed_by(host.block(draft_tokens, shape)[1], len(rows), nodes, V)
            for row in range(len(rows)):
                draft_tokens[row, node - 1] = walk(data, allowed[row, max(parents[node], 0)])
        padding = torch.full((len(rows), data.draw(st.integers(0, 2))), -1)
        draft_tokens = torch.cat([draft_tokens, padding], dim=1)
        tree, depth = data.draw(st.sampled_from([(shape, shape.max_depth), (shape.tensors(len(rows), CPU), None)]))
        kept, masks = host.block(draft_tokens, tree)
        with NoHostReads():
            mine, allowed = device.block(draft_tokens, tree, depth)
        legal = allowed_by(masks, len(rows), kept.shape[1] + 1, V)
        assert torch.equal(kept, mine) and torch.equal(legal, allowed.allowed)

        new, path, counts = [], [], []
        for row in range(len(rows)):
            ends = [n for n in range(nodes) if not n or (parents[n] >= 0 and legal_path(kept[row], shape, n))]
            end = data.draw(st.sampled_from(ends))
            way = [0, *(n for n in shape.path_to(end) if n)]
            last = walk(data, legal[row, end], wild=False)
            got = [*(int(kept[row, n - 1]) for n in way if n), last]
            fill = kept.shape[1] + 1 - len(way)
            path.append(way + [0] * fill)
            new.append(got + [0] * fill)
            counts.append(0 if ended[row] else len(got))
            texts[row] += got[: counts[row]]
            ended[row] = ended[row] or last in STOPS or data.draw(st.integers(0, 9)) == 0
        host.commit(output(new, counts, path), torch.tensor(ended))
        with NoHostReads():
            device.commit(output(new, counts, path), torch.tensor(ended))
        device.check()
    assert torch.equal(allowed_by(host.end(), len(rows), 1, V), device.end().allowed)


def legal_path(kept: torch.Tensor, shape: Topology, node: int) -> bool:
    """Whether all draft tokens down to `node` are left; no draft token after a stop token."""
    tokens = [int(kept[n - 1]) for n in shape.path_to(node) if n]
    return all(token >= 0 for token in tokens) and not set(tokens) & set(STOPS)


def same_runs(host: torch.Tensor, device: torch.Tensor) -> bool:
    """Forced tokens of equal rows, which the device pads to the limit."""
    return torch.equal(torch.nn.functional.pad(host, (0, device.shape[1] - host.shape[1]), value=-1), device)


@given(st.data(), grammars)
def test_a_draft_runs_ahead_grows_trees_and_is_forgotten(data, rows):
    outer = [HostGuide.of(rows, V, CPU), on_device(rows)]
    both = [guide.ahead() for guide in outer]
    for _ in range(data.draw(st.integers(0, 3))):
        allowed = both[1].end().allowed
        tokens = torch.tensor([walk(data, allowed[row, 0]) for row in range(len(rows))]).clamp(min=0)
        for guide in both:
            guide.append(tokens)
    first = [allowed_by(guide.end(), len(rows), 1, V) for guide in both]
    assert torch.equal(*first)
    count, allowed = 1, first[0]
    for _ in range(data.draw(st.integers(0, 3))):
        width = data.draw(st.integers(1, 3))
        parents = torch.tensor([[data.draw(st.integers(0, count - 1)) for _ in range(width)] for _ in rows])
        tokens = torch.tensor([[walk(data, allowed[row, -1]) for _ in range(width)] for row in range(len(rows))])
        before, after = (guide.expand(tokens, parents, count) for guide in both)
        allowed, count = after.allowed, count + width
        assert torch.equal(allowed_by(before, len(rows), width, V), allowed)
    for guide in both:
        guide.follow()
    assert torch.equal(allowed_by(both[0].end(), len(rows), 1, V), outer[1].end().allowed)
    assert torch.equal(both[1].end().allowed, outer[1].end().allowed)


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [compiled(REGEXES[0], "full"), None, compiled(REGEXES[4], "canonical")]
    guide = on_device(rows)
    text = sequences([[4]] * 3)
    guide.forced(text, 4)  # tables made once, by the host: in an ordinary step
    guide.block(torch.full((3, 4), -1), Topology.chain(4))
    place = guide.positions.data_ptr()
    monkeypatch.setattr(host_reads, "static_shapes", lambda device: True)  # on a CPU, trees are made by the host
    with NoHostReads():
        ahead = guide.ahead()
        ahead.follow()
        ahead.end()
        ahead.append(torch.tensor([4, 4, 4]))
        ahead.expand(torch.tensor([[4, 5]] * 3), torch.zeros(3, 2, dtype=torch.int64), 1)
        ahead.block(torch.tensor([[4, 4, -1, 4]] * 3), Topology.chain(4))
        ahead.accept(output([[4, 4, 5, 0, 0]] * 3, [3, 3, 0]))
        ahead.forced(text, 4)
        guide.block(torch.tensor([[4, 4, -1, 4]] * 3), TreeTensors.from_parents(torch.tensor([[-1, 0, 1, 2, 3]] * 3)))
        guide.commit(output([[4, 4, 5, 0, 0]] * 3, [3, 3, 1]), torch.tensor([False, True, False]))
    assert guide.positions.data_ptr() == place, "a recorded step finds the rows where they were"


def test_an_automaton_of_tokens_is_walked_too():
    toys = [TokenAutomaton.random(seed, 300, [7]) for seed in range(3)]
    host, device = HostGuide.of([*toys, None], 300, CPU), on_device([*toys, None], 300)
    for seed in range(5):
        draft_tokens = torch.randint(-1, 300, (4, 40), generator=torch.Generator().manual_seed(seed))
        for row, toy in enumerate(toys):  # the first ones are legal, and reach other states
            draft_tokens[row, :20] = torch.tensor(sorted(toy.following[toy.first])[:20] * 20)[:20]
        shape = Topology.from_parents([-1, *[0] * 20, *range(1, 21)])
        for (kept, masks), (mine, allowed) in [(host.block(draft_tokens, shape), device.block(draft_tokens, shape))]:
            assert torch.equal(kept, mine) and torch.equal(masks.allowed, allowed.allowed)


def test_a_backend_whose_mask_lies_is_found_out_at_the_end():
    guide = on_device([None, TokenAutomaton([{1: 2}], set(), 40, [7])], 40)
    guide.block(torch.full((2, 2), -1), Topology.chain(2))
    guide.commit(output([[9, 0, 0], [9, 0, 0]], [1, 1]), torch.tensor([False, False]))
    with pytest.raises(GrammarError, match="row 1: the grammar's masks allowed a token that its matcher refuses"):
        guide.check()


def test_what_has_no_table_or_too_large_a_one_stays_on_the_host(monkeypatch):
    toy = TokenAutomaton.random(0, 40, [7])
    assert DeviceGuide.of([toy, Matched(toy)], 40, CPU) is None
    assert DeviceGuide.of([None], 40, CPU) is not None
    monkeypatch.setattr(lookups, "ENTRIES", 10)
    assert DeviceGuide.of([TokenAutomaton.random(1, 40, [7])], 40, CPU) is None


@pytest.mark.parametrize("chunk", [1, 100, 1 << 22])
def test_tokens_that_do_the_same_share_a_column(monkeypatch, chunk):
    monkeypatch.setattr(lookups, "CHUNK", chunk)
    table = TokenTable.of(Table().compile(Language("x", regex="[abc]{3}0"), VOCABULARY), CPU)
    assert table is not None
    a, b, ab, twin = (VOCABULARY.tokens.index(text) for text in (b"a", b"b", b"ab", b"ba"))
    assert table.columns[a] == table.columns[b] and table.columns[ab] == table.columns[twin] != table.columns[a]
    assert table.columns[TOKENS.index(None)] == table.columns[VOCABULARY.tokens.index(b"a" * 40)] == 0
    assert len(table.next.T.unique(dim=0)) == table.next.shape[1]


@given(st.integers(1, 100), st.integers(0, 99))
def test_masks_are_unpacked_as_they_were_packed(size, seed):
    allowed = torch.rand(2, 3, size, generator=torch.Generator().manual_seed(seed)) < 0.5
    assert torch.equal(unpack(pack(allowed), size), allowed)
    assert torch.equal(unpack(pack(allowed)[:, ::2], size), allowed[:, ::2])
