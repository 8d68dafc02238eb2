"""A server and a bench of somebody else's, made of what the reference documents."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import decoders
from decoders.bench.synthetic import Synthetic
from decoders.constraints import FunctionCalls, Lark, ThinkingMarkers, compiled
from decoders.enabling import compiles_grammars_with, cost_curve, graphs_compiled, tokenizer_of
from decoders.errors import UnknownNameError
from decoders.prompts.reading import encode, read_prompts
from decoders.prompts.templates import ChatStyle
from decoders.report.surroundings import busy_share, processor_name
from decoders.scheduling import TextPieces, TokenLogprobs, special_tokens, unfinished

from .test_public_face import documented, imports

EAGER: dict[str, Any] = {"compile": False}
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = decoders.demo.load()
    return decoders.enable(model, tokenizer), tokenizer


def test_this_file_imports_documented_names_only() -> None:
    public = documented() | {"decoders"}
    assert {
        f"{module}.{name}" if name else module for _, module, name in imports(Path(__file__), __package__ or "")
    } - {f"{__package__}.test_public_face.{name}" for name in ("documented", "imports")} <= public


def test_a_server_compiles_a_call_ahead_decodes_it_and_reads_it_as_it_grows(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = loaded
    assert tokenizer_of(model) is tokenizer
    calls = FunctionCalls.of(
        [("walk", PARAMETERS, True)], ChatStyle.of(None, [], tool_format="json").calls.format, required=True
    )
    vocabulary, backend, seconds = compiles_grammars_with(model, [int(tokenizer.eos_token_id)], EAGER)  # type: ignore[arg-type]
    grammar = calls.spec().compiled(
        vocabulary, lambda part: compiled(part, vocabulary, backend, seconds=seconds).grammar
    )
    prompt = encode(tokenizer, read_prompts("predictable", 1)[0][2])
    with decoders.Scheduler(model, tokenizer=tokenizer, decoders_config=EAGER) as scheduler:
        generation = scheduler.submit(prompt, grammar=grammar, max_new_tokens=60, do_sample=False, top_logprobs=1)
        generation.result()
    assert generation.logprobs and isinstance(generation.logprobs[0], TokenLogprobs)
    assert generation.logprobs[0].token == generation.tokens[0]
    pieces, text, known = (
        TextPieces(tokenizer, prompt, frozenset(special_tokens(tokenizer).values())),
        "",
        dict[int, Any](),
    )
    for count in range(1, len(generation.tokens)):  # without the stop token
        text += pieces.next(generation.tokens[:count], False)
        written = calls.read(text, False, known)
        assert written.text == ""
    text += pieces.next(generation.tokens[:-1], True)
    (call,) = calls.read(text, True, known).calls
    assert call.complete and call.name == "walk" and json.loads(call.arguments)["n"] <= 9


def test_one_call_is_read_where_several_are_not_allowed() -> None:
    format = ChatStyle.of(None, [], tool_format="hermes").calls.format
    text = "Well. " + format.written([("walk", '{"n": 1}'), ("walk", '{"n": 2}')])
    for several, count in ((True, 2), (False, 1)):
        read = FunctionCalls.of([("walk", PARAMETERS, None)], format, several=several).read(text)
        assert read.text == "Well." and len(read.calls) == count


def test_the_style_of_a_template_is_found_and_a_wrong_format_refused() -> None:
    def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, ask: bool) -> str:
        if any(message["role"] == "system" for message in messages):
            raise ValueError("no system messages")
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    style = ChatStyle.of(render, ["<tool_call>"], tool_format="hermes")
    assert style.messages.unread == {"system"} and style.calls.special and not style.calls.reads_calls
    assert ChatStyle.of(None, []) == ChatStyle()
    with pytest.raises(UnknownNameError, match="hermes"):
        ChatStyle.of(None, [], tool_format="hermse")


def test_markers_of_thoughts_and_beginnings_of_stop_strings(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = loaded
    vocabulary, _, _ = compiles_grammars_with(model, [int(tokenizer.eos_token_id)])  # type: ignore[arg-type]
    assert ThinkingMarkers.of(None) is None
    assert ThinkingMarkers.of(tokenizer, "{{ '<think>' }}{{ '</think>' }}") == ThinkingMarkers("<think>", "</think>")
    markers = ThinkingMarkers("<think>", "</think>")
    cases = (("<think> so", True), ("<think> so </think>", False), ("so", None))
    for text, open in cases:
        assert markers.begun(tokenizer(text, add_special_tokens=False).input_ids, vocabulary) is open
    assert unfinished("the end: ST", ["STOP", "T-shirt"]) == 2 and unfinished("the end", ["STOP"]) == 0


def test_what_a_lenient_grammar_leaves_out_is_told_apart_from_other_warnings(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = loaded
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}
    ids = torch.tensor([tokenizer("x").input_ids])
    out = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), grammar=decoders.json_schema(schema, strict=False), max_new_tokens=20,
        strategy="autoregressive", return_dict_in_generate=True, decoders_config=EAGER,
    )  # fmt: skip
    (use,) = out.report.grammars
    assert len(use.left_out) == 1 < len(use.warnings) and "uniqueItems" in use.left_out[0]
    assert isinstance(decoders.grammar('start: "a"'), Lark)


def test_a_bench_measures_what_steps_cost_and_what_a_drafter_would_bring(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    model, _ = loaded
    settings, graphs = EAGER | {"cost_cache": tmp_path}, graphs_compiled()
    curve = cost_curve(model, [1], [32], 0.5, decoders_config=settings)
    assert (
        curve.points and curve.subject.device.startswith(processor_name(model.device)) and graphs_compiled() == graphs
    )
    assert cost_curve(model, [1], [32], 0.5, decoders_config=settings) == curve, "it was stored"
    assert 0.0 <= busy_share(0.01) <= 1.0
    drafter, ids = Synthetic.of("1,1,1"), torch.tensor([[5, 6, 7, 8]])
    call: dict[str, Any] = dict(
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        decoders_config=EAGER,
        return_dict_in_generate=True,
    )
    plain = model.generate(ids, strategy="autoregressive", **call)  # type: ignore[operator]
    drafter.learn(ids[0].tolist(), plain.sequences[0, 4:].tolist())
    drafted = model.generate(ids, strategy=drafter, **call)  # type: ignore[operator]
    assert torch.equal(drafted.sequences, plain.sequences) and drafted.report.acceptance_rate == 1.0


def test_a_busy_machine_shows_with_one_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    clocks = SimpleNamespace(perf_counter=lambda: next(ticks) / 1000, thread_time=lambda: next(ticks) / 2000)
    monkeypatch.setattr("decoders.report.surroundings.time", clocks)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert busy_share() == pytest.approx(0.5)
