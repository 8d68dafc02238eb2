"""Which draft models are taken, which are refused and with what words."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import decoders
from decoders.engine.model.weights.quantization import Precision
from decoders.errors import SettingsError, UnsupportedError
from decoders.hf import assistants
from decoders.hf.assistants import PADDING, Assistants, check_vocabulary
from decoders.strategies import PromptLookup, Speculative, Staged, Threshold
from decoders.testing import decode, prompts, tiny_draft, tiny_model
from decoders.testing.models import ARCHITECTURES, VOCAB, Architecture

EAGER = {"compile": False}


def sized(vocab: int) -> PreTrainedModel:
    return Architecture("llama", MappingProxyType(dict(ARCHITECTURES["llama"].options) | {"vocab_size": vocab}))()


def words(**changes: int | None) -> PreTrainedTokenizerFast:
    """A tokenizer of 20 words w0 … w19; `changes` gives words other ids, or takes them away."""
    vocab: dict[str, int | None] = {f"w{i}": i for i in range(20)} | changes
    kept = {word: id for word, id in vocab.items() if id is not None}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(kept, unk_token="w0")), unk_token="w0")


def call(model: PreTrainedModel, strategy: Any = "speculative", **options: Any) -> torch.Tensor:
    return model.generate(
        **prompts(), strategy=strategy, max_new_tokens=6, do_sample=False, decoders_config=EAGER, **options
    )


def plain(model: PreTrainedModel) -> torch.Tensor:
    return decode(model, prompts(), max_new_tokens=6).sequences


def test_tokenizers_that_differ_are_refused_by_what_differs(llama):
    swapped = words(w3=4, w4=3)
    with pytest.raises(UnsupportedError) as error:
        call(llama, assistant_model=tiny_draft("llama"), tokenizer=words(), assistant_tokenizer=swapped)
    for part in ("'w3' is 3 for the target and 4 for the draft", "2 of the target's under another id", "same family"):
        assert part in str(error.value)


def test_a_word_that_the_draft_lacks_is_named(llama):
    with pytest.raises(UnsupportedError, match="'w19' is 19 for the target and absent for the draft"):
        call(llama, assistant_model=tiny_draft("llama"), tokenizer=words(), assistant_tokenizer=words(w19=None))


def test_only_the_first_differences_are_shown(llama):
    moved = words(**{f"w{i}": 19 - i for i in range(20)})
    with pytest.raises(UnsupportedError) as error:
        call(llama, assistant_model=tiny_draft("llama"), tokenizer=words(), assistant_tokenizer=moved)
    assert str(error.value).count("for the target") == 3 and "20 of the target's" in str(error.value)


@pytest.mark.parametrize("other", ["same", "equal", "larger"])
def test_tokenizers_of_the_same_words_are_accepted(llama, other):
    own = words()
    theirs = {"same": own, "equal": copy.deepcopy(own), "larger": words(extra=20)}[other]
    out = call(llama, assistant_model=tiny_draft("llama"), tokenizer=own, assistant_tokenizer=theirs)
    assert torch.equal(out, plain(llama))


def test_a_new_word_among_the_targets_ids_is_refused():
    own, theirs = words(w5=None), words(w5=None, other=5)
    with pytest.raises(UnsupportedError, match="1 unknown to it"):
        check_vocabulary(tiny_model("llama"), tiny_draft("llama"), own, theirs)


@pytest.mark.parametrize("size", [VOCAB - 16, VOCAB + 64, VOCAB + PADDING - 1])
def test_heads_of_sizes_that_padding_explains_are_accepted(llama, size):
    assert torch.equal(call(llama, assistant_model=sized(size)), plain(llama))


def test_sizes_too_far_apart_are_refused_unless_the_tokenizers_speak_for_them(llama):
    draft = sized(VOCAB + PADDING)
    with pytest.raises(
        UnsupportedError, match=f"{VOCAB + PADDING} ids against the target's {VOCAB}.*assistant_tokenizer="
    ):
        call(llama, assistant_model=draft)
    own, theirs = (words(**{f"w{i}": i for i in range(20, VOCAB)}) for _ in range(2))
    out = call(llama, assistant_model=draft, tokenizer=own, assistant_tokenizer=theirs)
    assert torch.equal(out, plain(llama))


@pytest.mark.parametrize(
    ("tokens", "sizes", "fits"),
    [(50_295, (50_304, 51_200), True), (50_295, (51_200, 50_304), True), (4_096, (4_096, 49_152), False)],
)
def test_beside_the_targets_tokenizer_heads_may_be_padded_by_a_part(monkeypatch, tokens, sizes, fits):
    target, draft = tiny_model("llama"), tiny_draft("llama")
    monkeypatch.setattr(assistants, "number_of_logits", lambda model: sizes[model is draft])
    tokenizer: Any = range(tokens)
    with nullcontext() if fits else pytest.raises(UnsupportedError, match="has another vocabulary"):
        check_vocabulary(target, draft, tokenizer, None)


def test_a_missing_draft_model_says_what_to_pass(llama):
    for strategy in ("speculative", "threshold", Staged(stage="prompt_lookup"), "speculative+prompt_lookup"):
        with pytest.raises(UnsupportedError, match="needs assistant_model="):
            call(llama, strategy)


def test_two_draft_models_are_an_error(llama):
    draft = tiny_draft("llama")
    for strategy in (Speculative(draft_model=draft), Threshold(draft_model=draft)):
        with pytest.raises(UnsupportedError, match="has a draft_model in its settings and uses no assistant_model"):
            call(llama, strategy, assistant_model=draft)


def test_a_draft_for_a_strategy_without_one_is_left_out_with_a_warning(llama):
    with pytest.warns(UserWarning, match="'prompt_lookup' drafts without assistant_model"):
        out = call(llama, PromptLookup(), assistant_model=tiny_draft("llama"))
    assert torch.equal(out, call(llama, PromptLookup()))


@pytest.mark.parametrize("config", ["object", "dict"])
def test_a_loaded_draft_in_the_settings(llama, config):
    draft = tiny_draft("llama")
    if config == "object":
        out = call(llama, Speculative(draft_model=draft))
    else:
        out = call(llama, "speculative", strategy_config={"draft_model": draft, "length": 3})
    assert torch.equal(out, plain(llama))


def test_something_that_is_no_model_is_refused(llama):
    with pytest.raises(SettingsError, match="draft_model"):
        call(llama, "speculative", strategy_config={"draft_model": 7})


def test_a_path_that_does_not_exist(llama, tmp_path):
    missing = str(tmp_path / "nothing")
    with pytest.raises(UnsupportedError, match="cannot be loaded"):
        call(llama, Speculative(draft_model=missing))
    assert torch.equal(call(llama, "prompt_lookup"), plain(llama)), "the model stays usable"


def test_a_folder_without_a_model(llama, tmp_path):
    with pytest.raises(UnsupportedError, match=r"cannot be loaded: .*config\.json"):
        call(llama, Speculative(draft_model=str(tmp_path)))


@pytest.fixture
def saved(tmp_path: Path) -> str:
    tiny_draft("llama").save_pretrained(tmp_path / "draft")
    return str(tmp_path / "draft")


def test_a_path_is_loaded_once_in_the_targets_dtype(saved, monkeypatch):
    import transformers

    loads, load = [], transformers.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loads.append(k) or load(*a, **k)
    )
    model = decoders.enable(tiny_model("llama"))
    for _ in range(2):
        out = decode(model, prompts(), Speculative(draft_model=saved), max_new_tokens=6, decoders_config=EAGER)
        assert torch.equal(out.sequences, plain(model))
        assert out.report.stages[0].model == saved and out.report.settings["draft_model"] == saved
    assert loads == [{"dtype": torch.float32}]


def test_a_path_is_loaded_anew_once_the_target_has_another_dtype(saved):
    model = decoders.enable(tiny_model("llama"))
    call(model, Speculative(draft_model=saved))
    model.bfloat16()
    call(model, Speculative(draft_model=saved))
    ((draft, _),) = vars(model)["generate"]._assistants._loaded.values()
    assert draft.dtype == torch.bfloat16


def test_a_path_in_the_generation_config(saved):
    model = decoders.enable(tiny_model("llama"))
    config = copy.deepcopy(model.generation_config)
    config.strategy, config.strategy_config = "speculative", {"draft_model": saved, "length": 2}
    out = model.generate(
        **prompts(), generation_config=config, max_new_tokens=6, do_sample=False, return_dict_in_generate=True,
        decoders_config=EAGER,
    )  # fmt: skip
    assert torch.equal(out.sequences, plain(model)) and out.report.settings["length"] == 2


def test_the_tokenizer_beside_a_saved_draft_is_compared(saved):
    words(w3=4, w4=3).save_pretrained(saved)
    with pytest.raises(UnsupportedError, match="'w3' is 3 for the target and 4 for the draft"):
        call(decoders.enable(tiny_model("llama")), Speculative(draft_model=saved), tokenizer=words())


def test_a_stage_with_a_path_of_its_own(saved):
    model = decoders.enable(tiny_model("llama"))
    strategy = Staged(stage="speculative", stage_config={"draft_model": saved})
    out = decode(
        model, prompts(2), strategy, assistant_model=tiny_draft("llama"), max_new_tokens=12, decoders_config=EAGER
    )
    assert torch.equal(out.sequences, decode(model, prompts(2), max_new_tokens=12).sequences)
    assert out.report.stages[0].stages[0].model == saved


def test_a_draft_on_another_device_is_refused(llama):
    with pytest.raises(UnsupportedError, match="on meta, the target on cpu: call draft.to"):
        call(llama, assistant_model=tiny_draft("llama").to("meta"))


@pytest.mark.parametrize("name, reason", [("t5", "encoder-decoder"), ("mamba", "recurrent state"), ("bloom", "ALiBi")])
def test_a_draft_of_an_unfit_design_is_refused(llama, name, reason):
    with pytest.raises(UnsupportedError, match=reason):
        call(llama, assistant_model=tiny_model(name))


def test_a_device_without_kernels_is_told_by_the_setting_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = tiny_draft("llama")
    monkeypatch.setattr(type(draft), "device", torch.device("cuda"))
    with pytest.raises(UnsupportedError, match="^draft_weights='int8' works on the CPU so far"):
        Assistants().engine(draft, "auto", Precision("int8"))
