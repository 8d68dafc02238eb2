"""The target's first layers draft for it: the tokens are those of plain decoding, and nothing of the target is changed."""

from __future__ import annotations

import copy

import pytest
import torch

import decoders
from decoders.enabling import disable
from decoders.engine.decode.drafters.shared_slots import SharedSlots
from decoders.engine.model.weights.twin import first_layers
from decoders.errors import SettingsError, UnsupportedError
from decoders.strategies import EarlyExit, Staged
from decoders.testing import assert_same_tokens, decode, prompts, tiny_model

EAGER = {"compile": False, "prefill_chunk": 8}
SAMPLING = dict(do_sample=True, seed=5, temperature=0.8, top_k=40)


@pytest.mark.in_turns
@pytest.mark.parametrize("tree", ["none", "static", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neo", "deepseek_v3"])
def test_tokens_are_those_of_the_whole_model(name: str, tree: str) -> None:
    model, inputs = decoders.enable(tiny_model(name)), prompts(3)
    strategy = EarlyExit(exit_layer=1, length=3, tree=tree)
    expected = decode(model, inputs, max_new_tokens=16).sequences
    out = decode(model, inputs, strategy, max_new_tokens=16, decoders_config=EAGER)
    assert_same_tokens(model, inputs, expected, out.sequences, f"{name}, {tree}")
    plain = decode(model, inputs, "autoregressive", max_new_tokens=16, decoders_config=EAGER, **SAMPLING)
    drawn = decode(model, inputs, strategy, max_new_tokens=16, decoders_config=EAGER, **SAMPLING)
    assert_same_tokens(model, inputs, plain.sequences, drawn.sequences, f"{name}, {tree}, sampled")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_first_layers_are_the_whole_model_where_later_ones_add_nothing(name: str) -> None:
    model = tiny_model(name)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if ".1." in part and any(end in part for end in ("o_proj", "down_proj", "c_proj")):
                parameter.zero_()
    model = decoders.enable(model)
    out = decode(model, prompts(2), EarlyExit(exit_layer=1, length=4), max_new_tokens=20, decoders_config=EAGER)
    assert out.report.mean_accepted_length > 4


class Watched(EarlyExit):
    """Looks at the target's keys before and after each draft, and at whose they are."""

    def start(self, context):
        state = super().start(context)
        self.drafter, self.begins = state.drafter, []
        core, run = state.drafter.core, state.drafter.core.forward_pass

        def watched(given):
            self.begins.append(given.base)
            return run(given)

        core.forward_pass = watched
        return state

    def propose(self, state, sequences):
        session = state.drafter.session
        assert isinstance(session, SharedSlots)
        before = [tensor.clone() for tensor in session.owner.rows.buffers.tensors]
        self.begins.clear()
        draft = super().propose(state, sequences)
        assert self.begins and all((begin >= sequences.length - 1).all() for begin in self.begins)
        buffers = session.owner.rows.buffers
        for old, new in zip(before, buffers.tensors, strict=True):
            for row, length in enumerate(sequences.length.tolist()):
                assert torch.equal(old[row, :, : length - 1], new[row, :, : length - 1])
        assert all(own is whole for own, whole in zip(session.rows.buffers.keys, buffers.keys, strict=False))
        return draft


@pytest.mark.in_turns
@pytest.mark.parametrize("tree", ["none", "static", "dynamic"])
@pytest.mark.parametrize("loop", [{}, {"kv_cache": "int8"}, {"prefill_chunk": 512}], ids=str)
def test_drafts_stand_in_the_targets_slots_and_what_is_committed_stays(tree: str, loop: dict) -> None:
    model, inputs = decoders.enable(tiny_model("llama")), prompts(3, length=40)
    strategy, loop = Watched(exit_layer=1, length=3, tree=tree), EAGER | loop
    plain = decode(model, inputs, "autoregressive", max_new_tokens=40, decoders_config=loop)
    out = decode(model, inputs, strategy, max_new_tokens=40, decoders_config=loop)
    assert torch.equal(out.sequences, plain.sequences)
    assert strategy.drafter.nbytes == 0 and out.report.peak_memory == plain.report.peak_memory


@pytest.mark.parametrize("tree", [pytest.param("none", marks=pytest.mark.slow), "dynamic"])
def test_drafts_are_those_of_a_draft_model_of_these_layers(tree: str) -> None:
    """With slots and a prompt of its own."""
    model = tiny_model("llama")
    draft = disable(copy.deepcopy(first_layers(model, 1)))
    settings = dict(length=4, tree=tree)
    for length in (3, 50):
        inputs = prompts(2, length=length)
        own = decode(
            decoders.enable(model), inputs, "speculative", strategy_config=settings, assistant_model=draft,
            max_new_tokens=24, decoders_config=EAGER,
        )  # fmt: skip
        out = decode(model, inputs, EarlyExit(exit_layer=1, **settings), max_new_tokens=24, decoders_config=EAGER)
        assert out.report.accepted_lengths == own.report.accepted_lengths
        assert [stage.passes for stage in out.report.stages] == [stage.passes for stage in own.report.stages]


def test_slots_that_become_too_few_grow_with_what_they_hold() -> None:
    model, inputs = decoders.enable(tiny_model("llama")), prompts(2)
    expected = decode(model, inputs, max_new_tokens=20).sequences
    strategy = Watched(exit_layer=1, length=32)  # longer drafts than there is room for behind the text
    out = decode(model, inputs, strategy, max_new_tokens=20, decoders_config=EAGER)
    assert torch.equal(out.sequences, expected)


def test_a_later_call_continues_what_an_earlier_one_has_left() -> None:
    model, inputs = decoders.enable(tiny_model("llama")), prompts(2, length=30)
    first = decode(model, inputs, EarlyExit(exit_layer=1), max_new_tokens=20, decoders_config=EAGER).sequences
    ids = torch.cat([first, torch.full((2, 3), 7)], 1)
    longer = {"input_ids": ids, "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 23), value=1)}
    out = decode(model, longer, Watched(exit_layer=1), max_new_tokens=20, decoders_config=EAGER)
    assert min(out.report.reused) > 30
    assert torch.equal(out.sequences, decode(model, longer, max_new_tokens=20).sequences)


def test_requests_that_come_and_go_draft_in_the_pools_slots() -> None:
    model = decoders.enable(tiny_model("llama"))
    texts = [prompts(1, length=length, seed=length)["input_ids"] for length in (5, 31, 12, 8)]
    expected = [decode(model, {"input_ids": text}, max_new_tokens=9 + 8 * i).sequences for i, text in enumerate(texts)]
    strategy = Watched(exit_layer=1, length=3)
    with decoders.Scheduler(model, strategy=strategy, rows=2, decoders_config=EAGER) as scheduler:
        requests = [scheduler.submit(text[0], max_new_tokens=9 + 8 * i) for i, text in enumerate(texts)]
        for request, whole in zip(requests, expected, strict=True):
            assert torch.equal(request.result(60), whole)


def test_steps_may_go_without_its_draft() -> None:
    model, inputs = decoders.enable(tiny_model("llama")), prompts(2)
    expected = decode(model, inputs, max_new_tokens=40).sequences
    for strategy in ("early_exit+prompt_lookup", "auto"):
        settings = {"candidates": ("early_exit", "prompt_lookup")} if strategy == "auto" else {}
        out = decode(
            model, inputs, strategy, strategy_config=settings, max_new_tokens=40, decoders_config=EAGER
        )  # fmt: skip
        assert torch.equal(out.sequences, expected)


class StagedExit(Staged):
    """The first layers verify drafts of their own before the whole model does."""

    name = "staged_exit"
    needs_assistant = False

    def draft_model(self, context):
        return context.first_layers(1)


@pytest.mark.slow
def test_first_layers_may_have_a_stage_of_their_own() -> None:
    model, inputs = decoders.enable(tiny_model("llama")), prompts(2)
    for options in ({}, dict(do_sample=True, seed=3, top_k=0)):
        plain = decode(model, inputs, "autoregressive", max_new_tokens=40, decoders_config=EAGER, **options)
        strategy = StagedExit(stage="suffix", passes=2, length=8)
        out = decode(model, inputs, strategy, max_new_tokens=40, decoders_config=EAGER, **options)
        assert torch.equal(out.sequences, plain.sequences)


def test_in_bfloat16_tokens_are_those_of_plain_decoding() -> None:
    model, inputs = decoders.enable(tiny_model("llama").bfloat16()), prompts(1, length=40)
    plain = decode(model, inputs, "autoregressive", max_new_tokens=60, decoders_config=EAGER)
    out = decode(model, inputs, Watched(exit_layer=1, length=3), max_new_tokens=60, decoders_config=EAGER)
    assert torch.equal(out.sequences, plain.sequences)


def test_the_cut_model_shares_weights_and_leaves_the_target_as_it_is() -> None:
    model = tiny_model("gemma2")
    layers, kinds = model.config.num_hidden_layers, list(model.config.layer_types)
    cut = first_layers(model, 1)
    assert {id(p) for p in cut.parameters()} < {id(p) for p in model.parameters()}
    assert cut.config.num_hidden_layers == 1
    assert (model.config.num_hidden_layers, model.config.layer_types) == (layers, kinds)
    assert len(model.model.layers) == layers


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma4", {}),  # its embeddings have a part for each layer
        ("bamba", dict(num_hidden_layers=2, attn_layer_indices=[0, 1])),  # its config computes the kinds of its layers
        ("jamba", dict(num_hidden_layers=2, attn_layer_period=1, attn_layer_offset=0)),
    ],
)
def test_designs_that_know_all_their_layers_can_be_left_early(name: str, options: dict) -> None:
    model, inputs = tiny_model(name, **options), prompts(2)
    hidden = []
    layers = len(model.model.layers)
    model.model.layers[layers - 2].register_forward_hook(
        lambda _, args, out: hidden.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        model(**inputs)
        norm = getattr(model.model, "norm", None) or model.model.final_layernorm
        expected = model.lm_head(norm(hidden[0]))
        assert torch.allclose(first_layers(model, layers - 1)(**inputs).logits, expected, atol=1e-4)
    model = decoders.enable(tiny_model(name, **options))
    expected = decode(model, inputs, max_new_tokens=16).sequences
    for layer in range(1, layers):
        out = decode(model, inputs, EarlyExit(exit_layer=layer), max_new_tokens=16, decoders_config=EAGER)
        assert_same_tokens(model, inputs, expected, out.sequences, f"{name}, {layer}")
        assert out.report.drafted > 0


def test_transformers_argument_says_where_to_leave() -> None:
    model = decoders.enable(tiny_model("llama"))
    out = decode(model, prompts(), "early_exit", assistant_early_exit=1, max_new_tokens=6, decoders_config=EAGER)
    assert out.report.settings["exit_layer"] == 1


@pytest.mark.parametrize("layer", [2, 7])
def test_a_layer_that_is_not_an_inner_one_is_refused(layer: int) -> None:
    model = decoders.enable(tiny_model("llama"))
    with pytest.raises(SettingsError, match="layer 1 … 1"):
        decode(model, prompts(), EarlyExit(exit_layer=layer), max_new_tokens=4, decoders_config=EAGER)
    model = decoders.enable(tiny_model("llama", num_hidden_layers=1))
    with pytest.raises(SettingsError, match="has 1 layer and cannot stop early"):
        decode(model, prompts(), EarlyExit(exit_layer=layer), max_new_tokens=4, decoders_config=EAGER)


def test_a_recurrent_target_cannot_draft_for_itself() -> None:
    model = decoders.enable(tiny_model("lfm2"))
    with pytest.raises(UnsupportedError, match="recurrent"):
        decode(model, prompts(), EarlyExit(exit_layer=1), max_new_tokens=4, decoders_config=EAGER)
