"""Guides: where rows stand in their grammars, by numbers and by matchers alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoders.constraints.base import CompiledGrammar, unpack
from decoders.engine.decode.grammar.guide import Guide
from decoders.engine.decode.grammar.host_guide import HostGuide
from decoders.errors import GrammarError
from decoders.testing.toy_grammar import Matched, TokenAutomaton
from decoders.tree import Topology, TreeTensors

from .guides import output, sequences

V, STOP = 40, 7
CPU = torch.device("cpu")


def allowed(grammar: TokenAutomaton, tokens: list[int]) -> torch.Tensor:
    """The mask after `tokens`, by the grammar's own matcher; all tokens if they are illegal."""
    matcher = grammar.start()
    if matcher.advance(tokens) < len(tokens):
        return torch.ones(V, dtype=torch.bool)
    mask = torch.zeros(-(-V // 32), dtype=torch.int32)
    matcher.fill_mask(mask)
    return unpack(mask, V)


def legal_text(grammar: TokenAutomaton, draw, length: int) -> list[int]:
    """A walk through `grammar` that has not ended."""
    matcher, text = grammar.start(), []
    for _ in range(length):
        state = matcher._states[-1]  # type: ignore[attr-defined]
        token = draw(st.sampled_from(sorted(grammar.following[state])))
        assert matcher.advance([token]) == 1
        text.append(token)
    return text


def commit(guide: Guide, new: list[list[int]], ended: list[bool] | None = None) -> None:
    """All of `new` stays."""
    guide.commit(output(new, [len(row) for row in new]), torch.tensor(ended or [False] * len(new)))


def both(automaton: TokenAutomaton) -> list[CompiledGrammar]:
    return [automaton, Matched(automaton)]


@given(st.data())
def test_a_block_is_masked_and_pruned_node_by_node(data):
    """Rows with the same grammar, tabulated and not, and a free one, see what walking each path by itself gives."""
    automaton = TokenAutomaton.random(data.draw(st.integers(0, 500)), V, [STOP])
    guide = HostGuide.of([*both(automaton), None], V, CPU)
    committed: list[int] = []
    for _ in range(data.draw(st.integers(1, 3))):
        nodes = data.draw(st.integers(2, 9))
        parents = [-1, *(data.draw(st.integers(-1, node - 1)) for node in range(1, nodes))]
        for node in range(1, nodes):  # what continues a node that is never accepted is never accepted either
            if parents[node] > 0 and parents[parents[node]] < 0:
                parents[node] = -1
        draft_tokens = [data.draw(st.integers(-1, V - 1)) for _ in range(nodes - 1)]
        shape = Topology.from_parents(parents)
        tree = data.draw(st.sampled_from([shape, shape.tensors(3, CPU)]))
        kept, masks = guide.block(torch.tensor([draft_tokens] * 3), tree)
        assert kept[2].tolist() == draft_tokens and masks.allowed[2].all(), "a row without a grammar is left alone"
        for row in range(2):
            for node in range(nodes):
                if node and parents[node] < 0:
                    assert masks.allowed[row, node].all() and kept[row, node - 1] == draft_tokens[node - 1]
                    continue
                path = [draft_tokens[step - 1] for step in shape.path_to(node) if step]
                if -1 in path:
                    assert masks.allowed[row, node].all()
                    continue
                text = committed + path
                legal = automaton.start().advance(text) == len(text)
                assert torch.equal(masks.allowed[row, node], allowed(automaton, text))
                if node:
                    assert kept[row, node - 1] == (draft_tokens[node - 1] if legal else -1)
        state = automaton.start()
        state.advance(committed)
        new = []
        for _ in range(data.draw(st.integers(1, 4))):
            token = data.draw(st.sampled_from(sorted(automaton.following[state._states[-1]])))  # type: ignore[attr-defined]
            state.advance([token])
            new.append(token)
        committed += new
        commit(guide, [new] * 3)


@given(st.data())
def test_a_draft_runs_ahead_and_is_forgotten(data):
    automaton = TokenAutomaton.random(data.draw(st.integers(0, 500)), V, [STOP])
    guide = HostGuide.of(both(automaton), V, CPU)
    ahead = guide.ahead()
    text = legal_text(automaton, data.draw, 3)
    for token in text:
        assert torch.equal(ahead.end().allowed[1, 0], ahead.end().allowed[0, 0])
        ahead.append(torch.tensor([token, token]))
    assert torch.equal(ahead.end().allowed[0, 0], allowed(automaton, text))
    illegal = next((t for t in range(V) if not allowed(automaton, text)[t]), None)
    if illegal is not None:
        ahead.append(torch.tensor([illegal, illegal]))
        assert ahead.end().allowed is None, "what is illegal leads nowhere, and no softmax over nothing arises"
    ahead.follow()
    assert torch.equal(ahead.end().allowed[:, 0], torch.stack([allowed(automaton, [])] * 2))


def test_trees_grow_level_by_level():
    automaton = TokenAutomaton([{1: 3, 2: 4}, {5: 4}, {6: 2}], {4}, V, [STOP])
    for grammar in both(automaton):
        guide = HostGuide.of([grammar], V, CPU)
        assert guide.end().allowed[0, 0].nonzero().flatten().tolist() == [1, 2]
        first = guide.expand(torch.tensor([[1, 2]]), torch.tensor([[0, 0]]), 1)
        assert [m.nonzero().flatten().tolist() for m in first.allowed[0]] == [[5], [6, STOP]]
        second = guide.expand(torch.tensor([[5, 9]]), torch.tensor([[1, 2]]), 3)
        assert second.allowed[0, 0].nonzero().flatten().tolist() == [6, STOP] and second.allowed[0, 1].all()
        again = guide.expand(torch.tensor([[6]]), torch.tensor([[2]]), 3)  # the level before is taken back
        assert again.allowed[0, 0].nonzero().flatten().tolist() == [1, 2]


def test_forced_tokens_are_padded_and_cut():
    chain = TokenAutomaton([{1: 3}, {2: 4}, {3: 5}, {4: 2, 5: 2}], set(), V, [STOP])
    guide, rows = HostGuide.of([chain, None, Matched(chain)], V, CPU), sequences([[9]] * 3)
    assert guide.forced(rows, 8).tolist() == [[1, 2, 3], [-1] * 3, [1, 2, 3]]
    assert guide.forced(rows, 2).tolist() == [[1, 2], [-1] * 2, [1, 2]]
    commit(guide, [[1, 2, 3], [1], [1, 2]])
    assert guide.forced(sequences([[9, 1, 2, 3], [9, 1], [9, 1, 2]]), 8).tolist() == [[-1], [-1], [3]]


def test_rows_that_have_ended_are_free_and_a_stop_token_needs_an_end():
    automaton = TokenAutomaton([{1: 3}, {1: 3}], {3}, V, [STOP])
    guide = HostGuide.of(both(automaton), V, CPU)
    assert not guide.end().allowed[:, 0, STOP].any()
    commit(guide, [[1], [1]])
    assert guide.end().allowed[:, 0, STOP].all()
    commit(guide, [[STOP], [1]], [True, False])
    assert guide.end().allowed[0].all() and guide.end().allowed[1].sum() == 2
    assert guide.block(torch.tensor([[30, 31], [30, 31]]), Topology.chain(2))[0].tolist() == [[30, 31], [-1, -1]]


def test_a_backend_whose_mask_lies_is_found_out():
    guide = HostGuide.of([TokenAutomaton([{1: 2}], set(), V, [STOP])], V, CPU)
    with pytest.raises(GrammarError, match="row 0: the grammar's masks allowed a token that its matcher refuses"):
        commit(guide, [[9]])


def test_trees_per_row_tell_who_continues_whom():
    tree = TreeTensors.from_parents(torch.tensor([[-1, 0, 1], [-1, 0, 0]]))
    automaton = TokenAutomaton([{1: 3}, {2: 2}], set(), V, [STOP])
    kept, _ = HostGuide.of([automaton, automaton], V, CPU).block(torch.tensor([[1, 2], [1, 2]]), tree)
    assert kept.tolist() == [[1, 2], [1, -1]]
