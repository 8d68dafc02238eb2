"""``decoders.advise`` tries strategies on a few prompts, and reckons what else would help from what steps cost."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import decoders
from decoders import bench
from decoders.bench import advice, measurement, records
from decoders.bench.advice import Advice, Outlook
from decoders.bench.figures import Spread
from decoders.bench.verdict import Verdict
from decoders.cli import app
from decoders.costs import CostCurve, CostPoint, Subject
from decoders.errors import SettingsError

from .conftest import TEXTS


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of four tokens."""
    monkeypatch.setattr(advice, "MOST", 4)
    monkeypatch.setattr(advice, "FEWEST", 4)


@pytest.mark.usefixtures("short")
def test_it_says_what_to_use_and_how_fast_that_is(
    model: Any, draft: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    for share in ("SETTINGS", "PACKED"):  # a fast machine has time for these, too
        monkeypatch.setattr(advice, share, 0.0)
    advised = decoders.advise(
        model, ["one two one two one", "a b a b a b a"], tokenizer=tokenizer, assistant_model=draft, seconds=0.5, compile=False,
        progress=lambda what, left: told.append(what),
    )  # fmt: skip
    methods = {"transformers", *advice.STRATEGIES, *advice.DRAFTED}
    assert advised.given == 2 and {"cpu", "threads", "torch"} <= set(advised.machine)
    assert {r.method for r in advised.records} == methods and all(r.identical for r in advised.records)
    assert advised.verdict.method in {"", *methods} and advised.verdict.text in str(advised)
    assert 1 <= advised.prompts <= 2 and advice.FEWEST <= advised.new_tokens <= advice.MOST
    assert advised.outlooks == (), "a draft model was tried"
    assert told[0] == "one short text" and any("round 1" in what for what in told)
    json.dumps(advised.as_dict(), default=str)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("speed", "setting"), [(1.0, {}), (0.5, {"length": 16})])
