"""What the engine keeps is given back; writes to weights are seen however they are made."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import decoders
from decoders.engine.model.weights import quantization
from decoders.engine.model.weights.state import WeightState
from decoders.errors import SettingsError, UnsupportedError
from decoders.testing import prompts, tiny_model

from ...streamers import Calls

INPUTS = prompts()


def plainly(model: PreTrainedModel, new: int = 16) -> Tensor:
    return type(model).generate(model, **INPUTS, do_sample=False, max_new_tokens=new)


def ours(model: PreTrainedModel, weights: str = "keep", new: int = 16, **options: object) -> Tensor:
    runtime = {"compile": False, "weights": weights}
    options = dict(strategy="prompt_lookup", max_new_tokens=new, do_sample=False, decoders_config=runtime) | options
    return model.generate(**INPUTS, **options)


def engine_of(model: PreTrainedModel) -> object:
    return vars(model)["generate"]._engine


# --- release ----------------------------------------------------------------------------------------------------------


def test_release_frees_buffers_quantized_weights_and_draft_models(
    fresh: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "SMALLEST", 0)
    draft = tiny_model("llama", seed=3)
    expected = ours(fresh, "int8", strategy="speculative", assistant_model=draft)
    engine = engine_of(fresh)
    kept = [weakref.ref(engine), *map(weakref.ref, engine.target.matrices)]
    kept += [weakref.ref(t) for s in engine.sessions._free for t in (*s.rows.buffers.keys, s.rows.tokens)]
    kept += [weakref.ref(e) for e in vars(fresh)["generate"]._assistants._engines.values()]
    assert len(kept) > 10
    del engine
    assert decoders.release(fresh) is fresh
    gc.collect()
    assert not [ref for ref in kept if ref() is not None]
    assert torch.equal(ours(fresh, "int8", strategy="speculative", assistant_model=draft), expected), "it stays enabled"


def test_release_of_a_model_never_used_or_not_enabled_does_nothing(fresh: PreTrainedModel) -> None:
    assert decoders.release(fresh) is fresh
    bare = tiny_model("llama")
    before = set(vars(bare))
    assert decoders.release(bare) is bare and set(vars(bare)) == before


@pytest.mark.parametrize("thing", [None, "model", nn.Linear(2, 2)], ids=repr)
def test_release_of_what_is_no_model_is_an_error(thing: object) -> None:
    with pytest.raises(UnsupportedError, match="transformers model"):
        decoders.release(thing)


def test_release_within_a_call_lets_it_end(fresh: PreTrainedModel) -> None:
    expected = plainly(fresh)
    assert torch.equal(ours(fresh, streamer=Calls(lambda: decoders.release(fresh))), expected)
    assert engine_of(fresh) is None
    assert torch.equal(ours(fresh), expected)


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


def test_calls_under_autocast_decode_in_the_models_own_precision(fresh: PreTrainedModel) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours(fresh), ours(fresh))
        result = ours(fresh)
    decoders.release(fresh)
    assert torch.equal(result, plainly(fresh))


# --- writes that PyTorch does not count -------------------------------------------------------------------------------


@pytest.mark.in_turns
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


def test_writes_are_seen_by_every_engine_that_reads_them(fresh: PreTrainedModel) -> None:
    other = decoders.enable(tiny_model("llama", seed=2))
    options = dict(strategy="speculative", assistant_model=fresh)
    ours(fresh), ours(other, **options)
    fresh.model.layers[0].mlp.up_proj.weight.data.neg_()
    assert torch.equal(ours(fresh), plainly(fresh))
    out = ours(other, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, plainly(other))
    engines = vars(other)["generate"]._assistants._engines
    assert WeightState.of(fresh) == engines[fresh].target.weights


# --- warmup -----------------------------------------------------------------------------------------------------------


def test_warmup_makes_ready_and_runs_every_strategy(fresh: PreTrainedModel) -> None:
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


def test_a_model_that_is_never_compiled_is_warmed_up_uncompiled() -> None:
    model = tiny_model("lfm2")
    done = decoders.warmup(model, strategies=["autoregressive"])
    assert done.pack_seconds > 0 and done.compilations == 0 and [part.strategy for part in done.parts]


def test_mistakes_in_warmup_are_errors(fresh: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedError, match="assistant_model"):
        decoders.warmup(fresh, strategies=["speculative"])
    with pytest.raises(SettingsError, match="rows"):
        decoders.warmup(fresh, rows=(0,))
    for wrong in (
        dict(rows=1),
        dict(rows=["1"]),
        dict(strategies="suffix"),
        dict(strategies=[]),
        dict(strategy="suffix"),
    ):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            decoders.warmup(fresh, **wrong)
    for wrong in (dict(rows=1), dict(contexts=64), dict(seconds="3"), dict(seconds=0), dict(strategy="suffix")):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            decoders.calibrate(fresh, **wrong)
    with pytest.raises(decoders.DecodersError, match="autoregressive"):
        decoders.warmup(fresh, strategies=["autoregresive"])
    with pytest.raises(UnsupportedError, match="transformers model"):
        decoders.warmup(nn.Linear(2, 2))
