"""A load of requests: the same in every run, and every method decodes all of it."""

from __future__ import annotations

import json
from statistics import median

import pytest
from typer.testing import CliRunner

import decoders
from decoders.bench.load import Arrival, LoadResult, arrivals, in_batches, scheduled
from decoders.cli import app
from decoders.testing import tiny_model

OPTIONS = {"decoders_config": {"compile": False}, "pad_token_id": 0}


def test_a_load_is_the_same_in_every_run_and_has_the_lengths_asked_for():
    load = arrivals([[1], [2]], 400, median=20, longest=100)
    assert load == arrivals([[1], [2]], 400, median=20, longest=100) != arrivals([[1], [2]], 400, 20, 100, seed=1)
    lengths = [request.new_tokens for request in load]
    assert 17 <= median(lengths) <= 23 and max(lengths) == 100 and min(lengths) >= 1
    assert {r.new_tokens for r in arrivals([[1]], 9, median=20, longest=100, spread=0)} == {20}
    assert [request.prompt for request in load[:3]] == [[1], [2], [1]] and {r.seconds for r in load} == {0.0}


def test_arrivals_come_at_the_rate_asked_for():
    moments = [request.seconds for request in arrivals([[1]], 1000, median=20, longest=100, rate=50)]
    assert moments == sorted(moments) and moments[-1] == pytest.approx(1000 / 50, rel=0.15)


def test_goodput_counts_what_was_done_in_time():
    result = LoadResult("x", seconds=4.0, tokens=80, latency=[0.5, 1.0, 3.0])
    assert result.tokens_per_second == 20 and result.goodput(1.0) == 0.5


@pytest.mark.parametrize("rate", [None, 400.0])
def test_every_method_decodes_the_whole_load(rate):
    model = decoders.enable(tiny_model("llama"))
    model.generation_config.eos_token_id = None
    load = arrivals([[3, 4, 5], [6, 7, 8, 9, 10]], 7, median=4, longest=9, rate=rate)
    results = [
        scheduled(model, "prompt_lookup", load, 3, OPTIONS),
        in_batches(model, "autoregressive", load, 3, OPTIONS),
        in_batches(model, None, load, 3, OPTIONS),
    ]
    for result in results:
        assert result.tokens == sum(request.new_tokens for request in load)
        assert len(result.latency) == len(load) and all(0 < latency <= result.seconds for latency in result.latency)
    first, latency = results[0].first_token, results[0].latency
    assert len(first) == len(load) and all(0 < a <= b for a, b in zip(first, latency, strict=True))
    assert all(result.first_token == [] for result in results[1:]), "a batch does not tell"


@pytest.mark.slow
def test_the_command_writes_what_it_measured():
    done = CliRunner().invoke(
        app, ["bench", "load", "--requests", "3", "--rows", "2", "-n", "3", "--longest", "4", "--prompt-tokens", "8",
              "--dtype", "float32", "--repeats", "2", "--method", "scheduler,batches", "--acceptance", "1,0.5", "--json", "-"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    written = json.loads(done.stdout)
    assert [result["method"] for result in written["results"]] == [
        "scheduler, autoregressive", "scheduler, synthetic[1,0.5]", "batches, autoregressive", "batches, synthetic[1,0.5]",
    ]  # fmt: skip
    assert written["run"]["requests"] == 3


def test_an_unknown_method_is_named_with_the_choices():
    done = CliRunner().invoke(app, ["bench", "load", "--method", "schedular"])
    assert done.exit_code != 0 and isinstance(done.exception, decoders.DecodersError | SystemExit)


def test_requests_of_one_token_have_no_time_per_token():
    model = decoders.enable(tiny_model("llama"))
    assert scheduled(model, "autoregressive", [Arrival(0.0, [5, 6], 1)], 1, OPTIONS).per_token == []
