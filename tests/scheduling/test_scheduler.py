"""Requests that share steps write what each would write in a call of its own, whatever else is decoded, ends or fails."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

import decoders
from decoders.engine.decode import sessions
from decoders.engine.decode.lane import Lane, in_place, share_steps
from decoders.engine.decode.session import Session
from decoders.engine.model.compiled.tiers import PassKind, Tiers
from decoders.engine.model.weights.quantization import Precision
from decoders.errors import (
    CancelledError,
    ContextLengthError,
    DeadlineError,
    GrammarError,
    InputError,
    QueueFull,
    SettingsError,
    UnknownNameError,
    UnsupportedError,
)
from decoders.scheduling import queue as queue_module
from decoders.scheduling.lanes import IDLE_LANES
from decoders.strategies import Lookahead, PromptLookup, Speculative, Staged, Threshold, TokenRecycling
from decoders.strategy import Draft, PromptChunk, Sequences, Step, Strategy
from decoders.testing import Replay, tiny_model

from .conftest import scheduler_of, text_of, write_alone

STRATEGIES: dict[str, Any] = {
    "autoregressive": "autoregressive",
    "prompt_lookup": PromptLookup(branches=2),
    "ngram": "ngram",
    "suffix": "suffix",
    "lookahead": Lookahead(window=2, ngram=3),
    "merged": "prompt_lookup+ngram",
    "auto": "auto",
    "speculative": Speculative(length=3),
    "varying": Speculative(length=3, schedule="heuristic"),
    "tree": Speculative(length=3, tree="static", nodes=6, children=2),
    "dynamic": Speculative(length=3, tree="dynamic", nodes=6, children=2, beam=2),
    "threshold": Threshold(),
    "staged": Staged(),
    "reader": TokenRecycling(prompt_logits=True),
}


@pytest.fixture
def options_of(draft: PreTrainedModel) -> Callable[[str], dict[str, Any]]:
    """What a scheduler is given to draft with a strategy."""

    def options(name: str) -> dict[str, Any]:
        strategy = STRATEGIES.get(name, name)
        return {"strategy": strategy} | (
            {"assistant_model": draft} if getattr(strategy, "needs_assistant", False) else {}
        )

    return options


#: Lengths of prompts and new tokens, so that requests come and go at different times.
RAGGED = [(5, 9), (17, 3), (40, 14), (2, 25), (9, 1), (23, 11), (3, 18), (12, 6)]


def requests(sample: bool = False, **more: Any) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts and arguments; every third draws, with values of its own, and stops at tokens of its own."""
    asked = []
    for number, (length, new) in enumerate(RAGGED):
        arguments: dict[str, Any] = {"max_new_tokens": new, "eos_token_id": [7 + number, 11], **more}
        if sample:
            arguments |= {"do_sample": True, "seed": number, "temperature": 0.6 + 0.2 * number, "top_k": 5 + 3 * number}
        asked.append((text_of(number, length), arguments))
    return asked


def written(generation: decoders.Generation, prompt: list[int]) -> list[int]:
    return generation.result(280)[0, len(prompt) :].tolist()


def assert_written_as_alone(
    scheduler: decoders.Scheduler, model: PreTrainedModel, asked: list[tuple[list[int], dict[str, Any]]]
) -> list[decoders.Generation]:
    """Submits all requests, and compares each with a call of its own."""
    generations = [scheduler.submit(prompt, **arguments) for prompt, arguments in asked]
    got = [written(generation, prompt) for generation, (prompt, _) in zip(generations, asked, strict=True)]
    assert got == [write_alone(model, prompt, **arguments) for prompt, arguments in asked]
    return generations


@pytest.mark.in_turns
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_requests_write_what_calls_of_their_own_write(
    llama: PreTrainedModel, options_of: Any, strategy: str, sample: bool
) -> None:
    asked = requests(sample)
    with scheduler_of(llama, **options_of(strategy)) as scheduler:
        generations = assert_written_as_alone(scheduler, llama, asked)
    assert all(g.report is not None and g.report.new_tokens == [len(g.tokens)] for g in generations)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([{"temperature": 0.7}, {"temperature": 1.3}], marks=pytest.mark.slow),
        pytest.param([{"top_p": 0.6}, {"top_p": 0.95}], marks=pytest.mark.slow),
        pytest.param([{"min_p": 0.02}, {"min_p": 0.3}], marks=pytest.mark.slow),
        pytest.param([{"typical_p": 0.5}, {"typical_p": 0.9}], marks=pytest.mark.slow),
        [{"top_k": 3, "top_p": 0.9}, {"top_k": 60, "top_p": 0.5}],
        [{"min_new_tokens": 6, "top_k": 8}, {"min_new_tokens": 2, "top_k": 40}],
        pytest.param(
            [
                {"min_new_tokens": 6, "eos_token_id": [*range(0, 96, 2)]},
                {"min_new_tokens": 6, "eos_token_id": [*range(1, 96, 2)]},
            ],
            id="stop tokens of their own",
        ),
        [{"top_k": 4}, {"top_p": 0.7}],  # other plans: they take turns
        [{"repetition_penalty": 1.5}, {"repetition_penalty": 1.1}],
    ],
    ids=str,
)
def test_every_row_has_its_own_sampling_values(llama: PreTrainedModel, values: list[dict[str, Any]]) -> None:
    asked = [
        (prompt, arguments | {"do_sample": True, "seed": number, "max_new_tokens": 7 + number} | values[number % 2])
        for number, (prompt, arguments) in enumerate(requests())
    ]
    with scheduler_of(llama, strategy="prompt_lookup") as scheduler:
        assert_written_as_alone(scheduler, llama, asked)


@pytest.mark.parametrize("strategy", ["grammar", "speculative"])
@pytest.mark.parametrize("question", ["fill_mask", "advance"])
def test_a_grammar_that_fails_ends_its_request_alone(
    llama: PreTrainedModel, options_of: Any, monkeypatch: pytest.MonkeyPatch, strategy: str, question: str
) -> None:
    from decoders.constraints.llguidance.backend import LLGuidanceMatcher

    asked, sound = [], getattr(LLGuidanceMatcher, question)

    def failing(matcher: Any, *arguments: Any) -> Any:
        asked.append(matcher)
        if "failing" in matcher.grammar.language.name and asked.count(matcher) > 4:
            raise GrammarError("it gives up")
        return sound(matcher, *arguments)

    monkeypatch.setattr(LLGuidanceMatcher, question, failing)
    grammars = [decoders.grammar(f"start: /[a-z ]*/ // {name}\n") for name in ("failing", "sound")]
    common = {"max_new_tokens": 14, "eos_token_id": 1}
    expected = [
        write_alone(llama, text_of(seed, 9), **common | more) for seed, more in ((1, {"grammar": grammars[1]}), (2, {}))
    ]
    with scheduler_of(llama, **options_of(strategy)) as scheduler:
        bad = scheduler.submit(text_of(0, 9), grammar=grammars[0], **common)
        good = scheduler.submit(text_of(1, 9), grammar=grammars[1], **common)
        more = {"grammar": grammars[1]} if strategy == "grammar" else {}
        free = scheduler.submit(text_of(2, 9), **common | more)
        with pytest.raises(GrammarError, match="it gives up"):
            bad.result(60)
        assert good.result(60)[0, 9:].tolist() == expected[0]
        assert more or free.result(60)[0, 9:].tolist() == expected[1]
        again = scheduler.submit(text_of(1, 9), grammar=grammars[1], **common)
        assert again.result(60)[0, 9:].tolist() == expected[0]


