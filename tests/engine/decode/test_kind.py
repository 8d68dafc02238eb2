"""What steps depend on is said of every field of a request and every setting of the loop."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest
import torch
from transformers import PreTrainedModel

import decoders
from decoders.engine.decode import request as request_module
from decoders.engine.decode.kind import REQUEST, RUNTIME, Use, inputs_of
from decoders.engine.decode.lane import share_steps
from decoders.engine.decode.request import Models, Request, Returned, Sampling, Stopping
from decoders.settings import RuntimeSettings
from decoders.testing import tiny_model

#: Records of fields that belong together.
GROUPS = (Models, Returned, Sampling, Stopping)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return decoders.enable(tiny_model("llama"))


def request(model: PreTrainedModel, strategy: str = "prompt_lookup", **options: Any) -> Request:
    given = dict(input_ids=torch.tensor([[5, 6, 7]]), strategy=strategy, max_new_tokens=8, seed=1)
    prepared: Request = vars(model)["generate"].prepared(**(given | options)).request
    return prepared


def test_every_field_and_every_setting_has_an_entry() -> None:
    types = get_type_hints(Request, vars(request_module))
    groups = {name: fields(kind) for name, kind in types.items() if kind in GROUPS}
    names = [field.name for field in fields(Request) if field.name not in groups]
    assert set(REQUEST) == {*names, *(f"{group}.{field.name}" for group, own in groups.items() for field in own)}
    assert len(groups) == len(GROUPS)
    assert set(RUNTIME) == set(RuntimeSettings.model_fields)


#: Another value of whatever is no object.
OTHERS: dict[str, Any] = dict(
    rope_table=1, new_tokens=9, origin="elsewhere", salts=("a",), begun=1.0, processors=[],
) | {
    "returned.logits": True, "returned.top_logprobs": 2, "stopping.tokens": (3,), "stopping.pad_token": 4,
    "stopping.criteria": object(), "sampling.values": (0.5,), "sampling.sequences": (((((1,), 0.5),)),), "sampling.seed": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_counts_as_its_entry_says(llama: PreTrainedModel, name: str) -> None:
    one = request(llama)
    group, _, field = name.rpartition(".")
    value = {field: OTHERS[name]}
    other = replace(one, **({group: replace(getattr(one, group), **value)} if group else value))
    assert (one.kind != other.kind) == (REQUEST[name] in (Use.KIND, Use.HOST))
    assert (repr(inputs_of(one)) != repr(inputs_of(other))) == (REQUEST[name] is Use.INPUT)


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({}, True), ({"seed": 2}, True), ({"eos_token_id": 9}, True), ({"max_new_tokens": 5}, True),
        ({"input_ids": torch.tensor([[8]])}, True), ({"decoders_config": {"slots": 64}}, True), ({"max_time": 9.0}, True),
        ({"do_sample": True}, False), ({"repetition_penalty": 1.3}, False), ({"strategy": "suffix"}, False),
        ({"strategy_config": {"length": 3}}, False), ({"verifier": "rejection"}, False),
        ({"decoders_config": {"draft_weights": "int8"}}, False), ({"logits_processor": [lambda ids, scores: scores]}, False),
    ],
)  # fmt: skip
def test_requests_share_steps_whatever_their_rows_are(llama: PreTrainedModel, options: Any, shared: bool) -> None:
    assert share_steps(request(llama), request(llama, **options)) == shared


def test_two_penalties_are_one_kind_of_step(llama: PreTrainedModel) -> None:
    one, other = (request(llama, repetition_penalty=penalty, bad_words_ids=[[7]]) for penalty in (1.2, 1.7))
    assert one.kind == other.kind and hash(one.kind) == hash(other.kind) and not one.kind.host
    assert share_steps(one, other) and one.sampling.values != other.sampling.values
