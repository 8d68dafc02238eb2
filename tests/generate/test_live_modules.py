"""What is changed in a model between calls counts in the next one, wherever the model keeps it."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.models.llama import modeling_llama as llama_file

import decoders
from decoders.engine.model.weights.state import WeightState
from decoders.engine.model.weights.twin import share_weights
from decoders.testing import prompts, tiny_model

NEW = 12


class Slotted:
    """Keeps its value in a slot."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


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
        self.space, self.slotted, self.array = types.SimpleNamespace(factor=1.0), Slotted(), np.ones(3)
        self.queue, self.bytes, self.names = deque([1.0]), bytearray([1]), {"up"}

    def forward(self, x: Tensor) -> Tensor:
        factor = self.nested["by"]["name"][1] * self.listed[0] * self.helper.factor * self.plain
        factor *= self.space.factor * self.slotted.factor * float(self.array[1]) * self.queue[0] * self.bytes[0]
        factor *= -1 if "down" in self.names else 1
        return self.inner(x) * factor * self.loose


def nested(module: Scaled) -> None:
    module.nested["by"]["name"][1] = 3.0


def listed(module: Scaled) -> None:
    module.listed[0] = -2.0


def helper(module: Scaled) -> None:
    module.helper.factor = 0.2


def another_helper(module: Scaled) -> None:
    module.helper = Helper()
    module.helper.factor = -1.0


def loose(module: Scaled) -> None:
    module.loose.mul_(-1)


def another_loose(module: Scaled) -> None:
    module.loose = torch.full((1,), 4.0)


def loose_data(module: Scaled) -> None:
    module.loose.data.fill_(-3)


def plain(module: Scaled) -> None:
    module.plain = 2.5


def space(module: Scaled) -> None:
    module.space.factor = -1.5


def slotted(module: Scaled) -> None:
    module.slotted.factor = -1.5


def array(module: Scaled) -> None:
    module.array[1] = -2


def queue(module: Scaled) -> None:
    module.queue[0] = -0.5


def a_byte(module: Scaled) -> None:
    module.bytes[0] = 4


def names(module: Scaled) -> None:
    module.names.add("down")


def closure(module: Scaled) -> None:
    before = module.forward
    module.forward = lambda x: before(x) * -1.5  # type: ignore[method-assign]


def method(module: Scaled) -> None:
    module.forward = types.MethodType(lambda self, x: self.inner(x) * -0.5, module)  # type: ignore[method-assign]


def partial(module: Scaled) -> None:
    def forward(self: Scaled, by: float, x: Tensor) -> Tensor:
        return self.inner(x) * by

    module.forward = functools.partial(forward, module, -2.0)  # type: ignore[method-assign]


CHANGES = [
    nested, listed, helper, another_helper, loose, another_loose, loose_data, plain, space, slotted, array, queue, a_byte, names,
    closure, method, partial,
]  # fmt: skip


def scaled_model() -> PreTrainedModel:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp = Scaled(layer.mlp)
    return model


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_change_counts_in_the_next_call(change: Callable[[Any], None], strategy: str) -> None:
    model = decoders.enable(scaled_model())
    options = dict(do_sample=False, max_new_tokens=NEW)
    ours = dict(strategy=strategy, decoders_config={"compile": False}, **options)
    first = model.generate(**prompts(2), **ours)
    assert torch.equal(first, model.generate(**prompts(2), **options))
    for layer in model.model.layers:
        change(layer.mlp)
    expected = model.generate(**prompts(2), **options)
    assert not torch.equal(expected, first), "the change must matter"
    assert torch.equal(model.generate(**prompts(2), **ours), expected)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_change_counts_in_the_next_compiled_call(change: Callable[[Any], None]) -> None:
    model = decoders.enable(scaled_model())
    options = dict(do_sample=False, max_new_tokens=NEW)
    ours = dict(strategy="prompt_lookup", decoders_config={"compile": True}, **options)
    assert torch.equal(model.generate(**prompts(), **ours), model.generate(**prompts(), **options))
    for layer in model.model.layers:
        change(layer.mlp)
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
        ("mistral", "sliding_window", None),
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
    assert not WeightState.of(model).replaces(before)


def test_defaults_of_generate_and_names_in_the_config_are_no_change() -> None:
    model = tiny_model("llama")
    before = WeightState.of(model)
    model.config.pad_token_id, model.config.use_cache, model.config.architectures = 5, False, ["Other"]
    assert WeightState.of(model) == before


