"""Keys and values of an accepted path, moved in all layers by one launch, interpreted: as the plain moves leave them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import decoders
from decoders.engine.model.cache import CacheBuffers, LayerSpec, move_slots
from decoders.engine.model.kernels import interpreted, moves
from decoders.engine.model.self_check import check_moves
from decoders.engine.model.target import Target
from decoders.engine.model.weights.quantization import Precision
from decoders.errors import UnsupportedError
from decoders.strategy import Draft, Sequences, Strategy
from decoders.testing import decode, prompts, tiny_model
from decoders.tree import Topology

from ....tape_recorder import TapeRecorder

if not interpreted():
    pytest.skip("kernels are interpreted where there is no GPU and Triton is installed", allow_module_level=True)

CPU = torch.device("cpu")
LAYOUTS = {
    "bf16": [LayerSpec(2, 64, 2, 64, torch.bfloat16, CPU), LayerSpec(0, 0, 0, 0, torch.bfloat16, CPU)],
    "other widths": [LayerSpec(1, 192, 2, 128, torch.float32, CPU), LayerSpec(3, 5, 3, 3, torch.float32, CPU)],
    "int8": [LayerSpec(2, 32, 1, 20, torch.float16, CPU, quantized=True)] * 2,
    "int8, scales in float32": [LayerSpec(1, 7, 1, 8, torch.float32, CPU, quantized=True)],
}


def filled(layout: list[LayerSpec], rows: int, slots: int) -> CacheBuffers:
    buffers = CacheBuffers.allocate(layout, rows, slots, by_kernel=True)
    for i, tensor in enumerate(buffers.tensors):
        tensor.copy_(torch.randint(-128, 128, tensor.shape, generator=torch.Generator().manual_seed(i)))
    return buffers


def check(buffers: CacheBuffers, base: Tensor, path: Tensor) -> None:
    copies = [tensor.clone() for tensor in buffers.tensors]
    plain = replace(buffers, places=None)
    move_slots(buffers, base, path)
    ours = [tensor.clone() for tensor in buffers.tensors]
    for tensor, before in zip(buffers.tensors, copies, strict=True):
        tensor.copy_(before)
    move_slots(plain, base, path)
    assert all(torch.equal(*pair) for pair in zip(ours, buffers.tensors, strict=True))


@settings(max_examples=12)
@given(st.data(), st.sampled_from(list(LAYOUTS)))
def test_paths_of_ragged_rows_are_moved_as_by_copies(data: st.DataObject, layout: str) -> None:
    slots, count = 70, data.draw(st.sampled_from([1, 4, 18, 40]))
    buffers = filled(LAYOUTS[layout], 3, slots)
    paths, bases = [], []
    for _ in range(2):
        nodes = sorted(data.draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
        paths.append([0, *nodes, *range(len(nodes) + 1, count)])
        bases.append(data.draw(st.integers(-1, slots - count)))
    check(buffers.of_rows(0, 2), torch.tensor(bases), torch.tensor(paths))


def test_enlarged_caches_and_first_layers_are_moved_where_they_are() -> None:
    path, base = torch.tensor([[0, 2, 3, 3]]), torch.tensor([2])
    buffers = filled(LAYOUTS["int8"], 1, 16)
    check(buffers.enlarged(24), base, path)
    check(buffers.first_layers(1), base, path)
    assert buffers.of_row(0, 8).places is None and filled(LAYOUTS["bf16"], 3, 9).of_rows(1, 2).places is None


class SecondBranch(Strategy):
    """Wrong tokens, and beside them the right ones."""

    name = "second_branch"
    summary = "Three tokens twice."
    on_device = True
    observes = False

    def __init__(self, new: Tensor) -> None:
        super().__init__()
        self.new = torch.nn.functional.pad(new, (0, 8), value=3)

    def start(self, context: Any) -> None: ...

    def propose(self, state: None, sequences: Sequences) -> Draft:
        index = (sequences.length - sequences.prompt_length)[:, None] + torch.arange(3)
        right = self.new.gather(1, index)
        return Draft(torch.cat([torch.full_like(right, 5), right], 1), Topology.branches(2, 3))


@pytest.mark.parametrize("design, levels", [("gemma3", "keep"), ("llama", "int8")])
def test_moves_of_trees_are_recorded_as_one_launch_each(
    device: TapeRecorder, design: str, levels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    launch, allocate = moves.move_in_one_launch, CacheBuffers.allocate
    monkeypatch.setattr(moves, "move_in_one_launch", lambda *given: moved.append(0) or launch(*given))
    # With the plain attention: an interpreted one takes minutes.
    monkeypatch.setattr(CacheBuffers, "allocate", lambda *given: allocate(*given[:4], by_kernel=True))
    model = decoders.enable(tiny_model(design), kv_cache=levels)
    expected = decode(model, prompts(1), "autoregressive", max_new_tokens=24).sequences
    moved.clear()  # the model's check
    strategy = SecondBranch(expected[:, -24:])
    outs = [decode(model, prompts(1), strategy, max_new_tokens=24) for _ in range(3)]
    assert all(torch.equal(out.sequences, expected) and out.report.accepted > 12 for out in outs)
    assert moved and device.replayed and outs[2].report.replayed_steps == outs[2].report.steps


def test_a_target_with_our_attention_has_its_slots_moved_by_our_kernel() -> None:
    for attends in ("sdpa", "triton"):
        target = Target(tiny_model("llama"), attends)  # type: ignore[arg-type]
        assert (target.buffers(2, 64).places is not None) == (attends == "triton")


@pytest.mark.parametrize("levels", [None, "int8"])
def test_a_kernel_that_moves_to_wrong_places_is_seen(levels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama"), "triton", Precision(cache=levels))
    check_moves(target)
    launch = moves.move_in_one_launch
    monkeypatch.setattr(
        moves, "move_in_one_launch", lambda places, base, path, own: launch(places, base + 1, path, own)
    )
    with pytest.raises(UnsupportedError, match="wrong places"):
        check_moves(target)
