"""When a row ends: stop tokens, stop strings, criteria, time, lengths. All as in transformers' own loop."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from inspect import isfunction
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AddedToken,
    EosTokenCriteria,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
)

import decoders
from decoders.errors import SettingsError, UnsupportedError
from decoders.testing import Replay, decode, prompts, reference, tiny_model

EAGER = dict(decoders_config={"compile": False})
NEW = 20
P = 24
#: A stop token that the texts below never hold: transformers pads ended rows only where there is one.
UNUSED = 126
STRATEGIES = ("autoregressive", "prompt_lookup", "replay")


@functools.cache
def unstopped(rows: int) -> Tensor:
    """Prompts and what plain greedy decoding makes of them when nothing stops it."""
    return tiny_model("llama").generate(**prompts(rows), do_sample=False, max_new_tokens=NEW)


def named(strategy: str, rows: int) -> Any:
    """The strategy itself; ``replay`` proposes the whole text at once, so that stops fall inside accepted drafts."""
    if strategy != "replay":
        return strategy
    masks = prompts(rows)["attention_mask"]
    texts = tuple(tuple(t[int(m.argmax()) :].tolist()) for t, m in zip(unstopped(rows), masks, strict=True))
    return Replay(texts=texts, length=10, wrong_every=0)


def assert_like_transformers(model: PreTrainedModel, rows: int, strategy: str, **options: Any) -> Tensor:
    """Options that are functions are made anew for either call."""
    options = {k: v for k, v in (dict(do_sample=False, max_new_tokens=NEW) | options).items() if v is not None}

    def written(by: Callable[..., Any], **how: Any) -> Tensor:
        own = {name: value() if isfunction(value) else value for name, value in options.items()}
        return by(model, prompts(rows), **how, **own).sequences

    expected = written(reference)
    actual = written(decode, strategy=named(strategy, rows), **EAGER)
    assert actual.tolist() == expected.tolist()
    return actual[:, P:]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rows", [1, 3], ids=["alone", "ragged"])
def test_a_stop_token_ends_its_row_and_the_rest_is_padded(llama: PreTrainedModel, rows: int, strategy: str) -> None:
    stop = int(unstopped(rows)[0, P + 4])
    text = assert_like_transformers(llama, rows, strategy, eos_token_id=stop)
    assert text[0, :5].tolist() == unstopped(rows)[0, P : P + 5].tolist()
    assert (text[0, 5:] == 0).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_of_several_stop_tokens_ends_a_row(llama: PreTrainedModel, strategy: str) -> None:
    stops = [int(unstopped(3)[row, P + at]) for row, at in enumerate((2, 7, 5))]
    assert_like_transformers(llama, 3, strategy, eos_token_id=stops)
    assert_like_transformers(llama, 3, strategy, eos_token_id=stops + list(range(1, 12)), pad_token_id=2)
    assert_like_transformers(llama, 3, strategy, generation_config=GenerationConfig(
        eos_token_id=stops, pad_token_id=0, do_sample=False, max_new_tokens=NEW), max_new_tokens=None, do_sample=None)  # fmt: skip


def test_the_stop_token_may_be_the_first_token(llama: PreTrainedModel) -> None:
    first = int(unstopped(1)[0, P])
    for strategy in STRATEGIES:
        assert assert_like_transformers(llama, 1, strategy, eos_token_id=first).tolist() == [[first]]


def test_without_a_pad_token_the_stop_token_pads(fresh: PreTrainedModel) -> None:
    fresh.generation_config.pad_token_id = fresh.config.pad_token_id = None
    stop = int(unstopped(3)[0, P + 4])
    for strategy in STRATEGIES:
        text = assert_like_transformers(fresh, 3, strategy, eos_token_id=[stop, 1])
        assert (text[0, 5:] == stop).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("new", [1, 2, 7, NEW])
def test_exactly_max_new_tokens_are_generated(llama: PreTrainedModel, new: int, strategy: str) -> None:
    assert assert_like_transformers(llama, 3, strategy, max_new_tokens=new).shape[1] == new


def test_max_length_counts_prompt_and_padding(llama: PreTrainedModel) -> None:
    for strategy in STRATEGIES:
        assert assert_like_transformers(llama, 3, strategy, max_new_tokens=None, max_length=P + 6).shape[1] == 6
        assert assert_like_transformers(llama, 3, strategy, max_new_tokens=4, max_length=P + 9).shape[1] == 4


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_the_default_length_is_transformers(llama: PreTrainedModel) -> None:
    for strategy in STRATEGIES:
        assert assert_like_transformers(llama, 3, strategy, max_new_tokens=None).shape[1] == 20


def test_a_stop_token_criterion_of_the_users_counts(llama: PreTrainedModel) -> None:
    stop = int(unstopped(1)[0, P + 6])
    for strategy in STRATEGIES:
        text = assert_like_transformers(llama, 1, strategy, stopping_criteria=[EosTokenCriteria(stop)])
        assert text[0, -1] == stop


class Ends(StoppingCriteria):
    """Ends a row after one of the given tokens; notes what it was shown."""

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.seen = torch.tensor(tokens), []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids.clone())
        return torch.isin(input_ids[:, -1], self.tokens)


class Answers(StoppingCriteria):
    """What a function answers of the tokens."""

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        self.answer = answer

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return self.answer(input_ids)


class Sticky(StoppingCriteria):
    """Like lm-evaluation-harness's ``MultiTokenEOSCriteria``: notes per row that it has seen its stop, never asks again."""

    def __init__(self, stops: list[int]) -> None:
        self.stops, self.done = stops, [False] * len(stops)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        for row, done in enumerate(self.done):
            self.done[row] = done or self.stops[row] in input_ids[row, P:][-2:].tolist()
        return all(self.done)


