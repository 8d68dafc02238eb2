"""A draft model that drafts text, which is written anew in the target's tokens."""

from __future__ import annotations

import functools
import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders.common import host_reads
from decoders.constraints.vocabulary import Vocabulary
from decoders.engine.decode.proposer import Proposer
from decoders.errors import UnsupportedError
from decoders.strategies import Speculative, text_drafter
from decoders.strategies.text_drafter import TranslatedText

from ..vocabularies import model, tokenizer

TEXT = "def load(path): return path.read() # load the path, größer als 1€, and return all data of the file\n"
EAGER = {"compile": False}


def bytes_of(tokens: PreTrainedTokenizerFast) -> Vocabulary:
    return Vocabulary.of(tokens, len(tokens), [])


@functools.cache
def pair() -> tuple[PreTrainedModel, PreTrainedModel, Any, Any]:
    own, other = tokenizer(340, TEXT), tokenizer(290, "a file is a file, and a path a path")
    return decoders.enable(model(len(own), 0), own), model(len(other), 1), own, other


@pytest.mark.parametrize("piece", [1, 2, 5])
def test_a_text_that_grows_is_written_as_the_draft_would_write_it(piece: int) -> None:
    own, other = bytes_of(tokenizer(340, TEXT)), bytes_of(tokenizer(290, "a file is a file"))
    tokens, row = own.encoded((TEXT * 4).encode()), TranslatedText(own, other, (0,))
    for first in range(0, len(tokens), piece):
        row.read(tokens[first : first + piece])
        written = own.spell(tokens[: first + piece])
        assert other.spell(row.ids) + row.pending == written == row.text
        assert len(row.pending) < 4
        row.valid = len(row.ids)
    assert row.ids == [0, *other.encoded((TEXT * 4).encode())]


def test_a_row_keeps_what_the_draft_model_has_read_of_it() -> None:
    own, other = bytes_of(tokenizer(340, TEXT)), bytes_of(tokenizer(290, "a file is a file"))
    tokens, row = own.encoded((TEXT * 4).encode()), TranslatedText(own, other, ())
    row.read(tokens[:60])
    row.valid = len(row.ids)
    before = list(row.ids)
    row.read(tokens[60:62])
    assert row.valid > len(before) - 8 and row.ids[: row.valid] == before[: row.valid]


def test_a_step_encodes_only_the_end_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = bytes_of(tokenizer(340, TEXT)), bytes_of(tokenizer(290, "a file is a file"))
    tokens, row = own.encoded((TEXT * 4).encode()), TranslatedText(own, other, ())
    row.read(tokens[:-1])
    encoded, encode = [], Vocabulary.encoded
    monkeypatch.setattr(Vocabulary, "encoded", lambda *given: encoded.append(len(given[1])) or encode(*given))
    row.read(tokens[-1:])
    assert encoded[0] < len(TEXT)


def test_what_is_drafted_comes_back_in_the_targets_tokens() -> None:
    own, other = bytes_of(tokenizer(340, TEXT)), bytes_of(tokenizer(290, "a file is a file"))
    tokens = own.encoded(TEXT.encode())
    for cut in range(1, len(tokens)):
        row = TranslatedText(own, other, ())
        row.read(tokens[:cut])
        rest = row.pending + TEXT.encode()[len(row.text) :]
        assert own.spell(row.proposed(other.encoded(rest))) == TEXT.encode()[len(row.text) :]
    row = TranslatedText(own, other, ())
    row.read(tokens[:20])
    assert row.proposed(other.encoded(TEXT.encode()[len(row.text) :])) == tokens[20:]
    assert row.proposed([0, *other.encoded(b"more")]) == []  # its end token ends a draft


@pytest.mark.in_turns
@pytest.mark.parametrize("strategy", ["speculative", "suffix+speculative", "auto"])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
def test_the_text_is_that_of_plain_decoding(strategy: str, sampling: dict[str, Any]) -> None:
    target, draft, own, other = pair()
    ids = torch.tensor([own(TEXT)["input_ids"][:16], own(TEXT)["input_ids"][4:20]])
    options = dict(max_new_tokens=24, decoders_config=EAGER, **sampling)
    plain = target.generate(ids, strategy="autoregressive", **options)
    config = {"alignment": "strings"} if "+" not in strategy else {"speculative": {"alignment": "strings"}}
    if strategy == "auto":
        config = {}
    drafted = target.generate(
        ids, strategy=strategy, strategy_config=config, assistant_model=draft, assistant_tokenizer=other, **options
    )
    assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2"])