def test_settings_of_the_winner_are_tried_and_stand_in_the_call(
    speed: float, setting: dict[str, int], model: Any, draft: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls take times that are made up: seconds, by method."""
    seconds = {"transformers": 4.0, "prompt_lookup": 1.0, "prompt_lookup[length=16]": speed}

    def turns(entries: Any, *arguments: Any, **options: Any) -> int:
        rounds = take_turns(entries, *arguments, **options)
        for entry in entries:
            per_call = seconds.get(entry.method.name, 3.0)
            entry.samples = [replace(sample, seconds=per_call) for sample in entry.samples]
        return rounds

    take_turns = advice.take_turns
    for name, value in (("take_turns", turns), ("STRATEGIES", ("autoregressive", "prompt_lookup")), ("DRAFTED", ())):
        monkeypatch.setattr(advice, name, value)
    advised = decoders.advise(
        model, ["one two one"], tokenizer=tokenizer, assistant_model=draft, seconds=60, compile=False
    )
    assert advised.verdict.arguments == {"strategy": "prompt_lookup"} | (
        {"strategy_config": setting} if setting else {}
    )
    assert {"prompt_lookup[length=4]", "prompt_lookup[length=16]"} <= {r.method for r in advised.records}


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_compiled_steps_are_measured_on_the_best_of_them(
    model: Any, draft: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling itself takes too long for a quick test: what is called so runs uncompiled here."""
    monkeypatch.setattr(advice, "_compiled", dict)
    advised = decoders.advise(model, ["one two one"], tokenizer=tokenizer, assistant_model=draft, seconds=130)
    compiled = [r.method for r in advised.records if r.compiled_share == 1.0]
    assert {"transformers", "auto", "autoregressive"} <= set(compiled) and len(compiled) <= 4
    assert advised.compiling is not None and advised.compiling > 0
    assert any(line.startswith("Compiled") for line in advised.lines)


@pytest.mark.usefixtures("short")
def test_without_a_draft_model_it_is_reckoned_what_one_would_bring(model: Any, tokenizer: Any) -> None:
    advised = decoders.advise(model, ["one two"], tokenizer=tokenizer, seconds=10, compile=False)
    assert [outlook.what for outlook in advised.outlooks] == ["A draft model", "Heads (medusa, eagle3)"]


@pytest.mark.parametrize(("dtype", "narrow"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_16_bit_weights_are_tried_where_they_would_copy_any(dtype: torch.dtype, narrow: bool) -> None:
    layer = torch.nn.Linear(8, 8).to(dtype)
    assert not advice._has_narrow_weights(layer)  # type: ignore[arg-type]  # any module does
    assert advice._has_narrow_weights(layer.float()) == narrow  # type: ignore[arg-type]


def curve(*milliseconds: tuple[int, float]) -> CostCurve:
    subject = Subject(model="m", dtype="d", quantization="", device="c", threads=1, attention="sdpa", torch="2")
    points = [CostPoint(rows=1, context=64, nodes=n, compiled=False, seconds=ms / 1e3) for n, ms in milliseconds]
    return CostCurve(subject=subject, points=tuple(points))


@pytest.mark.parametrize(
    ("costs", "draft", "heads"),
    [
        # Nodes cost nothing: eight draft tokens, 3.2 tokens in 1.8 steps; 2.5 tokens in 1.1.
        (curve((1, 10), (32, 10)), 1.0 * (1 - 0.7**5) / 0.3 / 1.4, 2.5 / 1.1),
        # Each node is as long as a step: one draft token, 1.7 tokens in 2.1 steps.
        (curve((1, 10), (32, 320)), 1.7 / 2.1, 2.5 / 25.1),
    ],
)
def test_drafts_are_worth_what_steps_of_more_nodes_allow(costs: CostCurve, draft: float, heads: float) -> None:
    ratios = [outlook.ratio for outlook in advice._outlooks(costs, 64, False, plain=2.0)]
    assert ratios == [pytest.approx(2 * draft, rel=0.02), pytest.approx(2 * heads, rel=0.01)]


def test_what_would_help_is_told_from_what_would_not() -> None:
    verdict = Verdict("", "float32", 1, "auto", "Use auto.", ratio=Spread.of([2.0]), arguments={"strategy": "auto"})
    advised = Advice(
        verdict, 1.31, (Outlook("A draft model", 3.1, "one"), Outlook("Heads", 2.1, "some")), 60.0, 64, 2, ()
    )
    assert str(advised).splitlines()[:-1] == [
        "Use auto.", '    model.generate(**inputs, strategy="auto")',
        "Compiled, as it will be after some use; that has 1.3 times the uncompiled speed.",
        "A draft model would have 3.1 times transformers' tokens/s, worth a try (estimated for one).",
        "Heads would have 2.1 times transformers' tokens/s, about what this has (estimated for some).",
    ]  # fmt: skip


def test_figures_have_what_they_are_of_beside_them_and_a_condition_where_the_machine_was_busy() -> None:
    verdict = Verdict("", "bfloat16", 1, "auto", "Use auto: 5.5 times.", arguments={"strategy": "auto"})
    quiet = Advice(
        verdict, None, (), 60.0, 16, 2, (), given=3, machine={"cpu": "Some CPU", "threads": 2, "device": "cpu"},
        weights={"int8": 1.4, "int4": 1.01},
    )  # fmt: skip
    lines = str(quiet).splitlines()
    assert lines[0] == "Use auto: 5.5 times."
    assert lines[2] == (
        'With decoders_config={"weights": "int8"} it had 1.4 times that speed, and other texts: compare them.'
    )
    assert lines[3].endswith("it had 1.0 times that speed, so nothing is gained.")
    assert lines[4] == (
        "2 of 3 prompts (more with more seconds), 16 new tokens each, weights in bfloat16, uncompiled; Some CPU, 2 threads, "
        "device cpu; 60 s"
    )
    one = replace(quiet, prompts=1, given=1, machine={})
    assert one.measured == "1 prompt, 16 new tokens each, weights in bfloat16, uncompiled; 60 s"
    too_busy = replace(one, records=(SimpleNamespace(compiled_share=None), SimpleNamespace(compiled_share=1.0)))
    assert "uncompiled" not in too_busy.measured  # compiled steps were measured, and not compared
    lines = str(replace(quiet, busy="Busy: others run.")).splitlines()
    assert lines[:2] == ["Busy: others run.", "If that holds on a quiet machine: Use auto: 5.5 times."]


def test_weights_are_among_what_is_tried(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MOST", 4), ("FEWEST", 4), ("STRATEGIES", ("autoregressive", "auto")), ("TUNED", {})):
        monkeypatch.setattr(advice, name, value)
    narrow = copy.deepcopy(model).bfloat16().float()
    advised = decoders.advise(narrow, ["one two one"], tokenizer=tokenizer, seconds=60, compile=False)
    assert set(advised.weights) == {"16bit", "int8", "int4"} and all(gain > 0 for gain in advised.weights.values())
    assert "weights" not in advised.code and sum("weights=" in record.method for record in advised.records) == 3


@pytest.mark.parametrize(
    ("per_token", "prompts", "new_tokens"),
    [(0.001, 3, advice.MOST), (0.02, 3, 62), (0.05, 3, 25), (0.1, 2, 18), (5.0, 1, advice.FEWEST)],
)
def test_a_slow_machine_writes_fewer_and_shorter_texts(
    per_token: float, prompts: int, new_tokens: int, methods: list[Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """22.5 seconds, twice, of three methods."""
    monkeypatch.setattr(advice, "decode", lambda method, work, n: SimpleNamespace(seconds=n * per_token / 2))
    chosen, works = advice._affordable(
        [methods[0], *methods[1:], methods[2]][:4], bench.workloads(tokenizer, TEXTS), 15.0
    )
    assert (len(works), chosen) == (prompts, pytest.approx(new_tokens, abs=1))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("seconds", "stopped_at"),
    [(30, 0), (100, 0), (30, 1), (30, 12), (100, 20), (100, 40), (119, 0), (130, 0), (130, 50)],
)
def test_nothing_begins_that_cannot_end_within_the_time(
    seconds: float, stopped_at: int, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is pretended: a call takes a second, and in one of them the machine is stopped for 100 seconds."""
    now, begun, compiled = [0.0], list[float](), list[float]()

    def decoded(method: Any, *given: Any) -> Any:
        done = decode(method, *given)
        begun.append(now[0])
        now[0] += 1.0 + 100.0 * (len(begun) == stopped_at)
        return replace(done, seconds=1.0)

    decode, clock = advice.decode, SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    for module in (advice, measurement):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(advice, "decode", decoded)
    monkeypatch.setattr(advice, "_compiled", lambda arguments: compiled.append(now[0]) or dict(arguments))
    advised = decoders.advise(model, [text for *_, text in TEXTS], tokenizer=tokenizer, seconds=seconds)
    mandatory = 2 * len(
        ("transformers", *advice.STRATEGIES)
    )  # calls: each writes a prompt twice, or there are no figures
    late = [number for number, began in enumerate(begun, 1) if began > seconds]
    assert not late or max(late) <= max(4, stopped_at) + mandatory
    assert advised.seconds <= seconds + (100 + mandatory) * bool(stopped_at)
    assert stopped_at or bool(compiled) == (seconds >= 120)


def test_prompts_are_needed_and_something_to_read_them_with(model: Any, tokenizer: Any) -> None:
    with pytest.raises(SettingsError, match="tokenizer="):
        decoders.advise(model, ["a"])
    for prompts, said in (([], "leave it out"), ([""], "no text"), ("a text", "put it into a list")):
        with pytest.raises(SettingsError, match=said):
            decoders.advise(model, prompts, tokenizer=tokenizer)


@pytest.mark.usefixtures("tiny_demo", "short")
def test_the_command_prints_it_and_writes_json() -> None:
    done = CliRunner().invoke(app, ["advise", "demo", "--seconds", "0.5", "--no-compile", "--json", "-"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert set(result) == {
        "verdict",
        "code",
        "compiling",
        "outlooks",
        "seconds",
        "new_tokens",
        "prompts",
        "given",
        "busy",
        "machine",
        "weights",
        "records",
    }
    assert result["verdict"]["text"] in (said := " ".join(done.stderr.split()))
    assert result["machine"]["cpu"] in said and f"weights in {result['verdict']['dtype']}" in said


def test_on_a_busy_machine_no_speed_is_compared(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "waiting", lambda _: 0.63)
    advised = decoders.advise(model, ["one two"], tokenizer=tokenizer, seconds=0.1, compile=False)
    assert "no speed is compared here" in str(advised) and "steps waited 63% of their time" in str(advised)
    assert "times" not in str(advised) and all(record.ratio is None for record in advised.records)
