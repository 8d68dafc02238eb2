"""What is changed in a model between calls counts in the next one, wherever the model keeps it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import decoders
from decoders.engine.model.weights.state import WeightState
from decoders.engine.model.weights.twin import share_weights
from decoders.testing import prompts, tiny_model

NEW = 12


class Helper:
    """An object that a module asks for a factor."""

    def __init__(self) -> None:
        self.factor = 1.0


class Scaled(nn.Module):
    """An MLP whose output is scaled by what it keeps in places that are neither parameters nor buffers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.helper = inner, Helper()
        self.nested = {"by": {"name": [1.0, 1.0]}}
        self.listed: list[float] = [1.0, 2.0]
        self.loose = torch.ones(1)
        self.plain = 1.0
        self.names = {"up"}

    def forward(self, x: Tensor) -> Tensor:
        factor = self.nested["by"]["name"][1] * self.listed[0] * self.helper.factor * self.plain
        factor *= -1 if "down" in self.names else 1
        return self.inner(x) * factor * self.loose


def replaces_forward(make: Callable[[Scaled, Callable], Callable]) -> Callable[[Scaled], None]:
    return lambda module: setattr(module, "forward", make(module, module.forward))


CHANGES: dict[str, Callable[[Scaled], Any]] = {
    "nested": lambda module: module.nested["by"]["name"].__setitem__(1, 3.0),
    "listed": lambda module: module.listed.__setitem__(0, -2.0),
    "another_helper": lambda module: (setattr(module, "helper", Helper()), setattr(module.helper, "factor", -1.0)),
    "loose": lambda module: module.loose.mul_(-1),
    "another_loose": lambda module: setattr(module, "loose", torch.full((1,), 4.0)),
    "loose_data": lambda module: module.loose.data.fill_(-3),
    "plain": lambda module: setattr(module, "plain", 2.5),
    "names": lambda module: module.names.add("down"),
    "closure": replaces_forward(lambda module, before: lambda x: before(x) * -1.5),
    "method": replaces_forward(lambda module, _: types.MethodType(lambda self, x: self.inner(x) * -0.5, module)),
    "partial": replaces_forward(
        lambda module, _: functools.partial(lambda self, by, x: self.inner(x) * by, module, -2.0)
    ),
}


def scaled_model() -> PreTrainedModel:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp = Scaled(layer.mlp)
    return model


@pytest.mark.in_turns
@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_counts_in_the_next_call(change: str, strategy: str) -> None:
    model = decoders.enable(scaled_model())
    options = dict(do_sample=False, max_new_tokens=NEW)
    ours = dict(strategy=strategy, decoders_config={"compile": False}, **options)
    first = model.generate(**prompts(2), **ours)
    assert torch.equal(first, model.generate(**prompts(2), **options))
    for layer in model.model.layers:
        CHANGES[change](layer.mlp)
    expected = model.generate(**prompts(2), **options)
    assert not torch.equal(expected, first), "the change must matter"
    assert torch.equal(model.generate(**prompts(2), **ours), expected)


def test_a_function_that_holds_a_helper_that_holds_it_is_copied() -> None:
    around, module = Helper(), nn.Linear(3, 3)
    within = module.forward

    def forward(x: Tensor) -> Tensor:
        return within(x) * around.factor

    vars(around)["again"] = module.forward = forward  # type: ignore[method-assign]
    twin, x = share_weights(module), torch.ones(3)
    twin.weight = nn.Parameter(torch.zeros(3, 3))
    assert torch.equal(twin(x), module.bias) and not torch.equal(module(x), module.bias)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_counts_in_the_next_compiled_call(change: str) -> None:
    model = decoders.enable(scaled_model())
    options = dict(do_sample=False, max_new_tokens=NEW)
    ours = dict(strategy="prompt_lookup", decoders_config={"compile": True}, **options)
    assert torch.equal(model.generate(**prompts(), **ours), model.generate(**prompts(), **options))
    for layer in model.model.layers:
        CHANGES[change](layer.mlp)
    expected = model.generate(**prompts(), **options)
    assert torch.equal(model.generate(**prompts(), **ours), expected)


def test_plain_generate_in_between_changes_nothing_that_is_looked_at() -> None:
    model = decoders.enable(tiny_model("llama"))
    before = WeightState.of(model)
    model.generate(**prompts(), do_sample=False, max_new_tokens=3)
    model.generate(**prompts(), do_sample=False, max_new_tokens=3, cache_implementation="static", disable_compile=True)
    model.generation_config.top_k = 7
    model.generate(**prompts(), do_sample=False, max_new_tokens=3, strategy="prompt_lookup")
    assert WeightState.of(model) == before


