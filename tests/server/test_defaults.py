"""What a checkpoint's own generation config says is settled when a server starts: no request fails for it."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders.enabling import OwnDefaults
from decoders.hf.arguments import HINTS, REFUSED

from .conftest import EAGER

#: What the loop refuses, and a generation config can hold.
UNFIT: dict[str, Any] = {
    "use_cache": False, "num_beams": 4, "penalty_alpha": 0.6, "dola_layers": "low", "guidance_scale": 2.0, "output_attentions": True,
    "output_hidden_states": True, "cache_implementation": "quantized", "cache_config": {"nbits": 4}, "max_cache_len": 64,
    "token_healing": True, "low_memory": True, "num_return_sequences": 3, "is_assistant": True, "do_sample": True, "temperature": 0.0,
}  # fmt: skip
DRAFTING: dict[str, Any] = {
    "num_assistant_tokens": 7, "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.3,
    "assistant_early_exit": 1, "prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2,
}  # fmt: skip


def with_defaults(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, values: dict[str, Any]
) -> PreTrainedModel:
    model = copy.deepcopy(llama)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1)
    for name, value in values.items():  # as files bring them: transformers' constructor would complain about some
        setattr(model.generation_config, name, value)
    return decoders.enable(model, tokenizer=tokenizer)


def service_around(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, strategy: str, **options: Any) -> Any:
    pytest.importorskip("prometheus_client")
    from decoders.server.limits import Limits
    from decoders.server.service import Service

    limits = Limits(slots=400, prompt_tokens=300, new_tokens=200)
    return Service(model, tokenizer, name="tiny", strategy=strategy, limits=limits, config=EAGER, **options)


@pytest.mark.in_turns
@pytest.mark.parametrize("values", [UNFIT, DRAFTING, UNFIT | DRAFTING], ids=["unfit", "drafting", "both"])
@pytest.mark.parametrize("strategy", ["prompt_lookup", "suffix"])
def test_requests_of_any_strategy_are_answered(
    served: Any, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, write_alone: Any, strategy: str,
    values: dict[str, Any],
) -> None:  # fmt: skip
    service = service_around(with_defaults(llama, tokenizer, values), tokenizer, strategy)
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 8, "temperature": 0}
    expected = tokenizer.decode(write_alone("hi", max_new_tokens=8, do_sample=False), skip_special_tokens=True)
    with served(service) as client:
        for more in ({}, {"strategy": "autoregressive"}, {"strategy": "ngram"}, {"temperature": None}):
            answer = client.post("/v1/completions", json=body | more)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected


def test_a_warning_names_what_was_left_out(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_defaults(llama, tokenizer, {"use_cache": False, "num_beams": 4, "max_matching_ngram_size": 2})
    with caplog.at_level(logging.WARNING, "decoders.server"):
        service_around(model, tokenizer, "autoregressive").close()
        assert all(f"{said}, " in caplog.text for said in ("num_beams=4", "use_cache=False"))
        assert "max_matching_ngram_size=2: " in caplog.text
        caplog.clear()
        fine = with_defaults(llama, tokenizer, {"temperature": 0.5, "top_k": 7})
        for settled in (model, fine):
            service_around(settled, tokenizer, "autoregressive").close()
        assert not caplog.text, "once, and of nothing that works"
        assert (fine.generation_config.temperature, fine.generation_config.top_k) == (0.5, 7)


def test_hints_are_settings_of_the_strategy_and_the_operators_count_before_them() -> None:
    config = GenerationConfig(prompt_lookup_num_tokens=5, max_matching_ngram_size=2)

    def settled(strategy: str, settings: dict[str, Any]) -> dict[str, Any]:
        return OwnDefaults.of(config, strategy, settings).strategy_config

    assert settled("prompt_lookup", {}) == {"length": 5, "max_ngram": 2}
    assert settled("prompt_lookup", {"length": 9}) == {"length": 9, "max_ngram": 2}
    assert settled("prompt_lookup+ngram", {}) == {"prompt_lookup": {"length": 5, "max_ngram": 2}}
    assert settled("autoregressive", {}) == {}


def test_every_refused_argument_and_hint_that_a_config_may_hold_is_tried_here() -> None:
    config = GenerationConfig()
    in_configs = {name for name in REFUSED if hasattr(config, name)}
    assert in_configs - UNFIT.keys() <= NOT_TRIED
    assert set(HINTS) == DRAFTING.keys()


#: Those of which no checkpoint has a value: objects and what is new in transformers.
NOT_TRIED = {
    "num_beam_groups", "constraints", "force_words_ids", "use_mtp", "speculation_type", "assistant_lookbehind",
    "target_lookbehind", "assistant_ensemble_weight", "compile_config", "continuous_batching_config", "cache_config",
}  # fmt: skip