@pytest.mark.in_turns
@pytest.mark.parametrize("backend", ["table", "llguidance"])
@pytest.mark.parametrize("strategy", ["grammar", "prompt_lookup", "speculative"])
def test_rows_with_a_grammar_and_rows_without_share_steps(
    llama: PreTrainedModel, options_of: Any, strategy: str, backend: str
) -> None:
    patterns = [decoders.regex(p) for p in ("[0-9]{3}-[a-f]{4}", "(ab|cd){2,9}", "x[yz]*!")]
    more = {"decoders_config": {"compile": False, "constraint_backend": backend}}
    asked = [
        (p, a | more | {"eos_token_id": 1} | ({"grammar": patterns[n % 3]} if n % 2 or strategy == "grammar" else {}))
        for n, (p, a) in enumerate(requests(True))
    ]
    with scheduler_of(llama, **options_of(strategy)) as scheduler:
        assert_written_as_alone(scheduler, llama, asked)


@pytest.mark.parametrize(
    "strategy",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("autoregressive", "prompt_lookup")),
        PromptLookup(branches=2),
    ],
    ids=str,
)
def test_in_low_precision_requests_write_what_calls_of_their_own_write(
    letters: PreTrainedTokenizerFast, bf16: PreTrainedModel, strategy: Any
) -> None:
    asked = requests(True)
    with scheduler_of(bf16, strategy=strategy) as scheduler:
        assert_written_as_alone(scheduler, bf16, asked)


@pytest.mark.slow
def test_compiled_steps_write_the_same(llama: PreTrainedModel) -> None:
    asked = requests(True)
    with scheduler_of(llama, strategy="prompt_lookup", decoders_config={"compile": True}) as scheduler:
        generations = assert_written_as_alone(scheduler, llama, asked)
    assert all(g.report is not None and g.report.compiled_steps == g.report.steps for g in generations)


def test_every_graph_of_a_batch_that_must_be_compiled_is_made_before_the_first_step(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[bool | str, int]] = []

    def compile(self: Tiers, several: bool, report: Any, single: bool = False) -> bool:
        made.append((several, report.steps))
        return False

    def begin(self: Tiers, kind: Any) -> str:
        return f"mixed, {'one node' if kind.single_node else 'several'}"

    def wait(self: Tiers, tier: str, report: Any) -> bool:
        made.append((tier, report.steps))
        return False

    for name, function in (("compile", compile), ("_begin", begin), ("_wait", wait)):
        monkeypatch.setattr(Tiers, name, function)
    with scheduler_of(llama, decoders_config={"compile": True}) as scheduler:
        scheduler.submit(text_of(1, 5), max_new_tokens=3).result()
    # One request alone has them too: others may come and go.
    assert made[:4] == [(True, 0), (False, 0), ("mixed, several", 0), ("mixed, one node", 0)]


def test_stop_strings_end_only_their_own_row(llama: PreTrainedModel, letters: PreTrainedTokenizerFast) -> None:
    free = [write_alone(llama, text_of(n, 5 + n), max_new_tokens=30) for n in range(6)]
    readable = [[text for t in tokens[4:] if (text := letters.decode([t])).isascii() and text] for tokens in free]
    stops = [texts[0] for texts in readable]
    asked = [
        (text_of(n, 5 + n), {"max_new_tokens": 30} | ({"stop_strings": [stop]} if n % 2 else {}))
        for n, stop in enumerate(stops)
    ]
    with scheduler_of(llama, strategy="prompt_lookup") as scheduler:
        generations = assert_written_as_alone(scheduler, llama, asked)
    assert len(generations[1].tokens) < 30 == len(generations[0].tokens)


def test_a_prompt_is_read_at_once_where_no_row_waits(in_pieces: Callable[[int, int], Any]) -> None:
    short, long = in_pieces(4, 2), in_pieces(200, 1)
    lane = Lane(short.engine, short.request, 3)
    first = lane.offer(short.request)
    lane.advance(1e-9)
    second = lane.offer(long.request)
    lane.advance(1e-9)
    assert first.ended and not second.generated[0]  # one piece, while the first had a step to go
    lane.advance(1e-9)
    assert second.ended
    lane.close()


def test_a_short_prompt_waits_for_one_piece_of_a_long_one(in_pieces: Callable[[int, int], Any]) -> None:
    running, long, short = in_pieces(4, 100), in_pieces(200, 3), in_pieces(5, 3)
    lane = Lane(running.engine, running.request, 3)
    lane.offer(running.request)
    lane.advance(1e-9)
    late = lane.offer(long.request)
    lane.advance(1e-9)
    quick = lane.offer(short.request)
    for _ in range(3):
        lane.advance(1e-9)
    assert len(quick.generated[0]) >= 1 and not late.generated[0]
    while not late.ended:
        lane.advance(1e-9)
    assert late.generated[0] and quick.ended
    lane.close()


def test_what_a_running_or_finished_request_has_read_is_not_read_again(llama: PreTrainedModel) -> None:
    shared = text_of(0, 60)
    asked = [(shared + text_of(n, 4), {"max_new_tokens": 6}) for n in range(1, 7)]
    with scheduler_of(llama, rows=2) as scheduler:
        generations = assert_written_as_alone(scheduler, llama, asked)
    assert [g.report.reused[0] >= 60 for g in generations if g.report] == [False] + [True] * 5


