"""A strategy may be there several times with other settings, and says in its name which ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from decoders import bench
from decoders.bench.timed_call import Stamps, first_token, forwards
from decoders.bench.timed_call import decode as bench_decode
from decoders.bench.variants import assistant_tokens, parse, split
from decoders.errors import SettingsError, UnknownNameError
from decoders.testing import tiny_model

from .conftest import TEXTS

EAGER = {"compile": False, "prefill_chunk": 64}


def test_commas_split_outside_brackets_only() -> None:
    text = 'a, b[x=[1,2],y={"k": "],"}] ,c[z=(1,2)],,d'
    assert split(text) == ["a", 'b[x=[1,2],y={"k": "],"}]', "c[z=(1,2)]", "d"]


@pytest.mark.parametrize("text", ["a[x=1", "a]", "a[x=[1]", "a[x=(1]", 'a[x="]'])
def test_brackets_must_match(text: str) -> None:
    with pytest.raises(SettingsError, match="closes nothing|is missing"):
        split(text)


def test_a_variant_holds_settings_and_verifier() -> None:
    variant = parse("speculative[length=2, tree=static,template=[[0],[0,0]],verifier=block,stage-config.length=3]")
    assert variant.parts == ("speculative",)
    assert variant.verifier == "block"
    assert variant.settings == {
        "speculative": {"length": 2, "tree": "static", "template": [[0], [0, 0]], "stage_config": {"length": 3}}
    }
    assert variant.shown(["speculative"]).startswith("speculative[length=2, tree=static,")


def test_merged_parts_have_brackets_of_their_own() -> None:
    variant = parse("prompt-lookup[length=3]+speculative[length=2,verifier=coupled]+autoregressive")
    assert variant.settings == {"prompt-lookup": {"length": 3}, "speculative": {"length": 2}}
    assert variant.verifier == "coupled"
    shown = variant.shown(["prompt_lookup", "speculative", "autoregressive"])
    assert shown == "prompt_lookup[length=3]+speculative[length=2,verifier=coupled]+autoregressive"


def test_brackets_name_the_tier() -> None:
    assert [parse(f"autoregressive{inside}").loop for inside in ("", "[compile=false]", "[compile=auto]")] == [
        {}, {"compile": False}, {"compile": "auto"}
    ]  # fmt: skip
    assert parse("lookahead[compile=true,window=3]").settings == {"lookahead": {"window": 3}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("speculative[length]", "speculative.* takes key=value"),
        ("speculative[length=2]x", "right after a name"),
        ("[length=2]", "right after a name"),
        ("", "is empty"),
        ("a[verifier=block]+b[verifier=rejection]", "one verifier"),
    ],
)
def test_malformed_variants_are_explained(text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse(text)


def test_variants_of_one_strategy_are_methods_of_their_own(model: Any) -> None:
    names = ["prompt_lookup", "prompt-lookup[length=3]", "prompt_lookup[max_ngram=2,length=5]"]
    made = bench.strategy_methods(model, names, settings={"prompt_lookup": {"max_ngram": 4}})
    assert [c.name for c in made] == [
        "prompt_lookup", "prompt_lookup[length=3]", "prompt_lookup[max_ngram=2,length=5]"
    ]  # fmt: skip
    assert [c.arguments["strategy_config"] for c in made] == [
        {"max_ngram": 4}, {"max_ngram": 4, "length": 3}, {"max_ngram": 2, "length": 5}
    ], "--set applies to all, brackets go before"  # fmt: skip
    assert made[2].settings == {"prompt_lookup": {"max_ngram": 2, "length": 5}}


def test_a_draft_model_of_its_own_takes_no_other(model: Any, draft: Any, tokenizer: Any, tmp_path: Any) -> None:
    draft.save_pretrained(tmp_path / "draft")
    made = bench.strategy_methods(
        model, [f"speculative[draft_model={tmp_path}/draft,length=2]", "speculative", "threshold"], None, None, EAGER
    )
    assert "assistant_model" not in made[0].arguments
    assert [c.skip_reason(1).startswith("needs a draft model") for c in made] == [False, True, True]
    entries = bench.measure(made[:1], bench.workloads(tokenizer, TEXTS[:1]), new_tokens=4, repeats=1)
    (record,) = bench.summarise(entries)
    assert (record.status, record.draft_passes) == ("ok", 2.0), record.reason


@pytest.mark.slow
def test_a_staged_strategy_tells_its_draft_models_work(model: Any, draft: Any, tokenizer: Any, tmp_path: Any) -> None:
    draft.save_pretrained(tmp_path / "small")
    staged = f"staged[passes=2,stage=speculative,stage_config.draft_model={tmp_path}/small,stage_config.length=3]"
    methods = bench.strategy_methods(model, [staged, "speculative[length=2]"], draft, None, EAGER)
    entries = bench.measure(methods, bench.workloads(tokenizer, TEXTS[:1]), new_tokens=6, repeats=2)
    record, chain = bench.summarise(entries)
    assert record.status == "ok", record.reason
    assert record.draft_passes == chain.draft_passes == 2.0, "equal draft cost, the small model's passes apart"
    assert 0 < record.overhead < 1


def test_brackets_of_transformers_assisted_hold_a_number(model: Any, draft: Any) -> None:
    assert assistant_tokens("transformers-assisted[5]") == ("transformers-assisted", 5)
    assert assistant_tokens("transformers-static") == ("transformers-static", None)
    for wrong in ("transformers-assisted[]", "transformers-assisted[0]", "transformers-assisted[a]"):
        with pytest.raises(SettingsError, match="draft tokens per step"):
            assistant_tokens(wrong)
    with pytest.raises(SettingsError, match="only transformers-assisted"):
        bench.transformers_methods(model, draft, ["transformers-static[3]"])
    with pytest.raises(UnknownNameError, match="transformers-assisted"):
        bench.transformers_methods(model, draft, ["transformers-asisted[3]"])


@pytest.mark.parametrize("tokens", [1, 3])
def test_transformers_drafts_exactly_so_many_tokens_per_step(tokens: int, model: Any, tokenizer: Any) -> None:
    draft = copy.deepcopy(model)  # a draft that is always right: every step but the last commits all
    method = bench.transformers_methods(model, draft, [f"transformers-assisted[{tokens}]"])[1]
    assert method.name == f"transformers-assisted[{tokens}]"
    (work,) = bench.workloads(tokenizer, TEXTS[:1])
    stamps = Stamps()
    with forwards(draft) as passes:
        bench.decode(method, work, 4 * (tokens + 1), stamps)
    assert (len(stamps.times), passes[0]) == (4, 4 * tokens)


@pytest.mark.slow
def test_an_unsure_assistant_is_not_cut_short(model: Any, draft: Any, tokenizer: Any) -> None:
    """Random weights give tokens probabilities below transformers' threshold of confidence."""
    default, constant = bench.transformers_methods(model, draft, ["transformers-assisted", "transformers-assisted[5]"])[
        1:
    ]
    work = bench.workloads(tokenizer, TEXTS[:1])
    cut, fixed = (
        r.draft_passes for r in bench.summarise(bench.measure([default, constant], work, new_tokens=20, repeats=1))
    )
    assert cut < 4 < fixed <= 5, "five, but for the steps at the end that have room for fewer"


