"""What fails in the middle says where it did, and gives what was written until then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from decoders.engine.decode.prompt_reader import PromptReader
from decoders.strategy import Context, Draft, Sequences, Step, Strategy
from decoders.testing import prompts

CALL = dict(max_new_tokens=12, do_sample=False, decoders_config={"compile": False})
P = prompts()["input_ids"].shape[1]
AFTER = 5


class Oops(Exception):
    """Nobody else raises it."""


class Fails(Strategy):
    """Fails in one of its hooks, after some calls of it."""

    name = "fails"

    def __init__(self, hook: str, error: type[BaseException] = Oops) -> None:
        super().__init__()
        self.hook, self.error = hook, error

    def start(self, context: Context) -> list[int]:
        self._maybe("start", [AFTER])
        return [0]

    def propose(self, state: list[int], sequences: Sequences) -> Draft:
        self._maybe("propose", state)
        return Draft.nothing(len(sequences.length), sequences.tokens.device)

    def observe(self, state: list[int], step: Step) -> None:
        self._maybe("observe", state)
        state[0] += 1

    def details(self, state: list[int]) -> Mapping[str, Any]:
        self._maybe("details", state)
        return {}

    def finish(self, state: list[int]) -> None:
        self._maybe("finish", state)

    def _maybe(self, hook: str, state: list[int]) -> None:
        if hook == self.hook and state[0] >= AFTER:
            raise self.error("in the middle")


class Processor(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= P + AFTER:
            raise Oops("in the middle")
        return scores


class Criterion(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.shape[1] > P + AFTER:
            raise Oops("in the middle")
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Streamer(BaseStreamer):
    def __init__(self) -> None:
        self.calls = 0

    def put(self, value: Tensor) -> None:
        self.calls += 1
        if self.calls > AFTER:
            raise Oops("in the middle")

    def end(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize(
    ("call", "where", "written"),
    [
        (dict(strategy=Fails("start")), "strategy 'fails' (", 0),
        (dict(strategy=Fails("propose")), "propose, after 5 steps", AFTER),
        (dict(strategy=Fails("observe", KeyboardInterrupt)), "observe, after 5 steps", AFTER),
        (dict(logits_processor=[Processor()]), "in logits processor Processor", AFTER),
        (dict(stopping_criteria=[Criterion()]), "stopping criteria, after 5 steps", AFTER),
        (dict(streamer=Streamer()), "streamer", AFTER),
        (dict(strategy=Fails("details")), "details, after 12 steps", 12),
        (dict(strategy=Fails("finish")), "finish, after 12 steps", 12),
    ],
    ids=["start", "propose", "interrupt", "processor", "criterion", "streamer", "details", "finish"],
)
def test_an_error_says_where_and_keeps_what_was_written(
    llama: PreTrainedModel, call: dict[str, Any], where: str, written: int
) -> None:
    expected = llama.generate(**prompts(), strategy="autoregressive", **CALL)
    with pytest.raises((Oops, KeyboardInterrupt)) as caught:
        llama.generate(**prompts(), **({"strategy": "autoregressive"} | CALL | call))
    notes = " ".join(caught.value.__notes__)
    assert where in notes and "strategy '" in notes
    partial = caught.value.partial  # type: ignore[union-attr]
    assert partial.tolist() == expected[:, : P + written].tolist()
    assert torch.equal(llama.generate(**prompts(), strategy="autoregressive", **CALL), expected), (
        "nothing is left behind"
    )


def test_an_error_of_a_processor_ends_a_call_whose_request_was_changed_meanwhile(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is where images were divided wrongly."""
    read = PromptReader.read

    def changing(prompts: PromptReader, *given: Any, **options: Any) -> None:
        read(prompts, *given, **options)
        prompts.batch.request = replace(prompts.batch.request)

    monkeypatch.setattr(PromptReader, "read", changing)
    with pytest.raises(Oops):
        llama.generate(**prompts(), strategy="autoregressive", logits_processor=[Processor()], **CALL)


def test_what_was_written_comes_in_the_form_that_was_asked_for(llama: PreTrainedModel) -> None:
    with pytest.raises(Oops) as caught:
        llama.generate(
            **prompts(2),
            strategy=Fails("propose"),
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
            **CALL,
        )
    partial = caught.value.partial  # type: ignore[attr-defined]
    assert partial.sequences.shape == (2, P + AFTER)
    assert len(partial.logits) == len(partial.scores) == AFTER
    assert partial.report.new_tokens == [AFTER, AFTER] and partial.report.steps == AFTER


def test_the_note_names_the_distribution(llama: PreTrainedModel) -> None:
    with pytest.raises(Oops) as caught:
        llama.generate(**prompts(), strategy="prompt_lookup", streamer=Streamer(), **CALL)
    assert "strategy 'prompt_lookup' (hf-decoders " in " ".join(caught.value.__notes__)