def test_drafts_of_other_designs(architecture: str) -> None:
    """Learned positions; layers with a window."""
    target, _, own, other = pair()
    ids = torch.tensor([own(TEXT * 2)["input_ids"][:50]])
    options = dict(max_new_tokens=12, do_sample=False, decoders_config=EAGER)
    drafted = target.generate(
        ids, strategy="speculative", strategy_config={"alignment": "strings"}, assistant_model=model(len(other), 1, architecture),
        assistant_tokenizer=other, **options,
    )  # fmt: skip
    assert drafted.tolist() == target.generate(ids, strategy="autoregressive", **options).tolist()


def test_a_row_that_exceeds_a_cache_that_does_not_grow_gets_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; the draft model's tokens are single bytes."""
    own, other = tokenizer(340, TEXT), tokenizer(258, "zq")
    target, draft = decoders.enable(model(len(own), 0), own), model(len(other), 1)
    long = torch.tensor(own(TEXT * 12)["input_ids"][:300])
    ids, mask = torch.stack([long, long]), torch.ones(2, 300, dtype=torch.int64)
    mask[1, :-8] = 0
    options = dict(max_new_tokens=8, do_sample=False, decoders_config=EAGER, attention_mask=mask)
    plain = target.generate(ids, strategy="autoregressive", **options)

    class OfFixedSize(text_drafter.TextDrafter):
        def __init__(self, context: Any, *given: Any) -> None:
            super().__init__(context, *given)
            self.capacity = context.slots

    monkeypatch.setattr("decoders.strategies.speculative.TextDrafter", OfFixedSize)
    monkeypatch.setattr(host_reads, "static_shapes", lambda device: True)
    out = target.generate(
        ids, strategy="speculative", strategy_config={"alignment": "strings"}, assistant_model=draft, assistant_tokenizer=other,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    assert out.sequences.tolist() == plain.tolist() and out.report.drafted > 0


def test_a_draft_with_the_targets_own_weights_is_accepted_and_the_report_says_how_it_drafts(monkeypatch) -> None:
    """The same model with its tokens, single bytes, in another order; prompts of one pass and of several."""
    own = tokenizer(257, TEXT)
    target = decoders.enable(model(len(own), 0), own)
    order = [*range(1, len(own)), 0]
    parts = json.loads(own.backend_tokenizer.to_str())
    parts["model"]["vocab"] = {token: order.index(id) for token, id in parts["model"]["vocab"].items()}
    parts["added_tokens"] = []
    shuffled = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parts)), eos_token="<end>", bos_token="<end>"
    )
    draft, names = model(len(own), 0), bytes_of(own).tokens
    # What is no ASCII is never written: a text of invalid characters has no way to be encoded that both agree on.
    foreign = torch.tensor([name is None or name >= b"\x80" for name in names])
    with torch.no_grad():
        for layer in (m.get_output_embeddings() for m in (target, draft)):
            layer.weight[foreign] = 0
        for layer in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            layer.weight.copy_(layer.weight[torch.tensor(order)].clone())
    monkeypatch.setattr(text_drafter, "CHUNK", 64)
    for size in (25, 400):
        prompt = torch.tensor([own(TEXT * 9)["input_ids"][:size]])
        out = target.generate(
            prompt, strategy=Speculative(alignment="strings", length=4), assistant_model=draft,
            assistant_tokenizer=shuffled, max_new_tokens=20, do_sample=False, eos_token_id=None, return_dict_in_generate=True,
            decoders_config=EAGER,
        )  # fmt: skip
        assert out.report.details["alignment"] == "strings" and out.report.details["shared_tokens"] == 1.0
        assert out.report.mean_accepted_length > 3


