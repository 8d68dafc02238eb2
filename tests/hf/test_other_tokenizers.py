"""A draft model whose tokenizer is not the target's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders.errors import SettingsError, UnsupportedError
from decoders.hf import assistants
from decoders.hf.assistants import Assistants
from decoders.hf.translation import ABSENT, token_map, translated

from ..vocabularies import model, tokenizer

TEXT = "def load(path): return path.read() # load the path of the data and return all data of the file "
EAGER = {"compile": False}


@functools.cache
def pair() -> tuple[PreTrainedModel, PreTrainedModel, Any, Any]:
    own = tokenizer(300, TEXT)
    other = tokenizer(290, TEXT + "a file is a file, and a path a path", "<pad>")
    return decoders.enable(model(len(own), 0), own), model(len(other), 1), own, other


def test_tokens_with_the_same_bytes_are_mapped_and_the_others_are_read_by_their_end():
    target, draft, own, other = pair()
    tokens = token_map(draft, target, own, other)
    assert 0.5 < tokens.shared < 1
    for token, draft_token in enumerate(tokens.written.tolist()):
        if draft_token >= 0:
            assert other.convert_ids_to_tokens(draft_token) == own.convert_ids_to_tokens(token)
            assert tokens.read[token] == draft_token
        else:
            assert own.decode([token]).endswith(other.decode([int(tokens.read[token])]))


def test_tokens_that_the_draft_model_has_no_embedding_for_are_not_read():
    target, _, own, other = pair()
    assert token_map(model(280, 1), target, own, other).read.max() < 280 < len(other)


def test_the_draft_says_in_the_targets_ids_what_it_says_in_its_own():
    target, draft, own, other = pair()
    tokens = token_map(draft, target, own, other)
    twin = translated(draft, target, tokens)
    ids = torch.tensor([own(TEXT)["input_ids"][:20]])
    with torch.no_grad():
        logits, expected = twin(ids).logits, draft(tokens.read[ids]).logits
    present = tokens.written >= 0
    assert torch.allclose(logits[..., present], expected[..., tokens.written[present]], atol=1e-5)
    assert (logits[..., ~present] == ABSENT).all()
    shared = {id(p) for p in draft.parameters()}
    assert sum(id(p) not in shared for p in twin.parameters()) == 3  # embedding, head and its bias
    assert draft.config.vocab_size == len(other)


@pytest.mark.in_turns
@pytest.mark.parametrize("strategy", ["speculative", "threshold", "staged", "suffix+speculative", "auto"])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
def test_the_text_is_that_of_plain_decoding(strategy: str, sampling: dict[str, Any]) -> None:
    target, draft, own, other = pair()
    ids = torch.tensor([own(TEXT)["input_ids"][:16], own(TEXT)["input_ids"][4:20]])
    options = dict(max_new_tokens=24, decoders_config=EAGER, **sampling)
    plain = target.generate(ids, strategy="autoregressive", **options)
    drafted = target.generate(ids, strategy=strategy, assistant_model=draft, assistant_tokenizer=other, **options)
    assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("verifier", ["rejection", "tree_rejection"])
def test_other_verifiers_see_the_restricted_distribution(verifier: str) -> None:
    target, draft, own, other = pair()
    ids = torch.tensor([own(TEXT)["input_ids"][:16]])
    out = target.generate(
        ids, strategy="speculative", assistant_model=draft, assistant_tokenizer=other, verifier=verifier, max_new_tokens=16,
        do_sample=True, seed=1, decoders_config=EAGER,
    )  # fmt: skip
    assert out.shape[1] == 32


def test_a_draft_with_the_targets_own_weights_is_accepted() -> None:
    """The same model with its tokens in another order: what it drafts is right."""
    own = tokenizer(300, TEXT)
    target = decoders.enable(model(len(own), 0), own)
    order = list(range(1, len(own))) + [0]
    vocab = {token: order.index(id) for token, id in own.get_vocab().items()}
    bpe = Tokenizer(models.BPE(vocab, []))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), token_decoders.ByteLevel()
    shuffled = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", bos_token="<end>")
    draft = model(len(own), 0)
    with torch.no_grad():
        for layer in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            layer.weight.copy_(layer.weight[torch.tensor(order)].clone())
    ids = torch.tensor([own(TEXT)["input_ids"][:16]])
    out = target.generate(
        ids, strategy="speculative", assistant_model=draft, assistant_tokenizer=shuffled, max_new_tokens=24, do_sample=False,
        eos_token_id=None, return_dict_in_generate=True, decoders_config=EAGER,
    )  # fmt: skip
    assert out.report.mean_accepted_length > 4


def test_without_a_tokenizer_the_sizes_are_refused_and_the_way_out_is_named() -> None:
    target, draft = decoders.enable(model(300, 0)), model(900, 1)
    options = dict(strategy="speculative", assistant_model=draft, max_new_tokens=8, decoders_config=EAGER)
    with pytest.raises(
        UnsupportedError, match=r"900 ids against the target's 300.*pass tokenizer= and assistant_tokenizer="
    ):
        target.generate(torch.arange(9)[None], **options)


def test_a_folder_without_a_tokenizer_is_read_with_the_given_one(tmp_path: Path) -> None:
    target, draft, own, other = pair()
    draft.save_pretrained(tmp_path)
    ids = torch.tensor([own(TEXT)["input_ids"][:16]])
    options = dict(max_new_tokens=6, do_sample=False, decoders_config=EAGER, return_dict_in_generate=True)
    out = target.generate(
        ids, strategy="threshold", assistant_model=str(tmp_path), assistant_tokenizer=other, **options
    )
    assert out.sequences.equal(target.generate(ids, strategy="autoregressive", **options).sequences)


@pytest.mark.parametrize("strategy", ["threshold", "speculative", "suffix+staged"])
def test_a_tokenizer_of_another_model_than_the_draft_model_is_refused(strategy: str) -> None:
    target, draft, _, _ = pair()
    with pytest.raises(
        SettingsError,
        match="assistant_tokenizer= is not the draft model's: it has 4 tokens, and .* for 290. .* the draft model was",
    ):
        target.generate(
            torch.arange(9)[None],
            strategy=strategy,
            assistant_model=draft,
            assistant_tokenizer=letters(),
            max_new_tokens=6,
        )


def letters() -> PreTrainedTokenizerFast:
    vocab = {token: id for id, token in enumerate(["<end>", "a", "b", "c"])}
    few = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, [])), eos_token="<end>")
    few.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    few.backend_tokenizer.decoder = token_decoders.ByteLevel()
    return few


def test_vocabularies_with_too_little_in_common_are_refused() -> None:
    target, draft = pair()[0], model(4, 1)
    options = dict(strategy="threshold", assistant_model=draft, assistant_tokenizer=letters(), max_new_tokens=8)
    with pytest.raises(UnsupportedError, match="has 1% of the target's tokens, which is too few"):
        target.generate(torch.arange(9)[None], decoders_config=EAGER, **options)


def test_a_draft_made_in_inference_mode_has_no_counters_and_needs_none() -> None:
    target, _, own, other = pair()
    with torch.inference_mode():
        draft = model(len(other), 1)
    ids = torch.tensor([own(TEXT)["input_ids"][:16]])
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, decoders_config=EAGER)
    want = target.generate(ids, strategy="autoregressive", **options)
    for _ in range(2):
        out = target.generate(ids, strategy="speculative", assistant_model=draft, assistant_tokenizer=other, **options)
        assert out.tolist() == want.tolist()


@pytest.mark.parametrize("write", [lambda w: w.neg_(), lambda w: w.data.neg_()], ids=["counted", "data"])
@pytest.mark.parametrize("end", ["get_input_embeddings", "get_output_embeddings"])
def test_what_is_written_into_the_drafts_embedding_or_head_counts(end: str, write: Any) -> None:
    target, _, own, other = pair()
    draft, assistants = model(len(other), 1), Assistants()
    ids = torch.tensor([own(TEXT)["input_ids"][:16]])

    def twin(assistants: Assistants) -> PreTrainedModel:
        return assistants.translated(draft, target, own, other, UnsupportedError("another vocabulary"))

    with torch.no_grad():
        kept = twin(assistants)
        assert twin(assistants) is kept
        before = kept(ids).logits
        write(getattr(draft, end)().weight)
        after = twin(assistants)(ids).logits
        assert not torch.equal(after, before)
        assert torch.equal(after, twin(Assistants())(ids).logits)


def test_a_slow_comparison_of_vocabularies_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(assistants, "SLOW", -1.0)
    target, draft, own, other = pair()
    kept = Assistants()
    with caplog.at_level("INFO", "decoders"):
        for _ in range(2):
            kept.tokens(draft, target, own, other)
    (message,) = (record.getMessage() for record in caplog.records)
    assert f"{len(own)} tokens of the target with {len(other)} of the draft" in message


def test_vocabularies_are_listed_in_the_first_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, own, _ = pair()
    other = tokenizer(285, TEXT + "a path of a path", "<pad>")
    draft, listed = model(len(other), 1), list[Any]()
    usual = PreTrainedTokenizerFast.get_vocab
    monkeypatch.setattr(PreTrainedTokenizerFast, "get_vocab", lambda self: listed.append(self) or usual(self))
    ids = torch.tensor([own(TEXT)["input_ids"][:16]])
    for expected in (True, False):
        listed.clear()
        target.generate(
            ids, strategy="speculative", assistant_model=draft, assistant_tokenizer=other, max_new_tokens=4, decoders_config=EAGER
        )  # fmt: skip
        assert (other in listed) is expected
    other.add_tokens(["another"])
    with pytest.raises(UnsupportedError, match="differs from the target's"):
        assistants.check_vocabulary(target, draft, own, other)