def hooked_everywhere(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    def larger(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 1.1 if isinstance(module, nn.Linear) else None

    return nn.modules.module.register_module_forward_hook(larger).remove


def hooked_everywhere_before(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    def larger(module: nn.Module, args: Any) -> Any:
        return (args[0] * 1.1,) if isinstance(module, nn.Linear) else None

    return nn.modules.module.register_module_forward_pre_hook(larger).remove


def patched_class(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    kind = type(model.model.layers[0].mlp)
    before = kind.forward
    patch.setattr(kind, "forward", lambda self, x: before(self, x) * -1)
    return patch.undo


def patched_function(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(llama_file, "apply_rotary_pos_emb", lambda q, k, *args, **kwargs: (q, k))
    return patch.undo


def patched_function_of_a_function(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    patch.setattr(llama_file, "rotate_half", lambda x: x)
    return patch.undo


@pytest.mark.parametrize(
    "change",
    [hooked_everywhere, hooked_everywhere_before, patched_class, patched_function, patched_function_of_a_function],
    ids=lambda c: c.__name__,
)
def test_a_hook_or_patch_for_all_models_counts_until_it_is_taken_back(
    change: Callable[..., Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = settled("llama")
    first = ours(model)
    undo = change(model, monkeypatch)
    try:
        expected = plain_tokens(model)
        assert not torch.equal(expected, first), "the change must matter"
        assert torch.equal(ours(model), expected)
    finally:
        undo()
    assert torch.equal(ours(model), first)


STRENGTH = 0.0


class Steers:
    """A hook that adds a vector."""

    def __init__(self) -> None:
        self.strength, self.vector = 0.0, torch.zeros(32)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output + self.strength


def steers_by_an_attribute(layer: nn.Module, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    hook = Steers()
    layer.register_forward_hook(hook)
    return lambda: setattr(hook, "strength", 1.0)


def steers_by_a_closure(layer: nn.Module, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    strength = {"by": 0.0}
    layer.register_forward_hook(lambda module, args, output: output + strength["by"])
    return lambda: strength.update(by=1.0)


def steers_by_a_global(layer: nn.Module, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    layer.register_forward_hook(lambda module, args, output: output + STRENGTH)
    return lambda: patch.setitem(globals(), "STRENGTH", 1.0)


def steers_by_a_tensor(layer: nn.Module, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    vector = torch.zeros(32)
    layer.register_forward_hook(lambda module, args, output: output + vector)
    return lambda: vector.copy_(torch.linspace(-2, 2, 32))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "hook",
    [steers_by_an_attribute, steers_by_a_closure, steers_by_a_global, steers_by_a_tensor],
    ids=lambda hook: hook.__name__,
)
def test_what_a_hook_reads_counts_in_the_next_call(
    hook: Callable[..., Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoders.enable(tiny_model("llama"))
    change = hook(model.model.layers[0].mlp, monkeypatch)
    first = ours(model)
    assert torch.equal(first, plain_tokens(model))
    change()
    expected = plain_tokens(model)
    assert not torch.equal(expected, first), "the change must matter"
    assert torch.equal(ours(model), expected)


FACTOR = 1.0


def factor_of(module: nn.Module, by: float = 1.0) -> float:
    return by


class Named(nn.Module):
    """An MLP that is scaled by values of its class and its file."""

    scale = 1.0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def own(self) -> float:
        return 1.0

    @classmethod
    def of_class(cls) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (self.scale * FACTOR * self.own * self.of_class() * factor_of(self))


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(Named, "scale", -1.0),
        lambda patch: patch.setitem(globals(), "FACTOR", -1.0),
        lambda patch: patch.setattr(Named, "own", property(lambda self: -1.0)),
        lambda patch: patch.setattr(Named, "of_class", classmethod(lambda cls: -1.0)),
        lambda patch: patch.setattr(factor_of, "__defaults__", (-1.0,)),
        lambda patch: patch.setattr(factor_of, "__code__", (lambda module, by=1.0: -1.0).__code__),
    ],
    ids=["class attribute", "global", "property", "classmethod", "defaults", "code"],
)
def test_a_value_of_the_class_or_its_file_counts_in_the_next_call(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp = Named(layer.mlp)
    first = ours(decoders.enable(model))
    change(monkeypatch)
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