def test_what_was_read_with_other_weights_is_read_again_while_rows_run() -> None:
    model, prompt = decoders.enable(tiny_model("llama", max_position_embeddings=8192)), text_of(0, 60)
    with scheduler_of(model, slots=8000) as scheduler:
        running = scheduler.submit(prompt, max_new_tokens=7000)
        before = scheduler.submit(prompt, max_new_tokens=8)
        before.result(60)
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
        after = [scheduler.submit(prompt, max_new_tokens=8) for _ in range(2)]
        got = [written(generation, prompt) for generation in after]
        assert not running.done() and got[0] != before.tokens
        running.cancel()
    assert got == [write_alone(model, prompt, max_new_tokens=8)] * 2


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12), st.sampled_from([None, 0.5, 1.2]), st.floats(0, 0.004)),
        min_size=1, max_size=8,
    ),
    st.integers(1, 4), st.sampled_from(["autoregressive", "prompt_lookup", "speculative"]), st.integers(0, 2**40),
)  # fmt: skip
def test_requests_at_any_time_write_their_own_tokens(
    llama: PreTrainedModel, options_of: Any, asked: list, rows: int, strategy: str, seed: int
) -> None:
    def arguments(number: int, new: int, temperature: float | None) -> dict[str, Any]:
        drawn = {} if temperature is None else {"do_sample": True, "temperature": temperature, "seed": seed + number}
        return {"max_new_tokens": new, **drawn}

    with scheduler_of(llama, rows=rows, **options_of(strategy)) as scheduler:
        generations = []
        for number, (length, new, temperature, after) in enumerate(asked):
            time.sleep(after)
            generations.append(scheduler.submit(text_of(number, length), **arguments(number, new, temperature)))
        got = [written(g, text_of(n, asked[n][0])) for n, g in enumerate(generations)]
    assert got == [
        write_alone(llama, text_of(n, length), **arguments(n, new, t)) for n, (length, new, t, _) in enumerate(asked)
    ]


