"""Enabling a model, taking it back, copying it, saving it, changing its weights, sharing it between threads."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import decoders
from decoders.errors import SettingsError
from decoders.testing import assert_same_tokens, decode, prompts, tiny_model

EAGER = dict(decoders_config={"compile": False})
INPUTS = prompts()
BATCH = prompts(3)


def plainly(model: PreTrainedModel, inputs: dict = INPUTS, new: int = 24) -> Tensor:
    """transformers' own greedy output, by the class's method: whatever hangs on the instance is not asked."""
    return type(model).generate(model, **inputs, do_sample=False, max_new_tokens=new)


def with_strategy(model: PreTrainedModel, inputs: dict = INPUTS, new: int = 24, **options: object) -> Tensor:
    options = {"strategy": "prompt_lookup"} | EAGER | options
    return model.generate(**inputs, do_sample=False, max_new_tokens=new, **options)


def test_enable_gives_the_same_object_back_and_is_idempotent() -> None:
    model = tiny_model("llama")
    assert decoders.enable(model) is model
    first = vars(model)["generate"]
    assert decoders.enable(model) is model
    assert vars(model)["generate"] is first


def test_disable_leaves_no_trace_and_is_idempotent() -> None:
    model = tiny_model("llama")
    before, config = set(vars(model)), model.config.to_dict()
    decoders.enable(model)
    with_strategy(model)
    assert decoders.disable(model) is model
    assert decoders.disable(model) is model
    assert set(vars(model)) == before and model.config.to_dict() == config
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ValueError, match="strategy"):
        model.generate(**INPUTS, strategy="prompt_lookup", max_new_tokens=2)


def test_a_generate_that_hung_on_the_instance_is_called_and_restored() -> None:
    model = tiny_model("llama")
    calls = []

    def repository_generate(*args: object, model: PreTrainedModel, **kwargs: object) -> Tensor:
        calls.append(kwargs)
        return type(model).generate(model, *args, **kwargs)

    own = model.generate = functools.partial(repository_generate, model=model)  # as trust_remote_code sets it
    decoders.enable(model)
    assert torch.equal(model.generate(**INPUTS, max_new_tokens=4, do_sample=False), plainly(model, new=4))
    assert len(calls) == 1
    assert torch.equal(with_strategy(model), plainly(model))
    assert len(calls) == 1, "a strategy runs our loop"
    assert decoders.disable(model).generate is own


def test_a_function_that_was_set_over_generate_later_stays_and_nothing_else_does() -> None:
    model = tiny_model("llama")
    before = set(vars(model))
    own = model.generate = functools.partial(decoders.enable(model).generate, do_sample=False)
    model.generate(**INPUTS, strategy="suffix", max_new_tokens=4, **EAGER)
    assert decoders.memories(model)
    decoders.release(model)
    assert not decoders.memories(model)
    assert decoders.disable(model).generate is own
    assert set(vars(model)) - before == {"generate"}


def test_plain_generate_is_untouched(fresh: PreTrainedModel) -> None:
    bare = tiny_model("llama")
    for options in (
        dict(do_sample=False), dict(num_beams=2), dict(do_sample=False, return_dict_in_generate=True, output_scores=True),
        dict(do_sample=False, use_cache=False), dict(prompt_lookup_num_tokens=3, do_sample=False),
    ):  # fmt: skip
        expected = bare.generate(**INPUTS, max_new_tokens=6, **options)
        actual = fresh.generate(**INPUTS, max_new_tokens=6, **options)
        assert type(actual) is type(expected)
        if isinstance(expected, Tensor):
            assert torch.equal(actual, expected)
        else:
            assert torch.equal(actual.sequences, expected.sequences)
            assert all(torch.equal(a, b) for a, b in zip(actual.scores, expected.scores, strict=True))
    torch.manual_seed(3)
    expected = bare.generate(INPUTS["input_ids"], do_sample=True, max_new_tokens=6)
    torch.manual_seed(3)
    assert torch.equal(fresh.generate(INPUTS["input_ids"], do_sample=True, max_new_tokens=6), expected)


def test_arguments_may_be_positional(fresh: PreTrainedModel) -> None:
    config = copy.deepcopy(fresh.generation_config)
    config.max_new_tokens, config.do_sample = 9, False
    expected = plainly(fresh, new=9)
    assert torch.equal(fresh.generate(INPUTS["input_ids"], config), expected)
    assert torch.equal(fresh.generate(INPUTS["input_ids"], config, strategy="prompt_lookup", **EAGER), expected)
    assert torch.equal(
        fresh.generate(inputs=INPUTS["input_ids"], generation_config=config, strategy="prompt_lookup", **EAGER),
        expected,
    )


@pytest.mark.in_turns
@pytest.mark.parametrize("used", [False, True], ids=["unused", "after a call"])
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_is_enabled_and_independent(fresh: PreTrainedModel, copier: Callable, used: bool) -> None:
    if used:
        with_strategy(fresh)
    twin = copier(fresh)
    before = plainly(fresh)
    with torch.no_grad():
        twin.get_output_embeddings().weight.copy_(tiny_model("llama", seed=5).get_output_embeddings().weight)
    assert not torch.equal(plainly(twin), before)
    assert torch.equal(with_strategy(twin), plainly(twin))
    assert torch.equal(with_strategy(fresh), before)
    decoders.disable(twin)
    assert torch.equal(with_strategy(fresh), before), "the original stays enabled"


@pytest.mark.parametrize("used", [pytest.param(False, marks=pytest.mark.slow), True], ids=["unused", "after a call"])
def test_a_shallow_copy_runs_itself_and_is_not_enabled(fresh: PreTrainedModel, used: bool) -> None:
    if used:
        with_strategy(fresh)
    other = copy.copy(fresh)
    other._modules = {**fresh._modules, "lm_head": tiny_model("llama", seed=5).lm_head}
    expected = plainly(fresh)
    assert not torch.equal(plainly(other), expected)
    assert torch.equal(other.generate(**INPUTS, do_sample=False, max_new_tokens=24), plainly(other))
    assert "generate" not in vars(other)
    assert torch.equal(with_strategy(fresh), expected)
    decoders.enable(other)
    assert torch.equal(with_strategy(other), plainly(other))


def test_a_shallow_copy_keeps_a_generate_that_hung_on_the_instance() -> None:
    model = tiny_model("llama")
    own = model.generate = functools.partial(type(model).generate, model)
    assert copy.copy(decoders.enable(model)).generate is own


@pytest.mark.parametrize("strategy", ["prompt_lookup", "token_recycling"])
def test_another_default_device_does_not_matter(fresh: PreTrainedModel, strategy: str) -> None:
    expected = plainly(fresh)
    with torch.device("meta"):
        assert torch.equal(with_strategy(fresh, strategy=strategy), expected)


def test_saving_and_loading_keeps_architecture_and_tokens(fresh: PreTrainedModel, tmp_path: Path) -> None:
    expected = with_strategy(fresh)
    fresh.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(fresh) and loaded.config.architectures == ["LlamaForCausalLM"]
    assert "generate" not in vars(loaded)
    assert torch.equal(with_strategy(decoders.enable(loaded)), expected)


def other_weights(model: PreTrainedModel) -> None:
    model.load_state_dict(tiny_model("llama", seed=9).state_dict())


@torch.no_grad()
def nudged(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.down_proj.weight.add_(0.5)


def replaced(model: PreTrainedModel) -> None:
    weight = tiny_model("llama", seed=4).model.layers[0].self_attn.o_proj.weight
    model.model.layers[0].self_attn.o_proj.weight = torch.nn.Parameter(weight.detach().clone())


def assigned(model: PreTrainedModel) -> None:
    model.lm_head.weight.data = tiny_model("llama", seed=6).lm_head.weight.data.clone()


@pytest.mark.parametrize("change", [other_weights, nudged, replaced, assigned], ids=lambda f: f.__name__)
def test_changed_weights_are_seen_by_the_next_call(fresh: PreTrainedModel, change: Callable) -> None:
    before = with_strategy(fresh)
    change(fresh)
    after = with_strategy(fresh)
    assert not torch.equal(after, before)
    assert torch.equal(after, plainly(fresh))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_cast_between_calls_works(fresh: PreTrainedModel, dtype: torch.dtype) -> None:
    expected = with_strategy(fresh)
    fresh.to(dtype)
    assert with_strategy(fresh).shape == expected.shape
    if dtype is torch.float64:
        assert_same_tokens(fresh, INPUTS, plainly(fresh), with_strategy(fresh), "float64")
    fresh.float()
    assert torch.equal(with_strategy(fresh), plainly(fresh))


def test_resized_embeddings_are_seen_by_the_next_call(fresh: PreTrainedModel) -> None:
    with_strategy(fresh)
    fresh.resize_token_embeddings(140, mean_resizing=False)
    assert torch.equal(with_strategy(fresh), plainly(fresh))


def test_a_model_left_in_training_mode_decodes_as_in_evaluation() -> None:
    model = decoders.enable(tiny_model("gpt2"))
    expected = with_strategy(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    again = decoders.enable(copy.deepcopy(model)).train()
    assert torch.equal(with_strategy(again), expected)
    assert again.training, "and is left in training mode"


def _never(graph: Any, inputs: Any) -> Any:
    raise AssertionError("the loop runs what the user has compiled")


@pytest.mark.parametrize(
    "compiled",
    [
        lambda model: setattr(model, "forward", torch.compile(model.forward, backend=_never)),
        lambda model: model.compile(backend=_never),
        lambda model: model.model.layers[0].compile(backend=_never),
        lambda model: model.model.layers.__setitem__(0, torch.compile(model.model.layers[0], backend=_never)),
    ],
    ids=["forward", "model", "layer", "module"],
)
def test_a_model_that_the_user_has_compiled_is_decoded_as_it_was_before(
    fresh: PreTrainedModel, compiled: Callable
) -> None:
    expected = plainly(fresh)
    compiled(fresh)
    assert torch.equal(with_strategy(fresh), expected)


def test_calls_under_inference_mode_and_gradients_work(fresh: PreTrainedModel) -> None:
    expected = plainly(fresh)
    with torch.inference_mode():
        assert torch.equal(with_strategy(fresh), expected)
    with torch.enable_grad():
        result = with_strategy(fresh)
    assert torch.equal(result, expected) and not result.requires_grad
    assert all(p.requires_grad and p.grad is None for p in fresh.parameters())


def test_an_argument_given_twice_or_too_many_are_errors(fresh: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="inputs"):
        fresh.generate(INPUTS["input_ids"], inputs=INPUTS["input_ids"], max_new_tokens=2)
    with pytest.raises(TypeError, match="inputs"):
        fresh.generate(
            INPUTS["input_ids"], inputs=INPUTS["input_ids"], max_new_tokens=2, strategy="prompt_lookup", **EAGER
        )
    with pytest.raises(TypeError, match="argument"):
        fresh.generate(*[None] * 20, strategy="prompt_lookup", **EAGER)


def test_a_hook_that_steers_the_model_counts_from_the_next_call_until_it_is_removed(fresh: PreTrainedModel) -> None:
    before = with_strategy(fresh)
    handle = fresh.model.layers[0].register_forward_hook(lambda module, args, output: output + 0.7)
    steered = with_strategy(fresh)
    assert torch.equal(steered, plainly(fresh)) and not torch.equal(steered, before)
    handle.remove()
    assert torch.equal(with_strategy(fresh), before)


class Adapter(torch.nn.Module):
    """What adapter libraries put around a linear layer: weights of its own, a switch, and the names of those in use."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.inner, self.enabled, self.active = inner, True, ["first"]
        self.delta = torch.nn.Linear(inner.in_features, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 2 * self.delta(x) if self.enabled and "first" in self.active else self.inner(x)


def test_an_adapter_counts_from_the_next_call_until_it_is_switched_off(fresh: PreTrainedModel) -> None:
    before = with_strategy(fresh)
    mlp = fresh.model.layers[0].mlp
    mlp.down_proj = Adapter(mlp.down_proj)
    adapted = with_strategy(fresh)
    assert torch.equal(adapted, plainly(fresh)) and not torch.equal(adapted, before)
    mlp.down_proj.enabled = False
    assert torch.equal(with_strategy(fresh), before)
    mlp.down_proj.enabled = True
    assert torch.equal(with_strategy(fresh), adapted)
    mlp.down_proj.active = ["second"]
    assert torch.equal(with_strategy(fresh), before)


def in_threads(*jobs: Callable[[], None]) -> None:
    """Runs the jobs side by side and raises what any of them raised."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_two_threads_may_use_strategies_at_once(fresh: PreTrainedModel) -> None:
    expected, batch = plainly(fresh), plainly(fresh, BATCH)

    def single() -> None:
        for _ in range(3):
            assert torch.equal(with_strategy(fresh), expected)

    def several() -> None:
        for _ in range(3):
            assert torch.equal(with_strategy(fresh, BATCH), batch)

    in_threads(single, several, single)


def test_output_object_without_and_with_strategy(llama: PreTrainedModel) -> None:
    plain, ours = (
        decode(llama, INPUTS, max_new_tokens=4),
        decode(llama, INPUTS, "prompt_lookup", max_new_tokens=4, **EAGER),
    )
    assert isinstance(ours, type(plain)) and isinstance(ours, decoders.DecodersOutput)
    assert torch.equal(ours["sequences"], plain["sequences"]) and ours[0] is ours.sequences


@pytest.mark.parametrize(
    "function, keyword, near",
    [
        (decoders.remember, "text", "texts"),
        (decoders.advise, "second", "seconds"),
        (decoders.disable, "mdel", "model"),
        (decoders.forget, "modle", "model"),
        (decoders.json_schema, "indnt", "indent"),
        (decoders.regex, "backnd", "backend"),
        (decoders.grammar, "polcy", "policy"),
        (decoders.choice, "polcy", "policy"),
        (decoders.after, "gramar", "grammar"),
        (decoders.tagged, "requird", "required"),
    ],
)
def test_a_misspelt_keyword_of_a_public_function_gets_the_nearest_one(function: Any, keyword: str, near: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"{function.__name__}\(\) has no argument {keyword}=. Did you mean '{near}'\?"
    ):
        function(None, **{keyword: 1})
