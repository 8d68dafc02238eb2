"""When sampling, our plain decoding with the same seed is what tokens are compared with."""

from __future__ import annotations

from typing import Any

import pytest

from decoders import bench
from decoders.bench.tables import speed_table

from .conftest import TEXTS

EAGER = {"compile": False, "prefill_chunk": 64}


def measured(
    model: Any, draft: Any, tokenizer: Any, names: list[str], baselines: list[str], **options: Any
) -> list[Any]:
    sampling = bench.Sampling(temperature=1.0, seed=3)
    methods = [
        *bench.transformers_methods(model, draft, baselines, sampling=sampling),
        *bench.strategy_methods(model, names, draft, None, EAGER, sampling=sampling),
    ]
    work = bench.workloads(tokenizer, TEXTS[:1])
    return bench.summarise(bench.measure(methods, work, **{"new_tokens": 8, "repeats": 2, **options}))


def test_plain_decoding_joins_as_the_baseline(model: Any) -> None:
    made = bench.strategy_methods(model, ["prompt_lookup"], sampling=bench.Sampling())
    assert [c.name for c in made] == ["autoregressive", "prompt_lookup"]
    assert [c.name for c in bench.strategy_methods(model, ["prompt_lookup"])] == ["prompt_lookup"]


def test_only_coupled_drafts_promise_the_same_tokens(model: Any, draft: Any, tokenizer: Any) -> None:
    names = ["speculative[length=2]", "speculative[length=2,verifier=rejection]"]
    records = measured(model, draft, tokenizer, names, ["transformers-assisted[2]"])
    assert all(r.status == "ok" for r in records), [r.reason for r in records]
    assert [(r.method, r.identical, r.incomparable, r.baseline) for r in records] == [
        ("transformers", None, "n/a", ""),
        ("transformers-assisted[2]", None, "n/a", ""),
        ("autoregressive", True, "", "autoregressive"),
        ("speculative[length=2]", True, "", "autoregressive"),
        ("speculative[length=2,verifier=rejection]", None, "same distribution", ""),
    ]
    assert [r.verifier for r in records] == ["", "", "coupled", "coupled", "rejection"]
    assert all(r.ratio is not None for r in records), "speed still refers to transformers"
    cells = [str(cell) for column in speed_table({"": records}).columns for cell in column.cells]
    assert cells.count("n/a") == 2
    assert cells.count("same distribution") == 1


def test_every_round_draws_other_tokens_and_all_draw_the_same(model: Any, tokenizer: Any) -> None:
    seeds: dict[str, list[int]] = {}

    def noted(method: Any, *arguments: Any) -> bench.TimedCall:
        seeds.setdefault(method.name, []).append(method.sampling.seed)
        return bench.decode(method, *arguments)

    measured(model, None, tokenizer, ["prompt_lookup"], [], repeats=3, decode=noted, first_tokens=False)
    assert set(map(tuple, seeds.values())) == {(3, 3, 3, 3, 4, 5)}, "warm-up twice, check, three rounds"


def test_accepted_lengths_are_those_of_all_rounds(model: Any, draft: Any, tokenizer: Any) -> None:
    record = measured(model, draft, tokenizer, ["speculative[length=2]"], [], repeats=3)[-1]
    histograms = [s.accepted_lengths for s in record.samples]
    tokens = sum((n + 1) * count for h in histograms for n, count in enumerate(h))
    assert tokens == 3 * 8
    assert record.accepted_length == pytest.approx(tokens / sum(map(sum, histograms)))


@pytest.mark.parametrize("ours", [False, True])
def test_the_same_seed_gives_the_same_call(ours: bool, model: Any, tokenizer: Any) -> None:
    sampling = bench.Sampling(temperature=1.5, seed=11)
    make = bench.strategy_methods if ours else bench.transformers_methods
    options: dict[str, Any] = {"decoders_config": EAGER} if ours else {}
    method = make(model, names=["autoregressive"] if ours else [], sampling=sampling, **options)[0]
    (work,) = bench.workloads(tokenizer, TEXTS[:1])
    first, again = (bench.decode(method, work, 12).sequences for _ in range(2))
    other = bench.decode(method.in_round(1), work, 12).sequences
    assert first.equal(again)
    assert not first.equal(other)
