"""Turns are taken in a rotating order, figures follow from the samples, and a failure is a row, not a gap."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList

from decoders import bench
from decoders.bench import measurement
from decoders.bench.measurement import Check, Competitor, WarmupCost
from decoders.bench.tables import noise, tables
from decoders.bench.timed_call import compiled_share, first_token, written
from decoders.errors import SettingsError, UnknownNameError
from decoders.report import Report, Timings

from .conftest import TEXTS


def fake_report(**timings: float) -> Report:
    return Report("fake", accepted_lengths=[0, 5], steps=5, timings=Timings(**timings))


class Clock:
    """Stands in for `decode`: notes who ran and takes as long as it is told."""

    def __init__(self, seconds: dict[str, list[float]], compile_seconds: float = 0.0) -> None:
        self.seconds, self.compile_seconds, self.ran = seconds, compile_seconds, []

    def __call__(self, method: Any, workload: Any, new_tokens: int, streamer: Any = None) -> bench.TimedCall:
        self.ran.append(method.name)
        queue = self.seconds[method.name]
        seconds = queue.pop(0) if len(queue) > 1 else queue[0]
        new = torch.full((workload.rows, new_tokens), 7)
        report = fake_report(propose=0.5, core=1.0, observe=0.25, host=0.25) if method.ours else None
        sequences = torch.cat([workload.input_ids, new], dim=1)
        return bench.TimedCall(sequences, seconds + self.compile_seconds, self.compile_seconds, 0, report)


def test_the_order_rotates_so_that_everyone_takes_every_place() -> None:
    orders = [bench.rotation("abc", turn) for turn in range(6)]
    assert all(sorted(order) == list("abc") for order in orders)
    for place in range(3):
        assert Counter(order[place] for order in orders) == {"a": 2, "b": 2, "c": 2}


def test_no_one_always_follows_the_same_neighbour() -> None:
    pairs = Counter(
        pair for turn in range(8) for pair in zip(*[bench.rotation("abcd", turn)[i:] for i in (0, 1)], strict=False)
    )
    assert pairs["a", "b"] == pairs["b", "a"]


def test_rounds_are_interleaved(methods: list[Any], tokenizer: Any) -> None:
    clock = Clock({c.name: [1.0] for c in methods})
    entries = bench.measure(
        methods, bench.workloads(tokenizer, TEXTS[:1]), new_tokens=5, repeats=3, decode=clock, first_tokens=False
    )
    timed = clock.ran[-9:]
    assert all(len(set(timed[start : start + 3])) == 3 for start in (0, 3, 6)), "everyone runs once a round"
    assert {e.method.name: [s.position for s in e.samples] for e in entries} == {
        "transformers": [0, 2, 1], "autoregressive": [1, 0, 2], "prompt_lookup": [2, 1, 0]
    }  # fmt: skip


def test_an_interrupted_run_keeps_the_prompts_that_everyone_has_decoded(methods: list[Any], tokenizer: Any) -> None:
    class Impatient(Clock):
        def __call__(self, method: Any, workload: Any, *rest: Any) -> bench.TimedCall:
            # Two warm-up calls and two checks of each of three methods; then the second prompt's first call.
            if len(self.ran) == 15:
                raise KeyboardInterrupt
            return super().__call__(method, workload, *rest)

    workloads = bench.workloads(tokenizer, TEXTS[:2])
    clock = Impatient({c.name: [1.0] for c in methods})
    with pytest.raises(bench.Interrupted) as stopped:
        bench.measure(methods, workloads, new_tokens=5, repeats=3, decode=clock, first_tokens=False)
    entries = stopped.value.entries
    assert [[s.workload for s in e.samples] for e in entries] == [[workloads[0].name]] * 3
    assert {record.kind for record in bench.summarise(entries)} == {workloads[0].kind}

    clock = Impatient({c.name: [1.0] for c in methods})
    clock.ran += ["earlier"] * 6
    with pytest.raises(KeyboardInterrupt) as nothing:
        bench.measure(methods, workloads, new_tokens=5, repeats=3, decode=clock, first_tokens=False)
    assert not isinstance(nothing.value, bench.Interrupted)


def test_median_spread_and_ratio_follow_the_clock(methods: list[Any], tokenizer: Any) -> None:
    # Two warm-up calls and a check come before the three that are timed.
    clock = Clock({"transformers": [9, 9, 9, 2, 4, 5], "prompt_lookup": [9, 9, 9, 1, 1, 2], "autoregressive": [1.0]})
    entries = bench.measure(
        methods, bench.workloads(tokenizer, TEXTS[:1]), new_tokens=20, repeats=3, decode=clock, first_tokens=False
    )
    records = {r.method: r for r in bench.summarise(entries)}
    theirs, ours = records["transformers"], records["prompt_lookup"]
    assert theirs.tokens_per_second == bench.Spread(5.0, 4.0, 10.0, 3)
    assert ours.tokens_per_second == bench.Spread(20.0, 10.0, 20.0, 3)
    assert ours.ratio == bench.Spread(2.5, 2.0, 4.0, 3), "each repeat against the same repeat's baseline"
    assert theirs.ratio == bench.Spread(1.0, 1.0, 1.0, 3)


def test_repeats_far_apart_are_called_noisy() -> None:
    quiet = bench.Record("quiet", "float32", 1, "copy", tokens_per_second=bench.Spread(10, 9, 11, 3))
    loud = replace(quiet, method="loud", tokens_per_second=bench.Spread(10, 4, 11, 3))
    assert noise([quiet, bench.Record("absent", "float32", 1, "copy", "failed")]) == ""
    assert "repeats of loud lie" in noise([quiet, loud])


def test_compilation_is_in_no_speed(methods: list[Any], tokenizer: Any) -> None:
    clock = Clock({c.name: [2.0] for c in methods}, compile_seconds=40.0)
    entries = bench.measure(
        methods, bench.workloads(tokenizer, TEXTS[:1]), new_tokens=20, repeats=1, decode=clock, first_tokens=False
    )
    record = bench.summarise(entries)[-1]
    assert record.tokens_per_second.median == 10.0
    assert (record.first_call, record.compile_seconds) == (42.0, 40.0)


def test_a_step_is_split_into_its_parts(methods: list[Any], tokenizer: Any) -> None:
    clock = Clock({c.name: [2.0] for c in methods})
    entries = bench.measure(
        methods[-1:],
        bench.workloads(tokenizer, TEXTS[:1]),
        new_tokens=5,
        repeats=2,
        decode=clock,
        first_tokens=False,
    )
    (record,) = bench.summarise(entries, bandwidth=1e9)
    step = record.step_ms
    assert (step.total, step.propose, step.core, step.observe, step.host) == (400.0, 100.0, 200.0, 50.0, 50.0)
    assert record.bandwidth_fraction == pytest.approx(record.weight_bytes / 0.2 / 1e9)
    assert record.identical is None, "there is no baseline in this run"


def test_records_are_complete_and_json_safe(methods: list[Any], tokenizer: Any) -> None:
    entries = bench.measure(methods, bench.workloads(tokenizer, TEXTS), new_tokens=6, repeats=2)
    records = bench.summarise(entries, bandwidth=1e10)
    assert [(r.method, r.kind) for r in records] == [(c.name, kind) for c in methods for kind in ("copy", "code")]
    for record in json.loads(json.dumps([r.as_dict() for r in records])):
        assert record["status"] == "ok", record["reason"]
        assert record["identical"] is True
        assert record["accepted_length"] >= 1
        assert record["tokens_per_second"]["count"] == 2
        assert record["first_token"]["low"] > 0
        assert len(record["samples"]) == 2 * (2 if record["kind"] == "copy" else 1)
        assert record["first_call"] > 0
        assert (record["step_ms"]["core"] is not None) == record["ours"]


def test_a_batch_is_filled_up_with_the_kinds_first_prompts(tokenizer: Any) -> None:
    work = bench.workloads(tokenizer, [(str(i), "k", "ab" * (i + 1)) for i in range(3)], rows=2)
    assert [w.rows for w in work] == [2, 2]
    assert work[1].attention_mask.sum(1).tolist() == [6, 2]


def test_a_failing_method_is_reported_not_dropped(methods: list[Any], tokenizer: Any) -> None:
    def fails(*given: object, **options: object) -> bool:
        raise ZeroDivisionError

    broken = replace(
        methods[-1],
        name="broken",
        arguments={**methods[-1].arguments, "stopping_criteria": StoppingCriteriaList([fails])},
    )
    refused = replace(methods[-1], name="refused", arguments={**methods[-1].arguments, "num_beams": 4})
    entries = bench.measure([*methods, broken, refused], bench.workloads(tokenizer, TEXTS[:1]), new_tokens=4, repeats=1)
    records = {r.method: r for r in bench.summarise(entries)}
    assert records["broken"].status == "failed"
    assert "Error" in records["broken"].reason
    assert records["refused"].status == "skipped"
    assert "num_beams" in records["refused"].reason
    assert records["prompt_lookup"].status == "ok"


def test_a_failure_in_a_later_round_is_a_failure(methods: list[Any], tokenizer: Any) -> None:
    clock = Clock({c.name: [1.0] for c in methods})

    def decode(method: Any, *args: Any) -> bench.TimedCall:
        if method.name == "prompt_lookup" and clock.ran.count("prompt_lookup") == 4:
            raise RuntimeError("out of memory\nlong story")
        return clock(method, *args)

    entries = bench.measure(
        methods, bench.workloads(tokenizer, TEXTS[:1]), new_tokens=4, repeats=3, decode=decode, first_tokens=False
    )
    assert (entries[-1].status, entries[-1].reason) == ("failed", "RuntimeError: out of memory")


def test_transformers_assisted_ways_say_why_they_do_not_run(model: Any, tokenizer: Any) -> None:
    methods = bench.transformers_methods(model)
    assert methods[0].name == "transformers"
    assisted = next(c for c in methods if c.name == "transformers-assisted")
    lookup = next(c for c in methods if c.name == "transformers-prompt-lookup")
    assert "--draft" in assisted.skip_reason(1)
    assert not lookup.skip_reason(1)
    assert "one row" in lookup.skip_reason(2)


@pytest.mark.parametrize("name", ["transformers-static", "transformers-prompt-lookup", "transformers-assisted"])
def test_transformers_own_ways_run(name: str, model: Any, draft: Any, tokenizer: Any) -> None:
    methods = bench.transformers_methods(model, draft, [name])
    entries = bench.measure(methods, bench.workloads(tokenizer, TEXTS[:1]), new_tokens=6, repeats=1)
    record = bench.summarise(entries)[1]
    assert (record.method, record.status, record.identical) == (name, "ok", True), record.reason


def test_unknown_names_and_settings_end_the_run_before_it_starts(model: Any) -> None:
    with pytest.raises(UnknownNameError, match="prompt_lookup"):
        bench.strategy_methods(model, ["prompt_lokup"])
    with pytest.raises(SettingsError, match="length"):
        bench.strategy_methods(model, ["prompt_lookup"], settings={"prompt_lookup": {"lenght": 3}})
    with pytest.raises(SettingsError, match="prompt_lookup"):
        bench.strategy_methods(model, ["autoregressive"], settings={"prompt_lookup": {"length": 3}})
    with pytest.raises(UnknownNameError, match="transformers-static"):
        bench.transformers_methods(model, names=["transformers-statc"])


def test_the_baseline_ignores_a_default_strategy(
    monkeypatch: pytest.MonkeyPatch, methods: list[Any], tokenizer: Any
) -> None:
    monkeypatch.setenv("DECODERS_STRATEGY", "prompt_lookup")
    call = bench.decode(methods[0], bench.workloads(tokenizer, TEXTS[:1])[0], 4)
    assert call.report is None


def test_the_first_token_ends_its_call(methods: list[Any], tokenizer: Any) -> None:
    (work,) = bench.workloads(tokenizer, TEXTS[:1])
    for method in methods:
        assert first_token(method, work, 1000 - 900) is not None
        assert bench.decode(method, work, 4).sequences.shape[1] == work.input_ids.shape[1] + 4, "usable afterwards"


def test_under_a_grammar_tokens_are_compared_under_that_grammar_alone(methods: list[Any], tokenizer: Any) -> None:
    (work,) = bench.workloads(tokenizer, TEXTS[:1])
    constrained = [
        replace(methods[1], name=f"{name}[grammar=json]", grammar="json") for name in ("grammar", "autoregressive")
    ]
    entries = [Competitor(c, 1, kind_of={work.name: "copy"}) for c in (methods[0], *constrained)]
    for entry, token in zip(entries, (3, 4, 4), strict=True):
        entry.checks[work.name] = Check([[1, 2, token]], 3, 1.0)
    assert [r.identical for r in bench.summarise(entries[:2])] == [True, None]
    assert [r.identical for r in bench.summarise(entries)] == [True, True, True]


def test_differences_name_row_and_token(methods: list[Any], tokenizer: Any) -> None:
    (work,) = bench.workloads(tokenizer, TEXTS[:2], rows=2)
    entries = [Competitor(c, 2, kind_of={work.name: "copy"}) for c in methods[:2]]
    entries[0].checks[work.name] = Check([[1, 2, 3], [4, 5, 6]], 3, 1.0)
    entries[1].checks[work.name] = Check([[1, 2, 3], [4, 9, 6]], 3, 1.0)
    record = bench.summarise(entries)[1]
    assert record.identical is False
    assert record.difference.endswith("row 1, new token 1")


def test_the_title_says_how_much_of_the_text_loops(methods: list[Any], tokenizer: Any) -> None:
    (work,) = bench.workloads(tokenizer, TEXTS[:1], rows=1)
    entries = [Competitor(c, 1, kind_of={work.name: "copy"}) for c in methods[:2]]
    for entry in entries:
        entry.checks[work.name] = Check([[1, 2, 3] * 5 + [4] * 5, []], 20, 1.0)
    records = bench.summarise(entries)
    assert [r.looping for r in records] == [4 / 20, 4 / 20]
    assert str(tables(records)[0].title).endswith(" · 20% of the text loops")
    for entry in entries:
        entry.checks[work.name] = Check([list(range(20))], 20, 1.0)
    records = bench.summarise(entries)
    assert records[0].looping == 0
    assert "loops" not in str(tables(records)[0].title)


def test_tokens_count_up_to_and_with_the_stop_token(methods: list[Any], tokenizer: Any) -> None:
    (work,) = bench.workloads(tokenizer, TEXTS[:1])
    methods[0].model.generation_config.eos_token_id = 5
    new = torch.tensor([[1, 2, 5, 0, 0]])
    assert written(methods[0], work, torch.cat([work.input_ids, new], 1)) == [[1, 2, 5]]


def test_the_share_of_compiled_steps_counts_the_one_that_reads_the_prompts_end() -> None:
    report = Report(strategy="autoregressive", steps=4, prefill_steps=1)
    shares = []
    for compiled in (0, 3, 4):
        report.compiled_steps = compiled
        shares.append(compiled_share(report))
    assert shares == [0, 0.75, 1]  # a run waits until it is 1
    assert compiled_share(None) is None


def test_the_time_that_is_left_does_not_grow(
    methods: list[Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of the calls so far, of each method on each prompt; before these, that of the warm-up, which compiles."""
    now, seconds, left = [0.0], {"transformers": 3.0, "autoregressive": 1.0, "prompt_lookup": 0.5}, list[float]()
    work = bench.workloads(tokenizer, TEXTS)
    clock = Clock({name: [1.0] for name in seconds})

    def decode(method: Any, workload: Any, new_tokens: int, streamer: Any = None) -> Any:
        now[0] += seconds[method.name] * (1 + workload.input_ids.shape[1] / 10)
        return replace(clock(method, workload, new_tokens, None), seconds=seconds[method.name])

    monkeypatch.setattr(measurement, "time", SimpleNamespace(monotonic=lambda: now[0]))
    bench.measure(
        methods, work, new_tokens=4, repeats=3, decode=decode, first_tokens=False,
        progress=lambda _, expected: left.append(expected + now[0]),
    )  # fmt: skip
    assert left[:2] == [math.inf] * 2, "nothing is known before one of theirs and one of ours was warmed up"
    assert now[0] / 3 < left[2] < 2 * now[0] and left[len(methods)] < 2 * now[0]
    ends = left[
        len(methods) + len(methods) * len(work) :: len(methods) * len(work)
    ]  # every prompt was read by everyone
    assert ends == pytest.approx([now[0]] * len(ends)), "the expected end is the end"