def test_both_configs_are_left_as_found(model: Any, draft: Any, tokenizer: Any) -> None:
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"  # transformers writes to it after each call
    before = [(m.generation_config, m.generation_config.to_dict()) for m in (model, draft)]
    (work,) = bench.workloads(tokenizer, TEXTS[:1])
    for method in bench.transformers_methods(model, draft, ["transformers-assisted", "transformers-assisted[2]"]):
        bench.decode(method, work, 12)
        first_token(method, work, 12)  # ends its call with an exception
        after = [(m.generation_config, m.generation_config.to_dict()) for m in (model, draft)]
        assert [a[0] is b[0] and a[1] == b[1] for a, b in zip(after, before, strict=True)] == [True, True]


def test_accepted_lengths_compare_with_transformers_up_to_a_stop_token(tokenizer: Any) -> None:
    """The same pair and K, greedy: the same tokens are accepted in the same steps, also where a row stops early."""
    model, draft = tiny_model("llama"), tiny_model("llama")  # equal weights …
    for parameter in list(draft.parameters())[-3:]:
        parameter.data += 0.02 * parameter.data.roll(1)  # … a little apart
    (work,) = bench.workloads(tokenizer, TEXTS[:1])
    plain = bench.decode(bench.transformers_methods(model, names=[])[0], work, 13)
    model.generation_config.eos_token_id = stop = plain.sequences[0, -3].item()
    for new_tokens in (13, 8):
        methods = [
            *bench.transformers_methods(model, draft, ["transformers-assisted[3]"]),
            *bench.strategy_methods(model, ["speculative[length=3]"], draft, None, EAGER),
        ]
        records = bench.summarise(bench.measure(methods, [work], new_tokens=new_tokens, repeats=1))
        assert all(r.identical for r in records), [(r.method, r.difference, r.reason) for r in records]
        _, theirs, ours = records
        assert ours.accepted_length == pytest.approx(theirs.accepted_length), f"stop token {stop}"
        assert ours.accepted_length > 1


