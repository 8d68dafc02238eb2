"""Sizes that steps are recorded for: how many there can be, and that padding changes nothing but the size."""

from __future__ import annotations

import random

import pytest
import torch

from decoders.engine.model.blocks import padded_tokens
from decoders.engine.model.buckets import (
    chunk_bucket,
    node_bucket,
    prefill_chunks,
    row_bucket,
    slot_bucket,
)
from decoders.tree import Topology


def test_rungs_are_few_and_cover_what_is_asked() -> None:
    assert [node_bucket(n) for n in (1, 4, 5, 33, 65, 128, 129, 300)] == [4, 4, 8, 64, 128, 128, 256, 384]
    assert [row_bucket(b) for b in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
    assert [slot_bucket(s) for s in (1, 256, 257, 5000)] == [256, 256, 512, 8192]
    for bucket in (node_bucket, row_bucket, slot_bucket):
        for size in range(1, 2000):
            assert bucket(size) >= size and bucket(bucket(size)) == bucket(size)


def test_on_the_cpu_sizes_stay_as_they_are_but_for_the_least() -> None:
    assert [node_bucket(n, static=False) for n in (1, 3, 17)] == [3, 3, 17]
    assert row_bucket(7, static=False) == 7
    assert [slot_bucket(s, static=False) for s in (1, 64, 65)] == [64, 64, 128]
    assert prefill_chunks(70, 64, static=False) == [(0, 64), (64, 6)]
    assert [prefill_chunks(tokens, 64, static=False, least=3) for tokens in (1, 66)] == [[(0, 3)], [(0, 64), (64, 3)]]


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 511, 512, 513, 1700])
def test_chunks_cover_a_prompt_without_gap_or_overlap(tokens: int) -> None:
    passes, end = prefill_chunks(tokens, 512), 0
    for start, size in passes:
        assert start == end and size in (32, 64, 128, 256, 512)
        end = start + size
    assert end >= tokens and (not passes or end - passes[-1][1] < tokens)


def test_a_day_of_random_calls_has_no_more_sizes_than_stated() -> None:
    most_rows, most_nodes, most_slots, chunk = 16, 200, 8192, 512
    choice = random.Random(0)
    steps: set[tuple[int, int, int]] = set()
    reads: set[tuple[int, int, int]] = set()
    seen: set[int] = set()
    for _ in range(3000):
        rows = row_bucket(choice.randint(1, most_rows))
        prompt = round(2 ** choice.uniform(0, 12.9))
        room = min(prompt + choice.randint(1, 1000), most_slots - 512 - most_nodes)
        prompt = min(prompt, room - 1) if room > 1 else 1
        slots = slot_bucket(room + max(most_nodes, 512))
        reads |= {(rows, size, slots) for _, size in prefill_chunks(prompt, chunk)}
        draft_tokens = choice.randint(1, 20)
        for _ in range(20):  # the heuristic schedule: two more draft tokens after success, one less after failure
            seen.add(draft_tokens + 1)
            steps.add((rows, node_bucket(draft_tokens + 1), slots))
            draft_tokens = min(draft_tokens + 2, most_nodes - 1) if choice.random() < 0.6 else max(draft_tokens - 1, 1)
    assert len(seen) > 30
    # Rows are rounded to 5 sizes, nodes to 7, tokens of a chunk to 5, slots to 6.
    assert len(steps) <= 5 * 7 * 6
    assert len(reads) <= 5 * 5 * 6


def test_what_is_read_between_steps_has_the_size_of_a_chunk() -> None:
    assert [chunk_bucket(tokens) for tokens in (1, 32, 63, 64, 200, 512)] == [32, 32, 32, 64, 128, 512]
    assert chunk_bucket(200, static=False) == 200


def test_a_padded_block_holds_the_same_draft_tokens_and_nothing_more() -> None:
    shape = Topology.branches(2, 3)
    draft_tokens = torch.arange(6)[None]
    for tree in (shape, shape.tensors(1, draft_tokens.device)):
        padded, larger = padded_tokens(draft_tokens, node_bucket(len(tree))), tree.padded(node_bucket(len(tree)))
        assert padded.tolist() == [[0, 1, 2, 3, 4, 5, -1]] and len(larger) == 8
        tensors = larger.tensors(1, draft_tokens.device) if isinstance(larger, Topology) else larger
        assert torch.equal(tensors.candidates[0], torch.arange(8) < 7)
        assert torch.equal(tensors.visible[0, :7, :7], shape.tensors(1, draft_tokens.device).visible[0])
        assert not tensors.visible[0, :7, 7].any() and tensors.visible[0, 7].sum() == 1
        assert padded_tokens(draft_tokens, 7) is draft_tokens and tree.padded(7) is tree
