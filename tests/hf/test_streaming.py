"""Streamers get every token exactly once and in order, also when several come out of one step."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from decoders.testing import prompts

EAGER = dict(decoders_config={"compile": False})
STRATEGIES = ("autoregressive", "prompt_lookup")
P = 24


class Recorder(BaseStreamer):
    """Keeps every call."""

    def __init__(self) -> None:
        self.puts: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert not self.ends, "nothing comes after the end"
        self.puts.append(value)

    def end(self) -> None:
        self.ends += 1


class StepRecorder(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[list[int]]] = []

    def on_step(self, new: list[list[int]]) -> None:
        self.steps.append(new)


def stream(model: PreTrainedModel, rows: int, streamer: Any, strategy: Any, **options: Any) -> Tensor:
    options = dict(do_sample=False, max_new_tokens=30) | options
    own = dict(strategy=strategy, **EAGER) if strategy else {}
    return model.generate(**prompts(rows), streamer=streamer, **options, **own)


@pytest.mark.in_turns
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rows", [1, 2], ids=["alone", "two rows"])
@pytest.mark.parametrize("stops", [False, True], ids=["", "with a stop token"])
def test_a_streamer_gets_what_transformers_gives_it(
    llama: PreTrainedModel, rows: int, strategy: str, stops: bool
) -> None:
    """The prompt as ``[B, P]``, then one ``[B]`` per position, then the end, once."""
    unstopped = stream(llama, rows, None, None)
    options = dict(eos_token_id=int(unstopped[0, P + 9])) if stops else {}
    right, ours = Recorder(), Recorder()
    stream(llama, rows, right, None, **options)
    out = stream(llama, rows, ours, strategy, **options)
    assert [p.tolist() for p in ours.puts] == [p.tolist() for p in right.puts]
    assert all(p.shape == (rows,) and p.device.type == "cpu" for p in ours.puts[1:])
    assert torch.equal(torch.cat([ours.puts[0], torch.stack(ours.puts[1:], dim=1)], dim=1), out)
    assert ours.ends == right.ends == 1


def test_an_empty_streamer_is_still_a_streamer(llama: PreTrainedModel) -> None:
    class Tokens(list, BaseStreamer):
        """Falsy as long as it holds nothing."""

        def put(self, value: Tensor) -> None:
            if value.dim() == 1:
                self.append(int(value))

        def end(self) -> None: ...

    tokens = Tokens()
    out = stream(llama, 1, tokens, "prompt_lookup")
    assert tokens == out[0, P:].tolist()


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer_prints_the_text_once(
    llama: PreTrainedModel, letters: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture, skip_prompt: bool
) -> None:
    out = stream(llama, 1, TextStreamer(letters, skip_prompt=skip_prompt), "prompt_lookup")
    assert capsys.readouterr().out == letters.decode(out[0, P if skip_prompt else 0 :]) + "\n"


def test_text_iterator_streamer_in_a_thread(llama: PreTrainedModel, letters: PreTrainedTokenizerFast) -> None:
    streamer = TextIteratorStreamer(letters, skip_prompt=True, timeout=30)
    results: list[Tensor] = []
    worker = threading.Thread(target=lambda: results.append(stream(llama, 1, streamer, "prompt_lookup")))
    worker.start()
    text = "".join(streamer)
    worker.join(timeout=30)
    assert text == letters.decode(results[0][0, P:])


def test_the_warning_about_other_processes_comes_after_the_text(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal it would otherwise stand in the text's last line."""
    recorder, ends = Recorder(), list[int]()
    monkeypatch.setattr("decoders.hf.wrapper.warn_of_load", lambda report: ends.append(recorder.ends))
    llama.generate(**prompts(1), strategy="prompt_lookup", max_new_tokens=4, streamer=recorder, **EAGER)
    assert ends == [1]


def test_a_streamer_that_raises_ends_the_call_and_the_model_stays_usable(llama: PreTrainedModel) -> None:
    class Impatient(Recorder):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.puts) > 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream(llama, 1, Impatient(), "prompt_lookup")
    assert torch.equal(stream(llama, 1, Recorder(), "prompt_lookup"), stream(llama, 1, None, None))


@pytest.mark.parametrize("rows", [1, 2], ids=["alone", "two rows"])
def test_on_step_tells_which_tokens_came_together(llama: PreTrainedModel, rows: int) -> None:
    streamer = StepRecorder()
    out = stream(llama, rows, streamer, "prompt_lookup", return_dict_in_generate=True)
    assert len(streamer.steps) == out.report.steps
    assert max(len(row) for step in streamer.steps for row in step) > 1
    for row in range(rows):
        assert [token for step in streamer.steps for token in step[row]] == out.sequences[row, P:].tolist()


def test_tokens_are_streamed_as_they_come(llama: PreTrainedModel) -> None:
    """Not all at the end: by the time of the last step all but that step's tokens have been put."""
    streamer = StepRecorder()
    put_before_step: list[int] = []
    told = streamer.on_step
    streamer.on_step = lambda new: (put_before_step.append(len(streamer.puts) - 1), told(new))  # type: ignore[method-assign]
    stream(llama, 1, streamer, "prompt_lookup")
    written = [0]
    for step in streamer.steps:
        written.append(written[-1] + len(step[0]))
    assert put_before_step == written[:-1]
