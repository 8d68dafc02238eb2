"""``generate(grammar=…)``: what comes out belongs to the language, under every strategy, and is the same text under all."""

from __future__ import annotations

import functools
import gc
import json
import re
import warnings
import weakref
from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import BaseModel, Field, field_validator
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import decoders
from decoders.common import host_reads
from decoders.constraints.base import CompiledGrammar
from decoders.constraints.compiling import compiled, forget
from decoders.engine.decode import batch, engine
from decoders.engine.decode.grammar.device_guide import DeviceGuide
from decoders.errors import GrammarError, SettingsError, UnknownNameError, UnsupportedError
from decoders.hf.grammars import KEPT, vocabulary_of
from decoders.registry.resolve import resolve_backend
from decoders.strategies import Lookahead, PromptLookup, Speculative, Staged, Threshold
from decoders.testing import decode, prompts, tiny_model
from decoders.testing.models import ARCHITECTURES, Architecture

from ..tape_recorder import TapeRecorder
from ..turns import slow_but

#: Rows of the logits; the tokenizer has fewer tokens.
SIZE = 288
END = 1
EAGER = {"compile": False}
BACKENDS = ["table", "llguidance"]
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
STRATEGIES: dict[str, Any] = {
    "grammar": "grammar",
    "prompt_lookup": PromptLookup(branches=2),
    "lookahead": Lookahead(),
    "ngram": "ngram",
    "chain": Speculative(length=4),
    "static tree": Speculative(tree="static"),
    "dynamic tree": Speculative(tree="dynamic", nodes=8),
    "threshold": Threshold(max_length=6),
    "threshold tree": Threshold(tree="dynamic"),
    "staged": Staged(),
    "grammar drafts for the draft": Staged(stage="grammar"),
    "merged": "grammar+prompt_lookup",
}
SAMPLED = dict(do_sample=True, seed=5, temperature=0.9, top_k=0)


