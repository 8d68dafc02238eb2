"""Chains of equal n-grams, expansion and memory against searches in plain Python."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc
from array import array
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoders.strategies.suffix_index import LEAD, RowText, expand, path_first
from decoders.text_memory import ORDERS, ChainedText, Occurrence, TextMemory

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def look_up(text: list[int], suffix: list[int], before: int) -> list[Occurrence]:
    """All places where the longest of the n-grams that ends `suffix` was met, the latest first."""
    for order in ORDERS:
        found = []
        for end in reversed(range(min(before, len(text)))):
            length = 0
            while length < min(len(suffix), end + 1) and text[end - length] == suffix[-1 - length]:
                length += 1
            if length >= order:
                found.append(Occurrence(length, end))
        if found:
            return found
    return []


def chained(tokens: list[int]) -> ChainedText:
    index = ChainedText()
    index.extend(tokens)
    return index


@given(texts, texts, st.integers(0, 40))
def test_occurrences_equal_a_search_in_plain_python(text, suffix, before):
    index = chained(text)
    assert index.occurrences(array("i", suffix), 1000, before) == look_up(text, suffix, before)
    assert index.occurrences(array("i", suffix), 2, before) == look_up(text, suffix, before)[:2]


@given(texts, st.integers(0, 40), texts)
def test_a_text_that_was_taken_back_leaves_nothing(text, kept, after):
    index = chained(text)
    index.truncate(kept)
    index.extend(after)
    whole = text[:kept] + after
    assert index.tokens.tolist() == whole
    suffix = array("i", whole[-8:])
    assert index.occurrences(suffix, 1000, len(whole) - 1) == look_up(whole, list(suffix), len(whole) - 1)
    assert index._heads == chained(whole)._heads and index._chains == chained(whole)._chains


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=6), st.integers(1, 8))
def test_probabilities_are_products_of_shares_and_come_in_falling_order(continuations, most):
    least = 0.15
    nodes, score = expand(continuations, most, least)
    assert len(nodes) <= most
    paths: list[tuple[int, ...]] = [()]
    probabilities = []
    for node in nodes:
        path = (*paths[node.parent], node.token)
        parent = [c for c in continuations if tuple(c[: len(path) - 1]) == path[:-1]]
        own = [c for c in parent if tuple(c[: len(path)]) == path]
        assert own and node.share == pytest.approx(len(own) / len(parent)) and node.support == len(own)
        assert path not in paths
        paths.append(path)
        likely = Fraction(1)
        for depth in range(len(path)):
            through = [c for c in continuations if tuple(c[:depth]) == path[:depth]]
            likely *= Fraction(sum(tuple(c[: depth + 1]) == path[: depth + 1] for c in through), len(through))
        probabilities.append(float(likely))
    assert score == pytest.approx(sum(probabilities))
    assert all(p >= least - 1e-9 for p in probabilities)
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(probabilities))


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=6), st.integers(1, 8))
def test_the_likeliest_path_in_front_leaves_the_tree_as_it_is(continuations, most):
    def paths(nodes):
        found = [()]
        for node in nodes:
            found.append((*found[node.parent], node.token))  # its parent comes before it
        return found[1:]

    def tree(nodes):
        return {path: (node.share, node.support) for path, node in zip(paths(nodes), nodes, strict=True)}

    nodes, _ = expand(continuations, most, 0.15)
    ordered = path_first(nodes)
    assert tree(ordered) == tree(nodes)
    likeliest = ()
    while children := [path for path in paths(nodes) if path[:-1] == likeliest]:
        likeliest = children[0]
    assert paths(ordered)[: len(likeliest)] == [likeliest[: depth + 1] for depth in range(len(likeliest))]


def test_the_most_frequent_continuation_comes_first_and_of_equal_ones_the_latest():
    nodes, _ = expand([[5], [6], [6], [7]], 3, 0.0)
    assert [node.token for node in nodes] == [6, 5, 7]
    assert [node.share for node in nodes] == [0.5, 0.25, 0.25]


def remembering(*given: list[int], capacity: int = 1000) -> TextMemory:
    memory = TextMemory(capacity)
    for text in given:
        memory.add(array("i", text))
    return memory


def test_the_least_recently_used_text_is_dropped():
    memory = remembering([1, 2, 3, 4], [5, 6, 7, 8], capacity=8)
    memory.use(memory.text_at(0))
    memory.add(array("i", [9, 10, 11, 12]))
    assert [memory._text(number).tolist() for number in memory._used] == [[1, 2, 3, 4], [9, 10, 11, 12]]
    assert memory.tokens == 8 and memory.texts == 2


def test_memory_stays_bounded_and_keeps_what_it_holds_when_it_is_rebuilt():
    memory = TextMemory(50)
    for number in range(100):
        memory.add(array("i", [number, *range(1000, 1009)]))
        assert memory.tokens <= 50 and len(memory.index) <= 70, "separators come on top of 1.25 times 50"
    suffix = array("i", [99, 1000])
    found = memory.index.occurrences(suffix, 10, len(memory.index))
    assert [memory.text_at(o.end) is not None for o in found] == [True]


def test_an_equal_text_is_remembered_once():
    memory = remembering([1, 2, 3], [4, 5, 6], [1, 2, 3])
    assert memory.texts == 2 and memory.tokens == 6


def test_a_text_longer_than_the_memory_is_remembered_by_its_end():
    memory = remembering(list(range(30)), capacity=10)
    assert memory._text(0).tolist() == list(range(20, 30))


def test_no_match_goes_from_one_text_into_the_next():
    memory = remembering([1, 2, 3], [4, 5, 6])
    found = memory.index.occurrences(array("i", [2, 3, 4]), 10, 100)
    assert [o.length for o in found] == [1]


def test_a_token_takes_256_bytes_at_most():
    """Where no n-gram repeats itself, which is the worst; 100 in English text. The chains' dictionaries are included."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    memory = remembering(list(range(40_000)), capacity=65536)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used / memory.tokens < 256


def test_memory_survives_pickling():
    memory = remembering([1, 2, 3, 4, 5])
    again = pickle.loads(pickle.dumps(memory))
    again.add(array("i", [7, 8]))
    assert again.tokens == 7 and again.texts == 2


def test_an_output_is_remembered_with_the_end_of_its_prompt():
    row = RowText()
    row.prompt = 40
    row.follow(list(range(40)), 0)
    assert not row.output(), "nothing was written yet"
    row.follow([*range(40), 50, 51], 0)
    assert row.output().tolist() == [*range(40 - LEAD, 40), 50, 51]
