"""What callers expect of a call with images: prefixes read once, no image mistaken for another, and all that a call of text has."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaModel, LlavaForConditionalGeneration
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionTransformer

import decoders
from decoders.common.transformers_compat import cache_keyword
from decoders.engine.decode.engine import Engine
from decoders.engine.decode.lane import Lane
from decoders.engine.model.own_forward import OwnForward
from decoders.errors import UnsupportedError
from decoders.hf import multimodal
from decoders.hf.multimodal import inputs_of
from decoders.strategies import PromptLookup, TokenRecycling
from decoders.testing import assert_same_tokens, decode, tiny_model
from decoders.testing.images import HEARING, IMAGE, QUESTIONS, SEEING, image_prompts, tiny_seeing_model
from decoders.testing.seeing import VIDEO

from .conftest import EAGER, enabled, plain

NEW = 6
#: Positions as those of tokens, fewer positions than tokens, recurrent states.
KINDS = ["llava", "qwen2_vl", pytest.param("qwen3_5", marks=pytest.mark.slow)]


@pytest.fixture
def own_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that the models' own forward passes have read, by pass."""
    rows: list[int] = []
    read = OwnForward.read

    def noting(self: OwnForward, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(inputs.lengths))
        return read(self, inputs, *args, **kwargs)

    monkeypatch.setattr(OwnForward, "read", noting)
    return rows


def without_texts(name: str) -> Any:
    """The model with nothing kept of earlier calls, and room for several texts."""
    model = enabled(name)
    model.generate.engine().sessions.release()
    return model


def written(name: str, inputs: dict[str, Any], **options: Any) -> Any:
    return decode(enabled(name), inputs, "prompt_lookup", **{"max_new_tokens": NEW, "decoders_config": EAGER} | options)