def test_time_that_is_left_includes_what_is_still_to_be_compiled(methods: list[Any]) -> None:
    entries = [Competitor(method, 1) for method in methods]
    theirs, ours, _ = entries
    assert measurement._left(entries, 0, texts=10) == math.inf
    theirs.warmup, ours.warmup = (WarmupCost(first, 1.0, first - 1, 1, 0, None, None) for first in (3.0, 30.0))
    assert measurement._left(entries, 1, texts=10) == math.inf, "nothing is known of ours"
    assert measurement._left(entries, 2, texts=10) == 31 + 3 * 10


@pytest.mark.parametrize(
    ("seconds", "methods_measured", "prompts", "rounds"), [(1e3, 3, 3, 3), (75.0, 3, 3, 1), (44.0, 3, 1, 1), (9.0, 2, 1, 1)]
)  # fmt: skip
def test_what_does_not_fit_into_the_seconds_is_left_out(
    seconds: float, methods_measured: int, prompts: int, rounds: int, methods: list[Any], tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each call takes five seconds: 30 for the warm-up of three methods, 15 for a prompt."""
    now, reports = [0.0], list[int]()
    clock = Clock({method.name: [5.0] for method in methods})

    def decode(method: Any, workload: Any, new_tokens: int, streamer: Any = None) -> Any:
        now[0] += 5.0
        return clock(method, workload, new_tokens, None)

    monkeypatch.setattr(measurement, "time", SimpleNamespace(monotonic=lambda: now[0]))
    entries = bench.measure(
        methods, bench.workloads(tokenizer, TEXTS), new_tokens=4, repeats=3, decode=decode, first_tokens=False, seconds=seconds,
        measured=lambda entries: reports.append(len(entries)),
    )  # fmt: skip
    measured = [entry for entry in entries if entry.samples]
    assert len(measured) == methods_measured and measured[0].method.name == "transformers"
    for entry in measured:
        assert len({sample.workload for sample in entry.samples}) == prompts == len(entry.kind_of)
        assert len(entry.samples) == prompts * rounds
    for entry in set(map(id, entries)) - set(map(id, measured)):
        assert next(e for e in entries if id(e) == entry).reason == "no time was left for it: --seconds"
    assert len(reports) >= prompts * rounds