def byte_level(merges: int | None = None, more: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """Two special tokens, all bytes, some pairs, of which the first `merges` are ever written."""
    pairs = [
        *more,
        ('"', ":"),
        ("0", "0"),
        ("1", "9"),
        ("2", "0"),
        ("n", "a"),
        ("m", "e"),
        ("a", "g"),
        ('"', ","),
        ("{", '"'),
    ]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<end>", *alphabet, *(a + b for a, b in pairs)]
    assert len(names) <= SIZE
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=pairs[:merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = token_decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level()


def llama(seed: int, layers: int) -> PreTrainedModel:
    options = dict(ARCHITECTURES["llama"].options) | {"vocab_size": SIZE, "num_hidden_layers": layers}
    return Architecture("llama", MappingProxyType(options))(seed)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return decoders.enable(llama(0, 2), tokenizer=tokenizer)


@functools.cache
def draft() -> PreTrainedModel:
    return llama(0, 1)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every backend in turn, as the default one."""
    monkeypatch.setenv("DECODERS_CONSTRAINT_BACKEND", request.param)
    return str(request.param)


def run(model: PreTrainedModel, strategy: Any = "autoregressive", rows: int = 1, **options: Any) -> Any:
    needs = getattr(strategy, "needs_assistant", False)
    options = dict(max_new_tokens=48, eos_token_id=END, decoders_config=EAGER) | options
    return decode(model, prompts(rows), strategy, **options, **({"assistant_model": draft()} if needs else {}))


def texts(tokenizer: PreTrainedTokenizerFast, out: Any) -> list[str]:
    prompt = prompts()["input_ids"].shape[1]
    return tokenizer.batch_decode(out.sequences[:, prompt:], skip_special_tokens=True)


PLAIN: dict[tuple[str, bool], Any] = {}


def draws_of(strategy: Any, **more: Any) -> list[dict[str, Any]]:
    """Greedy, or sampled with `more`: in turns of two strategies, so that either meets both backends."""
    place = list(STRATEGIES.values()).index(strategy)
    return [SAMPLED | more] if place // 2 % 2 else [{}]


#: Forms of drafts that others in the quick run have as well.
ALIKE = ("ngram", "static tree", "threshold", "threshold tree", "lookahead", "grammar drafts for the draft")


@pytest.mark.in_turns
@pytest.mark.parametrize("name", slow_but(STRATEGIES.keys() - ALIKE, STRATEGIES))
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_every_strategy_writes_the_same_legal_texts(model, tokenizer, backend, name):
    """A grammar for each row, one row without; greedy or sampled."""
    strategy = STRATEGIES[name]
    grammars = [decoders.regex(DATE), decoders.json_schema(PERSON), None, decoders.choice(["yes", "no", "not at all"])]
    for draw in draws_of(strategy):
        if (backend, bool(draw)) not in PLAIN:
            PLAIN[backend, bool(draw)] = run(model, rows=4, grammar=grammars, **draw)
        plain = PLAIN[backend, bool(draw)]
        out = run(model, strategy, rows=4, grammar=grammars, **draw)
        assert torch.equal(plain.sequences, out.sequences)
        uses = out.report.grammars
        assert [use and use.backend for use in uses] == [backend, backend, None, backend]
        assert all(use is None or use.complete for use in uses)
        date, person, _, answer = texts(tokenizer, out)
        assert re.fullmatch(DATE, date) and answer in ("yes", "no", "not at all")
        parsed = json.loads(person)
        assert len(parsed["name"]) <= 5 and 0 <= parsed["age"] <= 120


def test_both_backends_allow_the_same_tokens(model, monkeypatch):
    """They read one language in two notations: the same draw gives the same text."""
    drawn = []
    for name in BACKENDS:
        monkeypatch.setenv("DECODERS_CONSTRAINT_BACKEND", name)
        specs = [decoders.json_schema(PERSON), decoders.regex(DATE), decoders.regex("[a-f]{3,9}(,[0-9]{2})*")]
        drawn.append(run(model, rows=3, grammar=specs, **SAMPLED).sequences)
    assert torch.equal(*drawn)


@pytest.mark.parametrize("verifier", ["rejection", "block", "tree_rejection"])
@pytest.mark.parametrize("strategy", [Speculative(length=3), PromptLookup()], ids=["speculative", "prompt_lookup"])
def test_other_verifiers_draw_legal_texts(model, tokenizer, verifier, strategy):
    out = run(model, strategy, rows=3, grammar=decoders.regex(DATE), verifier=verifier, **SAMPLED)
    assert all(re.fullmatch(DATE, text) for text in texts(tokenizer, out))


@pytest.mark.parametrize(
    ("asked", "accepts"),
    [
        ("iso_date", lambda text: re.fullmatch(r"\d{4}-\d\d-\d\d", text)),
        (Literal["left", "right"], lambda text: text in ("left", "right")),
        (bool, lambda text: text in ("True", "False")),
        (decoders.grammar('start: "(" start ")" | "x"'), lambda text: re.fullmatch(r"(\(*)x(\)*)", text)),
        ({"enum": [1, "two", None]}, lambda text: json.loads(text) in (1, "two", None)),
    ],
    ids=["library", "literal", "type", "lark", "schema"],
)
def test_whatever_can_be_asked_for(model, tokenizer, asked, accepts):
    out = run(model, grammar=asked, max_new_tokens=200, **SAMPLED)
    if out.report.grammars[0].complete:
        assert accepts(texts(tokenizer, out)[0])
    else:
        assert out.report.new_tokens == [200], "a text ends only where its grammar does"


def test_the_end_is_allowed_only_where_the_text_may_end(model, tokenizer):
    out = run(model, grammar=decoders.regex("[ab]{6}"))
    assert re.fullmatch("[ab]{6}", texts(tokenizer, out)[0]) and out.sequences[0, -1] == END
    cut = run(model, grammar=decoders.regex("[ab]{60}"), max_new_tokens=10)
    assert not cut.report.grammars[0].complete and END not in cut.sequences[0, -10:]


def test_every_stop_token_ends_a_text_and_none_is_part_of_it(model, tokenizer):
    """A stop token that spells a character is no character any more."""
    letter = tokenizer.convert_tokens_to_ids("a")
    out = run(model, grammar=decoders.regex("[abc]{4}"), eos_token_id=[END, letter], **SAMPLED)
    prompt = prompts()["input_ids"].shape[1]
    written = out.sequences[0, prompt:].tolist()
    assert letter not in written[:-1] and written[-1] in (END, letter) and out.report.grammars[0].complete
    assert re.fullmatch("[bc]{4}", tokenizer.decode(written[:-1]))


def test_a_text_that_its_grammar_ends_is_not_made_longer(model, tokenizer):
    plain = run(model, grammar=decoders.regex("[ab]{3}"), min_new_tokens=12)
    assert plain.report.new_tokens == [4]
    longer = run(model, grammar=decoders.regex("[ab]*"), min_new_tokens=12)
    assert longer.report.new_tokens[0] >= 12


class OnlyZ(LogitsProcessor):
    """Allows nothing but one token, whatever the grammar says."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, float("-inf"))
        only[:, self.token] = scores[:, self.token]
        return only


@pytest.mark.parametrize("strategy", ["autoregressive", "grammar", "prompt_lookup"])
def test_processors_on_the_host_see_masked_scores(model, tokenizer, strategy):
    grammar = [decoders.json_schema(PERSON), decoders.regex(DATE)]
    out = run(model, strategy, rows=2, grammar=grammar, repetition_penalty=1.4)
    assert torch.equal(out.sequences, run(model, rows=2, grammar=grammar, repetition_penalty=1.4).sequences)
    assert all(use.complete for use in out.report.grammars)
    z = tokenizer.convert_tokens_to_ids("z")
    out = run(model, strategy, grammar=decoders.regex("[xyz]{4}"), logits_processor=LogitsProcessorList([OnlyZ(z)]))
    assert texts(tokenizer, out) == ["zzzz"], "what a processor leaves is taken, and the end where it leaves nothing"


class Force(LogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self.token] = 0
        return forced


@pytest.mark.parametrize("draw", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_processor_cannot_force_what_the_grammar_forbids(model, tokenizer, draw):
    """It can where that is legal; elsewhere nothing is left of its scores, and the grammar's remain."""
    z = tokenizer.convert_tokens_to_ids("z")
    options = dict(logits_processor=LogitsProcessorList([Force(z)]), output_scores=True, **draw)
    out = run(model, grammar=decoders.regex("[ab][xyz][ab]"), **options)
    assert re.fullmatch("[ab]z[ab]", texts(tokenizer, out)[0])
    assert [int(torch.isfinite(step).sum()) for step in out.scores] == [2, 1, 2, 1]


def test_scores_say_what_was_illegal_and_logits_do_not(model):
    out = run(model, grammar=decoders.regex("[ab]{2}"), output_scores=True, output_logits=True)
    assert all(torch.isneginf(step).sum() >= SIZE - 3 for step in out.scores)
    assert all(torch.isfinite(step).all() for step in out.logits)


def test_rows_of_one_prompt_share_its_grammar(model, tokenizer):
    grammars = [decoders.regex("[ab]{5}"), decoders.regex("[cd]{5}")]
    out = run(model, rows=2, grammar=grammars, num_return_sequences=2, **SAMPLED)
    shapes = [re.fullmatch("[ab]{5}", t) is not None for t in texts(tokenizer, out)]
    assert shapes == [True, True, False, False]


def test_a_grammar_is_compiled_once(model):
    asked = decoders.regex("[ab]{2,7}c?")
    first, second = (run(model, grammar=asked).report.grammars[0] for _ in range(2))
    assert (first.source, second.source) == ("compiled", "memory")
    assert first.nbytes == second.nbytes and first.name == second.name


def test_compiled_grammars_are_kept_in_a_folder_on_request(model, tmp_path):
    asked, config = decoders.regex("[ab]{2,8}d?", backend="table"), EAGER | {"constraint_cache": str(tmp_path)}
    assert run(model, grammar=asked, decoders_config=config).report.grammars[0].source == "compiled"
    forget()
    assert run(model, grammar=asked, decoders_config=config).report.grammars[0].source == "disk"


def test_a_compiled_grammar_can_be_given(model, tokenizer):
    vocabulary = vocabulary_of(tokenizer, SIZE, [END])
    ready = compiled(decoders.regex("[ab]{4}"), vocabulary, resolve_backend("auto")).grammar
    assert isinstance(ready, CompiledGrammar)
    out = run(model, grammar=ready)
    assert out.report.grammars[0].source == "given" and re.fullmatch("[ab]{4}", texts(tokenizer, out)[0])
    with pytest.raises(UnsupportedError, match=r"stop tokens \[1\]; this call has 288 tokens and stop tokens \[1, 5\]"):
        run(model, grammar=ready, eos_token_id=[1, 5])


def test_a_grammar_compiled_for_another_tokenizer_is_refused(model, tokenizer):
    """Of as many tokens: each would mean something else."""
    ready = compiled(decoders.regex("[ab]{4}"), vocabulary_of(tokenizer, SIZE, [END]), resolve_backend("auto")).grammar
    with pytest.raises(GrammarError, match=r"is for another tokenizer: token 258 is b'\":' there and b'ab' here"):
        run(model, grammar=ready, tokenizer=byte_level(more=[("a", "b")]))


def test_a_tokenizer_that_was_changed_between_two_calls_is_read_anew(model):
    mine = byte_level()
    assert "1" in texts(mine, run(model, grammar=decoders.regex("1+"), tokenizer=mine))[0]
    mine.add_special_tokens({"additional_special_tokens": ["1"]})  # an old token: there are as many as before
    out = run(model, grammar=decoders.regex("[12]{40}"), tokenizer=mine)
    assert texts(mine, out)[0] == "2" * 40
    mine.add_tokens(["222222"])
    out = run(model, grammar=decoders.regex("[12]{40}"), tokenizer=mine, **SAMPLED)
    assert mine.convert_tokens_to_ids("222222") in out.sequences[0] and texts(mine, out)[0] == "2" * 40


def test_tokenizers_with_the_same_tokens_may_write_them_differently(model):
    """A canonical grammar is compiled for each."""
    spec = decoders.regex('na: "', policy="canonical")
    for merges, spelt in ((None, ["na", ":", "Ġ", '"']), (0, ["n", "a", ":", "Ġ", '"'])):
        mine = byte_level(merges)
        out = run(model, grammar=spec, tokenizer=mine)
        written = mine.convert_ids_to_tokens(out.sequences[0, prompts()["input_ids"].shape[1] :])
        assert written == [*spelt, "<end>"]


def test_a_report_names_what_was_asked_for_though_it_was_compiled_under_another_name(model):
    pattern = decoders.regex(decoders.constraints.library.read("semver"))
    assert [run(model, grammar=each).report.grammars[0].name for each in ("semver", pattern)] == [
        "semver",
        pattern.language().name,
    ]


def test_few_tokenizers_are_kept(model):
    first = byte_level()
    kept = weakref.ref(first)
    run(model, grammar=decoders.regex("a"), tokenizer=first)
    del first
    for _ in range(KEPT):
        run(model, grammar=decoders.regex("a"), tokenizer=byte_level())
    forget()
    gc.collect()
    assert kept() is None


def test_the_mask_policy_is_part_of_the_specification(model, tokenizer):
    """Canonical: where the bytes are forced, the tokenizer's own spelling is the only one."""
    forced = r'\{"name": "na"\}'
    canonical = run(model, grammar=decoders.regex(forced, policy="canonical"), **SAMPLED)
    prompt = prompts()["input_ids"].shape[1]
    written = canonical.sequences[0, prompt:-1].tolist()
    assert tokenizer.decode(written) == '{"name": "na"}'
    assert len(written) <= len(tokenizer('{"name": "na"}')["input_ids"]) + 1
    assert canonical.report.grammars[0].policy == "canonical"


def test_a_lenient_schema_is_judged_at_the_end(model):
    """Eleven of ten letters repeat one. Strictly the schema is refused; otherwise the text is kept, and reported."""
    letters = {"type": "string", "pattern": "^[a-j]$"}
    schema = {"type": "array", "items": letters, "minItems": 11, "maxItems": 11, "uniqueItems": True}
    with pytest.raises(GrammarError, match="uniqueItems") as refused:
        run(model, grammar=decoders.json_schema(schema))
    assert (refused.value.keyword, refused.value.path) == ("uniqueItems", "$")
    with pytest.warns(UserWarning, match="row 0: .*breaks uniqueItems"):
        out = run(model, grammar=decoders.json_schema(schema, strict=False), max_new_tokens=150)
    use = out.report.grammars[0]
    assert (
        use.complete
        and "breaks uniqueItems" in use.invalid
        and any("uniqueItems" in warning for warning in use.warnings)
    )


class Even(BaseModel):
    n: Annotated[int, Field(ge=1, le=3)]

    @field_validator("n")
    @classmethod
    def _even(cls, n: int) -> int:
        if n % 2:
            raise ValueError("an odd number")
        return n


def test_a_type_with_conditions_of_its_own_judges_the_finished_text(model, tokenizer):
    """A validator is no part of the schema: whether the text passes it stands in the report."""
    outcomes = set()
    for seed in range(12):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = run(model, grammar=Even, **SAMPLED | {"seed": seed})
        use, text = out.report.grammars[0], texts(tokenizer, out)[0]
        odd = json.loads(text)["n"] % 2 == 1
        assert use.complete and bool(use.invalid) is odd is bool(caught)
        assert not odd or "$.n: Value error, an odd number" in use.invalid
        outcomes.add(odd)
    assert outcomes == {True, False}
    assert any("validators" in warning for warning in use.warnings) and use.source == "memory"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(grammar="iso_dat"), UnknownNameError, "Did you mean 'iso_date'"),
        (dict(grammar=3), GrammarError, "grammar=3 is not a grammar"),
        (dict(grammar=["iso_date", "json"]), GrammarError, "a list of 2 for 1 prompt"),
        (dict(grammar="iso_date", eos_token_id=None), UnsupportedError, "needs a token that ends the text"),
        (
            dict(grammar="iso_date", eos_token_id=[-1]),
            UnsupportedError,
            r"needs a token.*eos_token_id=\[-1\] has none of",
        ),
        (
            dict(grammar=decoders.regex("[0-9]*"), eos_token_id=[10**6]),
            UnsupportedError,
            "has none of the model's 288 tokens",
        ),
        (dict(strategy="grammar"), UnsupportedError, "strategy 'grammar' needs grammar="),
        (dict(grammar=decoders.regex("a", backend="tabel")), UnknownNameError, "Did you mean 'table'"),
    ],
)
def test_what_cannot_be_had_is_refused(model, options, error, message):
    before = dict(vars(model))
    with pytest.raises(error, match=message):
        run(model, **options)
    assert dict(vars(model)) == before