def beside(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """All but the text."""
    return {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}


def expected(name: str, inputs: dict[str, Any]) -> Tensor:
    return decode(enabled(name), inputs, max_new_tokens=NEW).sequences


@pytest.mark.parametrize(
    "name", [n if n in ("llava", "qwen2_vl", "gemma3") else pytest.param(n, marks=pytest.mark.slow) for n in SEEING]
)
def test_a_second_question_about_an_image_reads_the_question_alone(name: str, own_passes: list[int]) -> None:
    without_texts(name)
    first, second = image_prompts(name), image_prompts(name, question=1)
    image_ends = int((first["input_ids"] == IMAGE)[0].nonzero()[-1]) + 1
    out = written(name, first)
    assert out.report.reused == [0] and own_passes == [1]
    out = written(name, second)
    assert_same_tokens(enabled(name), second, expected(name, second), out.sequences, name)
    if name == "qwen3_5":  # what stands behind the image is a state, which cannot be cut back
        assert own_passes == [1, 1]
        return
    assert own_passes == [1] and out.report.reused[0] >= image_ends


def test_the_first_token_about_an_image_that_is_known_costs_the_question_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is run until then: the vision tower once for all questions, the language model for the new tokens."""
    name, towers, passes = "smolvlm", [0], []
    forward, of_text = SmolVLMVisionTransformer.forward, LlamaModel.forward

    def seeing(self: Any, *args: Any, **options: Any) -> Any:
        towers[0] += 1
        return forward(self, *args, **options)

    def reading(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **options: Any) -> Any:
        passes.append((input_ids if input_ids is not None else inputs_embeds).shape[1])
        return of_text(self, input_ids=input_ids, inputs_embeds=inputs_embeds, **options)

    monkeypatch.setattr(SmolVLMVisionTransformer, "forward", seeing)
    monkeypatch.setattr(LlamaModel, "forward", reading)
    without_texts(name)
    written(name, image_prompts(name, seed=9), max_new_tokens=1)  # checks the design
    towers[0] = 0
    for question in range(3):
        inputs = image_prompts(name, question=question)
        passes.clear()
        decode(enabled(name), inputs, "autoregressive", max_new_tokens=1, decoders_config=EAGER)
        new = QUESTIONS[0] if question else inputs["input_ids"].shape[1]
        assert towers == [1] and sum(passes) <= new + 3  # the first step's nodes


@pytest.mark.parametrize("name", KINDS)
def test_a_conversation_about_an_image_goes_on_where_it_was(name: str, own_passes: list[int]) -> None:
    without_texts(name)
    inputs = image_prompts(name)
    ids = torch.cat([written(name, inputs).sequences, torch.tensor([[17, 23, 42]])], dim=1)
    others = beside(inputs)
    if "mm_token_type_ids" in inputs:
        others["mm_token_type_ids"] = (ids == IMAGE).long() * (
            torch.arange(ids.shape[1]) < inputs["input_ids"].shape[1]
        )
    inputs = others | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    out = written(name, inputs)
    assert own_passes == [1] and out.report.reused[0] >= ids.shape[1] - 5
    assert_same_tokens(enabled(name), inputs, expected(name, inputs), out.sequences, name)


@pytest.mark.parametrize("name", KINDS)
def test_another_image_behind_the_same_tokens_is_read(name: str, own_passes: list[int]) -> None:
    without_texts(name)
    one = image_prompts(name)
    other = one | {"pixel_values": one["pixel_values"].flip(-1)}
    texts = [written(name, inputs).sequences for inputs in (one, other, one)]
    # Both texts are kept, but a state that has seen more than the prompt cannot be cut back.
    assert own_passes == [1] * (3 if name == "qwen3_5" else 2) and not torch.equal(texts[0], texts[1])
    for inputs, text in zip((one, other, one), texts, strict=True):
        assert_same_tokens(enabled(name), inputs, expected(name, inputs), text, name)


@pytest.mark.parametrize("name", ["llava", pytest.param("qwen2_vl", marks=pytest.mark.slow)])
def test_rows_with_the_same_tokens_and_different_images_stay_apart(name: str) -> None:
    without_texts(name)
    one, two = image_prompts(name), image_prompts(name, seed=5)
    alike = {k: torch.cat([one[k], one[k]]) for k in one}
    pair = alike | {"pixel_values": torch.cat([one["pixel_values"], two["pixel_values"]])}
    swapped = alike | {"pixel_values": torch.cat([two["pixel_values"], one["pixel_values"]])}
    other = image_prompts(name, (1, 1))
    crossed = other | {k: other[k].flip(0) for k in ("input_ids", "attention_mask")}  # the texts, but not their images
    for inputs in (pair, swapped, other, crossed):
        out = written(name, inputs)
        assert_same_tokens(enabled(name), inputs, expected(name, inputs), out.sequences, name)


@pytest.mark.parametrize(
    "name", [n if n in ("llava", "qwen2_vl", "smolvlm", "qwen2_audio") else pytest.param(n, marks=pytest.mark.slow)
             for n in (*SEEING, *HEARING) if n != "qwen3_5"]
)  # fmt: skip
def test_of_a_batch_only_the_row_is_read_whose_image_has_changed(name: str, own_passes: list[int]) -> None:
    batch = image_prompts(name, (1, 1))
    content = {k: v.clone() for k, v in batch.items() if v.is_floating_point()}
    for value in content.values():
        value[len(value) // 2 :] *= -1
    calls = [batch, batch | content, {k: v[: len(v) // 2] for k, v in batch.items()}]
    texts = [expected(name, inputs) for inputs in calls]
    without_texts(name)
    for inputs, text, reads, kept in zip(calls, texts, (2, 3, 3), ([], [0], [0]), strict=True):
        out = written(name, inputs)
        assert own_passes == [1] * reads and [row for row, count in enumerate(out.report.reused) if count] == kept
        assert_same_tokens(enabled(name), inputs, text, out.sequences, name)


def test_beside_a_long_question_the_image_of_a_short_one_stays_as_it_is(own_passes: list[int]) -> None:
    """Rows are read together: in the time of the longer text no row begins within its image."""
    name, short = "llava", 5
    one, other = image_prompts(name, (1, 1)), image_prompts(name, (1, 1), question=1)
    for key in ("input_ids", "attention_mask"):
        other[key][1] = torch.cat([torch.zeros(short, dtype=torch.int64), one[key][1, :-short]])
    text = expected(name, other)
    without_texts(name)
    written(name, one)
    out = written(name, other)
    assert own_passes == [1, 1] and all(out.report.reused)
    assert_same_tokens(enabled(name), other, text, out.sequences, name)


def test_images_that_were_taken_for_another_rows_are_read_all_together(
    own_passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, inputs = "llava", image_prompts("llava", (1, 2))
    pixels = inputs["pixel_values"]
    for parts in (slice(0, 2), slice(2, 3)), (slice(0, 1), slice(1, 2)):
        without_texts(name)
        own_passes.clear()
        with monkeypatch.context() as patch:
            patch.setattr(
                multimodal, "_divided", lambda *_, parts=parts: [{"pixel_values": pixels[part]} for part in parts]
            )
            out = written(name, inputs)
        assert own_passes[-1:] == [2] and len(own_passes) <= 3 and out.report.reused == [0, 0]
        assert_same_tokens(enabled(name), inputs, expected(name, inputs), out.sequences, name)
        own_passes.clear()
        written(name, inputs)  # the next batch is divided again
        assert own_passes == [1, 1]


@pytest.mark.parametrize("images", [(2, 1, 0), (0, 1, 2)])
@pytest.mark.parametrize(
    ("name", "reads"), [("smolvlm", [3]), ("llava", [1, 1]), pytest.param("idefics2", [3], marks=pytest.mark.slow),
                        pytest.param("qwen2_vl", [1, 1], marks=pytest.mark.slow)],
)  # fmt: skip
def test_as_many_images_as_rows_are_divided_where_they_are_not_arranged_by_row(
    name: str, reads: list[int], images: tuple[int, ...], own_passes: list[int]
) -> None:
    inputs, next_batch = image_prompts(name, images), image_prompts(name, (1, 1), seed=3)
    text = expected(name, inputs)
    without_texts(name)
    for given, passes in ((inputs, reads), (inputs, reads), (next_batch, [*reads, 1, 1])):
        out = written(name, given)
        assert own_passes == passes
        if given is inputs:
            assert_same_tokens(enabled(name), inputs, text, out.sequences, name)


def test_images_and_videos_in_one_batch_are_read_all_together(own_passes: list[int]) -> None:
    """As many images as rows look as if every row had one; the model says otherwise when the positions are computed."""
    name, inputs = "qwen2_vl", image_prompts("qwen2_vl", (2, 2))
    for token, kind in (("input_ids", VIDEO), ("mm_token_type_ids", 2)):
        inputs[token][1] = torch.where(inputs["input_ids"][1] >= IMAGE, kind, inputs[token][1])
    inputs["pixel_values"], inputs["pixel_values_videos"] = inputs["pixel_values"].chunk(2)
    inputs["image_grid_thw"], inputs["video_grid_thw"] = inputs["image_grid_thw"].chunk(2)
    without_texts(name)
    out = written(name, inputs)
    assert own_passes == [2]
    assert_same_tokens(enabled(name), inputs, expected(name, inputs), out.sequences, name)


def test_a_lack_of_memory_is_not_taken_for_images_of_other_rows(
    own_passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **options: Any) -> None:
        own_passes.append(0)
        raise torch.OutOfMemoryError("full")

    without_texts("llava")
    inputs = image_prompts("llava", (1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(OwnForward, "read", full)
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            written("llava", inputs)
    written("llava", inputs)
    assert own_passes == [0, 1, 1]


def test_a_text_of_the_same_tokens_is_no_image(own_passes: list[int]) -> None:
    """Placeholders without an image are tokens like any other."""
    name = "llava"
    without_texts(name)
    inputs = image_prompts(name)
    blind = {k: inputs[k] for k in ("input_ids", "attention_mask")}
    for given in (inputs, blind, inputs):
        out = written(name, given)
        assert_same_tokens(enabled(name), given, expected(name, given), out.sequences, name)
    assert own_passes == [1]


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_prompts_of_a_processor_without_images_are_text(name: str, own_passes: list[int]) -> None:
    inputs = image_prompts(name, (0, 0))
    out = written(name, inputs)
    assert_same_tokens(enabled(name), inputs, expected(name, inputs), out.sequences, name)
    assert own_passes == []


@pytest.mark.parametrize("name", ["llava", pytest.param("smolvlm", marks=pytest.mark.slow)])
def test_several_texts_about_one_image_read_it_once(name: str) -> None:
    model, inputs = enabled(name), image_prompts(name, (2, 1))
    sampling = dict(do_sample=True, seed=3, num_return_sequences=2, max_new_tokens=NEW, decoders_config=EAGER)
    without_texts(name)
    one, other = (decode(model, inputs, s, **sampling).sequences for s in ("autoregressive", PromptLookup(branches=2)))
    assert torch.equal(one, other) and len(one) == 4 and not torch.equal(one[0], one[1])
    coldest = decode(model, inputs, "autoregressive", **sampling | {"top_k": 1}).sequences
    assert torch.equal(coldest[::2], plain(name, (2, 1))[:, : coldest.shape[1]]) and torch.equal(
        coldest[1::2], coldest[::2]
    )


def test_placeholders_are_never_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    from decoders.engine.decode.core import Core

    drafted: list[Tensor] = []
    plain = Core.forward_verify_commit

    def noting(self: Core, draft: Any, block: Any, rows: Any) -> Any:
        drafted.append(block.draft_tokens)
        return plain(self, draft, block, rows)

    monkeypatch.setattr(Core, "forward_verify_commit", noting)
    model, inputs = enabled("llava"), image_prompts("llava", (2,))
    # The text ends as the text in front of the image does, so that what follows there is looked up.
    ids = torch.cat([inputs["input_ids"], inputs["input_ids"][:, :6]], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": inputs["pixel_values"]}
    without_texts("llava")
    out = decode(model, inputs, "prompt_lookup", max_new_tokens=NEW, decoders_config=EAGER)
    assert drafted and not any((tokens == IMAGE).any() for tokens in drafted)
    assert_same_tokens(model, inputs, expected("llava", inputs), out.sequences, "llava")


def test_grammars_streams_and_reports_work_as_with_text() -> None:
    inputs, streamed = image_prompts("qwen2_vl"), []

    class Streamer:
        def put(self, value: Tensor) -> None:
            streamed.append(value.flatten().tolist())

        def end(self) -> None:
            streamed.append([])

    out = written("qwen2_vl", inputs, streamer=Streamer())
    text = out.sequences[0].tolist()
    assert [token for part in streamed for token in part] == text and streamed[-1] == []
    assert out.report.prompt_tokens == [inputs["input_ids"].shape[1]] and out.report.new_tokens == [NEW]
    forced = written(
        "qwen2_vl", inputs, logits_processor=[lambda ids, scores: scores.index_fill(1, torch.tensor(text[-NEW:]), -1e9)]
    )
    assert not set(forced.sequences[0, -NEW:].tolist()) & set(text[-NEW:])


def test_an_image_at_the_end_of_a_prompt_is_refused() -> None:
    inputs = image_prompts("llava")
    end = int((inputs["input_ids"] == IMAGE)[0].nonzero()[-1]) + 1
    inputs |= {k: inputs[k][:, :end] for k in ("input_ids", "attention_mask")}
    with pytest.raises(UnsupportedError, match="a prompt ends with an image"):
        written("llava", inputs)


def test_a_cache_that_holds_images_is_refused() -> None:
    """Which positions its images have taken is not in it."""
    model, inputs = enabled("qwen2_vl"), image_prompts("qwen2_vl")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**inputs, use_cache=True, **{cache_keyword(model): cache})
    ids = torch.cat([inputs["input_ids"], torch.tensor([[17, 23]])], dim=1)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "past_key_values": cache}
    with pytest.raises(UnsupportedError, match="which positions its images have taken"):
        model.generate(**text, strategy="autoregressive", max_new_tokens=2)


def test_generate_many_takes_images() -> None:
    prompts = [image_prompts("llava", question=question) for question in range(2)]
    given = [beside(inputs) | {"prompt": inputs["input_ids"][0].tolist()} for inputs in prompts]
    options: dict[str, Any] = dict(max_new_tokens=NEW, pad_token_id=0, decoders_config=EAGER)
    done = list(decoders.generate_many(enabled("llava"), given, strategy="prompt_lookup", rows=2, slots=256, **options))
    for completion, inputs in zip(done, prompts, strict=True):
        assert completion.tokens == expected("llava", inputs)[0, inputs["input_ids"].shape[1] :].tolist()


def test_text_models_take_no_images() -> None:
    model = decoders.enable(tiny_model("llama"))
    with pytest.raises(
        UnsupportedError, match=r"pixel_values=a tensor \[1, 3, 28, 28\] cannot be combined with a strategy"
    ):
        model.generate(
            torch.ones(1, 3, dtype=torch.int64), strategy="autoregressive", pixel_values=torch.ones(1, 3, 28, 28)
        )


def test_a_model_that_reads_text_behind_an_image_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoders.enable(tiny_seeing_model("qwen2_vl"))
    monkeypatch.setattr("decoders.hf.multimodal._shifts", lambda arguments, lengths: [0] * len(lengths))
    with pytest.raises(UnsupportedError, match="the text after an image differ by"):
        model.generate(**image_prompts("qwen2_vl"), strategy="autoregressive", max_new_tokens=2)


def test_a_model_that_stores_other_tokens_than_those_of_the_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that puts several tokens in the place of an image's one."""
    model = decoders.enable(tiny_seeing_model("llava"))
    update = DynamicCache.update

    def twice(self: DynamicCache, keys: Tensor, values: Tensor, *rest: Any, **more: Any) -> Any:
        update(self, keys[:, :, :1], values[:, :, :1], *rest, **more)
        keys, values = update(self, keys, values, *rest, **more)
        return keys[:, :, 1:], values[:, :, 1:]

    monkeypatch.setattr(DynamicCache, "update", twice)
    with pytest.raises(UnsupportedError, match="does not store keys and values of exactly the tokens of a prompt"):
        model.generate(**image_prompts("llava"), strategy="autoregressive", max_new_tokens=2)


def test_plain_calls_in_between_leave_a_model_as_it_was(own_passes: list[int]) -> None:
    """They note in the model how far their images have shifted positions."""
    model, inputs = without_texts("qwen2_vl"), image_prompts("qwen2_vl")
    written("qwen2_vl", inputs)
    model.generate(**image_prompts("qwen2_vl", (2,)), max_new_tokens=2)
    out = written("qwen2_vl", inputs)
    assert own_passes == [1] and torch.equal(out.sequences, expected("qwen2_vl", inputs))


def test_a_scheduler_decodes_requests_with_images_and_without() -> None:
    name, requests = "qwen2_vl", []
    model = without_texts(name)
    options = dict(max_new_tokens=NEW, pad_token_id=0, decoders_config=EAGER)
    with decoders.Scheduler(model, strategy="prompt_lookup", rows=3, slots=256) as scheduler:
        for images, question in (((1,), 0), ((0,), 1), ((2,), 2), ((1,), 3)):
            inputs = image_prompts(name, images, question=question)
            requests.append((inputs, scheduler.submit(inputs["input_ids"], **beside(inputs), **options)))
        for inputs, request in requests:
            text = expected(name, inputs)[0, inputs["input_ids"].shape[1] :].tolist()
            assert request.result(60)[0, inputs["input_ids"].shape[1] :].tolist() == text
        inputs, request = requests[0]
        again = scheduler.submit(inputs["input_ids"], **beside(inputs), **options)
        assert torch.equal(again.result(60), request.result(60)) and again.report.reused[0] > 12


def test_a_request_whose_images_cannot_be_read_fails_alone() -> None:
    model, inputs, options = without_texts("llava"), image_prompts("llava"), dict(max_new_tokens=NEW, pad_token_id=0)
    too_many = torch.cat([inputs["pixel_values"]] * 2)
    with decoders.Scheduler(model, strategy="prompt_lookup", rows=3, slots=256) as scheduler:
        text = scheduler.submit([5, 6, 7], decoders_config=EAGER, **options)
        bad = scheduler.submit(inputs["input_ids"], pixel_values=too_many, decoders_config=EAGER, **options)
        good = scheduler.submit(inputs["input_ids"], **beside(inputs), decoders_config=EAGER, **options)
        with pytest.raises(ValueError, match="features"):
            bad.result(60)
        assert text.result(60).shape == (1, 3 + NEW)
        assert good.result(60)[0].tolist() == expected("llava", inputs)[0].tolist()


def lane_of(name: str, strategy: Any, count: int) -> tuple[Lane, list[Any]]:
    model = without_texts(name)
    calls = []
    for question in range(count):
        inputs = image_prompts(name, question=question)
        calls.append(
            model.generate.prepared(**inputs, strategy=strategy, max_new_tokens=NEW, decoders_config=EAGER).request
        )
    return Lane(model.generate.engine(), calls[0], 3), calls


def test_while_rows_wait_the_images_of_one_prompt_are_read_at_a_time(own_passes: list[int]) -> None:
    lane, requests = lane_of("llava", PromptLookup(), 3)
    lane.offer(requests[0])
    lane.advance(0.0)
    for request in requests[1:]:
        lane.offer(replace(request, multimodal=replace(request.multimodal, hashes=(str(id(request)),))))
    for reads in (2, 3):
        lane.advance(60.0)
        assert own_passes == [1] * reads
    lane.close()


def test_a_strategy_that_reads_prompts_has_a_lane_of_one_row_and_no_logits_that_it_does_not_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, sizes = OwnForward.read, []

    def noting(self: OwnForward, *args: Any, **kwargs: Any) -> Any:
        result = read(self, *args, **kwargs)
        sizes.append(tuple(part.shape[1] for part in (result.logits, result.hidden)))
        return result

    monkeypatch.setattr(OwnForward, "read", noting)
    lane, (request, other) = lane_of("llava", TokenRecycling(prompt_logits=True), 2)
    assert (lane.capacity, lane.template.multimodal) == (1, None) and lane.fits(lane.engine, other)
    assert not lane.fits(lane.engine, replace(other, multimodal=None))
    member = lane.offer(request)
    while not lane.advance(1.0):
        pass
    lane.close()
    assert member.error is None and sizes == [(1, len(request.prompts[0]) - 1)]


def test_images_of_a_row_depend_on_the_placeholders_of_those_before_it() -> None:
    model, ids = enabled("gemma3"), torch.full((2, 12), 9)
    ids[:, 4:8] = IMAGE
    hashes = []
    for count in (0, 2):
        ids[0, 4 : 4 + count] = 9
        hashes.append(inputs_of(model, {"pixel_values": torch.zeros(2, 3, 28, 28)}, ids, None, 1).hashes)
    assert hashes[0][1] != hashes[1][1]


class Louder(LlavaForConditionalGeneration):
    """Changes itself by what its prompts have, as Granite Speech switches adapters."""

    def generate(self, *args: Any, pixel_values: Any = None, **options: Any) -> Any:
        self.model.language_model.layers[0].self_attn.scaling = 8**-0.5 if pixel_values is None else 2.0
        return super().generate(*args, **({} if pixel_values is None else {"pixel_values": pixel_values}), **options)


def test_a_generate_of_the_designs_own_is_shown_the_images() -> None:
    model: Any = tiny_seeing_model("llava")
    calls = [image_prompts("llava"), image_prompts("llava", (0,)), image_prompts("llava", question=1)]
    ordinary = [decode(model, inputs, max_new_tokens=NEW).sequences for inputs in calls]
    model.__class__ = Louder
    texts = [decode(model, inputs, max_new_tokens=NEW).sequences for inputs in calls]
    assert [torch.equal(*pair) for pair in zip(texts, ordinary, strict=True)] == [False, True, False]
    decoders.enable(model)
    for inputs, text in zip(calls, texts, strict=True):
        out = decode(model, inputs, "prompt_lookup", max_new_tokens=NEW, decoders_config=EAGER)
        assert torch.equal(out.sequences, text)


@pytest.fixture(scope="module")
def louder() -> Any:
    model: Any = tiny_seeing_model("llava")
    model.__class__ = Louder
    return decoders.enable(model)


def test_while_a_scheduler_is_open_no_call_changes_the_model_for_its_images(louder: Any) -> None:
    image, text = image_prompts("llava"), image_prompts("llava", (0,))
    refused = pytest.raises(UnsupportedError, match="Louder may change the model for pixel_values.*close the Scheduler")
    ordinary = decode(louder, text, max_new_tokens=NEW).sequences
    options: dict[str, Any] = dict(max_new_tokens=NEW, decoders_config=EAGER)
    with decoders.Scheduler(louder, strategy="prompt_lookup") as scheduler:
        with refused:
            scheduler.submit(image["input_ids"], **beside(image), max_new_tokens=2)
        request = scheduler.submit(text["input_ids"], **options)
        for strategy in ({}, {"strategy": "prompt_lookup"}):
            with refused:
                louder.generate(**image, max_new_tokens=2, **strategy)
            assert torch.equal(louder.generate(**text, max_new_tokens=NEW, **strategy), ordinary)
        assert torch.equal(request.result(60), ordinary)
    assert not torch.equal(louder.generate(**image, max_new_tokens=NEW)[:, -NEW:], ordinary[:, -NEW:])


@pytest.mark.parametrize("other", ["generate", "plain", "Scheduler"])
def test_calls_in_several_threads_do_not_change_the_model_for_each_other(louder: Any, other: str) -> None:
    image, text = image_prompts("llava"), image_prompts("llava", (0,))
    expected_texts = [decode(louder, inputs, max_new_tokens=NEW).sequences for inputs in (image, text)]
    options: dict[str, Any] = dict(max_new_tokens=NEW, decoders_config=EAGER)
    written, threads = [], []

    def second() -> None:
        if other == "Scheduler":
            with decoders.Scheduler(louder, strategy="prompt_lookup") as scheduler:
                written.append(scheduler.submit(text["input_ids"], **options).result(60))
        else:
            strategy = {"strategy": "prompt_lookup", **options} if other == "generate" else {"max_new_tokens": NEW}
            written.append(louder.generate(**text, **strategy))

    class Streamer:
        """Begins the other call while this one decodes, and gives it time."""

        def put(self, value: Tensor) -> None:
            if not threads:
                threads.append(threading.Thread(target=second))
                threads[0].start()
                threads[0].join(0.1)

        def end(self) -> None:
            pass

    own = louder.generate(**image, strategy="autoregressive", streamer=Streamer(), **options)
    threads[0].join(60)
    assert torch.equal(own, expected_texts[0]) and torch.equal(written[0], expected_texts[1])


def test_a_text_alone_of_such_a_design_waits_for_no_other_call(louder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = image_prompts("llava", (0,))
    options = dict(strategy="autoregressive", max_new_tokens=1, decoders_config=EAGER)
    louder.generate(**inputs, **options)
    monkeypatch.setattr(Engine, "refresh", lambda *_: pytest.fail("the model is as it was"))
    louder.generate.prepared(**inputs, **options)


def test_a_call_notes_nothing_in_the_users_model() -> None:
    model = decoders.enable(tiny_seeing_model("qwen2_vl"))
    model.model.rope_deltas = noted = torch.tensor([[3]])
    decode(model, image_prompts("qwen2_vl"), "prompt_lookup", max_new_tokens=2, decoders_config=EAGER)
    assert model.model.rope_deltas is noted


def test_a_cache_beside_images_is_refused_before_anything_is_read(own_passes: list[int]) -> None:
    model, inputs = enabled("llava"), image_prompts("llava")
    cache = DynamicCache([(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))] * 2)
    with pytest.raises(UnsupportedError, match="past_key_values does not go with pixel_values.*leave the cache out"):
        model.generate(**inputs, past_key_values=cache, strategy="autoregressive", max_new_tokens=2)
    assert own_passes == []
