"""Slots are written and moved row by row, and reads come before writes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from decoders.engine.model.cache import CacheBuffers, LayerSpec, move_slots
from decoders.engine.model.slot_cache import SlotCache, write_slots

CPU = torch.device("cpu")
LAYOUT = [LayerSpec(2, 4, 1, 3, torch.float32, CPU), LayerSpec(3, 5, 3, 5, torch.float64, CPU)]


def filled(rows: int, slots: int) -> CacheBuffers:
    buffers = CacheBuffers.allocate(LAYOUT, rows, slots)
    for i, tensor in enumerate(buffers.keys + buffers.values):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 10_000 * i)
    return buffers


def test_buffers_have_the_layout_that_each_layer_asked_for():
    buffers = CacheBuffers.allocate(LAYOUT, rows=2, slots=7)
    assert [tuple(k.shape) for k in buffers.keys] == [(2, 2, 7, 4), (2, 3, 7, 5)]
    assert [tuple(v.shape) for v in buffers.values] == [(2, 1, 7, 3), (2, 3, 7, 5)]
    assert [k.dtype for k in buffers.keys] == [torch.float32, torch.float64]
    assert buffers.slots == 7
    assert buffers.nbytes == sum(t.numel() * t.element_size() for t in buffers.keys + buffers.values)


def test_rows_write_to_slots_of_their_own():
    buffer = torch.zeros(2, 1, 6, 1)
    states = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(2, 1, 2, 1)
    write_slots(buffer, torch.tensor([[0, 1], [4, 5]]), states)
    assert buffer.flatten(1).tolist() == [[1, 2, 0, 0, 0, 0], [0, 0, 0, 0, 3, 4]]


def test_states_are_stored_in_the_dtype_of_the_buffer():
    buffer = torch.zeros(1, 1, 2, 1, dtype=torch.bfloat16)
    write_slots(buffer, torch.tensor([[1]]), torch.full((1, 1, 1, 1), 1.5, dtype=torch.float64))
    assert buffer.dtype == torch.bfloat16
    assert buffer.flatten().tolist() == [0, 1.5]


def test_every_head_is_written():
    torch.manual_seed(0)
    buffer, states = torch.zeros(2, 3, 8, 4), torch.randn(2, 3, 2, 4)
    slots = torch.tensor([[6, 2], [0, 7]])
    write_slots(buffer, slots, states)
    for row in range(2):
        for i in range(2):
            assert torch.equal(buffer[row, :, slots[row, i]], states[row, :, i])
    assert int((buffer != 0).sum()) == states.numel()


def test_reads_come_before_writes():
    buffers = filled(1, 5)
    before = [t.clone() for t in buffers.keys + buffers.values]
    move_slots(buffers, torch.tensor([1]), torch.tensor([[1, 2, 3]]))  # a shift that overlaps itself
    for old, new in zip(before, buffers.keys + buffers.values, strict=True):
        assert torch.equal(new[:, :, :1], old[:, :, :1])
        assert torch.equal(new[:, :, 1:4], old[:, :, 2:])
        assert torch.equal(new[:, :, 4], old[:, :, 4])


def test_moving_a_slot_onto_itself_changes_nothing():
    buffers = filled(2, 7)
    before = [t.clone() for t in buffers.keys]
    move_slots(buffers, torch.tensor([2, 0]), torch.arange(5).expand(2, 5))
    assert all(torch.equal(old, new) for old, new in zip(before, buffers.keys, strict=True))


@given(st.data())
def test_moves_equal_a_loop_over_copies(data):
    rows, slots, n = 2, 8, data.draw(st.integers(1, 5))
    path = [data.draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n)) for _ in range(rows)]
    base = [data.draw(st.integers(0, slots - n)) for _ in range(rows)]
    buffers = filled(rows, slots)
    before = [t.clone() for t in buffers.keys + buffers.values]
    move_slots(buffers, torch.tensor(base), torch.tensor(path))
    for old, new in zip(before, buffers.keys + buffers.values, strict=True):
        expected = old.clone()
        for row in range(rows):
            for place, node in enumerate(path[row]):
                expected[row, :, base[row] + place] = old[row, :, base[row] + node]
        assert torch.equal(new, expected)


def test_a_row_is_copied_from_another_cache_up_to_a_slot():
    own, other = filled(2, 6), filled(3, 9)
    before = [t.clone() for t in own.keys + own.values]
    own.copy_row(1, other, 2, 4)
    for old, new, source in zip(before, own.keys + own.values, other.keys + other.values, strict=True):
        assert torch.equal(new[1, :, :4], source[2, :, :4])
        assert torch.equal(new[1, :, 4:], old[1, :, 4:]) and torch.equal(new[0], old[0])


def test_a_grown_cache_holds_what_it_held():
    buffers = filled(2, 4)
    grown = buffers.enlarged(9)
    assert grown.slots == 9
    for old, new in zip(buffers.keys + buffers.values, grown.keys + grown.values, strict=True):
        assert torch.equal(new[:, :, :4], old) and not new[:, :, 4:].any()


def test_cache_gives_attention_the_view_and_keeps_the_rest():
    buffers = CacheBuffers.allocate(LAYOUT, rows=2, slots=9)
    cache = SlotCache(buffers, slots=torch.tensor([[2, 3], [0, 1]]), view=4)
    key, value = torch.ones(2, 2, 2, 4), torch.full((2, 1, 2, 3), 2.0)
    seen_keys, seen_values = cache.update(key, value, 0)
    assert seen_keys.shape == (2, 2, 4, 4)
    assert seen_values.shape == (2, 1, 4, 3)
    assert seen_keys[:, 0, :, 0].tolist() == [[0, 0, 1, 1], [1, 1, 0, 0]]
    assert seen_keys.data_ptr() == buffers.keys[0].data_ptr()
    assert not buffers.keys[1].any()
    assert cache.get_mask_sizes(2) == (4, 0)
