"""What the engine keeps is given back, dense weights included; writes to weights are seen however they are made."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import decoders
from decoders.engine.model.weights import packing
from decoders.engine.model.weights.freed import FreedParameter
from decoders.errors import SettingsError, UnsupportedError
from decoders.testing import prompts, tiny_model

from .conftest import Calls

INPUTS = prompts()


@pytest.fixture(autouse=True)
def _small_matrices_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SMALLEST", 0)


def plainly(model: PreTrainedModel, new: int = 16) -> Tensor:
    return type(model).generate(model, **INPUTS, do_sample=False, max_new_tokens=new)


def ours(model: PreTrainedModel, weights: str = "keep", new: int = 16, **options: object) -> Tensor:
    runtime = {"compile": False, "weights": weights}
    options = dict(strategy="prompt_lookup", max_new_tokens=new, do_sample=False, decoders_config=runtime) | options
    return model.generate(**INPUTS, **options)


def engine_of(model: PreTrainedModel) -> object:
    return vars(model)["generate"]._engine


# --- release ----------------------------------------------------------------------------------------------------------


def test_release_frees_buffers_packed_weights_and_draft_models(fresh: PreTrainedModel) -> None:
    draft = tiny_model("llama", seed=3)
    expected = ours(fresh, strategy="speculative", assistant_model=draft)
    engine = engine_of(fresh)
    kept = [weakref.ref(engine), *(weakref.ref(w.packed) for w in engine.target.packing.weights)]
    kept += [weakref.ref(t) for s in engine.sessions._free for t in (*s.rows.buffers.keys, s.rows.tokens)]
    kept += [weakref.ref(e) for e in vars(fresh)["generate"]._assistants._engines.values()]
    assert len(kept) > 10
    del engine
    assert decoders.release(fresh) is fresh
    gc.collect()
    assert not [ref for ref in kept if ref() is not None]
    assert torch.equal(ours(fresh, strategy="speculative", assistant_model=draft), expected), "it stays enabled"


def test_release_of_a_model_never_used_or_not_enabled_does_nothing(fresh: PreTrainedModel) -> None:
    assert decoders.release(fresh) is fresh
    bare = tiny_model("llama")
    before = set(vars(bare))
    assert decoders.release(bare) is bare and set(vars(bare)) == before


@pytest.mark.parametrize("thing", [None, "model", nn.Linear(2, 2)], ids=repr)
def test_release_of_what_is_no_model_is_an_error(thing: object) -> None:
    with pytest.raises(UnsupportedError, match="transformers model"):
        decoders.release(thing)


@pytest.mark.parametrize("weights", ["keep", "packed"])
def test_release_within_a_call_lets_it_end(fresh: PreTrainedModel, weights: str) -> None:
    expected = plainly(fresh)
    assert torch.equal(ours(fresh, weights, streamer=Calls(lambda: decoders.release(fresh))), expected)
    assert engine_of(fresh) is None
    assert torch.equal(ours(fresh, weights), expected)


def test_a_call_within_a_call_and_one_in_another_thread_do_not_wait_for_each_other(fresh: PreTrainedModel) -> None:
    expected = plainly(fresh, 4)
    results: list[Tensor] = []
    other = threading.Thread(target=lambda: results.append(ours(fresh, new=4)), daemon=True)

    def nested() -> None:
        other.start()
        other.join(timeout=0.3)  # it has come as far as it can while this call runs
        results.append(ours(fresh, new=4))

    worker = threading.Thread(target=lambda: results.append(ours(fresh, new=4, streamer=Calls(nested))), daemon=True)
    worker.start()
    for thread in (worker, other):
        thread.join(timeout=60)
        assert not thread.is_alive(), "deadlock"
    assert len(results) == 3 and all(torch.equal(result, expected) for result in results)


# --- weights="packed" -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["llama", "gpt2"])
def freed(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model whose dense weights are freed; the head of the second is tied."""
    model = decoders.enable(tiny_model(request.param))
    model.expected = plainly(model)
    assert torch.equal(ours(model, "packed"), model.expected)
    assert any(isinstance(p, FreedParameter) for p in model.parameters())
    return model


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup", "ngram", "lookahead", "ngram+prompt_lookup"])
def test_strategies_decode_without_the_dense_weights(freed: PreTrainedModel, strategy: str) -> None:
    engine = engine_of(freed)
    assert torch.equal(ours(freed, "packed", strategy=strategy), freed.expected)
    assert engine_of(freed) is engine, "freed weights are no change"
    out = ours(freed, "packed", strategy=strategy, return_dict_in_generate=True)
    assert out.report.reused == [INPUTS["input_ids"].shape[1] - 1]