def test_auto_drafts_text_in_chains_unless_nearly_all_tokens_are_common() -> None:
    target, draft, own, other = pair()
    ids = torch.tensor([own(TEXT)["input_ids"][:16]])
    options = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True, decoders_config=EAGER)
    chosen = {}
    for tree in ("none", "dynamic"):
        out = target.generate(
            ids, strategy=Speculative(tree=tree, nodes=6), assistant_model=draft, assistant_tokenizer=other, **options
        )
        chosen[tree] = out.report.details["alignment"]
        assert 0.5 < out.report.details["shared_tokens"] < 0.98
    assert chosen == {"none": "strings", "dynamic": "tokens"}
    more = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(own.backend_tokenizer.to_str()), eos_token="<end>"
    )
    more.add_special_tokens({"pad_token": "<pad>", "mask_token": "<mask>"})
    names = {token: id + 2 for token, id in more.get_vocab().items()} | {"<pad>": 0, "<mask>": 1}
    parts = json.loads(own.backend_tokenizer.to_str())
    parts["model"]["vocab"] = {token: names[token] for token in parts["model"]["vocab"]}
    parts["added_tokens"] = []
    moved = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(parts)), eos_token="<end>")
    out = target.generate(
        ids, strategy="speculative", assistant_model=model(len(own) + 2, 1), assistant_tokenizer=moved, **options
    )
    assert out.report.details["alignment"] == "tokens"


def real_model(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(os.environ["DECODERS_REAL_MODELS"]) / name
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)


@pytest.mark.real
def test_gemma_drafts_text_for_smollm() -> None:
    target, tokenizer = real_model("smollm2-135m", torch.float32)
    draft, other = real_model("gemma3-270m", torch.bfloat16)
    decoders.enable(target, tokenizer)
    inputs = tokenizer("1, 2, 3, 4, 5, 6, 7,", return_tensors="pt")
    options = dict(max_new_tokens=24, do_sample=False, return_dict_in_generate=True, decoders_config=EAGER)
    plain = target.generate(**inputs, strategy="autoregressive", **options)
    out = target.generate(**inputs, strategy="speculative", assistant_model=draft, assistant_tokenizer=other, **options)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert out.report.details["alignment"] == "strings" and out.report.mean_accepted_length > 2


def test_strings_and_a_tree_are_refused() -> None:
    target, draft, _, other = pair()
    with pytest.raises(UnsupportedError, match="take tree='none'"):
        target.generate(
            torch.arange(9)[None], strategy=Speculative(alignment="strings", tree="static"), assistant_model=draft,
            assistant_tokenizer=other, max_new_tokens=4, decoders_config=EAGER,
        )  # fmt: skip


def test_a_scheduler_has_one_cache_of_the_draft_model_while_requests_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft, own, other = pair()
    opened: list[int] = []
    module = Proposer._module
    monkeypatch.setattr(
        Proposer, "_module", lambda self, *a, **k: (module(self, *a, **k), opened.append(len(self.modules)))[0]
    )
    ids, lengths = own(TEXT)["input_ids"], (9, 3, 14, 5)
    with decoders.Scheduler(
        target, strategy=Speculative(alignment="strings", length=3), rows=2, slots=128, assistant_model=draft,
        assistant_tokenizer=other, decoders_config=EAGER,
    ) as scheduler:  # fmt: skip
        asked = [
            scheduler.submit(ids[n : n + 12], max_new_tokens=new, do_sample=False) for n, new in enumerate(lengths)
        ]
        written = [generation.result(60).flatten().tolist() for generation in asked]
    assert len(opened) > 1 and set(opened) == {1}
    for n, (tokens, new) in enumerate(zip(written, lengths, strict=True)):
        plain = target.generate(
            torch.tensor([ids[n : n + 12]]),
            strategy="autoregressive",
            max_new_tokens=new,
            do_sample=False,
            decoders_config=EAGER,
        )
        assert tokens == plain[0].tolist()


def test_a_draft_model_that_drafted_text_goes_with_its_last_reference_and_is_as_it_was() -> None:
    target, _, own, other = pair()
    draft = decoders.enable(model(len(other), 2), other)
    before = set(vars(draft))
    target.generate(
        torch.tensor([own(TEXT)["input_ids"][:16]]), strategy=Speculative(alignment="strings"), assistant_model=draft,
        assistant_tokenizer=other, max_new_tokens=4, decoders_config=EAGER,
    )  # fmt: skip
    assert set(vars(draft)) == before
    gone = weakref.ref(draft)
    del draft
    decoders.release(target)
    gc.collect()
    assert gone() is None