def test_a_twin_has_modules_and_config_of_its_own_and_shares_the_rest() -> None:
    model = scaled_model()
    model.model.listed_layers = [model.model.layers[0], {"last": model.model.layers[-1]}]
    twin = share_weights(model)
    assert twin.config is not model.config and twin.model.config is twin.config
    mlp, other = twin.model.layers[0].mlp, model.model.layers[0].mlp
    assert mlp is not other and mlp.nested is other.nested and mlp.helper is other.helper and mlp.loose is other.loose
    assert twin.model.listed_layers[0] is twin.model.layers[0]
    assert twin.model.listed_layers[1]["last"] is twin.model.layers[-1]
    assert {id(p) for p in twin.parameters()} == {id(p) for p in model.parameters()}
    ours = {id(module) for module in model.modules()}
    assert not ours & {id(module) for module in twin.modules()}


class Caller:
    """What expert parallelism puts between a module and its forward."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.forward, self.inner = module, module.forward, None

    def __call__(self, x: Tensor) -> Tensor:
        return (self.inner or self).forward(x)  # type: ignore[attr-defined]


def test_a_forward_that_holds_its_module_holds_the_twins_own() -> None:
    """As tensor and expert parallelism exchange it."""
    model = tiny_model("llama")
    mlp, calls = model.model.layers[0].mlp, []

    def exchange(module: nn.Module) -> None:
        caller = Caller(module)
        caller.inner = Caller(module)  # type: ignore[assignment]

        def forward(x: Tensor) -> Tensor:
            calls.append((module, caller.module, caller.inner.module, caller.inner.forward.__self__))  # type: ignore[attr-defined]
            return caller(x)

        module.forward = forward  # type: ignore[method-assign]

    exchange(mlp)
    twin = share_weights(model)
    ids = torch.arange(5)[None]
    assert torch.equal(twin(input_ids=ids).logits, model(input_ids=ids).logits)
    for seen, own in zip(calls, (twin.model.layers[0].mlp, mlp), strict=True):
        assert all(module is own for module in seen)


def settled(name: str, **options: Any) -> PreTrainedModel:
    """An enabled model that has decoded, and will find its texts in the cache."""
    model = decoders.enable(tiny_model(name, **options))
    ours(model)
    return model


def ours(model: PreTrainedModel, **options: Any) -> Any:
    options = dict(decoders_config={"compile": False}) | options
    return model.generate(**prompts(), strategy="prompt_lookup", do_sample=False, max_new_tokens=NEW, **options)


def plain_tokens(model: PreTrainedModel, **options: Any) -> Any:
    return model.generate(**prompts(), do_sample=False, max_new_tokens=NEW, **options)


@pytest.mark.parametrize(
    ("name", "entry", "value"),
    [
        ("llama", "num_hidden_layers", 1),
        ("mistral", "sliding_window", 3),
        pytest.param("mistral", "sliding_window", None, marks=pytest.mark.slow),
        ("qwen2", "layer_types", ["full_attention"] * 2),
        ("llama4", "attention_chunk_size", 4),
    ],
)
def test_a_value_of_the_config_counts_in_the_next_call(name: str, entry: str, value: Any) -> None:
    model = settled(name)
    first, before = plain_tokens(model), getattr(model.config, entry)
    setattr(model.config, entry, value)
    expected = plain_tokens(model)
    assert not torch.equal(expected, first), "the change must matter"
    assert torch.equal(ours(model), expected)
    setattr(model.config, entry, before)
    assert torch.equal(ours(model), first)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_only")
def test_a_value_of_the_config_counts_in_the_next_compiled_call() -> None:
    model = decoders.enable(tiny_model("mistral"))
    compiled = dict(decoders_config={"compile": True})
    first = ours(model, **compiled)
    model.config.sliding_window = 3
    expected = plain_tokens(model)
    assert not torch.equal(expected, first)
    assert torch.equal(ours(model, **compiled), expected)


@pytest.mark.parametrize(
    ("name", "entry", "value"), [("gemma2", "final_logit_softcapping", 1.0), ("granite", "logits_scaling", 5.0)]
)
def test_what_a_config_does_to_logits_counts_in_the_next_call(name: str, entry: str, value: float) -> None:
    model = settled(name)
    setattr(model.config, entry, value)
    given = dict(return_dict_in_generate=True, output_logits=True)
    torch.testing.assert_close(
        ours(model, **given).logits[0], plain_tokens(model, **given).logits[0], atol=1e-4, rtol=1e-4
    )


def test_entries_of_a_list_in_the_config_count() -> None:
    model = settled("qwen2")
    before = WeightState.of(model)
    model.config.layer_types[1] = "full_attention"
    assert WeightState.of(model).modules != before.modules


def test_defaults_of_generate_and_names_in_the_config_are_no_change() -> None:
    model = tiny_model("llama")
    before = WeightState.of(model)
    model.config.pad_token_id, model.config.use_cache, model.config.architectures = 5, False, ["Other"]
    assert WeightState.of(model) == before


def enlarged(module: nn.Module, tensor: Any) -> Any:
    return tensor * 1.1 if isinstance(module, nn.Linear) else None


def negates_mlps(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> None:
    kind = type(model.model.layers[0].mlp)
    before = kind.forward
    patch.setattr(kind, "forward", lambda self, x: before(self, x) * -1)


FOR_ALL_MODELS: dict[str, Callable[[PreTrainedModel, pytest.MonkeyPatch], Any]] = {
    "hook": lambda model, patch: nn.modules.module.register_module_forward_hook(
        lambda module, args, output: enlarged(module, output)
    ),
    "hook before": lambda model, patch: nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: enlarged(module, args and args[0])
    ),
    "class": negates_mlps,
}


@pytest.mark.parametrize("change", FOR_ALL_MODELS)
def test_a_hook_or_patch_for_all_models_counts_until_it_is_taken_back(change: str) -> None:
    model = settled("llama")
    first = ours(model)
    with pytest.MonkeyPatch.context() as patch:
        handle = FOR_ALL_MODELS[change](model, patch)
        try:
            expected = plain_tokens(model)
            assert not torch.equal(expected, first), "the change must matter"
            assert torch.equal(ours(model), expected)
        finally:
            if handle is not None:
                handle.remove()
    assert torch.equal(ours(model), first)


STRENGTH = 0.0


class Steers:
    """A hook that adds what it keeps."""

    strength = 0.0

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output + self.strength


def steering(by: str, patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """A hook, and what changes the value that it reads."""
    steers, closure, vector = Steers(), {"by": 0.0}, torch.zeros(32)
    return {
        "attribute": (steers, lambda: setattr(steers, "strength", 1.0)),
        "closure": (lambda module, args, output: output + closure["by"], lambda: closure.update(by=1.0)),
        "global": (lambda module, args, output: output + STRENGTH, lambda: patch.setitem(globals(), "STRENGTH", 1.0)),
        "tensor": (lambda module, args, output: output + vector, lambda: vector.copy_(torch.linspace(-2, 2, 32))),
    }[by]


@pytest.mark.parametrize("by", ["attribute", "closure", "global", "tensor"])
def test_what_a_hook_reads_counts_in_the_next_call(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoders.enable(tiny_model("llama"))
    hook, change = steering(by, monkeypatch)
    model.model.layers[0].mlp.register_forward_hook(hook)
    first = ours(model)
    assert torch.equal(first, plain_tokens(model))
    change()
    expected = plain_tokens(model)
    assert not torch.equal(expected, first), "the change must matter"
    assert torch.equal(ours(model), expected)


def test_a_call_within_a_call_may_change_the_weights() -> None:
    """What the outer call has read, it has read with the weights before."""
    model = decoders.enable(tiny_model("llama"))

    class Changes(BaseStreamer):
        puts = 0

        def put(self, value: Tensor) -> None:
            self.puts += 1
            if self.puts == 3:
                with torch.no_grad():
                    model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
                ours(model)

        def end(self) -> None: ...

    loop = {"compile": False}
    one = {name: value[-1:] for name, value in prompts(2).items()}
    model.generate(
        **one, strategy="autoregressive", max_new_tokens=6, do_sample=False, streamer=Changes(), decoders_config=loop
    )
    options = dict(max_new_tokens=NEW, do_sample=False)
    out = model.generate(**one, strategy="autoregressive", decoders_config=loop, **options)
    assert torch.equal(out, type(model).generate(model, **one, **options))


class Reread(nn.Module):
    """An embedding, or a head, that tells nothing of its size."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_embeddings_and_heads_that_tell_no_size_work() -> None:
    model = settled("llama")
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    keep = nn.ParameterList([embedding, head])
    model.set_input_embeddings(Reread(lambda ids: nn.functional.embedding(ids, keep[0])))
    model.lm_head = Reread(lambda x: nn.functional.linear(x, keep[1]) * 2)
    assert torch.equal(ours(model), plain_tokens(model))


@pytest.mark.parametrize(
    "given",
    [dict(target_modules=["embed_tokens", "q_proj"]), dict(target_modules=["q_proj"], trainable_token_indices=[5, 6])],
    ids=["lora", "tokens"],
)
# transformers and peft disagree about a deprecated name.
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_embeddings_work(given: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    model = decoders.enable(
        peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=4, init_lora_weights=False, **given)).eval()
    )
    assert torch.equal(ours(model), plain_tokens(model))