class Counts(StoppingCriteria):
    """Stops row 1 at its fifth call, and all at its twelfth."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.tensor([self.calls >= 12, self.calls >= 5, self.calls >= 12])


def stops() -> list[int]:
    """A token of each of three rows."""
    return [int(unstopped(3)[row, P + at]) for row, at in enumerate((2, 7, 5))]


def in_a_column(*tokens: int) -> StoppingCriteria:
    """Answers ``[B, 1]``."""
    return Answers(lambda ids: torch.isin(ids[:, -1:], torch.tensor(tokens)))


CRITERIA: dict[str, Callable[[], list[StoppingCriteria]]] = {
    "tokens": lambda: [Ends(*stops())],
    "a token of one row": lambda: [Ends(stops()[0])],
    "remembers its rows": lambda: [Sticky(stops())],
    "counts its calls": lambda: [Counts()],
    "looks at the first row": lambda: [Answers(lambda ids: (ids[0, -1] == stops()[0]).expand(len(ids)))],
    "a length for each row": lambda: [Answers(lambda ids: ids.shape[1] >= torch.tensor([P + 4, P + 12, P + 9]))],
    "a plain bool": lambda: [Answers(lambda ids: ids.shape[1] >= P + 8)],
}
#: Where rows end by themselves a column is refused, see below.
ENDLESS: dict[str, Callable[[], list[StoppingCriteria]]] = {
    "a column": lambda: [in_a_column(*stops())],
    "a column beside a row": lambda: [in_a_column(*stops()[:2]), Ends(*stops()[1:])],
}


@pytest.mark.in_turns
@pytest.mark.parametrize("stop_token", [None, UNUSED, "written"], ids=["endless", "unused", "stop token"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("criteria", CRITERIA)
def test_criteria_end_rows_as_in_transformers(
    llama: PreTrainedModel, criteria: str, strategy: str, stop_token: Any
) -> None:
    """Also those that remember, or look at other rows: without a stop token a row is written on until all were told."""
    eos = int(unstopped(3)[1, P + 8]) if stop_token == "written" else stop_token
    assert_like_transformers(llama, 3, strategy, eos_token_id=eos, stopping_criteria=CRITERIA[criteria])


@pytest.mark.in_turns
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("criteria", ENDLESS)
def test_a_criterion_may_answer_in_a_column_where_it_may_in_transformers(
    llama: PreTrainedModel, criteria: str, strategy: str
) -> None:
    assert_like_transformers(llama, 3, strategy, stopping_criteria=ENDLESS[criteria])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_criterion_ends_a_single_row(llama: PreTrainedModel, strategy: str) -> None:
    for eos, criterion in ((UNUSED, Ends(*stops())), (None, in_a_column(*stops()))):
        text = assert_like_transformers(llama, 1, strategy, stopping_criteria=[criterion], eos_token_id=eos)
        assert text.shape[1] < NEW


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_criteria_are_shown_the_batches_that_plain_decoding_shows(llama: PreTrainedModel, strategy: str) -> None:
    stop = int(unstopped(3)[1, P + 8])
    plain, ours = Ends(-1), Ends(-1)
    for criterion, options in ((plain, {}), (ours, dict(strategy=named(strategy, 3), **EAGER))):
        llama.generate(
            **prompts(3),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=stop,
            stopping_criteria=[criterion],
            **options,
        )
    assert [seen.tolist() for seen in ours.seen] == [seen.tolist() for seen in plain.seen]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_criterion_is_asked_after_every_token_with_the_whole_prefix(llama: PreTrainedModel, strategy: str) -> None:
    asked = Ends(-1)
    out = llama.generate(
        **prompts(), strategy=named(strategy, 1), max_new_tokens=9, do_sample=False, stopping_criteria=[asked], **EAGER
    )
    assert [seen.tolist() for seen in asked.seen] == [out[:, : P + t].tolist() for t in range(1, 10)]


def test_a_criterion_that_answers_in_a_column_is_named_where_rows_end_by_themselves(llama: PreTrainedModel) -> None:
    call = dict(strategy="prompt_lookup", eos_token_id=UNUSED, max_new_tokens=4, **EAGER)
    for rows in (1, 2):
        with pytest.raises(UnsupportedError, match=r"Answers.* returned shape \[\d, \d\] .* a tensor \[rows\]"):
            llama.generate(**prompts(rows), **call, stopping_criteria=[in_a_column(1)])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_criterion_may_read_the_scores(llama: PreTrainedModel, strategy: str) -> None:
    """transformers hands the scores kept so far to criteria when they are kept."""

    class Confident(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            assert len(scores) == input_ids.shape[1] - P
            return scores[-1].softmax(-1).amax(-1) > 0.9

    options = dict(stopping_criteria=[Confident()], max_new_tokens=NEW, output_scores=True)
    expected = decode(llama, prompts(), **options)
    actual = decode(llama, prompts(), named(strategy, 1), **options, **EAGER)
    assert torch.equal(actual.sequences, expected.sequences)


def test_max_time_ends_early_with_at_least_one_token(llama: PreTrainedModel) -> None:
    for strategy in ("autoregressive", "prompt_lookup"):
        out = llama.generate(
            **prompts(2), strategy=strategy, max_new_tokens=400, max_time=0.05, do_sample=False, **EAGER
        )
        assert P + 1 <= out.shape[1] < P + 400
        assert (
            llama.generate(**prompts(), strategy=strategy, max_new_tokens=50, max_time=1e-9, **EAGER).shape[1] == P + 1
        )


def stop_texts(letters: PreTrainedTokenizerFast, rows: int) -> list[str]:
    """Strings that plain decoding would write: part of one word, and one that spans two letters."""
    text = unstopped(rows)[0, P:]
    return [letters.decode(text[6:8]), letters.decode(unstopped(rows)[-1, P + 9])]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rows", [1, 2], ids=["alone", "two rows"])
def test_stop_strings_end_a_row(llama: PreTrainedModel, letters: Any, rows: int, strategy: str) -> None:
    bare = tiny_model("llama")
    strings = stop_texts(letters, rows)
    options = dict(do_sample=False, max_new_tokens=NEW, eos_token_id=UNUSED)
    expected = bare.generate(**prompts(rows), stop_strings=strings, tokenizer=letters, **options)
    assert expected.shape[1] < P + NEW
    options |= dict(strategy=named(strategy, rows), **EAGER)
    in_call = llama.generate(**prompts(rows), stop_strings=strings, tokenizer=letters, **options)
    assert in_call.tolist() == expected.tolist()
    config = GenerationConfig(stop_strings=strings, pad_token_id=0, **(options | dict(strategy=None)))
    given = llama.generate(
        **prompts(rows), generation_config=config, tokenizer=letters, strategy=options["strategy"], **EAGER
    )
    assert given.tolist() == expected.tolist()
    assert config.stop_strings == strings, "the user's config is left alone"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stop_string_that_names_a_special_token_ends_a_row(
    llama: PreTrainedModel, letters: PreTrainedTokenizerFast, strategy: str
) -> None:
    tokenizer, text = copy.deepcopy(letters), unstopped(1)[0, P:].tolist()
    place = next(n for n, token in enumerate(text) if n >= 3 and token not in text[:n])
    before, mark = (letters.convert_ids_to_tokens(token) for token in text[place - 1 : place + 1])
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False)], special_tokens=True)
    assert not tokenizer.decode([text[place]], skip_special_tokens=True)
    options = dict(do_sample=False, max_new_tokens=NEW, eos_token_id=UNUSED, tokenizer=tokenizer)
    for stop in (mark, before + mark):
        expected = tiny_model("llama").generate(**prompts(), stop_strings=[stop], **options)
        ours = llama.generate(**prompts(), stop_strings=[stop], strategy=named(strategy, 1), **options, **EAGER)
        assert ours.tolist() == expected.tolist() == [prompts()["input_ids"][0].tolist() + text[: place + 1]]
        model = decoders.enable(tiny_model("llama"))  # which keeps the tokenizer
        with decoders.Scheduler(model, tokenizer=tokenizer, strategy=named(strategy, 1), **EAGER) as scheduler:
            prompt = prompts()["input_ids"][0].tolist()
            request = scheduler.submit(prompt, max_new_tokens=NEW, eos_token_id=UNUSED, stop_strings=[stop])
            request.result()
            assert request.tokens == text[: place + 1]


def test_the_tokenizer_of_enable_serves_stop_strings(letters: PreTrainedTokenizerFast) -> None:
    model = decoders.enable(tiny_model("llama"), tokenizer=letters)
    strings = stop_texts(letters, 1)
    options = dict(do_sample=False, max_new_tokens=NEW)
    expected = tiny_model("llama").generate(**prompts(), stop_strings=strings, tokenizer=letters, **options)
    for stop in (strings, strings[:1], strings[0]):
        ours = model.generate(**prompts(), stop_strings=stop, strategy="prompt_lookup", **options, **EAGER)
        assert ours.tolist() == expected.tolist()


def test_stop_strings_of_the_models_own_config(letters: PreTrainedTokenizerFast) -> None:
    model = decoders.enable(tiny_model("llama"), tokenizer=letters)
    model.generation_config.stop_strings = stop_texts(letters, 1)
    config = copy.deepcopy(model.generation_config)
    expected = model.generate(**prompts(), tokenizer=letters, do_sample=False, max_new_tokens=NEW)
    assert expected.shape[1] < P + NEW
    ours = model.generate(**prompts(), do_sample=False, max_new_tokens=NEW, strategy="prompt_lookup", **EAGER)
    assert ours.tolist() == expected.tolist()
    assert model.generation_config == config, "which is left alone"


def test_stop_strings_of_the_model_stand_when_the_call_brings_a_config_without(
    letters: PreTrainedTokenizerFast,
) -> None:
    """transformers fills the gaps of a given config from the model's."""
    model = decoders.enable(tiny_model("llama"), tokenizer=letters)
    model.generation_config.stop_strings = stop_texts(letters, 1)
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW)
    expected = model.generate(**prompts(), tokenizer=letters, generation_config=config)
    ours = model.generate(**prompts(), generation_config=config, strategy="prompt_lookup", **EAGER)
    assert ours.tolist() == expected.tolist()


def test_no_stop_strings_are_an_error_as_in_transformers(letters: PreTrainedTokenizerFast) -> None:
    model = decoders.enable(tiny_model("llama"), tokenizer=letters)
    with pytest.raises(ValueError):
        model.generate(**prompts(), stop_strings=[], tokenizer=letters, max_new_tokens=4)
    with pytest.raises(SettingsError, match="stop_strings is empty"):
        model.generate(**prompts(), stop_strings=[], strategy="prompt_lookup", max_new_tokens=4)


def test_stop_strings_without_a_tokenizer_say_what_is_missing() -> None:
    model = decoders.enable(tiny_model("llama"))
    with pytest.raises(ValueError, match="tokenizer= to enable"):
        model.generate(**prompts(), stop_strings="w5", strategy="prompt_lookup", max_new_tokens=4)
