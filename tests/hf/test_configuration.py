"""A strategy may be named in the call, a generation config, the environment or a file; pipelines carry it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, pipeline

import decoders
from decoders.errors import SettingsError, UnknownNameError
from decoders.report import Report
from decoders.strategies import Autoregressive, PromptLookup
from decoders.testing import decode, prompts, tiny_model

EAGER = dict(decoders_config={"compile": False})
GREEDY = dict(do_sample=False, max_new_tokens=8, pad_token_id=0, return_dict_in_generate=True)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and eager decoding by environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DECODERS_COMPILE", "0")
    return tmp_path


def report(model: PreTrainedModel, config: GenerationConfig | None = None, **options: Any) -> Report:
    given = {"generation_config": config} if config is not None else GREEDY
    return model.generate(**prompts(), **given, **options).report


def test_a_strategy_may_be_a_name_a_class_or_an_object(llama: PreTrainedModel) -> None:
    for strategy in ("prompt_lookup", "prompt-lookup", PromptLookup, PromptLookup()):
        assert report(llama, strategy=strategy).strategy == "prompt_lookup"
    assert report(llama, strategy="prompt_lookup", strategy_config={"length": 3}).settings["length"] == 3
    assert report(llama, strategy=PromptLookup, strategy_config={"length": 3}).settings["length"] == 3
    assert report(llama, strategy=PromptLookup(length=3)).settings["length"] == 3


def test_a_generation_config_in_the_call_names_the_strategy(llama: PreTrainedModel) -> None:
    config = GenerationConfig(**GREEDY, strategy="prompt_lookup", strategy_config={"length": 3})
    out = llama.generate(**prompts(), generation_config=config)
    assert (out.report.strategy, out.report.settings["length"]) == ("prompt_lookup", 3)
    assert torch.equal(out.sequences, decode(llama, prompts(), max_new_tokens=8).sequences)


def test_a_generation_config_survives_disk_and_json(llama: PreTrainedModel, tmp_path: Path) -> None:
    config = GenerationConfig(**GREEDY, strategy="prompt_lookup", strategy_config={"length": 3, "branches": 2})
    config.save_pretrained(tmp_path)
    for again in (
        GenerationConfig.from_pretrained(tmp_path), GenerationConfig.from_dict(json.loads(config.to_json_string())),
        copy.deepcopy(config),
    ):  # fmt: skip
        assert report(llama, again).settings == report(llama, config).settings
        assert report(llama, again).settings["branches"] == 2


def test_the_models_own_generation_config_is_saved_with_it(fresh: PreTrainedModel, tmp_path: Path) -> None:
    # A new object: transformers drops custom entries of a config that it derived from the model's.
    fresh.generation_config = GenerationConfig(pad_token_id=0, strategy="prompt_lookup", strategy_config={"length": 5})
    assert report(fresh).settings["length"] == 5
    fresh.save_pretrained(tmp_path)
    bare = AutoModelForCausalLM.from_pretrained(tmp_path)
    plain = decode(bare, prompts(), max_new_tokens=8)
    assert not hasattr(plain, "report"), "a model that is not enabled ignores it"
    out = decode(decoders.enable(bare), prompts(), max_new_tokens=8)
    assert out.report.settings["length"] == 5 and torch.equal(out.sequences, plain.sequences)


def test_the_models_config_fills_the_gaps_of_one_given_in_the_call(fresh: PreTrainedModel) -> None:
    """As transformers does with every other entry."""
    fresh.generation_config.strategy = "prompt_lookup"
    fresh.generation_config.strategy_config = {"length": 5}
    assert report(fresh, GenerationConfig(**GREEDY)).settings["length"] == 5
    assert (
        report(fresh, GenerationConfig(**GREEDY, strategy="autoregressive", strategy_config={})).strategy
        == "autoregressive"
    )


def test_call_before_generation_config_before_environment_before_file_before_default(
    fresh: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    def length(**options: Any) -> int:
        return report(fresh, strategy="prompt_lookup", **options).settings["length"]

    assert length() == PromptLookup().settings.length
    (elsewhere / "decoders.toml").write_text("[prompt_lookup]\nlength = 3\nbranches = 2\n")
    assert length() == 3
    monkeypatch.setenv("DECODERS_PROMPT_LOOKUP_LENGTH", "4")
    assert length() == 4
    fresh.generation_config.strategy_config = {"length": 5}
    assert length() == 5
    assert length(strategy_config={"length": 6}) == 6
    settings = report(fresh, strategy="prompt_lookup", strategy_config={"length": 6}).settings
    assert settings["branches"] == 2, "each setting is found on its own"


def test_the_strategy_itself_follows_the_same_order(
    fresh: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    assert not hasattr(fresh.generate(**prompts(), **GREEDY), "report"), "transformers' own by default"
    (elsewhere / "decoders.toml").write_text('strategy = "autoregressive"\n')
    assert report(fresh).strategy == "autoregressive"
    monkeypatch.setenv("DECODERS_STRATEGY", "prompt_lookup")
    assert report(fresh).strategy == "prompt_lookup"
    fresh.generation_config.strategy = "autoregressive"
    assert report(fresh).strategy == "autoregressive"
    assert report(fresh, strategy="prompt_lookup+autoregressive").strategy == "prompt_lookup+autoregressive"
    assert report(fresh, strategy=PromptLookup).strategy == "prompt_lookup"


def test_enable_takes_defaults_of_calls(monkeypatch: pytest.MonkeyPatch, elsewhere: Path) -> None:
    """They count before environment and file, and behind the call and a generation config."""
    monkeypatch.setenv("DECODERS_STRATEGY", "lookahead")
    monkeypatch.setenv("DECODERS_PROMPT_LOOKUP_LENGTH", "5")
    model = decoders.enable(tiny_model("llama"), strategy="prompt-lookup", strategy_config={"length": 3}, trace=True)
    plain = report(model)
    assert (plain.strategy, plain.settings["length"]) == ("prompt_lookup", 3)
    assert plain.tree(0) is not None
    assert report(model, strategy="prompt_lookup", strategy_config={"length": 2}).settings["length"] == 2
    own = report(model, strategy="prompt_lookup", strategy_config={"branches": 2}).settings
    assert (own["length"], own["branches"]) == (3, 2)
    assert report(model, strategy="autoregressive").strategy == "autoregressive"
    config = GenerationConfig(**GREEDY, strategy="prompt_lookup", strategy_config={"length": 4})
    assert report(model, config).settings["length"] == 4
    untraced = report(model, decoders_config={"trace": False})
    assert untraced.written is not None and not any(untraced.written.steps)
    assert report(decoders.enable(model)).settings["length"] == 3, "without defaults enable() leaves them"
    assert report(copy.deepcopy(model)).settings["length"] == 3
    decoders.enable(model, strategy=PromptLookup(length=6))
    assert report(model).settings["length"] == 6
    assert report(decoders.enable(decoders.disable(model), strategy="prompt_lookup")).settings["length"] == 5


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"strategy": "prompt_lokup"}, "Did you mean 'prompt_lookup'"),
        ({"strategy": "prompt_lookup", "strategy_config": {"lenght": 3}}, "Did you mean 'length'"),
        ({"compil": False}, r"unknown setting 'compil' given to enable\(\). Did you mean 'compile'"),
        ({"strategy_config": {"length": 3}}, "give enable"),
    ],
)
def test_a_default_that_no_call_could_use_is_an_error_at_once(defaults: dict[str, Any], message: str) -> None:
    model = tiny_model("llama")
    with pytest.raises((SettingsError, UnknownNameError), match=message):
        decoders.enable(model, **defaults)
    assert "generate" not in vars(model)


def test_settings_of_the_config_belong_to_the_strategy_named_there(fresh: PreTrainedModel) -> None:
    """Another strategy in the call does not get them."""
    fresh.generation_config.strategy = "prompt_lookup"
    fresh.generation_config.strategy_config = {"length": 5}
    for other in ("autoregressive", Autoregressive, Autoregressive(), "autoregressive+prompt_lookup"):
        assert report(fresh, strategy=other).strategy.startswith("autoregressive")
    assert report(fresh, strategy=PromptLookup).settings["length"] == 5


def test_a_wrong_name_or_setting_says_where_it_stands(
    fresh: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    fresh.generation_config.strategy = "promt_lookup"
    with pytest.raises(UnknownNameError, match="prompt_lookup"):
        report(fresh)
    fresh.generation_config.strategy = "prompt_lookup"
    fresh.generation_config.strategy_config = {"lenth": 3}
    with pytest.raises(SettingsError, match="'lenth' in the generation config.*'length'"):
        report(fresh)
    fresh.generation_config.strategy_config = None
    monkeypatch.setenv("DECODERS_PROMPT_LOOKUP_LENGTH", "many")
    with pytest.raises(SettingsError, match="DECODERS_PROMPT_LOOKUP_LENGTH"):
        report(fresh)


@pytest.mark.parametrize(
    "wrong", [dict(strategy=7), dict(strategy={"a": 1}), dict(strategy="prompt_lookup", strategy_config=3)]
)
def test_a_strategy_of_the_wrong_type_in_a_config_is_an_error(llama: PreTrainedModel, wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="strategy"):
        report(llama, GenerationConfig(**GREEDY, **wrong))


def test_settings_without_a_strategy_in_a_config_are_an_error(llama: PreTrainedModel) -> None:
    with pytest.raises(SettingsError, match="strategy_config needs a strategy"):
        report(llama, GenerationConfig(**GREEDY, strategy_config={"length": 3}))


def test_settings_of_merged_strategies(llama: PreTrainedModel) -> None:
    own = {"prompt_lookup": {"length": 3}}
    assert report(llama, strategy="prompt_lookup+autoregressive", strategy_config=own).nodes == 4
    config = GenerationConfig(**GREEDY, strategy="prompt_lookup + autoregressive", strategy_config=own)
    assert report(llama, config).nodes == 4


def test_nothing_that_the_user_passed_is_changed(llama: PreTrainedModel) -> None:
    config = GenerationConfig(
        **GREEDY, strategy="prompt_lookup", strategy_config={"length": 3}, cache_implementation="static"
    )
    before, settings, inputs = copy.deepcopy(config), {"length": 4}, prompts(2)
    kept = {name: tensor.clone() for name, tensor in inputs.items()}
    llama.generate(**inputs, generation_config=config, strategy_config=settings)
    assert config == before and settings == {"length": 4}
    assert all(torch.equal(inputs[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize("where", ["call", "construction", "generation config"])
def test_a_pipeline_carries_the_strategy(letters: PreTrainedTokenizerFast, where: str) -> None:
    bare, model = tiny_model("llama"), decoders.enable(tiny_model("llama"))
    used: list[str] = []

    class Noted(PromptLookup):
        def propose(self, state: Any, sequences: Any) -> Any:
            used.append("propose")
            return super().propose(state, sequences)

    options = dict(do_sample=False, max_new_tokens=12)
    expected = pipeline("text-generation", model=bare, tokenizer=letters)("hello there", **options)
    at_call = dict(strategy=Noted(length=3)) if where == "call" else {}
    at_construction = dict(strategy=Noted(length=3)) if where == "construction" else {}
    if where == "generation config":
        model.generation_config.strategy, model.generation_config.strategy_config = "prompt_lookup", {"length": 3}
    pipe = pipeline("text-generation", model=model, tokenizer=letters, **at_construction)
    assert pipe("hello there", **options, **at_call) == expected
    assert bool(used) == (where != "generation config")
    batch = pipe(["hello there", "hi"], batch_size=2, **options, **at_call)
    assert batch[0] == expected
    if where == "generation config":
        model.generation_config.strategy = "no such strategy"
        with pytest.raises(UnknownNameError):
            pipeline("text-generation", model=model, tokenizer=letters)("hello there", **options)


def test_a_pipeline_samples_several_texts(letters: PreTrainedTokenizerFast) -> None:
    pipe = pipeline("text-generation", model=decoders.enable(tiny_model("llama")), tokenizer=letters)
    options = dict(do_sample=True, max_new_tokens=12, num_return_sequences=3, seed=4)
    first, again = (pipe("hello there", strategy=s, **options) for s in ("prompt_lookup", "autoregressive"))
    assert first == again and len({text["generated_text"] for text in first}) == 3