class Breaks(LogitsProcessor):
    """Raises once the text has so many tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            raise ZeroDivisionError("of a processor")
        return scores


class Rude(BaseStreamer):
    def put(self, value: torch.Tensor) -> None:
        if value.dim() == 1 and len(value) == 1:
            raise OSError("nobody listens")

    def end(self) -> None: ...


def test_a_callback_that_raises_ends_its_own_request_alone(llama: PreTrainedModel) -> None:
    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        raise KeyError("of a criterion")

    with scheduler_of(llama) as scheduler:
        good = [scheduler.submit(text_of(n, 6), max_new_tokens=20) for n in range(2)]
        penalised = scheduler.submit(text_of(3, 6), max_new_tokens=20, repetition_penalty=1.2)
        broken = scheduler.submit(text_of(4, 6), max_new_tokens=20, logits_processor=LogitsProcessorList([Breaks(9)]))
        stopped = scheduler.submit(text_of(5, 6), max_new_tokens=20, stopping_criteria=[criterion])
        unheard = scheduler.submit(text_of(6, 6), max_new_tokens=20, streamer=Rude())
        assert isinstance(broken.exception(60), ZeroDivisionError)
        assert isinstance(stopped.exception(60), KeyError)
        assert isinstance(unheard.exception(60), OSError)
        assert [written(g, text_of(n, 6)) for n, g in enumerate(good)] == [
            write_alone(llama, text_of(n, 6), max_new_tokens=20) for n in range(2)
        ]
        assert written(penalised, text_of(3, 6)) == write_alone(
            llama, text_of(3, 6), max_new_tokens=20, repetition_penalty=1.2
        )
    assert len(broken.exception().partial[0]) == 9  # type: ignore[union-attr]


def exits(*_: Any, **__: Any) -> Any:
    raise SystemExit("of one request")


@pytest.mark.parametrize("name", ["logits_processor", "stopping_criteria", "put", "end"])
def test_a_callback_that_exits_ends_its_own_request_alone(llama: PreTrainedModel, name: str) -> None:
    def put(value: torch.Tensor) -> None:
        if name == "put" and value.numel() == 1:  # a new token
            exits()

    streamer = SimpleNamespace(put=put, end=exits)
    with scheduler_of(llama) as scheduler:
        other = scheduler.submit(text_of(1, 5), max_new_tokens=30)
        more = {"streamer": streamer} if name in ("put", "end") else {name: [exits]}
        broken = scheduler.submit(text_of(0, 6), max_new_tokens=3, **more)
        broken.add_done_callback(exits)
        assert isinstance(broken.exception(60), SystemExit)
        assert written(other, text_of(1, 5)) == write_alone(llama, text_of(1, 5), max_new_tokens=30)
        assert scheduler.alive


def test_requests_that_an_error_ends_together_keep_their_own_texts(llama: PreTrainedModel) -> None:
    class Fails(PromptLookup):
        name = "fails"

        def propose(self, state: Any, sequences: Sequences) -> Draft:
            if int(sequences.length.max()) > 16:
                raise ZeroDivisionError("of a strategy")
            return super().propose(state, sequences)

    with scheduler_of(llama, strategy=Fails()) as scheduler:
        requests = [scheduler.submit(text_of(n, 5 + n), max_new_tokens=20) for n in range(3)]
        errors = [request.exception(60) for request in requests]
    assert [type(error) for error in errors] == [ZeroDivisionError] * 3 and len(set(map(id, errors))) == 3
    for number, error in enumerate(errors):
        tokens = error.partial[0].tolist()
        whole = text_of(number, 5 + number) + write_alone(llama, text_of(number, 5 + number), max_new_tokens=20)
        assert 5 + number < len(tokens) and tokens == whole[: len(tokens)]
        assert any("shared the step" in note for note in error.__notes__)


def test_what_a_done_callback_raises_is_logged_and_ends_nobody(
    llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(generation: decoders.Generation) -> None:
        raise ZeroDivisionError("in a callback")

    told: list[decoders.Generation] = []
    with scheduler_of(llama) as scheduler:
        other = scheduler.submit(text_of(1, 5), max_new_tokens=40)
        first = scheduler.submit(text_of(0, 6), max_new_tokens=3)
        first.add_done_callback(fails)
        first.add_done_callback(told.append)
        assert len(first.result(60)[0]) == 9
        first.add_done_callback(fails)  # at once, in this thread
        assert written(other, text_of(1, 5)) == write_alone(llama, text_of(1, 5), max_new_tokens=40)
        waiting = scheduler.submit(text_of(2, 5), max_new_tokens=3000)
        waiting.add_done_callback(fails)
        assert waiting.cancel() and isinstance(waiting.exception(60), CancelledError)
        assert scheduler.alive
    assert told == [first]
    assert len([record for record in caplog.records if record.name == "decoders" and record.exc_info]) == 3


def test_a_finished_text_is_judged_by_who_asks_for_it(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    judged, judge = list[threading.Thread](), decoders.hf.grammars.Grammars.judge

    def noted(self: Any, texts: Any) -> Any:
        judged.append(threading.current_thread())
        return judge(self, texts)

    monkeypatch.setattr(decoders.hf.grammars.Grammars, "judge", noted)
    schema = {
        "type": "array",
        "items": {"pattern": "^[ab]$", "type": "string"},
        "minItems": 3,
        "maxItems": 3,
        "uniqueItems": True,
    }
    grammar = decoders.json_schema(schema, strict=False)

    async def wait(generation: decoders.scheduling.generation.Generation) -> Any:
        return await generation

    with scheduler_of(llama, eos_token_id=1) as scheduler:
        several = [scheduler.submit(text_of(0, 6), max_new_tokens=80, grammar=grammar) for _ in range(3)]
        while not all(each.done() for each in several):
            time.sleep(0.005)
        assert not judged
        with pytest.warns(UserWarning, match="uniqueItems"):
            several[0].result()
        with pytest.warns(UserWarning, match="uniqueItems"):
            report = several[1].report
        assert report is not None and report.grammars[0].complete and report.grammars[0].invalid
        assert judged == [threading.current_thread()] * 2
        with pytest.warns(UserWarning, match="uniqueItems"):
            asyncio.run(wait(several[2]))
        assert len(judged) == 3 and judged[2] not in (
            scheduler._thread,
            threading.current_thread(),
        )  # no event loop waits for it
        for each in several:
            assert each.report and each.exception() is None
        assert len(judged) == 3


def test_cancelled_requests_free_their_rows(llama: PreTrainedModel) -> None:
    with scheduler_of(llama, rows=1) as scheduler:
        long = scheduler.submit(text_of(0, 6), max_new_tokens=3000)
        waiting = scheduler.submit(text_of(1, 6), max_new_tokens=10)
        last = scheduler.submit(text_of(2, 6), max_new_tokens=10)
        next(iter(long))
        assert waiting.cancel()
        assert waiting.done()
        assert long.cancel()
        assert written(last, text_of(2, 6)) == write_alone(llama, text_of(2, 6), max_new_tokens=10)
        error = long.exception(60)
        assert isinstance(error, CancelledError)
        assert len(error.partial[0]) > 6  # type: ignore[attr-defined]
        assert not last.cancel()


def test_a_step_does_not_look_at_everybody_who_waits(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[decoders.Generation] = []
    original = queue_module.is_over

    def counted(generation: decoders.Generation, now: float) -> bool:
        looked.append(generation)
        return original(generation, now)

    monkeypatch.setattr(queue_module, "is_over", counted)
    with scheduler_of(llama, rows=1) as scheduler:
        running = scheduler.submit(text_of(0, 6), max_new_tokens=60)
        waiting = [scheduler.submit(text_of(n, 6), max_new_tokens=1) for n in range(20)]
        assert waiting[7].cancel() and len(running.result(60)[0]) == 66
        assert not looked
        expiring = [scheduler.submit(text_of(n, 6), max_new_tokens=2000, deadline=n / 10) for n in (3, 1, 2)]
        later = scheduler.submit(text_of(0, 6), max_new_tokens=1)
        for generation in expiring:
            assert isinstance(generation.exception(60), DeadlineError)
        assert looked and len(later.result(60)[0]) == 7


def test_deadlines_end_requests_that_run_and_requests_that_wait(llama: PreTrainedModel) -> None:
    with scheduler_of(llama, rows=1) as scheduler:
        running = scheduler.submit(text_of(0, 6), max_new_tokens=4000, deadline=0.3)
        waiting = scheduler.submit(text_of(1, 6), max_new_tokens=10, deadline=0.1)
        with pytest.raises(DeadlineError, match="within its 0.3 s"):
            running.result(60)
        with pytest.raises(DeadlineError):
            waiting.result(60)


def test_a_full_queue_refuses_and_says_its_size(llama: PreTrainedModel) -> None:
    with scheduler_of(llama, rows=1, queue=2) as scheduler:
        first = scheduler.submit(text_of(0, 6), max_new_tokens=3000)
        next(iter(first))
        others = [scheduler.submit(text_of(1, 6), max_new_tokens=2) for _ in range(2)]
        with pytest.raises(QueueFull, match=r"queue=2"):
            scheduler.submit(text_of(2, 6), max_new_tokens=2)
        first.cancel()
        late = scheduler.submit(text_of(2, 6), max_new_tokens=2, wait=True)
        assert all(g.result(60) is not None for g in (*others, late))


def test_a_callback_does_not_wait_for_the_room_that_only_its_own_thread_makes(llama: PreTrainedModel) -> None:
    errors = list[BaseException]()

    def submits(generation: decoders.Generation) -> None:
        try:
            scheduler.submit(text_of(2, 6), max_new_tokens=2, wait=True)
        except QueueFull as error:
            errors.append(error)

    with scheduler_of(llama, rows=1, queue=1) as scheduler:
        first = scheduler.submit(text_of(0, 6), max_new_tokens=3000)
        next(iter(first))
        waiting = scheduler.submit(text_of(1, 6), max_new_tokens=2)
        first.add_done_callback(submits)
        first.cancel()
        assert waiting.result(60) is not None
    assert len(errors) == 1


def test_higher_priorities_go_first(llama: PreTrainedModel) -> None:
    with scheduler_of(llama, rows=1) as scheduler:
        first = scheduler.submit(text_of(0, 6), max_new_tokens=60)
        next(iter(first))
        low = scheduler.submit(text_of(1, 6), max_new_tokens=2)
        high = scheduler.submit(text_of(2, 6), max_new_tokens=2, priority=1)
        low.result(60), high.result(60)
    assert high.submitted + (high.waited or 0) < low.submitted + (low.waited or 0)


def test_arguments_are_checked_where_they_are_submitted(llama: PreTrainedModel) -> None:
    with scheduler_of(llama, slots=32) as scheduler:
        with pytest.raises(decoders.DecodersError, match="num_beams"):
            scheduler.submit(text_of(0, 6), num_beams=2)
        with pytest.raises(ContextLengthError, match="32 slots"):
            scheduler.submit(text_of(0, 6), max_new_tokens=30)
        with pytest.raises(decoders.DecodersError, match="num_return_sequences"):
            scheduler.submit(text_of(0, 6), max_new_tokens=3, do_sample=True, num_return_sequences=2)
        with pytest.raises(InputError, match="one by one"):
            scheduler.submit(torch.ones(2, 3, dtype=torch.int64), max_new_tokens=3)
        with pytest.raises(InputError, match="vocabulary"):
            scheduler.submit([10**6], max_new_tokens=3)
    with pytest.raises(CancelledError, match="closed"):
        scheduler.submit(text_of(0, 6), max_new_tokens=3)


@pytest.mark.parametrize(
    "prompt, options, error, said",
    [
        (None, {}, InputError, "a prompt must be text, or token ids .*, not None"),
        (5, {}, InputError, "a prompt must be text, or token ids .*, not 5"),
        ([], {}, ContextLengthError, "the prompt is empty"),
        ("", {}, ContextLengthError, "the prompt is empty"),
        ("a\ud800", {}, InputError, "the prompt is not UTF-8 text: surrogates not allowed at character 1"),
        (["a"], {}, InputError, r"not \['a'\]"),
        ([[1, 2], [3]], {}, InputError, "a prompt must be text"),
        ([5.5], {}, InputError, "int64"),
        ({"input_ids": [5]}, {}, InputError, "a prompt must be text"),
        ([5], dict(deadline="3"), SettingsError, "deadline must be a number of seconds .*'3'"),
        ([5], dict(cache_salt=None), SettingsError, "cache_salt must be a text .*None"),
        ([5], dict(deadline=float("nan")), SettingsError, "deadline"),
        ([5], dict(priority=None), SettingsError, "priority must be a number .*None"),
        ([5], dict(top_logprobs=True), SettingsError, "top_logprobs must be a whole number from 0 up, not True"),
        ([5], dict(attention_mask=torch.ones(1, 1)), UnsupportedError, "attention_mask .* without padding"),
        ([5], dict(input_ids=[5]), UnsupportedError, "the first argument of submit"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_said_to_who_submits_it(
    llama: PreTrainedModel, prompt: Any, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with scheduler_of(llama) as scheduler:
        with pytest.raises(error, match=said):
            scheduler.submit(prompt, **options, max_new_tokens=2)
        assert len(scheduler.submit([5], max_new_tokens=2, attention_mask=None, strategy=None).result(60)[0]) == 3


@pytest.mark.parametrize(
    "options, error, said",
    [
        (dict(rows=0), SettingsError, "rows must be a whole number from 1 up, not 0"),
        (dict(rows=True), SettingsError, "rows .*not True"),
        (dict(longest_pause="x"), SettingsError, "longest_pause must be more than 0 seconds, not 'x'"),
        (dict(longest_pause=float("nan")), SettingsError, "longest_pause"),
        (dict(strategy="nope"), UnknownNameError, "Choose from: .*autoregressive"),
        (dict(strategy=None), SettingsError, "there is no strategy"),
        (dict(strategy="ngram", strategy_config={"nope": 1}), SettingsError, "nope"),
        (dict(max_new_tokenz=3), UnsupportedError, "max_new_tokenz"),
        (dict(num_beams=2), UnsupportedError, "num_beams"),
        (dict(attention_mask=torch.ones(1, 1)), UnsupportedError, "without padding"),
    ],
    ids=str,
)
def test_a_scheduler_that_no_request_could_use_is_not_made(
    llama: PreTrainedModel, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    threads = threading.active_count()
    with pytest.raises(error, match=said):
        decoders.Scheduler(llama, **options)
    assert threading.active_count() == threads


def test_a_tokenizer_of_the_request_reads_its_text(letters: PreTrainedTokenizerFast, llama: PreTrainedModel) -> None:
    model = decoders.enable(tiny_model("llama", vocab_size=288))
    with decoders.Scheduler(model, pad_token_id=0, decoders_config={"compile": False}) as scheduler:
        with pytest.raises(UnsupportedError, match="needs a tokenizer"):
            scheduler.submit("abc", max_new_tokens=2)
        generation = scheduler.submit("abc", tokenizer=letters, max_new_tokens=5)
        assert generation.result(60) == letters.decode(generation.tokens, skip_special_tokens=True)


def test_text_comes_in_pieces_that_make_the_whole(llama: PreTrainedModel, letters: PreTrainedTokenizerFast) -> None:
    with scheduler_of(llama) as scheduler:
        generation = scheduler.submit("in the beginning", max_new_tokens=40)
        pieces = list(generation)
        ids = letters("in the beginning").input_ids
        assert "".join(pieces) == generation.result() == letters.decode(write_alone(llama, ids, max_new_tokens=40))
        assert len(pieces) > 5
        assert list(scheduler.submit(ids, max_new_tokens=9)) == write_alone(llama, ids, max_new_tokens=9)


def test_generations_are_awaited_and_iterated_in_an_event_loop(llama: PreTrainedModel) -> None:
    async def run(scheduler: decoders.Scheduler) -> tuple[list[int], list[int]]:
        streamed = scheduler.submit(text_of(0, 6), max_new_tokens=12)
        awaited = scheduler.submit(text_of(1, 6), max_new_tokens=12)
        given_up = asyncio.ensure_future(_await(scheduler.submit(text_of(2, 6), max_new_tokens=3000)))
        tokens = [token async for token in streamed]
        given_up.cancel()
        return tokens, (await awaited)[0, 6:].tolist()

    async def _await(generation: decoders.Generation) -> Any:
        return await generation

    with scheduler_of(llama) as scheduler:
        tokens, result = asyncio.run(run(scheduler))
        assert tokens == write_alone(llama, text_of(0, 6), max_new_tokens=12)
        assert result == write_alone(llama, text_of(1, 6), max_new_tokens=12)


def test_calls_of_generate_take_turns_with_the_scheduler(llama: PreTrainedModel) -> None:
    want = write_alone(llama, text_of(1, 9), max_new_tokens=15)
    long = write_alone(llama, text_of(0, 6), max_new_tokens=150)
    with scheduler_of(llama) as scheduler:
        running = scheduler.submit(text_of(0, 6), max_new_tokens=150)
        next(iter(running))
        assert write_alone(llama, text_of(1, 9), max_new_tokens=15) == want
        assert not running.done()
        assert written(running, text_of(0, 6)) == long


def test_a_scheduler_that_goes_first_has_twice_the_time_of_others(llama: PreTrainedModel) -> None:
    with (
        scheduler_of(llama) as other,
        scheduler_of(llama, strategy="suffix") as third,
        scheduler_of(llama, first=True) as first,
    ):
        behind = [each.submit(text_of(0, 6), max_new_tokens=800) for each in (other, third)]
        for each in behind:
            next(iter(each))
        before = [len(each.tokens) for each in behind]
        ahead = first.submit(text_of(0, 6), max_new_tokens=100)
        ahead.result()
        after = [len(each.tokens) for each in behind]
        for each in behind:
            each.cancel()
    # Alike, each would have written about 100 tokens; as it is, both together write about 50. They do not stand still.
    written_behind = [count - begun for begun, count in zip(before, after, strict=True)]
    assert all(written_behind) and sum(written_behind) < 100
    assert all(each.tokens[:5] == ahead.tokens[:5] for each in behind)


def test_of_lanes_without_requests_those_that_were_used_last_stay_open(llama: PreTrainedModel) -> None:
    with scheduler_of(llama, strategy="suffix") as scheduler:  # which learns: each salt has a lane of its own

        def lane_of(salt: str) -> Lane:
            scheduler.submit(text_of(0, 6), max_new_tokens=2, cache_salt=salt).result()
            return list(scheduler._lanes._active)[-1]

        often = lane_of("often")
        others = []
        for number in range(5):
            others.append(lane_of(str(number)))
            assert lane_of("often") is often
        scheduler.submit(text_of(0, 6), max_new_tokens=2).result()
        assert len(scheduler._lanes._active) <= IDLE_LANES + 2
        dropped = [lane for lane in others if lane not in scheduler._lanes._active]
        assert dropped and not any(hasattr(lane.batch, "session") for lane in dropped), "their buffers are free"


def test_a_closed_scheduler_finishes_or_cancels(llama: PreTrainedModel) -> None:
    scheduler = scheduler_of(llama, rows=1)
    done = [scheduler.submit(text_of(n, 6), max_new_tokens=4) for n in range(3)]
    scheduler.close()
    assert all(g.done() and g.exception() is None for g in done)
    scheduler = scheduler_of(llama, rows=1)
    lost = [scheduler.submit(text_of(n, 6), max_new_tokens=4000) for n in range(3)]
    scheduler.close(cancel=True)
    assert all(isinstance(g.exception(), CancelledError) for g in lost)


def test_a_request_that_is_being_admitted_is_cancelled_with_the_others(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer, closers = Lane.offer, []

    def closing_meanwhile(lane: Lane, request: Any) -> Any:
        closers.append(threading.Thread(target=scheduler.close, kwargs={"cancel": True}))
        closers[0].start()
        while not scheduler._closing:  # it has the lock until all are cancelled
            time.sleep(0.001)
        return offer(lane, request)

    monkeypatch.setattr(Lane, "offer", closing_meanwhile)
    scheduler = scheduler_of(llama)
    request = scheduler.submit(text_of(0, 6), max_new_tokens=4000)
    assert isinstance(request.exception(60), CancelledError)
    closers[0].join(60)
    assert len(request.tokens) <= 2


def test_a_storm_of_requests_loses_and_mixes_up_none(llama: PreTrainedModel) -> None:
    kinds = [(text_of(n, 2 + 3 * n), 1 + n) for n in range(8)]
    want = [write_alone(llama, p, max_new_tokens=new) for p, new in kinds]
    results: dict[int, Any] = {}

    def client(first: int, scheduler: decoders.Scheduler) -> None:
        for number in range(first, 100, 4):
            p, new = kinds[number % 8]
            generation = scheduler.submit(p, max_new_tokens=new, wait=True)
            if number % 5 == 0:
                generation.cancel()
            results[number] = generation

    with scheduler_of(llama, rows=6, queue=40) as scheduler:
        threads = [threading.Thread(target=client, args=(first, scheduler)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 100
    for number, generation in results.items():
        error = generation.exception(0)
        if error is None:
            assert written(generation, kinds[number % 8][0]) == want[number % 8]
        else:
            assert number % 5 == 0
            assert isinstance(error, CancelledError)
    assert scheduler.waiting == scheduler.running == 0


def test_a_scheduler_says_whether_its_thread_runs_and_which_error_has_ended_it(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scheduler_of(llama) as scheduler:
        assert scheduler.alive
    assert not scheduler.alive

    def broken(self: decoders.Scheduler) -> None:
        raise RuntimeError("no lane's fault")

    with scheduler_of(llama) as scheduler:
        monkeypatch.setattr(decoders.Scheduler, "_sweep", broken)
        with pytest.raises(RuntimeError, match="no lane's fault"):
            scheduler.submit(text_of(0, 6), max_new_tokens=2).result(60)
        scheduler.close()
        assert not scheduler.alive
        with pytest.raises(CancelledError, match="no lane's fault"):
            scheduler.submit(text_of(0, 6), max_new_tokens=2)


def test_a_result_does_not_keep_the_scheduler(llama: PreTrainedModel) -> None:
    scheduler = scheduler_of(llama)
    generation = scheduler.submit(text_of(0, 6), max_new_tokens=2)
    generation.result(60)
    thread = scheduler._thread
    del scheduler
    gc.collect()
    thread.join(60)
    assert not thread.is_alive() and generation.done()


def test_a_generation_with_callbacks_goes_without_the_collector(llama: PreTrainedModel) -> None:
    told: list[bool] = []

    def finished(scheduler: decoders.Scheduler) -> weakref.ref[decoders.Generation]:
        generation = scheduler.submit(text_of(0, 6), max_new_tokens=2)
        generation.add_done_callback(lambda _: told.append(generation.done()))
        generation.result(60)
        return weakref.ref(generation)

    with scheduler_of(llama) as scheduler:
        gc.disable()
        try:
            reference, until = finished(scheduler), time.monotonic() + 60
            while reference() is not None and time.monotonic() < until:  # the thread has it until the round is over
                time.sleep(0.01)
        finally:
            gc.enable()
        assert reference() is None and told == [True]


class Reads(Strategy):
    """Reads prompts and a hidden layer; drafts the last token again."""

    name = "reads"
    summary = "Reads what it is shown."
    hidden_layers = (0,)

    def start(self, context: Any) -> Any:
        STATES.append({"read": [], "steps": 0, "finished": 0})
        return STATES[-1]

    def prefill(self, state: Any, chunk: PromptChunk) -> None:
        assert chunk.layers is not None and chunk.layers.shape[:2] == chunk.tokens.shape
        state["read"] += chunk.tokens[chunk.valid].tolist()

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        return Draft.chain(sequences.last.expand(-1, 2))

    def observe(self, state: Any, step: Step) -> None:
        assert step.layers is not None
        state["steps"] += 1

    def finish(self, state: Any) -> None:
        state["finished"] += 1


STATES: list[dict[str, Any]] = []


def test_a_strategy_that_reads_prompts_is_shown_each_and_told_when_it_is_over(llama: PreTrainedModel) -> None:
    STATES.clear()
    asked = requests()[:4]
    with scheduler_of(llama, strategy=Reads()) as scheduler:
        assert_written_as_alone(scheduler, llama, asked)
    assert [state["read"] for state in STATES] == [prompt[:-1] for prompt, _ in asked]
    assert all(state["steps"] > 0 and state["finished"] == 1 for state in STATES)


@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup"])
def test_who_still_waits_for_its_prompt_keeps_its_place_when_others_join(llama: PreTrainedModel, strategy: str) -> None:
    """Several rows end in one step, and of the requests that come in their places only one is read before the next."""
    common = text_of(99, 20)  # some find what an earlier one has left
    prompts = [[*common, *text_of(n, 3)] if n % 3 == 0 else text_of(n, 5 + 7 * n % 23) for n in range(24)]
    asked = [(prompt, {"max_new_tokens": 4 if n % 4 < 2 else 9 + n % 5}) for n, prompt in enumerate(prompts)]
    with scheduler_of(llama, rows=4, strategy=strategy, longest_pause=1e-6) as scheduler:
        assert_written_as_alone(scheduler, llama, asked)


class Restarts(Strategy):
    """Starts anew whenever a row comes or goes, and notes every state that has begun and ended."""

    name = "restarts"
    summary = "Drafts the last token again."

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[object] = []
        self.ended: list[object] = []

    def start(self, context: Any) -> Any:
        assert self.begun == self.ended, "a state ends before the next begins"
        self.begun.append(object())
        return self.begun[-1]

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        return Draft.chain(sequences.last.expand(-1, 2))

    def finish(self, state: Any) -> None:
        self.ended.append(state)


def test_a_strategy_that_starts_anew_for_other_rows_is_first_told_that_its_state_is_over(
    llama: PreTrainedModel,
) -> None:
    strategy = Restarts()
    with scheduler_of(llama, strategy=strategy) as scheduler:
        assert_written_as_alone(scheduler, llama, requests())
    assert len(strategy.begun) > 3 and strategy.begun == strategy.ended


class Shares(Reads):
    """The same for rows that come and go."""

    def rebatch(self, state: Any, rows: torch.Tensor, context: Any) -> Any:
        return state


def test_where_prompts_are_read_requests_with_a_grammar_have_steps_of_their_own(llama: PreTrainedModel) -> None:
    """With a first grammar among its rows a strategy starts anew, and would have to be shown all texts again."""
    STATES.clear()
    pattern = decoders.regex("[0-9]{3}-[a-f]{4}")
    asked = [
        (prompt, arguments | {"eos_token_id": 1} | ({"grammar": pattern} if number % 2 else {}))
        for number, (prompt, arguments) in enumerate(requests(True))
    ]
    with scheduler_of(llama, strategy=Shares()) as scheduler:
        assert_written_as_alone(scheduler, llama, asked)
    assert sum(len(state["read"]) for state in STATES) == sum(len(prompt) - 1 for prompt, _ in asked), "once each"


class Leaves(Reads):
    """Fails when it is told that it is over."""

    fails_in_propose = False

    def propose(self, state: Any, sequences: Sequences) -> Draft:
        if self.fails_in_propose:
            raise RuntimeError("no draft")
        return super().propose(state, sequences)

    def finish(self, state: Any) -> None:
        raise RuntimeError("no end")


@pytest.mark.filterwarnings("error")
def test_what_finish_raises_is_a_note_on_what_ended_the_lane_and_a_warning_elsewhere(llama: PreTrainedModel) -> None:
    failing = Leaves()
    failing.fails_in_propose = True
    with scheduler_of(llama) as scheduler:
        broken = scheduler.submit(text_of(1, 5), strategy=failing, max_new_tokens=3)
        with pytest.raises(RuntimeError, match="no draft") as caught:
            broken.result(60)
        assert any("finish of 'reads' failed" in note for note in caught.value.__notes__)
        prompt = text_of(2, 5)
        other = scheduler.submit(prompt, max_new_tokens=4)
        assert written(other, prompt) == write_alone(llama, prompt, max_new_tokens=4)
    with (
        pytest.warns(UserWarning, match="finish of 'reads' failed: RuntimeError.'no end'"),
        scheduler_of(llama, strategy=Leaves()) as scheduler,
    ):
        assert written(scheduler.submit(prompt, max_new_tokens=4), prompt) == write_alone(
            llama, prompt, max_new_tokens=4
        )


def test_a_lane_that_cannot_be_closed_ends_its_requests(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Lane, cause: Exception | None = None) -> None:
        raise RuntimeError("the device is gone")

    failing = Leaves()
    failing.fails_in_propose = True
    with scheduler_of(llama) as scheduler:
        monkeypatch.setattr(Lane, "close", broken)
        with pytest.raises(RuntimeError, match="no draft"):
            scheduler.submit(text_of(1, 5), strategy=failing, max_new_tokens=3).result(60)
        scheduler._thread.join(60)
        with pytest.raises(CancelledError, match="the device is gone"):
            scheduler.submit(text_of(2, 5), max_new_tokens=3)


def test_what_goes_wrong_while_a_cancelled_request_leaves_ends_its_lane_alone(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Lane, member: Any) -> None:
        raise RuntimeError("cannot leave")

    with scheduler_of(llama) as scheduler:
        cancelled, beside = [scheduler.submit(text_of(1, 5), max_new_tokens=3000) for _ in range(2)]
        next(iter(beside))
        monkeypatch.setattr(Lane, "remove", broken)
        cancelled.cancel()
        assert isinstance(cancelled.exception(60), CancelledError)
        with pytest.raises(RuntimeError, match="cannot leave"):
            beside.result(60)
        other = scheduler.submit(text_of(2, 5), max_new_tokens=4)
        assert written(other, text_of(2, 5)) == write_alone(llama, text_of(2, 5), max_new_tokens=4)


def test_tokens_carry_their_log_probabilities_and_whether_they_were_drafted(llama: PreTrainedModel) -> None:
    ids = text_of(3, 12) * 3
    whole_drafts = {"compile": False, "prune": False}
    with scheduler_of(
        llama, strategy=PromptLookup(branches=2), max_new_tokens=20, decoders_config=whole_drafts
    ) as scheduler:
        request = scheduler.submit(ids, top_logprobs=3)
        plain = scheduler.submit(ids)
        whole = request.result(60)[0]
        assert plain.result(60)[0].tolist() == whole.tolist() and plain.logprobs == []
    with torch.no_grad():
        expected = llama(whole[None]).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    # The branch that is right changes its place: nodes of the path are not the first ones of the block.
    branching = Replay(texts=(tuple(whole.tolist()),), branches=3)
    with scheduler_of(llama, strategy=branching, max_new_tokens=20, decoders_config=whole_drafts) as scheduler:
        branched = scheduler.submit(ids, top_logprobs=3)
        assert branched.result(60)[0].tolist() == whole.tolist()
    for each in (request, branched):
        for token, logprobs, row in zip(each.tokens, each.logprobs, expected, strict=True):
            assert logprobs.token == token
            assert logprobs.logprob == pytest.approx(float(row[token]), abs=1e-3)
            best = row.topk(3)
            assert [candidate for candidate, _ in logprobs.top] == best.indices.tolist()
            assert [value for _, value in logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-3)
    assert request.report is not None
    assert len(request.drafted) == 20 and sum(request.drafted) == request.report.accepted > 0
    counts = [count for _, count in request.times]
    assert counts == sorted(counts) and counts[-1] == 20 and len(counts) == request.report.steps


def test_tokens_of_a_step_come_together(llama: PreTrainedModel) -> None:
    async def read(request: decoders.Generation) -> list[list[int]]:
        return [tokens async for tokens in request.batches()]

    with scheduler_of(llama, strategy="prompt_lookup", max_new_tokens=20) as scheduler:
        request = scheduler.submit(text_of(3, 12) * 3)
        batches = asyncio.run(read(request))
    assert [token for batch in batches for token in batch] == request.tokens and all(batches)
    with scheduler_of(llama) as scheduler, pytest.raises(SettingsError, match="top_logprobs"):
        scheduler.submit([1, 2], max_new_tokens=1, top_logprobs=-1)


def test_a_request_takes_the_row_of_one_that_has_left_without_a_copy(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, batches = [], []
    exchange, rebatch = sessions.exchange, Lane._rebatch

    def spied(self: Session, one: int, other: int, count: int, other_count: int) -> None:
        moved.append((one, other))
        exchange(self, one, other, count, other_count)

    def counted(self: Lane, seats: list[Any]) -> None:
        batches.append(len(seats))
        rebatch(self, seats)

    monkeypatch.setattr(sessions, "exchange", spied)
    monkeypatch.setattr(Lane, "_rebatch", counted)
    monkeypatch.setattr(
        Tiers, "mixes", lambda *_, single: False
    )  # or the others would go on without it while it is read
    with scheduler_of(llama, rows=3, decoders_config={"compile": False}) as scheduler:
        asked = [scheduler.submit(text_of(seed, 6), max_new_tokens=30 + 5 * seed) for seed in range(6)]
        for generation in asked:
            generation.result()
    full = batches[batches.index(3) : len(batches) - batches[::-1].index(3)]
    assert set(full) == {3} and len(full) > 2  # others came whenever one left: arranged once for both
    assert len(moved) <= 2, moved  # the rows at the end alone move into gaps


@given(st.sets(st.integers(0, 12), min_size=1, max_size=8).flatmap(lambda places: st.permutations(sorted(places))))
def test_rows_stay_in_their_places(places: list[int]) -> None:
    seats: list[Any] = [SimpleNamespace(place=place) for place in places]
    rows = in_place(seats)
    assert sorted(seat.place for seat in rows) == sorted(places)
    assert all(rows[place].place == place for place in places if place < len(places))


def test_what_is_not_to_be_remembered_is_not_remembered_for_others(llama: PreTrainedModel) -> None:
    """Requests with and without memory take turns: a step of both would learn from both."""
    decoders.forget(llama)
    private = {"compile": False, "memory": False}
    with scheduler_of(llama, strategy="suffix", max_new_tokens=12) as scheduler:
        kept, secret = scheduler.submit(text_of(1, 9)), scheduler.submit(text_of(2, 9), decoders_config=private)
        kept.result(60), secret.result(60)
    (remembered,) = decoders.memories(llama).values()
    texts = remembered.index.tokens.tolist()
    assert remembered.texts == 1 and kept.tokens[0] in texts and secret.tokens[0] not in texts
    decoders.forget(llama)


def test_requests_share_steps_if_their_drafts_have_one_number_format(
    llama: PreTrainedModel, draft: PreTrainedModel
) -> None:
    def request(**config: Any) -> Any:
        ids = torch.tensor([text_of(1, 9)])
        options = dict(input_ids=ids, strategy="speculative", assistant_model=draft, max_new_tokens=8)
        return vars(llama)["generate"].prepared(**options, decoders_config=config).request

    one = request(draft_weights="int8")
    assert share_steps(one, request(draft_weights="int8"))
    assert not share_steps(one, request()) and not share_steps(one, request(draft_weights="int4"))


def test_lanes_with_one_draft_model_compile_it_each_as_it_says(
    llama: PreTrainedModel, draft: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[Any] = []
    during = Tiers.during

    def noted(self: Tiers, mode: Any, report: Any, *more: Any) -> Any:
        if self is not target:
            modes.append((mode, report.strategy))
        return during(self, mode, report, *more)

    target = vars(llama)["generate"].engine().forward_pass.tiers
    monkeypatch.setattr(Tiers, "during", noted)
    options = dict(assistant_model=draft, max_new_tokens=8)
    with scheduler_of(llama, **options) as scheduler:
        one = scheduler.submit(text_of(1, 9), strategy=Speculative(length=3))
        other = scheduler.submit(text_of(2, 9), strategy=Threshold(), decoders_config={"compile": "auto"})
        one.result(60), other.result(60)
    assert set(modes) == {(False, "speculative"), ("auto", "threshold")}
    passes = vars(llama)["generate"]._assistants.engine(draft, "auto", Precision()).forward_pass.tiers
    assert passes.mode is False and passes.report.strategy == ""


@pytest.mark.usefixtures("tiers_that_differ")
@pytest.mark.parametrize("strategy", ["autoregressive", "prompt_lookup"])
def test_a_request_ends_in_the_tier_in_which_it_began(strategy: str) -> None:
    """Newer ones run compiled beside it: they neither wait for it nor change what it writes."""
    model = decoders.enable(tiny_model("llama"))
    passes = vars(model)["generate"].engine().forward_pass.tiers
    begun, go_on = threading.Event(), threading.Event()

    class Gate(BaseStreamer):
        """Holds the steps up in the third, once compiled passes over one row and several are there."""

        def __init__(self) -> None:
            self.shown = 0

        def put(self, value: torch.Tensor) -> None:
            self.shown += 1
            if self.shown == 4:  # with the prompt
                assert all(passes.kinds[PassKind(several)].job.wait(60) for several in (False, True))
                begun.set()
                assert go_on.wait(60)

        def end(self) -> None:
            pass

    def call(compile: bool, new: int) -> list[int]:
        ids = torch.tensor([text_of(1, 9)])
        settings = {"compile": compile, "reuse": False}
        out = model.generate(
            ids, strategy="autoregressive", max_new_tokens=new, pad_token_id=0, decoders_config=settings
        )
        return out[0, 9:].tolist()

    settings = {"compile": "auto", "reuse": False, "prune": False}
    with scheduler_of(model, strategy=strategy, decoders_config=settings) as scheduler:
        old = scheduler.submit(text_of(1, 9), max_new_tokens=60, streamer=Gate())
        assert begun.wait(60)
        new = [scheduler.submit(text_of(1, 9), max_new_tokens=5) for _ in range(2)]
        go_on.set()
        results = [written(generation, text_of(1, 9)) for generation in (*new, old)]
        assert all(generation.report.compiled_steps == generation.report.steps for generation in new)
        assert old.report.compiled_steps == 0 and old.report.steps > max(g.report.steps for g in new)
        again = scheduler.submit(text_of(1, 9), max_new_tokens=5)
        assert written(again, text_of(1, 9)) == results[0]
    assert results == [call(True, 5), call(True, 5), call(False, 60)]