def test_memory_is_a_word_of_the_brackets() -> None:
    assert parse("suffix[memory=true,nodes=8]").loop == {"memory": True} and not parse("suffix").loop
    with pytest.raises(SettingsError, match="memory must be true or false, not 'warm'"):
        parse("suffix[memory=warm]")


def test_every_round_of_what_is_remembered_begins_cold(tokenizer: Any) -> None:
    model = tiny_model("llama")
    methods = bench.strategy_methods(
        model, ["suffix", "suffix[memory=true]"], decoders_config=EAGER, tokenizer=tokenizer
    )
    assert [m.arguments["decoders_config"]["memory"] for m in methods] == [False, True]
    workloads = bench.workloads(tokenizer, [("a", "kind", TEXTS[0][2]), ("b", "kind", TEXTS[0][2])], 1)
    remembered = []

    def decode(method: Any, workload: Any, new_tokens: int, streamer: Any = None) -> bench.TimedCall:
        call = bench_decode(method, workload, new_tokens, streamer)
        if method.arguments["decoders_config"]["memory"]:
            remembered.append(call.report.details["texts"])
        return call

    bench.measure(methods, workloads, new_tokens=8, repeats=2, decode=decode, first_tokens=False)
    checks, *rounds = [remembered[at : at + 2] for at in range(len(remembered) - 6, len(remembered), 2)]
    assert checks == [0, 1] and rounds == [[0, 1], [0, 1]]


def test_variants_with_other_number_formats_stand_beside_the_models_own(tokenizer: Any) -> None:
    model = tiny_model("llama")
    names = ["autoregressive", "autoregressive[weights=int8]", "suffix[kv_cache=int8,weights=int8]"]
    methods = bench.strategy_methods(model, names, decoders_config=EAGER, tokenizer=tokenizer)
    assert [method.exact for method in methods] == [True, False, False]
    own, int8, both = (method.model for method in methods)
    assert own is model and len({id(own), id(int8), id(both)}) == 3
    assert all(a is b for a, b in zip(own.parameters(), int8.parameters(), strict=True))
    workload = bench.workloads(tokenizer, [("a", "kind", TEXTS[0][2])], 1)[0]
    for method in (*methods, *methods):
        bench_decode(method, workload, 4)
    engines = [vars(method.model)["generate"]._engine for method in methods]
    assert [engine.precision.weights for engine in engines] == [None, "int8", "int8"]
    assert [engine.precision.cache for engine in engines] == [None, None, "int8"]
    with pytest.raises(SettingsError, match="weights must be keep, 16bit, int8 or int4, not 'packed'"):
        parse("autoregressive[weights=packed]")