def test_a_grammar_needs_a_tokenizer_that_knows_bytes(letters):
    bare = decoders.enable(tiny_model("llama"))
    with pytest.raises(UnsupportedError, match=r"need a tokenizer: pass tokenizer= to enable\(\) or generate\(\)"):
        run(bare, grammar="iso_date")
    with pytest.raises(UnsupportedError, match="neither a byte-level tokenizer nor one with byte fallback"):
        run(bare, grammar="iso_date", tokenizer=letters)
    with pytest.raises(SettingsError, match="grammar needs a strategy"):
        bare.generate(**prompts(), grammar="iso_date")


def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guides stay on the device, as on CUDA, though this one is the CPU."""

    def of(*args: Any, shared: bool) -> DeviceGuide:
        made = DeviceGuide.of(*args)
        assert made is not None and not shared
        return made

    monkeypatch.setattr(batch.HostGuide, "of", of)


@pytest.mark.parametrize("name", slow_but(["prompt_lookup", "dynamic tree"], STRATEGIES))
def test_a_guide_on_the_device_leads_to_the_same_texts(model, monkeypatch, name):
    strategy = STRATEGIES[name]
    monkeypatch.setenv("DECODERS_CONSTRAINT_BACKEND", "table")
    grammars = [decoders.regex(DATE), decoders.json_schema(PERSON), None, decoders.choice(["yes", "no", "not at all"])]
    for draw in draws_of(strategy, repetition_penalty=1.3):
        host = run(model, strategy, rows=4, grammar=grammars, **draw)
        with monkeypatch.context() as patch:
            on_device(patch)
            out = run(model, strategy, rows=4, grammar=grammars, **draw)
        assert torch.equal(host.sequences, out.sequences)
        assert host.report.steps == out.report.steps and host.report.accepted == out.report.accepted
        assert host.report.drafted == out.report.drafted


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["rejection", "block", "tree_rejection"])
def test_other_verifiers_draw_the_same_with_a_guide_on_the_device(model, monkeypatch, verifier):
    monkeypatch.setenv("DECODERS_CONSTRAINT_BACKEND", "table")
    options = dict(rows=2, grammar=[decoders.json_schema(PERSON), None], verifier=verifier, **SAMPLED)
    host = run(model, Speculative(length=3), **options)
    on_device(monkeypatch)
    assert torch.equal(host.sequences, run(model, Speculative(length=3), **options).sequences)


RECORDED = {
    "autoregressive": "autoregressive", "grammar": "grammar", "prompt_lookup": PromptLookup(branches=2),
    "chain": Speculative(length=3), "static tree": Speculative(tree="static"),
    "dynamic tree": Speculative(tree="dynamic", nodes=8), "staged": Staged(), "merged": "grammar+prompt_lookup",
    "short staged": Staged(stage="prompt_lookup", passes=2),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(["grammar"], RECORDED))
def test_steps_with_a_guide_on_the_device_are_recorded_and_replayed(model, tokenizer, monkeypatch, name):
    """Masks and commits are part of the recorded step, in which nothing waits and no shape changes; a later call replays it."""
    strategy = RECORDED[name]
    monkeypatch.setenv("DECODERS_CONSTRAINT_BACKEND", "table")
    options = dict(rows=3, grammar=[decoders.json_schema(PERSON), None, decoders.regex(DATE)], **SAMPLED)
    host = run(model, strategy, **options)
    target, recorder = llama(0, 2), TapeRecorder()
    monkeypatch.setattr(host_reads, "static_shapes", lambda device: True)
    monkeypatch.setattr(engine, "recorder_of", lambda device: recorder)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    decoders.enable(target, tokenizer=tokenizer)
    for _ in range(3):  # two sessions keep the texts of two calls, each with its recording
        out = run(target, strategy, **options | dict(decoders_config={}))
        assert torch.equal(host.sequences, out.sequences) and host.report.steps == out.report.steps
    assert recorder.recorded == 2 and recorder.replayed > out.report.steps


@pytest.mark.parametrize("grammar", ["iso_date", PERSON], ids=["name", "schema"])
def test_a_generation_config_holds_a_grammar(model, tokenizer, tmp_path, grammar):
    given = GenerationConfig(strategy="grammar", grammar=grammar, do_sample=False, eos_token_id=END, max_new_tokens=48)
    given.save_pretrained(tmp_path)
    saved = GenerationConfig.from_pretrained(tmp_path)
    for config in given, saved:
        out = model.generate(**prompts(), generation_config=config, decoders_config=EAGER)
        assert torch.equal(out, run(model, "grammar", grammar=config.grammar).sequences)
    called = model.generate(
        **prompts(), generation_config=config, decoders_config=EAGER, grammar=decoders.choice(["call"])
    )
    assert tokenizer.decode(called[0, -5:], skip_special_tokens=True).endswith("call")


def test_a_generation_config_holds_what_json_can(model):
    config = GenerationConfig(strategy="grammar", grammar=["iso_date"], max_new_tokens=4)
    with pytest.raises(
        SettingsError, match=r"grammar in the generation config must be a str or a mapping, not \['iso_date'\]"
    ):
        model.generate(**prompts(), generation_config=config)


@pytest.mark.parametrize(
    "faulty",
    [
        {"type": "strng"},
        [{"type": "strng"}],
        re.compile(r"(?!x)y"),
        decoders.grammar("start: WORD\nWRD: /[a-z]+/"),
        decoders.tagged({"<a>": (decoders.grammar("start: WORD"), "</a>")}),
        "iso_dte",
    ],
    ids=["schema", "listed", "pattern", "lark", "tagged", "name"],
)
def test_a_faulty_grammar_is_refused_before_an_engine_is_made(
    tokenizer: PreTrainedTokenizerFast, faulty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoders.enable(llama(0, 1), tokenizer=tokenizer)
    monkeypatch.setattr("decoders.hf.wrapper.Engine", lambda *given, **options: pytest.fail("an engine was made"))
    with pytest.raises((GrammarError, UnknownNameError), match=r"strng|WORD|look-around|iso_dte"):
        decode(model, prompts(1), PromptLookup(), max_new_tokens=2, grammar=faulty, eos_token_id=1)


def test_a_misspelt_keyword_gets_a_warning(model: PreTrainedModel) -> None:
    schema = {"type": "string", "maxLength": 2, "x-typ": 1, "maxLenght": 1}
    with pytest.warns(UserWarning, match="'maxLenght' is not a keyword and has no effect: did you mean 'maxLength'"):
        decode(model, prompts(1), PromptLookup(), max_new_tokens=2, grammar=schema, eos_token_id=1)
