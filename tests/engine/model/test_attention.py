"""The mask against its definition, and the packed attention against the textbook's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import MistralConfig, PreTrainedConfig

from decoders.engine.model.attention import (
    INDEX_ATTRIBUTE,
    STRETCH,
    LayerKind,
    MaskShape,
    build_mask,
    layer_kinds,
    tree_attention,
)
from decoders.engine.model.attention import tell_shape as tell_shape
from decoders.engine.model.blocks import LeadingText
from decoders.errors import UnsupportedError
from decoders.testing import tiny_model
from decoders.tree import Topology

CPU = torch.device("cpu")


@st.composite
def blocks(draw):
    parents = [-1]
    for node in range(1, draw(st.integers(1, 7))):
        parents.append(draw(st.sampled_from([-1] + [p for p in range(node) if p == 0 or parents[p] >= 0])))
    base = draw(st.lists(st.integers(0, 12), min_size=1, max_size=3))
    view = max(base) + len(parents) + draw(st.integers(0, 5))
    return Topology.from_parents(parents), base, view


@settings(deadline=None)
@given(blocks(), st.integers(1, 10), st.integers(1, 10))
def test_mask_is_its_definition(block, window, chunk):
    topology, base, view = block
    tree = topology.tensors(len(base), CPU)
    kinds = (LayerKind(), LayerKind(window=window), LayerKind(chunk=chunk))
    mask = build_mask(kinds, torch.tensor(base), tree.offsets, tree.visible, view, torch.float32)
    assert mask.shape == (len(base), 3, len(topology), view)
    assert set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}
    for row, start in enumerate(base):
        for node in range(len(topology)):
            at = start + topology.offsets[node]
            for slot in range(view):
                other = slot - start
                if other < 0:
                    seen, position = True, slot
                elif other < len(topology):
                    seen, position = other in topology.path_to(node), start + topology.offsets[other]
                else:
                    seen, position = False, slot
                expected = [seen, seen and at - position < window, seen and at // chunk == position // chunk]
                assert (mask[row, :, node, slot] == 0).tolist() == expected


def test_every_node_sees_at_least_itself():
    tree = Topology.chain(2).padded(5).tensors(1, CPU)
    mask = build_mask(
        (LayerKind(window=1), LayerKind(chunk=1)), torch.tensor([4]), tree.offsets, tree.visible, 16, torch.float32
    )
    assert (mask == 0).any(-1).all()


def textbook(query, key, value, mask, scaling, softcap=None, sinks=None):
    """One head and one query at a time, in float64."""
    query, key, value, mask = (t.double() for t in (query, key, value, mask))
    rows, heads, n, _ = query.shape
    group = heads // key.shape[1]
    out = torch.zeros(rows, n, heads, value.shape[-1], dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            for q in range(n):
                scores = key[row, head // group] @ query[row, head, q] * scaling
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                scores = scores + mask[row, q]
                if sinks is not None:
                    scores = torch.cat([scores, sinks.double()[head : head + 1]])
                weights = scores.softmax(-1)[: key.shape[2]]
                out[row, q, head] = weights @ value[row, head // group]
    return out


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["no softcap", "softcap"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_packed_attention_equals_the_textbook(heads, softcap, sinks, kind, dtype):
    torch.manual_seed(0)
    rows, n, view, dim, value_dim = 2, 5, 17, 8, 6
    query = (2 * torch.randn(rows, heads[0], n, dim)).to(dtype)
    key, value = (torch.randn(rows, heads[1], view, width).to(dtype) for width in (dim, value_dim))
    tree = Topology.branches(2, 2).tensors(rows, CPU)
    kinds = (LayerKind(), LayerKind(window=4))
    mask = build_mask(kinds, torch.tensor([12, 7]), tree.offsets, tree.visible, view, dtype)
    module = nn.Module()
    setattr(module, INDEX_ATTRIBUTE, kind)
    s_aux = torch.randn(heads[0]).to(dtype) if sinks else None
    out, _ = tree_attention(module, query, key, value, mask, scaling=0.3, softcap=softcap, s_aux=s_aux)
    expected = textbook(query, key, value, mask[:, kind], 0.3, softcap, s_aux)
    close = 1e-5 if dtype is torch.float32 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=close, atol=close)


def test_scale_defaults_to_one_over_root_of_the_width():
    torch.manual_seed(1)
    query, key, value = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 4, 16), torch.randn(1, 2, 4, 16)
    mask = torch.zeros(1, 1, 3, 4)
    for softcap in (None, 1e6):
        out, _ = tree_attention(nn.Module(), query, key, value, mask, softcap=softcap)
        torch.testing.assert_close(out.double(), textbook(query, key, value, mask[:, 0], 0.25), rtol=1e-4, atol=1e-4)


def test_position_bias_is_refused():
    query = torch.zeros(1, 1, 1, 4)
    with pytest.raises(UnsupportedError, match="position bias"):
        tree_attention(nn.Module(), query, query, query, torch.zeros(1, 1, 1, 1), position_bias=torch.zeros(1))


@pytest.mark.parametrize(
    ("name", "kinds", "of_layer"),
    [
        ("llama", (LayerKind(),), (0, 0)),
        ("mistral", (LayerKind(window=8),), (0, 0)),
        ("gemma2", (LayerKind(window=8), LayerKind()), (0, 1)),
        ("qwen2", (LayerKind(), LayerKind(window=8)), (0, 1)),
        ("llama4", (LayerKind(chunk=12), LayerKind()), (0, 1)),
    ],
)
def test_layer_kinds_are_read_from_the_config(name, kinds, of_layer):
    assert layer_kinds(tiny_model(name).config) == (kinds, of_layer)


def test_windows_may_differ_by_layer():
    layers = {0: {"sliding_window": 6}, 2: {"sliding_window": None}}
    config = MistralConfig(num_hidden_layers=3, sliding_window=12, per_layer_config=layers)
    assert layer_kinds(config) == ((LayerKind(window=6), LayerKind(window=12), LayerKind()), (0, 1, 2))


def test_layers_of_one_pass_may_have_groups_of_different_size():
    """Masks of a prompt's stretches are kept for all layers of a pass."""
    n = 3 * STRETCH
    torch.manual_seed(0)
    mask = torch.zeros(1, 1, n, n).masked_fill(torch.ones(n, n).triu(1).bool(), torch.finfo(torch.float32).min)
    tell_shape(mask, MaskShape(text=LeadingText(n)))
    for heads in (2, 1, 4, 2):
        query, key, value = (torch.randn(1, h, n, 8) for h in (4, heads, heads))
        out, _ = tree_attention(nn.Module(), query, key, value, mask)
        wide = [t.repeat_interleave(4 // heads, 1) for t in (key, value)]
        expected = torch.nn.functional.scaled_dot_product_attention(query, *wide, is_causal=True)
        torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


class Hybrid(PreTrainedConfig):
    """Of a model with recurrent layers."""

    layer_types = ("full_attention", "recurrent")


def test_layers_without_keys_and_values_are_refused():
    with pytest.raises(UnsupportedError):
        layer_kinds(Hybrid())
