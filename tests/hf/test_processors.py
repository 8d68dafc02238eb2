"""Whatever changes the logits changes them as in transformers' own loop: tokens, scores and the calls themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkingConfig,
)

import decoders
from decoders.errors import InputError
from decoders.testing import assert_same_tokens, decode, prompts, reference, tiny_model
from decoders.testing.models import VOCAB

from ..versions import OLDEST

EAGER = dict(decoders_config={"compile": False, "prefill_chunk": 8})
NEW = 16
STRATEGIES = ("autoregressive", "prompt_lookup")


@functools.cache
def unprocessed(rows: int) -> list[list[int]]:
    """The new tokens of plain greedy decoding, to aim options at what would otherwise be written."""
    out = tiny_model("llama").generate(**prompts(rows), do_sample=False, max_new_tokens=NEW)
    return out[:, prompts(rows)["input_ids"].shape[1] :].tolist()


def assert_like_transformers(
    model: PreTrainedModel, inputs: dict[str, Tensor], strategy: Any, make: Callable[[], dict]
) -> Any:
    """Greedy with `make()`'s options: tokens equal, scores and logits of every generated token close."""
    kept = dict(output_scores=True, output_logits=True, max_new_tokens=NEW)
    expected = reference(model, inputs, **(kept | make()))
    actual = decode(model, inputs, strategy, **(kept | EAGER | make()))
    assert_same_tokens(model, inputs, expected.sequences, actual.sequences, strategy)
    prompt = inputs["input_ids"].shape[1]
    eos = make().get("eos_token_id")
    stops = {eos} if isinstance(eos, int) else set(eos or ())
    for name in ("scores", "logits"):
        right, ours = getattr(expected, name), getattr(actual, name)
        assert len(ours) == len(right)
        for row, text in enumerate(expected.sequences[:, prompt:].tolist()):
            length = next((t + 1 for t, token in enumerate(text) if token in stops), len(text))
            for t in range(length):  # behind a row's end transformers' figures belong to the padding
                torch.testing.assert_close(ours[t][row], right[t][row], atol=2e-4, rtol=1e-4)
    return actual


def written(row: int, *at: int) -> list[int]:
    return [unprocessed(3)[row][t] for t in at]


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "repetition_penalty": lambda: dict(repetition_penalty=1.9),
    "no_repeat_ngram_size": lambda: dict(no_repeat_ngram_size=1),
    "bad_words_ids": lambda: dict(bad_words_ids=[written(0, 1), *([] if OLDEST else [[]]), written(1, 2, 3), written(2, 4)]),
    "sequence_bias": lambda: dict(sequence_bias={tuple(written(0, 0)): -9.0, tuple(written(1, 1, 2)): -7.5, (9,): 2.0}),
    "suppress_tokens": lambda: dict(suppress_tokens=written(0, 2) + written(1, 2)),
    "begin_suppress_tokens": lambda: dict(begin_suppress_tokens=written(0, 0) + written(2, 0)),
    "nothing to suppress": lambda: dict(suppress_tokens=[]),
    "nothing to suppress at first": lambda: dict(begin_suppress_tokens=[]),
    "forced_eos_token_id": lambda: dict(forced_eos_token_id=17, eos_token_id=17, max_new_tokens=9),
    "min_new_tokens": lambda: dict(min_new_tokens=11, eos_token_id=written(0, 3) + written(1, 5)),
    "min_length": lambda: dict(min_length=24 + 8, eos_token_id=written(0, 3) + written(1, 5)),
    "exponential_decay_length_penalty": lambda: dict(exponential_decay_length_penalty=(3, 1.6), eos_token_id=5),
    "encoder_repetition_penalty": lambda: dict(encoder_repetition_penalty=1.7),
    "encoder_no_repeat_ngram_size": lambda: dict(encoder_no_repeat_ngram_size=1),
    "renormalize_logits": lambda: dict(renormalize_logits=True, repetition_penalty=1.2),
    "remove_invalid_values": lambda: dict(remove_invalid_values=True),
    "watermarking_config": lambda: dict(watermarking_config=WatermarkingConfig(bias=4.0, context_width=2)),
    "several": lambda: dict(repetition_penalty=1.4, no_repeat_ngram_size=2, suppress_tokens=written(0, 1), min_new_tokens=4),
}  # fmt: skip