class Multiplies(nn.Module):
    """Reads the weight of a linear layer of its own."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inner.weight) + self.inner(x)


def test_weights_that_others_read_stay() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj = Multiplies(layer.mlp.down_proj)
    decoders.enable(model)
    expected = plainly(model)
    assert torch.equal(ours(model, "packed"), expected)
    stays = {name for name, parameter in model.named_parameters() if not isinstance(parameter, FreedParameter)}
    assert any("down_proj.inner" in name for name in stays) and not any("q_proj" in name for name in stays)


def test_first_layers_need_the_dense_weights() -> None:
    model = decoders.enable(tiny_model("llama"))
    ours(model, strategy="early_exit")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="first layers shares"):
            ours(model, "packed", strategy="early_exit")
    assert torch.equal(ours(model, strategy="early_exit"), plainly(model))


def test_self_draft_decodes_without_the_dense_weights(freed: PreTrainedModel) -> None:
    assert torch.equal(ours(freed, "packed", strategy="speculative", assistant_model=freed), freed.expected)


@pytest.mark.parametrize(
    "use",
    [
        lambda model: plainly(model),
        lambda model: model.generate(**INPUTS, max_new_tokens=2),
        lambda model: model.state_dict(),
        lambda model: model.state_dict(keep_vars=True)["model.layers.0.mlp.up_proj.weight"] + 1,
        lambda model: copy.deepcopy(model),
        lambda model: pickle.dumps(model),
        lambda model: model.model.layers[0].mlp.up_proj.weight.data.neg_(),
        lambda model: model.model.layers[0].mlp.up_proj.weight.detach().numpy(),
        lambda model: ours(decoders.enable(tiny_model("llama")), strategy="speculative", assistant_model=model),
    ],
    ids=[
        "generate", "enabled generate", "state_dict", "keep_vars", "deepcopy", "pickle", "data", "numpy", "draft",
    ],
)  # fmt: skip
def test_any_other_use_says_how_to_get_the_weights_back(use: Callable[[PreTrainedModel], object]) -> None:
    model = decoders.enable(tiny_model("llama"))
    expected = ours(model, "packed")
    with pytest.raises(UnsupportedError, match=r"decoders\.release\(model\)"):
        use(model)
    assert torch.equal(ours(model, "packed"), expected)


def test_saving_says_how_to_get_the_weights_back_and_writes_nothing(freed: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"decoders\.release"):
        freed.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    state = tiny_model("llama", seed=8).state_dict()
    with pytest.raises((RuntimeError, UnsupportedError), match=r"decoders\.release|size mismatch|Missing"):
        freed.load_state_dict(state)


def test_a_cast_works_after_release(fresh: PreTrainedModel) -> None:
    ours(fresh, "packed")
    with pytest.raises(UnsupportedError, match=r"decoders\.release"):
        fresh.to(torch.float64)
    decoders.release(fresh).to(torch.float64)
    assert torch.equal(ours(fresh, "packed"), plainly(decoders.release(fresh)))


def test_a_model_with_freed_weights_can_be_looked_at(freed: PreTrainedModel) -> None:
    assert freed.num_parameters() == sum(p.numel() for p in freed.parameters())
    assert freed.device == torch.device("cpu") and freed.dtype == torch.float32
    assert "FreedParameter" in repr(next(p for p in freed.parameters() if isinstance(p, FreedParameter)))
    repr(freed)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("back", [decoders.release, decoders.disable, lambda model: ours(model, "keep")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_parameters_come_back_bit_for_bit(back: Callable, dtype: torch.dtype) -> None:
    model = decoders.enable(tiny_model("llama").to(dtype))
    objects = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in objects.items()}
    ours(model, "packed")
    assert sum(objects[n].numel() == 0 for n in objects) > 10, "their memory is free"
    back(model)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in objects.items()}
    assert all(torch.equal(p.view(torch.int16), values[n].view(torch.int16)) for n, p in objects.items())
    assert all(p.requires_grad for p in objects.values())
    decoders.enable(model)
    model(**INPUTS).logits.float().sum().backward()
    assert torch.equal(ours(model, "packed"), ours(model, "keep"))


@pytest.mark.parametrize("how", ["assign", "load"])
def test_weights_replaced_while_the_others_are_freed_count(fresh: PreTrainedModel, how: str) -> None:
    ours(fresh, "packed")
    other = tiny_model("llama", seed=4)
    if how == "assign":
        fresh.model.layers[0].mlp.up_proj.weight = nn.Parameter(
            other.model.layers[0].mlp.up_proj.weight.detach().clone()
        )
    else:
        fresh.load_state_dict(other.state_dict(), assign=True)
    after = ours(fresh, "packed")
    decoders.release(fresh)
    if how == "assign":
        assert torch.equal(fresh.model.layers[0].mlp.up_proj.weight, other.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(after, plainly(fresh))


def test_a_write_to_a_weight_that_was_not_freed_counts(freed: PreTrainedModel) -> None:
    freed.get_input_embeddings().weight.data.neg_()
    after = ours(freed, "packed")
    decoders.release(freed)
    assert torch.equal(after, plainly(freed))


def test_another_kind_of_attention_makes_the_engine_anew(fresh: PreTrainedModel) -> None:
    expected = ours(fresh, "packed")
    again = ours(fresh, decoders_config={"compile": False, "weights": "packed", "attention": "sdpa"})
    assert torch.equal(again, expected)
    decoders.release(fresh)
    assert torch.equal(plainly(fresh), expected)


def test_weights_made_under_inference_mode_come_back() -> None:
    with torch.inference_mode():
        model = decoders.enable(tiny_model("llama"))
    expected = plainly(model)
    assert torch.equal(ours(model, "packed"), expected)
    decoders.release(model)
    assert torch.equal(plainly(model), expected)


@pytest.mark.parametrize("weights", ["keep", "packed"])
def test_calls_under_autocast_decode_in_the_models_own_precision(fresh: PreTrainedModel, weights: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours(fresh, weights), ours(fresh, weights))
        result = ours(fresh, weights)
    decoders.release(fresh)
    assert torch.equal(result, plainly(fresh))


# --- writes that PyTorch does not count -------------------------------------------------------------------------------


@pytest.mark.in_turns(4)
@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.data.neg_(),
        lambda weight: weight.data.copy_(torch.rand_like(weight) - 0.5),
        lambda weight: weight.detach().numpy().__imul__(-1),
        lambda weight: setattr(weight, "data", -weight.data),
    ],
    ids=["data.neg_", "data.copy_", "numpy", "data ="],
)
@pytest.mark.parametrize("name", ["lm_head", "layers.1.mlp.down_proj", "embed_tokens", "layers.0.input_layernorm"])
def test_writes_past_pytorchs_count_are_seen(fresh: PreTrainedModel, write: Callable, name: str) -> None:
    weight = next(p for n, p in fresh.named_parameters() if n.endswith(f"{name}.weight"))
    for _ in range(2):  # the second write follows the storage that the first may have put in its place
        ours(fresh)
        write(weight)
        out = ours(fresh, return_dict_in_generate=True)
        assert out.report.reused == [0]
        assert torch.equal(out.sequences, plainly(fresh))


def test_writes_to_inference_tensors_are_seen() -> None:
    with torch.inference_mode():
        model = decoders.enable(tiny_model("llama"))
        ours(model)
        model.lm_head.weight.neg_()
        assert torch.equal(ours(model), plainly(model))


def test_writes_are_seen_by_every_engine_that_shares_the_packed_copy(fresh: PreTrainedModel) -> None:
    other = decoders.enable(tiny_model("llama", seed=2))
    options = dict(strategy="speculative", assistant_model=fresh)
    ours(fresh), ours(other, **options)
    fresh.model.layers[0].mlp.up_proj.weight.data.neg_()
    assert torch.equal(ours(fresh), plainly(fresh))
    out = ours(other, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, plainly(other))
    engines = vars(other)["generate"]._assistants._engines
    assert not engines[fresh].target.samples.changed


# --- warmup -----------------------------------------------------------------------------------------------------------


def test_warmup_packs_and_runs_every_strategy(fresh: PreTrainedModel) -> None:
    decoders.disable(fresh)
    draft = tiny_model("llama", seed=3)
    done = decoders.warmup(
        fresh, strategies=("autoregressive", "speculative"), rows=(1,), assistant_model=draft,
        sampling={"temperature": 0.7}, decoders_config={"compile": False},
    )  # fmt: skip
    assert isinstance(done, decoders.Warmup) and done.pack_seconds > 0
    assert done.compile_seconds == 0 == done.compilations
    assert [(part.strategy, part.rows, part.sampling) for part in done.parts] == [
        (strategy, 1, sampling) for strategy in ("autoregressive", "speculative") for sampling in (False, True)
    ]
    assert decoders.warmup(fresh, decoders_config={"compile": False}).pack_seconds == 0
    assert torch.equal(ours(fresh), plainly(fresh))


def test_mistakes_in_warmup_are_errors(fresh: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedError, match="assistant_model"):
        decoders.warmup(fresh, strategies=["speculative"])
    with pytest.raises(SettingsError, match="rows"):
        decoders.warmup(fresh, rows=(0,))
    with pytest.raises(decoders.DecodersError, match="autoregressive"):
        decoders.warmup(fresh, strategies=["autoregresive"])
    with pytest.raises(UnsupportedError, match="transformers model"):
        decoders.warmup(nn.Linear(2, 2))
