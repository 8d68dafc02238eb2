"""What a run comes to in a sentence, and the call that does it."""

from __future__ import annotations

from typing import Any

import pytest

from decoders.bench.figures import Spread
from decoders.bench.measurement import Measurement
from decoders.bench.records import Record
from decoders.bench.verdict import pooled, verdicts


def record(method: str, speed: float, kind: str = "code", **values: Any) -> Record:
    samples = [Measurement(f"{kind}-01", repeat, 0, 100 / speed, 0.0, 0, 100, None) for repeat in range(2)]
    given = {"identical": True, "ours": not method.startswith("transformers"), **values}
    return Record(
        method, given.pop("dtype", "float32"), given.pop("batch", 1), kind, samples=samples, tokens_per_second=Spread.of([speed]),
        ratio=Spread.of([speed / 10]), **given,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("speeds", "method", "said"),
    [
        ({"autoregressive": 12, "auto": 30, "prompt_lookup": 20}, "auto", "Use auto: 3.0 times transformers'"),
        ({"autoregressive": 12, "auto": 30, "prompt_lookup": 30.5}, "auto", "2.5 times plain decoding's"),
        ({"autoregressive": 12, "auto": 30, "prompt_lookup": 33}, "prompt_lookup", "3.3 times transformers'"),
        ({"autoregressive": 20, "prompt_lookup": 20.2}, "autoregressive", "no draft pays here"),
        ({"autoregressive": 20, "auto": 19.9}, "auto", "plain decoding is as fast here"),
        ({"autoregressive": 10.4, "prompt_lookup": 7}, "", "Leave strategy= out"),
        ({"transformers-prompt-lookup": 40, "auto": 30}, "", "Fastest is transformers' own transformers-prompt-lookup"),
        ({"transformers-prompt-lookup": 30.5, "auto": 30}, "auto", "Use auto"),
    ],
)
def test_the_fastest_is_advised_and_auto_where_it_is_about_as_fast(
    speeds: dict[str, float], method: str, said: str
) -> None:
    (verdict,) = verdicts([record("transformers", 10), *(record(name, speed) for name, speed in speeds.items())])
    assert verdict.method == method and said in verdict.text, verdict.text
    assert verdict.arguments == ({"strategy": method} if method else {})


def test_another_engine_is_not_called_transformers() -> None:
    others = record("llama.cpp[q4_0]", 40, ours=False, engine="llama.cpp")
    (verdict,) = verdicts([record("transformers", 10), others, record("auto", 30)])
    assert verdict.text.startswith("Fastest is llama.cpp[q4_0]: ")


def test_another_engine_is_not_the_fastest_if_a_lossy_method_of_ours_is() -> None:
    others = record("llama.cpp[q4_0]", 40, ours=False, engine="llama.cpp")
    lossy = record("autoregressive[weights=int4]", 50, identical=False)
    (verdict,) = verdicts([record("transformers", 10), others, lossy, record("auto", 30)])
    assert verdict.text.startswith("Use auto: ")


def test_prompts_of_all_kinds_count_by_their_time() -> None:
    records = [
        record("transformers", 10, "code"), record("auto", 40, "code"), record("transformers", 10, "story"),
        record("auto", 10, "story"),
    ]  # fmt: skip
    (verdict,) = verdicts(records)
    assert verdict.ratio is not None and verdict.ratio.median == pytest.approx(1.6)
    assert "from 1.0 (story) to 4.0 (code)" in verdict.text and verdict.by_kind == {"code": 4.0, "story": 1.0}


def test_every_dtype_and_number_of_rows_has_one() -> None:
    records = [
        record(name, speed, dtype=dtype, batch=batch)
        for dtype in ("float32", "bfloat16")
        for batch in (1, 4)
        for name, speed in (("transformers", 10), ("auto", 20))
    ]
    assert [(v.dtype, v.batch) for v in verdicts(records)] == list(dict.fromkeys((r.dtype, r.batch) for r in records))
    assert len(pooled(records)) == 4


def test_what_writes_other_tokens_is_not_advised() -> None:
    """Near-ties in low precision are no fault, but they are said."""
    wrong, lossy = {"identical": False}, {"exact": False}
    speeds = [
        record("transformers", 10),
        record("autoregressive", 15),
        record("auto", 30, **wrong),
        record("medusa", 40, **lossy),
    ]
    assert verdicts(speeds)[0].method == "autoregressive"
    low = [record("transformers", 10, dtype="bfloat16"), record("auto", 30, dtype="bfloat16", **wrong)]
    (verdict,) = verdicts(low)
    assert verdict.method == "auto" and verdict.text.endswith("near-ties in bfloat16 may differ.")


def test_what_writes_under_a_grammar_is_not_advised() -> None:
    records = [record("transformers", 10), record("autoregressive", 15), record("grammar[grammar=tool_call]", 90)]
    assert verdicts(records)[0].method == "autoregressive"
    assert verdicts([records[0], records[2]]) == []


def test_random_weights_say_nothing_of_drafts() -> None:
    (verdict,) = verdicts([record("transformers", 10), record("autoregressive", 20, random_weights=True)])
    assert verdict.method == "" and "nobody knows whether drafts pay" in verdict.text


def test_only_failures_have_none() -> None:
    assert verdicts([record("transformers", 10), Record("auto", "float32", 1, "code", "failed", "no", ours=True)]) == []


@pytest.mark.parametrize(
    ("method", "values", "code"),
    [
        ("prompt_lookup[length=12]", {"settings": {"prompt_lookup": {"length": 12}}}, ', strategy_config={"length": 12}'),
        ("speculative", {"draft_passes": 5.0}, ", assistant_model=draft"),
        ("suffix[verifier=block]", {}, ', verifier="block"'),
        ("auto[weights=int8]", {}, ', decoders_config={"weights": "int8"}'),
        (
            "suffix[alpha=2]+prompt_lookup", {"settings": {"suffix": {"alpha": 2}}},
            ', strategy_config={"suffix": {"alpha": 2}}',
        ),
    ],
)  # fmt: skip
def test_the_call_is_that_which_was_measured(method: str, values: dict[str, Any], code: str) -> None:
    (verdict,) = verdicts([record("transformers", 10), record(method, 30, **values)])
    name = "+".join(part.partition("[")[0] for part in method.split("+"))
    assert verdict.code.replace("'", '"') == f'model.generate(**inputs, strategy="{name}"{code})'