@pytest.mark.in_turns
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rows", [1, 3], ids=["alone", "ragged"])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_acts_as_in_transformers(llama: PreTrainedModel, name: str, rows: int, strategy: str) -> None:
    out = assert_like_transformers(llama, prompts(rows), strategy, OPTIONS[name])
    if not name.startswith("nothing") and name != "remove_invalid_values" and rows == 3:
        assert out.sequences[:, 24:].tolist() != unprocessed(3), "the option has an effect here"


def test_prefix_allowed_tokens_fn_may_depend_on_the_row(llama: PreTrainedModel) -> None:
    shown: list[tuple[int, list[int]]] = []

    def allowed(row: int, prefix: Tensor) -> list[int]:
        shown.append((row, prefix.tolist()))
        return list(range(3 + row, VOCAB, 3))

    def make() -> dict[str, Any]:
        shown.clear()
        return dict(prefix_allowed_tokens_fn=allowed)

    for strategy in STRATEGIES:
        out = assert_like_transformers(llama, prompts(3), strategy, make)
        for row, text in enumerate(out.sequences[:, 24:].tolist()):
            assert all(token % 3 == row % 3 for token in text)


class Shift(LogitsProcessor):
    """Reads the prefix: favours the successor of the last token, and sees the padding as transformers shows it."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        bonus = torch.zeros_like(scores).scatter(1, (input_ids[:, -1:] + 1) % VOCAB, 6.0)
        return scores + bonus + (input_ids[:, :1] == 0) * torch.linspace(0, 3, VOCAB)


@pytest.mark.parametrize("rows", [1, 3], ids=["alone", "ragged"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_processor_that_reads_the_prefix(llama: PreTrainedModel, strategy: str, rows: int) -> None:
    assert_like_transformers(llama, prompts(rows), strategy, lambda: dict(logits_processor=[Shift()]))
    assert_like_transformers(
        llama, prompts(rows), strategy, lambda: dict(logits_processor=LogitsProcessorList([Shift()]))
    )


class InPlace(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, input_ids[0, -1]] -= 5.0
        return scores


def test_a_processor_that_writes_in_place_leaves_the_raw_logits_alone(llama: PreTrainedModel) -> None:
    kept = dict(logits_processor=[InPlace()], max_new_tokens=NEW, output_scores=True, output_logits=True)
    plain, ours = decode(llama, prompts(), **kept), decode(llama, prompts(), "prompt_lookup", **kept, **EAGER)
    assert torch.equal(ours.sequences, plain.sequences)
    with torch.no_grad():
        raw = llama(ours.sequences).logits[0, 23:-1]  # transformers' own `logits` show what the processor wrote
    torch.testing.assert_close(torch.cat(ours.logits), raw, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(ours.scores), torch.cat(plain.scores), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kept", [False, True])
def test_scores_of_all_nodes_take_memory_only_where_they_are_kept(llama: PreTrainedModel, kept: bool) -> None:
    shapes: list[torch.Size] = []

    class Zeros(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function is torch.zeros_like:
                shapes.append(result.shape)
            return result

    with Zeros():
        decode(
            llama,
            prompts(),
            "prompt_lookup",
            logits_processor=[InPlace()],
            max_new_tokens=4,
            output_scores=kept,
            **EAGER,
        )
    assert any(len(shape) == 3 and shape[-1] == VOCAB for shape in shapes) == kept


class Counting(LogitsProcessor):
    """Acts by the number of its calls: every third one forbids the likeliest token."""

    def __init__(self) -> None:
        self.prefixes: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.append(input_ids.clone())
        if len(self.prefixes) % 3 == 0:
            return scores.scatter(1, scores.argmax(-1, keepdim=True), float("-inf"))
        return scores


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stateful_processor_is_called_once_per_token_in_order(llama: PreTrainedModel, strategy: str) -> None:
    made: list[Counting] = []

    def make() -> dict[str, Any]:
        made.append(Counting())
        return dict(logits_processor=[made[-1]])

    assert_like_transformers(llama, prompts(), strategy, make)
    used = [m.prefixes for m in made if m.prefixes]
    assert len(used) == 2
    assert len(used[1]) == NEW
    assert all(torch.equal(a, b) for a, b in zip(*used, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_users_processors_mix_with_options(llama: PreTrainedModel, strategy: str) -> None:
    assert_like_transformers(
        llama, prompts(2), strategy,
        lambda: dict(
            logits_processor=LogitsProcessorList([Shift(), RepetitionPenaltyLogitsProcessor(1.3)]),
            no_repeat_ngram_size=2,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    "processor",
    [
        lambda: TemperatureLogitsWarper(0.5),
        lambda: TopKLogitsWarper(5),
        lambda: MinNewTokensLengthLogitsProcessor(24, 10, eos_token_id=written(0, 2)),
        lambda: MinNewTokensLengthLogitsProcessor(20, 10, eos_token_id=written(0, 2)),
        lambda: MinLengthLogitsProcessor(30, eos_token_id=written(0, 3)),
    ],
    ids=["temperature", "top_k", "min_new_tokens", "min_new_tokens from elsewhere", "min_length"],
)
def test_a_processor_of_transformers_given_by_the_user_keeps_its_own_parameters(
    llama: PreTrainedModel, processor: Callable[[], LogitsProcessor]
) -> None:
    """Its end-of-sequence tokens need not be those of the call."""
    assert_like_transformers(llama, prompts(), "prompt_lookup", lambda: dict(logits_processor=[processor()]))


@pytest.mark.parametrize(
    "processor",
    [
        TopKLogitsWarper(3, filter_value=-5.0),
        TopPLogitsWarper(0.5, filter_value=-20.0),
        MinPLogitsWarper(0.3, filter_value=0.0),
        TypicalLogitsWarper(0.5, filter_value=-7.0),
        TopKLogitsWarper(1, min_tokens_to_keep=4),
        TopPLogitsWarper(0.01, min_tokens_to_keep=4),
    ],
    ids=["top_k", "top_p", "min_p", "typical", "top_k keeps", "top_p keeps"],
)
def test_what_a_filter_puts_in_the_place_of_removed_scores_stands(
    llama: PreTrainedModel, processor: LogitsProcessor
) -> None:
    assert_like_transformers(llama, prompts(), "prompt_lookup", lambda: dict(logits_processor=[processor]))


def test_a_stop_token_may_be_a_tensor_without_dimensions(llama: PreTrainedModel) -> None:
    stop = torch.tensor(written(0, 3)[0])
    assert_like_transformers(
        llama,
        prompts(),
        "prompt_lookup",
        lambda: dict(logits_processor=[MinLengthLogitsProcessor(30, stop)], eos_token_id=int(stop)),
    )
    text = decode(
        llama, prompts(), "prompt_lookup", stopping_criteria=[EosTokenCriteria(stop)], max_new_tokens=NEW, **EAGER
    )
    assert text.sequences[0, -1] == stop


def test_a_processor_may_forbid_everything_but_one_token(llama: PreTrainedModel) -> None:
    def only(row: int, prefix: Tensor) -> list[int]:
        return [42 + len(prefix) % 2]

    for strategy in STRATEGIES:
        out = decode(llama, prompts(2), strategy, prefix_allowed_tokens_fn=only, max_new_tokens=8, **EAGER).sequences
        assert out[:, 24:].tolist() == [[42, 43] * 4] * 2


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), float("-inf")])
def test_scores_of_which_nothing_can_be_drawn_are_an_error(spoil: float) -> None:
    class Spoils(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores if input_ids.shape[1] < 26 else scores + spoil

    model = decoders.enable(tiny_model("llama"))
    options: dict[str, Any] = dict(max_new_tokens=6, logits_processor=LogitsProcessorList([Spoils()]), do_sample=True)
    with pytest.raises(RuntimeError, match="probability tensor"):
        model.generate(**prompts(2), **options)
    with pytest.raises(InputError, match=r"nothing can be drawn after 26 tokens: .*Spoils"):
        model.generate(**prompts(2), strategy="prompt_lookup", seed=1, decoders_config={"compile": False}, **options)
